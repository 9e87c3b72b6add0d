"""The guard against forks: a client that was closed, in whatever way, does not count as open."""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import Awaitable, Callable

import grpc.aio
import pytest

import postdate
from postdate import _rpc
from tests.unit.client.fake_server import FakeBroker


async def hangs(_channel: object, _grace: object) -> None:
    await asyncio.Event().wait()


async def fails(_channel: object, _grace: object) -> None:
    raise OSError("the channel is ill")


async def cancel(client: postdate.Client) -> None:
    closing = asyncio.ensure_future(client.close())
    await asyncio.sleep(0)
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing


async def fail(client: postdate.Client) -> None:
    with pytest.raises(OSError, match="ill"):
        await client.close()


@pytest.mark.parametrize(("behaves", "close"), [(hangs, cancel), (fails, fail)])
async def test_client_whose_close_does_not_end_well_is_closed(
    broker: FakeBroker,
    monkeypatch: pytest.MonkeyPatch,
    behaves: Callable[[object, object], Awaitable[None]],
    close: Callable[[postdate.Client], Awaitable[None]],
) -> None:
    # Clients of other tests of this process may be open.
    monkeypatch.setattr(_rpc, "_open_channels", Counter())
    address = f"127.0.0.1:{broker.port}"
    async with grpc.aio.insecure_channel(address) as channel:
        kind = type(channel)
    client = postdate.connect(address)
    await client.open()
    await client.server_info()
    with monkeypatch.context() as patched:
        patched.setattr(os, "getpid", lambda: -1)  # as if this were a child
        with pytest.raises(RuntimeError, match="forked while a client"):
            await postdate.connect(address).open()
    with monkeypatch.context() as patched:
        patched.setattr(kind, "close", behaves)
        await close(client)
    await client.close()
    with pytest.raises(postdate.Closed):
        await client.server_info()
    monkeypatch.setattr(os, "getpid", lambda: -1)
    async with postdate.connect(address):
        pass
