"""The state of a shard at each of its lsns, as a checkpoint would capture it: the same on every node (CLUSTER-15).

A record is applied by an owner, by standbys as they read it, and by whoever replays it after a crash or behind a base.
Right after it a topic is looked at. Whoever comes to that record first says what the state is, and the others must agree.

Left out is what a node makes of the state for itself: names of files, those of ledgers that it has rewritten without what
was cancelled, all of the index with its runs of keys, and ids that an owner has reserved for records which are not stored
yet.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from typing import Any

import numpy as np
from pyroaring import BitMap

from broker.folder.broker import Broker
from broker.storage.manifest import TopicImage, encode_topic
from broker.topics.topic import Topic

State = dict[str, bytes]
"""Digests of the parts of a topic's state."""


class ShardStates:
    """States of a run, and who was the first to have them."""

    def __init__(self, fail: Callable[[str], None], every: int) -> None:
        """Of `every` so many lsns the state is looked at."""
        self._fail = fail
        self._every = every
        self._first: dict[tuple[int, int], tuple[str, State]] = {}
        self.compared = 0

    def watch(self, broker: Broker, node: str) -> None:
        """Look at what a broker applies from now on, also in its recovery. It is yet to be opened."""
        seen: dict[int, int] = {}
        note = broker._changed

        def changed(topic: Topic) -> None:
            note(topic)
            if topic.applied_lsn % self._every == 0 and seen.get(topic.topic_id) != topic.applied_lsn:
                seen[topic.topic_id] = topic.applied_lsn
                self._look(topic, node)

        broker._changed = changed  # type: ignore[method-assign]

    def _look(self, topic: Topic, node: str) -> None:
        state = state_of(topic)
        first = self._first.setdefault((topic.topic_id, topic.applied_lsn), (node, state))
        if first[1] is state:
            return
        self.compared += 1
        if first[1] != state:
            parts = [part for part in first[1] | state if first[1].get(part) != state.get(part)]
            self._fail(f"{node} differs from {first[0]} at lsn {topic.applied_lsn}: {', '.join(parts)}")


def state_of(topic: Topic) -> State:
    """Return the state of a topic; nothing of it is changed, as a capture would."""
    subscriptions = tuple(
        replace(subscription.image, cursor_file="", mark=subscription.cursor.mark)
        for subscription in topic.subscriptions.values()
    )
    manifest = TopicImage(
        topic.topic_id,
        topic.name,
        topic.create_time_ms,
        topic.policies.own,
        topic.applied_lsn,
        subscriptions=subscriptions,
        log_end=topic.log.gone_end,
    )
    parts: dict[str, Any] = {
        "manifest": encode_topic(manifest),
        "producers": topic.producers.content(topic.topic_id).encode(),
    }
    for ledger in topic.log:
        ledger_id = ledger.name.ledger_id
        capture = ledger.capture()
        # Each node rewrites sealed ones by itself, some day or never.
        content = (capture.entry_count, capture.sealed) if capture.sealed else capture
        parts[f"ledger {ledger_id}"] = (content, topic.ledgers.facts[ledger_id])
    for ledger_id, amendments in topic.log.amendments.items():
        parts[f"amendments of {ledger_id}"] = _plain(amendments)
    for subscription in topic.subscriptions.values():
        parts[f"cursor of {subscription.name}"] = _plain(subscription.capture_cursor().image())
    return {part: hashlib.sha256(repr(content).encode()).digest() for part, content in parts.items()}


def _plain(value: Any) -> Any:
    """Return a value whose text hangs on nothing but what it holds: bitmaps with the same ids may differ in bytes."""
    match value:
        case BitMap() | np.ndarray():
            return list(value)
        case dict():
            return sorted((key, _plain(inner)) for key, inner in value.items())
        case list():
            return [_plain(inner) for inner in value]
    if is_dataclass(value):
        return [_plain(getattr(value, field.name)) for field in fields(value)]
    return value
