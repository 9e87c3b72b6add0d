"""A broker whose event loop is watched closely: `python -P benchmarks/probed_broker.py serve ...`.

The broker's own probe samples its loop four times a second, so a short stall mostly goes unseen. This one looks
every 2 ms, and writes a JSON line a second into the file that BENCHMARK_LAG_FILE names: the monotonic time of
the second's end, and its samples: lag, CPU time of the loop's thread and of the whole process meanwhile, all in
milliseconds. The CPU times tell a loop that was busy from one that waited for another thread of the broker, and
both from one whose core other processes had. It costs about 3 % of a core.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from typing import Any

import broker.server
from broker.cli import main

_INTERVAL_SECONDS = 0.002
_PATH = os.environ.pop("BENCHMARK_LAG_FILE")


class _CloseProbe:
    """In the place of `broker.observe.lateness.LoopLagProbe`."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    async def run(self) -> None:
        with open(_PATH, "a", buffering=1) as file:  # noqa: ASYNC230 - a line a second
            samples: list[tuple[float, float, float]] = []
            said = time.monotonic()
            while True:
                thread, process = time.thread_time(), time.process_time()
                asked = time.monotonic() + _INTERVAL_SECONDS
                await asyncio.sleep(_INTERVAL_SECONDS)
                now = time.monotonic()
                lag = max(0.0, now - asked)
                spent = time.thread_time() - thread, time.process_time() - process
                samples.append((_ms(lag), _ms(spent[0]), _ms(spent[1])))
                if now - said >= 1:
                    file.write(json.dumps([now, samples]) + "\n")
                    samples, said = [], now


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 2)


if __name__ == "__main__":
    vars(broker.server)["LoopLagProbe"] = _CloseProbe
    main()
