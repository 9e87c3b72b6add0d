"""JSON web tokens: keys to check them with, and the name in one. Loaded where there is a file of keys."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

import jwt
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.hazmat.primitives.serialization import load_pem_public_key

from broker.errors import Unauthenticated
from broker.settings import ConfigError

ALGORITHMS = frozenset(
    {"ES256", "ES384", "ES512", "RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "EdDSA"}
)
"""Asymmetric ones only: whoever can check a symmetric signature can make one. `none` is none of them."""

_CURVES = {"secp256r1": "ES256", "secp384r1": "ES384", "secp521r1": "ES512"}
_PEM_KEY = re.compile(r"-----BEGIN PUBLIC KEY-----.+?-----END PUBLIC KEY-----", re.DOTALL)


@dataclass(frozen=True, slots=True)
class JwtKey:
    """A public key, and the algorithms that it is for."""

    key_id: str | None
    key: Any
    algorithms: frozenset[str]


@dataclass(frozen=True, slots=True)
class JwtRules:
    """Conditions that a JSON web token must hold to."""

    keys: tuple[JwtKey, ...]
    algorithms: frozenset[str]
    issuer: str
    audience: str
    leeway_ms: int


def name_in_token(token: str, rules: JwtRules) -> tuple[object, int]:
    """Return the subject of a token, and until when (ms since the epoch) it is good; Unauthenticated."""
    try:
        header = jwt.get_unverified_header(token)
        if "crit" in header:  # it names what must be understood, and we understand none of it
            raise jwt.InvalidTokenError("crit")
        claims = _verified(token, header, rules)
    except jwt.ExpiredSignatureError as error:
        raise Unauthenticated("The token has expired", reason="CREDENTIALS_EXPIRED") from error
    except (jwt.PyJWTError, ValueError, TypeError, OverflowError, RecursionError) as error:
        # Which check failed is for the log of whoever made the token, and a help for whoever forges one.
        raise Unauthenticated(
            "This broker does not accept the token", reason="CREDENTIALS_INVALID"
        ) from error
    return claims["sub"], int(claims["exp"]) * 1000 + rules.leeway_ms


def _verified(token: str, header: dict[str, Any], rules: JwtRules) -> dict[str, Any]:
    """The claims. The token's header chooses among our keys only, and a key is used for its own algorithms only."""
    algorithm = header.get("alg")
    failure: jwt.PyJWTError = jwt.InvalidAlgorithmError("no key")
    for key in rules.keys:
        if key.key_id is not None and "kid" in header and header["kid"] != key.key_id:
            continue
        if algorithm not in key.algorithms & rules.algorithms:
            continue
        try:
            claims: dict[str, Any] = jwt.decode(
                token,
                key.key,
                algorithms=[algorithm],
                issuer=rules.issuer,
                audience=rules.audience,
                leeway=rules.leeway_ms / 1000,
                options={"require": ["exp", "iss", "aud", "sub"]},
            )
        except jwt.InvalidSignatureError as error:
            failure = error  # perhaps by another of our keys
        else:
            return claims
    raise failure


def parse_algorithms(text: str) -> frozenset[str]:
    """Raises ConfigError unless all are asymmetric ones that are known."""
    named = frozenset(name.strip() for name in text.split(",") if name.strip())
    if not named or not named <= ALGORITHMS:
        wrong = ", ".join(sorted(named - ALGORITHMS)) or "nothing"
        raise ConfigError(
            f"jwt_algorithms: unknown algorithm {wrong}; the algorithms are {', '.join(sorted(ALGORITHMS))}"
        )
    return named


def parse_jwt_keys(text: str) -> tuple[JwtKey, ...]:
    """Public keys of a JWKS or PEM file; ConfigError. Keys of other kinds are left out, but one must be there."""
    try:
        keys = _jwks(json.loads(text)) if text.lstrip().startswith("{") else _pem_keys(text)
    except (ValueError, TypeError, AttributeError, KeyError, UnsupportedAlgorithm, jwt.PyJWTError) as error:
        raise ConfigError(f"it is neither a JWKS nor PEM with public keys: {error}") from error
    if not keys:
        raise ConfigError("it contains no public key to verify signatures with")
    return keys


def _jwks(document: dict[str, Any]) -> tuple[JwtKey, ...]:
    keys = []
    for entry in document.get("keys", [document]):
        if entry.get("kty") == "oct":
            raise ConfigError(
                "it contains a symmetric key (oct): whoever can check tokens with it can also forge them"
            )
        if entry.get("kty") not in ("RSA", "EC", "OKP") or entry.get("use", "sig") != "sig":
            continue
        key = jwt.PyJWK.from_dict({**entry, "alg": entry.get("alg") or _any_algorithm(entry)}).key
        algorithms = _algorithms_of(key)
        if entry.get("alg"):
            algorithms &= {entry["alg"]}
        if algorithms:
            keys.append(JwtKey(entry.get("kid"), _public(key), algorithms))
    return tuple(keys)


def _any_algorithm(entry: dict[str, Any]) -> str:
    """One that PyJWT reads such a key by, where the entry names none."""
    curves = {"P-256": "ES256", "P-384": "ES384", "P-521": "ES512"}
    return {"RSA": "RS256", "OKP": "EdDSA"}.get(entry["kty"]) or curves[entry["crv"]]


def _public(key: Any) -> Any:
    return key.public_key() if hasattr(key, "public_key") else key


def _pem_keys(text: str) -> tuple[JwtKey, ...]:
    keys = [load_pem_public_key(pem.encode()) for pem in _PEM_KEY.findall(text)]
    return tuple(JwtKey(None, key, _algorithms_of(key)) for key in keys if _algorithms_of(key))


def _algorithms_of(key: Any) -> frozenset[str]:
    key = _public(key)
    if isinstance(key, rsa.RSAPublicKey):
        return (
            frozenset(algorithm for algorithm in ALGORITHMS if algorithm[0] in "RP")
            if key.key_size >= 2048
            else frozenset()
        )
    if isinstance(key, ec.EllipticCurvePublicKey):
        return frozenset({_CURVES.get(key.curve.name, "")} - {""})
    return frozenset({"EdDSA"}) if isinstance(key, ed25519.Ed25519PublicKey) else frozenset()
