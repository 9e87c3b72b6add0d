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
import json
import re
import secrets
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime
from typing import Any

import jwt
from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.hazmat.primitives.serialization import load_pem_public_key

from broker.errors import Unauthenticated
from broker.rpc.access_grants import read_tables
from broker.settings import ConfigError

ALGORITHMS = frozenset(
    {"ES256", "ES384", "ES512", "RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "EdDSA"}
)
"""Asymmetric ones only: whoever can check a symmetric signature can make one. `none` is none of them."""

_CURVES = {"secp256r1": "ES256", "secp384r1": "ES384", "secp521r1": "ES512"}
_SHA256 = re.compile(r"[0-9a-f]{64}", re.ASCII)
_PEM_KEY = re.compile(r"-----BEGIN PUBLIC KEY-----.+?-----END PUBLIC KEY-----", re.DOTALL)
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
                "This broker requires authentication: send a token as authorization metadata, or use a client "
                "certificate",
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
            return identity_of_certificate(shown.certificate)
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


# -- JSON web tokens -------------------------------------------------------------------------------------------------


def _identity_of_jwt(token: str, rules: JwtRules) -> Identity:
    try:
        header = jwt.get_unverified_header(token)
        if "crit" in header:  # it names what must be understood, and we understand none of it
            raise jwt.InvalidTokenError("crit")
        claims = _verified(token, header, rules)
    except jwt.ExpiredSignatureError as error:
        raise Unauthenticated("The token has expired", reason="CREDENTIALS_EXPIRED") from error
    except (jwt.PyJWTError, ValueError, TypeError, OverflowError, RecursionError) as error:
        # Which check failed is for the log of whoever made the token, and a help for whoever forges one.
        raise _invalid("The token is not one that this broker takes") from error
    expires_at_ms = int(claims["exp"]) * 1000 + rules.leeway_ms
    return Identity(f"jwt:{_checked_name(claims['sub'])}", min(expires_at_ms, _NEVER_MS))


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
        raise ConfigError(f"jwt_algorithms names {wrong}; there are {', '.join(sorted(ALGORITHMS))}")
    return named


def parse_jwt_keys(text: str) -> tuple[JwtKey, ...]:
    """Public keys of a JWKS or PEM file; ConfigError. Keys of other kinds are left out, but one must be there."""
    try:
        keys = _jwks(json.loads(text)) if text.lstrip().startswith("{") else _pem_keys(text)
    except (ValueError, TypeError, AttributeError, KeyError, UnsupportedAlgorithm, jwt.PyJWTError) as error:
        raise ConfigError(f"it is neither a JWKS nor PEM with public keys: {error}") from error
    if not keys:
        raise ConfigError("it has no public key to check signatures with")
    return keys


def _jwks(document: dict[str, Any]) -> tuple[JwtKey, ...]:
    keys = []
    for entry in document.get("keys", [document]):
        if entry.get("kty") == "oct":
            raise ConfigError("it has a symmetric key (oct): with it, whoever checks tokens could make them")
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


# -- static tokens ---------------------------------------------------------------------------------------------------


def parse_tokens(text: str) -> tuple[TokenHash, ...]:
    """The `[[token]]` tables of the tokens file; ConfigError."""
    return tuple(
        _token(f"token {number}", table) for number, table in enumerate(read_tables(text, "token"), 1)
    )


def _token(where: str, fields: dict[str, Any]) -> TokenHash:
    if unknown := sorted(fields.keys() - {"principal", "sha256", "expires"}):
        raise ConfigError(f"{where} has {unknown[0]!r}, which is not known")
    principal, digest, expires = fields.get("principal"), fields.get("sha256"), fields.get("expires")
    if not isinstance(principal, str) or not _is_name(principal):
        raise ConfigError(
            f"{where} needs a principal, a name of at most {_NAME_CHARACTERS_MAX} characters without *"
        )
    if not isinstance(digest, str) or not _SHA256.fullmatch(digest):
        raise ConfigError(
            f"{where} needs sha256, 64 hexadecimal digits: the hash of the token, not the token"
        )
    if expires is None:
        return TokenHash(principal, bytes.fromhex(digest), _NEVER_MS)
    if isinstance(expires, date) and not isinstance(expires, datetime):
        expires = datetime(expires.year, expires.month, expires.day, tzinfo=UTC)
    if not isinstance(expires, datetime) or expires.tzinfo is None:
        raise ConfigError(f"{where} has an expires that is no time with a zone, such as 2027-01-31T00:00:00Z")
    return TokenHash(principal, bytes.fromhex(digest), int(expires.timestamp() * 1000))


# -- certificates ----------------------------------------------------------------------------------------------------


def identity_of_certificate(pem: bytes) -> Identity:
    """Return the identity in a client certificate; Unauthenticated if it names none or several."""
    try:
        certificate = x509.load_pem_x509_certificate(pem)
        name = _name_in(certificate)
    except (ValueError, x509.DuplicateExtension, x509.InvalidVersion) as error:
        raise _invalid("The client certificate cannot be read") from error
    expires_at_ms = int(certificate.not_valid_after_utc.timestamp() * 1000)
    return Identity(f"cert:{_checked_name(name)}", expires_at_ms)


def _name_in(certificate: x509.Certificate) -> str:
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        names = x509.SubjectAlternativeName([])
    for kind in (x509.UniformResourceIdentifier, x509.DNSName):
        names_of_kind = names.get_values_for_type(kind)
        if len(names_of_kind) > 1:
            raise _invalid("The client certificate has several names of one kind")
        if names_of_kind:
            return str(names_of_kind[0])
    common = [
        str(attribute.value)
        for attribute in certificate.subject.get_attributes_for_oid(x509.NameOID.COMMON_NAME)
    ]
    # A common name is free text: it must not pass for a URI.
    if len(common) != 1 or "/" in common[0]:
        raise _invalid("The client certificate names nobody")
    return common[0]


def _checked_name(name: object) -> str:
    if not isinstance(name, str) or not _is_name(name):
        raise _invalid("The credentials name nobody")
    return name


def _is_name(name: str) -> bool:
    return 0 < len(name) <= _NAME_CHARACTERS_MAX and name.isprintable() and "*" not in name
