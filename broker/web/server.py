"""The HTTP edge: metrics and health for machines. Read-only and open to all: bind it to a private address."""

from __future__ import annotations

import errno
from collections.abc import Awaitable, Callable
from contextlib import suppress

from aiohttp import web
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

from broker.config import ConfigError, split_address
from broker.errors import Fenced


class HttpServer:
    """Serves /metrics, /livez and /readyz.

    `readiness` returns None when the broker is ready, else why it is not, in a line. `stop` gives requests
    that are being answered `stop_ms` to end, and as long again once cancelled.
    """

    def __init__(
        self,
        address: str,
        render_metrics: Callable[[], Awaitable[bytes]],
        readiness: Callable[[], str | None],
        *,
        stop_ms: int = 500,
    ) -> None:
        self._stop_ms = stop_ms
        self._host, self._port = split_address(address)
        self._render_metrics = render_metrics
        self._readiness = readiness
        self._runner: web.AppRunner | None = None

    @property
    def address(self) -> str:
        """Where it listens; with the port that was picked, once started."""
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"{host}:{self._port}"

    async def start(self) -> None:
        """Listen. A port that somebody else holds is Fenced; an address that is not ours is ConfigError."""
        app = web.Application()
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get("/livez", self._livez)
        app.router.add_get("/readyz", self._readyz)
        app.on_response_prepare.append(_hide_versions)
        runner = web.AppRunner(
            app,
            access_log=None,
            handle_signals=False,
            handler_cancellation=True,
            shutdown_timeout=self._stop_ms / 1000,
        )
        await runner.setup()
        try:
            site = web.TCPSite(runner, self._host, self._port, reuse_port=False)
            await site.start()
        except OSError as error:
            await runner.cleanup()
            if error.errno == errno.EADDRINUSE:
                raise Fenced(
                    f"http_address {self.address} is in use by another process",
                    reason="ADDRESS_IN_USE",
                    address=self.address,
                ) from error
            raise ConfigError(f"http_address: cannot listen on {self.address}: {error.strerror}") from error
        except BaseException:
            await runner.cleanup()
            raise
        self._runner = runner
        self._port = runner.addresses[0][1]

    async def stop(self) -> None:
        """Stop listening and close all connections. May be called twice, or without a start."""
        runner, self._runner = self._runner, None
        if runner is not None:
            await runner.cleanup()

    async def _metrics(self, _request: web.Request) -> web.Response:
        return web.Response(
            body=await self._render_metrics(), headers={"Content-Type": CONTENT_TYPE_PLAIN_0_0_4}
        )

    async def _livez(self, _request: web.Request) -> web.Response:
        # To answer at all is the answer: the loop runs.
        return _line(200, "ok")

    async def _readyz(self, _request: web.Request) -> web.Response:
        reason = self._readiness()
        return _line(200, "ok") if reason is None else _line(503, reason)


def _line(status: int, text: str) -> web.Response:
    line = " ".join(text.split())
    return web.Response(status=status, text=f"{line}\n", headers={"Cache-Control": "no-store"})


async def _hide_versions(_request: web.Request, response: web.StreamResponse) -> None:
    with suppress(KeyError):
        del response.headers["Server"]
    response.headers["Server"] = "postdate"
