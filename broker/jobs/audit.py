"""The audit: plan, units, findings, report.

1  hold the folder still, and the report's folder: one run at a time writes there
2  read the manifests, cut the work into units
3  run them on an engine; each confirms what it finds by a second read
4  follow the end of the journal
5  write findings, page, metrics, and the report last
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from broker.cluster.stores import is_store_url
from broker.errors import NotFound
from broker.jobs.engine import Engine, Tell
from broker.jobs.folder import Folder, open_folders
from broker.jobs.journal import JournalResult, check_journal
from broker.jobs.page import render_page
from broker.jobs.plan import Plan, plan_audit
from broker.jobs.report import (
    AuditOutcome,
    RunFacts,
    build_report,
    encode_findings,
    encode_report,
    write_whole,
)
from broker.jobs.units import AUDIT
from broker.jobs.values import Level
from broker.jobs.work import Line

REPORT, FINDINGS_FILE, PAGE = "report.json", "findings.parquet", "report.html"


class AuditRunning(Exception):
    """Another audit writes to the same report."""


@dataclass(frozen=True, slots=True)
class AuditRequest:
    """Options of an audit: what to audit, and how."""

    folder: str
    level: Level = Level.STANDARD
    topics: Collection[str] = ()
    sample: float = 1.0
    report_dir: str | None = None


def run_audit(request: AuditRequest, engine: Engine, tell: Tell = lambda done, total: None) -> Line:
    """Audit a folder; returns the report. Blocks.

    Raises NotFound for a folder or a topic that is not there, Fenced if somebody else is at work there, AuditRunning
    if another audit writes to the same report, OSError if the report cannot be written.
    """
    if not request.folder:  # what a command printed nothing into; the current folder is never meant
        raise NotFound("no folder was named")
    with contextlib.ExitStack() as held:
        if request.report_dir is not None:
            held.enter_context(_sole_writer(Path(request.report_dir)))
        folders = held.enter_context(open_folders(_absolute(request.folder)))
        started_ms = time.time_ns() // 1_000_000
        begun = time.monotonic()
        held.callback(engine.stop)
        engine.start()
        ready = time.monotonic()
        outcome = _check(request, folders, engine, tell)
        done = time.monotonic()
    shard = folders[0].shard
    run = RunFacts(
        run_id=secrets.token_hex(8),
        version=_version(),
        folder=folders[0].whole or folders[0].path,
        folder_kind=folders[0].kind,
        unused_shards=sorted({*range(shard.shards)} - {folder.shard.number for folder in folders}),
        level=request.level.value,
        sample=request.sample,
        engine=engine.name,
        started_ms=started_ms,
        start_up_seconds=ready - begun,
        seconds=done - ready,
    )
    report = build_report(run, outcome)
    if request.report_dir is not None:
        _write(Path(request.report_dir), report, outcome)
    return report


def _absolute(folder: str) -> str:
    return folder if is_store_url(folder) else os.path.abspath(folder)


def _check(request: AuditRequest, folders: Sequence[Folder], engine: Engine, tell: Tell) -> AuditOutcome:
    seed = secrets.randbits(32)  # another sample each night
    for topic in request.topics:
        if not any(folder.shard.holds(topic) for folder in folders):
            raise NotFound(f"There is no topic {topic!r}: nothing was ever stored in its shard")
    parts = [_plan(request, folder, seed) for folder in folders]
    outcome = _merge_parts([part for part in parts if part is not None])
    for results in engine.run(AUDIT, outcome.plan.units, tell):
        outcome.results += results
    if folders[0].shard.shards > 1:
        outcome.folders = {unit.topic: unit.folder for unit in outcome.plan.units}
    outcome.results.sort(key=lambda result: result.topic)
    return outcome


def _plan(request: AuditRequest, folder: Folder, seed: int) -> AuditOutcome | None:
    """Return what is known of a folder before its units are checked; None if nothing of it is asked for."""
    topics = [topic for topic in request.topics if folder.shard.holds(topic)]
    if request.topics and not topics:
        return None
    plan = plan_audit(folder, topics, request.level, request.sample, seed)
    journal = JournalResult()
    # Records of a topic that is not looked at would seem to continue nothing.
    if plan.root is not None and len(plan.images) == len(plan.root.topics):
        journal = check_journal(folder, plan.root, plan.images)
    return AuditOutcome(plan, journal)


def _merge_parts(parts: Sequence[AuditOutcome]) -> AuditOutcome:
    """Return what is known of all shards; the path of a finding says which one it is of."""
    if len(parts) == 1:
        return parts[0]
    plans, journals = [part.plan for part in parts], [part.journal for part in parts]
    plan = Plan(
        None,
        [image for plan in plans for image in plan.images],
        [unit for plan in plans for unit in plan.units],
        [finding for plan in plans for finding in plan.findings],
    )
    journal = JournalResult(
        checked=all(journal.checked for journal in journals),
        records=sum(journal.records for journal in journals),
        messages=sum(journal.messages for journal in journals),
        findings=[finding for journal in journals for finding in journal.findings],
        left_out=sum(journal.left_out for journal in journals),
    )
    return AuditOutcome(plan, journal)


def _write(folder: Path, report: Line, outcome: AuditOutcome) -> None:
    findings = encode_findings(outcome.findings())
    report["findings_file"] = FINDINGS_FILE if findings is not None else None
    if findings is not None:
        write_whole(folder / FINDINGS_FILE, findings)
    write_whole(folder / PAGE, render_page(report).encode())
    write_whole(folder / REPORT, encode_report(report))


def _version() -> str:
    try:
        return version("postdate")
    except PackageNotFoundError:  # run from a checkout that is not installed
        return "unknown"


@contextlib.contextmanager
def _sole_writer(folder: Path) -> Iterator[None]:
    """Hold the report's folder against another run."""
    folder.mkdir(parents=True, exist_ok=True)
    fd = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise AuditRunning(f"Another audit is writing its report to {str(folder)!r}") from None
        yield
    finally:
        os.close(fd)
