"""A broker that notes when it does what: `python -P benchmarks/traced_broker.py serve ...`, for `benchmarks.lone`.

Nothing of this is in the broker: functions are wrapped here. At its end it writes a JSON document into the file that
BENCHMARK_TRACE_FILE names: `stamps`, pairs of a label and a time of CLOCK_MONOTONIC in nanoseconds, and `tasks`, the
times when a task was made. A stamp costs about a microsecond.
"""

from __future__ import annotations

import asyncio
import functools
import importlib
import json
import os
import time
from collections.abc import Callable
from typing import Any

from broker.cli import main

# What is wrapped: the function, the label when it begins, the label when it returns.
HOOKS: tuple[tuple[str, str, str], ...] = (
    ("broker.rpc.reception:Places.enter", "call", ""),
    ("broker.rpc.reception:Places.first_message", "", "read"),
    ("broker.rpc.reception:Begun.read", "", "read"),
    ("broker.rpc.producer:ProducerService._accept", "accept", "accepted"),
    ("broker.rpc.producer:decode_produce", "", "decoded"),
    ("broker.storage.journal:Journal.submit", "", "planned"),
    ("broker.storage.local_group_log:LocalGroupLog.append", "taken", ""),
    ("broker.storage.local_group_log:LocalGroupLog._store", "thread", "stored"),
    ("broker.storage.local_group_log:encode_group", "", "encoded"),
    ("broker.runtime.vfs:LocalFile.pwrite_synced", "", "synced"),
    ("broker.storage.journal:Journal._settle", "woken", ""),
    ("broker.storage.journal:Journal._apply", "", "applied"),
    ("broker.rpc.producer:_answer", "answer", "answered"),
)
_stamps: list[tuple[str, int]] = []
_tasks: list[int] = []


def _note(label: str) -> None:
    if label:
        _stamps.append((label, time.perf_counter_ns()))


def resolve(path: str) -> tuple[Any, str, Any]:
    """Return who holds a function, its name there, and the function; raises AttributeError if it has another name."""
    module, _, names = path.partition(":")
    owner: Any = importlib.import_module(module)
    *outer, name = names.split(".")
    for part in outer:
        owner = getattr(owner, part)
    return owner, name, getattr(owner, name)


def _wrapped(function: Callable[..., Any], begin: str, end: str) -> Callable[..., Any]:
    if asyncio.iscoroutinefunction(function):

        @functools.wraps(function)
        async def awaited(*args: Any, **kwargs: Any) -> Any:
            _note(begin)
            result = await function(*args, **kwargs)
            _note(end)
            return result

        return awaited

    @functools.wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        _note(begin)
        result = function(*args, **kwargs)
        _note(end)
        return result

    return called


def _counting_tasks(run: Callable[..., Any]) -> Callable[..., Any]:
    """Return `uvloop.run` with a loop that notes each task it makes."""

    def factory(loop: asyncio.AbstractEventLoop, work: Any, **options: Any) -> asyncio.Task[Any]:
        _tasks.append(time.perf_counter_ns())
        return asyncio.Task(work, loop=loop, **options)

    async def counted(main_work: Any) -> Any:
        asyncio.get_running_loop().set_task_factory(factory)
        return await main_work

    return lambda main_work, **options: run(counted(main_work), **options)


def _trace(path: str) -> None:
    import uvloop  # noqa: PLC0415 - as the broker does: only where it serves

    for function, begin, end in HOOKS:
        owner, name, plain = resolve(function)
        setattr(owner, name, _wrapped(plain, begin, end))
    vars(uvloop)["run"] = _counting_tasks(uvloop.run)
    try:
        main()
    finally:
        with open(path, "w") as file:
            json.dump({"stamps": _stamps, "tasks": _tasks}, file)


if __name__ == "__main__":
    _trace(os.environ.pop("BENCHMARK_TRACE_FILE"))
