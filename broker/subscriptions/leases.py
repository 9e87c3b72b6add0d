"""Who holds what, and until when. Volatile: a restart ends every lease. Pure but for what it is told of time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from pyroaring import BitMap

from broker.model import (
    Entries,
    common_entries,
    count_entries,
    merge_entries,
    remove_entries,
    without_entries,
)


@dataclass(slots=True)
class _Grant:
    """One hand-out: these entries until this deadline, as far as they are still held."""

    deadline_ns: int
    ledger_id: int
    entries: BitMap


class Leases:
    """The messages that are out, by consumer.

    Invariants:
      L1  `leased` is the union of what the consumers hold; no entry is held by two.
      L2  Every held entry is in exactly one grant of its holder, so exactly one deadline is its own.
    """

    def __init__(self, on_end: Callable[[str], None] = lambda consumer_id: None) -> None:
        """`on_end` is told of a consumer that has just ceased to hold something, however that came about."""
        self._on_end = on_end
        self.leased: Entries = {}
        self._held: dict[str, Entries] = {}
        self._grants: dict[str, deque[_Grant]] = {}
        self._none_before_ns = (
            _NEVER_NS  # no deadline lies before this: looked at far more often than one passes
        )

    def grant(self, consumer_id: str, entries: Entries, deadline_ns: int) -> None:
        """Lease entries that nobody holds."""
        merge_entries(self.leased, entries)
        merge_entries(self._held.setdefault(consumer_id, {}), entries)
        self._none_before_ns = min(self._none_before_ns, deadline_ns)
        grants = self._grants.setdefault(consumer_id, deque())
        grants.extend(_Grant(deadline_ns, ledger_id, bitmap) for ledger_id, bitmap in entries.items())

    def held_by(self, consumer_id: str, entries: Entries) -> Entries:
        """The part of a set that this consumer holds."""
        return common_entries(entries, self._held.get(consumer_id, {}))

    def settle(self, entries: Entries) -> None:
        """End the leases of entries that are done, whoever holds them."""
        rest = common_entries(entries, self.leased)
        remove_entries(self.leased, rest)
        for consumer_id in list(self._held):
            if not rest:
                break
            mine = self.held_by(consumer_id, rest)
            if mine:
                rest = without_entries(rest, mine)
                remove_entries(self._held[consumer_id], mine)
                self._prune(consumer_id)
                self._on_end(consumer_id)

    def take_back(self, consumer_id: str, entries: Entries) -> None:
        """End this consumer's leases of entries that it holds; they may be leased again."""
        remove_entries(self.leased, entries)
        remove_entries(self._held[consumer_id], entries)
        self._ungrant(consumer_id, entries)
        self._on_end(consumer_id)

    def extend(self, consumer_id: str, entries: Entries, deadline_ns: int) -> None:
        """Give entries that this consumer holds another deadline."""
        self._ungrant(consumer_id, entries)
        self._none_before_ns = min(self._none_before_ns, deadline_ns)
        grants = self._grants.setdefault(consumer_id, deque())
        grants.extend(_Grant(deadline_ns, ledger_id, bitmap.copy()) for ledger_id, bitmap in entries.items())

    def expired(self, now_ns: int) -> list[tuple[str, Entries]]:
        """What is held beyond its deadline, by consumer. It stays held: `take_back` ends that."""
        late: list[tuple[str, Entries]] = []
        if now_ns < self._none_before_ns:
            return late
        for consumer_id, grants in self._grants.items():
            past = [grant for grant in grants if grant.deadline_ns <= now_ns]
            if not past:
                continue
            # Of what lies behind a grant that lasts longer, nothing may be held any more. Such a grant goes now:
            # its deadline would wake the dispatcher again and again, and one message that is held on and on
            # would gather them without end.
            held = self._held[consumer_id]
            entries: Entries = {}
            for grant in past:
                grant.entries = grant.entries & held.get(grant.ledger_id, _NOTHING)
                if grant.entries:
                    merge_entries(entries, {grant.ledger_id: grant.entries})
            self._grants[consumer_id] = deque(grant for grant in grants if grant.entries)
            if entries:
                late.append((consumer_id, entries))
        self._none_before_ns = min(
            (grant.deadline_ns for grants in self._grants.values() for grant in grants), default=_NEVER_NS
        )
        return late

    def next_deadline_ns(self) -> int | None:
        """The earliest deadline of anything held; None if nothing is."""
        deadlines = [
            grant.deadline_ns for grants in self._grants.values() for grant in grants if grant.entries
        ]
        return min(deadlines, default=None)

    def held(self, consumer_id: str) -> Entries:
        """All that a consumer holds."""
        return {ledger_id: bitmap.copy() for ledger_id, bitmap in self._held.get(consumer_id, {}).items()}

    def count(self) -> int:
        return count_entries(self.leased)

    def _ungrant(self, consumer_id: str, entries: Entries) -> None:
        for grant in self._grants.get(consumer_id, ()):
            if grant.ledger_id in entries:
                grant.entries = grant.entries - entries[grant.ledger_id]
        self._prune(consumer_id)

    def _prune(self, consumer_id: str) -> None:
        """Drop the oldest grants of which nothing is held; then the consumer, if it holds nothing."""
        held = self._held[consumer_id]
        grants = self._grants[consumer_id]
        while grants:
            mine = held.get(grants[0].ledger_id)
            if mine is not None and not mine.isdisjoint(grants[0].entries):
                break
            grants.popleft()
        if not held:
            del self._held[consumer_id]
            self._grants.pop(consumer_id, None)


_NOTHING = BitMap()
_NEVER_NS = 1 << 63
