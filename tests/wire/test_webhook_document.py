"""The program of docs/webhooks.md runs, against a broker and a receiver, with no change but the address."""

from __future__ import annotations

import asyncio
import base64
import hmac
import re
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

import postdate
from tests.wire.conftest import Wire, within

PAGE = Path(__file__).parents[2] / "docs/webhooks.md"
KEY = bytes(range(200, 232))


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setenv("WEBHOOK_SECRET", "whsec_" + base64.b64encode(KEY).decode())
    return run_page()


def run_page() -> dict[str, Any]:
    code = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)[0]
    names: dict[str, Any] = {"__name__": "webhooks"}
    exec(compile(code, str(PAGE), "exec"), names)
    return names


@asynccontextmanager
async def receiver(answers: list[int]) -> AsyncIterator[tuple[str, asyncio.Queue[web.Request]]]:
    calls: asyncio.Queue[web.Request] = asyncio.Queue()

    async def answer(request: web.Request) -> web.Response:
        await request.read()
        calls.put_nowait(request)
        return web.Response(status=answers.pop(0))

    app = web.Application()
    app.router.add_post("/hook", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://localhost:{runner.addresses[0][1]}/hook", calls
    finally:
        await runner.cleanup()


@asynccontextmanager
async def pushing(program: dict[str, Any], wire: Wire, url: str) -> AsyncIterator[postdate.Client]:
    async with postdate.connect(wire.server.grpc_address) as client:
        await client.topics.create("webhooks")
        await client.subscriptions.create("webhooks", "push")
        async with client.producer("webhooks") as producer:
            await producer.send(b'{"order": 17}', properties={"url": url})
        running = asyncio.create_task(program["main"](wire.server.grpc_address))
        try:
            yield client
        finally:
            running.cancel()
            await asyncio.wait([running])


@pytest.mark.parametrize("failure", [500, 404, 307])
async def test_a_message_is_pushed_signed_and_again_after_a_failure(program, wire: Wire, failure: int):
    program["public_only"].__code__ = any_address.__code__
    async with receiver([failure, 200]) as (url, calls), pushing(program, wire, url) as client:
        for _ in range(2):
            call = await within(calls.get())
            signed = f"{call.headers['webhook-id']}.{call.headers['webhook-timestamp']}.".encode()
            digest = hmac.digest(KEY, signed + await call.read(), "sha256")
            assert call.headers["webhook-signature"] == "v1," + base64.b64encode(digest).decode()
            assert await call.read() == b'{"order": 17}'
        async with asyncio.timeout(20):
            while await owed(client):
                await asyncio.sleep(0.01)


async def test_whoever_wants_no_more_gets_no_more(program, wire: Wire):
    program["public_only"].__code__ = any_address.__code__
    async with receiver([410]) as (url, _), pushing(program, wire, url) as client:
        assert "wants no more" in await reason_of_dead_letter(client)


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "[::1]", "[::ffff:127.0.0.1]"])
async def test_no_private_address_is_connected_to(program, wire: Wire, host: str):
    async with receiver([]) as (url, calls), pushing(program, wire, url.replace("localhost", host)) as client:
        async with asyncio.timeout(20):
            while "not a public address" not in await reason_of_return(client):
                await asyncio.sleep(0.01)
        assert calls.empty()


@pytest.mark.parametrize("secret", ["", "whsec_", "whsec_c2hvcnQ="])
def test_without_a_key_to_sign_with_it_does_not_start(monkeypatch: pytest.MonkeyPatch, secret: str):
    monkeypatch.setenv("WEBHOOK_SECRET", secret)
    with pytest.raises(SystemExit, match="WEBHOOK_SECRET must be"):
        run_page()
    monkeypatch.delenv("WEBHOOK_SECRET")
    with pytest.raises(SystemExit, match="WEBHOOK_SECRET must be"):
        run_page()


NOT_PUBLIC = """10.0.0.1 169.254.169.254 100.64.0.1 224.0.0.1 0.0.0.0 fd00::1 fe80::1 fec0::1 ff02::1 ::1
    ::127.0.0.1 ::ffff:10.0.0.1 ::ffff:0:10.0.0.1 64:ff9b::a9fe:a9fe 64:ff9b:1::a00:1 2002:a00:1::1 2001::1"""


@pytest.mark.parametrize("address", NOT_PUBLIC.split())
def test_what_is_not_public_is_known(program, address: str):
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with pytest.raises(OSError, match="not a public address"):
        program["public_only"]((family, socket.SOCK_STREAM, 0, "", (address, 443)))


@pytest.mark.parametrize("address", ["93.184.215.14", "2606:2800:21f:cb07:6820:80da:af6b:8b2c"])
def test_what_is_public_gets_a_socket(program, address: str):
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with program["public_only"]((family, socket.SOCK_STREAM, 0, "", (address, 443))) as made:
        assert (made.family, made.type) == (family, socket.SOCK_STREAM)


def any_address(info):
    family, kind, protocol, *_ = info
    return socket.socket(family, kind, protocol)


async def owed(client: postdate.Client) -> int:
    (stats,) = await client.stats("webhooks")
    each = stats.subscriptions[0]
    return each.ready_messages + each.leased_messages + each.scheduled_messages


async def reason_of_return(client: postdate.Client) -> str:
    try:
        message = await client.schedule.get("webhooks", postdate.MessageId(1, 0))
    except postdate.NotFound:
        return ""
    return message.returned[0].last_reason if message.returned else ""


async def reason_of_dead_letter(client: postdate.Client) -> str:
    async with asyncio.timeout(20):
        while True:
            async for letter in client.dead_letters.list("webhooks", "push"):
                return letter.last_reason or letter.reason
            await asyncio.sleep(0.01)
