"""The promises as plain state: a message, a subscription, and a message for a subscription.

What docs/guarantees.md says of deliveries, leases, acknowledgements, cancels and moves is said here once. State machines
(`tests/model`), the simulation (`tests/sim`) and histories of crashes (`tests/crash`) tell it what was asked, answered,
recorded and sent. Each keeps for itself what it alone knows: calls under way, clocks that step, the fate of a journal.

What a client cannot know has two bounds, `low` and `high`. Records leave no doubt: there both are the same.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from broker.model import Position
from broker.subscriptions.types import SubscriptionType

Id = TypeVar("Id")


class Violation(AssertionError):
    """A promise was broken. `promise` names it."""

    def __init__(self, promise: str, what: str) -> None:
        super().__init__(f"{promise}: {what}")
        self.promise = promise


def require(condition: bool, promise: str, what: str) -> None:
    if not condition:
        raise Violation(promise, what)


def honors_delay(type_: int, honor_delay: bool | None) -> bool:
    """Return whether subscriptions of a type wait for delivery times."""
    return type_ in (SubscriptionType.SHARED, SubscriptionType.KEY_SHARED) or bool(honor_delay)


@dataclass(slots=True)
class Message:
    """A stored message. Times are those of the broker's wall clock, in milliseconds."""

    position: Position
    content: bytes  # its payload, or the frame that holds it
    publish_ms: int = 0
    due_ms: int = 0  # effective; 0: at once
    ttl_ms: int = 0  # 0: it never expires
    key: str = ""
    revision: int = 0
    cancelled_ns: int | None = None  # when that was confirmed, monotonic
    may_have_expired: bool = False  # a clock that steps back does not undo it
    may_have_expired_before: bool = False  # under an earlier time: for those who ignore times

    @property
    def is_cancelled(self) -> bool:
        return self.cancelled_ns is not None

    @property
    def shown_ms(self) -> int:
        """The delivery time that consumers are shown."""
        return max(self.publish_ms, self.due_ms)

    @property
    def expire_ms(self) -> int:
        """The time from which it is not sent: the TTL counts from the later of publish and due time. 0: never."""
        return self.shown_ms + self.ttl_ms if self.ttl_ms else 0

    def since_ms(self, *, honors_delay: bool) -> int:
        """Return since when it is ready."""
        return self.shown_ms if honors_delay else self.publish_ms

    def move(self, due_ms: int) -> None:
        """Give it another time, from which its TTL counts."""
        self.due_ms = due_ms
        self.revision += 1
        self.may_have_expired_before |= self.may_have_expired
        self.may_have_expired = False

    def note_time(self, now_ms: int) -> None:
        """Take note of the wall clock."""
        if self.expire_ms and self.expire_ms <= now_ms and not self.is_cancelled:
            self.may_have_expired = True


@dataclass(slots=True)
class Entry:
    """A message for a subscription that owes it or has settled it."""

    message: Message = field(compare=False)
    settled_ns: int | None = None  # when that was confirmed, monotonic
    acking: int = 0  # acknowledgements under way
    perhaps_acked: bool = False  # by one that was never answered
    holder: Any = None  # the consumer that it was sent to
    deadline_ns: int = 0  # when that one's lease ends
    sent_count: int = 0
    # How often it came back: as this process knows, and as every later one will know.
    returns_low: int = 0
    returns_high: int = 0
    returns_durable: int = 0
    # When it may be sent again: before that it is too early; after that nothing holds it up.
    wait_low_ms: int = 0
    wait_high_ms: int = 0
    is_wait_durable: bool = False
    reason: str = ""  # the last one of a nack

    @property
    def is_settled(self) -> bool:
        return self.settled_ns is not None

    def is_held(self, now_ns: int) -> bool:
        return self.holder is not None and now_ns < self.deadline_ns

    def settle(self, now_ns: int) -> None:
        """Never send it again: it was acknowledged, cancelled, expired, skipped or became a dead letter."""
        self.settled_ns = now_ns
        self.holder = None
        self.returns_low = self.returns_high = self.returns_durable = 0
        self.wait_low_ms = self.wait_high_ms = 0
        self.is_wait_durable = False
        self.reason = ""

    def give_back(self, *, certain: bool = True, durable: bool = False) -> None:
        """Send it again, as another attempt: after a nack, at the end of a lease, or if its consumer is lost.

        `certain`: it was not acknowledged meanwhile. `durable`: all that was recorded so far is on disk.
        """
        self.holder = None
        self.returns_low += certain
        self.returns_high += 1
        self.wait_low_ms = 0
        if durable:
            self.make_durable()

    def hand_back(self, now_ns: int) -> None:
        """Send it again, unbegun: that counts nothing, unless its lease had ended before."""
        self.returns_high += self.holder is not None and now_ns >= self.deadline_ns
        self.holder = None
        self.wait_low_ms = 0

    def wait(self, low_ms: int, high_ms: int, *, certain: bool = True, durable: bool = False) -> None:
        """Do not send it before that: the delay of a nack, or the back-off."""
        self.wait_high_ms = high_ms if durable else max(self.wait_high_ms, high_ms)
        self.is_wait_durable = durable
        if certain:
            self.wait_low_ms = low_ms

    def make_durable(self) -> None:
        """Keep how often it came back: that is on disk, and a crash does not undo it."""
        self.returns_durable = self.returns_low

    def note_time(self, now_ms: int) -> None:
        """Take note of the wall clock: a wait that ended has ended, though the clock steps back."""
        if self.wait_low_ms <= now_ms:
            self.wait_low_ms = 0

    def end_life(self, now_ns: int, *, cleanly: bool) -> None:
        """The broker ended: what was out is owed as before, and what was not on disk may be forgotten."""
        if self.acking:
            self.acking, self.perhaps_acked = 0, True
        if self.holder is not None and now_ns >= self.deadline_ns:
            self.returns_high += 1  # perhaps it came back before the end
        self.holder = None
        if cleanly:
            self.make_durable()
        elif not self.is_wait_durable:
            self.wait_low_ms = 0
        self.returns_low = self.returns_durable


@dataclass(slots=True)
class Subscription(Generic[Id]):
    """A subscription, and the messages from its start on."""

    name: str
    type: int = SubscriptionType.SHARED
    honors_delay: bool = True
    start: Position = Position(0, 0)
    entries: dict[Id, Entry] = field(default_factory=dict)
    open: dict[Id, Entry] = field(default_factory=dict, compare=False)  # of these, what is not settled
    paused_ns: int | None = None  # since when, monotonic
    last_of_key: dict[str, Position] = field(default_factory=dict, compare=False)

    def add(self, id_: Id, message: Message) -> None:
        """Owe it a message, unless that was cancelled."""
        self.entries[id_] = self.open[id_] = Entry(message)
        if message.cancelled_ns is not None:
            self.settle(id_, message.cancelled_ns)

    def forget(self, id_: Id) -> None:
        """Owe it nothing of a message that was never stored, or is gone."""
        self.entries.pop(id_, None)
        self.open.pop(id_, None)

    def settle(self, id_: Id, now_ns: int) -> None:
        """Never send it a message again; the first time counts."""
        if (entry := self.open.pop(id_, None)) is not None:
            entry.settle(now_ns)

    def seek(self, start: Position, messages: dict[Id, Message]) -> None:
        """Owe it all from a position on, with attempts counted anew; leases end."""
        self.start = start
        self.entries.clear()
        self.open.clear()
        self.last_of_key.clear()
        for id_, message in messages.items():
            if message.position >= start:
                self.add(id_, message)

    def check_sent(self, entry: Entry, sent_ms: int, sent_ns: int, shown_ms: int | None = None) -> None:
        """Check that a message may be sent then, to whomever; times are those of the moment it was."""
        message, what = entry.message, f"{self} {entry.message.position}"
        if message.is_cancelled:
            require(not self.honors_delay, "P5", f"{what} was cancelled, and came")
        if entry.settled_ns is not None:
            require(sent_ns <= entry.settled_ns, "P3", f"{what} was settled, and is back")
        if self.paused_ns is not None:
            require(sent_ns <= self.paused_ns, "pause", f"{what} was sent while it was paused")
        if self.honors_delay:
            early_ms = message.due_ms - sent_ms
            require(early_ms <= 0, "P2", f"{what} is {early_ms} ms early")
        if message.revision and not self.honors_delay:
            return  # it may have come under an earlier time
        if message.expire_ms:
            late_ms = sent_ms - message.expire_ms
            require(late_ms < 0, "TTL", f"{what} expired {late_ms} ms ago")
        if shown_ms is not None:
            is_right = shown_ms == message.shown_ms
            require(is_right, "P2", f"{what}: deliver_at_ms is {shown_ms}, not {message.shown_ms}")

    def send(
        self, entry: Entry, holder: Any, attempt: int, sent_ms: int, sent_ns: int, lease_ms: int
    ) -> None:
        """Check that a message may be sent to a consumer, again if it was before, and give that one the lease."""
        what = f"{self} {entry.message.position}"
        if entry.holder is not None:
            left_ns = entry.deadline_ns - sent_ns
            require(left_ns <= 0, "P4", f"{what} is held for {left_ns} ns more, and sent again")
            entry.give_back(certain=not entry.acking)
        if self.type == SubscriptionType.KEY_SHARED:
            self._check_key(entry, holder, sent_ns)
        early_ms = entry.wait_low_ms - sent_ms
        require(early_ms <= 0, "nack", f"{what} comes {early_ms} ms before its nack allows")
        low, high = entry.returns_low + 1, entry.returns_high + 1
        require(low <= attempt <= high, "P4", f"{what} is attempt {attempt}, not {low} to {high}")
        entry.returns_low = entry.returns_high = entry.returns_durable = attempt - 1
        entry.holder, entry.deadline_ns = holder, sent_ns + lease_ms * 1_000_000
        entry.perhaps_acked = False
        entry.sent_count += 1

    def _check_key(self, entry: Entry, holder: Any, sent_ns: int) -> None:
        """The messages of one key are with one consumer only."""
        key = entry.message.key
        for other in self.open.values() if key else ():
            if other.message.key == key and other.holder is not holder and other.is_held(sent_ns):
                is_free = bool(other.acking or other.perhaps_acked)
                what = f"{self} {entry.message.position} has a key that another consumer has"
                require(is_free, "one consumer a key", f"{what}, with {other.message.position}")

    def check_key_order(self, entry: Entry) -> None:
        """New messages of one key that were not delayed come in their order."""
        key, position = entry.message.key, entry.message.position
        if key and not entry.message.due_ms and not entry.sent_count:
            last = self.last_of_key.get(key, position)
            require(last <= position, "key order", f"{self} {position} follows {last} of its key")
            self.last_of_key[key] = position

    def held_keys(self) -> set[str]:
        """Return the keys that may have to wait, as a consumer has them that may not be theirs any more."""
        if self.type != SubscriptionType.KEY_SHARED:
            return set()
        return {entry.message.key for entry in self.open.values() if entry.holder is not None} - {""}

    def must_have_come(self, entry: Entry, by_ms: int, by_ns: int) -> bool:
        """Return whether a message is due that nobody holds, and has been since then. In doubt, it is not.

        What has a key among `held_keys` may wait nevertheless.
        """
        message = entry.message
        if message.is_cancelled or message.may_have_expired:
            return False
        if message.may_have_expired_before and not self.honors_delay:
            return False
        if entry.is_settled or entry.acking or entry.perhaps_acked or entry.is_held(by_ns):
            return False
        return max(entry.wait_high_ms, message.due_ms if self.honors_delay else 0) <= by_ms

    def __str__(self) -> str:
        return self.name


def cancel(message: Message, id_: Id, subscriptions: Iterable[Subscription[Id]], now_ns: int) -> None:
    """Cancel a message, which settles it for everybody."""
    message.cancelled_ns = now_ns
    for subscription in subscriptions:
        subscription.settle(id_, now_ns)
