"""Random schedules of a `ScheduleMachine`: a seed says all of one."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st

from broker.testing.mem_vfs import CrashPolicy
from tests.model.schedule_machine import MARGIN_MS, ScheduleMachine

HOUR_MS = 3_600_000
DELAYS = (0, 5, 40, 200, 600, 2_000, 2_000, 9_000, 9_000, 60_000, HOUR_MS, HOUR_MS)
TTLS = (0, 0, 0, 0, 2_000, HOUR_MS)
PAUSES = (0, 1, 4, 15, 60, 250, MARGIN_MS, MARGIN_MS, 2_500)
CLOCK_STEPS = (-5_000, -1_000, -30, 30, 1_000, 8_000)
KINDS = ("cancel", "cancel", "at", "after", "shift", "first")
MOVES = (-2_000, -1, 0, 1, 30, 500, 1_500, 1_500, 5_000, 20_000, HOUR_MS)
PREFIXES = ("", "", "a-", "b-", "nobody's")


def walk(seed: int, steps: int = 70) -> Counter[str]:
    """Run the schedule of a seed to its end; AssertionError if broker and model disagree. What it met."""
    rng = random.Random(seed)
    machine = ScheduleMachine()
    machine.begin(seed, rng.choice((1.0, 8.0, 40.0)), in_memory=seed % 3 == 0)
    try:
        machine.create_subscription(rng.randrange(6), earliest=True)
        machine.attach(0, 1000)
        for _ in range(steps):
            name = rng.choices(list(WALK), [weight for weight, _ in WALK.values()])[0]
            getattr(machine, name)(**WALK[name][1](rng))
            machine.pause(rng.choice(PAUSES))
        machine.finish()
    finally:
        machine.close()
    return machine.seen


def run_steps(seed: int, steps: list[tuple[str, dict[str, Any], int]]) -> None:
    """Run given steps, each with a pause after it."""
    machine = ScheduleMachine()
    machine.begin(seed, (1.0, 8.0, 40.0)[seed % 3], in_memory=seed % 2 == 0)
    try:
        machine.create_subscription(seed, earliest=True)
        machine.attach(0, 1000)
        for name, arguments, pause_ms in steps:
            getattr(machine, name)(**arguments)
            machine.pause(pause_ms)
        machine.finish()
    finally:
        machine.close()


def steps_of() -> st.SearchStrategy[tuple[str, dict[str, Any], int]]:
    """Steps that Hypothesis can make fewer and simpler."""

    @st.composite
    def step(draw: st.DrawFn) -> tuple[str, dict[str, Any], int]:
        name = draw(st.sampled_from(list(WALK)))
        rng = draw(st.randoms(use_true_random=False))
        return name, WALK[name][1](rng), draw(st.sampled_from(PAUSES))

    return step()


def pick(rng: random.Random) -> int:
    return rng.randrange(1 << 12)


def pick_change(rng: random.Random) -> dict[str, Any]:
    kind = rng.choice(KINDS)
    value_ms = rng.choice(MOVES)
    return {"kind": kind, "value_ms": max(0, value_ms) if kind == "after" else value_ms}


WALK: dict[str, tuple[float, Callable[[random.Random], dict[str, Any]]]] = {
    "produce": (
        6,
        lambda rng: {
            "delays_ms": rng.choices(DELAYS, k=rng.randint(1, 5)),
            "ttl_ms": rng.choice(TTLS),
            "keyed": pick(rng),
            "replace": rng.random() < 0.5,
        },
    ),
    "change": (
        7,
        lambda rng: {
            **pick_change(rng),
            "subset": pick(rng),
            "by_key": rng.random() < 0.2,
            "dry_run": rng.random() < 0.15,
        },
    ),
    "change_matching": (
        1.5,
        lambda rng: {
            **pick_change(rng),
            "low_ms": rng.choice((0, 1_000, 5_000)),
            "width_ms": rng.choice((0, 500, 10_000)),
            "prefix": rng.choice(PREFIXES),
            "limit": rng.choice((1, 2, 5)),
            "dry_run": rng.random() < 0.2,
        },
    ),
    "acknowledge": (2, lambda rng: {"pick": pick(rng), "subset": pick(rng)}),
    "nack": (1, lambda rng: {"pick": pick(rng), "subset": pick(rng)}),
    "attach": (1.5, lambda rng: {"pick": pick(rng), "permits": rng.choice((1, 2, 1000))}),
    "detach": (1, lambda rng: {"pick": pick(rng)}),
    "seek": (0.7, lambda rng: {"pick": pick(rng), "where": rng.choice(("earliest", "latest", "id"))}),
    "pause_or_resume": (0.6, lambda rng: {"pick": pick(rng)}),
    "create_subscription": (0.7, lambda rng: {"kind": pick(rng), "earliest": rng.random() < 0.6}),
    "delete_subscription": (0.3, lambda rng: {"pick": pick(rng)}),
    "step_clock": (1, lambda rng: {"ms": rng.choice(CLOCK_STEPS)}),
    "checkpoint": (1.5, lambda rng: {}),
    "restart": (0.7, lambda rng: {"reconnect": rng.random() < 0.7}),
    "crash": (
        0.8,
        lambda rng: {
            "policy": rng.choice(list(CrashPolicy)),
            "seed": pick(rng),
            "reconnect": rng.random() < 0.7,
        },
    ),
    "crash_while_changing": (
        0.8,
        lambda rng: {
            **pick_change(rng),
            "subset": pick(rng),
            "wait_ms": rng.choice((0, 0.5, 2, 6, 20)),
            "policy": rng.choice(list(CrashPolicy)),
            "seed": pick(rng),
        },
    ),
}
