"""TLS and mTLS: who gets in, new certificates without a restart, and broken ones that change nothing."""

from __future__ import annotations

import asyncio
import os
import re
import socket
import ssl
import sys
from collections.abc import Awaitable, Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509

import postdate
from broker.rpc.port import GRPC_OPTIONS
from broker.settings import ConfigError
from tests.certificates import DAY, Authority, Pair
from tests.moving import moves
from tests.wire.conftest import Serve, Wire, eventually, within

SOON = timedelta(milliseconds=300)


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


@pytest.fixture
def server_pair(authority: Authority) -> Pair:
    return authority.issue("server", is_local=True)


async def served(serve: Serve, pair: Pair, **settings: Any) -> Wire:
    return await serve(
        tls_cert_file=pair.cert_file, tls_key_file=pair.key_file, security_recheck_ms=20, **settings
    )


def connect(wire: Wire, tls: postdate.Tls | None, **options: Any) -> postdate.Client:
    return postdate.connect(wire.server.grpc_address, tls=tls, retry_for=SOON, **options)


async def call(client: postdate.Client) -> None:
    """With TLS 1.3 a handshake without a certificate looks well to a client, so a call is made."""
    async with client:
        await within(client.server_info())


async def test_messages_go_through_tls(serve: Serve, authority: Authority, server_pair: Pair):
    wire = await served(serve, server_pair)
    async with (
        connect(wire, postdate.Tls(ca_file=authority.ca_file)) as client,
        client.subscribe("orders", "s") as subscription,
        client.producer("orders") as producer,
    ):
        await producer.send(b"hello")
        message = await within(anext(aiter(subscription)))
        assert message.payload == b"hello"
        await message.ack()


async def test_name_of_the_certificate_counts(serve: Serve, authority: Authority):
    wire = await served(serve, authority.issue("server", dns=("broker.example",)))
    with pytest.raises(postdate.TlsFailed, match="not for the name"):
        await call(connect(wire, postdate.Tls(ca_file=authority.ca_file)))
    await call(connect(wire, postdate.Tls(ca_file=authority.ca_file, server_name="broker.example")))


async def test_strangers_are_not_trusted_and_plaintext_gets_nowhere(
    serve: Serve, authority: Authority, server_pair: Pair, tmp_path: Path
):
    wire = await served(serve, server_pair)
    other = Authority(tmp_path, "other authority")
    for tls in (postdate.Tls(ca_file=other.ca_file), postdate.Tls()):
        with pytest.raises(postdate.TlsFailed, match="is not trusted"):
            await call(connect(wire, tls))
    with pytest.raises(postdate.Unavailable):
        await call(connect(wire, None))


UNTRUSTED: dict[str, Callable[[Authority, Authority], tuple[Pair | None, str]]] = {
    "another authority's": lambda ours, other: (other.issue("server", is_local=True), "is not trusted"),
    "another's": lambda ours, other: (ours.issue("server", dns=("broker.example",)), "not for the name"),
    "none": lambda ours, other: (None, "does not use TLS"),
}


async def subscribe(client: postdate.Client) -> None:
    async with client.subscribe("orders", "s") as subscription:
        await anext(aiter(subscription))


async def produce(client: postdate.Client) -> None:
    async with client.producer("orders") as producer:
        await producer.send(b"x")


USES: dict[str, Callable[[postdate.Client], Awaitable[Any]]] = {
    "call": lambda client: client.server_info(),
    "change": lambda client: client.topics.create("orders"),
    "subscribe": subscribe,
    "produce": produce,
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
@pytest.mark.parametrize("make", UNTRUSTED.values(), ids=UNTRUSTED)
async def test_untrusted_broker_is_an_error_at_once(
    serve: Serve, authority: Authority, tmp_path: Path, make: Any, use: Any
):
    pair, why = make(authority, Authority(tmp_path, "other authority"))
    wire = await serve() if pair is None else await served(serve, pair)
    tls = postdate.Tls(ca_file=authority.ca_file)
    hour = timedelta(hours=1)  # it would keep trying until the test's limit
    async with postdate.connect(wire.server.grpc_address, tls=tls, retry_for=hour) as client:
        with pytest.raises(postdate.TlsFailed, match=why):
            await within(use(client))


async def test_command_says_in_one_line_that_it_does_not_trust_the_broker(
    serve: Serve, authority: Authority, server_pair: Pair, tmp_path: Path
):
    wire = await served(serve, server_pair)
    other = Authority(tmp_path, "other authority")
    command = ("topic", "list", "--address", wire.server.grpc_address, "--tls-ca", other.ca_file)
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "postdate.cli",
        *command,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await within(process.communicate())
    assert (process.returncode, out) == (4, b"")
    assert re.fullmatch(
        r"postdate: the broker's certificate is not trusted: [^\n]+--tls-ca[^\n]+\n", err.decode()
    )


CLIENTS: dict[str, Callable[[Authority, Authority], Pair | None]] = {
    "none": lambda ours, other: None,
    "another authority's": lambda ours, other: other.issue("client", common_name="billing"),
    "expired": lambda ours, other: ours.issue("client", common_name="billing", lasts=-DAY),
}


async def test_client_certificates_are_asked_for_and_checked(
    serve: Serve, authority: Authority, server_pair: Pair, tmp_path: Path
):
    wire = await served(serve, server_pair, tls_client_ca_file=authority.ca_file)
    other = Authority(tmp_path, "other authority")
    for make in CLIENTS.values():
        pair = make(authority, other)
        files = {} if pair is None else {"cert_file": pair.cert_file, "key_file": pair.key_file}
        with pytest.raises(postdate.Unavailable):
            await call(connect(wire, postdate.Tls(ca_file=authority.ca_file, **files)))
    good = authority.issue("client", common_name="billing")
    tls = postdate.Tls(ca_file=authority.ca_file, cert_file=good.cert_file, key_file=good.key_file)
    await call(connect(wire, tls))


@pytest.mark.parametrize(
    "begun", [b"", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"], ids=["silent", "half"]
)
async def test_a_handshake_that_does_not_end_is_closed(
    serve: Serve, server_pair: Pair, monkeypatch: pytest.MonkeyPatch, begun: bytes
):
    option = "grpc.server_handshake_timeout_ms"
    monkeypatch.setitem(GRPC_OPTIONS, option, GRPC_OPTIONS[option] // 20)
    wire = await served(serve, server_pair)
    host, _, port = wire.server.grpc_address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(begun)
    assert await within(reader.read()) == b""
    writer.close()


# -- rotation ----------------------------------------------------------------------------------------------------------


async def handshake(wire: Wire, authority: Authority, **versions: Any) -> tuple[int, str]:
    """The serial number of the certificate that a new connection is shown, and the version of TLS."""
    context = ssl.create_default_context(cafile=authority.ca_file)
    context.set_alpn_protocols(["h2"])
    for name, version in versions.items():
        setattr(context, name, version)
    if versions:
        context.set_ciphers("ALL:@SECLEVEL=0")  # so that the broker refuses, and not this side
    host, _, port = wire.server.grpc_address.rpartition(":")

    def shake() -> tuple[int, str]:
        with (
            socket.create_connection((host, int(port)), timeout=5) as raw,
            context.wrap_socket(raw, server_hostname="localhost") as secured,
        ):
            found = x509.load_der_x509_certificate(secured.getpeercert(binary_form=True) or b"")
            return found.serial_number, secured.version() or ""

    return await asyncio.to_thread(shake)


async def test_new_certificate_is_served_without_a_restart(
    serve: Serve, authority: Authority, server_pair: Pair
):
    wire = await served(serve, server_pair)
    first = server_pair.serial
    assert (await handshake(wire, authority))[0] == first
    async with connect(wire, postdate.Tls(ca_file=authority.ca_file)) as client:
        await within(client.server_info())
        with moves(
            wire.broker, "postdate_security_reloads", "postdate_tls_certificate_expiry_timestamp_seconds"
        ):
            renewed = authority.issue("server", is_local=True, lasts=2 * DAY)
            assert renewed.serial != first
            await eventually(lambda: wire.broker.counters.security_reloads.get(("tls", "ok"), 0) > 0)
        assert (await handshake(wire, authority))[0] == renewed.serial
        await within(client.server_info())  # and nobody's connection was cut
    third = authority.issue("server", is_local=True)
    await eventually(lambda: wire.broker.counters.security_reloads[("tls", "ok")] > 1)
    assert (await handshake(wire, authority))[0] == third.serial


BREAKS: dict[str, Callable[[Pair, Authority], None]] = {
    "garbage": lambda pair, authority: Path(pair.cert_file).write_bytes(b"no certificate"),
    "gone": lambda pair, authority: Path(pair.cert_file).unlink(),
    "another key": lambda pair, authority: os.replace(authority.issue("other").key_file, pair.key_file),
    "expired": lambda pair, authority: authority.issue("server", is_local=True, lasts=-DAY) and None,
}


@pytest.mark.parametrize("how", BREAKS)
async def test_broken_certificate_changes_nothing_and_is_logged_and_counted(
    serve: Serve, authority: Authority, server_pair: Pair, caplog: pytest.LogCaptureFixture, how: str
):
    wire = await served(serve, server_pair)
    first = server_pair.serial
    BREAKS[how](server_pair, authority)
    await eventually(lambda: wire.broker.counters.security_reloads.get(("tls", "failed"), 0) > 0)
    assert (await handshake(wire, authority))[0] == first
    assert "Changed security files cannot be used; the previous ones stay in force" in caplog.messages
    assert b'postdate_security_reloads_total{result="failed",what="tls"}' in (
        await wire.server._http._render_metrics()
    )
    again = authority.issue("server", is_local=True)  # and mended, it is taken
    await eventually(lambda: wire.broker.counters.security_reloads.get(("tls", "ok"), 0) > 0)
    assert (await handshake(wire, authority))[0] == again.serial


async def test_authority_of_clients_is_exchanged_without_a_restart(
    serve: Serve, authority: Authority, server_pair: Pair, tmp_path: Path
):
    trusted = tmp_path / "clients.pem"
    trusted.write_bytes(authority.pem)
    wire = await served(serve, server_pair, tls_client_ca_file=str(trusted))
    other = Authority(tmp_path, "other authority")
    pair = other.issue("client", common_name="billing")
    tls = postdate.Tls(ca_file=authority.ca_file, cert_file=pair.cert_file, key_file=pair.key_file)
    with pytest.raises(postdate.Unavailable):
        await call(connect(wire, tls))
    trusted.write_bytes(other.pem)
    await eventually(lambda: wire.broker.counters.security_reloads.get(("tls", "ok"), 0) > 0)
    await call(connect(wire, tls))


async def test_versions_before_1_2_are_refused(serve: Serve, authority: Authority, server_pair: Pair):
    wire = await served(serve, server_pair)
    for version, named in ((ssl.TLSVersion.TLSv1_2, "TLSv1.2"), (ssl.TLSVersion.TLSv1_3, "TLSv1.3")):
        shown = await handshake(wire, authority, minimum_version=version, maximum_version=version)
        assert shown[1] == named
    with pytest.raises((ssl.SSLError, ConnectionError)), pytest.warns(DeprecationWarning, match="TLSv1"):
        await handshake(
            wire, authority, minimum_version=ssl.TLSVersion.TLSv1, maximum_version=ssl.TLSVersion.TLSv1_1
        )


# -- at start ----------------------------------------------------------------------------------------------------------

REFUSED: dict[str, tuple[Callable[[Pair, Authority], None], str]] = {
    "no file": (lambda pair, authority: Path(pair.cert_file).unlink(), "cannot be read: No such file"),
    "garbage": (BREAKS["garbage"], "holds no certificate in PEM"),
    "another key": (BREAKS["another key"], "is not the key of"),
    "expired": (BREAKS["expired"], "is valid only from"),
    "not yet valid": (
        lambda pair, authority: authority.issue("server", is_local=True, begins=DAY / 2) and None,
        "is valid only from",
    ),
    "no key": (
        lambda pair, authority: Path(pair.key_file).write_bytes(b"x"),
        "is not an unencrypted private key",
    ),
    "open key": (lambda pair, authority: os.chmod(pair.key_file, 0o644), "chmod o-r"),
}


@pytest.mark.parametrize("how", REFUSED)
async def test_broker_does_not_start_with_files_that_cannot_be_used(
    serve: Serve, authority: Authority, server_pair: Pair, how: str
):
    breaks, told = REFUSED[how]
    breaks(server_pair, authority)
    with pytest.raises(ConfigError) as caught:
        await served(serve, server_pair)
    assert told in str(caught.value)
    assert str(caught.value).startswith(("tls_cert_file: ", "tls_key_file: "))
