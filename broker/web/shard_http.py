"""The HTTP socket of a shard's process, asked by its supervisor."""

from __future__ import annotations

import asyncio
from typing import NamedTuple

import aiohttp

from broker.web.server import SHARD_VIEW

_URL = "http://localhost"
_SILENT = -1


class ShardReadiness(NamedTuple):
    """Answer of a shard to /readyz."""

    not_ready_because: str | None
    line: str
    is_silent: bool = False
    """No answer came in time; not so where nobody listens."""


class ShardHttp:
    """Asks one shard whether it is ready, and for its metrics. An answer that does not come in time is none."""

    def __init__(self, path: str) -> None:
        # One for each kind: scrapes of large pages keep no probe waiting.
        self._probes, self._scrapes = (
            aiohttp.ClientSession(connector=aiohttp.UnixConnector(path, limit=2)) for _ in range(2)
        )

    async def close(self) -> None:
        await self._probes.close()
        await self._scrapes.close()

    async def readiness(self, seconds: float) -> ShardReadiness:
        status, body = await self._get(self._probes, "/readyz", seconds)
        line = body.decode(errors="replace").strip() if status > 0 else "does not answer"
        return ShardReadiness(None if status == 200 else line, line, status == _SILENT)

    async def metrics(self, seconds: float) -> bytes | None:
        """Return the page of metrics; None if there is no answer."""
        status, body = await self._get(self._scrapes, "/metrics", seconds)
        return body if status == 200 else None

    async def view(self, seconds: float) -> bytes | None:
        """Return what a shard in a cluster knows of it; None if there is no answer."""
        status, body = await self._get(self._probes, SHARD_VIEW, seconds)
        return body if status == 200 else None

    async def _get(self, session: aiohttp.ClientSession, path: str, seconds: float) -> tuple[int, bytes]:
        """Return the status and the body; _SILENT if no answer came in time, 0 without one for another reason."""
        try:
            async with asyncio.timeout(seconds), session.get(_URL + path) as response:
                return response.status, await response.read()
        except TimeoutError:
            return _SILENT, b""
        except (OSError, aiohttp.ClientError):
            return 0, b""
