"""Fourteen faults that would cost a cluster its promises, each put in on purpose, and the check that sees it.

What a check says is compared with a pattern, so that a patch which merely breaks the broker does not count as caught.
A world is asked seed after seed, as the first consequence of a fault that it meets is of its seed: a log with a hole is
as likely to be followed by nobody as to tell a client something wrong. Without the fault the same seed finds nothing.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import pytest

from broker.cluster import object_group_log, take_over
from broker.cluster.base_store import BaseStore
from broker.cluster.group_head import Head, encode_entry
from broker.cluster.lease import Moment, OwnerLease, SystemLeaseClock
from broker.cluster.object_group_log import ObjectGroupLog
from broker.cluster.patient_store import PatientStore
from broker.cluster.take_over import Answer, AppendStep
from broker.folder.broker import Broker
from broker.folder.retention import Reclaimer
from broker.node import shard_bases
from broker.runtime.vfs import Buffer
from broker.storage.group_log import NewRecord, StoredGroup
from broker.storage.records import GivenBack, LedgersDropped
from broker.subscriptions.subscription import Subscription
from broker.topics.intake import Accepted
from broker.topics.registry import Registry
from broker.topics.topic import APPLIED_BY, Topic
from tests.sim import test_cluster, test_shard, test_shard_bases, test_shard_brokers
from tests.unit.cluster import test_base_store, test_lease
from tests.unit.rpc import test_told_without_lease

Patch = Callable[[pytest.MonkeyPatch], None]


def brokers(seed: int) -> None:
    """Whole brokers under faults."""
    errors = test_cluster.run(seed).errors
    assert not errors, errors[0]


def logs(seed: int) -> None:
    """Logs and leases under faults, many times as long."""
    errors = test_shard.run(seed).errors
    assert not errors, errors[0]


# -- the faults --------------------------------------------------------------------------------------------------------


def answer_at_once(patch: pytest.MonkeyPatch) -> None:
    append_until_known = ObjectGroupLog._append_until_known
    appending = set()

    async def begin_to_append(log: ObjectGroupLog, index: int, body: bytes) -> None:
        appending.add(asyncio.get_running_loop().create_task(append_until_known(log, index, body)))

    patch.setattr(ObjectGroupLog, "_append_until_known", begin_to_append)


def go_on_behind_a_time_out(patch: pytest.MonkeyPatch) -> None:
    append = ObjectGroupLog._append

    async def append_somewhere(
        log: ObjectGroupLog, head: Head, records: Sequence[NewRecord], begin: Moment
    ) -> StoredGroup:
        while await log._create(head.first_lsn, encode_entry(head, records)) is Answer.UNKNOWN:
            head = head._replace(first_lsn=head.first_lsn + len(records))
            log._next_index = head.first_lsn
        return await append(log, head, records, begin)

    patch.setattr(ObjectGroupLog, "_append", append_somewhere)


def take_exists_for_ours(patch: pytest.MonkeyPatch) -> None:
    def after_create(answer: Answer) -> AppendStep:
        return AppendStep.STORED if answer is Answer.EXISTS else take_over.after_create(answer)

    patch.setattr(object_group_log, "after_create", after_create)


def lease_from_the_answer(patch: pytest.MonkeyPatch) -> None:
    extend = OwnerLease.extend
    patch.setattr(OwnerLease, "extend", lambda lease, begin: extend(lease, lease.begin()))


def lease_on_a_clock_that_stands_still(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SystemLeaseClock, "boottime_ns", lambda clock: time.monotonic_ns())


def read_without_the_lease(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(OwnerLease, "holds", lambda lease: lease.until_ms > 0)


def trim_fences(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(object_group_log, "is_removable", lambda kind, index, below: index < below)


def trim_below_the_newest_base(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(shard_bases, "_KEPT", 1)


def manifest_first(patch: pytest.MonkeyPatch) -> None:
    put = PatientStore.put
    later: list[tuple[str, Buffer]] = []

    async def put_chunks_later(store: PatientStore, name: str, body: Buffer) -> None:
        if name.startswith("chunks/"):
            later.append((name, body))
            return
        await put(store, name, body)
        while name.startswith("bases/") and later:
            await put(store, *later.pop())

    async def believe(*_: Any) -> None: ...

    patch.setattr(PatientStore, "put", put_chunks_later)
    patch.setattr(BaseStore, "_check_chunks", believe)


def apply_by_the_own_policy(patch: pytest.MonkeyPatch) -> None:
    apply = Subscription.apply_given_back

    def apply_later(subscription: Subscription, record: GivenBack) -> None:
        own_ms = subscription.policy.initial_backoff_ms or 0
        apply(subscription, replace(record, not_before_ms=record.not_before_ms + own_ms))

    patch.setattr(Subscription, "apply_given_back", apply_later)


def reclaim_as_a_standby(patch: pytest.MonkeyPatch) -> None:
    """The journal of a standby refuses the record, so this one does without."""
    start, drop = Broker.start_following, Topic.drop_ledgers
    following: list[Registry] = []

    def start_and_reclaim(broker: Broker) -> None:
        start(broker)
        following.append(broker.registry)
        reclaimer = Reclaimer(broker.registry, interval_ms=1_000, clock=broker.clock, changed=broker._changed)
        broker.supervisor.spawn_lasting("reclaim", reclaimer.run())

    def drop_here(topic: Topic, ledger_ids: Sequence[int], came_due_ms: int) -> asyncio.Future[None]:
        if all(topic not in registry.topics.values() for registry in following):
            return drop(topic, ledger_ids, came_due_ms)
        record = LedgersDropped(topic.topic_id, tuple(ledger_ids), came_due_ms)
        for name in APPLIED_BY[LedgersDropped]:
            topic._appliers[name].apply(record, topic.applied_lsn)
        done = asyncio.get_running_loop().create_future()
        done.set_result(None)
        return done

    patch.setattr(Broker, "start_following", start_and_reclaim)
    patch.setattr(Topic, "drop_ledgers", drop_here)


def frontier_of_the_own_clock(patch: pytest.MonkeyPatch) -> None:
    start = Registry.start
    patch.setattr(Registry, "start", lambda registry, ceiling_ms=0: start(registry))


def epoch_of_the_folder(patch: pytest.MonkeyPatch) -> None:
    open_log, take = ObjectGroupLog.open, ObjectGroupLog.take_over
    epochs: dict[ObjectGroupLog, int] = {}

    async def open_and_remember(log: ObjectGroupLog, from_index: int, epoch: int, **needs: int) -> None:
        epochs[log] = epoch
        await open_log(log, from_index, epoch, **needs)

    patch.setattr(ObjectGroupLog, "open", open_and_remember)
    patch.setattr(ObjectGroupLog, "take_over", lambda log, index, epoch: take(log, index, epochs[log] + 1))


def tell_repeats_of_a_zombie(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Accepted, "has_repeats", property(lambda accepted: False))


WRONG = r"Position\(|counts|delivers|is lost|does not find|says that|cancels|differs from"
"""Words of the world of brokers about a wrong answer, the first of them about a position that nobody was told."""


class Seeded(NamedTuple):
    """A fault, the check that catches it, given a seed, and what that says."""

    patch: Patch
    check: Callable[[int], None]
    says: str
    seeds: int = 30


FAULTS = {
    "a batch is answered before its group is stored": Seeded(answer_at_once, brokers, WRONG),
    "a new index is taken after a time-out": Seeded(go_on_behind_a_time_out, brokers, WRONG),
    "exists is taken for ours": Seeded(take_exists_for_ours, brokers, WRONG),
    "the lease counts from the answer": Seeded(lease_from_the_answer, logs, "said something old"),
    "the lease is measured by a clock that stands still in a suspend": Seeded(
        lease_on_a_clock_that_stands_still,
        lambda _: test_lease.test_the_machines_clock_counts_suspends(),
        "boottime_ns",
        seeds=1,
    ),
    "reads and deliveries leave without the lease": Seeded(
        read_without_the_lease, logs, "said something old"
    ),
    "fences are trimmed": Seeded(trim_fences, logs, "no first group"),
    "the log is trimmed below the newest base": Seeded(
        trim_below_the_newest_base,
        lambda _: test_shard_bases.test_a_new_node_begins_with_the_newest_base_after_the_log_was_trimmed(),
        r"\d+ < \d+",
        seeds=1,
    ),
    "a base's manifest is written first": Seeded(
        manifest_first,
        lambda _: asyncio.run(test_base_store.test_the_manifest_comes_last()),
        "chunks/.* == .*bases/",
        seeds=1,
    ),
    "apply looks at a policy of its own node": Seeded(
        apply_by_the_own_policy, brokers, "differs from .*cursor of all"
    ),
    "a standby reclaims": Seeded(reclaim_as_a_standby, brokers, "differs from .*ledger"),
    "the frontier is that of the own clock": Seeded(
        frontier_of_the_own_clock,
        lambda _: (
            test_shard_brokers.test_what_an_owner_with_a_clock_ahead_may_have_handed_out_counts_as_sent_and_comes_at_its_time()
        ),
        "ALREADY_DELIVERED",
        seeds=1,
    ),
    "an epoch is that of the folder": Seeded(epoch_of_the_folder, brokers, "owns the shard at"),
    "a zombie tells what a repeated batch has become": Seeded(
        tell_repeats_of_a_zombie,
        lambda _: test_told_without_lease.test_ids_of_a_repeated_batch_are_not_told_without_the_lease(
            "ProducerService.Produce"
        ),
        "ENGINE_UNREACHABLE",
        seeds=1,
    ),
}


@pytest.mark.parametrize(
    "name",
    [
        name if fault.seeds == 1 else pytest.param(name, marks=pytest.mark.deep)
        for name, fault in FAULTS.items()
    ],
)
def test_a_fault_is_caught(
    name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL)
    fault = FAULTS[name]
    fault.patch(monkeypatch)
    said = []
    for seed in range(fault.seeds):
        try:
            fault.check(seed)
        except Exception as error:
            said.append(f"{seed}: {error}")
            if re.search(fault.says, str(error)):
                break
    else:
        pytest.fail("\n".join([f"no seed says {fault.says!r}, but", *said]))
    monkeypatch.undo()
    fault.check(seed)
