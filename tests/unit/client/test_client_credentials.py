"""Tokens and TLS settings, before anything is sent."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives import serialization

import postdate
from postdate.credentials import Credentials
from tests.certificates import Authority, Pair
from tests.unit.client.fake_server import FakeBroker


@pytest.mark.parametrize("address", ["broker:7650", "10.0.0.7:7650", "[2001:db8::1]:7650", "0.0.0.0:7650"])
def test_token_is_not_sent_in_the_clear_to_another_machine(address: str) -> None:
    with pytest.raises(ValueError, match="would be sent without encryption"):
        postdate.connect(address, token="secret")
    postdate.connect(address, token="secret", tls=postdate.Tls())
    postdate.connect(address, token="secret", allow_plaintext_token=True)


@pytest.mark.parametrize("address", ["localhost:7650", "127.0.0.9:7650", "[::1]:7650", "unix:/run/x"])
def test_token_may_go_to_this_machine(address: str) -> None:
    assert Credentials(address, token="secret").metadata() == (("authorization", "Bearer secret"),)


def test_token_of_a_function_is_asked_for_each_time(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("one\n")
    credentials = Credentials("localhost:1", token=file.read_text)
    assert credentials.metadata() == (("authorization", "Bearer one"),)
    file.write_text("two\n")
    assert credentials.metadata() == (("authorization", "Bearer two"),)
    assert credentials.can_renew


@pytest.mark.parametrize("token", ["", "  ", "two words", "line\nbreak", "s\u00e9cret"])
def test_what_is_no_token_is_refused_and_not_shown(token: str) -> None:
    with pytest.raises(ValueError, match="the token is empty") as caught:
        Credentials("localhost:1", token=token).metadata()
    assert not token.strip() or token not in str(caught.value)


def test_certificate_needs_its_key() -> None:
    with pytest.raises(ValueError, match="both cert_file and key_file"):
        postdate.Tls(cert_file="client.pem")


def with_password(pair: Pair) -> bytes:
    """The key, as gRPC cannot read it."""
    key = serialization.load_pem_private_key(Path(pair.key_file).read_bytes(), None)
    encryption = serialization.BestAvailableEncryption(b"secret")
    return key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, encryption)


@pytest.mark.parametrize("case", ["no authority", "no certificate", "another's key", "key with a password"])
async def test_files_that_can_never_be_used_are_an_error_at_once(tmp_path: Path, case: str) -> None:
    ours = Authority(tmp_path)
    pair, other = ours.issue("client"), ours.issue("other")
    text, locked = tmp_path / "text", tmp_path / "locked.key"
    text.write_text("no certificate\n")
    locked.write_bytes(with_password(pair))
    files: dict[str, tuple[Any, Any, Any]] = {
        "no authority": (text, None, None),
        "no certificate": (ours.ca_file, text, pair.key_file),
        "another's key": (ours.ca_file, pair.cert_file, other.key_file),
        "key with a password": (ours.ca_file, pair.cert_file, locked),
    }
    ca_file, cert_file, key_file = files[case]
    tls = postdate.Tls(ca_file=ca_file, cert_file=cert_file, key_file=key_file)
    with pytest.raises(ValueError, match=r"text holds no certificate|no certificate and its key"):
        await postdate.connect("localhost:1", tls=tls).open()
    good = postdate.Tls(ca_file=ours.ca_file, cert_file=pair.cert_file, key_file=pair.key_file)
    async with postdate.connect("localhost:1", tls=good):
        pass


COMMANDS: list[tuple[tuple[str, ...], str]] = [
    (("--address", "broker:1", "--token-file", "FILE"), "--tls or --tls-ca, or --allow-plaintext-token"),
    (("--tls-cert", "FILE"), "both --tls-cert and --tls-key"),
]


@pytest.mark.parametrize(("options", "told"), COMMANDS)
async def test_command_says_it_in_its_own_words(
    postdate: Callable[..., Any], tmp_path: Path, options: tuple[str, ...], told: str
) -> None:
    file = tmp_path / "token"
    file.write_text("secret")
    outcome = await postdate(*(str(file) if each == "FILE" else each for each in options), "stats")
    assert outcome.code == 2
    assert told in outcome.err
    assert "secret" not in outcome.err


async def test_command_shows_the_token_of_the_environment_or_of_a_file(
    postdate: Callable[..., Any], broker: FakeBroker, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("POSTDATE_TOKEN", "from-environment")
    file = tmp_path / "token"
    file.write_text("from-file\n")
    assert (await postdate("stats")).code == 0
    assert broker.authorizations[-1] == "Bearer from-environment"
    assert (await postdate("--token-file", str(file), "stats")).code == 0
    assert broker.authorizations[-1] == "Bearer from-file"
    assert (await postdate("stats", "--token-file", str(file))).code == 0
    assert broker.authorizations[-1] == "Bearer from-file"


async def test_missing_file_is_named(postdate: Callable[..., Any]) -> None:
    outcome = await postdate("--tls-ca", "/nowhere/ca.pem", "stats")
    assert outcome.code == 1
    assert "/nowhere/ca.pem" in outcome.err


@pytest.mark.parametrize(
    "address", ["", "broker", ":7650", "broker:", "broker:0", "broker:73186", "a b:1", "broker:٧"]
)
async def test_what_is_no_address_is_refused_by_the_sdk_and_in_a_context(
    postdate: Callable[..., Any], address: str
) -> None:
    with pytest.raises(ValueError, match="is not an address"):
        Credentials(address)
    told = await postdate("context", "add", "typo", "--address", address)
    assert (told.code, "is not an address" in told.err) == (2, True)
    told = await postdate("--address", address, "info")
    assert (told.code, "is not an address" in told.err) == (2, True)
