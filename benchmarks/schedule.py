"""The scenarios that look at what is pending, change it, or name it by keys."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from benchmarks.pending import MONTH_DELAY, beside
from benchmarks.processes import Broker, Client, Setup
from benchmarks.scenarios import Figures, Scenario, use

_BUSY_RATE = 100_000  # messages a second of another topic


def cancel_ids(setup: Setup) -> Figures:
    return _cancel(setup, "ids")


def cancel_filter(setup: Setup) -> Figures:
    return _cancel(setup, "filter")


def bulk_beside(setup: Setup) -> Figures:
    """Single messages of another topic, idle and beside bulk changes that go through 500,000 messages, in turns."""
    turns = 2
    count = setup.sized(1_000_000 * turns)
    with Broker(setup, "bulk-beside") as broker:
        task = {"batch": 1_000, "payload_bytes": 100, "window": 16, "count": count, "delay": MONTH_DELAY}
        Client(setup, broker, "load_keys", **task).run()
        broker.wait_quiet(120)
        prefix = len("order-") + 12 - len(str(count // 2 - 1))  # that of about half of them
        client = Client(
            setup,
            broker,
            "schedule_beside",
            turns=turns,
            rate=100,
            idle_seconds=setup.seconds(5.0),
            prefix=prefix,
        )
        return {**client.run(), **use(client)}


def list_10m(setup: Setup) -> Figures:
    """Pages, counts and keys of messages that all have a key; pages and keys also beside another topic's load."""
    count = setup.sized(10_000_000)
    with Broker(setup, "list-10m") as broker, _busy_topic(setup, broker) as (start, stop):
        task = {"batch": 1_000, "payload_bytes": 100, "window": 16, "count": count, "delay": MONTH_DELAY}
        Client(setup, broker, "load_keys", **task).run()
        broker.wait_quiet(240)  # until runs of keys are merged
        client = Client(setup, broker, "schedule_look", count=count, page=1_000, pages=40, finds=2_000)
        busy: Figures = {}
        result = client.run(on_phase={"beside": start, "done": lambda: busy.update(stop())})
        return {**result, "busy_rate": busy["rate"], **use(client)}


def produce_keys(setup: Setup) -> Figures:
    """A key on every message, then none on any, of the same size, in one broker; also beside another topic's load."""
    with Broker(setup, "produce-keys") as broker, _busy_topic(setup, broker) as (start, stop):
        task = {"batch": 1_000, "payload_bytes": 100, "window": 16, "warm_seconds": setup.seconds(2.0)}
        client = Client(setup, broker, "produce_keys", seconds=setup.seconds(6.0), **task)
        busy: Figures = {}
        result = client.run(on_phase={"beside": start, "done": lambda: busy.update(stop())})
        return {**result, "busy_rate": busy["rate"], **use(client)}


def _busy_topic(setup: Setup, broker: Broker) -> AbstractContextManager[tuple[Any, Any]]:
    task = {"rate": _BUSY_RATE, "batch": 1_000, "payload_bytes": 100, "delay": MONTH_DELAY}
    return beside(setup, broker, "beside", **task)


def recurring(setup: Setup) -> Figures:
    """Schedules that each recur once a minute, spread over its seconds; memory of the broker for one."""
    count, memory = setup.sized(10_000), {}
    with Broker(setup, "recurring-10k") as broker:

        def note(name: str) -> Callable[[], None]:
            def look() -> None:
                time.sleep(3)  # it never rests: schedules are due each second
                memory[name] = broker.memory_bytes()["RssAnon"]

            return look

        client = Client(setup, broker, "recurring", count=count, seconds=setup.seconds(30.0))
        result = client.run(on_phase={"empty": note("empty"), "full": note("full")})
        return {**result, "bytes_each": (memory["full"] - memory["empty"]) / count, **use(client)}


def _cancel(setup: Setup, by: str) -> Figures:
    with Broker(setup, f"cancel-{by}") as broker:
        rest_seconds = 2 if setup.quick else 10
        task = {"count": setup.sized(1_000_000), "by": by, "rest_seconds": rest_seconds}
        client = Client(setup, broker, "schedule_change", **task)
        return {**client.run(), **use(client)}


SCENARIOS: dict[str, Scenario] = {
    "cancel-ids": cancel_ids,
    "cancel-filter": cancel_filter,
    "bulk-beside": bulk_beside,
    "list-10m": list_10m,
    "produce-keys": produce_keys,
    "recurring-10k": recurring,
}
