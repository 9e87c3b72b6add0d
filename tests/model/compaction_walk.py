"""A random walk over everything that can meet a compaction, beside the reference.

Jobs begin, work, hand in late, twice or never, and go on after the broker they knew has crashed; meanwhile messages
come, are acknowledged, cancelled and moved, and subscriptions are made, deleted and sought back. What a rewritten ledger
lacks must have been settled by every subscription, come due and not be moved; in the end everybody gets exactly what is
owed and was not lost that way, on time.

Several jobs may hold one ledger here: the desk forbids it, and the hand-off must be safe without that.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pyroaring import BitMap

from broker.errors import Corrupt, Fenced, InvalidRequest, NotFound, PostdateError, Refused
from broker.folder.compaction_values import Lease
from broker.jobs import rewrite as job_module
from broker.jobs.rewrite import rewrite
from broker.jobs.verify import verify_data_dir
from broker.model import CANCELLED_MS, Position
from broker.storage.blocks import KINDS
from broker.storage.compaction_inputs import Outputs
from broker.subscriptions import requests
from broker.testing.mem_vfs import CrashPolicy, MemVfs
from broker.testing.sim_clock import SimClock
from broker.topics.control import seek
from broker.topics.schedule_values import Cancel, ChangeResult, Move
from tests.harness import DATA_DIR, EARLIEST, LATEST, Node, Outgoing, entries_of, refused_ids, small_config
from tests.reference import Message, Subscription, Violation, cancel, require

TOPIC = "t"
HOUR_MS = 3_600_000


@dataclass(slots=True)
class Stored(Message):
    """A message, which a compaction may leave out."""

    is_gone: bool = False


@dataclass(slots=True)
class Job:
    """A compaction job; it may outlive its broker."""

    lease: Lease
    life: int
    outputs: Outputs | None = None
    is_over: bool = False  # committed, aborted, or of an earlier life
    committed_in: int | None = None  # which life


@contextlib.contextmanager
def _careless() -> Iterator[None]:
    """A job of another version, say: what it writes is whole, and lacks the first entry that is live, and of the index
    what is due first."""
    live_entries, merge_lent = job_module.live_entries, job_module.merge_lent

    def all_but_one(*arguments: Any) -> BitMap:
        live = live_entries(*arguments)
        return live - BitMap([live.min()]) if live else live

    async def merge_late(
        storage: Any, into: Any, buckets: Any, frontier: tuple[int, int, int], executor: Any
    ) -> Any:
        later = (frontier[0] + HOUR_MS // 2, 0, 0)
        return await merge_lent(storage, into, buckets, later, executor)

    job_module.live_entries, job_module.merge_lent = all_but_one, merge_late
    try:
        yield
    finally:
        job_module.live_entries, job_module.merge_lent = live_entries, merge_lent


class CompactionWalk:
    """See the module's description."""

    def __init__(self, seed: int, clock: SimClock) -> None:
        self.rng = random.Random(seed)
        self.faults = random.Random(seed)
        self.clock = clock
        config = small_config(
            ledger_max_entries=6,
            reclaim_interval_ms=24 * HOUR_MS,
            seal_after_ms=500,
            lease_ms=10 * HOUR_MS,
            compaction_lease_ms=20_000,
            compaction_cleanup_ms=5_000,
        )
        self.node = Node(MemVfs(), clock, config, rng=self.rng).open()
        self.messages: dict[Position, Stored] = {}
        self.readers: dict[str, Subscription[Position]] = {}
        self.jobs: list[Job] = []
        self.life = 0
        self.names = 0
        self.swapped = 0
        self.merged = 0
        self.refused: list[str] = []

    async def run(self, steps: int) -> None:
        await self._subscribe()
        actions = (
            [self._produce] * 5
            + [self._ack] * 6
            + [self._begin] * 5
            + [self._work] * 6
            + [self._commit] * 5
            + [self._checkpoint] * 4
            + [self._sleep] * 4
            + [self._move] * 2
            + [
                self._cancel,
                self._seek,
                self._skip,
                self._subscribe,
                self._unsubscribe,
                self._abort,
                self._crash,
            ]
        )
        for _ in range(steps):
            await self.rng.choice(actions)()
        await self._end()

    # -- what happens ------------------------------------------------------------------------------------------

    async def _produce(self) -> None:
        now_ms = self.clock.now_ms()
        delays = [self.rng.choice([0, 0, 0, 0, 700, 5_000, HOUR_MS]) for _ in range(self.rng.randrange(1, 7))]
        payloads = [b"%d" % (len(self.messages) + i) for i in range(len(delays))]
        batch = [Outgoing(p, deliver_after_ms=delay) for p, delay in zip(payloads, delays, strict=True)]
        positions = await self.node.produce(TOPIC, batch)
        for position, content, delay in zip(positions, payloads, delays, strict=True):
            message = self.messages[position] = Stored(position, content, now_ms, now_ms + delay)
            for reader in self.readers.values():
                reader.add(position, message)

    async def _ack(self) -> None:
        now_ms = self.clock.now_ms()
        for name, reader in self.readers.items():
            due = [p for p, entry in reader.open.items() if entry.message.due_ms < now_ms - 100]
            some = [position for position in due if self.rng.random() < 0.8]
            if some:
                confirmation = await requests.acknowledge(self._subscription(name), entries_of(some))
                failed = {each.position for each in refused_ids(confirmation.failures)}
                for position in set(some) - failed:
                    reader.settle(position, self.clock.monotonic_ns())

    async def _sleep(self) -> None:
        await asyncio.sleep(self.rng.choice([0.1, 1, 3, 8]))

    async def _checkpoint(self) -> None:
        await self.node.checkpoint()

    async def _begin(self) -> None:
        if TOPIC not in self.node.broker.registry.by_name:
            return
        candidates = await self.node.broker.compactions.candidates(TOPIC)
        ledgers = [each.ledger_id for each in candidates.ledgers if self.rng.random() < 0.9]
        buckets = [each.bucket_id for each in candidates.buckets]
        buckets = buckets if len(buckets) > 1 and self.rng.random() < 0.5 else []
        if ledgers or buckets:
            lease = await self.node.broker.compactions.begin(TOPIC, ledgers, buckets)
            self.jobs.append(Job(lease, self.life))

    async def _work(self) -> None:
        if not (waiting := [job for job in self.jobs if job.outputs is None]):
            return
        job = self.rng.choice(waiting)
        folder = f"{DATA_DIR}/{job.lease.folder}"
        is_wrong = self.faults.random() < 0.15
        try:
            with _careless() if is_wrong else contextlib.nullcontext():
                job.outputs = await rewrite(self.node.vfs, DATA_DIR, folder)
        except (PostdateError, OSError) as error:
            # Only a job whose lease has ended may find its inputs or its folder gone.
            if not job.is_over and job.lease in self.node.broker.compactions.leases():
                raise Violation("compaction", f"a job with a lease failed: {error}") from error
            self.jobs.remove(job)
            return
        if self.rng.random() < 0.1:
            self._damage(folder, job.outputs)

    def _damage(self, folder: str, outputs: Outputs) -> None:
        """Damage files as a disk may."""
        if outputs.ledgers:
            output = self.rng.choice(outputs.ledgers)
            kind = self.rng.choice(KINDS)
            for name in self.node.vfs.list_dir(folder):
                if name.startswith(f"{output.ledger_id}.") and name.endswith(kind):
                    file = self.node.vfs.open(f"{folder}/{name}")
                    at = self.rng.randrange(file.size())
                    file.pwrite([bytes([file.pread(1, at)[0] ^ 4])], at)
                    file.close()

    async def _commit(self) -> None:
        if not (ready := [job for job in self.jobs if job.outputs is not None]):
            return
        job = self.rng.choice(ready)
        assert job.outputs is not None
        desk = self.node.broker.compactions
        is_current = job.lease in desk.leases()
        before = {ledger.name.ledger_id: ledger.name.generation for ledger in self._log()}
        try:
            committed = await desk.commit(job.lease.compaction_id, job.lease.epoch, job.outputs)
        except (NotFound, Fenced, InvalidRequest, Refused) as error:
            if is_current or job.committed_in == self.life:
                raise Violation(
                    "compaction", f"a job with a lease, or its repeat, was refused: {error}"
                ) from error
            return
        if committed.is_repeat != job.is_over:
            raise Violation(
                "compaction", f"the lease {'had' if job.is_over else 'had not'} ended: {committed}"
            )
        if not is_current and not committed.is_repeat:
            raise Violation("compaction", "a job without a lease was heard")
        after = {ledger.name.ledger_id: ledger.name.generation for ledger in self._log()}
        if committed.is_repeat and before != after:
            raise Violation("compaction", "a repeat changed something")
        job.is_over, job.committed_in = True, self.life
        self.refused += [refusal.name for refusal in committed.refused.values()]
        if not committed.is_repeat:
            self.swapped += len(committed.ledger_ids)
            for ledger_id in committed.ledger_ids:
                await self._look_at(ledger_id)
            if committed.bucket_swapped:
                self.merged += 1
                if findings := (await self.node.broker.verify_topic(TOPIC)).findings:
                    raise Violation("compaction", f"the index after a merge: {findings}")

    async def _abort(self) -> None:
        if self.jobs:
            job = self.rng.choice(self.jobs)
            with contextlib.suppress(NotFound, Fenced):
                await self.node.broker.compactions.abort(job.lease.compaction_id, job.lease.epoch)
                job.is_over = True
                self.jobs.remove(job)

    async def _move(self) -> None:
        await self._change(Move(deliver_after_ms=self.rng.choice([0, 2_000, HOUR_MS])))

    async def _cancel(self) -> None:
        await self._change(Cancel())

    async def _change(self, change: Move | Cancel) -> None:
        there = [p for p, message in self.messages.items() if not message.is_gone]
        if not there:
            return
        position = self.rng.choice(there[-30:] if self.rng.random() < 0.5 else there)
        (outcome,) = await self.node.topic(TOPIC).schedule.change([position], change, dry_run=False)
        if outcome.result is ChangeResult.DONE:
            message = self.messages[position]
            if isinstance(change, Cancel):
                cancel(message, position, self.readers.values(), self.clock.monotonic_ns())
            else:
                message.move(outcome.deliver_at_ms)

    async def _seek(self) -> None:
        if self.readers:
            name = self.rng.choice(list(self.readers))
            await seek(self.node.topic(TOPIC), self._subscription(name), Position(0, 0))
            self.readers[name].seek(Position(0, 0), self.messages)

    async def _skip(self) -> None:
        if self.readers:
            name = self.rng.choice(list(self.readers))
            end = self.node.topic(TOPIC).latest_position()
            await seek(self.node.topic(TOPIC), self._subscription(name), end)
            self.readers[name].seek(end, self.messages)

    async def _subscribe(self) -> None:
        if len(self.readers) < 3:
            self.names += 1
            name = f"s{self.names}"
            position = self.rng.choice([EARLIEST, LATEST])
            subscription = await self.node.create_subscription(TOPIC, name, position=position)
            self.readers[name] = Subscription(name)
            self.readers[name].seek(subscription.image.start, self.messages)

    async def _unsubscribe(self) -> None:
        if len(self.readers) > 1:
            name = self.rng.choice(list(self.readers))
            await self.node.topic(TOPIC).subscriptions.delete(name)
            del self.readers[name]

    async def _crash(self) -> None:
        self.node = self.node.crash(self.rng.choice(list(CrashPolicy)), self.rng).open()
        self.life += 1
        for job in self.jobs:
            job.is_over = True
        # Answers are not remembered over a restart: to such a job the lease is one that there never was.
        self.jobs = [job for job in self.jobs if self.rng.random() < 0.5]
        for job in self.jobs:
            job.outputs = job.outputs or Outputs()
        self._check_files()

    # -- what must hold ----------------------------------------------------------------------------------------

    async def _look_at(self, ledger_id: int) -> None:
        """Check that a rewritten ledger lacks only what may be lacking."""
        count = self._log_count(ledger_id)
        if not count:
            return
        times = await self.node.topic(TOPIC).log.read_times(ledger_id, 0, count)
        now_ms = self.clock.now_ms()
        for entry_id, time in enumerate(times.tolist()):
            position = Position(ledger_id, entry_id)
            message = self.messages[position]
            if time != CANCELLED_MS:
                continue
            if message.is_cancelled:
                continue
            if message.due_ms > now_ms:
                raise Violation("compaction", f"{position} is not due and gone")
            owed = [name for name, reader in self.readers.items() if position in reader.open]
            if owed:
                raise Violation("compaction", f"{position} is owed to {owed} and gone")
            message.is_gone = True
            # It counts as cancelled, also for who comes later.
            cancel(message, position, self.readers.values(), self.clock.monotonic_ns())

    async def _end(self) -> None:
        """Everybody gets what is owed, and nothing else, and the disk is clean."""
        if self.rng.random() < 0.5:
            await self._crash()
        inboxes = {
            name: self.node.attach(self.node.topic(TOPIC), self._subscription(name), permits=10_000)
            for name in self.readers
        }
        await asyncio.sleep(HOUR_MS / 1000 + 60)
        for name, inbox in inboxes.items():
            reader = self.readers[name]
            for each in inbox.poll():
                entry = reader.entries.get(each.position)
                if entry is None:
                    raise Violation("P3", f"{name} got {each.position} from before its start")
                require(each.payload == entry.message.content, "P1", f"{each.position} is another message")
                reader.check_sent(entry, each.sent_ms, each.sent_ns)
                reader.send(entry, inbox, each.attempt, each.sent_ms, each.sent_ns, 10 * HOUR_MS)
            lost = [position for position, entry in reader.open.items() if entry.holder is None]
            require(not lost, "P3", f"{name} lacks {lost}")
            positions = [each.position for each in inbox.received]
            await inbox.ack(positions)
            if self._subscription(name).unsettled_count():
                raise Violation(
                    "compaction", f"{name} is owed {self._subscription(name).unsettled_count()} more"
                )
        await asyncio.sleep(60)
        await self.node.checkpoint()
        await self.node.stop()
        if self.node.failures:
            raise Violation("compaction", f"the broker failed: {self.node.failures}")
        self._check_files()

    def _check_files(self) -> None:
        """Nothing is damaged, and nothing is there that nobody names."""
        node = Node(
            self.node.vfs.crashed(self.node.vfs.op_count, CrashPolicy.KEEP_ALL), self.clock, self.node.config
        )
        try:
            node.broker.open()
        except Corrupt as error:
            raise Violation("compaction", f"the next start fails: {error}") from error
        node.abandon()
        vfs = node.vfs.crashed(node.vfs.op_count, CrashPolicy.KEEP_ALL)
        problems = verify_data_dir(vfs, DATA_DIR).problems
        if problems:
            raise Violation("compaction", f"verify: {problems}")
        staged = [path for path in vfs.snapshot() if "/staging/" in path]
        if staged:
            raise Violation("compaction", f"left over: {staged}")

    def _subscription(self, name: str):  # type: ignore[no-untyped-def]
        return self.node.topic(TOPIC).subscription(name)

    def _log(self):  # type: ignore[no-untyped-def]
        return list(self.node.topic(TOPIC).log)

    def _log_count(self, ledger_id: int) -> int:
        return self.node.topic(TOPIC).log.entry_count(ledger_id) or 0
