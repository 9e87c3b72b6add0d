"""The application behind the HTTP edge. Imported late: what it needs takes a quarter of a second to load.

The pages are loaded later still, when the first one is asked for: a broker that only machines look at never does.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import TYPE_CHECKING

from aiohttp import web
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

from broker.web.connections import Connections
from broker.web.guard import Hosts
from broker.web.http_api import CALL_PATH, DESCRIPTION_PATH, OTHER_PATHS, HttpApi
from broker.web.server import SHARD_VIEW

if TYPE_CHECKING:
    from broker.web.site import Site
    from broker.web.source import Calls, PageSource

_FORM_BYTES_MAX = 64 << 10
_HEADERS_MAX = 64
_FOREIGN = "This broker is not known by that host name: see the setting http_hosts"


def make_runner(
    render_metrics: Callable[[], Awaitable[bytes]],
    readiness: Callable[[], str | None],
    ready_line: Callable[[], str],
    *,
    pages: PageSource | None,
    calls: Calls | None = None,
    listen_host: str,
    stop_ms: int,
    connections: Connections,
    shard_view: Callable[[], bytes] | None = None,
) -> web.AppRunner:
    """Make what answers requests; `readiness` returns None when the broker is ready, else why it is not, in a line.

    `pages`: what they show; None: there are none. `calls`: the gRPC port, for the API over HTTP. `shard_view`: what
    the process of a shard tells its supervisor.
    """

    hosts = Hosts(pages.config.http_hosts if pages is not None else "", listen_host)

    def is_foreign(request: web.Request) -> bool:
        sockname = request.transport.get_extra_info("sockname") if request.transport is not None else None
        return not hosts.knows(request.headers.get("Host", ""), sockname)

    async def metrics(request: web.Request) -> web.Response:
        # They name topics and subscriptions: no page of another name that was made to point here may read them.
        if is_foreign(request):
            return _line(421, _FOREIGN)
        return web.Response(body=await render_metrics(), headers={"Content-Type": CONTENT_TYPE_PLAIN_0_0_4})

    async def livez(_request: web.Request) -> web.Response:
        # To answer at all is the answer: the loop runs.
        return _line(200, "ok")

    async def readyz(_request: web.Request) -> web.Response:
        reason = readiness()
        return _line(200, ready_line()) if reason is None else _line(503, reason)

    app = web.Application(client_max_size=_FORM_BYTES_MAX, middlewares=[connections.watch])
    app.router.add_get("/metrics", metrics)
    app.router.add_get("/livez", livez)
    app.router.add_get("/readyz", readyz)
    if shard_view is not None:

        async def view(_request: web.Request) -> web.Response:
            return web.Response(body=shard_view())

        app.router.add_get(SHARD_VIEW, view)
    if pages is not None and calls is not None:
        api = HttpApi(calls, pages.config, is_foreign)
        app.router.add_get(DESCRIPTION_PATH, api.describe)
        app.router.add_post(CALL_PATH, api.answer)
        app.router.add_route("*", OTHER_PATHS, api.answer_others)
    if pages is not None:
        app.router.add_route("*", "/{path:.*}", _LatePages(pages, listen_host).answer)
    app.on_response_prepare.append(_hide_versions)
    return web.AppRunner(
        app,
        access_log=None,
        handle_signals=False,
        handler_cancellation=True,
        max_headers=_HEADERS_MAX,
        shutdown_timeout=stop_ms / 1000,
    )


class _LatePages:
    """The pages, loaded when the first one is asked for."""

    def __init__(self, source: PageSource, listen_host: str) -> None:
        self._source = source
        self._listen_host = listen_host
        self._site: Site | None = None
        self._loading = asyncio.Lock()

    async def answer(self, request: web.Request) -> web.Response:
        async with self._loading:
            if self._site is None:
                # In a thread: the loop delivers meanwhile.
                self._site = await asyncio.to_thread(self._load)
        return await self._site.answer(request)

    def _load(self) -> Site:
        from broker.web.figures import FIGURE_ROUTES  # noqa: PLC0415 - the pages are loaded when the first one is asked for
        from broker.web.routes import CLUSTER_ROUTES, ROUTES  # noqa: PLC0415
        from broker.web.shard_pages import front_routes  # noqa: PLC0415
        from broker.web.site import Site  # noqa: PLC0415

        source = self._source
        routes = ROUTES if source.broker is not None else []
        if source.broker is not None and source.config.http_socket:
            routes = routes + FIGURE_ROUTES
        if source.shards is not None:
            routes = front_routes()
        if source.cluster is not None:
            routes = routes + CLUSTER_ROUTES
        return Site(source, self._listen_host, routes)


def _line(status: int, text: str) -> web.Response:
    line = " ".join(text.split())
    return web.Response(status=status, text=f"{line}\n", headers={"Cache-Control": "no-store"})


async def _hide_versions(_request: web.Request, response: web.StreamResponse) -> None:
    with suppress(KeyError):
        del response.headers["Server"]
    response.headers["Server"] = "postdate"
