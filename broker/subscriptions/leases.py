"""Leases: which consumer holds which entries, and until when. In memory only: a restart ends every lease. Callers pass
the time in."""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter
from typing import NamedTuple

from pyroaring import BitMap

from broker.model import (
    Entries,
    common_entries,
    count_entries,
    merge_entries,
    remove_entries,
    without_entries,
)
from broker.subscriptions.entry_time_runs import NEVER
from broker.subscriptions.entry_times import EntryTimes

_DUE_ROWS = 1 << 17
"""So many deadlines that passed are looked at in one step."""
_NOTHING = BitMap()
_GRANTS_MAX = 4_096
"""So many grants are kept as they came; of the first ones beyond, what is still held has its deadline row by row."""


def lease_end_ns(from_ns: int, lease_ms: int) -> int:
    """Return when a lease ends that is counted from a moment of the monotonic clock: the rule, for whoever needs it."""
    return from_ns + lease_ms * 1_000_000


class MessageLease(NamedTuple):
    """Holder of an entry, and the end of its lease on the monotonic clock; 0: it is over."""

    consumer_id: str
    deadline_ns: int


@dataclass(frozen=True, slots=True)
class _Grant:
    """Entries handed out together, until one deadline."""

    deadline_ns: int
    entries: Entries


class Leases:
    """The messages that are out, by consumer.

    Most entries are settled soon, under the deadline that they were handed out with, so the last grants are kept as
    they came. What is given another deadline, or taken back, is in `_outdated` while a grant still names it.

    Invariants:
      LEASE-1  `leased` is the union of what the consumers hold; no entry is held by two.
      LEASE-2  Every held entry has exactly one deadline, the last one that it was given: of the grant that names it,
          if it is not outdated, or in `_deadlines`, or it has passed and the entry is in `_late`.
      LEASE-3  No deadline of a held entry lies before `_none_before_ns`.
      LEASE-4  An entry is named by one grant at most.
    """

    __slots__ = (
        "_deadlines",
        "_grants",
        "_held",
        "_late",
        "_none_before_ns",
        "_on_end",
        "_outdated",
        "leased",
    )

    def __init__(self, on_end: Callable[[str], None] = lambda consumer_id: None) -> None:
        """`on_end` is told whose leases ended."""
        self._on_end = on_end
        self.leased: Entries = {}
        self._held: dict[str, Entries] = {}
        self._grants: list[_Grant] = []  # by deadline
        self._outdated: Entries = {}  # may name more
        self._deadlines = EntryTimes()
        self._late: Entries = {}  # found to be late, and held all the same
        self._none_before_ns = NEVER  # looked at far more often than a deadline passes

    def grant(self, consumer_id: str, entries: Entries, deadline_ns: int) -> None:
        """Lease entries that nobody holds."""
        merge_entries(self.leased, entries)
        merge_entries(self._held.setdefault(consumer_id, {}), entries)
        self._none_before_ns = min(self._none_before_ns, deadline_ns)
        if self._outdated and (again := common_entries(entries, self._outdated)):
            self._deadlines.put(deadline_ns, again)
            entries = without_entries(entries, again)
        if entries:
            insort(self._grants, _Grant(deadline_ns, entries), key=attrgetter("deadline_ns"))
        first = self._grants[0] if self._grants else None
        if first is not None and (len(self._grants) > _GRANTS_MAX or not self._alive(first)):
            self._deadlines.put(first.deadline_ns, self._end_first())

    def held_by(self, consumer_id: str, entries: Entries) -> Entries:
        """The part of a set that this consumer holds."""
        return common_entries(entries, self._held.get(consumer_id, {}))

    def settle(self, entries: Entries) -> None:
        """End the leases of entries that are done, whoever holds them."""
        rest = common_entries(entries, self.leased)
        self._forget(rest)
        for consumer_id in list(self._held):
            if not rest:
                break
            mine = self.held_by(consumer_id, rest)
            if mine:
                rest = without_entries(rest, mine)
                self._let_go(consumer_id, mine)

    def take_back(self, consumer_id: str, entries: Entries) -> None:
        """End this consumer's leases of entries that it holds; they may be leased again."""
        merge_entries(self._outdated, entries)
        self._forget(entries)
        self._let_go(consumer_id, entries)

    def extend(self, entries: Entries, deadline_ns: int) -> None:
        """Give entries that are held another deadline. Costs what it names, however much is held."""
        remove_entries(self._late, entries)
        merge_entries(self._outdated, entries)
        self._deadlines.put(deadline_ns, entries)
        self._none_before_ns = min(self._none_before_ns, deadline_ns)

    def expired(self, now_ns: int) -> list[tuple[str, Entries]]:
        """Return entries held beyond their deadline, by consumer. Each stays held: `take_back` ends that."""
        if now_ns >= self._none_before_ns:
            is_more = self._find_late(now_ns)
            first_ns = self._grants[0].deadline_ns if self._grants else NEVER
            self._none_before_ns = now_ns if is_more else min(first_ns, self._deadlines.next_time())
        if not self._late:
            return []
        by_consumer = ((consumer_id, self.held_by(consumer_id, self._late)) for consumer_id in self._held)
        return [(consumer_id, late) for consumer_id, late in by_consumer if late]

    def next_deadline_ns(self) -> int | None:
        """Return the next deadline, perhaps too early; None if nothing is held."""
        if not self.leased:
            return None
        return 0 if self._late else self._none_before_ns

    def holds(self, consumer_id: str) -> bool:
        """Return whether a consumer holds anything."""
        return any(self._held.get(consumer_id, {}).values())

    def held(self, consumer_id: str) -> Entries:
        """All that a consumer holds."""
        return {ledger_id: bitmap.copy() for ledger_id, bitmap in self._held.get(consumer_id, {}).items()}

    def of(self, ledger_id: int, entry_ids: BitMap) -> dict[int, MessageLease]:
        """Return the leases of those of some entries that are held. Costs a look at each grant and consumer."""
        rest = entry_ids & self.leased.get(ledger_id, _NOTHING)
        granted = rest - self._outdated.get(ledger_id, _NOTHING)
        deadlines = dict.fromkeys(rest & self._late.get(ledger_id, _NOTHING), 0)
        deadlines |= self._deadlines.times_of(ledger_id, rest)
        for grant in self._grants:
            some = grant.entries.get(ledger_id)
            if some is not None and not some.isdisjoint(granted):
                deadlines |= dict.fromkeys(some & granted, grant.deadline_ns)
        leases: dict[int, MessageLease] = {}
        for consumer_id, held in self._held.items():
            mine = held.get(ledger_id)
            if mine is not None and not mine.isdisjoint(rest):
                leases |= {each: MessageLease(consumer_id, deadlines[each]) for each in mine & rest}
        return leases

    def count(self) -> int:
        return count_entries(self.leased)

    def _find_late(self, now_ns: int) -> bool:
        """Move what is held beyond its deadline to `_late`; returns whether some of it was left for the next time."""
        while self._grants and (self._grants[0].deadline_ns <= now_ns or not self._alive(self._grants[0])):
            merge_entries(self._late, self._end_first())
        due, is_more = self._deadlines.find_due(now_ns, _DUE_ROWS)
        merge_entries(self._late, due)
        self._deadlines.forget(due)
        return is_more

    def _alive(self, grant: _Grant) -> Entries:
        """Return the entries whose deadline a grant still says."""
        return without_entries(common_entries(grant.entries, self.leased), self._outdated)

    def _end_first(self) -> Entries:
        """Forget the first grant; returns what had its deadline from it."""
        grant = self._grants.pop(0)
        alive = self._alive(grant)
        remove_entries(self._outdated, grant.entries)
        return alive

    def _forget(self, entries: Entries) -> None:
        remove_entries(self.leased, entries)
        remove_entries(self._late, entries)
        self._deadlines.forget(entries)
        if not self.leased:
            self._none_before_ns = NEVER

    def _let_go(self, consumer_id: str, entries: Entries) -> None:
        held = self._held[consumer_id]
        remove_entries(held, entries)
        if not held:
            del self._held[consumer_id]
        self._on_end(consumer_id)
