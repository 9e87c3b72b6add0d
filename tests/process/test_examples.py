"""The programs in examples/ do what they say, on a broker whose clock runs ahead."""

from __future__ import annotations

import asyncio
import functools
import itertools
import os
import runpy
import signal
import sys
from collections.abc import AsyncIterator
from datetime import timedelta
from pathlib import Path

import pytest

import postdate.sync
import postdate.testing
from tests.depth import deep_but
from tests.process.fork_server import ForkServer

ROOT = Path(__file__).parents[2]
LIMIT_SECONDS = 20.0


@pytest.fixture
async def fake() -> AsyncIterator[postdate.testing.FakeBroker]:
    async with postdate.testing.broker() as fake:
        yield fake


async def start(fake: postdate.testing.FakeBroker, *arguments: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable,
        *arguments,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        cwd=ROOT,
        env={
            **os.environ,
            "PYTHONPATH": f"{ROOT}:{ROOT / 'clients/python'}",
            "POSTDATE_ADDRESS": fake.address,
            "PYTHONUNBUFFERED": "1",
        },
    )


async def test_quickstart(fake: postdate.testing.FakeBroker):
    program = await start(fake, "examples/quickstart.py")
    assert program.stdout is not None
    async with asyncio.timeout(LIMIT_SECONDS):
        assert b"due in two seconds" in await program.stdout.readline()
        await fake.advance(timedelta(seconds=2))
        out, err = await program.communicate()
    assert b"'close order 17 unless it is paid' came" in out, err.decode()
    assert program.returncode == 0


WORKERS = tuple(itertools.product(("worker.py", "sync_worker.py"), (signal.SIGTERM, signal.SIGINT)))


@pytest.mark.parametrize(("worker", "number"), deep_but((WORKERS[0], WORKERS[3]), WORKERS))
async def test_worker_handles_and_ends_well(
    fake: postdate.testing.FakeBroker, worker: str, number: signal.Signals
):
    async with fake.client() as client:
        await client.topics.create("orders")
        await client.subscriptions.create("orders", "billing")
        async with client.producer("orders") as producer:
            await producer.send(b"order 17")
        program = await start(fake, f"examples/{worker}", "orders", "billing")
        assert program.stdout is not None
        async with asyncio.timeout(LIMIT_SECONDS):
            assert b"attempt 1: order 17" in await program.stdout.readline()
            program.send_signal(number)
            _, err = await program.communicate()
        assert (program.returncode, err.decode()) == (0, "")
        (stats,) = await client.stats("orders")
        assert (stats.subscriptions[0].ready_messages, stats.subscriptions[0].leased_messages) == (0, 0)


async def test_worker_of_partitions_takes_batches_of_all_and_ends_when_nothing_comes(
    fake: postdate.testing.FakeBroker,
):
    topics = postdate.partition_topics("payments", 3)
    async with fake.client() as client:
        for topic in topics:
            await client.topics.create(topic)
            await client.subscriptions.create(topic, "billing")
        async with client.partitioned_producer("payments", partitions=3) as producer:
            receipts = await producer.send_many(
                [postdate.OutgoingMessage(b"%d" % number, key=str(number)) for number in range(100)]
            )
        assert {receipt.topic for receipt in receipts} == set(topics)
        program = await start(fake, "examples/partitions.py", "payments", "billing", "3")
        async with asyncio.timeout(LIMIT_SECONDS):
            out, err = await program.communicate()
        assert program.returncode == 0, err.decode()
        lines = [line.split() for line in out.decode().splitlines()]
        assert sum(int(line[0]) for line in lines) == 100
        assert sum(int(line[-1]) for line in lines) == sum(range(100))
        for stats in await client.stats(*topics):
            (billing,) = stats.subscriptions
            assert (billing.ready_messages, billing.leased_messages) == (0, 0)


ARGUMENTS = {
    "quickstart.py": (),
    "worker.py": ("orders", "billing"),
    "sync_worker.py": ("orders", "billing"),
    "partitions.py": ("payments", "billing", "3"),
}


def end_of(example: str, *arguments: str, monkeypatch: pytest.MonkeyPatch) -> object:
    """Run an example where there is no broker; return what it ends with."""
    for module in (postdate, postdate.sync):
        monkeypatch.setattr(module, "connect", functools.partial(module.connect, retry_for=timedelta(0)))
    monkeypatch.setenv("POSTDATE_ADDRESS", "127.0.0.1:1")
    monkeypatch.setattr(sys, "argv", [example, *arguments])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(ROOT / "examples" / example), run_name="__main__")
    return end.value.code


@pytest.mark.parametrize("example", ARGUMENTS)
def test_an_example_without_a_broker_ends_with_a_line(example: str, monkeypatch: pytest.MonkeyPatch):
    line = str(end_of(example, *ARGUMENTS[example], monkeypatch=monkeypatch))
    assert line.startswith("no broker: ")
    assert "127.0.0.1:1" in line
    assert "\n" not in line


@pytest.mark.parametrize("example", [name for name, arguments in ARGUMENTS.items() if arguments])
def test_an_example_without_its_arguments_says_which(example: str, monkeypatch: pytest.MonkeyPatch):
    assert str(end_of(example, monkeypatch=monkeypatch)).startswith(f"usage: {example} TOPIC SUBSCRIPTION")


async def test_example_of_tests_passes(fork_server: ForkServer):
    options = ("-q", "-p", "no:cacheprovider", str(ROOT / "examples/test_with_fake_broker.py"))
    pytest_main = "import pytest, sys; sys.exit(pytest.main(sys.argv[1:]))"
    program = await fork_server.fork(("-c", pytest_main, *options), os.environ, has_stdout=True)
    async with asyncio.timeout(LIMIT_SECONDS):
        out, err = await program.communicate()
    assert program.returncode == 0, out.decode() + err.decode()
