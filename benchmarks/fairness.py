"""The scenarios in which one quiet topic shares a broker with others that are not."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from benchmarks.errors import BenchmarkFailed
from benchmarks.processes import Broker, Client, Setup, spawn_client
from benchmarks.scenarios import Figures, Scenario

_RATE = 50.0
_NICENESS = 10  # of who disturbs
DISTURBANCES = ("nothing", "herd", "never-acks", "no-read", "idle-subscriptions", "many-topics")


REST_SECONDS = 20
"""After so long a broker at rest has given back what was freed (`broker.runtime.allocator.RestTrim`)."""


def fairness(setup: Setup) -> Figures:
    """The worst of all disturbances, and each; in windows of ten seconds."""
    beside: list[subprocess.Popen[str]] = []
    with Broker(setup, "fairness") as broker:

        def begin(kind: str) -> Callable[[], None]:
            return lambda: beside.append(_disturb(setup, broker, kind))

        def end() -> None:
            process = beside.pop()
            output, _ = process.communicate("stop\n", timeout=60)
            said = [json.loads(line) for line in output.splitlines()]
            if not said or "result" not in said[-1]:
                raise BenchmarkFailed(f"who disturbs: {said[-1:]}")

        phases = {f"begin {kind}": begin(kind) for kind in DISTURBANCES[1:]}
        phases |= {f"end {kind}": end for kind in DISTURBANCES[1:]}
        client = Client(
            setup, broker, "quiet", rate=_RATE, seconds=setup.seconds(10.0) + 2, disturbances=DISTURBANCES
        )
        try:
            found = client.run(on_phase=phases)
        finally:
            for process in beside:
                process.kill()
                process.wait()
    figures: Figures = {"early": found["early"]}
    for kind in DISTURBANCES:
        figures[f"{kind}_late_p99_ms"] = found[kind]["late"]["p99"]
        figures[f"{kind}_produce_p99_ms"] = found[kind]["answered"]["p99"]
    for what in ("late", "produce"):
        figures[f"worst_{what}_p99_ms"] = max(figures[f"{kind}_{what}_p99_ms"] for kind in DISTURBANCES)
    return figures


def idle_memory(setup: Setup) -> Figures:
    """Measure the memory of an unused topic and subscription, while the broker rests."""
    topics = subscriptions = setup.sized(10_000)
    resident: dict[str, int] = {}
    with Broker(setup, "idle") as broker:

        def note(what: str) -> Callable[[], None]:
            def look() -> None:
                broker.wait_quiet()
                time.sleep(REST_SECONDS)
                resident[what] = broker.memory_bytes()["VmRSS"]

            return look

        client = Client(setup, broker, "idle", topics=topics, subscriptions=subscriptions)
        client.run(on_phase={what: note(what) for what in ("empty", "topics", "subscriptions")})
    return {
        "topic_bytes": (resident["topics"] - resident["empty"]) / topics,
        "subscription_bytes": (resident["subscriptions"] - resident["topics"]) / subscriptions,
    }


def stop_topics(setup: Setup) -> Figures:
    """Measure a stop that has to write the manifests of many new topics."""
    count = setup.sized(3_000)
    # No checkpoint before the stop's own.
    setup = replace(setup, broker_flags=(*setup.broker_flags, "--checkpoint-interval-ms=1h"))
    with Broker(setup, "stop") as broker:
        Client(setup, broker, "idle", topics=count, subscriptions=0).run(
            on_phase=dict.fromkeys(("empty", "topics", "subscriptions"), lambda: None)
        )
        seconds = broker.stop()
        broker.start()
        broker.wait_ready()
        held = sum(path.is_dir() for path in (broker.data_folder / "topics").iterdir())
        if held != count:
            raise BenchmarkFailed(f"{held} topics were kept of {count}")
    return {"stop_seconds": seconds}


SCENARIOS: dict[str, Scenario] = {
    "fairness": fairness,
    "idle-memory": idle_memory,
    "stop-topics": stop_topics,
}


def _disturb(setup: Setup, broker: Broker, kind: str) -> subprocess.Popen[str]:
    """Start a client that does as `kind` says; returns once it does."""
    task: dict[str, Any] = {"address": broker.address, "kind": kind, "scale": 0.1 if setup.quick else 1.0}
    # What is measured is the broker, not who of its clients gets their core.
    process = spawn_client(setup, "disturb", task, setup.folder / f"{kind}.log", niceness=_NICENESS)
    assert process.stdout is not None
    if "ready" not in (line := process.stdout.readline()):
        process.kill()
        raise BenchmarkFailed(f"who disturbs by {kind} did not begin: {line}")
    return process
