"""A broker whose folder of objects is as slow as an object store: run it with `python -P`, as `postdate-broker`.

BENCHMARK_PUT_MS names the median and the 99th percentile of a create, in milliseconds: its times are drawn from a
lognormal distribution. The store under it is a folder, which takes a few milliseconds itself.
"""

from __future__ import annotations

import asyncio
import math
import os
import random
from typing import Any

from broker.cli import main
from broker.cluster.file_store import FileStore

_Z99 = 2.326
"""The 99th percentile of the standard normal distribution."""

_MEDIAN_MS, _P99_MS = map(float, os.environ.pop("BENCHMARK_PUT_MS").split(","))
_SIGMA = math.log(_P99_MS / _MEDIAN_MS) / _Z99
_create = FileStore.create


async def _slow_create(store: FileStore, name: str, body: Any) -> None:
    await asyncio.sleep(random.lognormvariate(math.log(_MEDIAN_MS), _SIGMA) / 1e3)
    await _create(store, name, body)


if __name__ == "__main__":
    setattr(FileStore, "create", _slow_create)  # noqa: B010 - a method in the place of another one
    main()
