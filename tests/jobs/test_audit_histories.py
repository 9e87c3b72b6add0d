"""The audit of what a real broker leaves: after a life that ended well, and at every crash."""

from __future__ import annotations

import random

import pytest

from broker.delayed.check import Severity
from broker.errors import NotFound
from broker.jobs.folder import DATA_DIR as DATA_DIR_KIND
from broker.jobs.folder import Folder
from broker.jobs.journal import check_journal
from broker.jobs.plan import plan_audit
from broker.jobs.report import AuditOutcome
from broker.jobs.units import audit_unit
from broker.jobs.values import Level
from broker.testing.mem_vfs import CrashPolicy, MemVfs
from tests.harness import DATA_DIR
from tests.jobs.test_verify import lived


def audited(vfs: MemVfs) -> AuditOutcome:
    folder = Folder(DATA_DIR, DATA_DIR_KIND, vfs)
    plan = plan_audit(folder, (), Level.DEEP)
    assert plan.root is not None
    journal = check_journal(folder, plan.root, plan.images)
    return AuditOutcome(plan, journal, [audit_unit(unit, vfs) for unit in plan.units])


def test_what_a_broker_leaves_is_clean() -> None:
    outcome = audited(lived()[0])
    assert outcome.findings() == []
    assert outcome.journal.checked
    assert sum(ledger.facts.entries for result in outcome.results for ledger in result.ledgers) == 21


@pytest.mark.parametrize("policy", CrashPolicy)
def test_what_a_crash_leaves_is_no_fault(policy: CrashPolicy) -> None:
    vfs, _ = lived()
    rng = random.Random(1)
    told = 0
    for at in range(list(CrashPolicy).index(policy), vfs.op_count + 1, 16):
        crashed = vfs.crashed(at, policy, rng)
        try:
            findings = audited(crashed).findings()
        except (NotFound, AssertionError):  # it had not begun
            assert not crashed.exists(f"{DATA_DIR}/broker.manifest")
            continue
        assert [str(each) for each in findings if each.severity is not Severity.WARNING] == [], f"at {at}"
        told += bool(findings)
    assert told


def test_records_above_the_manifests_are_counted() -> None:
    vfs, moment = lived()
    outcome = audited(vfs.crashed(moment, CrashPolicy.KEEP_ALL))
    assert outcome.journal.records > 0
    assert [each for each in outcome.findings() if each.severity is not Severity.WARNING] == []
