"""A brake for messages that go round: taken and given back at once, uncounted, as fast as a consumer can. Pure.

A program that releases whatever it is given, or nacks under a policy without a back-off, would otherwise keep broker
and disk at work for nothing. Entries are counted over short spans, so that nothing has to be remembered of what went
out and was settled, and a restart of a whole fleet, where each worker hands back what another did, has no wait.
"""

from __future__ import annotations

from collections.abc import Iterator

from broker.model import Entries, without_entries
from broker.subscriptions.attempts import Attempts
from broker.subscriptions.giving_up import worn_out

AT_ONCE_MAX = 10
"""So often within one span an entry that was given back goes out again at once."""

SPAN_NS = 10_000_000_000

WAIT_MS = 1_000
"""Time that an entry waits beyond that: so it goes round twenty times in a span at most."""


class Brake:
    """Counts, by entry, of returns to be sent at once in the present span."""

    __slots__ = ("_began_ns", "_returns")

    def __init__(self) -> None:
        self._returns = Attempts()
        self._began_ns = 0

    def waits(self, entries: Entries, now_ns: int) -> Iterator[tuple[int, Entries]]:
        """Count entries that come back now; yields how long each part is to wait."""
        if now_ns - self._began_ns >= SPAN_NS:
            self._returns, self._began_ns = Attempts(), now_ns
        often = worn_out(entries, self._returns, AT_ONCE_MAX + 1)
        self._returns.add(entries)
        if rest := without_entries(entries, often):
            yield 0, rest
        if often:
            yield WAIT_MS, often
