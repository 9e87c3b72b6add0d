"""The table of which record changes which components of a topic, and what its components give a checkpoint."""

from __future__ import annotations

import ast
import inspect
import textwrap
from dataclasses import fields, replace
from typing import get_args

import pytest

from broker.model import Position
from broker.storage.manifest import TopicImage
from broker.storage.records import Record, TopicCreated, TopicDeleted
from broker.testing.mem_vfs import MemVfs
from broker.testing.sim_clock import SimClock
from broker.testing.sim_loop import SimLoop, run_sim
from broker.topics.bulk import TopicBulkChanges
from broker.topics.component import Component
from broker.topics.counts import TopicCounts
from broker.topics.ledgers import Ledgers
from broker.topics.producers import Producers
from broker.topics.recurring import TopicRecurring
from broker.topics.topic import APPLIED_BY
from broker.topics.topic_index import TopicIndex
from broker.topics.topic_keys import TopicKeys
from broker.topics.topic_policies import TopicPolicies
from broker.topics.topic_subscriptions import Subscriptions
from tests.harness import Node, Outgoing, small_config

COMPONENTS = {
    "policies": TopicPolicies,
    "ledgers": Ledgers,
    "index": TopicIndex,
    "keys": TopicKeys,
    "producers": Producers,
    "recurring": TopicRecurring,
    "bulk": TopicBulkChanges,
    "subscriptions": Subscriptions,
    "counts": TopicCounts,
}
"""In the order in which they apply a record."""


def applied_by(component: type) -> set[str]:
    """Names of the records that its `apply` has a case for."""
    apply = textwrap.dedent(inspect.getsource(component.__dict__["apply"]))
    return {
        node.cls.id
        for node in ast.walk(ast.parse(apply))
        if isinstance(node, ast.MatchClass) and isinstance(node.cls, ast.Name)
    }


def test_every_record_of_a_topic_is_applied_by_somebody() -> None:
    assert set(APPLIED_BY) == set(get_args(Record)) - {TopicCreated, TopicDeleted}
    assert all(APPLIED_BY.values())


@pytest.mark.parametrize("name", COMPONENTS)
def test_a_component_applies_exactly_what_the_table_sends_it(name: str) -> None:
    sent = {record.__name__ for record, names in APPLIED_BY.items() if name in names}
    assert applied_by(COMPONENTS[name]) == sent


def test_components_apply_in_one_order() -> None:
    for names in APPLIED_BY.values():
        assert list(names) == [name for name in COMPONENTS if name in names]


def test_each_field_of_the_manifest_is_named_by_one_component() -> None:
    async def scenario(node: Node) -> None:
        await node.create_subscription("orders", "all")
        await node.produce("orders", [Outgoing(b"x", schedule_key="k", deliver_after_ms=60_000)])
        topic = node.topic("orders")
        captured = topic.capture().image
        owners = {each.name: 0 for each in fields(TopicImage)}
        for component in topic._captured:
            for name in _named_by(component, captured):
                owners[name] += 1
        of_the_topic = ("topic_id", "name", "create_time_ms", "applied_lsn")
        assert owners == {name: int(name not in of_the_topic) for name in owners}
        node.abandon()

    async def run(_: SimLoop, clock: SimClock) -> None:
        await scenario(Node(MemVfs(), clock, small_config()).open())

    run_sim(run, 1)


def _named_by(component: Component, image: TopicImage) -> set[str]:
    """The fields that a component says something of, whatever stood there before."""
    other = replace(
        image,
        ledgers=image.ledgers * 2,
        subscriptions=image.subscriptions * 2,
        policy=replace(image.policy),
        next_subscription_id=77,
        indexed_through=Position(77, 77),
        index_lsn=77,
        frontier_ms=77,
        bucket_ids=(77,),
        next_bucket_id=77,
        producers_file="77",
        recurring_file="77",
        bulk_file="77",
        log_end=Position(77, 77),
        key_run_ids=(77,),
        next_key_run_id=77,
        keys_through=Position(77, 77),
        gone_ledgers=((77, 77),),
    )
    named = component.capture(other).image
    return {
        each.name for each in fields(TopicImage) if getattr(named, each.name) is not getattr(other, each.name)
    }
