"""Identity: static tokens, JSON web tokens and client certificates become a principal.

    token:NAME   a token whose SHA-256 stands in the tokens file
    jwt:SUB      a JSON web token, signed by a key of the keys file
    cert:NAME    a client certificate: its one URI (SPIFFE) name, else its one DNS name, else its common name

The kinds are kept apart, so that nobody becomes an operator by being called like one elsewhere. A bearer token that
is shown decides: a bad one is refused also beside a good certificate.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime
from typing import TYPE_CHECKING, Any

from broker.errors import Unauthenticated
from broker.rpc.access_grants import read_tables
from broker.settings import ConfigError

if TYPE_CHECKING:
    from broker.rpc.json_web_tokens import JwtRules

_SHA256 = re.compile(r"[0-9a-f]{64}", re.ASCII)
_NAME_CHARACTERS_MAX = 255
_KNOWN_MAX = 10_000
_NEVER_MS = 1 << 62


@dataclass(frozen=True, slots=True)
class Identity:
    """Somebody, and until when (ms since the epoch) what they showed is good."""

    principal: str
    expires_at_ms: int = _NEVER_MS


@dataclass(frozen=True, slots=True)
class Shown:
    """Credentials that a call came with."""

    authorizations: tuple[str, ...] = ()
    """The values of `authorization`."""
    certificate: bytes | None = None
    """The client's, in PEM; gRPC has checked it against the CA."""


@dataclass(frozen=True, slots=True)
class TokenHash:
    """One `[[token]]` of the tokens file."""

    principal: str
    sha256: bytes
    expires_at_ms: int


class Authenticator:
    """Tells who somebody is, by one reading of the files. Remembers whom it has checked."""

    def __init__(self, tokens: Sequence[TokenHash] = (), jwt_rules: JwtRules | None = None) -> None:
        self._tokens = tokens
        self._jwt = jwt_rules
        # By a keyed hash: the tokens themselves are not kept, and how long a lookup takes tells nothing of them.
        self._key = secrets.token_bytes(32)
        self._known: OrderedDict[bytes, Identity] = OrderedDict()

    def identify(self, shown: Shown, now_ms: int) -> Identity:
        """Raises Unauthenticated."""
        if shown.authorizations:
            shown_bytes = b"token " + "\0".join(shown.authorizations).encode("utf-8", "surrogateescape")
        elif shown.certificate is not None:
            shown_bytes = b"cert " + shown.certificate
        else:
            raise Unauthenticated(
                "This broker requires authentication: send a token as `authorization: Bearer TOKEN`, metadata of "
                "gRPC and a header of HTTP, or use a client certificate over gRPC",
                reason="CREDENTIALS_MISSING",
            )
        digest = hashlib.blake2b(shown_bytes, key=self._key, digest_size=32).digest()
        known = self._known.get(digest)
        if known is None:
            known = self._examine(shown)
            self._known[digest] = known
            if len(self._known) > _KNOWN_MAX:
                self._known.popitem(last=False)
        if known.expires_at_ms <= now_ms:
            raise Unauthenticated(
                f"The credentials of {known.principal} have expired", reason="CREDENTIALS_EXPIRED"
            )
        return known

    def _examine(self, shown: Shown) -> Identity:
        if not shown.authorizations:
            assert shown.certificate is not None
            return _identity_of_certificate(shown.certificate)
        if len(shown.authorizations) > 1:
            raise _invalid("There are several authorization values, and one is allowed")
        scheme, _, token = shown.authorizations[0].partition(" ")
        if scheme.lower() != "bearer" or not token:
            raise _invalid("The authorization is not of the form: Bearer TOKEN")
        identity = self._find_static(token)
        if identity is None and self._jwt is not None and token.count(".") == 2:
            identity = _identity_of_jwt(token, self._jwt)
        if identity is None:
            raise _invalid("The token is not known")
        return identity

    def _find_static(self, token: str) -> Identity | None:
        digest = hashlib.sha256(token.encode("utf-8", "surrogateescape")).digest()
        identity: Identity | None = None
        for granted in self._tokens:  # all of them, whichever it is
            if hmac.compare_digest(granted.sha256, digest):
                identity = Identity(f"token:{granted.principal}", granted.expires_at_ms)
        return identity


def _invalid(message: str) -> Unauthenticated:
    return Unauthenticated(message, reason="CREDENTIALS_INVALID")


# -- static tokens ---------------------------------------------------------------------------------------------------


def parse_tokens(text: str) -> tuple[TokenHash, ...]:
    """The `[[token]]` tables of the tokens file; ConfigError."""
    return tuple(
        _token(f"token {number}", table)
        for number, table in enumerate(read_tables(text, "token")["token"], 1)
    )


def _token(where: str, fields: dict[str, Any]) -> TokenHash:
    if unknown := sorted(fields.keys() - {"principal", "sha256", "expires"}):
        raise ConfigError(f"{where}: unknown key {unknown[0]!r}")
    principal, digest, expires = fields.get("principal"), fields.get("sha256"), fields.get("expires")
    if not isinstance(principal, str) or not _is_name(principal):
        raise ConfigError(
            f"{where}: principal is required: a name of at most {_NAME_CHARACTERS_MAX} characters without *"
        )
    if not isinstance(digest, str) or not _SHA256.fullmatch(digest):
        raise ConfigError(
            f"{where}: sha256 is required: 64 hexadecimal digits, the hash of the token, not the token itself"
        )
    if expires is None:
        return TokenHash(principal, bytes.fromhex(digest), _NEVER_MS)
    if isinstance(expires, date) and not isinstance(expires, datetime):
        expires = datetime(expires.year, expires.month, expires.day, tzinfo=UTC)
    if not isinstance(expires, datetime) or expires.tzinfo is None:
        raise ConfigError(f"{where}: expires must be a time with a time zone, such as 2027-01-31T00:00:00Z")
    return TokenHash(principal, bytes.fromhex(digest), int(expires.timestamp() * 1000))


# -- what is signed, with a library that takes a tenth of a start to load --------------------------------------------


def _identity_of_jwt(token: str, rules: JwtRules) -> Identity:
    from broker.rpc.json_web_tokens import name_in_token  # noqa: PLC0415 - loaded where there are keys

    name, expires_at_ms = name_in_token(token, rules)
    return Identity(f"jwt:{_checked_name(name)}", min(expires_at_ms, _NEVER_MS))


def _identity_of_certificate(pem: bytes) -> Identity:
    from broker.rpc.client_certificates import name_in_certificate  # noqa: PLC0415 - loaded where there is TLS

    name, expires_at_ms = name_in_certificate(pem)
    return Identity(f"cert:{_checked_name(name)}", expires_at_ms)


def _checked_name(name: object) -> str:
    if not isinstance(name, str) or not _is_name(name):
        raise _invalid("The credentials name nobody")
    return name


def _is_name(name: str) -> bool:
    return 0 < len(name) <= _NAME_CHARACTERS_MAX and name.isprintable() and "*" not in name
