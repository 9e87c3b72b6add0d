"""The room for recurring schedules: how many there may be, and of how many bytes, in a topic and in all together."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from broker.errors import LimitReached
from broker.storage.recurring import RecurringStanding
from broker.storage.recurring_values import Definition
from broker.topics.topic import Topic
from broker.tuning import Tuning


@dataclass(frozen=True, slots=True)
class _Share:
    """Room that the schedules of some topics take, and may take."""

    whose: str
    count: int
    count_max: int
    byte_count: int
    byte_count_max: int


class RecurringRoom:
    """Definitions are in memory: see the module's description. Knows also those that are about to be applied."""

    def __init__(self, tuning: Tuning) -> None:
        self._tuning = tuning
        self._topics: dict[int, Topic] = {}  # that have schedules, or had some
        self._coming: dict[tuple[int, str], Definition] = {}  # by topic_id and name

    def include(self, topic: Topic) -> None:
        """Count the schedules that a topic has."""
        self._topics[topic.topic_id] = topic

    def come(self, topic: Topic, name: str, definition: Definition) -> None:
        """Count a schedule from now on, until `applied`."""
        self.include(topic)
        self._coming[topic.topic_id, name] = definition

    def applied(self, topic: Topic, name: str) -> None:
        """Leave it to the topic to count a schedule."""
        self._coming.pop((topic.topic_id, name), None)

    def check(self, topic: Topic, name: str, definition: Definition) -> None:
        """Raise LimitReached if there is no room for a schedule, new or larger than before."""
        before, tuning = topic.recurring.get(name), self._tuning
        self._topics = {each.topic_id: each for each in self._topics.values() if not each.deleted}
        within = _Share(
            f"Topic {topic.name!r} has",
            *(self._count([topic]), tuning.recurring_per_topic_max),
            *(self._byte_count([topic]), tuning.recurring_bytes_per_topic_max),
        )
        topics = self._topics.values()
        overall = _Share(
            "All topics together have",
            *(self._count(topics), tuning.recurring_max),
            *(self._byte_count(topics), tuning.recurring_bytes_max),
        )
        growth = definition.byte_count - _byte_count(before)
        for share in (within, overall):
            if before is None and share.count >= share.count_max:
                raise LimitReached(
                    f"{share.whose} {share.count_max} recurring schedules, the limit",
                    reason="TOO_MANY_RECURRING",
                    limit=share.count_max,
                )
            if growth > 0 and share.byte_count + growth > share.byte_count_max:
                raise LimitReached(
                    f"{share.whose} recurring schedules of {share.byte_count} bytes; {growth} more are over "
                    f"the limit of {share.byte_count_max}",
                    reason="TOO_MANY_RECURRING_BYTES",
                    limit=share.byte_count_max,
                )

    def _count(self, topics: Collection[Topic]) -> int:
        coming = self._coming_to(topics)
        return sum(len(topic.recurring) for topic in topics) + sum(before is None for before, _ in coming)

    def _byte_count(self, topics: Collection[Topic]) -> int:
        coming = self._coming_to(topics)
        growth = sum(new.byte_count - _byte_count(before) for before, new in coming)
        return sum(topic.recurring.byte_count for topic in topics) + growth

    def _coming_to(self, topics: Collection[Topic]) -> list[tuple[RecurringStanding | None, Definition]]:
        among = {topic.topic_id: topic for topic in topics}
        return [
            (among[topic_id].recurring.get(name), new)
            for (topic_id, name), new in self._coming.items()
            if topic_id in among
        ]


def _byte_count(state: RecurringStanding | None) -> int:
    return 0 if state is None else state.definition.byte_count
