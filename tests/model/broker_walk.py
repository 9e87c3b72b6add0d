"""Random schedules of a `BrokerMachine` without Hypothesis: cheaper, and with more of what makes trouble."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from broker.testing.mem_vfs import CrashPolicy
from tests.harness import (
    EARLIEST,
    LATEST,
)
from tests.model.broker_machine import CLOCK_STEPS, DELAYS, LIMITS, NACKS, PAUSES, TTLS, TYPES, BrokerMachine


def walk(seed: int, steps: int = 60) -> None:
    """Run the schedule of a seed to its end; AssertionError if the broker and the model disagree."""
    rng = random.Random(seed)
    machine = BrokerMachine()
    machine.begin(seed=seed, latency_ms=rng.choice((1.0, 8.0, 40.0)))
    try:
        for _ in range(steps):
            name = rng.choices(list(WALK), [weight for weight, _ in WALK.values()])[0]
            if machine.inboxes or name not in ("detach", "nack"):
                getattr(machine, name)(**WALK[name][1](rng), pause_ms=rng.choice(PAUSES))
    except BaseException:
        machine.close()
        raise
    machine.teardown()


def pick(rng: random.Random) -> int:
    return rng.randrange(1 << 12)


def pick_down(rng: random.Random) -> dict[str, Any]:
    down_ms = 0 if rng.random() < 0.7 else rng.choice(CLOCK_STEPS)
    return {"down_ms": down_ms, "reconnect": rng.random() < 0.8}


WALK: dict[str, tuple[float, Callable[[random.Random], dict[str, Any]]]] = {
    "produce": (
        5,
        lambda rng: {
            "topic": rng.choice(("orders", "orders", "audit")),
            "delays_ms": rng.choices(DELAYS, k=rng.randint(1, 6)),
            "ttl_ms": rng.choice(TTLS),
            "answered": rng.random() < 0.5,
        },
    ),
    "acknowledge": (
        2,
        lambda rng: {"pick": pick(rng), "subset": pick(rng), "answered": rng.random() < 0.5},
    ),
    "nack": (2, lambda rng: {"pick": pick(rng), "subset": pick(rng), "after_ms": rng.choice(NACKS)}),
    "attach": (1, lambda rng: {"pick": pick(rng), "limits": rng.choice(LIMITS)}),
    "detach": (1, lambda rng: {"pick": pick(rng), "hands_back": rng.random() < 0.5}),
    "step_clock": (2, lambda rng: {"ms": rng.choice(CLOCK_STEPS)}),
    "seek": (0.7, lambda rng: {"pick": pick(rng), "where": rng.choice(("earliest", "latest", "id"))}),
    "pause_or_resume": (0.5, lambda rng: {"pick": pick(rng)}),
    "checkpoint": (0.7, lambda rng: {"answered": rng.random() < 0.5}),
    "restart": (0.7, pick_down),
    "crash": (
        1.5,
        lambda rng: {"policy": rng.choice(list(CrashPolicy)), "seed": pick(rng), **pick_down(rng)},
    ),
    "create_subscription": (
        0.5,
        lambda rng: {
            "topic": rng.randrange(2),
            "type_": rng.choice(TYPES),
            "position": rng.choice((EARLIEST, LATEST)),
            "honor_delay": rng.choice((None, True)),
        },
    ),
}
