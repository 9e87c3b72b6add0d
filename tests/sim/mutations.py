"""Bugs put in on purpose: `python -m tests.sim.mutations [NAME ...] [--seeds N]`.

A test that never failed proves little. Each mutation changes a few lines of the broker, in a process of its own
and in memory only, and the simulation must find it. A mutation whose lines are not there any more is an error:
whoever changed them says here what the bug would look like now.
"""

from __future__ import annotations

import argparse
import importlib.abc
import importlib.machinery
import logging
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType

SEEDS = 300
STEPS = 60


@dataclass(frozen=True)
class Mutation:
    """One bug: what it is, and which lines of which modules become which."""

    name: str
    changes: tuple[tuple[str, str, str], ...]  # (module, lines, lines instead)


def _bug(name: str, module: str, before: str, after: str) -> Mutation:
    return Mutation(name, ((module, before, after),))


_JOURNAL = "broker.storage.local_group_log"
_DISPATCHER = "broker.subscriptions.dispatcher"
_LAST_LOOK = "broker.subscriptions.handout"
_KEYS = "broker.subscriptions.key_shared"
_SUBSCRIPTION = "broker.subscriptions.subscription"
_STATES = "broker.subscriptions.entry_states"
_CONSUMERS = "broker.subscriptions.consumers"
_REQUESTS = "broker.subscriptions.requests"
_PACING = "broker.subscriptions.pacing"
_PUMP = "broker.delayed.index_pump"
_FEED = "broker.delayed.index_feed"
_CHECKPOINT = "broker.folder.checkpoint"
_PACKED = "broker.storage.packed_writer"
_SUBSCRIPTIONS = "broker.topics.topic_subscriptions"

MUTATIONS = (
    # -- the disk
    _bug(
        "no fsync of the journal",
        _JOURNAL,
        "            self._file.pwrite_synced(parts, self._end)\n",
        "            self._file.pwrite(parts, self._end)\n",
    ),
    _bug(
        "answered before the fsync",
        "broker.topics.topic",
        "        return Accepted(ids, now_ms, durable)",
        "        durable = asyncio.get_running_loop().create_future()\n"
        "        durable.set_result(None)\n"
        "        return Accepted(ids, now_ms, durable)",
    ),
    _bug(
        "a failed fsync is retried",
        _JOURNAL,
        "            self._file.pwrite_synced(parts, self._end)\n",
        "            try:\n"
        "                self._file.pwrite_synced(parts, self._end)\n"
        "            except OSError:\n"
        "                self._file.sync()\n",
    ),
    _bug(
        "no fsync of the journal's folder",
        _JOURNAL,
        "            self._vfs.rename(path, self.segments.segment_path(first_lsn))\n"
        "            self._vfs.sync_dir(self.segments.path)\n",
        "            self._vfs.rename(path, self.segments.segment_path(first_lsn))\n",
    ),
    _bug(
        "no fsync of a ledger",
        "broker.storage.ledger_files",
        "            handles.data.sync()\n            handles.times.sync()\n            handles.rows.sync()\n",
        "",
    ),
    _bug(
        "no fsync of packed rows",
        _PACKED,
        "        file.sync()\n",
        "",
    ),
    _bug(
        "no fsync of the folder of packed rows",
        "broker.storage.log",
        "        self.dirty[ledger_id] = ledger\n        self.dropped",
        "        self.dropped",
    ),
    _bug(
        "no fsync of the folder of buckets",
        "broker.runs.storage",
        '            self._vfs.sync_dir(self.path.rpartition("/")[0])\n',
        "",
    ),
    _bug(
        "the disk's reserve is for all",
        "broker.folder.broker",
        "        if self._disk_full or self._appended_into_reserve():\n",
        "        if False:\n",
    ),
    _bug(
        "no fsync before a rename",
        "broker.runtime.vfs",
        "        file.pwrite(parts, 0)\n        file.sync()\n",
        "        file.pwrite(parts, 0)\n",
    ),
    _bug(
        "the root is captured after the topics",
        _CHECKPOINT,
        "[encode_broker(root)]",
        "[encode_broker(root := self._capture_root())]",
    ),
    _bug(
        "a cursor that changed is not written",
        _SUBSCRIPTION,
        "        self.reasons.forget(record.entries)\n        self.changed = True",
        "        self.reasons.forget(record.entries)",
    ),
    # -- time
    Mutation(
        "early by a millisecond",
        (
            (
                "broker.delayed.loaded_rows",
                "searchsorted(block.deliver_at_ms, now_ms,",
                "searchsorted(block.deliver_at_ms, now_ms + 1,",
            ),
            (
                _LAST_LOOK,
                "read.times > now_ms)\n            keep &=",
                "read.times > now_ms + 1)\n            keep &=",
            ),
        ),
    ),
    _bug(
        "< for <= at the due time",
        "broker.delayed.loaded_rows",
        'now_ms, side="right")',
        'now_ms, side="left")',
    ),
    _bug(
        "too early entries are dropped",
        _LAST_LOOK,
        "                self._wait_for_time(taken, read, early)",
        "                pass",
    ),
    _bug(
        "too early entries are sent",
        _LAST_LOOK,
        "            keep &= ~early\n",
        "            early &= False\n",
    ),
    _bug(
        "the timer is not armed for the next due time",
        _PUMP,
        "            wait_ms = min(wait_ms, next_due_ms - self._clock.now_ms())",
        "            pass",
    ),
    _bug(
        "the timer does not notice a stepped clock",
        _PUMP,
        "        wait_ms = self._clock_recheck_ms\n",
        "        wait_ms = 3_600_000\n",
    ),
    # -- the index
    _bug(
        "a chunk is lost on overflow",
        _SUBSCRIPTION,
        "            self.begin_catchup(frontier_ms)\n        self.work.set()",
        "            pass\n        self.work.set()",
    ),
    _bug(
        "the rebuild leaves out what lies before the live frontier",
        _FEED,
        "        frontier = self._rebuild_frontier\n",
        "        frontier = self._tracker.frontier\n",
    ),
    _bug(
        "the index feed skips what is already due",
        _FEED,
        "        wanted = (times > 0) & (times < CANCELLED_MS)\n",
        "        wanted = times > self._clock.now_ms()\n",
    ),
    _bug(
        "catch-up forgets what was due before",
        _SUBSCRIPTION,
        "        self.reader.begin(self.cursor.mark, self.log.end, frontier_ms)",
        "        self.reader.begin(self.cursor.mark, self.log.end, 0)",
    ),
    _bug(
        "a replay queue without a limit",
        "broker.subscriptions.replay",
        "        if self._count + len(chunk) > self._entries_max:",
        "        if False:",
    ),
    # -- ledgers that go
    _bug(
        "a ledger goes though one entry of it is owed",
        "broker.subscriptions.cursor",
        ">= entry_count - below  # CURSOR-3",
        ">= entry_count - below - 1  # CURSOR-3",
    ),
    _bug(
        "a ledger goes before its time",
        "broker.folder.retention",
        "    if ledger.facts.last_due_ms > min(now_ms, spent_through_ms):",
        "    if ledger.facts.last_due_ms > spent_through_ms + 3_600_000:",
    ),
    _bug(
        "a batch goes into a ledger that goes",
        "broker.topics.ledgers",
        "            self.end = replace(self.end, is_sealed=True)",
        "            pass",
    ),
    _bug(
        "ledgers never go",
        "broker.folder.retention",
        "            self._drop(topic, some, max(",
        "            max(0, max(",
    ),
    # -- subscriptions
    _bug(
        "an ack is not persisted",
        _REQUESTS,
        "        await subscription.decisions.settle(fresh, SettleReason.ACKED)",
        "        from broker.storage.records import Settled\n"
        "        subscription.apply_settled(\n"
        "            Settled(\n"
        "                subscription.topic_id, subscription.subscription_id, SettleReason.ACKED, fresh\n"
        "            )\n"
        "        )",
    ),
    _bug(
        "the cursor passes a gap",
        "broker.subscriptions.cursor",
        "    return low\n",
        "    return min(low + 1, end)\n",
    ),
    _bug(
        "attempts are forgotten at a restart",
        _SUBSCRIPTION,
        "            attempts={\n"
        "                ledger_id: [d.copy() for d in digits] for ledger_id, digits in self.attempts.digits.items()\n"
        "            },",
        "            attempts={},",
    ),
    _bug(
        "a nack's delay is forgotten at a restart",
        _SUBSCRIPTION,
        "waiting=self.waiting.by_ledger()",
        "waiting={}",
    ),
    _bug(
        "what is settled passes the last look",
        _STATES,
        "        mask = self.cursor.settled_mask(ledger_id, entry_ids)\n",
        "        mask = None\n",
    ),
    _bug(
        "what is leased passes the last look",
        _STATES,
        "for state in states if (held",
        "for state in states if state is not State.LEASED and (held",
    ),
    _bug(
        "what is promised passes the last look",
        _STATES,
        "for state in states if (held",
        "for state in states if state not in PROMISED and (held",
    ),
    _bug(
        "what waits for redelivery passes the last look",
        _STATES,
        "for state in states if (held",
        "for state in states if state is not State.QUEUED and (held",
    ),
    _bug(
        "what was not handed out is not put back",
        _DISPATCHER,
        "        self._put_back(taken, self._hand_out(consumer, taken, read))",
        "        self._hand_out(consumer, taken, read)",
    ),
    _bug(
        "a lost consumer keeps its messages",
        _CONSUMERS,
        "        if held and not keep_leases:",
        "        if False:",
    ),
    _bug(
        "leases do not expire",
        _DISPATCHER,
        "        subscription.consumers.expire_leases()\n",
        "",
    ),
    _bug(
        "a nack wakes nobody",
        _SUBSCRIPTION,
        "            self.reasons.note(owed, record.text)\n        self.changed = True\n        self.work.set()",
        "            self.reasons.note(owed, record.text)\n        self.changed = True",
    ),
    _bug(
        "permits are not charged",
        _LAST_LOOK,
        "        consumer.charge(len(batch), frames_bytes)\n",
        "",
    ),
    _bug(
        "expired messages are sent",
        _LAST_LOOK,
        "            keep &= ~expired\n",
        "",
    ),
    # -- keys
    _bug(
        "a key moves while its former consumer holds it",
        _KEYS,
        "            if others.any():\n",
        "            if False:\n",
    ),
    _bug(
        "who waits for bytes is forgotten when its leases end",
        "broker.subscriptions.leases",
        "            del self._held[consumer_id]\n        self._on_end(consumer_id)\n",
        "            del self._held[consumer_id]\n",
    ),
    _bug(
        "who waits for bytes is not woken when its leases end",
        _CONSUMERS,
        "                consumer.starved = False\n                self._work.set()\n",
        "                consumer.starved = False\n",
    ),
    _bug(
        "what was lost is overtaken while it comes back",
        _KEYS,
        "        if not came_back and not self._coming and not self._back:\n",
        "        if True:\n",
    ),
    _bug(
        "what was taken back unsent is as new",
        _STATES,
        "            merge_entries(self._unrecorded, entries)\n",
        "",
    ),
    _bug(
        "what was taken back unsent is as new once it was parked",
        _STATES,
        "        merge_entries(self._columns[State.PARKED], entries)\n",
        "        merge_entries(self._columns[State.PARKED], entries)\n        self._forget_place(entries)\n",
    ),
    _bug(
        "the first subscription begins at the end",
        _SUBSCRIPTIONS,
        "        if initial_position == EARLIEST or self._next_reserved_id == 1:",
        "        if initial_position == EARLIEST:",
    ),
    _bug(
        "every subscription begins at the beginning",
        _SUBSCRIPTIONS,
        "        if initial_position == EARLIEST or self._next_reserved_id == 1:",
        "        if True:",
    ),
    _bug(
        "unknown ids are acknowledged",
        _REQUESTS,
        "        refused = without_entries(unknown, await _perhaps_sent(subscription, unknown))",
        "        refused = without_entries(unknown, unknown)",
    ),
    _bug(
        "what is handed back unbegun counts",
        _SUBSCRIPTION,
        "        if record.reason is not ReturnReason.RELEASED:",
        "        if True:",
    ),
    _bug(
        "what is lost with its consumer counts nothing",
        _CONSUMERS,
        "            reason = ReturnReason.RELEASED if consumer.hands_back else ReturnReason.CONSUMER_LOST",
        "            reason = ReturnReason.RELEASED",
    ),
    # -- pacing
    _bug(
        "a rate does not count what is handed out",
        _PACING,
        "            self._bucket.take(count, now_ns)",
        "            pass",
    ),
    _bug(
        "a change of the policy fills the bucket",
        "broker.runtime.token_bucket",
        "            self._level = min(self._level, burst * _TOKEN)",
        "            self._level = burst * _TOKEN",
    ),
    _bug(
        "more are leased than may be",
        _PACING,
        "            self.room = min(self.room, policy.max_leased_messages - leased_count)",
        "            pass",
    ),
    _bug(
        "the end of a lease lets nothing go",
        _SUBSCRIPTION,
        "        if self.pacing.waits_for_leases:\n            self.work.set()",
        "        pass",
    ),
)


class _Mutator(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Loads modules with their lines changed."""

    def __init__(self, mutation: Mutation) -> None:
        self._changes: dict[str, list[tuple[str, str]]] = {}
        for module, before, after in mutation.changes:
            self._changes.setdefault(module, []).append((before, after))

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in self._changes:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        assert spec is not None
        return importlib.machinery.ModuleSpec(fullname, self, origin=spec.origin)

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None and module.__spec__.origin is not None
        with open(module.__spec__.origin, encoding="utf-8") as file:
            source = file.read()
        for before, after in self._changes[module.__name__]:
            if source.count(before) != 1:
                raise SystemExit(f"{module.__name__} has {source.count(before)} times, not once:\n{before}")
            source = source.replace(before, after)
        exec(compile(source, module.__spec__.origin, "exec"), module.__dict__)


def run_mutant(mutation: Mutation, seeds: int) -> int:
    """In a process of its own: run seeds until one finds the bug; 0 if one does, 1 if none."""
    assert not any(module in sys.modules for module, _, _ in mutation.changes)
    sys.meta_path.insert(0, _Mutator(mutation))
    from tests.sim.simulation import run_seed  # noqa: PLC0415  # only now, so that it meets the mutant

    logging.disable(logging.CRITICAL)
    for seed in range(1, seeds + 1):
        error = run_seed(seed, STEPS).error
        if error is not None:
            what = str(error).splitlines()[0][:110]
            print(f"caught by seed {seed}: {type(error).__name__}: {what}")
            return 0
    print(f"NOT CAUGHT by {seeds} seeds")
    return 1


def catch(mutation: Mutation, seeds: int = SEEDS) -> tuple[bool, str]:
    """Return whether the simulation finds a bug, and how."""
    command = [sys.executable, "-m", "tests.sim.mutations", "--mutant", mutation.name, "--seeds", str(seeds)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.returncode == 0, (done.stdout + done.stderr).strip()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.sim.mutations", description=__doc__)
    parser.add_argument("names", nargs="*", help="which; all if none is named")
    parser.add_argument("--seeds", type=int, default=SEEDS, help="how many to try at most")
    parser.add_argument("--mutant", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.mutant:
        return run_mutant(next(each for each in MUTATIONS if each.name == given.mutant), given.seeds)
    missed = 0
    for mutation in MUTATIONS:
        if given.names and not any(name in mutation.name for name in given.names):
            continue
        started = time.perf_counter()
        caught, how = catch(mutation, given.seeds)
        missed += not caught
        print(f"{mutation.name}: {how} ({time.perf_counter() - started:.0f} s)", flush=True)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
