"""The report of an audit: what it says, and the files it stands in. Counts are exact, lists are not always whole.

    DIR/findings.parquet  every finding that the units listed
    DIR/report.html       one page to look at
    DIR/report.json       schema-versioned; written last, so that a whole run left it

Each file is replaced in one step: a run that dies leaves the report of the one before.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path

from broker.delayed.check import Finding, Kind, LedgerCounts, Severity
from broker.jobs.journal import JournalResult
from broker.jobs.plan import Plan
from broker.jobs.values import TopicFinding, UnitResult
from broker.jobs.work import Line
from broker.runtime.clock import iso_time

SCHEMA = "postdate.audit"
SCHEMA_VERSION = 1
FINDINGS_LISTED = 1_000
LEDGERS_LISTED = 1_000

CLEAN, WARNINGS, FINDINGS, INCOMPLETE, ALREADY_RUNNING = range(5)
"""Exit codes."""

_OUTCOMES = {CLEAN: "clean", WARNINGS: "warnings", FINDINGS: "findings", INCOMPLETE: "incomplete"}
_ORDER = {Severity.ERROR: 0, Severity.INCOMPLETE: 1, Severity.WARNING: 2}
_STALE_RATIO = 0.5
_STALE_ENTRIES_MIN = 100_000  # a bucket or two: less is not worth a merge


@dataclass(frozen=True, slots=True)
class RunFacts:
    """Facts of a run: what was asked for, and how it went."""

    run_id: str
    version: str
    folder: str
    folder_kind: str
    unused_shards: Sequence[int]
    """Shards in which nothing was ever stored."""
    level: str
    sample: float
    engine: str
    started_ms: int
    start_up_seconds: float
    seconds: float


@dataclass(slots=True)
class AuditOutcome:
    """Everything that a run found out."""

    plan: Plan
    journal: JournalResult
    results: list[UnitResult] = field(default_factory=list)
    folders: Mapping[str, str] = field(default_factory=dict)
    """Of several shards: the folder of each topic, which is named by findings that name no path of their own."""

    def findings(self) -> list[TopicFinding]:
        """All that are listed, the worst first."""
        findings = [*self.plan.findings, *self.journal.findings]
        findings += [finding for result in self.results for finding in result.findings]
        findings += _stale_findings(self.results)
        findings = [
            finding if finding.path else replace(finding, path=self.folders.get(finding.topic, ""))
            for finding in findings
        ]
        return sorted(findings, key=lambda finding: (_ORDER[finding.severity], finding.topic))


def exit_code(findings: Iterable[TopicFinding]) -> int:
    """Damage is told before what could not be looked at: both are in the report."""
    severities = {finding.severity for finding in findings}
    if Severity.ERROR in severities:
        return FINDINGS
    if Severity.INCOMPLETE in severities:
        return INCOMPLETE
    return WARNINGS if severities else CLEAN


def build_report(run: RunFacts, outcome: AuditOutcome) -> Line:
    """The whole report as JSON has it. Pure."""
    findings = outcome.findings()
    code = exit_code(findings)
    root = outcome.plan.root
    topics = _topics(outcome)
    kinds: dict[str, Counter[str]] = {}
    for finding in findings:
        kinds.setdefault(finding.finding.kind.value, Counter()).update(
            findings=1, entries=finding.finding.count
        )
    days: Counter[int] = Counter()
    for result in outcome.results:
        for ledger in result.ledgers:
            days.update(ledger.facts.due_days)
    return {
        "schema": SCHEMA,
        "schema_version": SCHEMA_VERSION,
        "outcome": _OUTCOMES[code],
        "exit_code": code,
        "run_id": run.run_id,
        "version": run.version,
        "folder": run.folder,
        "folder_kind": run.folder_kind,
        "unused_shards": list(run.unused_shards),
        "level": run.level,
        "sample": run.sample,
        "engine": run.engine,
        "started_at": iso_time(run.started_ms),
        "start_up_seconds": round(run.start_up_seconds, 3),
        "seconds": round(run.seconds, 3),
        "broker_id": root.broker_id if root else None,
        "checkpoint_lsn": root.checkpoint_lsn if root else None,
        "stored_at": iso_time(root.last_alive_ms) if root else None,
        "journal": {
            "checked": outcome.journal.checked,
            "records": outcome.journal.records,
            "messages": outcome.journal.messages,
            "last_lsn": outcome.journal.last_lsn,
        },
        "totals": _totals(topics),
        "finding_count": len(findings) + _left_out(outcome),
        "findings_listed": min(len(findings), FINDINGS_LISTED),
        "kinds": {kind: dict(counts) for kind, counts in sorted(kinds.items())},
        "findings": [finding.to_line() for finding in findings[:FINDINGS_LISTED]],
        "topics": topics,
        "ledgers": _ledgers(outcome.results),
        "pending_by_day": {
            datetime.fromtimestamp(day * 86_400, UTC).date().isoformat(): count
            for day, count in sorted(days.items())
            if day < _LAST_DAY
        },
        "pending_later": sum(count for day, count in days.items() if day >= _LAST_DAY),
    }


_LAST_DAY = 2_932_896  # the end of the year 9999, where dates end


def write_whole(path: Path, content: bytes) -> None:
    """Replace a file in one durable step."""
    aside = path.with_name(path.name + ".new")
    with open(aside, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    aside.replace(path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def encode_report(report: Line) -> bytes:
    return json.dumps(report, indent=1).encode() + b"\n"


def encode_findings(findings: Sequence[TopicFinding]) -> bytes | None:
    """All findings as a Parquet file; None where pyarrow is not installed."""
    try:
        import pyarrow as pa  # noqa: PLC0415 - comes with Spark, and the inline engine does without
        import pyarrow.parquet as pq  # noqa: PLC0415
    except ImportError:
        return None
    suspect = pa.struct(
        [
            ("entry_id", pa.int64()),
            ("expected_ms", pa.int64()),
            ("found_ms", pa.int64()),
            ("bucket_ids", pa.list_(pa.int64())),
        ]
    )
    numbers = [(name, pa.int64()) for name in ("count", "ledger_id", "bucket_id", "segment")]
    texts = [(name, pa.string()) for name in ("topic", "kind", "severity", "what", "path")]
    schema = pa.schema([*texts, *numbers, ("suspects", pa.list_(suspect))])
    table = pa.Table.from_pylist([finding.to_line() for finding in findings], schema=schema)
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink)
    return bytes(sink.getvalue())


def _left_out(outcome: AuditOutcome) -> int:
    return outcome.journal.left_out + sum(result.left_out for result in outcome.results)


def _topics(outcome: AuditOutcome) -> list[Line]:
    by_topic: dict[str, list[UnitResult]] = {}
    for result in outcome.results:
        by_topic.setdefault(result.topic, []).append(result)
    return [_topic(name, results) for name, results in sorted(by_topic.items())]


def _topic(name: str, results: Sequence[UnitResult]) -> Line:
    counts = sum((result.counts for result in results), LedgerCounts())
    ledgers = [ledger for result in results for ledger in result.ledgers]
    return {
        "topic": name,
        "ledgers": len(ledgers),
        "messages": sum(ledger.facts.entries for ledger in ledgers),
        "live": sum(ledger.facts.live for ledger in ledgers),
        "pending": sum(ledger.facts.pending for ledger in ledgers),
        "buckets": sum(result.bucket_count for result in results),
        "index_entries": counts.entries,
        "index_owed": counts.pending,
        "index_stale": counts.stale,
        "index_settled": counts.settled,
        "stale_ratio": round(max(counts.entries - counts.pending, 0) / max(counts.entries, 1), 4),
        "ledger_bytes": sum(ledger.file_bytes for ledger in ledgers),
        "bucket_bytes": sum(result.bucket_bytes for result in results),
        "rows_compared": sum(result.rows_compared for result in results),
        "findings": sum(len(result.findings) + result.left_out for result in results),
    }


def _totals(topics: Sequence[Line]) -> Line:
    names = [name for name, value in (topics[0] if topics else {}).items() if isinstance(value, int)]
    return {"topics": len(topics)} | {name: sum(topic[name] for topic in topics) for name in names}


def _ledgers(results: Sequence[UnitResult]) -> list[Line]:
    """The ledgers with the most bytes that are of no use."""
    lines: list[Line] = [
        {
            "topic": ledger.topic,
            "ledger_id": ledger.facts.ledger_id,
            "sealed": ledger.sealed,
            "messages": ledger.facts.entries,
            "live": ledger.facts.live,
            "pending": ledger.facts.pending,
            "bytes": ledger.file_bytes,
            "last_due": iso_time(ledger.facts.last_due_ms)
            if 0 < ledger.facts.last_due_ms < _ISO_MS_MAX
            else None,
        }
        for result in results
        for ledger in result.ledgers
    ]
    lines.sort(key=lambda line: -line["bytes"] * (1 - line["live"] / max(line["messages"], 1)))
    return sorted(lines[:LEDGERS_LISTED], key=lambda line: (line["topic"], line["ledger_id"]))


_ISO_MS_MAX = _LAST_DAY * 86_400_000


def _stale_findings(results: Sequence[UnitResult]) -> list[TopicFinding]:
    by_topic: dict[str, LedgerCounts] = {}
    for result in results:
        by_topic[result.topic] = by_topic.get(result.topic, LedgerCounts()) + result.counts
    stale = []
    for topic, counts in by_topic.items():
        useless = counts.entries - counts.pending
        if useless >= _STALE_ENTRIES_MIN and useless >= _STALE_RATIO * counts.entries:
            what = f"{useless} of {counts.entries} index entries are of no use any more"
            stale.append(TopicFinding(topic, Finding(Kind.STALE, what, useless)))
    return stale
