"""Takes the pictures of the pages in docs/images from a real broker: `python -m tools.screenshots`.

A broker in a folder that is thrown away afterwards gets orders, reminders and retries over weeks, consumers that
work, and some that give up; Chromium looks at its pages. `--serve` leaves it running instead, to look at by hand.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from urllib.parse import quote

import postdate

ROOT = Path(__file__).resolve().parents[1]
IMAGES = ROOT / "docs" / "images"

Outgoing = postdate.OutgoingMessage

_DAY = 86_400.0
_ORDERS = 24_000
_MAILS = 9_000
_INVOICES = 2_600
_RETRIES = 1_500
_TRIALS = 1_400


@contextlib.contextmanager
def running_broker(folder: Path, report: Path) -> Iterator[tuple[str, str]]:
    """A broker of its own; yields its gRPC and HTTP addresses."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("POSTDATE_")}
    environ |= {
        "POSTDATE_DATA_DIR": str(folder),
        "POSTDATE_GRPC_ADDRESS": "127.0.0.1:0",
        "POSTDATE_HTTP_ADDRESS": "127.0.0.1:0",
        "POSTDATE_LOG_FORMAT": "json",
        "POSTDATE_AUDIT_REPORT_DIR": str(report),
        "POSTDATE_INITIAL_BACKOFF_MS": "0",
        "TUNING": '{"ledger_max_entries": "6000", "min_index_count": "5000", "batch_messages_max": "1000"}',
        "PYTHONPATH": f"{ROOT}:{ROOT / 'clients/python'}",
    }
    command = [sys.executable, "-m", "tests.tuned_broker", "serve"]
    with subprocess.Popen(command, env=environ, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            for line in process.stderr:
                if '"Serving"' in line:
                    facts = json.loads(line)
                    break
                print(line, end="", file=sys.stderr)
            else:
                raise SystemExit("screenshots: the broker did not start")
            # Somebody has to read on, or the broker would wait for its log at some time.
            with subprocess.Popen(["cat"], stdin=process.stderr, stdout=subprocess.DEVNULL):
                yield facts["grpc"], facts["http"]
                process.send_signal(signal.SIGTERM)
                process.wait(30)
        finally:
            process.kill()


def _working_hours(rng: random.Random, now: datetime, days: float) -> datetime:
    """A time within some days, mostly by day and less at weekends."""
    while True:
        at = now + timedelta(seconds=rng.random() ** 1.4 * days * _DAY)
        by_day = 0.12 + 0.88 * max(0.0, 1 - abs(at.hour + at.minute / 60 - 13.5) / 7)
        if rng.random() < by_day * (0.45 if at.weekday() >= 5 else 1):
            return at


def _payload(**facts: object) -> bytes:
    return json.dumps(facts).encode()


async def make_subscriptions(client: postdate.Client) -> None:
    for topic, name in (
        ("orders", "fulfilment"),
        ("orders", "analytics"),
        ("mails", "sender"),
        ("invoices", "ledger"),
        ("payment-retries", "payments"),
        ("trials", "crm"),
    ):
        await client.subscriptions.create(topic, name)
    await client.subscriptions.create(
        "webhooks", "partners", policy=postdate.SubscriptionPolicy(max_delivery_attempts=2)
    )


async def fill(client: postdate.Client) -> None:
    """Produce a shop's morning of messages."""
    rng = random.Random(7)
    now = datetime.now(UTC)
    for topic, messages in (
        ("orders", _orders(rng, now)),
        ("mails", _mails(rng, now)),
        ("invoices", _invoices(rng, now)),
        ("payment-retries", _retries(rng, now)),
        ("trials", _trials(rng, now)),
        ("webhooks", _webhooks()),
    ):
        async with client.producer(topic) as producer:
            for first in range(0, len(messages), 1_000):
                await producer.send_many(messages[first : first + 1_000])


def _orders(rng: random.Random, now: datetime) -> list[Outgoing]:
    """Most are to be closed some day if unpaid; of the older ones many are done."""
    return [
        Outgoing(
            _payload(
                order=f"A-{100_000 + i}",
                action="close if unpaid",
                shop=rng.randint(1, 40),
                total=round(rng.uniform(8, 420), 2),
                currency="EUR",
            ),
            key=f"shop-{rng.randint(1, 40)}",
            properties={"source": "checkout", "version": "3"},
            deliver_at=_working_hours(rng, now, 27) if rng.random() < 0.15 + 0.85 * i / _ORDERS else None,
            schedule_key=f"order/A-{100_000 + i}",
        )
        for i in range(_ORDERS)
    ]


def _mails(rng: random.Random, now: datetime) -> list[Outgoing]:
    return [
        Outgoing(
            _payload(to=f"customer{i}@example.org", template=template),
            deliver_at=_working_hours(rng, now, 24),
            schedule_key=f"mail/{template}/{i}",
        )
        for i in range(_MAILS)
        for template in (rng.choice(["cart", "review", "survey"]),)
    ]


def _invoices(rng: random.Random, now: datetime) -> list[Outgoing]:
    """Reminders go out in the mornings of a few days."""
    morning = now.replace(hour=8, minute=0, second=0, microsecond=0)
    return [
        Outgoing(
            _payload(invoice=f"2026-{i:05}", reminder=1 + i % 3),
            deliver_at=morning + timedelta(days=rng.choice([3, 7, 10, 14, 21]), seconds=rng.random() * 5_400),
        )
        for i in range(_INVOICES)
    ]


def _retries(rng: random.Random, now: datetime) -> list[Outgoing]:
    return [
        Outgoing(
            _payload(payment=f"pay_{i:06x}", attempt=1 + i % 5),
            deliver_at=now + timedelta(seconds=90 + rng.expovariate(1 / 21_600)),
        )
        for i in range(_RETRIES)
    ]


def _trials(rng: random.Random, now: datetime) -> list[Outgoing]:
    return [
        Outgoing(
            _payload(account=i, action="trial ends"),
            deliver_at=now + timedelta(days=rng.triangular(1, 30, 14)),
        )
        for i in range(_TRIALS)
    ]


def _webhooks() -> list[Outgoing]:
    """One partner in four never answers."""
    return [
        Outgoing(
            _payload(partner=i % 4, event="order.closed", order=f"A-{90_000 + i}"),
            properties={"endpoint": f"https://partner{i % 4}.example/hooks"},
        )
        for i in range(48)
    ]


async def keep_ordering(client: postdate.Client) -> None:
    """Orders come in, and each has something due a little later."""
    async with client.producer("orders") as producer:
        for i in itertools.count(1):
            sent = [
                Outgoing(_payload(order=f"B-{i}-{each}"), deliver_after=timedelta(seconds=2))
                for each in range(12)
            ]
            await producer.send_many(sent)
            await asyncio.sleep(0.1)


async def consume(client: postdate.Client, topic: str, name: str, worker: str, fail: bool = False) -> None:
    """A consumer that works, or one that never manages."""
    async with client.subscribe(topic, name, consumer_name=worker) as subscription:
        async for each in subscription:
            if fail and b'"partner": 3' in each.payload:
                await each.nack(reason="partner3 answers 503")
            else:
                subscription.ack_nowait(
                    each
                )  # who waits for each on a slow disk falls behind what is ordered


@contextlib.asynccontextmanager
async def working(client: postdate.Client, *, busy: bool = False) -> AsyncIterator[None]:
    """Consumers at work for as long as pictures are taken."""
    tasks = [
        asyncio.create_task(consume(client, *each))
        for each in (
            ("orders", "fulfilment", "worker-1"),
            ("orders", "fulfilment", "worker-2"),
            ("orders", "analytics", "warehouse"),
            ("payment-retries", "payments", "retrier"),
            ("mails", "sender", "smtp-1"),
            ("trials", "crm", "crm-sync"),
            ("webhooks", "partners", "hooks", True),
        )
    ]
    if busy:
        tasks.append(asyncio.create_task(keep_ordering(client)))
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def wait_settled(client: postdate.Client) -> None:
    """Until the consumers have done what is due, and given up what they must."""
    for _ in range(600):
        topics = await client.stats("orders", "webhooks")
        if not sum(
            each.ready_messages + each.leased_messages for topic in topics for each in topic.subscriptions
        ):
            return
        await asyncio.sleep(0.1)


def audit(folder: Path, report: Path) -> None:
    """The report that the pages show."""
    subprocess.run(
        [
            sys.executable,
            "-m",
            "broker.cli",
            "audit",
            str(folder),
            "--engine",
            "inline",
            "--report",
            str(report),
        ],
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'clients/python'}"},
        check=False,
        stdout=subprocess.DEVNULL,
    )


async def prepare(address: str, report: Path) -> None:
    """Fill the broker, let consumers do what is due, and audit a backup of it."""
    async with postdate.connect(address) as client:
        await make_subscriptions(client)
        async with working(client):
            await fill(client)
            await wait_settled(client)
            await client.subscriptions.pause("invoices", "ledger")
            backup = await client.backups.create("nightly")
            await asyncio.to_thread(audit, Path(backup.path), report)
            await wait_settled(client)


def pages_to_take(topic_page: str) -> list[tuple[str, str, str, bool]]:
    """Name, path, colours, and whether it is a phone."""
    orders = quote("orders")
    return [
        ("overview", "/", "light", False),
        ("timeline", "/timeline", "light", False),
        ("timeline-dark", "/timeline", "dark", False),
        ("scheduled", f"/scheduled?topic={orders}&prefix=order/A-10", "light", False),
        ("message", topic_page, "light", False),
        ("topics", f"/topics/{orders}", "light", False),
        ("dead-letters", "/dead-letters/webhooks/partners", "light", False),
        ("storage", "/storage/orders", "light", False),
        ("audit", "/audit", "light", False),
        ("phone", "/", "dark", True),
    ]


async def take_pictures(http: str) -> None:
    """Look at every page as an operator."""
    from playwright.async_api import async_playwright  # noqa: PLC0415 - only for pictures

    IMAGES.mkdir(parents=True, exist_ok=True)
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(
            executable_path="/usr/bin/chromium",
            args=["--no-sandbox", "--disable-gpu", "--disable-background-networking"],
        )
        context = await browser.new_context(viewport={"width": 1280, "height": 800})
        page = await context.new_page()
        await page.goto(f"http://{http}/")  # a first look: rates are told from two, some seconds apart
        await page.wait_for_timeout(6_000)
        await page.goto(f"http://{http}/scheduled?topic=orders&prefix=order/A-10")
        message = await page.get_attribute("tbody a", "href") or "/"
        for name, path, colours, is_phone in pages_to_take(message):
            # What the audit looked at is a folder of this machine: it is named last, and left out.
            width, height = (390, 844) if is_phone else (1280, 755 if name == "audit" else 800)
            await page.set_viewport_size({"width": width, "height": height})
            await page.emulate_media(color_scheme="dark" if colours == "dark" else "light")
            await page.goto(f"http://{http}{path}")
            await page.screenshot(path=IMAGES / f"{name}.png")
        await browser.close()


async def show(grpc: str, http: str, *, serve: bool) -> None:
    """Let consumers work, and take the pictures."""
    async with postdate.connect(grpc) as client, working(client, busy=True):
        if serve:
            print(f"http://{http}", flush=True)
            await asyncio.Event().wait()
        await asyncio.sleep(10)
        await take_pictures(http)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument(
        "--serve", action="store_true", help="leave the broker running, and take no pictures"
    )
    serve = arguments.parse_args().serve
    with tempfile.TemporaryDirectory() as folder:
        data, report = Path(folder) / "data", Path(folder) / "audit"
        with contextlib.suppress(KeyboardInterrupt):
            with running_broker(data, report) as (grpc, _):
                asyncio.run(prepare(grpc, report))
            # Another life of the broker: that a shop was poured into it in seconds is not what its counters tell.
            with running_broker(data, report) as (grpc, http):
                asyncio.run(show(grpc, http, serve=serve))


if __name__ == "__main__":
    main()
