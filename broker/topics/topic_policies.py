"""The policy of one topic: what was set for it, and what is in force."""

from __future__ import annotations

from dataclasses import replace

from broker.config import BrokerConfig
from broker.policy import effective
from broker.storage.manifest import TopicImage
from broker.storage.records import Record, TopicPolicyChanged
from broker.topics.component import Capture, not_applied
from broker.topics.policies import default_topic_policy


class TopicPolicies:
    """See the module's description."""

    def __init__(self, image: TopicImage, config: BrokerConfig) -> None:
        self._config = config
        self.own = image.policy
        """Set for the topic, as applied."""
        self.decided = image.policy
        """Set for the topic, as the last record says that was submitted."""
        self.in_force = effective(image.policy, default_topic_policy(config))

    def apply(self, record: Record, lsn: int) -> None:
        """See `Applier`."""
        match record:
            case TopicPolicyChanged():
                self.own = record.policy
                self.in_force = effective(record.policy, default_topic_policy(self._config))
            case _:
                not_applied(self, record)

    def capture(self, image: TopicImage) -> Capture:
        """See `Component`."""
        return Capture(replace(image, policy=self.own))
