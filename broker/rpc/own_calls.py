"""The calls over HTTP of a process, loaded with the first one: most brokers never have any."""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from broker.rpc.json_calls import JsonAnswer, JsonCalls


class OwnCalls:
    """`JsonCalls` of the gRPC port of this process."""

    def __init__(self, address: Callable[[], str]) -> None:
        """`address`: of the port, once it listens."""
        self._address = address
        self._calls: JsonCalls | None = None
        self._loading = asyncio.Lock()

    async def call(
        self, name: str, body: bytes, authorization: str = "", traceparent: str = ""
    ) -> JsonAnswer:
        return await (await self._loaded()).call(name, body, authorization, traceparent)

    async def refusal(self, status: int, reason: str, detail: str) -> JsonAnswer:
        return (await self._loaded()).refusal(status, reason, detail)

    async def description(self) -> bytes:
        return await (await self._loaded()).description()

    async def close(self) -> None:
        if self._calls is not None:
            await self._calls.close()

    async def _loaded(self) -> JsonCalls:
        async with self._loading:
            if self._calls is None:
                # In a thread: the loop delivers meanwhile.
                module = await asyncio.to_thread(importlib.import_module, "broker.rpc.json_calls")
                self._calls = module.JsonCalls(self._address)
        return self._calls
