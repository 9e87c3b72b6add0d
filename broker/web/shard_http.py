"""The HTTP socket of a shard's process, asked by its supervisor: for probes, metrics and pages."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import NamedTuple

import aiohttp
from yarl import URL

from broker.errors import Unavailable
from broker.web.server import SHARD_VIEW
from broker.web.source import ShardPage

_URL = "http://localhost"
_SILENT = -1
_PAGES_MAX = 8
"""Pages asked of one shard at a time; others wait for their turn."""
_PAGE_BYTES_MAX = 33 << 20
"""More than the largest page, which is the report of an audit."""
_READ_BYTES = 64 << 10


class ShardReadiness(NamedTuple):
    """Answer of a shard to /readyz."""

    not_ready_because: str | None
    line: str
    is_silent: bool = False
    """No answer came in time; not so where nobody listens."""


class ShardHttp:
    """Asks one shard whether it is ready, and for its metrics. An answer that does not come in time is none."""

    def __init__(self, number: int, path: str) -> None:
        self._number = number
        # One for each kind: scrapes of large pages keep no probe waiting.
        self._probes, self._scrapes = (
            aiohttp.ClientSession(connector=aiohttp.UnixConnector(path, limit=2)) for _ in range(2)
        )
        self._pages = aiohttp.ClientSession(
            connector=aiohttp.UnixConnector(path, limit=_PAGES_MAX), cookie_jar=aiohttp.DummyCookieJar()
        )

    async def close(self) -> None:
        await self._probes.close()
        await self._scrapes.close()
        await self._pages.close()

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

    async def page(
        self, method: str, path: str, headers: Mapping[str, str], body: bytes | None, seconds: float
    ) -> ShardPage:
        """Return a page, or what came of a form. Raises Unavailable if there is no answer."""
        try:
            async with (
                asyncio.timeout(seconds),
                self._pages.request(
                    method, URL(_URL + path, encoded=True), headers=headers, data=body, allow_redirects=False
                ) as response,
            ):
                parts, size = [], 0
                async for part in response.content.iter_chunked(_READ_BYTES):
                    parts.append(part)
                    size += len(part)
                    if size > _PAGE_BYTES_MAX:
                        raise Unavailable(f"The page of shard {self._number} is too large")
                return ShardPage(response.status, response.headers, b"".join(parts))
        except (TimeoutError, OSError, aiohttp.ClientError) as error:
            raise Unavailable(f"Shard {self._number} does not answer") from error

    async def _get(self, session: aiohttp.ClientSession, path: str, seconds: float) -> tuple[int, bytes]:
        """Return the status and the body; _SILENT if no answer came in time, 0 without one for another reason."""
        try:
            async with asyncio.timeout(seconds), session.get(_URL + path) as response:
                return response.status, await response.read()
        except TimeoutError:
            return _SILENT, b""
        except (OSError, aiohttp.ClientError):
            return 0, b""
