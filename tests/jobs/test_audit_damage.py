"""No damaged byte of a small folder is overlooked, and none makes the audit raise.

A change tries some bytes, on each day others, `make test-deep` each.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from pyroaring import BitMap

from broker.delayed.check import Kind, Severity
from broker.jobs.folder import Folder
from broker.jobs.plan import plan_audit
from broker.jobs.units import audit_unit
from broker.jobs.values import Level
from broker.storage.amendments import NONE
from broker.testing.data_folder import NOW_MS, FolderWriter, StoredLedger, StoredSubscription
from broker.testing.mem_vfs import MemVfs
from tests.depth import at_depth, sampled

ROOT = "data"
TOPIC = f"{ROOT}/topics/1"
STRIDE = at_depth(change=15, deep=1)
FAULTS = {Severity.ERROR, Severity.INCOMPLETE}


def small_disk() -> MemVfs:
    """A sealed ledger, an amended one and one that takes entries, one bucket, one cursor: some 3 kB."""
    vfs = MemVfs()
    times = NOW_MS + np.arange(1, 5) * 1_000
    times[::4] = 0
    amendments = NONE.cancel(BitMap([2])).move(np.array([3], np.uint32), np.array([NOW_MS + 9]), 9)
    with FolderWriter(ROOT, vfs) as folder:
        ledgers = [StoredLedger(1, times), StoredLedger(2, times, amendments), StoredLedger(3, times)]
        folder.add_topic("orders", ledgers, [StoredSubscription("billing", {1: BitMap([1])})])
    return vfs


FILES = small_disk().snapshot()
NAMES = sorted(name for name in FILES if "/topics/" in name)


def found(vfs: MemVfs) -> set[Kind]:
    folder = Folder(ROOT, "data directory", vfs)
    plan = plan_audit(folder, (), Level.DEEP)
    findings = [each for unit in plan.units for each in audit_unit(unit, vfs).findings]
    return {each.finding.kind for each in findings if each.severity in FAULTS}


def damaged(name: str, content: bytes) -> MemVfs:
    vfs = small_disk()
    file = vfs.open(name)
    file.truncate(0)
    file.pwrite([content], 0)
    return vfs


def flips(content: bytes) -> Iterator[bytes]:
    for offset in sampled(range(len(content)), STRIDE):
        changed = bytearray(content)
        changed[offset] ^= 1 << offset % 8
        yield bytes(changed)


def test_the_folder_is_clean() -> None:
    assert found(small_disk()) == set()


@pytest.mark.parametrize("name", NAMES)
def test_every_flipped_bit_is_found(name: str) -> None:
    assert [at for at, content in enumerate(flips(FILES[name])) if not found(damaged(name, content))] == []


@pytest.mark.parametrize("name", NAMES)
def test_every_cut_is_found(name: str) -> None:
    content = FILES[name]
    assert [
        end for end in sampled(range(len(content)), STRIDE) if not found(damaged(name, content[:end]))
    ] == []
