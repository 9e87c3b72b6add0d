"""`postdate topic`, `postdate subscription`, `postdate stats`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import click

import postdate
from postdate.commands.output import emit_one, emit_rows, record
from postdate.commands.settings import (
    EXIT_CHECK_FAILED,
    EXIT_PARTLY,
    Command,
    CommandFailed,
    Group,
    Settings,
    describe,
    run,
)
from postdate.commands.values import DURATION


@click.group(cls=Group)
def topic() -> None:
    """Create, show, list, verify and delete topics."""


@topic.command("create")
@click.argument("name")
@click.option("--tracker", type=click.Choice(["bucket", "memory"]), help="Index of what is due when.")
@click.option("--tick", type=DURATION, help="Width of the memory tracker's buckets.")
@click.option("--max-delay", type=DURATION, help="Greatest accepted delay; 0 is no limit.")
@click.option("--default-ttl", type=DURATION, help="Time to live of messages that name none.")
@click.pass_obj
def create_topic(settings: Settings, /, name: str, tracker: str | None, **options: Any) -> None:
    """Create a topic."""
    policy = postdate.TopicPolicy(tracker=postdate.Tracker[tracker.upper()] if tracker else None, **options)

    async def work() -> None:
        async with settings.client() as client:
            emit_one(settings, _show_topic(settings, await client.topics.create(name, policy)))

    run(work())


@topic.command("get")
@click.argument("name")
@click.pass_obj
def get_topic(settings: Settings, name: str) -> None:
    """Show a topic and the policy in force."""

    async def work() -> None:
        async with settings.client() as client:
            emit_one(settings, _show_topic(settings, await client.topics.get(name)))

    run(work())


@topic.command("list")
@click.pass_obj
def list_topics(settings: Settings) -> None:
    """List all topics."""

    async def work() -> None:
        async with settings.client() as client:
            rows = [record(each) for each in await client.topics.list()]
            emit_rows(settings, rows, ["name", "create_time"])

    run(work())


@topic.command("verify")
@click.argument("name")
@click.pass_obj
def verify_topic(settings: Settings, name: str) -> None:
    """Compare a topic's index with its messages while it delivers; exit code 6 if they differ."""

    async def work() -> None:
        async with settings.client() as client:
            check = await client.topics.verify(name)
        emit_one(settings, record(check))
        if check.finding_count:
            raise CommandFailed(f"The index of {name} has {check.finding_count} faults", EXIT_CHECK_FAILED)

    run(work())


@topic.command("delete")
@click.argument("names", nargs=-1, required=True, metavar="NAME...")
@click.pass_obj
def delete_topics(settings: Settings, names: tuple[str, ...]) -> None:
    """Delete topics with their messages and subscriptions."""

    async def work() -> None:
        async with settings.client() as client:
            await _each(names, client.topics.delete)

    run(work())


@click.group(cls=Group)
def subscription() -> None:
    """Create, show, list and delete subscriptions."""


@subscription.command("create")
@click.argument("topic")
@click.argument("name")
@click.option("--type", "kind", type=click.Choice([each.name.lower() for each in postdate.SubscriptionType]))
@click.option("--from", "start", type=click.Choice(["earliest", "latest"]), help="Where it begins.")
@click.option("--lease", type=DURATION, help="How long a consumer may hold a message.")
@click.option("--initial-backoff", type=DURATION, help="Before the second delivery of a nacked message.")
@click.option("--max-backoff", type=DURATION, help="Longest back-off.")
@click.option("--honor-delay/--ignore-delay", default=None, help="For exclusive and failover.")
@click.pass_obj
def create_subscription(
    settings: Settings, /, topic: str, name: str, kind: str | None, start: str | None, **options: Any
) -> None:
    """Create a subscription NAME of TOPIC."""

    async def work() -> None:
        async with settings.client() as client:
            created = await client.subscriptions.create(
                topic,
                name,
                type=postdate.SubscriptionType[kind.upper()] if kind else None,
                initial_position=postdate.InitialPosition[start.upper()] if start else None,
                policy=postdate.SubscriptionPolicy(**options),
            )
            emit_one(settings, _show_policies(settings, record(created)))

    run(work())


@subscription.command("get")
@click.argument("topic")
@click.argument("name")
@click.pass_obj
def get_subscription(settings: Settings, topic: str, name: str) -> None:
    """Show a subscription and the policy in force."""

    async def work() -> None:
        async with settings.client() as client:
            found = await client.subscriptions.get(topic, name)
            emit_one(settings, _show_policies(settings, record(found)))

    run(work())


@subscription.command("list")
@click.argument("topic")
@click.pass_obj
def list_subscriptions(settings: Settings, topic: str) -> None:
    """List the subscriptions of TOPIC."""

    async def work() -> None:
        async with settings.client() as client:
            rows = [record(each) for each in await client.subscriptions.list(topic)]
            emit_rows(settings, rows, ["name", "type", "create_time"])

    run(work())


@subscription.command("delete")
@click.argument("topic")
@click.argument("names", nargs=-1, required=True, metavar="NAME...")
@click.pass_obj
def delete_subscriptions(settings: Settings, topic: str, names: tuple[str, ...]) -> None:
    """Delete subscriptions of TOPIC; their consumers are disconnected."""

    async def work() -> None:
        async with settings.client() as client:
            await _each(names, lambda name: client.subscriptions.delete(topic, name))

    run(work())


@click.command("stats", cls=Command)
@click.argument("topics", nargs=-1, metavar="[TOPIC]...")
@click.pass_obj
def stats(settings: Settings, topics: tuple[str, ...]) -> None:
    """Show what is scheduled, ready and held."""

    async def work() -> tuple[postdate.TopicStats, ...]:
        async with settings.client() as client:
            return await client.stats(*topics)

    found = run(work())
    if settings.output != "table":
        emit_rows(settings, [record(each) for each in found], [])
        return
    columns = ["topic", "scheduled_messages", "next_due_time", "last_due_time", "ledgers", "storage_bytes"]
    emit_rows(settings, [record(each) for each in found], columns, "Topics")
    rows = [{"topic": each.topic} | record(one) for each in found for one in each.subscriptions]
    for row in rows:
        row["subscription"] = row["name"]
    columns = ["topic", "subscription", "type", "ready_messages", "leased_messages", "scheduled_messages"]
    emit_rows(settings, rows, [*columns, "dead_letter_messages", "consumers", "paused"], "Subscriptions")


async def _each(names: tuple[str, ...], action: Callable[[str], Awaitable[None]]) -> None:
    """Act on every name; if some fail, say which and go on."""
    errors: list[postdate.PostdateError] = []
    for name in names:
        try:
            await action(name)
        except postdate.PostdateError as error:
            errors.append(error)
            if len(names) > 1:
                click.echo(f"postdate: {name}: {describe(error)}", err=True)
    if len(errors) == len(names):
        raise errors[0]
    if errors:
        raise CommandFailed(f"{len(errors)} of {len(names)} failed", EXIT_PARTLY)


def _show_topic(settings: Settings, described: postdate.TopicDescription) -> dict[str, Any]:
    return _show_policies(settings, record(described))


def _show_policies(settings: Settings, fields: dict[str, Any]) -> dict[str, Any]:
    if settings.output == "table":
        for name in ("policy", "effective_policy"):
            fields[name] = {key: value for key, value in fields[name].items() if value is not None}
    return fields
