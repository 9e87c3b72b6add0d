"""Messages that arrived, held against those that were sent. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from postdate.model import MessageId


@dataclass(frozen=True, slots=True)
class Arrival:
    """One delivery, and the consumer's clock when it was taken."""

    id: MessageId
    arrived_ms: float
    deliver_at_ms: int
    publish_ms: int
    payload: bytes


@dataclass(frozen=True, slots=True)
class Expected:
    """A message that was sent, under its id."""

    deliver_at_ms: int
    payload: bytes


@dataclass(frozen=True, slots=True)
class SubscriptionTally:
    """One subscription's result. Lateness counts from the due time, or from when the broker had the
    message where that was later."""

    arrived: int
    missing: int
    duplicated: int
    altered: int
    early: int
    out_of_order: int
    late_p50_ms: float | None
    late_p99_ms: float | None
    late_max_ms: float | None

    @property
    def good(self) -> bool:
        """Everything came, once, unchanged, and not before its time."""
        return not (self.missing or self.duplicated or self.altered or self.early)


def tally(arrivals: Sequence[Arrival], expected: Mapping[MessageId, Expected]) -> SubscriptionTally:
    seen: set[MessageId] = set()
    duplicated = altered = early = out_of_order = 0
    latest_due_ms = 0
    lateness: list[float] = []
    for arrival in arrivals:
        if arrival.id in seen:
            duplicated += 1
            continue
        seen.add(arrival.id)
        sent = expected.get(arrival.id)
        due_ms = sent.deliver_at_ms if sent else arrival.deliver_at_ms
        if sent is None or sent.payload != arrival.payload:
            altered += 1
        if arrival.arrived_ms < due_ms:
            early += 1
        if due_ms < latest_due_ms:
            out_of_order += 1
        latest_due_ms = max(latest_due_ms, due_ms)
        lateness.append(arrival.arrived_ms - max(due_ms, arrival.publish_ms))
    lateness.sort()
    return SubscriptionTally(
        arrived=len(seen),
        missing=len(expected.keys() - seen),
        duplicated=duplicated,
        altered=altered,
        early=early,
        out_of_order=out_of_order,
        late_p50_ms=percentile(lateness, 0.50),
        late_p99_ms=percentile(lateness, 0.99),
        late_max_ms=percentile(lateness, 1.0),
    )


def percentile(ordered: Sequence[float], share: float) -> float | None:
    """The nearest-rank percentile of sorted values."""
    if not ordered:
        return None
    return round(ordered[max(0, -(-len(ordered) * round(share * 1000) // 1000) - 1)], 3)
