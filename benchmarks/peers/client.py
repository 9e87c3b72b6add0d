"""Runs one piece of work against one peer: `python -m benchmarks.peers.client NAME WORK TASK`."""

from __future__ import annotations

import gc
import json
import sys
import traceback
from pathlib import Path
from typing import Any

import uvloop

from benchmarks.client.control import phase, say
from benchmarks.peers import peer_class
from benchmarks.peers.peer import wait_connected
from benchmarks.peers.work import WORKS


def main() -> int:
    name, work, task = sys.argv[1], WORKS[sys.argv[2]], json.loads(sys.argv[3])

    async def run() -> dict[str, Any]:
        peer = peer_class(name)(Path(task["folder"]), task["ports"], task["core"])
        await wait_connected(peer)
        try:
            await peer.create()
            await phase("connected")
            return await work(peer, task)
        finally:
            await peer.close()

    # The client's own garbage collection is not what is measured.
    gc.freeze()
    gc.disable()
    try:
        result = uvloop.run(run())
    except Exception as error:
        traceback.print_exc()
        reason: BaseException = error
        while isinstance(reason, BaseExceptionGroup):
            reason = reason.exceptions[0]
        say({"failed": f"{type(reason).__name__}: {reason}"[:500]})
        return 1
    say({"result": result})
    return 0


if __name__ == "__main__":
    sys.exit(main())
