"""Signals: SIGTERM drains a broker, without waiting for whom it need not; SIGHUP ends nothing."""

from __future__ import annotations

import asyncio
import os
import signal
import ssl
import time
from pathlib import Path
from typing import Any

import pytest

from postdate_api.v1 import consumer_pb2, message_pb2, producer_pb2
from tests.certificates import Authority, Pair
from tests.process.conftest import BrokerProcess, Start
from tests.wire.access_files import ACCESS, Files

GRACE_SECONDS = 30.0


async def produce(broker: BrokerProcess) -> None:
    request = producer_pb2.ProduceRequest(topic="t", messages=[message_pb2.Message(payload=b"x")])
    await broker.producer.Produce(request, timeout=10)


async def consumer(broker: BrokerProcess, *, permits: int) -> Any:
    """A stream that is open, and answers nothing from now on."""
    call = broker.consumer.Subscribe()
    opening = consumer_pb2.Open(
        topic="t",
        subscription="s",
        permits=consumer_pb2.Permits(messages=permits),
        initial_position=consumer_pb2.INITIAL_POSITION_EARLIEST,
    )
    await call.write(consumer_pb2.SubscribeRequest(open=opening))
    assert (await call.read()).HasField("opened")
    return call


async def test_a_consumer_that_holds_nothing_does_not_hold_the_broker(start: Start, tmp_path: Path):
    broker = await (
        await start(data_dir=str(tmp_path / "d"), drain_grace_ms=f"{GRACE_SECONDS:.0f}s")
    ).serving()
    await produce(broker)
    silent = await consumer(broker, permits=0)
    begin = time.monotonic()
    broker.process.send_signal(signal.SIGTERM)
    assert await broker.wait() == 0
    assert time.monotonic() - begin < GRACE_SECONDS / 2
    assert (await silent.read()).HasField("draining")


async def test_a_consumer_that_holds_messages_is_waited_for_until_it_has_answered(
    start: Start, tmp_path: Path
):
    broker = await (
        await start(data_dir=str(tmp_path / "d"), drain_grace_ms=f"{GRACE_SECONDS:.0f}s")
    ).serving()
    await produce(broker)
    holder = await consumer(broker, permits=1)
    delivery = (await holder.read()).batch.deliveries[0]
    broker.process.send_signal(signal.SIGTERM)
    assert (await holder.read()).HasField("draining")
    with pytest.raises(TimeoutError):
        await broker.wait(1.0)
    begin = time.monotonic()
    entries = [message_pb2.EntrySet(ledger_id=delivery.id.ledger_id, entry_ids=[delivery.id.entry_id])]
    await holder.write(consumer_pb2.SubscribeRequest(ack=consumer_pb2.Ack(request_id=1, entries=entries)))
    assert (await holder.read()).confirmed.request_id == 1
    assert await broker.wait() == 0  # it did not half-close, and has nothing left to say
    assert time.monotonic() - begin < GRACE_SECONDS / 2


async def logged(broker: BrokerProcess, sentence: str) -> dict[str, Any]:
    async with asyncio.timeout(10):
        while not any(sentence in line for line in broker.lines):
            await asyncio.sleep(0.01)
    return broker.logged(sentence)


async def test_hangup_reads_again_what_can_change_and_ends_nothing(start_command: Start, tmp_path: Path):
    config = tmp_path / "postdate.toml"
    config.write_text('log_level = "info"\n')
    broker = await (await start_command(f"--config={config}", data_dir=str(tmp_path / "d"))).serving()
    stream = await consumer(broker, permits=1)
    config.write_text('log_level = "debug"\nlease_ms = "7s"\n')
    broker.process.send_signal(signal.SIGHUP)
    assert (await logged(broker, '"Reloaded"'))["log_level"] == "debug"
    assert (await logged(broker, "need a restart"))["settings"] == ["lease_ms"]
    config.write_text("log_level = 5\n")
    broker.process.send_signal(signal.SIGHUP)
    assert "log_level" in str(await logged(broker, "could not be reloaded"))
    await produce(broker)
    assert (await stream.read()).batch.deliveries
    assert broker.process.returncode is None


async def secured(start: Start, folder: Path) -> tuple[BrokerProcess, Files, Authority, Pair]:
    """Start a broker with access control and TLS, whose files it looks at again in a minute at the earliest."""
    files, authority = Files(folder), Authority(folder)
    pair = authority.issue("server", is_local=True)
    broker = await start(
        data_dir=str(folder / "d"),
        security_recheck_ms="1m",
        tls_cert_file=pair.cert_file,
        tls_key_file=pair.key_file,
        access_file=str(files.settings["access_file"]),
        tokens_file=str(files.settings["tokens_file"]),
    )
    return await broker.serving(), files, authority, pair


async def test_hangup_takes_changed_rights_and_certificates_at_once(start: Start, tmp_path: Path):
    broker, files, authority, pair = await secured(start, tmp_path)
    files.access(ACCESS + "\n# changed\n")
    fresh = authority.issue("other", is_local=True)
    for old, new in ((pair.cert_file, fresh.cert_file), (pair.key_file, fresh.key_file)):
        os.replace(new, old)
    broker.process.send_signal(signal.SIGHUP)
    await logged(broker, '"access"')
    await logged(broker, '"tls"')
    assert broker.process.returncode is None


async def test_hangup_where_nothing_can_be_read_again_ends_nothing(start: Start, tmp_path: Path):
    broker = await (await start(data_dir=str(tmp_path / "d"))).serving()
    stream = await consumer(broker, permits=1)
    broker.process.send_signal(signal.SIGHUP)
    await logged(broker, '"Reloaded"')
    await produce(broker)
    assert (await stream.read()).batch.deliveries
    assert broker.process.returncode is None


async def test_hangup_with_files_that_cannot_be_used_keeps_the_old_ones(start: Start, tmp_path: Path):
    """One bad file keeps none of the others back."""
    broker, files, authority, pair = await secured(start, tmp_path)
    client = ssl.create_default_context(cafile=authority.ca_file)
    client.set_alpn_protocols(["h2"])
    host, port = broker.grpc_address.rsplit(":", 1)
    with open(pair.cert_file, "w") as bad:  # noqa: ASYNC230 - a file of the test
        bad.write("no certificate")
    files.access(ACCESS + "\n# changed\n")
    broker.process.send_signal(signal.SIGHUP)
    await logged(broker, '"access"')
    assert any('"level": "error"' in line and pair.cert_file in line for line in broker.lines)
    _, writer = await asyncio.open_connection(host, int(port), ssl=client, server_hostname="localhost")
    writer.close()
    assert broker.process.returncode is None
