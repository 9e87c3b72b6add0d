"""History of the clients of a cluster, and what it must not show: loss, haste, confirmed acks that came back, changes undone.

Every message carries a number of its own. What was answered is a promise; of what failed nothing is known, and
either outcome is right.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import NamedTuple


@dataclass
class Sent:
    """One message, as its producer knows it."""

    due_ms: int
    """Before it no consumer may get it; the later of two while a move has no answer would be too strict, so the earlier."""
    begun_s: float = 0.0
    is_answered: bool = False
    is_change_unknown: bool = False
    """A cancel of it got no answer: it may come, and may not."""
    cancelled_at: float | None = None
    """Time at which a cancel was answered with DONE."""


@dataclass
class Reader:
    """One subscription, as its consumers know it."""

    deliveries: Counter[int] = field(default_factory=Counter)
    confirmed: set[int] = field(default_factory=set)


class Gap(NamedTuple):
    """A time without an answer about a topic."""

    seconds: float
    topic: str
    end_s: float


@dataclass
class History:
    """Notes of producers, consumers and those who change what waits; complaints gather in `violations`."""

    sent: dict[int, Sent] = field(default_factory=dict)
    readers: dict[str, Reader] = field(default_factory=lambda: defaultdict(Reader))
    violations: list[str] = field(default_factory=list)
    ids: dict[str, int] = field(default_factory=dict)
    longest_gap: Gap = Gap(0.0, "", 0.0)
    longest_wait_s: float = 0.0
    """Of a producer for the answer to one message."""
    _answered_at: dict[str, float] = field(default_factory=dict)

    def begins(self, number: int, due_ms: int, now_s: float = 0.0) -> None:
        self.sent[number] = Sent(due_ms, now_s)

    def answered(self, number: int, message_id: str, now_s: float, topic: str = "") -> None:
        """A produce was answered: the message is there for good, at one position of its topic."""
        self.sent[number].is_answered = True
        self.longest_wait_s = max(self.longest_wait_s, now_s - self.sent[number].begun_s)
        place = f"{topic} {message_id}"
        if self.ids.setdefault(place, number) != number:
            self.violations.append(f"{place} was answered for {self.ids[place]} and for {number}")
        if topic in self._answered_at:
            gap = Gap(now_s - self._answered_at[topic], topic, now_s)
            self.longest_gap = max(self.longest_gap, gap)
        self._answered_at[topic] = now_s

    def moves(self, number: int, due_ms: int) -> None:
        """A move is asked for: until it is answered either time may hold."""
        self.sent[number].due_ms = min(self.sent[number].due_ms, due_ms)

    def moved(self, number: int, due_ms: int) -> None:
        """A move was answered with DONE."""
        self.sent[number].due_ms = due_ms

    def cancels(self, number: int) -> None:
        self.sent[number].is_change_unknown = True

    def cancelled(self, number: int, now_s: float) -> None:
        """A cancel was answered with DONE."""
        self.sent[number].cancelled_at = now_s

    def not_cancelled(self, number: int) -> None:
        """A cancel was answered, and it came too late."""
        self.sent[number].is_change_unknown = False

    def delivered(self, subscription: str, number: int, now_ms: int) -> None:
        """A consumer's program got a message."""
        reader, sent = self.readers[subscription], self.sent[number]
        reader.deliveries[number] += 1
        if now_ms < sent.due_ms:
            self.violations.append(f"{subscription}: {number} came {sent.due_ms - now_ms} ms early")
        if number in reader.confirmed:
            self.violations.append(f"{subscription}: {number} came back after its ack was confirmed")
        if sent.cancelled_at is not None:
            self.violations.append(f"{subscription}: {number} came after its cancel was answered with DONE")

    def confirmed(self, subscription: str, number: int) -> None:
        """An acknowledgement was answered."""
        self.readers[subscription].confirmed.add(number)

    def missing(self, subscription: str) -> list[int]:
        """Return what was answered, never cancelled as far as anybody knows, and never delivered."""
        deliveries = self.readers[subscription].deliveries
        return [
            number
            for number, sent in self.sent.items()
            if sent.is_answered and not sent.is_change_unknown and not deliveries[number]
        ]

    def facts(self, subscriptions: tuple[str, ...]) -> dict[str, object]:
        """Return the counts of a run."""
        answered = sum(sent.is_answered for sent in self.sent.values())
        return {
            "answered": answered,
            "unanswered": len(self.sent) - answered,
            "cancelled": sum(sent.cancelled_at is not None for sent in self.sent.values()),
            "delivered": {name: sum(self.readers[name].deliveries.values()) for name in subscriptions},
            "again": {
                name: sum(count - 1 for count in self.readers[name].deliveries.values())
                for name in subscriptions
            },
            "confirmed": {name: len(self.readers[name].confirmed) for name in subscriptions},
            "lost": {name: len(self.missing(name)) for name in subscriptions},
            "violations": len(self.violations),
            "longest_gap_s": round(self.longest_gap.seconds, 2),
            "longest_gap_of": self.longest_gap.topic,
            "longest_wait_s": round(self.longest_wait_s, 2),
        }
