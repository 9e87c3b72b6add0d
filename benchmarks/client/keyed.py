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
_PLACEHOLDER = "order-" + "0" * _DIGITS
_HOUR_MS = 3_600_000


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


async def produce_keys(task: dict[str, Any]) -> dict[str, Any]:
    """The rate with keys, without, and with again, one after the other, of topics of their own."""
    async with raw.connect(task["address"]) as channel:
        await phase("measuring")
        rates: dict[str, list[float]] = {"keys": [], "none": []}
        for turn, kind in enumerate(("keys", "none", "keys", "none")):
            requests = _requests(task, f"{kind}-{turn}", with_keys=kind == "keys")
            pipeline = Pipeline(
                raw.produce_stream(channel),
                KeyedRequests(requests) if kind == "keys" else requests,
                task["batch"],
                task["window"],
            )
            rates[kind].append(await _rate(pipeline, task))
    keyed, plain = max(rates["keys"]), max(rates["none"])
    return {"rate": keyed, "plain_rate": plain, "ratio": keyed / plain}


async def _rate(pipeline: Pipeline, task: dict[str, Any]) -> float:
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(pipeline.run())
        await asyncio.sleep(task["warm_seconds"])
        before = pipeline.acknowledged
        await asyncio.sleep(task["seconds"])
        rate = (pipeline.acknowledged - before) / task["seconds"]
        pipeline.stop()
    return float(rate)


def _requests(task: dict[str, Any], topic: str, *, with_keys: bool) -> list[bytes]:
    found = []
    draw = raw.requests(
        _DISTINCT, task["batch"], task["payload_bytes"], {"after_ms": [_HOUR_MS, 24 * _HOUR_MS]}
    )
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
