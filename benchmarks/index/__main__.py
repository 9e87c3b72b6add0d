"""Runs one piece of work and answers on standard output, as `benchmarks.client` does."""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Awaitable, Callable
from typing import Any

import uvloop

from benchmarks.client.control import say
from benchmarks.index.engine import prepare_process
from benchmarks.index.load import load
from benchmarks.index.look import look
from benchmarks.index.reopen import reopen

Work = Callable[[dict[str, Any]], Awaitable[dict[str, Any]]]

WORKS: dict[str, Work] = {"load": load, "look": look, "reopen": reopen}


def main() -> int:
    work, task = WORKS[sys.argv[1]], json.loads(sys.argv[2])

    async def run() -> dict[str, Any]:
        return await work(task)

    prepare_process()
    try:
        result = uvloop.run(run())
    except Exception as error:
        traceback.print_exc()
        say({"failed": f"{type(error).__name__}: {error}"[:1500]})
        return 1
    say({"result": result})
    return 0


if __name__ == "__main__":
    sys.exit(main())
