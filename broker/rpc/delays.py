"""Delays of messages that go out again, by a nack or from the dead letters: their limit."""

from __future__ import annotations

from broker.errors import InvalidRequest
from broker.settings import HOUR_MS

DELAY_MS_MAX = 366 * 24 * HOUR_MS


def check_delay_ms(delay_ms: int, name: str, within: str = "") -> None:
    """Raise InvalidRequest unless a delay is within the limit; `within` is where its field lies in the request."""
    if not 0 <= delay_ms <= DELAY_MS_MAX:
        raise InvalidRequest(
            f"{name} must be between 0 and {DELAY_MS_MAX}, not {delay_ms}",
            field=f"{within}{name}",
            reason=f"INVALID_{name.upper()}",
        )
