"""The scenarios that look at what is pending, change it, or name it by keys."""

from __future__ import annotations

import time
from collections.abc import Callable

from benchmarks.pending import MONTH_DELAY
from benchmarks.processes import Broker, Client, Setup
from benchmarks.scenarios import Figures, Scenario, load, use


def cancel_ids(setup: Setup) -> Figures:
    return _cancel(setup, "ids")


def cancel_filter(setup: Setup) -> Figures:
    return _cancel(setup, "filter")


def list_10m(setup: Setup) -> Figures:
    count = setup.sized(10_000_000)
    with Broker(setup, "list-10m") as broker:
        load(setup, broker, count, MONTH_DELAY)
        broker.wait_quiet()
        client = Client(setup, broker, "schedule_look", count=count, page=1_000, pages=40)
        return {**client.run(), **use(client)}


def produce_keys(setup: Setup) -> Figures:
    """A key on every message, then none on any, of the same size, in one broker."""
    with Broker(setup, "produce-keys") as broker:
        task = {"batch": 1_000, "payload_bytes": 100, "window": 16, "warm_seconds": setup.seconds(2.0)}
        client = Client(setup, broker, "produce_keys", seconds=setup.seconds(6.0), **task)
        return {**client.run(), **use(client)}


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
    "list-10m": list_10m,
    "produce-keys": produce_keys,
    "recurring-10k": recurring,
}
