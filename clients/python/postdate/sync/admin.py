"""`postdate.admin` without async. Made by tools/generate_sync.py."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from typing import Unpack

from postdate import admin as _admin
from postdate.admin import (
    SubscriptionDescription,
    TopicCheck,
    TopicDescription,
)
from postdate.model import InitialPosition, MessageId, SubscriptionType
from postdate.owed import OwedMessage, OwedState
from postdate.policies import SubscriptionChanges, SubscriptionPolicy, TopicChanges, TopicPolicy
from postdate.sync._portal import Portal


class Topics:
    """`client.topics`.

    A change waits, up to `retry_for`, for a broker that is away, and is not repeated where it may have
    happened: then it raises `Disconnected`, and `get` tells.
    """

    def __init__(self, inner: _admin.Topics, portal: Portal) -> None:
        self._inner = inner
        self._portal = portal

    def create(
        self, name: str, policy: TopicPolicy | None = None, *, exist_ok: bool = False
    ) -> TopicDescription:
        """Create a topic; `AlreadyExists` if there is one of that name.

        With `exist_ok` that one is returned, its settings as they are: `update` changes them.
        """
        return self._portal.run(self._inner.create(name, policy, exist_ok=exist_ok))

    def get(self, name: str) -> TopicDescription:
        return self._portal.run(self._inner.get(name))

    def update(self, name: str, /, **changes: Unpack[TopicChanges]) -> TopicDescription:
        """Change settings with messages pending or not; those that are not passed stay.

        None lets the broker's own hold again, zero means none. `buckets` is replaced whole. Limits count at
        once, another tracker or tick from the broker's next start on.
        """
        return self._portal.run(self._inner.update(name, **changes))

    def list(self, *, limit: int | None = None) -> Iterator[TopicDescription]:
        """All topics, by name, page by page as the iteration goes on; at most `limit`."""
        return self._portal.iterate(self._inner.list(limit=limit))

    def verify(self, name: str) -> TopicCheck:
        """Compare the topic's index with its messages. Delivery goes on; with billions of messages it takes minutes."""
        return self._portal.run(self._inner.verify(name))

    def delete(self, name: str) -> None:
        """Delete a topic with its messages and subscriptions."""
        self._portal.run(self._inner.delete(name))


class Subscriptions:
    """`client.subscriptions`. Changes of which the answer is lost are not repeated: see `Topics`."""

    def __init__(self, inner: _admin.Subscriptions, portal: Portal) -> None:
        self._inner = inner
        self._portal = portal

    def create(
        self,
        topic: str,
        name: str,
        *,
        type: SubscriptionType | None = None,
        initial_position: InitialPosition | None = None,
        policy: SubscriptionPolicy | None = None,
        exist_ok: bool = False,
    ) -> SubscriptionDescription:
        """Create a subscription, SHARED and from LATEST unless said; `AlreadyExists` if there is one.

        With `exist_ok` that one is returned, its place and settings as they are. Another type than the one
        that is asked for is `FailedPrecondition`, as no type can be changed.
        """
        return self._portal.run(
            self._inner.create(
                topic, name, type=type, initial_position=initial_position, policy=policy, exist_ok=exist_ok
            )
        )

    def get(self, topic: str, name: str) -> SubscriptionDescription:
        return self._portal.run(self._inner.get(topic, name))

    def update(
        self, topic: str, name: str, /, **changes: Unpack[SubscriptionChanges]
    ) -> SubscriptionDescription:
        """Change settings with messages out or not; those that are not passed stay.

        None lets the broker's own hold again, zero means none. Changes count from the next delivery or nack on.
        """
        return self._portal.run(self._inner.update(topic, name, **changes))

    def seek(self, topic: str, name: str, to: MessageId | datetime | InitialPosition) -> MessageId:
        """Move it: everything from there on is owed again, settled or not, and nothing before it is.

        To a message, to the first one produced at or after a time that has passed, or to either end of the log.
        Its consumers are disconnected and come back by themselves; what they hold is theirs no more, and an ack
        that is confirmed after the seek counts after it. Returns the first position that is owed.
        """
        return self._portal.run(self._inner.seek(topic, name, to))

    def skip_all(self, topic: str, name: str) -> int:
        """Settle all that it is owed now, scheduled messages too; returns how many that were."""
        return self._portal.run(self._inner.skip_all(topic, name))

    def pause(self, topic: str, name: str) -> SubscriptionDescription:
        """Deliver nothing until `resume`, across restarts too. Consumers stay, and what they hold can be acked."""
        return self._portal.run(self._inner.pause(topic, name))

    def resume(self, topic: str, name: str) -> SubscriptionDescription:
        """Deliver again."""
        return self._portal.run(self._inner.resume(topic, name))

    def list(self, topic: str, *, limit: int | None = None) -> Iterator[SubscriptionDescription]:
        """All subscriptions of a topic, by name, page by page as the iteration goes on; at most `limit`."""
        return self._portal.iterate(self._inner.list(topic, limit=limit))

    def owed(
        self, topic: str, name: str, *states: OwedState, limit: int | None = None, payloads: bool = False
    ) -> Iterator[OwedMessage]:
        """Messages that it is owed and that are due, by id, page by page as the iteration goes on; at most `limit`.

        Those in one of the states, or in any: ready, with a consumer, or waiting for their next attempt. It looks,
        and takes nothing. Where few of millions are in a state, a page may take a while.
        """
        return self._portal.iterate(self._inner.owed(topic, name, *states, limit=limit, payloads=payloads))

    def delete(self, topic: str, name: str) -> None:
        """Delete a subscription; its consumers are disconnected."""
        self._portal.run(self._inner.delete(topic, name))
