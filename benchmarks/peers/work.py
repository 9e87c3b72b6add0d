"""The work of each row, by what every peer can do. Each message must come; those that come again are counted."""

from __future__ import annotations

import asyncio
import os
import random
import struct
import time
from collections.abc import Sequence
from typing import Any

from benchmarks.client.control import check, percentiles, phase
from benchmarks.peers.peer import Peer, wait_connected

_BATCH = 1_000
_DISTINCT = 16
_DELAY_SECONDS = (3_600, 7_200)
"""Of what is produced and never taken."""
_FEW = 10
_ANSWERS_MIN = 4
"""For a rate; a slow peer is given more time."""
_OUTSTANDING_MAX = 64
_HEAD = 16
"""A payload begins with its due time and its number, eight bytes each; the rest is random."""


async def prepared(peer: Peer, task: dict[str, Any]) -> dict[str, Any]:
    """Prepared batches of 1,000, several in flight."""
    batches = await _prepared_batches(peer, task["payload_bytes"])
    return await _for_seconds(peer, task, peer.in_flight, lambda n: peer.produce_prepared(batches[n]))


async def bursts(peer: Peer, task: dict[str, Any]) -> dict[str, Any]:
    """Bursts of 1,000 through the client, one in flight."""
    batches = [_batch(task["payload_bytes"]) for _ in range(_DISTINCT)]
    return await _for_seconds(peer, task, 1, lambda n: peer.produce_batch(*batches[n]))


async def single(peer: Peer, task: dict[str, Any]) -> dict[str, Any]:
    """One message after the other, each awaited."""
    payloads, due_ms = _batch(task["payload_bytes"])
    pairs = list(zip(payloads, due_ms, strict=True))[:_DISTINCT]
    return await _for_seconds(peer, task, 1, lambda n: peer.produce(*pairs[n]), count=1)


async def herd(peer: Peer, task: dict[str, Any]) -> dict[str, Any]:
    """A waiting consumer; all messages become due at one time, and are acknowledged."""
    count, size = task["count"], task["payload_bytes"]
    check(count % _BATCH == 0, "count is not a multiple of a batch")
    begin = time.perf_counter()
    await peer.produce_prepared(await peer.prepare(*_batch(size)))  # due much later
    lead = 1.0 + 2 * (time.perf_counter() - begin) * count / _BATCH
    due_ms = int((time.time() + lead) * 1000)
    due_at = time.perf_counter() + due_ms / 1000 - time.time()
    arrived = Arrived()
    for first in range(0, count, _BATCH):
        payloads = [_payload(due_ms, number, size) for number in range(first, first + _BATCH)]
        await peer.produce_prepared(await peer.prepare(payloads, [due_ms] * _BATCH))
    left = due_at - time.perf_counter()
    check(left > 0.2, f"the load took until {left:.2f} s before the messages were due")
    consuming = asyncio.create_task(peer.consume(count, arrived.note))
    await asyncio.sleep(due_at - time.perf_counter() - 0.1)
    await phase("measuring")
    await consuming
    seconds = time.perf_counter() - due_at
    await phase("measured")
    late = arrived.lateness(count)
    return {"seconds": seconds, "early": late["early"], "again": late["again"]}


async def lateness(peer: Peer, task: dict[str, Any]) -> dict[str, Any]:
    """Single messages at a given rate, each due some whole seconds after it was sent."""
    count = task["rate"] * task["seconds"]
    rng, arrived = random.Random(7), Arrived()
    low, high = task["delay_seconds"]
    slots = asyncio.Semaphore(_OUTSTANDING_MAX)

    async def send(number: int) -> None:
        try:
            due_ms = int(time.time() * 1000) + 1000 * rng.randint(low, high)
            await peer.produce(_payload(due_ms, number, 100), due_ms)
        finally:
            slots.release()

    await phase("measuring")
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(peer.consume(count, arrived.note))
        begin = time.perf_counter()
        for number in range(count):
            ahead = begin + number / task["rate"] - time.perf_counter()
            if ahead > 0:
                await asyncio.sleep(ahead)
            await slots.acquire()
            tasks.create_task(send(number))
        sent_rate = count / (time.perf_counter() - begin)
    await phase("measured")
    return {**arrived.lateness(count), "sent_rate": sent_rate}


async def pending(peer: Peer, task: dict[str, Any]) -> dict[str, Any]:
    """Messages that wait for long; then a few that do not, a kill, and the first delivery."""
    count = task["count"]
    check(count % _BATCH == 0, "count is not a multiple of a batch")
    batches = await _prepared_batches(peer, 100)
    await phase("empty")

    async def load(numbers: Any) -> None:
        for number in numbers:
            await peer.produce_prepared(batches[number % _DISTINCT])

    numbers = iter(range(count // _BATCH))
    async with asyncio.TaskGroup() as tasks:
        for _ in range(peer.in_flight):
            tasks.create_task(load(numbers))
    await phase("loaded")
    due_ms = int(time.time() * 1000) + 1_000  # later than the answer, so that it is stored as one that waits
    few = [_payload(due_ms, number, 100) for number in range(_FEW)]
    await peer.produce_batch(few, [due_ms] * _FEW)
    await peer.close()
    # Due by the kill, also where times are rounded up to seconds, or the figure would be the wait for that time.
    await asyncio.sleep(due_ms / 1000 + 1.0 - time.time())
    await phase("stored")  # killed and started now
    await wait_connected(peer)
    first: list[float] = []
    arrived = Arrived()

    def note(payloads: Sequence[bytes]) -> None:
        first.append(time.monotonic())
        arrived.note(payloads)

    await peer.consume(_FEW, note)
    arrived.lateness(_FEW)
    return {"first_at": first[0]}


WORKS = {
    "prepared": prepared,
    "bursts": bursts,
    "single": single,
    "herd": herd,
    "lateness": lateness,
    "pending": pending,
}


class Arrived:
    """All that was delivered, and when."""

    def __init__(self) -> None:
        self._batches: list[tuple[float, Sequence[bytes]]] = []

    def note(self, payloads: Sequence[bytes]) -> None:
        self._batches.append((time.time() * 1000, payloads))

    def lateness(self, count: int) -> dict[str, Any]:
        """Receipt minus due time in milliseconds; each of `count` numbers must be there, `again` counts the rest."""
        late: dict[int, float] = {}
        seen = 0
        for at, batch in self._batches:
            seen += len(batch)
            for payload in batch:
                due_ms, number = struct.unpack_from("<QQ", payload)
                late.setdefault(number, at - due_ms)
        sent = late.keys() & set(range(count))
        check(len(sent) == len(late) == count, f"{seen} messages came, {len(sent)} of the {count} awaited")
        early = sum(each < 0 for each in late.values())
        return {**percentiles(list(late.values())), "early": early, "again": seen - count}


async def _for_seconds(
    peer: Peer, task: dict[str, Any], in_flight: int, produce: Any, *, count: int = _BATCH
) -> dict[str, Any]:
    """Produce for `seconds` after `warm_seconds`; messages a second, and how long an answer takes."""
    number, stopping = 0, False
    took_ms: list[float] = []
    answered_at: list[float] = []
    enough = asyncio.Event()

    async def work() -> None:
        nonlocal number
        while not stopping:
            number += 1
            begin = time.perf_counter()
            await produce(number % _DISTINCT)
            end = time.perf_counter()
            took_ms.append((end - begin) * 1000)
            answered_at.append(end)
            if len(answered_at) >= _ANSWERS_MIN:
                enough.set()
            await asyncio.sleep(0)  # a client that blocks in the call would never let us look at the time

    async with asyncio.TaskGroup() as tasks:
        for _ in range(in_flight):
            tasks.create_task(work())
        await asyncio.sleep(task["warm_seconds"])
        await phase("measuring")
        took_ms.clear()
        answered_at.clear()
        enough.clear()
        await asyncio.sleep(task["seconds"])
        await enough.wait()  # a run has a bound of its own
        await phase("measured")
        stopping = True
    return {"rate": count * answers_per_second(answered_at), **percentiles(took_ms)}


def answers_per_second(answered_at: Sequence[float]) -> float:
    """Answers from the first to the last one by the time between, so that slow ones are not cut in two."""
    check(len(answered_at) > 1, "fewer than two answers came")
    return (len(answered_at) - 1) / (answered_at[-1] - answered_at[0])


async def _prepared_batches(peer: Peer, payload_bytes: int) -> list[Any]:
    return [await peer.prepare(*_batch(payload_bytes)) for _ in range(_DISTINCT)]


def _batch(payload_bytes: int) -> tuple[list[bytes], list[int]]:
    """A batch of random payloads, each with a due time of its own, far enough away that none is delivered."""
    now_ms = int(time.time() * 1000)
    low, high = _DELAY_SECONDS
    due_ms = [now_ms + random.randint(low * 1000, high * 1000) for _ in range(_BATCH)]
    return [os.urandom(payload_bytes) for _ in range(_BATCH)], due_ms


def _payload(due_ms: int, number: int, size: int) -> bytes:
    return due_ms.to_bytes(8, "little") + number.to_bytes(8, "little") + os.urandom(size - _HEAD)
