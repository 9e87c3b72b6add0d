"""State of the plainest model: messages, topics, subscriptions, and each message on each subscription."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from broker.model import Position
from broker.policy import SubscriptionPolicy
from tests.harness import Outgoing

if TYPE_CHECKING:
    from tests.sim.traffic import SimConsumer

Recovered = dict[int, tuple[str, dict[int, tuple[str, Position]], dict[Position, bytes]]]
"""Topics by id: name, subscriptions by id (name, start), frames by position."""


@dataclass(eq=False, slots=True)
class Message:
    """One message that a producer sent, and what the broker made of it."""

    ask: Outgoing
    frame: bytes
    batch: SentBatch
    position: Position = Position(0, 0)
    publish_ms: int = 0
    due_ms: int = 0  # 0: at once
    expire_ms: int = 0  # 0: never
    accepted_us: int = 0
    gone: bool = False  # its ledger was dropped


@dataclass(eq=False, slots=True)
class SentBatch:
    """One produce request. `state`: asked, accepted, stored, refused, lost."""

    topic_name: str
    invoked: int
    messages: list[Message] = field(default_factory=list)
    state: str = "asked"
    topic: TopicModel | None = None
    answered: int | None = None
    stored_us: int = 1 << 62  # when it was answered


@dataclass(eq=False, slots=True)
class TopicModel:
    """One life of a topic name. `state`: live, deleting, deleted."""

    topic_id: int
    name: str
    state: str = "live"
    confirmed: bool = False  # somebody was answered that it exists
    had_subscription: bool = False
    retention_ms: int = 0  # at least so long messages are kept, if that is known
    batches: list[SentBatch] = field(default_factory=list)
    by_position: dict[Position, Message] = field(default_factory=dict)
    subscriptions: list[SubscriptionModel] = field(default_factory=list)


@dataclass(eq=False, slots=True)
class Creation:
    """A subscription that was asked for."""

    topic: TopicModel
    name: str
    type: int
    honors: bool
    earliest: bool
    policy: SubscriptionPolicy
    invoked: int


@dataclass(eq=False, slots=True)
class SubscriptionModel:
    """One life of a subscription name. `state`: live, deleting, deleted."""

    topic: TopicModel
    name: str
    subscription_id: int
    type: int
    honors: bool
    start: Position
    policy: SubscriptionPolicy
    created: int
    state: str = "live"
    facts: dict[Message, Fact] = field(default_factory=dict)  # what it is owed, settled or not
    open: dict[Message, Fact] = field(default_factory=dict)  # of these, what is not settled
    attached: list[SimConsumer] = field(default_factory=list)  # oldest first
    progress_us: int = 0
    stalled_us: int | None = None  # since when something could be delivered and was not
    # The last that came in due order; of a KEY_SHARED subscription, by key.
    last_live: dict[str, tuple[int, Position]] = field(default_factory=dict)
    last_live_us: dict[str, int] = field(default_factory=dict)
    last_of_key: dict[str, Position] = field(default_factory=dict)  # that was not delayed
    catchup_count: int = 0  # how often the broker began to catch up, as far as it was noticed

    @property
    def is_live(self) -> bool:
        return self.state == "live" and self.topic.state == "live"

    def __str__(self) -> str:
        return f"{self.topic.name}#{self.topic.topic_id}/{self.name}#{self.subscription_id}"


@dataclass(eq=False, slots=True)
class Fact:
    """History of one message on one subscription."""

    holder: SimConsumer | None = None
    deadline_ns: int = 0
    lost_us: int | None = None  # when its consumer left with it
    handout_count: int = 0
    # How often it came back, by records: at least, at most, and what is certainly durable.
    returns_low: int = 0
    returns_high: int = 0
    returns_durable: int = 0
    acked: bool = False  # confirmed
    acking: int = 0  # asked, not answered
    perhaps_acked: bool = False  # never answered
    not_before_low: int = 0  # a redelivery before this is too early
    nacked_us: int = 0
    not_before_high: int = 0  # at this time it must not wait any longer
    not_before_durable: bool = False

    def give_back(self, *, certain: bool = True) -> None:
        self.holder = None
        self.returns_low += certain
        self.returns_high += 1
        self.not_before_low = 0

    def hand_back(self, now_ns: int) -> None:
        """It came back unbegun, which counts nothing; unless its lease had ended before."""
        self.holder = None
        self.returns_high += now_ns >= self.deadline_ns
        self.not_before_low = 0
