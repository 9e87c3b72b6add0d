"""Runs one piece of work and answers on standard output, as `benchmarks.processes.Client` expects."""

from __future__ import annotations

import gc
import json
import sys
import traceback
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import uvloop

from benchmarks.client import (
    deliver,
    fairness,
    keyed,
    lone,
    paced,
    produce,
    recurring,
    restart,
    schedule,
    sdk,
    shards,
    single,
)
from benchmarks.client.control import say

Work = Callable[[dict[str, Any]], Awaitable[dict[str, Any]]]

WORKS: dict[str, Work] = {
    "produce": produce.produce,
    "take_in": produce.take_in,
    "single": single.single,
    "lone": lone.lone,
    "round_trip": single.round_trip,
    "deliver": deliver.deliver,
    "herd": deliver.herd,
    "lateness": deliver.lateness,
    "paced": paced.paced,
    "probe": paced.probe,
    "beside": paced.beside,
    "restart": restart.restart,
    "quiet": fairness.quiet,
    "disturb": fairness.disturb,
    "idle": fairness.idle,
    "produce_keys": keyed.produce_keys,
    "load_keys": keyed.load,
    "recurring": recurring.recurring,
    "schedule_change": schedule.change,
    "schedule_beside": schedule.beside,
    "schedule_look": schedule.look,
    "shards": shards.shards,
    "shards_start": shards.shards_start,
    "shards_served": shards.shards_served,
    "sdk_send_many": sdk.send_many,
    "sdk_send": sdk.send,
    "sdk_deliver": sdk.deliver,
}


def main() -> int:
    work, task = WORKS[sys.argv[1]], json.loads(sys.argv[2])

    async def run() -> dict[str, Any]:
        return await work(task)

    # The client's own garbage collection is not what is measured.
    gc.freeze()
    gc.disable()
    try:
        result = uvloop.run(run())
    except Exception as error:
        traceback.print_exc()
        say({"failed": _reason(error)})
        return 1
    say({"result": result})
    return 0


def _reason(error: BaseException) -> str:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if isinstance(error, grpc.aio.AioRpcError):  # whose own text is four lines of the same
        return f"{error.code()}: {error.details()}"
    return f"{type(error).__name__}: {error}"[:1500]


if __name__ == "__main__":
    sys.exit(main())
