"""Surroundings of the simulated broker: a clock that misbehaves, a disk that dies, lives of a process.

A *life* is one process from its start to its end. It ends by a stop, by a kill (the disk keeps what the process
wrote, synced or not), or by a power cut (the disk keeps what a `CrashPolicy` says). Kills and power cuts come
before a chosen disk operation, also in the middle of a function that the file thread runs, or of a recovery.
Nothing of a dead life touches the disk again: `DiskFaults` and `Thread` see to that.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, cast
from weakref import WeakKeyDictionary

from broker.config import BrokerConfig
from broker.errors import StorageFailed
from broker.folder.broker import Broker
from broker.runtime.vfs import read_file
from broker.storage.blocks import PACKED
from broker.storage.manifest import decode_topic
from broker.testing.fault_plan import Fault, FaultPlan
from broker.testing.mem_vfs import CrashPolicy, MemVfs
from broker.testing.sim_clock import START_MS
from broker.testing.sim_loop import SimLoop
from tests.reference import Violation

SPIN_LIMIT = 20_000
"""Turns of the loop while time stands still; the busiest honest moment takes some hundreds."""


class ProcessDied(BaseException):
    """Raised instead of a disk operation of a life that is over. No code of the broker may catch it."""


class WorldLoop(SimLoop):
    """A SimLoop whose executors are the threads of a life, which counts its turns, and whose tasks wait for the disk."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed, spin_limit=SPIN_LIMIT)
        self.jump_count = 0
        self._waits: WeakKeyDictionary[asyncio.Task[Any], list[tuple[int, int]]] = WeakKeyDictionary()

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:
        task, asked_us = asyncio.current_task(self), self.now_us()

        def run() -> Any:
            if task is not None:
                self._waits.setdefault(task, []).append((asked_us, self.now_us()))
            return executor.run(func, *args)

        return super().run_in_executor(executor, run)

    def waited_us(self, task: asyncio.Task[Any], since_us: int) -> int:
        """Return how long a task, which makes one call after the other, has waited for the disk since then."""
        return sum(max(0, end - max(begin, since_us)) for begin, end in self._waits.get(task, ()))

    def _pass_time(self, timeout: float | None) -> None:
        self.jump_count += 1
        super()._pass_time(timeout)


class Wall:
    """The broker's clock. Its wall time steps in both directions and can stand still; the other never does."""

    def __init__(self, loop: SimLoop) -> None:
        self._loop = loop
        self._offset_ms = START_MS
        self._frozen_ms: int | None = None
        self.disturbed_us = -(10**12)  # when it last did anything but tick
        self.peaks: list[tuple[int, int]] = []  # (virtual time, wall time) before each step back

    def now_ms(self) -> int:
        return self._loop.now_us() // 1000 + self._offset_ms if self._frozen_ms is None else self._frozen_ms

    def monotonic_ns(self) -> int:
        return self._loop.now_us() * 1000

    def step(self, ms: int) -> None:
        self._disturb()
        self._offset_ms += ms
        if self._frozen_ms is not None:
            self._frozen_ms += ms

    def freeze(self) -> None:
        if self._frozen_ms is None:
            self._disturb()
            self._frozen_ms = self.now_ms()

    def thaw(self, *, catch_up: bool) -> None:
        """Tick again; from the time it really is, or from where it stood."""
        if self._frozen_ms is None:
            return
        self._disturb()
        if not catch_up:
            self._offset_ms = self._frozen_ms - self._loop.now_us() // 1000
        self._frozen_ms = None

    @property
    def is_frozen(self) -> bool:
        return self._frozen_ms is not None

    def reached(self, time_ms: int, since_us: int) -> bool:
        """Return whether the wall clock showed `time_ms` or later at any moment from `since_us` on."""
        return self.now_ms() >= time_ms or any(at >= since_us and wall >= time_ms for at, wall in self.peaks)

    def _disturb(self) -> None:
        self.disturbed_us = self._loop.now_us()
        self.peaks.append((self._loop.now_us(), self.now_ms()))


_FOLDERS_OF_INDEXES = {"buckets", "keys"}
"""Folders whose files are never the only place of anything: one that cannot be written stays in memory, and another is
tried later."""


_ENDS_WRITING = ("write", "sync", "sync_dir")
"""Operations after whose failure nobody knows what the disk holds. All others had no effect, and are tried again."""


def ends_writing(kind: str, path: str) -> bool:
    """Return whether the broker must end once such an operation has failed.

    It goes on without a file that it has just made and that no manifest names: of an index, or of packed rows. The
    folder that packed rows lie in is that of all ledgers, whose names a sync that failed leaves in doubt.
    """
    is_spare = bool(_FOLDERS_OF_INDEXES & {*path.split("/")}) or path.endswith(f".{PACKED}")
    return kind in _ENDS_WRITING and not is_spare


class DiskFaults(FaultPlan):
    """Faults of one life's disk; besides errors, its end before a chosen change."""

    def __init__(self, on_death: Callable[[], None], now_us: Callable[[], int]) -> None:
        super().__init__()
        self.changes_left: int | None = None
        self.refused_us: int | None = None  # when a write or sync failed first, for which the broker must end
        self.forgetful: set[str] = (
            set()
        )  # folders of buckets that failed a sync, and may lose later names too
        self._now_us = now_us
        self._on_death = on_death
        self._dead = False

    def take(self, kind: str, path: str, touched: range = range(0)) -> Fault | None:
        if self._dead:
            raise ProcessDied
        if self.changes_left is not None and kind not in ("open", "read", "list_dir"):
            self.changes_left -= 1
            if self.changes_left < 0:
                self._dead = True
                self._on_death()
                raise ProcessDied
        fault = super().take(kind, path, touched)
        if fault is not None and ends_writing(kind, path) and self.refused_us is None:
            self.refused_us = self._now_us()
        if fault is not None and kind == "sync_dir" and path.endswith("/buckets"):
            self.forgetful.add(path)
        return fault

    @property
    def hit_count(self) -> int:
        return sum(fault.hit_count for fault in self.faults)


class Thread:
    """An executor of one life: once that is over, it runs nothing more."""

    def __init__(self, life: Life) -> None:
        self._life = life

    def run(self, func: Callable[..., Any], *args: Any) -> Any:
        if self._life.dead:
            raise ProcessDied
        return func(*args)


class Life:
    """One process: a broker on a disk, and the clients' tasks that talk to it."""

    def __init__(self, world: World, vfs: MemVfs, config: BrokerConfig, number: int) -> None:
        self.world = world
        self.vfs = vfs
        self.config = config
        self.number = number
        self.dead = False
        self.is_stopping = False
        self.died_at_op: int | None = None
        self.failure: BaseException | None = None
        self.faults = DiskFaults(self._die, world.loop.now_us)
        vfs.faults = self.faults
        self._tasks: dict[asyncio.Task[None], None] = {}
        threads = [cast(Any, Thread(self)) for _ in range(4)]
        self.broker = Broker(
            config,
            vfs=vfs,
            clock=world.wall,
            rng=random.Random(f"{world.seed}/broker/{number}"),
            journal_executor=threads[0],
            file_executor=threads[1],
            read_executor=threads[2],
            index_executor=threads[3],
            on_failure=self._failed,
        )

    @property
    def serves(self) -> bool:
        return not self.dead and self.failure is None

    @property
    def has_met_fault(self) -> bool:
        """Return whether the disk refused anything, so that the broker may fail."""
        return self.faults.hit_count > 0 or self.world.disk_ran_full

    @property
    def is_disturbed(self) -> bool:
        """Return whether its end is on its way."""
        return bool(self.faults.faults) or self.faults.changes_left is not None or self.world.disk_ran_full

    def spawn(self, coro: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run a client's task; it ends with the life at the latest."""
        task = asyncio.get_running_loop().create_task(coro)
        self._tasks[task] = None
        task.add_done_callback(self._task_done)
        return task

    async def wait_clients(self, seconds: float) -> bool:
        """Wait until all clients' tasks have ended; whether they have."""
        end = self.world.loop.time() + seconds
        while self._tasks and self.world.loop.time() < end:  # a task that ends may have started another
            await asyncio.wait(list(self._tasks), timeout=end - self.world.loop.time())
        return not self._tasks

    async def bury(self) -> None:
        """End everything that still runs, without a goodbye."""
        self._die()
        for task in list(self._tasks):
            task.cancel()
        self.broker.registry.stop()
        try:
            async with asyncio.timeout(600):
                await self.broker.supervisor.stop()
        except TimeoutError:
            raise Violation("liveness", "tasks of the broker do not end when they are cancelled") from None
        if self.broker._lock is not None:
            self.broker._lock.close()

    def _die(self) -> None:
        if not self.dead:
            self.dead = True
            self.died_at_op = self.vfs.op_count

    def _failed(self, error: BaseException) -> None:
        """The broker asks to be stopped. Unless a write or a sync failed, that is a bug."""
        if self.dead or self.failure is not None:
            return
        self.failure = error
        self.world.writing_failed = True
        self.world.loop.trace(f"life {self.number} fails: {type(error).__name__}")
        may_end = self.faults.refused_us is not None or self.world.disk_ran_full
        if isinstance(error, Violation) or not may_end:
            self.world.fail(error)

    def _task_done(self, task: asyncio.Task[None]) -> None:
        del self._tasks[task]
        error = None if task.cancelled() else task.exception()
        if error is None or self.dead:
            return
        if isinstance(error, StorageFailed) and self.failure is not None:
            return
        self.world.fail(error)


class World:
    """Everything that one run shares."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.loop = WorldLoop(seed)
        self.wall = Wall(self.loop)
        self.count: Counter[str] = Counter()
        self.config = BrokerConfig()  # of the present life
        self.disk_ran_full = False
        self.writing_failed = False  # in the present life
        self.forgetful: set[str] = set()
        """Folders of buckets that failed a sync in any life before this one (`DiskFaults`)."""
        self.lost_buckets: set[int] = set()
        """Topics of those for which this life found no bucket that the manifest names."""
        self.slow_until_us = 0
        self.is_calm = False  # nothing goes wrong in this run, so that lateness can be checked closely
        self.slack_us = 2_000_000
        """Time that the broker may take for what it should do at once; more when the disk is slow."""
        self._failed: asyncio.Future[None] = self.loop.create_future()
        self._lives = 0

    def rng(self, name: str) -> random.Random:
        return self.loop.rng(name)

    def trace(self, line: str) -> None:
        self.loop.trace(line)

    def fail(self, error: BaseException) -> None:
        """End the run with the first thing that went wrong."""
        if not self._failed.done():
            self.loop.trace(f"FAILED {error}")
            self._failed.set_exception(error)
            self._failed.exception()  # it is looked at when the run ends

    def new_life(self, vfs: MemVfs, config: BrokerConfig) -> Life:
        self._lives += 1
        self.writing_failed = False
        life = Life(self, vfs, config, self._lives)
        self.lost_buckets = {topic_id for folder in self.forgetful for topic_id in _lacking(vfs, folder)}
        return life

    def run(self, scenario: Coroutine[Any, Any, None]) -> None:
        """Run to the end of the scenario or to the first failure, whichever comes first; raises it."""
        loop = self.loop
        asyncio.set_event_loop(None)
        try:
            loop.run_until_complete(self._watch(scenario))
        finally:
            try:
                loop.cancel_leftovers()
            finally:
                loop.close()
        for error in loop.unhandled:
            if not isinstance(error, ProcessDied):
                raise Violation("supervision", f"nobody handled {error!r}") from error

    async def _watch(self, scenario: Coroutine[Any, Any, None]) -> None:
        task = self.loop.create_task(scenario)
        await asyncio.wait([task, self._failed], return_when=asyncio.FIRST_COMPLETED)
        if self._failed.done():
            task.cancel()
            await asyncio.wait([task])
            raise cast(BaseException, self._failed.exception())
        task.result()
        self._failed.cancel()


def _lacking(vfs: MemVfs, folder: str) -> Iterator[int]:
    """The topic of a folder of buckets, if that lacks one that the topic's manifest names."""
    manifest = f"{folder.rpartition('/')[0]}/manifest"
    if vfs.exists(manifest):
        image = decode_topic(read_file(vfs, manifest), manifest)
        if not all(vfs.exists(f"{folder}/{bucket_id}.bucket") for bucket_id in image.bucket_ids):
            yield image.topic_id


def power_cut(life: Life, policy: CrashPolicy, rng: random.Random) -> MemVfs:
    """The disk as a power cut left it, at the end of a life."""
    at = life.vfs.op_count if life.died_at_op is None else life.died_at_op
    return life.vfs.crashed(at, policy, rng)
