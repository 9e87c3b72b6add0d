"""The broker's side of compaction: gives leases to jobs, and puts what they wrote in place.

    begin   note what is settled, cancelled and moved, write it down for the job, keep the input files
    (the job writes generations and a bucket into the lease's folder, and nowhere else)
    commit  1  look at every byte of the outputs, and compare them with the inputs (index thread)
            2  ask whether each may still take its ledger's place
            3  move the files to their final names, sync the folder (file thread)
            4  in one step: ask again, submit `LedgersCompacted`; apply asks a last time
            5  answer once the record is durable; swap the bucket; the lease ends
    The next checkpoint's manifest names the new files, and then the old ones go.

In a cluster the record leaves entries out, and names no files: each node writes its own (`ledger_rewrites`), but for
the one that commits, which has them and swaps them in once the record is applied.

A crash before the record is durable leaves files that nobody names, and the lease's folder: recovery removes both.
After it, replay puts the generations in place. A sync that fails as files are moved ends writing: the folder has the
names of all ledgers of the topic.

Invariants (COMPACTION-1 and COMPACTION-3 stand in `compaction_leases`):
  COMPACTION-2  Nothing but a commit under a lease that is current changes anything, and it does so once.
  COMPACTION-4  One commit at a time moves files, so that no name is taken twice.
  COMPACTION-5  A row with a schedule key is left out once a durable manifest names what is remembered of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Executor
from dataclasses import replace
from functools import partial

from broker.delayed.lent_buckets import Loan
from broker.errors import (
    Corrupt,
    InvalidRequest,
    PostdateError,
    Refused,
    Unavailable,
)
from broker.folder.compaction_candidates import (
    bucket_candidates,
    eligible_ledgers,
    input_ledger,
    ledger_candidate,
)
from broker.folder.compaction_leases import CompactionLeases, HeldLease
from broker.folder.compaction_values import Candidates, Committed, Lease
from broker.folder.staging import Staging
from broker.observe.logs import get_logger
from broker.runtime.clock import Clock
from broker.runtime.steps import run_step
from broker.runtime.supervise import YieldBudget
from broker.runtime.vfs import Vfs, WriteFailed
from broker.storage.amendments import NONE
from broker.storage.blocks import KINDS, SparseSizes
from broker.storage.compacted import CompactedLedger, LedgersCompacted
from broker.storage.compaction_inputs import (
    CompactionInputs,
    InputLedger,
    LedgerOutput,
    Outputs,
)
from broker.storage.layout import Layout
from broker.storage.sparse import absent_of
from broker.storage.sparse_check import examine_generation
from broker.storage.sparse_writer import open_source
from broker.topics.generations import Refusal, capture_of, refusal_of
from broker.topics.registry import Registry
from broker.topics.topic import Topic

log = get_logger(__name__)

_REMEMBERED = 256
_TOGETHER = 16  # ledgers in one record: applying it looks at what every subscription has settled of each
_TIDY_SECONDS = 10.0


class Compactions:
    """See the module's description."""

    def __init__(
        self,
        registry: Registry,
        layout: Layout,
        vfs: Vfs,
        clock: Clock,
        *,
        rng: random.Random,
        lease_ms_max: int,
        cleanup_ms: int,
        file_executor: Executor,
        index_executor: Executor,
        note: Callable[[str], None],
        checkpoint: Callable[[], Awaitable[None]],
        changed: Callable[[Topic], None],
        on_write_failed: Callable[[OSError], None],
    ) -> None:
        self._note = note  # counts how leases ended
        self._checkpoint = checkpoint
        self._changed_topic = changed
        self._on_write_failed = on_write_failed
        self._registry = registry
        self._layout = layout
        self._vfs = vfs
        self._clock = clock
        self._index_executor = index_executor
        self._staging = Staging(layout, vfs, clock, file_executor, cleanup_ms=cleanup_ms)
        self._leases = CompactionLeases(self._staging, clock, rng, lease_ms_max, note)
        self._done: OrderedDict[tuple[str, int], Committed] = OrderedDict()
        self._changed = asyncio.Event()  # there is a lease or an orphaned folder to look after
        self.moving = asyncio.Lock()
        """Held by who moves files of generations to their names."""
        self._budget = YieldBudget(clock)
        self.in_cluster = False
        """Other nodes apply this broker's records: they have none of the files that a compaction writes."""
        self.rest = 4.0
        """Rest of the check of a bucket that was handed in, as a multiple of its work."""

    def data_dir(self, _topic: str) -> str:
        """The data directory that has a topic."""
        return self._layout.root

    async def topics(self) -> list[str]:
        return sorted(self._registry.by_name)

    # -- what could be done ----------------------------------------------------------------------------------

    async def candidates(self, topic_name: str) -> Candidates:
        """Return the compaction candidates of a topic; raises NotFound."""
        topic = self._registry.topic(topic_name)
        ledgers = []
        for ledger in eligible_ledgers(topic, self._clock.now_ms()):
            ledgers.append(ledger_candidate(topic, ledger))
            await self._budget.spent()
        return Candidates(topic.name, tuple(ledgers), tuple(bucket_candidates(topic)))

    def leases(self) -> list[Lease]:
        """The leases that live, oldest first."""
        self._leases.end_expired()
        return [held.lease for held in self._leases]

    # -- begin and abort -------------------------------------------------------------------------------------

    async def begin(
        self, topic_name: str, ledger_ids: Sequence[int], bucket_ids: Sequence[int], lease_ms: int = 0
    ) -> Lease:
        """Lease inputs to a job. Raises NotFound, Refused (reason COMPACTION_...), LimitReached."""
        self._leases.end_expired()
        topic = self._registry.topic(topic_name)
        self._leases.check_free(topic, ledger_ids, bucket_ids)
        with topic.log.keep_files():  # those that are noted here, until the lease keeps them (COMPACTION-3)
            # No moment is the same for all: what is settled or moved while others are noted makes the job keep more.
            amended_lsn, ledgers = topic.applied_lsn, []
            for ledger_id in sorted(ledger_ids):
                if (ledger := topic.log.find(ledger_id)) is not None:
                    ledgers.append(input_ledger(topic, ledger))
                await self._budget.spent()
            self._leases.check_free(topic, ledger_ids, bucket_ids)  # again, and no await from here on
            lease = self._leases.new(topic, ledger_ids, bucket_ids, lease_ms)
            inputs, loan = self._inputs(topic, lease, amended_lsn, ledgers)
            held = self._leases.hold(lease, topic, inputs, loan)
        self._changed.set()
        try:
            await self._staging.make(lease.folder, inputs)
        except BaseException:
            self._leases.end(held)
            raise
        log.info(
            "Compaction began",
            topic=topic.name,
            compaction_id=lease.compaction_id,
            ledgers=len(lease.ledger_ids),
        )
        return lease

    async def abort(self, compaction_id: str, epoch: int) -> None:
        """End a lease; what its job wrote is removed. Raises NotFound, Fenced."""
        held = self._leases.current(compaction_id, epoch)
        if held.committing is not None:
            raise Refused("The compaction is being committed", reason="COMPACTION_RUNNING")
        self._leases.end(held)
        self._note("aborted")
        await self._staging.remove(held.lease.folder)

    # -- commit ----------------------------------------------------------------------------------------------

    async def commit(self, compaction_id: str, epoch: int, outputs: Outputs) -> Committed:
        """Put outputs in place; raises NotFound, Fenced, InvalidRequest. A repeat gets the first answer."""
        if (done := self._done.get((compaction_id, epoch))) is not None:
            return replace(done, is_repeat=True)
        held = self._leases.current(compaction_id, epoch)
        if held.committing is None:
            _check_outputs(held.lease, outputs)
            # A task of its own: whoever asked may go away, and files that were moved must not be left without a record.
            held.committing = asyncio.ensure_future(self._commit(held, outputs))
            held.committing.add_done_callback(_look_at)
        return await asyncio.shield(held.committing)

    async def _commit(self, held: HeldLease, outputs: Outputs) -> Committed:
        lease = held.lease
        try:
            async with self.moving:  # COMPACTION-4
                refused: dict[int, Refusal] = {}
                examined = []
                for output in outputs.ledgers:
                    work = partial(self._examine, held, output, refused)
                    if (candidate := await run_step(self._index_executor, work)) is not None:
                        examined.append(candidate)
                placed: list[int] = []
                for first in range(0, len(examined), _TOGETHER):
                    some = examined[first : first + _TOGETHER]
                    placed += await self._place_ledgers(held, some, refused)
            swapped = outputs.has_bucket and await self._place_bucket(held)
        finally:
            self._leases.end(held)
        committed = Committed(tuple(placed), refused, swapped)
        self._note("refused" if refused or swapped != outputs.has_bucket else "committed")
        self._done[lease.compaction_id, lease.epoch] = committed
        while len(self._done) > _REMEMBERED:
            self._done.popitem(last=False)
        await self._staging.remove(lease.folder)
        for ledger_id, refusal in refused.items():
            log.warning(
                "A ledger that a compaction job rewrote was refused; the old one stays",
                topic=lease.topic,
                ledger_id=ledger_id,
                why=refusal.value,
            )
        return committed

    def _examine(
        self, held: HeldLease, output: LedgerOutput, refused: dict[int, Refusal]
    ) -> CompactedLedger | None:
        """Look at one generation in the lease's folder. Blocks."""
        source = next(
            ledger for ledger in held.inputs.ledgers if ledger.capture.ledger_id == output.ledger_id
        )
        capture = replace(
            source.capture,
            generation=source.new_generation,
            data_bytes=output.data_bytes,
            sparse=SparseSizes(output.present_count, output.present_bytes),
            packed_bytes=0,
        )
        folder = self._layout.ledgers(held.topic.topic_id)
        try:
            with open_source(self._vfs, folder, source.capture, source.amendments) as opened:
                return examine_generation(
                    self._vfs,
                    self._staging.path(held.lease.folder),
                    capture,
                    opened,
                    source.settled,
                    held.inputs.frontier[0],
                )
        except (Corrupt, FileNotFoundError) as error:
            log.error("The output of a compaction job is damaged", topic=held.lease.topic, error=str(error))
            refused[output.ledger_id] = Refusal.DAMAGED
            return None

    async def _place_ledgers(
        self, held: HeldLease, examined: Sequence[CompactedLedger], refused: dict[int, Refusal]
    ) -> list[int]:
        """Move generations to their names and let the journal say so; returns the ledgers that were rewritten."""
        wanted = self._allowed(held, examined, refused)
        if not wanted:
            return []
        topic = held.topic
        try:
            names = [f"{ledger.ledger_id}.{ledger.generation}.{kind}" for ledger in wanted for kind in KINDS]
            await self._staging.move(held.lease.folder, self._layout.ledgers(topic.topic_id), names)
            await self._remember_keys(topic, wanted)
        except (OSError, PostdateError) as error:
            if isinstance(error, WriteFailed):
                # A later sync of that folder would vouch for names that the system has dropped, those of new ledgers
                # among them.
                self._on_write_failed(error)
            await self._staging.remove_moved(topic.topic_id, wanted)
            if not isinstance(error, OSError):
                raise
            log.error("A compaction's files cannot be moved", topic=topic.name, error=error)
            raise Unavailable(f"A compaction's files cannot be moved: {error.strerror}") from error
        # From here on no await until the record is submitted.
        named = self._allowed(held, wanted, refused)
        if named:
            record = LedgersCompacted(
                topic.topic_id, held.inputs.amended_lsn, tuple(named), files_follow=self.in_cluster
            )
            # If this fails it is not known whether the record is durable. If it is, recovery needs the files, and it
            # removes them if not; the journal takes nothing any more until then.
            await asyncio.shield(topic.submit_record(record))
            if self.in_cluster:
                self._put_generations(topic, named)
        placed = [ledger for ledger in named if self._is_placed(topic, ledger)]
        left = [ledger for ledger in wanted if ledger not in placed]
        for ledger in left:
            refused.setdefault(ledger.ledger_id, Refusal.OWED)  # by a record that came in between
        await self._staging.remove_moved(topic.topic_id, left)
        return [ledger.ledger_id for ledger in placed]

    def _put_generations(self, topic: Topic, ledgers: Sequence[CompactedLedger]) -> None:
        """Swap in what the record has left out; what it has not, as something came in between, stays as it is."""
        for rewritten in ledgers:
            ledger = None if topic.deleted else topic.log.find(rewritten.ledger_id)
            if ledger is None or ledger.name.generation != rewritten.from_generation:
                continue
            cancelled = topic.log.amendments.get(rewritten.ledger_id, NONE).cancelled
            if absent_of(rewritten.present, ledger.entry_count) <= cancelled:
                topic.ledgers.put_generation(capture_of(ledger, rewritten))
        self._changed_topic(topic)

    async def _remember_keys(self, topic: Topic, ledgers: Sequence[CompactedLedger]) -> None:
        """Make durable what is remembered of schedule keys that ledgers hold; raises Unavailable."""
        versions = [await topic.keys.remember(ledger.ledger_id) for ledger in ledgers]
        known = [version for version in versions if version is not None]
        if len(known) < len(versions):
            raise Unavailable(
                "Schedule keys of messages that would be left out cannot be remembered: try again"
            )
        if not topic.keys.is_remembered(max(known)):
            await self._checkpoint()  # COMPACTION-5

    def _allowed(
        self, held: HeldLease, ledgers: Sequence[CompactedLedger], refused: dict[int, Refusal]
    ) -> list[CompactedLedger]:
        """Those that may take their ledgers' places now. One step, without await."""
        topic = held.topic
        allowed = []
        for ledger in ledgers:
            now = topic.ledgers.now(ledger.ledger_id, held.inputs.amended_lsn)
            refusal = Refusal.GONE if topic.deleted else refusal_of(now, ledger)
            if refusal is None and self.in_cluster:
                refusal = refusal_of(now, ledger, files_follow=True)
            if refusal is None:
                allowed.append(ledger)
            else:
                refused[ledger.ledger_id] = refusal
        return allowed

    def _is_placed(self, topic: Topic, compacted: CompactedLedger) -> bool:
        ledger = topic.log.find(compacted.ledger_id)
        return ledger is not None and ledger.name.generation == compacted.generation

    async def _place_bucket(self, held: HeldLease) -> bool:
        upkeep, loan, topic = held.topic.index.upkeep, held.loan, held.topic
        if upkeep is None or loan is None or topic.deleted:
            return False
        with contextlib.suppress(FileNotFoundError):  # nothing is left of the sources, or that is found out
            name = f"{loan.buckets.new_bucket_id}.bucket"
            await self._staging.move(held.lease.folder, self._layout.buckets(topic.topic_id), [name])
        return await upkeep.adopt(loan, rest=self.rest)

    # -- leases ----------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """End leases that nobody used in time, and remove what their jobs left, until cancelled."""
        while True:
            self._changed.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(
                    _TIDY_SECONDS if self._leases or self._staging.has_orphans else None
                ):
                    await self._changed.wait()
                    continue
            self._leases.end_expired()
            await self._staging.remove_old()

    async def stop(self) -> None:
        """Finish commits that have begun, and end all leases."""
        committing = [held.committing for held in self._leases if held.committing is not None]
        if committing:
            await asyncio.wait(committing)
        for held in self._leases:
            self._leases.end(held)

    def _inputs(
        self, topic: Topic, lease: Lease, amended_lsn: int, ledgers: Sequence[InputLedger]
    ) -> tuple[CompactionInputs, Loan | None]:
        frontier = topic.index.tracker.frontier
        upkeep = topic.index.upkeep
        loan = upkeep.lend(lease.bucket_ids) if upkeep is not None and lease.bucket_ids else None
        inputs = CompactionInputs(
            compaction_id=lease.compaction_id,
            topic_id=topic.topic_id,
            epoch=lease.epoch,
            amended_lsn=amended_lsn,
            frontier=(frontier.deliver_at_ms, frontier.ledger_id, frontier.entry_id),
            ledgers=tuple(ledgers),
            buckets=loan.buckets if loan is not None else None,
        )
        return inputs, loan


def _look_at(task: asyncio.Task[Committed]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("A compaction could not be committed", error=str(error))


def _check_outputs(lease: Lease, outputs: Outputs) -> None:
    ledger_ids = [ledger.ledger_id for ledger in outputs.ledgers]
    if len(set(ledger_ids)) != len(ledger_ids) or not set(ledger_ids) <= set(lease.ledger_ids):
        raise InvalidRequest(
            "An output is for a ledger that is not part of this compaction, or a ledger has two outputs",
            field="ledgers",
            reason="COMPACTION_OUTPUT_INVALID",
        )
    if outputs.has_bucket and not lease.bucket_ids:
        raise InvalidRequest("No bucket was leased", field="has_bucket", reason="COMPACTION_OUTPUT_INVALID")
