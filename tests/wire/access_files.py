"""Files of access control for a test's broker: grants, tokens, and a key that signs JSON web tokens."""

from __future__ import annotations

import hashlib
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jwt
from cryptography.hazmat.primitives.asymmetric import ec

ISSUER, AUDIENCE = "https://issuer.example", "postdate"

ACCESS = """
[[grant]]
principals = ["token:admin"]
topics = ["*"]
rights = ["produce", "consume", "schedule", "manage", "compact"]

[[grant]]
principals = ["token:shop", "jwt:shop-*"]
topics = ["orders", "orders-*"]
rights = ["produce"]

[[grant]]
principals = ["token:billing", "cert:spiffe://example.org/billing"]
topics = ["orders"]
rights = ["consume"]
subscriptions = ["billing"]
"""


@dataclass
class Files:
    """Files of identities and rights."""

    folder: Path
    key: ec.EllipticCurvePrivateKey = field(default_factory=lambda: ec.generate_private_key(ec.SECP256R1()))

    def __post_init__(self) -> None:
        self.access(ACCESS)
        self.tokens(
            admin="admin-secret", shop="shop-secret", billing="billing-secret", nobody="nobody-secret"
        )
        public = jwt.algorithms.ECAlgorithm.to_jwk(self.key.public_key(), as_dict=True)
        (self.folder / "keys.json").write_text(
            f'{{"keys": [{{"kid": "k1", {str(public)[1:-1]}}}]}}'.replace("'", '"')
        )

    def access(self, text: str) -> None:
        self._replace("access.toml", text)

    def tokens(self, **tokens: str) -> None:
        tables = [
            f'[[token]]\nprincipal = "{name}"\nsha256 = "{hashlib.sha256(token.encode()).hexdigest()}"\n'
            for name, token in tokens.items()
        ]
        self._replace("tokens.toml", "\n".join(tables))

    def jwt(self, *, key: Any = None, algorithm: str = "ES256", **claims: Any) -> str:
        given = {"sub": "shop-1", "iss": ISSUER, "aud": AUDIENCE, "exp": time.time() + 60} | claims
        return jwt.encode(
            {name: value for name, value in given.items() if value is not None},
            self.key if key is None else key,
            algorithm=algorithm,
            headers={"kid": "k1"},
        )

    @property
    def settings(self) -> dict[str, Any]:
        return {
            "access_file": str(self.folder / "access.toml"),
            "tokens_file": str(self.folder / "tokens.toml"),
            "jwt_keys_file": str(self.folder / "keys.json"),
            "jwt_issuer": ISSUER,
            "jwt_audience": AUDIENCE,
            "jwt_leeway_ms": 0,
            "security_recheck_ms": 20,
        }

    def _replace(self, name: str, text: str) -> None:
        (self.folder / f"{name}.new").write_text(text)
        (self.folder / f"{name}.new").replace(self.folder / name)


def bearer(token: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {token}"),)
