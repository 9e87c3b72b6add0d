"""The HTTP socket of a shard's process, asked by its supervisor."""

from __future__ import annotations

import asyncio

import aiohttp

_URL = "http://localhost"


class ShardHttp:
    """Asks one shard whether it is ready, and for its metrics. An answer that does not come in time is none."""

    def __init__(self, path: str) -> None:
        self._connector = aiohttp.UnixConnector(path, limit=4)
        self._session = aiohttp.ClientSession(connector=self._connector)

    async def close(self) -> None:
        await self._session.close()

    async def not_ready_because(self, seconds: float) -> str | None:
        """Return why the shard is not ready; None: it is."""
        status, body = await self._get("/readyz", seconds)
        if not status:
            return "does not answer"
        return None if status == 200 else body.decode(errors="replace").strip()

    async def metrics(self, seconds: float) -> bytes | None:
        """Return the page of metrics; None if there is no answer."""
        status, body = await self._get("/metrics", seconds)
        return body if status == 200 else None

    async def _get(self, path: str, seconds: float) -> tuple[int, bytes]:
        """Return the status and the body; 0 without an answer."""
        try:
            async with asyncio.timeout(seconds), self._session.get(_URL + path) as response:
                return response.status, await response.read()
        except (OSError, TimeoutError, aiohttp.ClientError):
            return 0, b""
