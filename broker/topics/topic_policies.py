"""Own and effective policy of one topic."""

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
        self.effective = effective(image.policy, default_topic_policy(config))

    def apply(self, record: Record, lsn: int) -> None:
        """See `Applier`. `effective` follows from settings: it is volatile, and no durable state may depend on it."""
        match record:
            case TopicPolicyChanged():
                self.own = record.policy
                self.effective = effective(record.policy, default_topic_policy(self._config))
            case _:
                not_applied(self, record)

    def capture(self, image: TopicImage) -> Capture:
        """See `Component`."""
        return Capture(replace(image, policy=self.own))
