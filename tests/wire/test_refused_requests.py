"""Refused requests are gone: no failure keeps its request in a cycle, which would stay until the collector runs."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import pytest_asyncio
from google.protobuf.message import Message

from benchmarks.http2 import END_HEADERS, HEADERS, Raw, call, connected, frame, prefixed
from broker.rpc.access_rules import RULES
from broker.storage.varint import encode_varint
from postdate_api.v1 import consumer_pb2, message_pb2, producer_pb2
from tests.wire.conftest import Wire, on_shared, one_for_all, within

BYTES = 300 << 10
PADDING = b"\xfa\x3f" + encode_varint(BYTES) + bytes(BYTES)
"""A field that no request has."""
SUBSCRIBE, PRODUCE_STREAM = (
    "/postdate.v1.ConsumerService/Subscribe",
    "/postdate.v1.ProducerService/ProduceStream",
)
OPEN = consumer_pb2.SubscribeRequest(open=consumer_pb2.Open(topic="t", subscription="s")).SerializeToString()
TOO_LARGE = producer_pb2.ProduceRequest(topic="t", messages=[message_pb2.Message(payload=bytes(BYTES))])
KINDS = {"no request": b"\xff" * BYTES, "of a topic that is not there": b"\x0a\x04none" + PADDING}
CASES = [
    *(
        (path, [raw], kind)
        for path in sorted(RULES)
        if path.startswith("/postdate.")
        for kind, raw in KINDS.items()
    ),
    (SUBSCRIBE, [OPEN, KINDS["no request"]], "a later frame"),
    (PRODUCE_STREAM, [TOO_LARGE.SerializeToString()] * 2, "beyond a limit"),
    ("/postdate.v1.ProducerService/Produce", [TOO_LARGE.SerializeToString()], "beyond a limit"),
]


def is_large(thing: Any) -> bool:
    if isinstance(thing, bytes):
        return len(thing) >= BYTES
    return isinstance(thing, Message) and thing.ByteSize() >= BYTES


@contextmanager
def cycles() -> Iterator[list[Any]]:
    """Collect what only the collector finds, once the block has ended."""
    gc.collect(1)
    gc.freeze()  # what was there before, other tests among it, is not walked for each of these
    gc.disable()
    found: list[Any] = []
    try:
        yield found
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        found += gc.garbage
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


async def ended(raw: Raw, number: int, path: str, messages: list[bytes]) -> None:
    await raw.send(frame(HEADERS, END_HEADERS, number, call(path)))
    await raw.upload(number, b"".join(prefixed(each) for each in messages), ends=True)
    await raw.until_ended(number)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def refusing(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Wire]:
    settings: dict[str, Any] = {"reflection": "on", "payload_bytes_max": BYTES // 2}
    async with one_for_all(tmp_path_factory, **settings) as wire:
        yield wire


@on_shared
@pytest.mark.parametrize(
    ("path", "messages"), [case[:2] for case in CASES], ids=[f"{path}-{kind}" for path, _, kind in CASES]
)
async def test_a_refused_request_is_in_no_cycle(refusing: Wire, path: str, messages: list[bytes]):
    async with connected(refusing.server.grpc_address, is_honest=True) as raw:
        reading = asyncio.create_task(raw.live())
        await within(ended(raw, 1, path, messages))
        with cycles() as found:
            for number in (3, 5):
                await within(ended(raw, number, path, messages))
            await asyncio.sleep(0.05)  # tasks of the calls come to their ends
        reading.cancel()
    kept = [each for thing in found for each in gc.get_referents(thing) if is_large(each)]
    assert not kept, [type(thing) for thing in found if any(map(is_large, gc.get_referents(thing)))]
