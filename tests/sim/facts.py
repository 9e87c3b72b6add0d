"""State of the model of a simulation beside the reference: batches, topics, and when what happened."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from broker.model import Position
from broker.policy import SubscriptionPolicy
from tests import reference
from tests.harness import Outgoing
from tests.sim.pacing import Pace

if TYPE_CHECKING:
    from tests.sim.traffic import SimConsumer

Recovered = dict[int, tuple[str, dict[int, tuple[str, Position]], dict[Position, bytes]]]
"""Topics by id: name, subscriptions by id (name, start), frames by position."""

NEVER_US = 1 << 62


@dataclass(eq=False, slots=True, kw_only=True)
class Message(reference.Message):
    """One message that a producer sent, and what the broker made of it."""

    ask: Outgoing
    batch: SentBatch
    accepted_us: int = 0
    gone: bool = False  # its ledger was dropped

    __eq__ = object.__eq__  # one that is lost and one that is sent later may have the same id
    __hash__ = object.__hash__


@dataclass(eq=False, slots=True)
class SentBatch:
    """One produce request. `state`: asked, accepted, stored, refused, lost."""

    topic_name: str
    invoked: int
    messages: list[Message] = field(default_factory=list)
    state: str = "asked"
    topic: TopicModel | None = None
    answered: int | None = None
    stored_us: int = NEVER_US  # when it was answered


@dataclass(eq=False, slots=True)
class TopicModel:
    """One life of a topic name. `state`: live, deleting, deleted."""

    topic_id: int
    name: str
    state: str = "live"
    confirmed: bool = False  # somebody was answered that it exists
    had_subscription: bool = False
    retention_ms: int = 0  # at least so long messages are kept, if that is known
    indexed_us: int = (
        NEVER_US  # when the index was first seen to hold all, since this life began or it was built again
    )
    rebuilds: int = 0  # of the index in this life, when it was last looked at
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
class Fact(reference.Entry):
    """History of one message on one subscription."""

    lost_us: int | None = None  # when its consumer left with it
    nacked_us: int = 0


@dataclass(eq=False, slots=True, kw_only=True)
class SubscriptionModel(reference.Subscription[Message]):
    """One life of a subscription name. `state`: live, deleting, deleted."""

    topic: TopicModel
    subscription_id: int
    policy: SubscriptionPolicy
    created: int
    entries: dict[Message, Fact] = field(default_factory=dict)
    open: dict[Message, Fact] = field(default_factory=dict)
    state: str = "live"
    attached: list[SimConsumer] = field(default_factory=list)  # oldest first
    progress_us: int = 0
    stalled_us: int | None = None  # since when something could be delivered and was not
    # The last that came in due order; of a KEY_SHARED subscription, by key.
    last_live: dict[str, tuple[int, Position]] = field(default_factory=dict)
    last_live_us: dict[str, int] = field(default_factory=dict)
    catchup_count: int = 0  # how often the broker began to catch up, as far as it was noticed
    paces: list[Pace] = field(default_factory=list)  # that may be in force
    changes_pace: bool = False
    paced_us: int = 0  # until when a pace that may hold messages back may have been in force, if none is now

    __eq__ = object.__eq__
    __hash__ = object.__hash__

    def add(self, id_: Message, message: reference.Message) -> None:
        self.entries[id_] = self.open[id_] = Fact(message)

    @property
    def is_live(self) -> bool:
        return self.state == "live" and self.topic.state == "live"

    def __str__(self) -> str:
        return f"{self.topic.name}#{self.topic.topic_id}/{self.name}#{self.subscription_id}"
