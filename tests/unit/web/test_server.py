"""The HTTP edge answers machines: real sockets on loopback, a port that the system picks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import aiohttp
import pytest

from broker.errors import Fenced
from broker.settings import ConfigError
from broker.web.server import HttpServer


async def render() -> bytes:
    return b"postdate_up 1\n"


@asynccontextmanager
async def serving(
    readiness: Callable[[], str | None] = lambda: None, address: str = "127.0.0.1:0"
) -> AsyncIterator[tuple[HttpServer, aiohttp.ClientSession]]:
    server = HttpServer(address, render, readiness)
    server.listen()
    await server.start()
    try:
        async with aiohttp.ClientSession(f"http://{server.address}") as session:
            yield server, session
    finally:
        await server.stop()


async def test_metrics_are_prometheus_text() -> None:
    async with serving() as (_, session), session.get("/metrics") as response:
        assert response.status == 200
        assert response.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
        assert await response.read() == b"postdate_up 1\n"


async def test_liveness_needs_nothing_but_the_loop() -> None:
    async with serving(lambda: "journal failed") as (_, session), session.get("/livez") as response:
        assert (response.status, await response.text()) == (200, "ok\n")


@pytest.mark.parametrize("reason", ["recovering", "draining", "journal failed"])
async def test_readiness_says_in_a_line_why_not(reason: str) -> None:
    now: list[str | None] = [reason]
    async with serving(lambda: now[0]) as (_, session):
        async with session.get("/readyz") as response:
            assert (response.status, await response.text()) == (503, f"{reason}\n")
            assert response.headers["Cache-Control"] == "no-store"
        now[0] = None
        async with session.get("/readyz") as response:
            assert (response.status, await response.text()) == (200, "ok\n")
        now[0] = "two\nlines\r\n"
        async with session.get("/readyz") as response:
            assert await response.text() == "two lines\n"


async def test_nothing_else_is_there_and_versions_are_hidden() -> None:
    async with serving() as (_, session):
        for path, status in (("/", 404), ("/metrics/x", 404), ("/../etc/passwd", 404)):
            async with session.get(path) as response:
                assert response.status == status
                assert response.headers["Server"] == "postdate"
        async with session.post("/metrics") as response:
            assert response.status == 405


async def test_a_port_in_use_is_refused_by_name() -> None:
    async with serving() as (first, _):
        second = HttpServer(first.address, render, lambda: None)
        with pytest.raises(Fenced) as caught:
            second.listen()
        assert f"{first.address} is in use by another process" in str(caught.value)
        assert "choose another --http-address" in str(caught.value)
        assert caught.value.reason == "ADDRESS_IN_USE"
        await second.stop()


async def test_an_address_of_another_machine_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"http_address: cannot listen on 192\.0\.2\.1:7680"):
        HttpServer("192.0.2.1:7680", render, lambda: None).listen()


async def test_a_port_is_free_again_after_stop() -> None:
    async with serving() as (first, _):
        address = first.address
    async with serving(address=address) as (again, _):
        assert again.address == address
        await again.stop()
        await again.stop()


async def test_stop_does_not_wait_for_ever_for_a_scrape() -> None:
    asked = asyncio.Event()

    async def never() -> bytes:
        asked.set()
        await asyncio.Event().wait()
        raise AssertionError

    server = HttpServer("127.0.0.1:0", never, lambda: None, stop_ms=10)
    server.listen()
    await server.start()
    async with aiohttp.ClientSession(f"http://{server.address}") as session:
        scrape = asyncio.create_task(session.get("/metrics").__aenter__())
        await asked.wait()
        async with asyncio.timeout(20):
            await server.stop()
        with pytest.raises(aiohttp.ClientError):
            await scrape
