"""A damaged message, met by who is not about to send it: compaction, backup, audit."""

from __future__ import annotations

import asyncio

import pytest

from broker.delayed.check import Kind
from broker.errors import Corrupt
from broker.folder.compaction_values import Committed
from broker.jobs.folder import Folder
from broker.jobs.plan import plan_audit
from broker.jobs.rewrite import RewriteResult, RewriteUnit, _rewrite, failed_unit, outputs_of, read_inputs
from broker.jobs.units import audit_unit
from broker.jobs.values import Level
from broker.testing.mem_vfs import MemVfs
from broker.testing.sim_clock import SimClock
from broker.testing.sim_loop import SimLoop, run_sim
from tests.harness import DATA_DIR, Node
from tests.unit.folder.compaction_world import LATER_MS, TOPIC, begin, config, fill, generations
from tests.unit.topics.test_damage import damage, ids


async def compact_what_can_be(node: Node) -> tuple[list[RewriteResult], Committed]:
    """One lease, as the job does it: of a unit that fails it says why, and hands in the others."""
    lease = await begin(node)
    folder = f"{DATA_DIR}/{lease.folder}"
    inputs = read_inputs(node.vfs, folder)
    results = []
    for ledger in inputs.ledgers:
        unit = RewriteUnit(DATA_DIR, folder, ledger.capture.ledger_id, 1)
        try:
            results.append(await _rewrite(node.vfs, inputs, unit, f"{unit.ledger_id}-aside"))
        except Corrupt as error:
            results.append(failed_unit(unit, error))
    outputs = outputs_of(results)
    return results, await node.broker.compactions.commit(lease.compaction_id, lease.epoch, outputs)


@pytest.mark.slow
def test_compaction_leaves_a_ledger_with_a_damaged_message_and_does_the_others() -> None:
    async def scenario(_: SimLoop, clock: SimClock) -> None:
        node = Node(MemVfs(), clock, config(max_backoff_ms=1_000)).open()
        pending, done, inbox = await fill(node, 3)
        bad = pending[0]
        await damage(node, bad, TOPIC)
        # Of another ledger one that is settled: nobody reads it, and it goes.
        await damage(node, next(each for each in done if each.ledger_id == pending[1].ledger_id), TOPIC)
        results, committed = await compact_what_can_be(node)
        (failed,) = [each for each in results if each.error]
        assert failed.ledger_id == bad.ledger_id
        assert ".0.data at offset" in failed.error
        assert list(committed.ledger_ids) == [each.ledger_id for each in pending[1:]]
        assert generations(node)[bad.ledger_id] == 0
        # The damaged one is met when it is due, and the others come.
        before = len(inbox.received)
        await asyncio.sleep(LATER_MS / 1000 + 1)
        found = inbox.poll()
        assert len(inbox.received) == before + len(found)
        assert ids(found) >= set(pending[1:])
        assert bad not in ids(found)
        assert inbox.subscription.counters.damaged_messages == 1
        assert node.failures == []
        await node.stop()

    run_sim(scenario, 1)


def test_a_backup_holds_a_damaged_message_as_it_is_and_the_audit_of_it_names_the_message() -> None:
    async def scenario(_: SimLoop, clock: SimClock) -> None:
        node = Node(MemVfs(), clock, config()).open()
        pending = (await fill(node, 2))[0]
        bad = pending[1]
        await damage(node, bad, TOPIC)
        backup = await node.broker.backups.create("nightly")
        folder = f"{DATA_DIR}/backups/{backup.name}"
        ledger = node.topic(TOPIC).log.find(bad.ledger_id)
        assert ledger is not None
        files = node.vfs.snapshot()
        path = ledger.name.path("data")
        assert files[f"{folder}/{path.removeprefix(DATA_DIR + '/')}"] == files[path]
        plan = plan_audit(Folder(folder, "backup", node.vfs), (), Level.DEEP)
        found = [each.finding for unit in plan.units for each in audit_unit(unit, node.vfs).findings]
        (named,) = [each for each in found if each.kind is Kind.CHECKSUM]
        assert named.ledger_id == bad.ledger_id
        assert f"entry {bad.entry_id}: the stored message is damaged" in named.what
        assert node.failures == []
        await node.stop()

    run_sim(scenario, 1)
