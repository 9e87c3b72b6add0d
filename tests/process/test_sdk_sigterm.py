"""SIGTERM to programs of the SDK: nothing that was not begun counts, and the program ends as its supervisor expects."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path

import pytest

import postdate.testing
from tests.depth import at_depth
from tests.process.fork_server import ForkedProcess, ForkServer

ROOT = Path(__file__).parents[2]
LIMIT_SECONDS = 20.0
COUNT = 60
STOPS = at_depth(change=2, deep=4)  # more than there are attempts
ATTEMPTS_MAX = STOPS - 1

ITERATES = """
import asyncio, sys, time
import postdate

async def main():
    async with postdate.connect(sys.argv[1]) as client, client.subscribe("t", "s", permits=500) as subscription:
        async for message in subscription:
            print("begun", message.payload.decode(), flush=True)
            await asyncio.sleep(float(sys.argv[2]))
    print("went on", flush=True)

asyncio.run(main())
"""
NEVER_WAITS = ITERATES.replace("await asyncio.sleep(", "time.sleep(")
RECEIVES_MANY = """
import asyncio, sys
from datetime import timedelta
import postdate

async def main():
    async with postdate.connect(sys.argv[1]) as client, client.subscribe("t", "s", permits=500) as subscription:
        while True:
            for message in await subscription.receive_many(1, timeout=timedelta(seconds=1)):
                print("begun", message.payload.decode(), flush=True)
                await asyncio.sleep(float(sys.argv[2]))

asyncio.run(main())
"""
TWO_AT_ONCE = """
import asyncio, sys
import postdate

async def work(client):
    while True:
        async with client.subscribe("t", "s", permits=500) as subscription:
            async for message in subscription:
                print("begun", message.payload.decode(), flush=True)
                await asyncio.sleep(float(sys.argv[2]))

async def main():
    async with postdate.connect(sys.argv[1]) as client:
        await asyncio.gather(work(client), work(client))

asyncio.run(main())
"""
SYNC = """
import sys, time
import postdate.sync

with postdate.sync.connect(sys.argv[1]) as client, client.subscribe("t", "s", permits=500) as subscription:
    for message in subscription:
        print("begun", message.payload.decode(), flush=True)
        time.sleep(float(sys.argv[2]))
print("went on", flush=True)
"""
SYNC_RECEIVES_MANY = """
import sys, time
from datetime import timedelta
import postdate.sync

with postdate.sync.connect(sys.argv[1]) as client, client.subscribe("t", "s", permits=500) as subscription:
    while True:
        for message in subscription.receive_many(1, timeout=timedelta(seconds=1)):
            print("begun", message.payload.decode(), flush=True)
            time.sleep(float(sys.argv[2]))
"""
PROGRAMS = {
    "async for": ITERATES,
    "async for, never waits": NEVER_WAITS,
    "receive_many": RECEIVES_MANY,
    "two at once, again and again": TWO_AT_ONCE,
    "for": SYNC,
    "receive_many without async": SYNC_RECEIVES_MANY,
}
HANDLED = 7
HANDLES_IT = f"import signal, sys\nsignal.signal(signal.SIGTERM, lambda *_: sys.exit({HANDLED}))\n"
TELLS = """
import os
from postdate import Subscription

terminated = Subscription._terminated

def tell(subscription):
    terminated(subscription)
    os.write(1, b"stopped\\n")  # a handler may come in the middle of a print, which takes no other

Subscription._terminated = tell
"""
FORKS = """
import os, sys, time
# gRPC's own handlers start its threads again in the child, where they crash now and then. The child is to end by SIGTERM.
os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"
import postdate.sync

with postdate.sync.connect(sys.argv[1]) as client, client.subscribe("t", "s") as subscription:
    child = os.fork()
    if not child:
        print(os.getpid(), flush=True)
        time.sleep(float(sys.argv[2]))
    _, status = os.waitpid(child, 0)
    print(os.waitstatus_to_exitcode(status), flush=True)
"""


@pytest.fixture
async def fake() -> AsyncIterator[postdate.testing.FakeBroker]:
    async with postdate.testing.broker() as fake:
        yield fake


@asynccontextmanager
async def started(
    server: ForkServer, fake: postdate.testing.FakeBroker, program: str, work_s: float
) -> AsyncIterator[ForkedProcess]:
    process = await server.fork(("-c", program, fake.address, str(work_s)), os.environ, has_stdout=True)
    try:
        yield process
    finally:
        with suppress(
            ProcessLookupError
        ):  # its children too: they hold its pipes, and `wait` waits for those
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()


async def line_of(process: ForkedProcess) -> str:
    assert process.stdout is not None
    async with asyncio.timeout(LIMIT_SECONDS):
        line = (await process.stdout.readline()).decode().strip()
    assert line, (await process.stderr.read()).decode()
    return line


async def prepare(client: postdate.Client) -> None:
    policy = postdate.SubscriptionPolicy(max_delivery_attempts=ATTEMPTS_MAX)
    await client.topics.create("t")
    await client.subscriptions.create("t", "s", policy=policy)
    async with client.producer("t") as producer:
        for number in range(COUNT):
            await producer.send(str(number).encode())


@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS.keys())
async def test_sigterm_wears_out_nothing_that_was_not_begun(
    fork_server: ForkServer, fake: postdate.testing.FakeBroker, program: str
):
    begun: Counter[str] = Counter()
    async with fake.client() as client:
        await prepare(client)
        for _ in range(STOPS):
            async with started(fork_server, fake, program, 0.5) as process, asyncio.timeout(LIMIT_SECONDS):
                lines = [await line_of(process)]
                process.send_signal(signal.SIGTERM)
                out, err = await process.communicate()
                lines += out.decode().splitlines()
                assert process.returncode == -signal.SIGTERM, err.decode()
            assert err == b""
            assert "went on" not in lines
            begun.update(line.removeprefix("begun ") for line in lines)
            (stats,) = await client.stats("t")
            assert stats.subscriptions[0].leased_messages == 0
        letters = [letter async for letter in client.dead_letters.list("t", "s", payloads=True)]
        async with (
            client.subscribe("t", "s", limit=COUNT - len(letters)) as subscription,
            asyncio.timeout(LIMIT_SECONDS),
        ):
            left = [message async for message in subscription]
    for letter in letters:
        assert letter.payload is not None and begun[letter.payload.decode()] >= ATTEMPTS_MAX
    for message in left:
        assert message.attempt <= 1 + begun[message.payload.decode()]


@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS.keys())
async def test_a_second_sigterm_ends_it_at_once(
    fork_server: ForkServer, fake: postdate.testing.FakeBroker, program: str
):
    async with fake.client() as client:
        await prepare(client)
        async with (
            started(fork_server, fake, TELLS + program, 3600) as process,
            asyncio.timeout(LIMIT_SECONDS),
        ):
            await line_of(process)
            process.send_signal(signal.SIGTERM)
            while await line_of(process) != "stopped":  # the first one was heard
                pass
            process.send_signal(signal.SIGTERM)
            assert await process.wait() == -signal.SIGTERM


@pytest.mark.parametrize("program", [ITERATES, SYNC], ids=["async for", "for"])
async def test_a_program_that_handles_sigterm_is_left_alone(
    fork_server: ForkServer, fake: postdate.testing.FakeBroker, program: str
):
    async with fake.client() as client:
        await prepare(client)
        async with (
            started(fork_server, fake, HANDLES_IT + program, 3600) as process,
            asyncio.timeout(LIMIT_SECONDS),
        ):
            await line_of(process)
            process.send_signal(signal.SIGTERM)
            assert await process.wait() == HANDLED


async def test_sigterm_ends_a_child_that_was_forked_within_the_block(fake: postdate.testing.FakeBroker):
    async with fake.client() as client:
        await prepare(client)
        # An interpreter of its own: in a fork of one that has loaded gRPC, FORKS says too late how that is to fork.
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", FORKS, fake.address, "3600"),
            stdout=asyncio.subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'clients/python'}"},
            start_new_session=True,
        )
        assert process.stdout is not None
        try:
            async with asyncio.timeout(LIMIT_SECONDS):
                os.kill(int(await process.stdout.readline()), signal.SIGTERM)
                assert int(await process.stdout.readline()) == -signal.SIGTERM
                assert await process.wait() == 0
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()


@pytest.mark.parametrize("program", [ITERATES, SYNC], ids=["async for", "for"])
async def test_sigterm_ends_a_program_whose_broker_is_away(fork_server: ForkServer, program: str):
    async with AsyncExitStack() as programs, asyncio.timeout(LIMIT_SECONDS):
        async with postdate.testing.broker() as fake:
            async with fake.client() as client:
                await prepare(client)
            process = await programs.enter_async_context(started(fork_server, fake, program, 0))
            for _ in range(COUNT):
                await line_of(process)
        process.send_signal(signal.SIGTERM)
        assert await process.wait() == -signal.SIGTERM
