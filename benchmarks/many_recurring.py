"""Cost of very many recurring schedules of one topic: `python -m benchmarks.many_recurring [COUNT ...]`.

In one process, without the limits of a broker: the topic's own state is made by the records that put schedules, written
as a checkpoint writes it, and read as a start reads it. Each count has a process of its own.
"""

from __future__ import annotations

import gc
import multiprocessing
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from broker.policy import TopicPolicy
from broker.storage.manifest import TopicImage
from broker.storage.records import Recurred
from broker.storage.recurring import RecurringStep, decode_recurring
from broker.storage.recurring_values import Definition, RecurringProgress, RecurringRule
from broker.topics.recurrence import next_after
from broker.topics.recurring import TopicRecurring
from postdate_api.v1 import message_pb2

_COLUMNS = (
    "schedules",
    "memory",
    "each",
    "file",
    "captured in",
    "encoded in",
    "read in",
    "named in",
    "planned, each",
)
COUNTS = (10_000, 100_000, 1_000_000)
_TOPIC_ID = 7
_NOW_MS = 1_764_000_000_000
_PLANNED = 10_000

T = TypeVar("T")


def main() -> None:
    counts = tuple(map(int, sys.argv[1:])) or COUNTS
    print(" ".join(f"{name:>12}" for name in _COLUMNS))
    for count in counts:
        process = multiprocessing.get_context("spawn").Process(target=_measure, args=(count,))
        process.start()
        process.join()


def _measure(count: int) -> None:
    gc.freeze()
    before = _memory_bytes()
    state = TopicRecurring()
    for number in range(count):
        message = message_pb2.Message(payload=bytes(100)).SerializeToString()
        rule = RecurringRule(cron=f"{number % 60} {number // 60 % 60} * * * *", zone="Europe/Berlin")
        step = RecurringStep(f"schedule-{number:07}", RecurringProgress(_NOW_MS), Definition(rule, message))
        state.apply(Recurred(_TOPIC_ID, (step,)), number + 1)
    memory = _memory_bytes() - before
    image = TopicImage(_TOPIC_ID, "t", 0, TopicPolicy(), count)
    hold_seconds, capture = _timed(lambda: state.capture(image))
    encode_seconds, content = _timed(capture.files[0].encode)
    read_seconds, _ = _timed(lambda: TopicRecurring(decode_recurring(content, "")))
    names_seconds, names = _timed(state.names)
    definitions = [found.definition for name in names[:_PLANNED] if (found := state.get(name))]
    plan_seconds, _ = _timed(lambda: [next_after(each, _NOW_MS) for each in definitions])
    shown = (
        f"{count:,}",
        f"{memory / 1e6:.0f} MB",
        f"{memory / count:.0f} B",
        f"{len(content) / 1e6:.1f} MB",
        f"{hold_seconds * 1e3:.0f} ms",
        f"{encode_seconds:.2f} s",
        f"{read_seconds:.2f} s",
        f"{names_seconds * 1e3:.0f} ms",
        f"{plan_seconds / len(definitions) * 1e6:.0f} us",
    )
    print(" ".join(f"{value:>12}" for value in shown), flush=True)


def _timed(work: Callable[[], T]) -> tuple[float, T]:
    begin = time.perf_counter()
    found = work()
    return time.perf_counter() - begin, found


def _memory_bytes() -> int:
    gc.collect()
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("RssAnon"))


if __name__ == "__main__":
    main()
