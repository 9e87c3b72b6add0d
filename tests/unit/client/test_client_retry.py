"""Retries of a client: for as long as it was told to, whatever it tries."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from datetime import timedelta

import pytest

import postdate
from postdate._backoff import Backoff
from postdate._rpc import Rpc
from tests.unit.client.fake_server import FakeBroker

NOBODY = "127.0.0.1:1"
FOR_S = 0.8


async def produce(client: postdate.Client, count: int = 1) -> None:
    async with client.producer("t", batch_messages_max=1) as producer:
        await producer.send_many([b"x"] * count)


async def subscribe(client: postdate.Client) -> None:
    async with client.subscribe("t", "s") as subscription:
        await anext(aiter(subscription))


USES: dict[str, Callable[[postdate.Client], Awaitable[object]]] = {
    "call": lambda client: client.server_info(),
    "change": lambda client: client.topics.create("t"),
    "pull": lambda client: client.receive("t", "s"),
    "subscribe": subscribe,
    "produce": produce,
}


async def seconds_until_given_up(use: Callable[[postdate.Client], Awaitable[object]], seed: int) -> float:
    loop = asyncio.get_running_loop()
    retry_for = timedelta(seconds=FOR_S)
    async with postdate.connect(NOBODY, retry_for=retry_for, rng=random.Random(seed)) as client:
        began = loop.time()
        with pytest.raises(postdate.Unavailable):
            await use(client)
        return loop.time() - began


@pytest.mark.slow
async def test_nothing_gives_up_before_its_time():
    cases = [(name, seed) for name in USES for seed in (1, 2, 3)]
    waits = await asyncio.gather(*(seconds_until_given_up(USES[name], seed) for name, seed in cases))
    assert not {case: seconds for case, seconds in zip(cases, waits, strict=True) if seconds < FOR_S}


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Lines of the SDK; gRPC has some of its own where a process has several loops."""
    return [
        f"{each.levelname} {each.getMessage()}" for each in caplog.records if each.name.startswith("postdate")
    ]


@pytest.mark.parametrize("use", USES.values(), ids=USES)
async def test_a_broker_that_is_not_there_is_told_of_once(
    use: Callable[[postdate.Client], Awaitable[object]], caplog: pytest.LogCaptureFixture
):
    async with postdate.connect(NOBODY, retry_for=timedelta(seconds=0.2), rng=random.Random(1)) as client:
        for _ in range(2):
            with pytest.raises(postdate.Unavailable):
                await use(client)
    why = "" if use is USES["change"] else " (Connection refused)"
    assert told(caplog) == [f"WARNING no connection to {NOBODY}{why}; trying for 0.2 s"]


@pytest.mark.parametrize("use", USES.values(), ids=USES)
async def test_what_is_not_tried_again_is_not_told_of(
    use: Callable[[postdate.Client], Awaitable[object]], caplog: pytest.LogCaptureFixture
):
    async with postdate.connect(NOBODY, retry_for=timedelta(0), rng=random.Random(1)) as client:
        with pytest.raises(postdate.Unavailable):
            await use(client)
    assert told(caplog) == []


async def test_a_broker_that_was_there_is_not_told_of_as_absent(
    broker: FakeBroker, client: postdate.Client, caplog: pytest.LogCaptureFixture
):
    async with client.producer("t", producer_name="p") as producer:
        await producer.send(b"x")
        await broker.stop()
        sending = asyncio.ensure_future(producer.send(b"y"))
        await asyncio.sleep(0)
        await broker.start(broker.port)
        await sending
    assert told(caplog) == []


@pytest.mark.parametrize("use", ["send", "subscribe"])
async def test_who_has_heard_of_a_broker_tells_of_no_absence_whatever_the_address(
    use: str, client: postdate.Client, caplog: pytest.LogCaptureFixture
):
    async with client.producer("t", producer_name="p") as producer, client.subscribe("t", "s"):
        await producer.send(b"x")
        # As with a socket's file, which nobody asks how many nodes there are.
        client._rpc._may_tell_absence = True
        if use == "send":
            await producer.send(b"y")
        else:
            await client.subscribe("t", "s2").open()
    client._rpc.tell_absence(postdate.Unavailable("the broker ended the stream"))
    assert told(caplog) == []


async def test_of_a_name_that_is_not_known_the_cause_alone_is_told(caplog: pytest.LogCaptureFixture):
    rpc = Rpc(NOBODY, retry_for=timedelta(seconds=30), rng=random.Random(1))
    text = (
        "errors resolving nope:1: [field:hostname lookup error:address lookup failed: Domain name not found]"
    )
    rpc.tell_absence(postdate.Unavailable(text, code="UNAVAILABLE"))
    await rpc.close()
    assert told(caplog) == [f"WARNING no connection to {NOBODY} (Domain name not found); trying for 30 s"]


class Patient(random.Random):
    """A source of chance by which each pause is an hour, if nothing ends it."""

    def uniform(self, a: float, b: float) -> float:
        return 3_600 / 0.05


@pytest.mark.slow
async def test_what_has_given_up_closes_at_once():
    retry_for = timedelta(seconds=FOR_S)
    async with postdate.connect(NOBODY, retry_for=retry_for, rng=Patient()) as client:
        producer = client.producer("t")
        await producer.open()
        with pytest.raises(postdate.Unavailable):
            await producer.send(b"x")
        async with asyncio.timeout(4):  # the grace of a stream's end is five seconds
            await producer.close()


@pytest.mark.parametrize("seed", range(50))
def test_last_attempt_comes_when_the_time_is_up(seed: int):
    backoff = Backoff(random.Random(seed))
    now, give_up_at = 0.0, random.Random(seed).uniform(0.001, 40)
    while (pause_s := backoff.next_within(give_up_at - now)) is not None:
        now += pause_s
    assert now == pytest.approx(give_up_at)


def test_advice_to_wait_beyond_the_time_left_is_an_end():
    backoff = Backoff(random.Random(1))
    assert backoff.next_within(1.0, timedelta(seconds=2)) is None
    assert (backoff.next_within(3.0, timedelta(seconds=2)) or 0) >= 2
