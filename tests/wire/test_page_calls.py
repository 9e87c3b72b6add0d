"""The pages of a real broker with access rules: who logs in, what they change, and when their session ends."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.certificates import Authority
from tests.wire.access_files import Files
from tests.wire.conftest import Serve, Wire, within

BILLING = "/topics/orders/subscriptions/billing"


class PageVisitor:
    """A browser."""

    def __init__(self, wire: Wire, session: aiohttp.ClientSession) -> None:
        self._url = f"http://{wire.server.http_address}"
        self._session = session

    async def get(self, path: str) -> tuple[int, str]:
        async with self._session.get(self._url + path, allow_redirects=False) as response:
            return response.status, await response.text()

    async def post(self, path: str, page: str, **form: str) -> tuple[int, str]:
        """Send a form with the token that a page holds; redirects are followed."""
        _, text = await self.get(page)
        csrf = re.search(r'name="csrf" value="([^"]+)"', text)
        assert csrf is not None, text
        headers = {"Sec-Fetch-Site": "same-origin"}
        data = {"csrf": csrf[1], **form}
        async with self._session.post(self._url + path, data=data, headers=headers) as response:
            return response.status, await response.text()

    async def log_in(self, token: str) -> str:
        return (await self.post("/login", "/login", token=token, next="/topics"))[1]


@asynccontextmanager
async def visiting(wire: Wire) -> AsyncIterator[PageVisitor]:
    jar = aiohttp.CookieJar(unsafe=True)
    async with aiohttp.ClientSession(cookie_jar=jar) as session:
        yield PageVisitor(wire, session)


async def with_orders(wire: Wire) -> Any:
    broker = wire.server.broker
    topic = await broker.registry.topic_or_create("orders")
    await broker.registry.topic_or_create("payroll")
    async with visiting(wire) as visitor:
        await visitor.log_in("admin-secret")
        status, text = await visitor.post(
            "/topics/orders/new-subscription",
            "/topics/orders/new-subscription",
            name="billing",
            type="SHARED",
            begin="EARLIEST",
        )
        assert status == 200 and "Created: billing." in text
    return topic


@pytest.mark.parametrize("tls", ["none", "server", "clients"])
async def test_pages_change_things_with_the_token_of_who_asks_with_and_without_tls(
    serve: Serve, tmp_path: Path, caplog: pytest.LogCaptureFixture, tls: str
) -> None:
    settings: dict[str, Any] = Files(tmp_path).settings
    if tls != "none":
        authority = Authority(tmp_path)
        pair = authority.issue("server", is_local=True)
        settings |= {"tls_cert_file": pair.cert_file, "tls_key_file": pair.key_file}
        if tls == "clients":
            settings["tls_client_ca_file"] = authority.ca_file
    caplog.set_level("INFO")
    wire = await serve(**settings)
    topic = await with_orders(wire)
    lines = [vars(each)["fields"] for each in caplog.records if each.getMessage() == "Audit: a change"]
    assert [(each["action"], each["principal"]) for each in lines] == [
        ("LogIn", "token:admin"),
        ("CreateSubscription", "token:admin"),
    ]
    async with visiting(wire) as visitor:
        assert "payroll" not in await visitor.log_in("billing-secret")
        status, text = await visitor.post(BILLING, "/topics/orders", action="pause")
        assert status == 403 and "token:billing may not manage" in text, text
        assert not topic.subscription("billing").paused


async def test_a_json_web_token_logs_in_and_its_session_ends_when_it_expires(
    serve: Serve, tmp_path: Path
) -> None:
    files = Files(tmp_path)
    wire = await serve(**files.settings)
    await with_orders(wire)
    async with visiting(wire) as visitor:
        assert "jwt:shop-1" in await visitor.log_in(files.jwt(exp=time.time() + 2))
        assert (await visitor.get("/topics/orders/produce"))[0] == 200

        async def ended() -> None:
            while (await visitor.get("/topics"))[0] != 303:
                await asyncio.sleep(0.05)

        await within(ended())


async def test_a_token_or_a_right_that_is_withdrawn_counts_at_once(serve: Serve, tmp_path: Path) -> None:
    files = Files(tmp_path)
    wire = await serve(**files.settings)
    await with_orders(wire)
    async with visiting(wire) as visitor:
        await visitor.log_in("billing-secret")
        assert (await visitor.get("/topics/orders"))[0] == 200

        async def until(status: int) -> None:
            while (await visitor.get("/topics/orders"))[0] != status:
                await asyncio.sleep(0.02)

        files.access("")
        await within(until(403))
        files.tokens(admin="admin-secret")
        await within(until(303))
