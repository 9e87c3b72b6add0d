"""Connections of the HTTP port: bounded in number, and none holds its place by saying nothing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import pytest

from broker.rpc import consumer
from broker.web.connections import HEAD_BYTES_MAX, Timeouts
from broker.web.server import HttpServer

REQUEST = b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n"


HALF = b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nContent-Length: 4\r\n\r\nx="
PROBE = b"GET /readyz HTTP/1.1\r\nHost: localhost\r\n\r\n"


class Page:
    """A page that can be made to wait."""

    def __init__(self) -> None:
        self.may_answer = asyncio.Event()
        self.asked = asyncio.Semaphore(0)

    async def render(self) -> bytes:
        self.asked.release()
        await self.may_answer.wait()
        return b"x 1\n"


class Client:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def ask(self, request: bytes = REQUEST) -> bytes:
        """The first line of the answer; empty if the connection is closed instead."""
        self.writer.write(request)
        async with asyncio.timeout(10):
            return await self.reader.readline()

    async def until_closed(self) -> bytes:
        """All that came before the server closed the connection."""
        async with asyncio.timeout(10):
            return await self.reader.read()


@asynccontextmanager
async def port(
    page: Page, *, limit: int = 100, timeouts: Timeouts | None = None
) -> AsyncIterator[HttpServer]:
    server = HttpServer("127.0.0.1:0", page.render, lambda: None, connections_max=limit, timeouts=timeouts)
    server.listen()
    await server.start()
    try:
        yield server
    finally:
        page.may_answer.set()
        await server.stop()


async def connect(server: HttpServer) -> Client:
    host, _, number = server.address.rpartition(":")
    return Client(*await asyncio.open_connection(host, int(number)))


@pytest.mark.parametrize("begun", [b"", b"GET /", REQUEST[:-2]], ids=["nothing", "a line", "some headers"])
async def test_who_does_not_finish_the_headers_is_cut(begun: bytes):
    async with port(Page(), timeouts=Timeouts(headers_seconds=0.1)) as server:
        client = await connect(server)
        client.writer.write(begun)
        assert await client.until_closed() == b"", "cut without a word"


async def test_who_drips_headers_is_cut_all_the_same():
    async with port(Page(), timeouts=Timeouts(headers_seconds=0.3)) as server:
        client = await connect(server)

        async def drip() -> None:
            client.writer.write(REQUEST[:-2])
            while True:
                client.writer.write(b"X: y\r\n")
                await asyncio.sleep(0.01)  # slower than nobody's patience: that is what is tested

        dripping = asyncio.ensure_future(drip())
        with suppress(ConnectionResetError):  # what came behind the end of the connection was never read
            await client.until_closed()
        dripping.cancel()


@pytest.mark.parametrize("is_first", [True, False], ids=["first", "second"])
@pytest.mark.parametrize("piece", [b"X: y\r\n", b"X: " + b"y" * 8_000 + b"\r\n", b"y" * 70_000])
async def test_a_head_without_end_is_cut(piece: bytes, is_first: bool, caplog: pytest.LogCaptureFixture):
    """aiohttp does not see it, and it is logged once a minute."""
    page = Page()
    page.may_answer.set()
    async with port(page) as server:
        for _ in range(3):
            client = await connect(server)
            if not is_first:
                assert b"200" in await client.ask()
                await client.reader.readexactly(await length_of_answer(client))
            with suppress(ConnectionError):
                client.writer.write(REQUEST[:-2] + piece * (1 + HEAD_BYTES_MAX // len(piece)))
                assert await client.until_closed() == b"", "cut without a word"
        assert b"200" in await (await connect(server)).ask()
    assert [(record.name, record.exc_info) for record in caplog.records] == [("broker.web.connections", None)]


async def test_very_many_headers_are_refused():
    async with port(Page()) as server:
        client = await connect(server)
        assert b" 400 " in await client.ask(REQUEST[:-2] + b"X: y\r\n" * 64 + b"\r\n")


async def length_of_answer(client: Client) -> int:
    """Read the rest of its headers; the length of its body."""
    head = (await client.reader.readuntil(b"\r\n\r\n")).lower()
    return int(head.partition(b"content-length:")[2].split()[0])


async def test_a_head_up_to_its_bound_and_a_body_beyond_are_taken():
    """However they are cut into pieces."""
    page = Page()
    page.may_answer.set()
    head = REQUEST[:-2] + b"X: " + b"y" * 8_000 + b"\r\nContent-Length: 60000\r\n\r\n"
    async with port(page) as server:
        client = await connect(server)
        for _ in range(2):
            for at in range(0, len(head), 997):
                client.writer.write(head[at : at + 997])
                await client.writer.drain()
            assert b"200" in await client.ask(b"z" * 60_000)
            await client.reader.readexactly(await length_of_answer(client))


async def test_who_asks_nothing_more_is_cut():
    page = Page()
    page.may_answer.set()
    async with port(page, timeouts=Timeouts(idle_seconds=0.1)) as server:
        client = await connect(server)
        assert b"200" in await client.ask()
        await client.until_closed()


async def test_a_request_that_takes_too_long_is_cut():
    page = Page()
    async with port(page, timeouts=Timeouts(request_seconds=0.1)) as server:
        client = await connect(server)
        assert await client.ask() == b""


def test_a_receive_may_wait_for_as_long_as_the_api_says():
    assert Timeouts().request_seconds >= consumer._WAIT_MS_MAX / 1_000 + 10


async def test_beyond_the_limit_the_one_that_waited_longest_gives_its_place():
    page = Page()
    page.may_answer.set()
    async with port(page, limit=3) as server:
        clients = [await connect(server) for _ in range(3)]
        for client in clients:  # in this order they begin to wait
            assert b"200" in await client.ask()
        newcomer = await connect(server)
        assert b"200" in await newcomer.ask()
        await clients[0].until_closed()
        idle = [await connect(server) for _ in range(50)]
        newest = await connect(server)
        assert b"200" in await newest.ask()
        await idle[0].until_closed()


async def test_who_is_being_answered_keeps_the_place():
    page = Page()
    async with port(page, limit=2) as server:
        clients = [await connect(server) for _ in range(2)]
        answers = [asyncio.ensure_future(client.ask()) for client in clients]
        for _ in clients:
            await page.asked.acquire()
        await (await connect(server)).until_closed()  # no place, and none that waits
        page.may_answer.set()
        for answer in await asyncio.gather(*answers):
            assert b"200" in answer
        assert b"200" in await (await connect(server)).ask()


async def test_a_request_without_its_body_gives_its_place():
    page = Page()
    async with port(page, limit=2) as server:
        half = [await connect(server) for _ in range(2)]
        for client in half:
            client.writer.write(HALF)
            await page.asked.acquire()
        prober = await connect(server)
        assert b"200" in await prober.ask(PROBE)
        await half[0].until_closed()
        half[1].writer.write(
            b"12"
        )  # whole now: it keeps its place, and the prober, who asks nothing, has none
        assert b"200" in await (await connect(server)).ask(PROBE)
        await prober.until_closed()
        page.may_answer.set()
        assert b"200" in await half[1].ask(b"")


async def test_a_body_that_does_not_come_is_cut():
    async with port(Page(), timeouts=Timeouts(body_seconds=0.1)) as server:
        client = await connect(server)
        assert await client.ask(HALF) == b""


async def test_a_body_that_came_leaves_the_time_of_a_request_for_its_answer():
    page = Page()
    timeouts = Timeouts(body_seconds=0.1, request_seconds=30)
    async with port(page, timeouts=timeouts) as server:
        client = await connect(server)
        client.writer.write(HALF + b"12")
        await page.asked.acquire()
        await asyncio.sleep(0.3)  # longer than a body may take: that is what is tested
        page.may_answer.set()
        assert b"200" in await client.ask(b"")


async def test_a_body_that_comes_after_the_answer_keeps_no_place():
    page = Page()
    page.may_answer.set()
    async with port(page, limit=1) as server:
        client = await connect(server)
        assert b"200" in await client.ask(HALF)
        client.writer.write(b"12")
        assert b"200" in await (await connect(server)).ask(PROBE)
        await client.until_closed()
