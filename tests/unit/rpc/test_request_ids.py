"""Answers that are remembered: by request_id, for a while, and not too many."""

from __future__ import annotations

import asyncio

import pytest

from broker.errors import InvalidRequest, LimitReached, NotFound
from broker.rpc import request_ids as request_ids_module
from broker.rpc.request_ids import RequestIds
from broker.settings import MIB
from broker.testing.sim_clock import SimClock
from postdate_api.v1 import schedule_pb2
from tests.unit.rpc.fake_schedule import HandTime


class Asked:
    """Counts how often a change is made."""

    def __init__(self, answers: RequestIds) -> None:
        self.answers = answers
        self.count = 0

    async def once(self, request_id: str, size: int = 1, *, dry_run: bool = False) -> bytes:
        async def change() -> bytes:
            self.count += 1
            return bytes(size)

        request = schedule_pb2.CancelScheduledRequest(request_id=request_id, dry_run=dry_run)
        return await self.answers.once("t", request, change)


@pytest.fixture
def time() -> HandTime:
    return HandTime()


@pytest.fixture
def asked(time: HandTime) -> Asked:
    return Asked(RequestIds(SimClock(time, 0)))


async def test_a_change_is_made_once_for_ten_minutes(asked: Asked, time: HandTime):
    for _ in range(3):
        await asked.once("a")
    assert asked.count == 1
    await asked.once("")
    await asked.once("")
    assert asked.count == 3
    time.advance(600_000)
    await asked.once("a")
    assert asked.count == 4


async def test_an_id_is_for_one_request(asked: Asked):
    await asked.once("a")
    with pytest.raises(InvalidRequest, match="another request"):
        await asked.once("a", dry_run=True)


async def test_many_bytes_of_answers_push_the_oldest_out(asked: Asked):
    for i in range(9):
        await asked.once(f"{i}", 8 * MIB)
    assert asked.count == 9
    await asked.once("8", 8 * MIB)  # the newest eight are known
    await asked.once("1", 8 * MIB)
    assert asked.count == 9
    await asked.once("0", 8 * MIB)  # is new again, and pushes the next one out
    await asked.once("2", 8 * MIB)
    assert asked.count == 10
    await asked.once("1", 8 * MIB)
    assert asked.count == 11


@pytest.mark.slow
async def test_small_answers_are_limited_by_their_number(asked: Asked):
    for i in range(10_001):
        await asked.once(f"{i}")
    await asked.once("1")
    assert asked.count == 10_001
    await asked.once("0")
    assert asked.count == 10_002


async def test_a_repeat_waits_for_the_answer_that_is_on_its_way_and_a_failure_is_not_remembered(
    time: HandTime,
):
    answers, gate, count = RequestIds(SimClock(time, 0)), asyncio.Event(), 0

    async def change() -> bytes:
        nonlocal count
        count += 1
        await gate.wait()
        if count == 1:
            raise NotFound("no")
        return b"x"

    request = schedule_pb2.CancelScheduledRequest(request_id="a")
    calls = [asyncio.ensure_future(answers.once("t", request, change)) for _ in range(3)]
    await asyncio.sleep(0)
    gate.set()
    assert {type(each) for each in await asyncio.gather(*calls, return_exceptions=True)} == {NotFound}
    assert (count, await answers.once("t", request, change), count) == (1, b"x", 2)


async def _cancel_first(asked: Asked, request_id: str, size: int) -> None:
    """A caller who goes away before the answer comes, which comes all the same."""
    call = asyncio.ensure_future(asked.once(request_id, size))
    await asyncio.sleep(0)
    call.cancel()
    await asyncio.wait([call])
    await asyncio.sleep(0)


async def test_answers_for_callers_who_went_away_are_counted_too(asked: Asked):
    for i in range(9):
        await _cancel_first(asked, f"{i}", 8 * MIB)
    assert asked.count == 9
    await asked.once("8", 8 * MIB)
    assert asked.count == 9
    await asked.once("0", 8 * MIB)
    assert asked.count == 10


async def test_what_failed_after_its_caller_went_away_may_be_tried_again(time: HandTime):
    answers, failures = RequestIds(SimClock(time, 0)), [NotFound("not yet")]

    async def change() -> bytes:
        await asyncio.sleep(0)
        if failures:
            raise failures.pop()
        return b"x"

    request = schedule_pb2.CancelScheduledRequest(request_id="a")
    call = asyncio.ensure_future(answers.once("t", request, change))
    await asyncio.sleep(0)
    call.cancel()
    await asyncio.wait([call])
    while failures:
        await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert await answers.once("t", request, change) == b"x"


class Slow:
    """Changes that take until they are let go."""

    def __init__(self, answers: RequestIds) -> None:
        self.answers = answers
        self.count = 0
        self.gate = asyncio.Event()

    def ask(self, request_id: str) -> asyncio.Future[bytes]:
        async def change() -> bytes:
            self.count += 1
            await self.gate.wait()
            return b"x"

        request = schedule_pb2.CancelScheduledRequest(request_id=request_id)
        return asyncio.ensure_future(self.answers.once("t", request, change))


WAYS_OUT = ("number", "age", "bytes")


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS_OUT)
async def test_a_change_that_is_under_way_is_not_made_again_whatever_is_forgotten(
    asked: Asked, time: HandTime, way: str
):
    slow = Slow(asked.answers)
    first = slow.ask("slow")
    await asyncio.sleep(0)
    if way == "number":
        for i in range(10_001):
            await asked.once(f"{i}")
    elif way == "bytes":
        for i in range(9):
            await asked.once(f"{i}", 8 * MIB)
    else:
        time.advance(1_200_000)
        await asked.once("a")
    again = slow.ask("slow")
    await asyncio.sleep(0)
    slow.gate.set()
    assert (await first, await again, slow.count) == (b"x", b"x", 1)
    assert await slow.ask("slow") == b"x"  # and is remembered like any other now
    assert slow.count == 1
    time.advance(600_000)
    await slow.ask("slow")
    assert slow.count == 2


async def test_where_all_are_under_way_no_more_are_begun(time: HandTime, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(request_ids_module, "_REMEMBERED_MAX", 3)
    slow = Slow(RequestIds(SimClock(time, 0)))
    calls = [slow.ask(f"{i}") for i in range(3)]
    with pytest.raises(LimitReached) as caught:
        async with asyncio.timeout(5):
            await slow.ask("3")
    assert caught.value.reason == "TOO_MANY_CALLS"
    slow.gate.set()
    await asyncio.gather(*calls)
    assert (await slow.ask("3"), slow.count) == (b"x", 4)
