"""Work of a compaction job under one lease: rewrites ledgers and merges buckets, into the lease's folder.

The core of every engine: no Spark, no network, no clock. A unit is one ledger, or the merge of the buckets. It reads
the files that `inputs` names, writes into a folder of its own, syncs, and then moves what it wrote into the lease's
folder, where the broker checks it when it is handed in. It needs no lock: its inputs never change, and what is written
follows from them alone, so a unit that runs twice, one after the other or side by side, leaves the same bytes under the
same names.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache

from broker.delayed.lent_buckets import merge_lent
from broker.errors import PostdateError
from broker.jobs.work import Line, Work
from broker.runtime.steps import InThisThread
from broker.runtime.vfs import LocalVfs, Vfs
from broker.storage.bucket_files import bucket_storage
from broker.storage.compaction_inputs import (
    INPUTS_FILE,
    CompactionInputs,
    InputLedger,
    LedgerOutput,
    Outputs,
    decode_inputs,
)
from broker.storage.layout import Layout, remove_tree
from broker.storage.sparse_writer import live_entries, open_source, write_generation

BUCKETS = 0
"""In the place of a ledger's id: the unit that merges the buckets."""


@dataclass(frozen=True, slots=True)
class RewriteUnit:
    """One ledger, or the buckets, of a lease. Folders are whole paths, as seen from where the unit runs."""

    data_dir: str
    folder: str  # the lease's
    ledger_id: int  # or BUCKETS
    weight: int  # entries

    def to_line(self) -> Line:
        return asdict(self)

    @classmethod
    def from_line(cls, line: Line) -> RewriteUnit:
        return cls(**line)


@dataclass(frozen=True, slots=True)
class RewriteResult:
    """Result of one unit. Without output and error, nothing of the ledger would go, and nothing was written."""

    folder: str
    ledger_id: int
    output: LedgerOutput | None = None
    error: str = ""

    def to_line(self) -> Line:
        return asdict(self)

    @classmethod
    def from_line(cls, line: Line) -> RewriteResult:
        output = line["output"]
        return cls(**{**line, "output": None if output is None else LedgerOutput(**output)})


def rewrite_unit(unit: RewriteUnit) -> RewriteResult:
    """Do one unit, on the disk. Blocks. Raises Corrupt for an input or output that is damaged, Unavailable, OSError."""
    inputs = _inputs_of(unit.folder)
    return asyncio.run(_rewrite(LocalVfs(), inputs, unit, secrets.token_hex(8)))


def failed_unit(unit: RewriteUnit, error: BaseException) -> RewriteResult:
    """Of a unit that could not be done."""
    what = error.message if isinstance(error, PostdateError) else f"{type(error).__name__}: {error}"
    return RewriteResult(unit.folder, unit.ledger_id, error=what)


REWRITE = Work(rewrite_unit, failed_unit, RewriteUnit.from_line, RewriteResult.from_line)


def outputs_of(results: Sequence[RewriteResult]) -> Outputs:
    """Return what a job hands in of what went well."""
    outputs = sorted(
        (result.output for result in results if result.output is not None),
        key=lambda output: output.ledger_id,
    )
    has_bucket = any(result.ledger_id == BUCKETS and not result.error for result in results)
    return Outputs(tuple(outputs), has_bucket)


async def rewrite(vfs: Vfs, data_dir: str, folder: str) -> Outputs:
    """All units of a lease, one by one, on any disk; raises what a unit raises."""
    inputs = read_inputs(vfs, folder)
    ids = [ledger.capture.ledger_id for ledger in inputs.ledgers]
    if inputs.buckets is not None:
        ids.append(BUCKETS)
    units = [RewriteUnit(data_dir, folder, ledger_id, 1) for ledger_id in ids]
    return outputs_of([await _rewrite(vfs, inputs, unit, f"{unit.ledger_id}-aside") for unit in units])


def read_inputs(vfs: Vfs, folder: str) -> CompactionInputs:
    """Return what a lease is about; raises Corrupt, OSError."""
    path = f"{folder}/{INPUTS_FILE}"
    with contextlib.closing(vfs.open(path)) as file:
        return decode_inputs(file.pread(file.size(), 0), path)


@lru_cache(maxsize=2)
def _inputs_of(folder: str) -> CompactionInputs:
    """They name all ledgers of the lease, and a process does one after the other; a folder is of one lease for ever."""
    return read_inputs(LocalVfs(), folder)


async def _rewrite(vfs: Vfs, inputs: CompactionInputs, unit: RewriteUnit, attempt: str) -> RewriteResult:
    # A name of its own: another attempt may be writing the same, and one that was cut short may have left its files.
    aside = f"{unit.folder}/{attempt}"
    vfs.make_dir(aside)
    try:
        output = None
        if unit.ledger_id == BUCKETS:
            await _merge_buckets(vfs, unit.data_dir, aside, inputs)
        else:
            ledger = next(
                candidate for candidate in inputs.ledgers if candidate.capture.ledger_id == unit.ledger_id
            )
            output = _rewrite_ledger(vfs, unit.data_dir, aside, inputs, ledger)
        for name in vfs.list_dir(aside):
            vfs.rename(f"{aside}/{name}", f"{unit.folder}/{name}")
        vfs.sync_dir(unit.folder)
        return RewriteResult(unit.folder, unit.ledger_id, output)
    finally:
        with contextlib.suppress(OSError):  # it goes with the lease's folder
            remove_tree(vfs, aside)


async def _merge_buckets(vfs: Vfs, data_dir: str, aside: str, inputs: CompactionInputs) -> None:
    assert inputs.buckets is not None
    executor = InThisThread()
    folder = Layout(data_dir).buckets(inputs.topic_id)
    storage = bucket_storage(vfs, folder, inputs.topic_id, executor)
    staged = bucket_storage(vfs, aside, inputs.topic_id, executor)
    await merge_lent(storage, staged, inputs.buckets, inputs.frontier, executor)


def _rewrite_ledger(
    vfs: Vfs, data_dir: str, folder: str, inputs: CompactionInputs, ledger: InputLedger
) -> LedgerOutput | None:
    """Write the generation of one ledger; None if nothing of it would go."""
    source_folder = Layout(data_dir).ledgers(inputs.topic_id)
    target = ledger.capture.name(folder)._replace(generation=ledger.new_generation, sparse=True, packed=False)
    with open_source(vfs, source_folder, ledger.capture, ledger.amendments) as source:
        live = live_entries(source, ledger.settled, inputs.frontier[0])
        if len(live) >= ledger.capture.row_count:
            return None
        written = write_generation(vfs, source, live, target)
    assert written.sparse is not None
    return LedgerOutput(written.ledger_id, written.data_bytes, *written.sparse)
