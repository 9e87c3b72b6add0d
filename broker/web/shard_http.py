"""The HTTP socket of a shard's process, asked by its supervisor: for probes, metrics and pages."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import NamedTuple

import aiohttp
from yarl import URL

from broker.config import ALL_ADDRESSES, is_loopback
from broker.errors import Unavailable
from broker.settings import split_address
from broker.web.server import SHARD_VIEW
from broker.web.source import ShardPage

_URL = "http://localhost"
_SILENT = -1
_PAGES_MAX = 8
"""Pages asked of one shard at a time; others wait for their turn."""
_FIGURES_MAX = 4
"""Requests for figures beside them: slow pages keep no list of all shards waiting."""
_PAGE_BYTES_MAX = 33 << 20
"""More than any page has."""
_READ_BYTES = 64 << 10


class ShardReadiness(NamedTuple):
    """Answer of a shard to /readyz."""

    not_ready_because: str | None
    line: str
    is_silent: bool = False
    """No answer came in time; not so where nobody listens."""


class _Desk:
    """Connections to a shard for requests of one kind, so many at a time; others wait."""

    def __init__(self, number: int, path: str, requests_max: int) -> None:
        self._number = number
        # The turn is waited for here and not in the connector: what has none was never sent.
        self._turns = asyncio.Semaphore(requests_max)
        self._session = aiohttp.ClientSession(
            connector=aiohttp.UnixConnector(path, limit=requests_max), cookie_jar=aiohttp.DummyCookieJar()
        )

    async def close(self) -> None:
        await self._session.close()

    async def ask(self, path: str, headers: Mapping[str, str], seconds: float) -> ShardPage:
        """Return the answer. Raises Unavailable if there is none."""
        is_begun = False
        try:
            async with asyncio.timeout(seconds), self._turns:
                is_begun = True
                return await self._ask(path, headers)
        except (TimeoutError, OSError, aiohttp.ClientError) as error:
            if not is_begun:
                raise Unavailable(f"Shard {self._number} is busy with other pages") from error
            raise Unavailable(f"Shard {self._number} does not answer") from error

    async def _ask(self, path: str, headers: Mapping[str, str]) -> ShardPage:
        async with self._session.get(
            URL(_URL + path, encoded=True), headers=headers, allow_redirects=False
        ) as response:
            parts, size = [], 0
            async for part in response.content.iter_chunked(_READ_BYTES):
                parts.append(part)
                size += len(part)
                if size > _PAGE_BYTES_MAX:
                    raise Unavailable(f"The page of shard {self._number} is too large")
            return ShardPage(response.status, response.headers, b"".join(parts))


class ShardHttp:
    """Asks one shard whether it is ready, for its metrics, and for pages and their figures.

    An answer that does not come in time is none.
    """

    def __init__(self, number: int, path: str) -> None:
        # One for each kind: scrapes of large pages keep no probe waiting.
        self._probes, self._scrapes = (
            aiohttp.ClientSession(connector=aiohttp.UnixConnector(path, limit=2)) for _ in range(2)
        )
        self._pages = _Desk(number, path, _PAGES_MAX)
        self._figures = _Desk(number, path, _FIGURES_MAX)

    async def close(self) -> None:
        await self._probes.close()
        await self._scrapes.close()
        await self._pages.close()
        await self._figures.close()

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

    async def page(self, path: str, headers: Mapping[str, str], seconds: float) -> ShardPage:
        """Return a page. Raises Unavailable if there is no answer."""
        return await self._pages.ask(path, headers, seconds)

    async def figures(self, path: str, headers: Mapping[str, str], seconds: float) -> ShardPage:
        """Return figures. Raises Unavailable if there is no answer."""
        return await self._figures.ask(path, headers, seconds)

    async def _get(self, session: aiohttp.ClientSession, path: str, seconds: float) -> tuple[int, bytes]:
        """Return the status and the body; _SILENT if no answer came in time, 0 without one for another reason."""
        try:
            async with asyncio.timeout(seconds), session.get(_URL + path) as response:
                return response.status, await response.read()
        except TimeoutError:
            return _SILENT, b""
        except (OSError, aiohttp.ClientError):
            return 0, b""


def pages_url(listens: str, node_host: str) -> str:
    """Return the URL of the pages of a node, by where it says that it listens; empty where others do not reach that.

    `node_host`: by which others reach the node.
    """
    try:
        host, port = split_address(listens)
    except ValueError:
        return ""
    if host in ALL_ADDRESSES:
        host = node_host
    if not port or (is_loopback(host) and not is_loopback(node_host)):
        return ""
    try:
        return str(URL.build(scheme="http", host=host, port=port))
    except ValueError:
        return ""
