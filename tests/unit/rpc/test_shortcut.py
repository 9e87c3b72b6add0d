"""The shortcut of calls to a shard (SHORTCUT-1 to SHORTCUT-3): its frames, and both of its ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest

from broker.rpc import shortcut as module
from broker.rpc.shortcut import CALL_BYTES_MAX, CALLS_MAX, METHODS, Shortcut, ShortcutPort, socket_beside
from broker.rpc.topic_of import TOPIC_METHODS
from tests.wire.conftest import LIMIT_SECONDS, eventually, within

PRODUCE = "/postdate.v1.ProducerService/Produce"
Work = Callable[[bytes, Any], Awaitable[bytes]]


class Handlers:
    """The interceptor that makes streams of calls, as the reception does; what serves them is told by the test."""

    def __init__(self) -> None:
        self.work: Work = self.echo
        self.begun: list[Any] = []
        self.ended: list[Any] = []

    async def intercept_service(self, continuation: Any, details: Any) -> Any:
        handler = await continuation(details)

        async def serve(_: Any, context: Any) -> bytes:
            self.begun.append(context)
            context.add_done_callback(self.ended.append)
            return bytes(await handler.unary_unary(await context.read(), context))

        return grpc.stream_unary_rpc_method_handler(serve)

    def find(self, _: str) -> Any:
        async def call(message: bytes, context: Any) -> bytes:
            return await self.work(message, context)  # what that is now

        return grpc.unary_unary_rpc_method_handler(call)

    async def echo(self, message: bytes, context: Any) -> bytes:
        context.set_trailing_metadata((("told", "x"), ("told-bin", b"\xff")))
        return message + repr(context.invocation_metadata()).encode()

    async def wait(self, message: bytes, context: Any) -> bytes:
        await asyncio.Event().wait()
        raise AssertionError


class Ends:
    """A port, what serves its calls, and a shortcut to it."""

    def __init__(self, folder: Path) -> None:
        self.handlers = Handlers()
        socket = str(folder / "0.grpc")
        self.port = ShortcutPort(socket, [self.handlers], self.handlers.find)
        self.shortcut = Shortcut(socket_beside(socket))

    async def open(self) -> None:
        await self.port.start()
        await eventually(lambda: self.shortcut.takes(PRODUCE, b""))

    async def ask(self, message: bytes = b"m", metadata: Any = ()) -> Any:
        return await within(self.shortcut.ask(PRODUCE, message, metadata))


@pytest.fixture
async def ends(tmp_path: Path) -> AsyncIterator[Ends]:
    made = Ends(tmp_path)
    await made.open()
    yield made
    await made.shortcut.close()
    await made.port.stop(0)


def test_frames_are_taken_as_they_become_whole():
    frames = [(1, 7, [b"path", b"", b"x" * 70_000]), (3, 8, []), (2, 0xFFFF_FFFF, [b""])]
    encoded = b"".join(module.encode_frame(*frame) for frame in frames)
    arrived, taken = bytearray(), []
    for begin in range(0, len(encoded), 1_000):
        arrived += encoded[begin : begin + 1_000]
        taken += list(module.decode_frames(arrived))
    assert [(frame.kind, frame.call, list(frame.parts)) for frame in taken] == frames
    assert not arrived


@pytest.mark.parametrize("wrong", [b"\xff" * 20, b"\x00" * 11, b"\x0f\0\0\0\1\1\0\0\0\1\0\x09\0\0\0"])
def test_what_is_no_frame_is_told(wrong: bytes):
    with pytest.raises(ValueError, match="frame"):
        list(module.decode_frames(bytearray(wrong)))


def test_its_methods_name_one_topic_each():
    assert METHODS <= TOPIC_METHODS


async def test_a_call_is_answered_with_metadata_both_ways(ends: Ends):
    answer, trailing = await ends.ask(b"m", (("a", "ä"), ("b-bin", b"\x00\xff")))
    assert answer == b"m" + repr((("a", "ä"), ("b-bin", b"\x00\xff"))).encode()
    assert trailing == (("told", "x"), ("told-bin", b"\xff"))
    assert ends.handlers.begun == ends.handlers.ended, "SHORTCUT-2"


async def test_a_refusal_has_its_status_and_details(ends: Ends):
    async def refuse(_: bytes, context: Any) -> bytes:
        await context.abort(grpc.StatusCode.NOT_FOUND, "no such topic", (("why-bin", b"\x01"),))
        raise AssertionError

    ends.handlers.work = refuse
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await ends.ask()
    assert (refused.value.code(), refused.value.details()) == (grpc.StatusCode.NOT_FOUND, "no such topic")
    trailing: Any = tuple(refused.value.trailing_metadata() or ())
    assert trailing == (("why-bin", b"\x01"),)


async def test_a_bug_is_told_as_one(ends: Ends, caplog: pytest.LogCaptureFixture):
    async def fail(_: bytes, __: Any) -> bytes:
        raise KeyError("a secret")

    ends.handlers.work = fail
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await ends.ask()
    assert refused.value.code() is grpc.StatusCode.UNKNOWN
    assert "secret" not in (refused.value.details() or "")
    assert "A call by the shortcut has failed" in caplog.text


async def test_who_goes_ends_the_call(ends: Ends):
    ends.handlers.work = ends.handlers.wait
    asking = asyncio.create_task(ends.ask())
    await eventually(lambda: bool(ends.handlers.begun))
    asking.cancel()
    await eventually(lambda: bool(ends.handlers.ended))
    ends.handlers.work = ends.handlers.echo
    assert (await ends.ask())[0].startswith(b"m")


async def test_calls_of_a_connection_that_breaks_end_as_gRPC_ends_them(ends: Ends):
    ends.handlers.work = ends.handlers.wait
    asking = asyncio.create_task(ends.ask())
    await eventually(lambda: bool(ends.handlers.begun))
    await ends.port.stop(0)
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await asking
    assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
    assert not refused.value.trailing_metadata()
    assert len(ends.handlers.ended) == 1
    assert not ends.shortcut.takes(PRODUCE, b"")


async def test_a_call_waits_while_the_shard_lives_and_ends_once_it_is_silent(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(module, "PING_SECONDS", 0.002)
    monkeypatch.setattr(module, "SILENT_SECONDS", LIMIT_SECONDS)
    ends.handlers.work = ends.handlers.wait
    asking = asyncio.create_task(ends.ask())
    shortcut = ends.shortcut._asking
    assert shortcut is not None
    await eventually(lambda: bool(ends.handlers.begun))
    heard_at = shortcut._heard_at
    await eventually(lambda: shortcut._heard_at > heard_at)
    assert not asking.done()
    monkeypatch.setattr(module, "SILENT_SECONDS", 0)
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await asking
    assert refused.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_no_call_is_begun_where_the_shard_leaves_and_those_under_way_are_answered(ends: Ends):
    go_on = asyncio.Event()

    async def work(_: bytes, __: Any) -> bytes:
        await go_on.wait()
        return b"done"

    ends.handlers.work = work
    asking = asyncio.create_task(ends.ask())
    await eventually(lambda: bool(ends.handlers.begun))
    stopping = asyncio.create_task(ends.port.stop(30))
    await eventually(lambda: not ends.shortcut.takes(PRODUCE, b""))
    go_on.set()
    assert (await asking)[0] == b"done"
    await within(stopping)


async def test_it_takes_small_calls_of_its_methods_and_so_many(ends: Ends):
    assert not ends.shortcut.takes(PRODUCE, bytes(CALL_BYTES_MAX + 1))
    assert not ends.shortcut.takes("/postdate.v1.ConsumerService/Receive", b"")
    ends.handlers.work = ends.handlers.wait
    asking = [asyncio.create_task(ends.ask()) for _ in range(CALLS_MAX)]
    await eventually(lambda: len(ends.handlers.begun) == CALLS_MAX)
    assert not ends.shortcut.takes(PRODUCE, b"")
    asking.pop().cancel()
    await eventually(lambda: ends.shortcut.takes(PRODUCE, b""))
    for each in asking:
        each.cancel()
    await asyncio.gather(*asking, return_exceptions=True)


async def test_it_is_open_again_once_the_shard_is_back(ends: Ends):
    await ends.port.stop(0)
    await eventually(lambda: not ends.shortcut.takes(PRODUCE, b""))
    await ends.open()
    assert (await ends.ask())[0].startswith(b"m")


async def test_an_answer_counts_until_the_front_takes_it(ends: Ends):
    async def answer(_: bytes, __: Any) -> bytes:
        return bytes(8 << 20)

    ends.handlers.work = answer
    asking = ends.shortcut._asking
    assert asking is not None
    assert asking._transport is not None
    asking._transport.pause_reading()
    asked = asyncio.create_task(ends.ask())
    [connection] = await _connections(ends.port)
    await eventually(lambda: bool(connection._unwritten))
    assert not ends.handlers.ended
    asking._transport.resume_reading()
    assert len((await asked)[0]) == 8 << 20
    await eventually(lambda: bool(ends.handlers.ended))


async def _connections(port: ShortcutPort) -> list[Any]:
    await eventually(lambda: bool(port._connections))
    return list(port._connections)
