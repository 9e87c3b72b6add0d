"""Real processes of two shards behind certificates and tokens: each port has those of the broker, also renewed ones."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import ssl
from datetime import timedelta
from pathlib import Path

import pytest
from cryptography import x509

import postdate
from tests.certificates import Authority
from tests.process.conftest import LIMIT_SECONDS, SMALL, Start, until
from tests.process.load import TOPIC
from tests.process.test_shards import ELSEWHERE, SHARDS
from tests.wire.access_files import ACCESS, Files


async def serial_at(port: int, ca_file: str) -> int:
    """Return the serial number of the certificate that a port shows; raises SSLError if the authority is another."""
    trusting = ssl.create_default_context(cafile=ca_file)
    trusting.set_alpn_protocols(["h2"])
    _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=trusting)
    shown = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    writer.close()
    with contextlib.suppress(OSError, ssl.SSLError):
        await writer.wait_closed()
    return x509.load_der_x509_certificate(shown).serial_number


def port_of(address: str) -> int:
    return int(address.rpartition(":")[2])


async def test_shards_have_the_certificates_and_rights_of_their_broker_and_renewed_ones_at_once(
    start: Start, tmp_path: Path
) -> None:
    authority, stranger = Authority(tmp_path), Authority(tmp_path, "stranger")
    pair = authority.issue("server", is_local=True)
    Files(tmp_path).access(ACCESS.replace('"orders"', f'"{TOPIC}"'))
    broker = await start(
        data_dir=str(tmp_path / "d"),
        shards=str(SHARDS),
        access_file=str(tmp_path / "access.toml"),
        tokens_file=str(tmp_path / "tokens.toml"),
        tls_cert_file=pair.cert_file,
        tls_key_file=pair.key_file,
        security_recheck_ms="1h",  # so that nobody looks before he is told
        **SMALL,
    )
    await broker.serving()
    soon = timedelta(seconds=LIMIT_SECONDS)
    tls = postdate.Tls(ca_file=authority.ca_file)
    address = broker.grpc_address
    async with postdate.connect(address, tls=tls, token="admin-secret", retry_for=soon) as client:
        shards = (await client.cluster()).shards
        ports = [port_of(shard.owner_address) for shard in shards]
        assert len({*ports, port_of(address)}) == SHARDS + 1
        for topic in (TOPIC, ELSEWHERE):
            async with client.producer(topic) as producer:
                await producer.send(b"x")
        places = {port_of(client._rpc.owner(topic).connection.address) for topic in (TOPIC, ELSEWHERE)}
        assert places == set(ports), "the SDK goes to the shards themselves"
    async with postdate.connect(address, tls=tls, token="shop-secret", retry_for=soon) as client:
        async with client.producer(TOPIC) as producer:
            await producer.send(b"x")
        with pytest.raises(postdate.PermissionDenied):
            async with client.producer(ELSEWHERE) as producer:
                await producer.send(b"x")
    for place in (address, *(f"127.0.0.1:{port}" for port in ports)):
        async with postdate.connect(place, tls=tls, token="guessed", retry_for=soon) as client:
            with pytest.raises(postdate.Unauthenticated):
                await client.topics.get(TOPIC)
        wrong = postdate.Tls(ca_file=stranger.ca_file)
        async with postdate.connect(place, tls=wrong, token="admin-secret", retry_for=soon) as client:
            with pytest.raises(postdate.TlsFailed):
                await client.topics.get(TOPIC)
    everywhere = [port_of(address), *ports]
    assert [await serial_at(port, authority.ca_file) for port in everywhere] == [pair.serial] * len(
        everywhere
    )
    renewed = authority.issue("renewed", is_local=True, file="server")
    assert (renewed.cert_file, renewed.key_file) == (pair.cert_file, pair.key_file)
    broker.process.send_signal(signal.SIGHUP)

    async def have_it() -> bool:
        return [await serial_at(port, authority.ca_file) for port in everywhere] == [renewed.serial] * len(
            everywhere
        )

    await until(have_it, "a port shows the old certificate")
    broker.process.send_signal(signal.SIGTERM)
    assert await broker.wait() == 0, broker.lines[-20:]
