"""One shape for what is alike: lists of the SDK and of the command line, and what is opened and closed."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any, get_origin, get_type_hints

import click
import pytest

import postdate as sdk
import postdate.sync
from postdate.cli import cli
from tests.unit.client.fake_server import FakeBroker

Run = Callable[..., Any]

PLACES = ["topics", "subscriptions", "backups", "dead_letters", "schedule", "recurring"]
"""Properties of a client with methods of their own; the first test knows when one is missing here."""


def places(client: type) -> dict[str, type]:
    """The classes behind a client's properties."""
    found = {
        name: get_type_hints(value.fget)["return"]
        for name, value in vars(client).items()
        if isinstance(value, property)
    }
    return {name: kind for name, kind in found.items() if hasattr(kind, "list")}


@pytest.mark.parametrize(
    ("client", "iterator"), [(sdk.Client, AsyncIterator), (postdate.sync.Client, Iterator)]
)
def test_every_list_takes_a_limit_and_is_iterated_over(client: type, iterator: type) -> None:
    assert sorted(places(client)) == sorted(PLACES)
    for name, kind in places(client).items():
        # `list` within the class body is the method itself, so its annotations are looked at as they stand.
        limit = inspect.signature(kind.__dict__["list"]).parameters["limit"]
        assert (limit.kind, limit.default) == (inspect.Parameter.KEYWORD_ONLY, None), name
        returned = get_type_hints(kind.__dict__["list"])["return"]
        assert get_origin(returned) is iterator, name


@pytest.mark.slow
async def test_every_list_ends_at_its_limit(broker: FakeBroker, client: sdk.Client) -> None:
    for name in "abcde":
        await client.topics.create(name)
        await client.subscriptions.create("t", name)
        await client.backups.create(name)
        await client.recurring.put("t", sdk.RecurringSchedule(name=name, interval=timedelta(hours=1)))
    async with client.producer("t") as producer, client.subscribe("t", "s") as subscription:
        await producer.send_many([b"x"] * 5)
        for message in [await anext(subscription) for _ in range(5)]:
            await message.nack(dead_letter=True)
        far = sdk.OutgoingMessage(b"x", deliver_at=datetime(2100, 1, 1, tzinfo=UTC))
        await producer.send_many([far] * 5)
    lists: dict[str, Callable[..., AsyncIterator[object]]] = {
        "topics": client.topics.list,
        "subscriptions": lambda limit: client.subscriptions.list("t", limit=limit),
        "backups": client.backups.list,
        "dead_letters": lambda limit: client.dead_letters.list("t", "s", limit=limit),
        "schedule": lambda limit: client.schedule.list("t", limit=limit),
        "recurring": lambda limit: client.recurring.list("t", limit=limit),
    }
    assert sorted(lists) == sorted(PLACES)
    for name, listed in lists.items():
        every = [each async for each in listed(limit=None)]
        assert len(every) >= 5, name
        for limit in (0, 1, 3, 100):  # within, at the border of and over a page of the fake broker, of two
            assert [each async for each in listed(limit=limit)] == every[:limit], (name, limit)
        with pytest.raises(ValueError, match="limit is negative"):
            await anext(listed(limit=-1))


def test_every_list_of_the_command_line_takes_a_limit() -> None:
    lists = {
        group: {param.name for param in commands.commands["list"].params}
        for group, commands in cli.commands.items()
        if isinstance(commands, click.Group) and "list" in commands.commands
    }
    assert {group for group, params in lists.items() if "limit" not in params} == {
        "context"
    }  # of a local file


@pytest.mark.slow
async def test_topics_and_subscriptions_are_listed_up_to_a_limit(broker: FakeBroker, postdate: Run) -> None:
    for name in "abc":
        await postdate("topic", "create", name)
        await postdate("subscription", "create", "t", name)
    for command in (["topic", "list"], ["subscription", "list", "t"]):
        rows = (await postdate(*command, "--limit", "2", "-o", "jsonl")).lines
        assert [row["name"] for row in rows] == ["a", "b"]
        assert len((await postdate(*command, "-o", "json")).json) >= 3
        assert (await postdate(*command, "--limit", "0")).code == 2
        assert "times in " in (table := (await postdate(*command)).out) and "+00:00" not in table


@pytest.mark.parametrize("module", [sdk, postdate.sync])
def test_everything_with_a_block_can_be_opened_and_closed_without(module: Any) -> None:
    begin = "__aenter__" if module is sdk else "__enter__"
    kinds = [kind for name in module.__all__ if hasattr(kind := getattr(module, name), begin)]
    assert {kind.__name__ for kind in kinds} == {
        "Client",
        "PartitionedProducer",
        "PartitionedSubscription",
        "Producer",
        "Subscription",
    }
    for kind in kinds:
        for name in ("open", "close"):
            assert hasattr(kind, name), (kind, name)


async def test_subscription_without_a_block(broker: FakeBroker, client: sdk.Client) -> None:
    subscription = client.subscribe("t", "s")
    with pytest.raises(RuntimeError, match=r"or `open\(\)`"):
        await anext(subscription)
    await subscription.open()
    with pytest.raises(RuntimeError, match="opened once"):
        await subscription.open()
    async with client.producer("t") as producer:
        await producer.send(b"x")
    message = await anext(subscription)
    subscription.ack_nowait(message)
    await subscription.close()
    assert broker.topics["t"].subscriptions["s"].acked == {0}
    assert [each async for each in subscription] == []
    with pytest.raises(RuntimeError, match="opened once"):
        await subscription.open()
