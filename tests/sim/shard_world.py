"""Nodes that share a shard over a store on virtual time: real log, lease and follower, a list of numbers for a broker.

Each node follows, takes over, appends numbers, says what it knows, makes bases and trims. Meanwhile nodes crash, freeze,
lose their folder or the way to the store, and the store loses and delays requests.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
from collections import Counter

from broker.cluster.creation import encode_first
from broker.cluster.follower import CutOff, Follower, TakenOver
from broker.cluster.group_head import GroupKind, LogEntry, Shard, blank
from broker.cluster.group_objects import entry_name
from broker.cluster.lease import OwnerLease
from broker.cluster.object_group_log import ObjectGroupLog
from broker.errors import Fenced
from broker.storage.record_types import RecordType
from broker.testing.sim_loop import SimLoop
from broker.testing.sim_store import SimBucket, SimStore

SHARD = Shard(bytes(range(16)), 0, 1)
LEASE_MS = 4000
NODES = 3
BASES = "shards/0/bases"
RECORD = RecordType.PRODUCED


class NodeClock:
    """A node's clocks: one that runs a little fast or slow, and a wall clock that is a little off."""

    def __init__(self, loop: SimLoop, rng: random.Random) -> None:
        self._loop = loop
        self._rate = 1 + rng.uniform(-0.01, 0.01)
        self._start_ms = 1_700_000_000_000 + rng.randint(-200, 200)

    def boottime_ns(self) -> int:
        return int(self._loop.now_us() * 1000 * self._rate)

    def monotonic_ns(self) -> int:
        return self.boottime_ns()

    def now_ms(self) -> int:
        return self._start_ms + self._loop.now_us() // 1000


class Folder:
    """State that a node keeps over a crash: the numbers applied, the next index, and the epoch of the group before it."""

    def __init__(self, next_index: int = 1, epoch: int = 0, numbers: list[int] | None = None) -> None:
        self.next_index = next_index
        self.epoch = epoch
        self.numbers = numbers or []


class ShardWorld:
    """Nodes, bucket and what was promised."""

    def __init__(self, loop: SimLoop, seed: int) -> None:
        self.loop = loop
        self.rng = random.Random(seed)
        self.bucket = SimBucket(self.rng)
        self.bucket.objects[entry_name(0, 1)] = encode_first(SHARD)
        self.answered: set[int] = set()
        self.states: dict[int, tuple[int, ...]] = {}  # by next index
        self.counts: Counter[str] = Counter()
        self.errors: list[str] = []
        self.last_number = 0
        self.nodes = [ShardNode(self, "abc"[number]) for number in range(NODES)]

    def note_state(self, folder: Folder) -> None:
        """Whoever has applied all below an index has applied the same."""
        state = tuple(folder.numbers)
        if self.states.setdefault(folder.next_index, state) != state:
            self.errors.append(f"two states at index {folder.next_index}")

    async def run(self, seconds: float) -> None:
        """Trouble for so long, then peace; then check that a new reader finds all that was answered."""
        for node in self.nodes:
            node.start()
        end = self.loop.time() + seconds
        while self.loop.time() < end:
            await self._trouble()
            await asyncio.sleep(self.rng.uniform(0.5, 8))
        self.bucket.is_sound = True
        for node in self.nodes:
            node.heal()
        before = len(self.answered)
        await asyncio.sleep(30)
        if len(self.answered) == before:
            self.errors.append("nobody serves, though all is well again")
        for node in self.nodes:
            await node.stop()
        await self._check_log()

    async def _trouble(self) -> None:
        node = self.rng.choice(self.nodes)
        match self.rng.randrange(8):
            case 0:
                await node.crash()
            case 1:
                node.store.is_cut = not node.store.is_cut
            case 2:
                node.freeze(self.rng.uniform(1, 15))
            case 3:
                await node.crash(lose_folder=True)
            case 4 | 5:
                self.bucket.is_sound = not self.bucket.is_sound
            case _:
                for other in self.nodes:
                    other.store.is_cut = False

    async def _check_log(self) -> None:
        store = SimStore(self.bucket)
        for folder in await folders_of_bases(store) or [Folder()]:
            log = ObjectGroupLog(store, SHARD, "reader", OwnerLease(self.nodes[0].clock, LEASE_MS))
            await log.open(folder.next_index, folder.epoch)
            while (entry := await log.follow()) is not None:
                apply_entry(folder, entry)
                self.note_state(folder)
            if not self.answered.issubset(folder.numbers):
                self.errors.append(f"lost: {sorted(self.answered - set(folder.numbers))}")
            if len(set(folder.numbers)) < len(folder.numbers):
                self.errors.append("a number is there twice")


class ShardNode:
    """A node: its processes come and go, its folder stays unless it is lost."""

    def __init__(self, world: ShardWorld, name: str) -> None:
        self.name = name
        self.clock = NodeClock(world.loop, world.rng)
        self.store = SimStore(world.bucket)
        self._world = world
        self._folder = Folder()
        self._awake = asyncio.Event()
        self._awake.set()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._live())

    async def stop(self) -> None:
        """End as a crash does; what was sent goes its way."""
        assert self._task is not None
        self._task.cancel()
        await asyncio.wait([self._task])
        if not self._task.cancelled() and (error := self._task.exception()) is not None:
            self._world.errors.append(f"{self.name}: {error!r}")

    async def crash(self, *, lose_folder: bool = False) -> None:
        self._world.counts["crashes"] += 1
        await self.stop()
        if lose_folder:
            self._folder = Folder()
        self.start()

    def freeze(self, seconds: float) -> None:
        self._world.counts["freezes"] += 1
        self._awake.clear()
        self._world.loop.call_later(seconds, self._awake.set)

    def heal(self) -> None:
        self.store.is_cut = False
        self._awake.set()

    async def _live(self) -> None:
        while True:
            lease = OwnerLease(self.clock, LEASE_MS)
            log = ObjectGroupLog(
                self.store, SHARD, self.name, lease, make_nonce=lambda: self._world.rng.randbytes(8)
            )
            follower = Follower(
                log, lease, self.clock, self.name, self._trimmed_below, rank="abc".index(self.name)
            )
            try:
                await log.open(self._folder.next_index, self._folder.epoch)
                taken = await follower.run(self._apply)
                await self._own(log, lease, taken)
            except CutOff:
                self._world.counts["begun with a base"] += 1
                with contextlib.suppress(OSError):
                    # Not always the newest one, as if that were damaged.
                    self._folder = self._world.rng.choice(await folders_of_bases(self.store))
            except Fenced:
                self._world.counts["fenced"] += 1
            except OSError:
                await asyncio.sleep(0.5)

    async def _apply(self, entry: LogEntry) -> None:
        await self._awake.wait()
        apply_entry(self._folder, entry)
        self._world.note_state(self._folder)

    async def _own(self, log: ObjectGroupLog, lease: OwnerLease, taken: TakenOver) -> None:
        world, folder = self._world, self._folder
        world.counts["take-overs"] += 1
        folder.next_index, folder.epoch = taken.at_index + 1, taken.epoch
        world.note_state(folder)
        while self.clock.now_ms() <= taken.until_ms:
            await asyncio.sleep(0.1)
        bases = 0
        while True:
            await self._awake.wait()
            match world.rng.randrange(20):
                case 0:
                    bases += await self._make_base(log)
                case 1 if world.rng.random() < 0.1:
                    await log.resign(log.next_index, to=world.rng.choice("abc"))
                    world.counts["resigned"] += 1
                    folder.next_index = log.next_index
                    world.note_state(folder)
                    return
                case 2 | 3 | 4:
                    await asyncio.sleep(world.rng.uniform(0, LEASE_MS / 4000))
                    await log.append(log.next_index, blank())
                    folder.next_index = log.next_index
                    world.note_state(folder)
                case _:
                    await self._append_number(log)
            self._say(lease)
            await asyncio.sleep(world.rng.uniform(0, 0.05))
            self._say(lease)

    async def _append_number(self, log: ObjectGroupLog) -> None:
        world = self._world
        world.last_number += 1
        number = world.last_number
        body = str(number).encode()
        await log.append(log.next_index, [(RECORD, [body], len(body))])
        await self._awake.wait()
        self._folder.numbers.append(number)
        self._folder.next_index = log.next_index
        world.note_state(self._folder)
        world.answered.add(number)

    def _say(self, lease: OwnerLease) -> None:
        """Tell a reader all numbers, if the lease allows it: then nobody else may have answered one that is missing."""
        if self._awake.is_set() and lease.holds():
            self._world.counts["said"] += 1
            if not self._world.answered.issubset(self._folder.numbers):
                self._world.errors.append(f"{self.name} said something old")

    async def _make_base(self, log: ObjectGroupLog) -> int:
        folder = self._folder
        body = json.dumps([folder.epoch, folder.numbers]).encode()
        try:
            await self.store.create(f"{BASES}/{folder.next_index:016x}", body)
            await log.trim(await self._trimmed_below())
        except OSError:
            return 0
        self._world.counts["trims"] += 1
        return 1

    async def _trimmed_below(self) -> int:
        names = sorted([info.name async for info in self.store.objects(BASES)])
        return next_index_of(names[-2]) if len(names) > 1 else 0


def apply_entry(folder: Folder, entry: LogEntry) -> None:
    assert entry.head.first_lsn == folder.next_index
    if entry.head.kind is GroupKind.RECORDS:
        folder.numbers += [int(bytes(record.body)) for record in entry.group.records]
    folder.next_index, folder.epoch = entry.next_index, entry.head.epoch


async def folders_of_bases(store: SimStore) -> list[Folder]:
    """The two newest bases, or as many as there are."""
    folders = []
    for name in sorted([info.name async for info in store.objects(BASES)])[-2:]:
        epoch, numbers = json.loads(await store.read(name))
        folders.append(Folder(next_index_of(name), epoch, numbers))
    return folders


def next_index_of(name: str) -> int:
    return int(name.rpartition("/")[2], 16)
