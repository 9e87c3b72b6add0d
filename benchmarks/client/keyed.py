"""Produces with a schedule_key on every message, each another one; and without, to compare."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, overload

import numpy as np

from benchmarks.client import raw
from benchmarks.client.control import check, phase
from benchmarks.client.produce import Pipeline
from postdate_api.v1 import producer_pb2

_DISTINCT = 64
_DIGITS = 12
_PREFIX = "order-"
_PLACEHOLDER = _PREFIX + "0" * _DIGITS
_HOUR_MS = 3_600_000
_DAY_DELAY = {"after_ms": [_HOUR_MS, 24 * _HOUR_MS]}


class KeyedRequests(Sequence[bytes]):
    """Serialized requests whose keys never come again: each is written anew when it is asked for."""

    def __init__(self, requests: list[bytes]) -> None:
        self._bytes = [np.frombuffer(bytearray(request), dtype=np.uint8) for request in requests]
        self._places = [_places(request) for request in requests]
        self._next = 0

    def __len__(self) -> int:
        return len(self._bytes)

    @overload
    def __getitem__(self, index: int) -> bytes: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[bytes]: ...
    def __getitem__(self, index: int | slice) -> bytes | Sequence[bytes]:
        if isinstance(index, slice):
            raise TypeError("one at a time")
        places = self._places[index]
        numbers = np.arange(self._next, self._next + len(places))
        self._next += len(places)
        digits = numbers[:, None] // 10 ** np.arange(_DIGITS - 1, -1, -1) % 10 + ord("0")
        self._bytes[index][places[:, None] + np.arange(_DIGITS)] = digits
        return self._bytes[index].tobytes()


def key_of(number: int) -> str:
    """The key of the message that was written as that number, from 0 on."""
    return f"{_PREFIX}{number:0{_DIGITS}}"


async def load(task: dict[str, Any]) -> dict[str, Any]:
    """Make the topic, and store `count` messages with a key each."""
    async with raw.connect(task["address"]) as channel:
        await raw.create_subscriptions(channel, 1)
        requests = _requests(task, raw.TOPIC, task["delay"], with_keys=True)
        keyed = KeyedRequests(requests)
        pipeline = Pipeline(raw.produce_stream(channel), keyed, task["batch"], task["window"])
        await pipeline.run(task["count"] // task["batch"])
    check(pipeline.acknowledged == task["count"], f"{pipeline.acknowledged} of {task['count']} were stored")
    return {"stored": pipeline.acknowledged}


async def produce_keys(task: dict[str, Any]) -> dict[str, Any]:
    """The rate with keys, without, and with again, one after the other, of topics of their own.

    Then each once beside what is begun in the phase `beside`.
    """
    async with raw.connect(task["address"]) as channel:
        await phase("measuring")
        rates = await _rates(channel, task, "quiet", 2)
        await phase("beside")
        beside = await _rates(channel, task, "beside", 1)
        await phase("done")
    keyed, plain = rates["keys"], rates["none"]
    return {
        "rate": keyed,
        "plain_rate": plain,
        "ratio": keyed / plain,
        "beside_rate": beside["keys"],
        "beside_ratio": beside["keys"] / beside["none"],
    }


async def _rates(channel: Any, task: dict[str, Any], name: str, turns: int) -> dict[str, float]:
    """The best rate of each kind."""
    rates = {"keys": 0.0, "none": 0.0}
    for turn in range(turns):
        for kind in ("keys", "none"):
            requests = _requests(task, f"{name}-{kind}-{turn}", _DAY_DELAY, with_keys=kind == "keys")
            pipeline = Pipeline(
                raw.produce_stream(channel),
                KeyedRequests(requests) if kind == "keys" else requests,
                task["batch"],
                task["window"],
            )
            rates[kind] = max(rates[kind], await _rate(pipeline, task))
    return rates


async def _rate(pipeline: Pipeline, task: dict[str, Any]) -> float:
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(pipeline.run())
        await asyncio.sleep(task["warm_seconds"])
        before = pipeline.acknowledged
        await asyncio.sleep(task["seconds"])
        rate = (pipeline.acknowledged - before) / task["seconds"]
        pipeline.stop()
    return float(rate)


def _requests(task: dict[str, Any], topic: str, delay: dict[str, Any], *, with_keys: bool) -> list[bytes]:
    found = []
    draw = raw.requests(_DISTINCT, task["batch"], task["payload_bytes"], delay)
    for place, request in enumerate(draw):
        message = producer_pb2.ProduceRequest.FromString(request)
        message.topic, message.request_id = topic, place
        if with_keys:
            for each in message.messages:
                each.schedule_key = _PLACEHOLDER
        found.append(message.SerializeToString())
    return found


def _places(request: bytes) -> np.ndarray:
    """Return the offset of each key's digits."""
    mark = _PLACEHOLDER.encode()
    places, at = [], request.find(mark)
    while at >= 0:
        places.append(at + len(mark) - _DIGITS)
        at = request.find(mark, at + 1)
    check(bool(places), "a request has no keys")
    return np.array(places)
