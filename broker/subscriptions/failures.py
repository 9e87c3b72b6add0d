"""Failures: what of a request to a subscription was not taken, and why. Pure."""

from __future__ import annotations

from typing import NamedTuple

from broker.model import Entries, Position


class Failure(NamedTuple):
    """Refusal of one id of a request: `reason` is NOT_FOUND or LEASE_LOST."""

    position: Position
    reason: str


def failures_of(entries: Entries, reason: str) -> list[Failure]:
    return [
        Failure(Position(ledger_id, entry_id), reason)
        for ledger_id, bitmap in sorted(entries.items())
        for entry_id in bitmap
    ]
