"""The pages and answers of the HTTP edge. Imported late: what it needs takes a quarter of a second to load."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import suppress

from aiohttp import web
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4


def make_runner(
    render_metrics: Callable[[], Awaitable[bytes]], readiness: Callable[[], str | None], *, stop_ms: int
) -> web.AppRunner:
    """What answers requests; `readiness` returns None when the broker is ready, else why it is not, in a line."""

    async def metrics(_request: web.Request) -> web.Response:
        return web.Response(body=await render_metrics(), headers={"Content-Type": CONTENT_TYPE_PLAIN_0_0_4})

    async def livez(_request: web.Request) -> web.Response:
        # To answer at all is the answer: the loop runs.
        return _line(200, "ok")

    async def readyz(_request: web.Request) -> web.Response:
        reason = readiness()
        return _line(200, "ok") if reason is None else _line(503, reason)

    app = web.Application()
    app.router.add_get("/metrics", metrics)
    app.router.add_get("/livez", livez)
    app.router.add_get("/readyz", readyz)
    app.on_response_prepare.append(_hide_versions)
    return web.AppRunner(
        app,
        access_log=None,
        handle_signals=False,
        handler_cancellation=True,
        shutdown_timeout=stop_ms / 1000,
    )


def _line(status: int, text: str) -> web.Response:
    line = " ".join(text.split())
    return web.Response(status=status, text=f"{line}\n", headers={"Cache-Control": "no-store"})


async def _hide_versions(_request: web.Request, response: web.StreamResponse) -> None:
    with suppress(KeyError):
        del response.headers["Server"]
    response.headers["Server"] = "postdate"
