"""Check of dropped ledgers against the model: nobody is owed anything of them (P8 without harm to P3)."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from tests.reference import Violation
from tests.sim.facts import Message, TopicModel
from tests.sim.world import World

if TYPE_CHECKING:
    from tests.sim.model import Model


def note_ledgers(model: Model, topic: TopicModel, ledger_ids: Collection[int]) -> None:
    """The broker has these ledgers of a topic: what was stored in others must be gone with reason, and stays gone."""
    for batch in topic.batches:
        message = batch.messages[0]  # a batch lies in one ledger
        if batch.state != "stored" or message.gone or message.position.ledger_id in ledger_ids:
            continue
        for message in batch.messages:
            _note_gone(model, topic, message)
        model.world.count["messages reclaimed"] += len(batch.messages)


def _note_gone(model: Model, topic: TopicModel, message: Message) -> None:
    where = f"{topic.name}#{topic.topic_id} {message.position}"
    wall = model.world.wall
    if not topic.had_subscription:
        raise Violation("P3", f"{where} went before the first subscription came")
    if not wall.reached(message.due_ms, message.accepted_us):
        raise Violation("P8", f"{where} went before its time")
    if topic.retention_ms and not wall.reached(message.publish_ms + topic.retention_ms, message.accepted_us):
        raise Violation("retention", f"{where} went before its retention ended")
    for subscription in topic.subscriptions:
        fact = subscription.open.pop(message, None)
        if fact is None or not subscription.is_live:
            continue
        if not (fact.acking or fact.perhaps_acked or model.may_have_expired(message)):
            raise Violation("P3", f"{where} went, and {subscription} is owed it")
    message.gone = True
    del topic.by_position[message.position]


def check_none_left(world: World, name: str, ledger_count: int) -> None:
    """In the end everything is settled and due, so the disk is empty (P8)."""
    if ledger_count:
        raise Violation("P8", f"{ledger_count} ledgers of {name} stay, and nobody is owed anything")
    world.count["topics reclaimed to the last ledger"] += 1
