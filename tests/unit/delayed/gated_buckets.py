"""Snapshots of buckets on a disk in memory, whose threads stop where a test wants and fail when it says so."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future
from contextvars import ContextVar
from typing import Any

from broker.errors import Corrupt
from broker.storage.bucket_files import BucketStorage, bucket_storage
from broker.testing.mem_vfs import MemVfs

IS_BACKGROUND: ContextVar[bool] = ContextVar("is_background", default=False)
"""Set in a task whose every call into a thread waits to be let go."""

TOPIC_ID = 7
FOLDER = "buckets"


class GatedExecutor(Executor):
    """Runs the calls of background tasks when told, those of others at once; all on the calling thread."""

    def __init__(self) -> None:
        self.stopped: deque[tuple[Callable[[], None], Future[Any]]] = deque()
        self.fail_background = 0  # how many of the next calls fail
        self.fail_foreground = 0
        self.fails_after = False  # the call is made before it fails
        self.let_go_beside = (
            0  # while the foreground waits for its calls, so many background calls are let go
        )
        self.calls = 0

    def submit(self, fn: Callable[..., Any], /, *arguments: Any, **named: Any) -> Future[Any]:
        self.calls += 1
        future: Future[Any] = Future()
        if IS_BACKGROUND.get():
            self.stopped.append((lambda: self._run(future, fn, "fail_background"), future))
        elif self.let_go_beside and self.stopped:
            self._later(lambda: self._run(future, fn, "fail_foreground"))
        else:
            self._run(future, fn, "fail_foreground")
        return future

    def let_go(self) -> bool:
        """Let the background call go that has waited longest."""
        if not self.stopped:
            return False
        call, _ = self.stopped.popleft()
        call()
        return True

    def _later(self, call: Callable[[], None]) -> None:
        loop = asyncio.get_running_loop()

        def turn(left: int) -> None:
            if left:
                if left % 10 == 0 and self.let_go_beside and self.let_go():
                    self.let_go_beside -= 1
                loop.call_soon(turn, left - 1)
            else:
                call()

        turn(40)

    def _run(self, future: Future[Any], fn: Callable[[], Any], failures: str) -> None:
        if future.cancelled():
            return
        fails = getattr(self, failures) > 0
        try:
            result = fn() if self.fails_after or not fails else None
            if fails:
                setattr(self, failures, getattr(self, failures) - 1)
                raise Corrupt("damaged") if self.calls % 2 else OSError("the disk is gone")
        except Exception as error:
            future.set_exception(error)
        else:
            future.set_result(result)


def new_storage(vfs: MemVfs, executor: Executor) -> BucketStorage:
    if not vfs.exists(FOLDER):
        vfs.make_dir(FOLDER)
    return bucket_storage(vfs, FOLDER, TOPIC_ID, executor)


async def spin(turns: int = 60) -> None:
    """Let everything run that is not stopped."""
    for _ in range(turns):
        await asyncio.sleep(0)
