"""A broker in this process with its pages on a real socket."""

from __future__ import annotations

import hashlib
import random
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from broker.folder.broker import Broker
from broker.model import Position
from broker.rpc import admin, consumer, producer, schedule
from broker.rpc.access import AccessInterceptor
from broker.rpc.calls import Handler
from broker.rpc.page_calls import PageCalls
from broker.rpc.port import GrpcPort
from broker.runtime.clock import SystemClock
from broker.runtime.vfs import LocalVfs
from broker.settings import UNIX
from broker.topic_shards import ALL_TOPICS, TopicShard
from broker.web.server import HttpServer
from broker.web.source import ClusterSource, PageSource
from tests.configs import broker_config
from tests.harness import Outgoing, batch_of, positions_of

TOKEN = "a-token-of-some-length"
"""Of `token:admin`, who may do everything, where there are access rules."""
OF_ADMIN = """
[[grant]]
principals = ["token:admin"]
topics = ["*"]
rights = ["produce", "consume", "schedule", "manage", "compact"]
"""


def access_files(folder: Path, grants: str = OF_ADMIN, **tokens: str) -> dict[str, Any]:
    """Settings of access rules, with the token of the admin and others by the names of their principals."""
    tables = [
        f'[[token]]\nprincipal = "{name}"\nsha256 = "{hashlib.sha256(token.encode()).hexdigest()}"\n'
        for name, token in {"admin": TOKEN, **tokens}.items()
    ]
    (folder / "access.toml").write_text(grants)
    (folder / "tokens.toml").write_text("\n".join(tables))
    return {"access_file": str(folder / "access.toml"), "tokens_file": str(folder / "tokens.toml")}


def calls_of(broker: Broker) -> PageCalls:
    """The port of a broker as its pages use it, without a network."""
    services: dict[str, Any] = {
        producer.SERVICE: producer.ProducerService(broker),
        consumer.SERVICE: consumer.ConsumerService(broker, 0),
        admin.SERVICE: admin.AdminService(broker, "1.2.3", None, lambda: 0),
        schedule.SERVICE: schedule.ScheduleService(broker),
    }
    handlers = {name: service.handlers() for name, service in services.items()}

    def find(path: str) -> Handler:
        _, service, method = path.split("/")
        handler: Handler = handlers[service][method]
        return handler

    port = GrpcPort(broker, broker=broker, guard=AccessInterceptor)
    return PageCalls(port, find, has_tls=bool(broker.config.tls_cert_file))


@dataclass
class Pages:
    """The pages, as a browser meets them."""

    broker: Broker
    server: HttpServer
    session: aiohttp.ClientSession
    calls: PageCalls

    async def get(self, path: str, *, status: int = 200, **headers: str) -> str:
        """The HTML of a page."""
        async with self.session.get(path, headers=_names(headers), allow_redirects=False) as response:
            assert response.status == status, await response.text()
            return await response.text()

    async def post(
        self,
        path: str,
        *,
        follow: bool = True,
        status: int = 200,
        csrf: str | None = None,
        headers: dict[str, str] | None = None,
        **form: str,
    ) -> str:
        """The HTML of the page that a form leads to; sent as a browser sends it, unless headers say otherwise."""
        if csrf is None:
            csrf = await self.csrf()
        sent = (
            {"Origin": f"http://{self.server.address}", "Sec-Fetch-Site": "same-origin"}
            if headers is None
            else headers
        )
        async with self.session.post(
            path, data={"csrf": csrf, **form}, headers=sent, allow_redirects=follow
        ) as response:
            assert response.status == status, await response.text()
            return await response.text()

    async def csrf(self, path: str = "/new-topic") -> str:
        """The token that this browser's forms hold."""
        async with self.session.get(path) as response:  # the login's, for who has not logged in
            found = re.search(r'name="csrf" value="([^"]+)"', await response.text())
        return found[1] if found else ""

    async def log_in(self, token: str = TOKEN) -> str:
        return await self.post("/login", csrf=await self.csrf("/login"), token=token, next="/")

    async def produce(self, topic: str, *messages: Outgoing) -> list[Position]:
        accepted = await self.broker.submit_batch(topic, batch_of(topic, messages, self.broker.config))
        await accepted.durable
        return positions_of(accepted.ids)


def _names(headers: dict[str, str]) -> dict[str, str]:
    return {name.replace("_", "-"): value for name, value in headers.items()}


MakePages = Callable[..., Awaitable[Pages]]


@pytest.fixture
async def make_pages(tmp_path: Path) -> AsyncIterator[MakePages]:
    """Makes a broker with pages; takes its settings."""
    stack = AsyncExitStack()

    async def make(
        *,
        cluster: ClusterSource | None = None,
        http_socket: str = "",
        topic_shard: TopicShard = ALL_TOPICS,
        **settings: object,
    ) -> Pages:
        settings = {"http_address": "127.0.0.1:0", **settings}
        config = broker_config(**{"data_dir": str(tmp_path / "data"), **settings})
        config = replace(config, http_socket=http_socket, topic_shard=topic_shard)
        executors = [stack.enter_context(ThreadPoolExecutor(1)) for _ in range(4)]
        broker = Broker(
            config,
            vfs=LocalVfs(),
            clock=SystemClock(),
            rng=random.Random(0),
            journal_executor=executors[0],
            file_executor=executors[1],
            read_executor=executors[2],
            index_executor=executors[3],
            on_failure=lambda error: None,
        )
        broker.open()
        broker.start()
        stack.push_async_callback(broker.stop)
        calls = calls_of(broker)
        stack.push_async_callback(calls._port.server.stop, None)
        server = HttpServer(
            UNIX + http_socket if http_socket else config.http_address,
            _no_metrics,
            lambda: broker.not_ready_because,
            pages=PageSource(config, broker.clock, "1.2.3", broker.audit, calls, broker, cluster),
        )
        server.listen()
        await server.start()
        stack.push_async_callback(server.stop)
        address = "localhost" if http_socket else server.address.replace("0.0.0.0", "127.0.0.1")
        jar = aiohttp.CookieJar(unsafe=True)  # addresses may have cookies, too
        session = await stack.enter_async_context(aiohttp.ClientSession(f"http://{address}", cookie_jar=jar))
        return Pages(broker, server, session, calls)

    async with stack:
        yield make


async def _no_metrics() -> bytes:
    return b"postdate_up 1\n"
