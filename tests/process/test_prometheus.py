"""A real Prometheus scrapes a real broker: the page passes promtool, and every rule and panel can be evaluated."""

from __future__ import annotations

import asyncio
import json
import subprocess
import urllib.parse
import urllib.request
from collections.abc import AsyncIterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import yaml

import postdate
from benchmarks.processes import free_ports
from tests.architecture.test_observability import PROMETHEUS, queries
from tests.process.conftest import BrokerProcess, Start
from tests.programs import need_program

pytestmark = pytest.mark.packaging

LIMIT_SECONDS = 30.0

# What a broker without backups, audits, dead letters and refusals has nothing to show for.
EMPTY = {
    "Refused requests",
    "Seals, merges, loads",
    "Age of the last backup",
    "Age of the last clean audit",
    "Findings of the last audit",
}


def fetch(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=10) as response:
        answer: bytes = response.read()
        return answer


async def busy(start: Start, folder: Path) -> BrokerProcess:
    """A broker with something produced, scheduled, delivered and acknowledged."""
    broker = await (await start(data_dir=str(folder / "data"))).serving()
    async with postdate.connect(broker.grpc_address) as client:
        async with client.producer("orders") as producer:
            await producer.send(b"now")
            await producer.send(b"in an hour", deliver_after=timedelta(hours=1))
        start_at = postdate.InitialPosition.EARLIEST
        async with client.subscribe("orders", "billing", initial_position=start_at, limit=1) as subscription:
            async for message in subscription:
                await message.ack()
    return broker


@pytest.fixture
async def prometheus(tmp_path: Path) -> AsyncIterator[Any]:
    """Starts Prometheus with our configuration, the addresses and intervals aside; returns how to ask it."""
    program = need_program("prometheus")
    started: list[subprocess.Popen[bytes]] = []

    async def start_one(target: str) -> Any:
        config = yaml.safe_load((PROMETHEUS / "prometheus.yml").read_text())
        config["global"] = {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"}
        config["rule_files"] = [str(PROMETHEUS / "rules/*.yml")]
        config["scrape_configs"] = [
            each for each in config["scrape_configs"] if each["job_name"] == "postdate"
        ]
        config["scrape_configs"][0]["static_configs"] = [{"targets": [target]}]
        (tmp_path / "prometheus.yml").write_text(yaml.safe_dump(config))
        (port,) = free_ports(1)
        command = [
            program,
            f"--config.file={tmp_path / 'prometheus.yml'}",
            f"--storage.tsdb.path={tmp_path / 'tsdb'}",
            f"--web.listen-address=127.0.0.1:{port}",
            "--log.level=warn",
        ]
        started.append(subprocess.Popen(command))  # noqa: ASYNC220 - returns at once

        async def ask(path: str, **arguments: str) -> Any:
            url = f"http://127.0.0.1:{port}/api/v1/{path}?{urllib.parse.urlencode(arguments)}"
            answer = json.loads(await asyncio.to_thread(fetch, url))
            assert answer["status"] == "success", answer
            return answer["data"]

        return ask

    yield start_one
    for process in started:
        process.terminate()
        process.wait(LIMIT_SECONDS)


async def test_the_page_passes_promtool(start: Start, tmp_path: Path):
    program = need_program("promtool", "prometheus")
    broker = await busy(start, tmp_path)
    page = b""
    async with asyncio.timeout(LIMIT_SECONDS):
        # What is due in an hour is not indexed at once.
        while b'postdate_due_within_messages{within="1d"} 1.0' not in page:
            page = await asyncio.to_thread(fetch, f"http://{broker.http_address}/metrics")
    assert b'postdate_due_within_messages{within="10m"} 0.0' in page
    command = [program, "check", "metrics"]
    done = await asyncio.to_thread(subprocess.run, command, input=page, capture_output=True, check=False)
    assert (done.returncode, done.stdout + done.stderr) == (0, b"")


async def test_every_rule_and_every_panel_can_be_evaluated(start: Start, prometheus: Any, tmp_path: Path):
    broker = await busy(start, tmp_path)
    ask = await prometheus(broker.http_address)

    async def scraped_often() -> bool:
        # A rate needs two samples; before Prometheus listens nothing can be asked.
        try:
            found = await ask("query", query="count_over_time(up[1m])")
        except OSError:
            return False
        return bool(found["result"]) and float(found["result"][0]["value"][1]) >= 3

    async with asyncio.timeout(LIMIT_SECONDS):
        while not await scraped_often():
            await asyncio.sleep(0.1)
    groups = (await ask("rules"))["groups"]
    rules = [rule for group in groups for rule in group["rules"]]
    assert rules
    assert {rule["health"] for rule in rules} <= {"ok", "unknown"}  # unknown: not evaluated yet
    assert not [rule["lastError"] for rule in rules if rule.get("lastError")]
    empty = {
        where.split(": ")[1]
        for where, query in queries()
        if not (await ask("query", query=query.replace("[6h]", "[1m]")))["result"]
    }
    assert empty <= EMPTY
    firing = {
        alert["labels"]["alertname"]
        for alert in (await ask("alerts"))["alerts"]
        if alert["state"] == "firing"
    }
    assert not firing
