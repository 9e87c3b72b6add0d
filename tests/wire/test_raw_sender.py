"""The sender that plays strangers in tests and floods: what it sends within windows, gRPC takes whole."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import grpc
import pytest

from benchmarks.http2 import (
    END_HEADERS,
    HEADERS,
    RST_STREAM,
    WINDOW_BYTES,
    Raw,
    call,
    connected,
    frame,
    message,
    prefixed,
)
from tests.wire.conftest import eventually, within

BODY = bytes(range(256)) * (5 << 12)  # 5 MiB


@asynccontextmanager
async def reading(raw: Raw) -> AsyncIterator[asyncio.Task[None]]:
    task = asyncio.create_task(raw.live())
    try:
        yield task
    finally:
        task.cancel()


class Taking:
    """A server that takes messages, and notes what came; a call of `/s/wait` is never read."""

    def __init__(self, **options: int) -> None:
        self.taken: list[str] = []
        self._server = grpc.aio.server(options=[("grpc.max_receive_message_length", -1), *options.items()])
        handlers = {"take": self._take, "wait": self._wait, "refuse": self._refuse}
        self._server.add_generic_rpc_handlers(
            (
                grpc.method_handlers_generic_handler(
                    "s", {name: grpc.stream_unary_rpc_method_handler(work) for name, work in handlers.items()}
                ),
            )
        )

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[str]:
        port = self._server.add_insecure_port("127.0.0.1:0")
        await self._server.start()
        try:
            yield f"127.0.0.1:{port}"
        finally:
            await self._server.stop(None)

    async def _take(self, messages: AsyncIterator[bytes], _: Any) -> bytes:
        async for each in messages:
            self.taken.append(hashlib.sha256(each).hexdigest())
        return b"taken"

    async def _wait(self, _: Any, __: Any) -> bytes:
        await asyncio.Event().wait()
        return b""

    async def _refuse(self, _: Any, context: Any) -> bytes:
        await context.abort(grpc.StatusCode.PERMISSION_DENIED, "no")
        return b""


@pytest.mark.parametrize("probe", [0, 1], ids=["windows that stay", "windows that grow"])
async def test_large_calls_pass_whole(probe: int):
    server = Taking(**{"grpc.http2.bdp_probe": probe})
    async with server.serving() as address, connected(address, is_honest=True) as raw, reading(raw) as task:
        for number in (1, 3, 5):
            await raw.send(frame(HEADERS, END_HEADERS, number, call("/s/take")))
        uploads = (raw.upload(number, prefixed(BODY), ends=True) for number in (1, 3, 5))
        assert await within(asyncio.gather(*uploads)) == [True, True, True]
        await eventually(lambda: server.taken == [hashlib.sha256(BODY).hexdigest()] * 3)
        assert not task.done(), "the connection was cut"
    assert raw.sent_bytes > 3 * len(BODY)


async def test_without_windows_the_call_is_cut():
    """So what does not heed them shows nothing of what a stranger can do who does."""
    server = Taking(**{"grpc.http2.bdp_probe": 0})
    async with server.serving() as address, connected(address) as raw:
        await raw.send(frame(HEADERS, END_HEADERS, 1, call("/s/wait")))
        cut = asyncio.create_task(raw.until(RST_STREAM))
        body = bytes(64 * WINDOW_BYTES)
        with suppress(ConnectionError):  # it closes the connection as well, where it notices that first
            for at in range(0, len(body), WINDOW_BYTES):
                if cut.done():
                    break
                await raw.send(message(1, body[at : at + WINDOW_BYTES], of_bytes=len(body)))
        assert await cut == (1).to_bytes(4, "big"), "PROTOCOL_ERROR"


async def test_an_upload_waits_for_its_window_and_ends_with_its_call_or_connection():
    server = Taking(**{"grpc.http2.bdp_probe": 0})
    async with server.serving() as address, connected(address) as raw, reading(raw):
        for number, name in ((1, "wait"), (3, "refuse"), (5, "wait")):
            await raw.send(frame(HEADERS, END_HEADERS, number, call(f"/s/{name}")))
        waiting = asyncio.create_task(raw.upload(1, prefixed(BODY)))
        assert not await within(raw.upload(3, prefixed(BODY))), "it was refused, and went on"
        await eventually(lambda: raw.sent_bytes > WINDOW_BYTES)
        raw.writer.close()
        with pytest.raises(ConnectionError):
            await within(waiting)
