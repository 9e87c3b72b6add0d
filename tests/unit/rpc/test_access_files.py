"""The files of access control: what they mean, and what is wrong with them."""

from __future__ import annotations

import base64
import hashlib
import json
from pathlib import Path
from typing import Any

import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from hypothesis import given
from hypothesis import strategies as st

from broker.errors import Unauthenticated
from broker.rpc import access, access_identity, json_web_tokens
from broker.rpc.access_grants import parse_grants
from broker.rpc.access_identity import Authenticator, Shown, TokenHash, parse_tokens
from broker.rpc.access_rules import Ask, Right, SubscriptionScope, TopicScope
from broker.rpc.json_web_tokens import JwtRules, parse_algorithms, parse_jwt_keys
from broker.settings import ConfigError
from tests.configs import broker_config

HASH = "ab" * 32


def ask(right: str, topic: str | TopicScope, subscription: str | SubscriptionScope | None = None) -> Ask:
    return Ask(frozenset({Right(right)}), topic, subscription)


GRANTS = parse_grants(
    """
    [[grant]]
    principals = ["token:admin"]
    topics = ["*"]
    rights = ["manage"]

    [[grant]]
    principals = ["cert:spiffe://example.org/*"]
    topics = ["orders", "eu.*.orders"]
    rights = ["produce"]

    [[grant]]
    principals = ["cert:spiffe://example.org/*"]
    topics = ["orders", "eu.*.orders"]
    rights = ["consume", "manage"]
    subscriptions = ["billing*"]

    [[grant]]
    principals = ["token:everywhere"]
    topics = ["*"]
    rights = ["manage"]
    subscriptions = ["billing"]

    [[grant]]
    principals = ["*"]
    topics = ["public"]
    rights = ["produce"]
    """
)

ALLOWED: list[tuple[str, Ask]] = [
    ("token:admin", ask("manage", "anything")),
    ("token:admin", ask("manage", TopicScope.ALL)),
    ("token:admin", ask("manage", "t", "s")),
    ("cert:spiffe://example.org/a", ask("produce", "orders")),
    ("cert:spiffe://example.org/a", ask("produce", "eu.west.orders")),
    ("cert:spiffe://example.org/a/b", ask("consume", "orders", "billing-2")),
    ("cert:spiffe://example.org/a", ask("consume", "orders", SubscriptionScope.ANY)),
    ("token:everywhere", ask("manage", "orders", "billing")),
    ("cert:spiffe://example.org/a", ask("consume", TopicScope.ANY)),
    ("jwt:whoever", ask("produce", "public")),
]
DENIED: list[tuple[str, Ask]] = [
    ("token:admin", ask("produce", "orders")),
    ("jwt:admin", ask("manage", "orders")),
    ("token:admin2", ask("manage", "orders")),
    ("cert:spiffe://example.com/a", ask("produce", "orders")),
    ("cert:spiffe://example-org/a", ask("produce", "orders")),
    ("cert:spiffe://example.org/a", ask("produce", "orders2")),
    ("cert:spiffe://example.org/a", ask("produce", "euxwest.orders")),  # a dot is a dot
    ("cert:spiffe://example.org/a", ask("produce", "orders\n")),
    ("cert:spiffe://example.org/a", ask("consume", "orders", "audit")),
    ("cert:spiffe://example.org/a", ask("produce", TopicScope.ALL)),
    (
        "cert:spiffe://example.org/a",
        ask("manage", "orders"),
    ),  # a grant for subscriptions is none for their topic
    ("cert:spiffe://example.org/a", ask("consume", "orders")),
    ("cert:spiffe://example.org/a", ask("consume", "orders2", SubscriptionScope.ANY)),
    ("cert:spiffe://example.org/a", ask("manage", TopicScope.ALL)),
    ("token:everywhere", ask("manage", TopicScope.ALL)),  # backups hold the other subscriptions too
    ("token:everywhere", ask("manage", "orders")),
    ("token:everywhere", ask("manage", "orders", "audit")),
    ("cert:spiffe://example.org/a", ask("schedule", TopicScope.ANY)),
    ("jwt:whoever", ask("consume", "public")),
]


@pytest.mark.parametrize(("principal", "asked"), ALLOWED)
def test_grants_allow(principal: str, asked: Ask) -> None:
    assert GRANTS.allow(principal, asked)


@pytest.mark.parametrize(("principal", "asked"), DENIED)
def test_what_no_grant_allows_is_denied(principal: str, asked: Ask) -> None:
    assert not GRANTS.allow(principal, asked)


def test_no_grants_deny_everything() -> None:
    assert not parse_grants("").allow("token:admin", ask("produce", TopicScope.ANY))


WRONG: list[tuple[str, str]] = [
    ("x = ", "it is not TOML"),
    ("[grant]\n", "grant must be written [[grant]]"),
    ("[[grants]]\n", "unknown table or key 'grants'; expected only [[grant]]"),
    ("[[grant]]\n", "grant 1: principals must be a list of strings"),
    ('[[grant]]\nprincipals = "token:a"\n', "grant 1: principals must be"),
    ('[[grant]]\nprincipals = []\ntopics = ["t"]\nrights = ["produce"]\n', "grant 1: principals must be"),
    ('[[grant]]\nprincipals = ["a"]\ntopics = ["t"]\nrights = ["produce"]\n', "it must begin with token:"),
    (
        '[[grant]]\nprincipals = ["token:a"]\ntopics = ["t"]\nrights = ["admin"]\n',
        "unknown right 'admin'; the rights are",
    ),
    (
        '[[grant]]\nprincipals = ["token:a"]\ntopics = ["t"]\nrights = ["produce"]\nsubscriptions = ["s"]\n',
        "grant 1: right 'produce' cannot be limited to subscriptions",
    ),
    (
        '[[grant]]\nprincipals = ["token:a"]\ntopics = ["t"]\nrights = ["produce"]\nsubscription = ["s"]\n',
        "grant 1: unknown key 'subscription'",
    ),
]


@pytest.mark.parametrize(("text", "told"), WRONG)
def test_wrong_grants_are_refused_with_a_reason(text: str, told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_grants(text)
    assert told in str(caught.value)


# -- tokens ------------------------------------------------------------------------------------------------------------


def test_tokens_have_principals_hashes_and_ends() -> None:
    text = f'[[token]]\nprincipal = "a"\nsha256 = "{HASH}"\n'
    [forever] = parse_tokens(text)
    assert (forever.principal, forever.sha256) == ("a", bytes.fromhex(HASH))
    [limited] = parse_tokens(text + "expires = 2027-01-31T00:00:00Z\n")
    assert limited.expires_at_ms == 1_801_353_600_000
    assert parse_tokens(text + "expires = 2027-01-31\n") == (limited,)


WRONG_TOKENS: list[tuple[str, str]] = [
    ('[[token]]\nprincipal = "a"\nsha256 = "secret"\n', "the hash of the token, not the token"),
    (f'[[token]]\nprincipal = "a"\nsha256 = "{HASH.upper()}"\n', "64 hexadecimal digits"),
    (f'[[token]]\nprincipal = ""\nsha256 = "{HASH}"\n', "principal is required"),
    (f'[[token]]\nprincipal = "a*"\nsha256 = "{HASH}"\n', "without *"),
    (f'[[token]]\nprincipal = "a"\nsha256 = "{HASH}"\nexpires = "soon"\n', "must be a time with a time zone"),
    (
        f'[[token]]\nprincipal = "a"\nsha256 = "{HASH}"\nexpires = 2027-01-31T00:00:00\n',
        "must be a time with a time zone",
    ),
    (f'[[token]]\nprincipal = "a"\nsha256 = "{HASH}"\ntoken = "x"\n', "unknown key 'token'"),
]


@pytest.mark.parametrize(("text", "told"), WRONG_TOKENS)
def test_wrong_tokens_are_refused_and_secrets_not_shown(text: str, told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_tokens(text)
    assert told in str(caught.value)
    assert "secret" not in str(caught.value)


# -- keys of JSON web tokens -------------------------------------------------------------------------------------------

RSA = rsa.generate_private_key(65537, 2048)
EC = ec.generate_private_key(ec.SECP384R1())
ED = ed25519.Ed25519PrivateKey.generate()


def pem(key: Any) -> str:
    return str(key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo).decode())


def jwk(key: Any, **fields: str) -> dict[str, Any]:
    kinds: dict[Any, Any] = {
        RSA: jwt.algorithms.RSAAlgorithm,
        EC: jwt.algorithms.ECAlgorithm,
        ED: jwt.algorithms.OKPAlgorithm,
    }
    return {**kinds[key].to_jwk(key.public_key(), as_dict=True), **fields}


def identify(
    text: str, key: Any, algorithm: str, *, kid: str = "", allowed: str = "ES384,RS256,EdDSA", **headers: Any
) -> str:
    rules = JwtRules(parse_jwt_keys(text), parse_algorithms(allowed), "i", "a", 0)
    token = jwt.encode(
        {"sub": "me", "iss": "i", "aud": "a", "exp": 2_000_000_000},
        key,
        algorithm=algorithm,
        headers=({"kid": kid} if kid else {}) | headers,
    )
    shown = Shown((f"Bearer {token}",))
    return Authenticator((), rules).identify(shown, 0).principal


@pytest.mark.parametrize(("key", "algorithm"), [(RSA, "RS256"), (EC, "ES384"), (ED, "EdDSA")])
def test_keys_of_each_kind_check_tokens_from_pem_and_jwks(key: Any, algorithm: str) -> None:
    every = pem(RSA) + pem(EC) + pem(ED)
    assert identify(every, key, algorithm) == "jwt:me"
    keys = {"keys": [jwk(each, kid=str(number)) for number, each in enumerate((RSA, EC, ED))]}
    assert identify(json.dumps(keys), key, algorithm, kid=str((RSA, EC, ED).index(key))) == "jwt:me"
    assert identify(json.dumps(keys), key, algorithm) == "jwt:me"


def _unsigned(header: str) -> str:
    return ".".join(
        base64.urlsafe_b64encode(part.encode()).decode().rstrip("=") for part in (header, "{}", "x")
    )


def test_key_is_used_for_its_own_algorithm_and_id_only() -> None:

    with pytest.raises(Unauthenticated):
        identify(json.dumps({"keys": [jwk(RSA, alg="PS256")]}), RSA, "RS256", allowed="RS256,PS256")
    with pytest.raises(Unauthenticated):
        identify(pem(RSA), RSA, "RS512")
    with pytest.raises(Unauthenticated):
        identify(json.dumps({"keys": [jwk(RSA, kid="old")]}), RSA, "RS256", kid="new")
    with pytest.raises(Unauthenticated):
        identify(json.dumps({"keys": [jwk(RSA, kid="k"), jwk(EC, kid="e")]}), RSA, "RS256", kid="e")


@pytest.mark.parametrize("named", [["b64"], ["x"], []])
def test_signed_token_that_says_it_must_be_understood_is_refused(named: list[str]) -> None:
    assert identify(pem(EC), EC, "ES384") == "jwt:me"
    with pytest.raises(Unauthenticated):
        identify(pem(EC), EC, "ES384", crit=named, b64=True)  # which some libraries take for understood


def test_header_that_must_be_understood_is_refused_whatever_the_library_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    claims = {"sub": "me", "exp": 2_000_000_000}
    monkeypatch.setattr(json_web_tokens, "_verified", lambda *_: claims)
    monkeypatch.setattr(jwt, "get_unverified_header", _header_of)  # which looks at it in some versions
    assert identify(pem(EC), EC, "ES384") == "jwt:me"
    with pytest.raises(Unauthenticated):
        identify(pem(EC), EC, "ES384", crit=["x"], x=1)


def _header_of(token: str) -> Any:
    header = token.split(".", maxsplit=1)[0]
    return json.loads(base64.urlsafe_b64decode(header + "=" * (-len(header) % 4)))


def test_a_token_ends_at_its_millisecond() -> None:
    secret = TokenHash("me", hashlib.sha256(b"secret").digest(), expires_at_ms=1_000)
    shown = Shown(("Bearer secret",))
    authenticator = Authenticator((secret,))
    assert authenticator.identify(shown, 999).principal == "token:me"
    with pytest.raises(Unauthenticated):
        authenticator.identify(shown, 1_000)


def test_so_many_identities_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(access_identity, "_KNOWN_MAX", 2)
    hashes = [hashlib.sha256(b"%d" % number).hexdigest() for number in range(5)]
    text = "".join(f'[[token]]\nprincipal = "p{i}"\nsha256 = "{each}"\n' for i, each in enumerate(hashes))
    authenticator = Authenticator(parse_tokens(text))
    for number in (0, 1, 2, 3, 4, 0):
        shown = Shown((f"Bearer {number}",))
        assert authenticator.identify(shown, 0).principal == f"token:p{number}"
    assert len(authenticator._known) == 2


HEADERS = [
    "[" * 10_000,
    '{"alg": ["ES384"], "typ": "JWT"}',
    '{"alg": "ES384", "kid": 3}',
    '{"alg": "ES384", "crit": ["x"], "x": 1}',
    '{"alg": null}',
    "null",
]


@given(st.one_of(st.text(), st.sampled_from(HEADERS).map(_unsigned)))
def test_any_bytes_are_an_identity_or_a_refusal(text: str) -> None:
    rules = JwtRules(parse_jwt_keys(pem(EC)), parse_algorithms("ES384"), "i", "a", 0)
    with pytest.raises(Unauthenticated):
        Authenticator(parse_tokens(f'[[token]]\nprincipal = "a"\nsha256 = "{HASH}"'), rules).identify(
            Shown((f"Bearer {text}",)), 0
        )


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "no public key"),
        ("garbage", "no public key"),
        ("{", "neither a JWKS nor PEM"),
        ('{"keys": 3}', "neither a JWKS nor PEM"),
        ('{"keys": [{"kty": "EC", "crv": "P-999"}]}', "neither a JWKS nor PEM"),
        ('{"keys": [{"kty": "RSA"}]}', "neither a JWKS nor PEM"),
        ('{"keys": ["x"]}', "neither a JWKS nor PEM"),
        ('{"keys": [{"kty": "oct", "k": "c2VjcmV0"}]}', "symmetric key"),
        ('{"keys": [{"kty": "EC", "crv": "P-256", "use": "enc"}]}', "no public key"),
        (pem(rsa.generate_private_key(65537, 1024)), "no public key"),
    ],
)
def test_wrong_keys_are_refused(text: str, told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_jwt_keys(text)
    assert told in str(caught.value)


@pytest.mark.parametrize("text", ["none", "HS256", "ES256,HS256", "", " , ", "es256"])
def test_algorithms_are_asymmetric_ones(text: str) -> None:
    with pytest.raises(ConfigError, match="jwt_algorithms: unknown algorithm"):
        parse_algorithms(text)


@pytest.mark.parametrize(("mode", "warns"), [(0o644, True), (0o640, False)])
def test_a_file_of_tokens_that_every_user_can_read_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, mode: int, warns: bool
) -> None:
    path = tmp_path / "tokens.toml"
    path.write_text("")
    path.chmod(mode)
    access._read_authenticator(broker_config(tokens_file=str(path)))
    assert ["readable by all users" in each.getMessage() for each in caplog.records] == [True] * warns
