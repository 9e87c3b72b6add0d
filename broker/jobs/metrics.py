"""The outcome of an audit for Prometheus: a file for the node exporter's textfile collector, or a Pushgateway.

`postdate_audit_last_success_timestamp_seconds` is left as it was by a run that did not end well, so that an alert on
its age needs no other condition.
"""

from __future__ import annotations

import re
from datetime import datetime
from pathlib import Path

from prometheus_client import CollectorRegistry, Gauge, generate_latest, pushadd_to_gateway

from broker.jobs.report import CLEAN, WARNINGS, write_whole
from broker.jobs.work import Line

_LAST_SUCCESS = "postdate_audit_last_success_timestamp_seconds"
_JOB = "postdate_audit"


def write_textfile(name: str, report: Line) -> None:
    """Replace a textfile. The time of the last success is carried over from the one that was there."""
    path = Path(name)
    registry = _registry(report, _previous_success(path))
    write_whole(path, generate_latest(registry))
    path.chmod(0o644)  # the exporter runs as somebody else


def push(gateway: str, report: Line) -> None:
    """Add to what a Pushgateway has of this job; raises OSError if it cannot be reached."""
    pushadd_to_gateway(gateway, job=_JOB, registry=_registry(report, None))


def _registry(report: Line, previous_success: float | None) -> CollectorRegistry:
    registry = CollectorRegistry()

    def gauge(name: str, help_text: str, value: float) -> None:
        Gauge(name, help_text, registry=registry).set(value)

    started = datetime.fromisoformat(report["started_at"]).timestamp()
    ended = started + report["start_up_seconds"] + report["seconds"]
    totals = report["totals"]
    gauge("postdate_audit_last_run_timestamp_seconds", "When the last audit ended.", ended)
    gauge(
        "postdate_audit_exit_code",
        "Exit code of the last audit: 0 clean, 1 warnings, 2 findings, 3 incomplete.",
        report["exit_code"],
    )
    gauge(
        "postdate_audit_duration_seconds",
        "How long the last audit took, without its start-up.",
        report["seconds"],
    )
    gauge(
        "postdate_audit_pending_messages",
        "Pending messages that the last audit counted.",
        totals.get("pending", 0),
    )
    gauge(
        "postdate_audit_index_entries",
        "Index entries that the last audit looked at.",
        totals.get("index_entries", 0),
    )
    kinds = Gauge(
        "postdate_audit_findings", "Findings of the last audit, by kind.", ["kind"], registry=registry
    )
    for kind, counts in report["kinds"].items():
        kinds.labels(kind=kind).set(counts["findings"])
    success = ended if report["exit_code"] in (CLEAN, WARNINGS) else previous_success
    if success is not None:
        gauge(_LAST_SUCCESS, "When the last audit without integrity findings ended.", success)
    return registry


def _previous_success(path: Path) -> float | None:
    try:
        match = re.search(rf"^{_LAST_SUCCESS} (\S+)$", path.read_text(), re.MULTILINE)
    except OSError:
        return None
    return float(match[1]) if match else None
