"""Values that travel between the driver of a job and its tasks: plain ones, as JSON on the way. Pure."""

from __future__ import annotations

import enum
from dataclasses import asdict, dataclass, field

from broker.delayed.check import Finding, Kind, LedgerCounts, RowFacts, Severity, Suspect
from broker.jobs.work import Line


class Level(enum.StrEnum):
    """Depth of an audit: how much is read."""

    QUICK = "quick"  # bitmaps of buckets against rows: no times of theirs
    STANDARD = "standard"  # every index entry against the rows' times
    DEEP = "deep"  # and the rows against the stored messages


@dataclass(frozen=True, slots=True)
class Unit:
    """One piece of work: the ledgers of a topic between two ids. Units of a topic cover every id.

    The one that begins with 0 also looks at what the topic has beside ledgers.
    """

    folder: str
    topic_id: int
    topic: str
    first_ledger_id: int
    last_ledger_id: int
    weight: int  # rows and index entries, about
    level: Level
    sample: float = 1.0  # of the blocks of rows that `deep` reads
    seed: int = 0  # which blocks these are

    @property
    def is_first(self) -> bool:
        return self.first_ledger_id == 0

    def to_line(self) -> Line:
        return asdict(self)

    @classmethod
    def from_line(cls, line: Line) -> Unit:
        return cls(**{**line, "level": Level(line["level"])})


@dataclass(frozen=True, slots=True)
class TopicFinding:
    """A finding, and whose it is."""

    topic: str  # empty: of the whole folder
    finding: Finding
    path: str = ""

    @property
    def severity(self) -> Severity:
        return self.finding.kind.severity

    def __str__(self) -> str:
        where = f" (topic {self.topic})" if self.topic else ""
        path = f" ({self.path})" if self.path and self.path not in self.finding.what else ""
        return f"{self.finding}{path}{where}"

    def to_line(self) -> Line:
        finding = self.finding
        return {
            "topic": self.topic,
            "kind": finding.kind.value,
            "severity": self.severity.value,
            "what": finding.what,
            "count": finding.count,
            "ledger_id": finding.ledger_id,
            "bucket_id": finding.bucket_id,
            "segment": finding.segment,
            "path": self.path,
            "suspects": [suspect._asdict() for suspect in finding.suspects],
        }

    @classmethod
    def from_line(cls, line: Line) -> TopicFinding:
        suspects = tuple(
            Suspect(
                suspect["entry_id"], suspect["expected_ms"], suspect["found_ms"], tuple(suspect["bucket_ids"])
            )
            for suspect in line["suspects"]
        )
        places = (line["ledger_id"], line["bucket_id"], line["segment"])
        finding = Finding(Kind(line["kind"]), line["what"], line["count"], *places, suspects)
        return cls(line["topic"], finding, line["path"])


@dataclass(frozen=True, slots=True)
class LedgerLine:
    """Line of the report for one ledger."""

    topic: str
    facts: RowFacts
    sealed: bool
    data_bytes: int
    file_bytes: int

    def to_line(self) -> Line:
        days = sorted(self.facts.due_days.items())
        return {**asdict(self), "facts": {**asdict(self.facts), "due_days": days}}

    @classmethod
    def from_line(cls, line: Line) -> LedgerLine:
        facts = {**line["facts"], "due_days": dict(map(tuple, line["facts"]["due_days"]))}
        return cls(**{**line, "facts": RowFacts(**facts)})


@dataclass(slots=True)
class UnitResult:
    """Result of one unit."""

    topic: str
    findings: list[TopicFinding] = field(default_factory=list)
    left_out: int = 0  # findings beyond those listed
    counts: LedgerCounts = field(default_factory=LedgerCounts)
    ledgers: list[LedgerLine] = field(default_factory=list)
    bucket_count: int = 0
    bucket_bytes: int = 0
    rows_compared: int = 0  # with stored messages

    def to_line(self) -> Line:
        return {
            **{name: getattr(self, name) for name in _PLAIN},
            "findings": [finding.to_line() for finding in self.findings],
            "counts": asdict(self.counts),
            "ledgers": [ledger.to_line() for ledger in self.ledgers],
        }

    @classmethod
    def from_line(cls, line: Line) -> UnitResult:
        return cls(
            **{name: line[name] for name in _PLAIN},
            findings=[TopicFinding.from_line(finding_line) for finding_line in line["findings"]],
            counts=LedgerCounts(**line["counts"]),
            ledgers=[LedgerLine.from_line(ledger_line) for ledger_line in line["ledgers"]],
        )


_PLAIN = ("topic", "left_out", "bucket_count", "bucket_bytes", "rows_compared")
