"""Faults of an in-memory file system: which operation fails, how, and how often."""

from __future__ import annotations

import errno
from dataclasses import dataclass, field
from fnmatch import fnmatchcase


@dataclass
class Fault:
    """Fail the `nth` operation from now on that matches; with `onward` every later one too."""

    kind: str  # a pattern over `Op.kind`, "open", "open_dir" (for a sync), "read" and "list_dir"
    glob: str = "*"  # over the path without its leading slash; `*` matches slashes too
    nth: int = 1
    error: int = errno.EIO
    onward: bool = False
    after_bytes: int = 0  # a write takes so many bytes before it fails
    at: int = -1  # of reads, those alone that touch this byte: a bad sector
    seen_count: int = 0
    hit_count: int = 0

    def concerns(self, kind: str, path: str) -> bool:
        return fnmatchcase(kind, self.kind) and fnmatchcase(path, self.glob)


@dataclass
class FaultPlan:
    """The faults of one file system; the first that hits decides the error."""

    faults: list[Fault] = field(default_factory=list)

    def add(self, fault: Fault) -> Fault:
        fault.glob = fault.glob.lstrip("/")
        self.faults.append(fault)
        return fault

    def clear(self) -> None:
        self.faults.clear()

    def concern(self, kind: str, path: str) -> bool:
        """Return whether a fault is planned for such an operation, now or later."""
        return any(fault.concerns(kind, path) for fault in self.faults)

    def take(self, kind: str, path: str, touched: range = range(0)) -> Fault | None:
        """Count one operation, which touches some bytes; return the fault that hits it."""
        hit = None
        for fault in self.faults:
            if fault.concerns(kind, path) and (fault.at < 0 or fault.at in touched):
                fault.seen_count += 1
                due = fault.seen_count >= fault.nth if fault.onward else fault.seen_count == fault.nth
                if due and hit is None:
                    fault.hit_count += 1
                    hit = fault
        return hit
