"""One broker process with a small shop in it, and one Chromium, for all tests of the pages."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

import postdate
from tests.programs import need_program

ROOT = Path(__file__).parents[2]
TOKEN = "the-token-of-the-browser-tests"
"""Of token:admin, where a module has GRANTS."""
LONG_NAME = "n" * 200
DESKTOP, PHONE = {"width": 1280, "height": 800}, {"width": 390, "height": 844}

Work = Callable[[postdate.Client], Any]


@dataclass
class Shop:
    """The broker, and how to talk to it beside its pages."""

    grpc: str
    http: str
    credentials: dict[str, Any] = field(default_factory=dict)

    def do(self, work: Work) -> Any:
        """Run a coroutine function with a client of its own."""

        async def run() -> Any:
            async with postdate.connect(self.grpc, **self.credentials) as client:
                return await work(client)

        # In another thread: Playwright keeps a loop in this one.
        with ThreadPoolExecutor(1) as thread:
            return thread.submit(lambda: asyncio.run(run())).result()


async def fill(client: postdate.Client) -> None:
    """Orders over days, some of them keyed; a subscription that is worked on, and one that gave up; reports that recur."""
    await client.subscriptions.create("orders", "billing")
    await client.subscriptions.create(
        "jobs", "work", policy=postdate.SubscriptionPolicy(max_delivery_attempts=1)
    )
    async with client.producer("orders") as producer:
        await producer.send_many(
            [
                postdate.OutgoingMessage(
                    json.dumps({"order": i, "note": "<b>& \u00fc</b>"}).encode(),
                    properties={"source": "test"},
                    deliver_after=timedelta(hours=2 + i % 30, seconds=i),
                    schedule_key=f"order/{i:03}",
                )
                for i in range(300)
            ]
        )
    async with client.producer("jobs") as producer:
        await producer.send_many([postdate.OutgoingMessage(b"job %d" % i) for i in range(4)])
    async with client.subscribe("jobs", "work", consumer_name="worker") as subscription:
        for message in await subscription.receive_many(4):
            await message.nack(reason="broken")
    minutes, days = (",".join(map(str, range(1, until))) for until in (33, 31))
    crons = {"daily": "0 9 * * MON-FRI", LONG_NAME: f"{minutes} * {days} * *"}
    for name, cron in crons.items():
        schedule = postdate.RecurringSchedule(
            name=name,
            cron=cron,
            time_zone="America/Argentina/ComodRivadavia",
            jitter=timedelta(minutes=5),
            paused=name == LONG_NAME,
        )
        await client.recurring.put("reports", schedule)
    every = postdate.RecurringSchedule(name="hourly", interval=timedelta(hours=1))
    await client.recurring.put("reports", every)
    while (await client.stats("jobs"))[0].subscriptions[0].dead_letter_messages != 4:
        await asyncio.sleep(0.02)


def access_files(folder: Path, grants: str, tokens: dict[str, str]) -> dict[str, str]:
    """Settings of access rules."""
    tables = [
        f'[[token]]\nprincipal = "{name}"\nsha256 = "{hashlib.sha256(token.encode()).hexdigest()}"\n'
        for name, token in tokens.items()
    ]
    (folder / "access.toml").write_text(grants)
    (folder / "tokens.toml").write_text("\n".join(tables))
    return {"ACCESS_FILE": str(folder / "access.toml"), "TOKENS_FILE": str(folder / "tokens.toml")}


@pytest.fixture(scope="module")
def shop(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shop]:
    """A broker; a module's SETTINGS are its own, and its GRANTS the access rules, with TOKENS of others than admin."""
    need_program("chromium")
    credentials: dict[str, Any] = {}
    rules: dict[str, str] = {}
    if grants := getattr(request.module, "GRANTS", ""):
        tokens = {"admin": TOKEN, **getattr(request.module, "TOKENS", {})}
        rules = access_files(tmp_path_factory.mktemp("rules"), grants, tokens)
        credentials = {"token": TOKEN, "allow_plaintext_token": True}
    settings = {
        "DATA_DIR": str(tmp_path_factory.mktemp("broker")),
        "GRPC_ADDRESS": "127.0.0.1:0",
        "HTTP_ADDRESS": "127.0.0.1:0",
        "LOG_FORMAT": "json",
        "DISK_RESERVE_BYTES": "0",
        **rules,
        **getattr(request.module, "SETTINGS", {}),
    }
    inherited = {
        name: value for name, value in os.environ.items() if not name.startswith(("POSTDATE_", "GRPC_"))
    }
    environ = {f"POSTDATE_{name}": value for name, value in settings.items()}
    environ["PYTHONPATH"] = f"{ROOT}:{ROOT / 'clients/python'}"
    command = [sys.executable, "-m", "broker.cli", "serve"]
    with subprocess.Popen(
        command, env={**inherited, **environ}, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        lines = []
        for line in process.stderr:
            lines.append(line)
            if '"Serving"' in line and '"shard":' not in line:  # not that of one shard
                break
        try:
            facts = json.loads(lines[-1])
            found = Shop(facts["grpc"], facts["http"], credentials)
            found.do(fill)
            yield found
        finally:
            process.kill()


# Not for the session: as long as Playwright's loop lives in this thread, no test of another folder has one.
@pytest.fixture(scope="module")
def browser(shop: Shop) -> Iterator[Any]:
    arguments = [
        "--no-sandbox",
        "--disable-gpu",
        "--disable-background-networking",
        "--disable-component-update",
    ]
    from playwright.sync_api import sync_playwright  # noqa: PLC0415  # a large library, which other runs collect past

    with sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=need_program("chromium"), args=arguments)
        yield chromium
        chromium.close()


@dataclass
class Window:
    """A page of the browser; what its console says in anger is collected."""

    page: Any
    complaints: list[str]

    def go(self, path: str) -> Any:
        response = self.page.goto(path)
        assert response is not None
        return response

    @property
    def heading(self) -> str:
        return str(self.page.inner_text("h1"))

    @property
    def flash(self) -> str:
        return str(self.page.inner_text(".flash"))

    def log_in(self, token: str = TOKEN) -> None:
        self.go("/login")
        self.page.fill("#token", token)
        self.page.press("#token", "Enter")
        self.page.wait_for_selector("text=Log out")


def _has_failed(request: Any) -> bool:
    return "ERR_ABORTED" not in (request.failure or "")  # by going on to the next page


@pytest.fixture
def window(browser: Any, shop: Shop) -> Iterator[Window]:
    """A browser."""
    context = browser.new_context(viewport=DESKTOP, base_url=f"http://{shop.http}")
    context.set_default_timeout(10_000)
    page = context.new_page()
    complaints: list[str] = []
    page.on(
        "console", lambda said: complaints.append(said.text) if said.type in ("error", "warning") else None
    )
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("requestfailed", lambda request: complaints.append(request.url) if _has_failed(request) else None)
    yield Window(page, complaints)
    context.close()
