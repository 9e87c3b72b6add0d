"""`postdate topic`, `postdate subscription`, `postdate stats`, `postdate info`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from typing import Any

import click

import postdate
from postdate.commands.completion import SUBSCRIPTION, TOPIC
from postdate.commands.output import RowStream, emit_one, emit_rows, payload_fields, plain, record
from postdate.commands.policies import (
    changes_buckets,
    inherit_subscription_option,
    inherit_topic_option,
    subscription_changes,
    subscription_options,
    subscription_policy,
    topic_changes,
    topic_options,
    topic_policy,
)
from postdate.commands.settings import (
    EXIT_CHECK_FAILED,
    EXIT_PARTLY,
    Command,
    CommandFailed,
    CommandGroup,
    Settings,
    describe,
    not_confirmed,
    run,
)
from postdate.commands.values import TARGET, counted, limit_option, local_time, local_zone

_YES = click.option("--yes", is_flag=True, help="Confirm; required if messages are pending.")
_IF_NOT_EXISTS = click.option(
    "--if-not-exists", is_flag=True, help="If the name exists, change nothing and show it."
)


_OWED_COLUMNS = ["id", "state", "until", "consumer", "attempts", "last_reason", "due", "key"]


@click.group(cls=CommandGroup)
def topic() -> None:
    """Create, show, change, list, verify and delete topics."""


@topic.command("create")
@click.argument("name")
@_IF_NOT_EXISTS
@topic_options
@click.pass_obj
def create_topic(settings: Settings, /, name: str, if_not_exists: bool, **options: Any) -> None:
    """Create a topic; settings that are not given are inherited from the broker."""
    policy = topic_policy(options)

    async def work() -> None:
        async with settings.client() as client:
            created = await client.topics.create(name, policy, exist_ok=if_not_exists)
            emit_one(settings, _show_topic(settings, created))

    run(work())


@topic.command("update")
@click.argument("name", type=TOPIC)
@topic_options
@inherit_topic_option
@click.pass_obj
def update_topic(settings: Settings, /, name: str, inherit: tuple[str, ...], **options: Any) -> None:
    """Change settings of a topic; settings that are not given stay unchanged."""
    of_index = changes_buckets(options, inherit)

    async def work() -> None:
        async with settings.client() as client:
            buckets = (await client.topics.get(name)).policy.buckets if of_index else None
            changes = topic_changes(options, inherit, buckets)
            emit_one(settings, _show_topic(settings, await client.topics.update(name, **changes)))

    run(work())


@topic.command("get")
@click.argument("name", type=TOPIC)
@click.pass_obj
def get_topic(settings: Settings, name: str) -> None:
    """Show a topic and its effective settings."""

    async def work() -> None:
        async with settings.client() as client:
            emit_one(settings, _show_topic(settings, await client.topics.get(name)))

    run(work())


@topic.command("list")
@limit_option("by name")
@click.pass_obj
def list_topics(settings: Settings, limit: int | None) -> None:
    """List all topics."""

    async def work() -> None:
        title = f"Topics, times in {local_zone(datetime.now(UTC))}"
        rows = RowStream(settings, ["name", "create_time"], title)
        async with settings.client() as client:
            async for each in client.topics.list(limit=limit):
                rows.add(_listed(settings, each))
        rows.end()

    run(work())


@topic.command("verify")
@click.argument("name", type=TOPIC)
@click.pass_obj
def verify_topic(settings: Settings, name: str) -> None:
    """Compare the index of a topic with its messages, without stopping delivery; exit code 6 if they differ."""

    async def work() -> None:
        async with settings.client() as client:
            check = await client.topics.verify(name)
        emit_one(settings, record(check))
        if check.finding_count:
            raise CommandFailed(f"The index of {name} has {check.finding_count} faults", EXIT_CHECK_FAILED)

    run(work())


@topic.command("delete")
@click.argument("names", type=TOPIC, nargs=-1, required=True, metavar="NAME...")
@_YES
@click.pass_obj
def delete_topics(settings: Settings, names: tuple[str, ...], yes: bool) -> None:
    """Delete topics with their messages and subscriptions."""

    async def work() -> None:
        async with settings.client() as client:
            if not yes:
                await _check_nothing_pending(client, names, (), "deleted")
            await _each(names, client.topics.delete)

    run(work())


@click.group(cls=CommandGroup, short_help="Create, show, change, seek, pause and delete subscriptions.")
def subscription() -> None:
    """Create, show, change, list and delete subscriptions; seek, skip, pause and resume."""


@subscription.command("create")
@click.argument("topic", type=TOPIC)
@click.argument("name")
@click.option(
    "--type",
    "kind",
    type=click.Choice([each.name.lower() for each in postdate.SubscriptionType]),
    help="Type of the subscription.  [default: shared]",
)
@click.option(
    "--from", "start", type=click.Choice(["earliest", "latest"]), help="First message of the subscription."
)
@_IF_NOT_EXISTS
@subscription_options
@click.pass_obj
def create_subscription(
    settings: Settings,
    /,
    topic: str,
    name: str,
    kind: str | None,
    start: str | None,
    if_not_exists: bool,
    **options: Any,
) -> None:
    """Create a subscription NAME of TOPIC; settings that are not given are inherited from the broker."""

    async def work() -> None:
        async with settings.client() as client:
            created = await client.subscriptions.create(
                topic,
                name,
                type=postdate.SubscriptionType[kind.upper()] if kind else None,
                initial_position=postdate.InitialPosition[start.upper()] if start else None,
                policy=subscription_policy(options),
                exist_ok=if_not_exists,
            )
            emit_one(settings, _show_policies(settings, record(created)))

    run(work())


@subscription.command("update")
@click.argument("topic", type=TOPIC)
@click.argument("name", type=SUBSCRIPTION)
@subscription_options
@inherit_subscription_option
@click.pass_obj
def update_subscription(
    settings: Settings, /, topic: str, name: str, inherit: tuple[str, ...], **options: Any
) -> None:
    """Change settings of a subscription; settings that are not given stay unchanged."""
    changes = subscription_changes(options, inherit)

    async def work() -> None:
        async with settings.client() as client:
            updated = await client.subscriptions.update(topic, name, **changes)
            emit_one(settings, _show_policies(settings, record(updated)))

    run(work())


@subscription.command("seek")
@click.argument("topic", type=TOPIC)
@click.argument("name", type=SUBSCRIPTION)
@click.argument("to", type=TARGET, metavar="earliest|latest|TIME|ID")
@click.pass_obj
def seek(
    settings: Settings,
    topic: str,
    name: str,
    to: postdate.MessageId | datetime | postdate.InitialPosition,
) -> None:
    """Move a subscription: all messages from this point on are delivered again, and none before it."""

    async def work() -> None:
        async with settings.client() as client:
            position = await client.subscriptions.seek(topic, name, to)
            emit_one(settings, {"topic": topic, "name": name, "position": str(position)})

    run(work())


@subscription.command("skip-all")
@click.argument("topic", type=TOPIC)
@click.argument("name", type=SUBSCRIPTION)
@_YES
@click.pass_obj
def skip_all(settings: Settings, topic: str, name: str, yes: bool) -> None:
    """Settle all pending messages of a subscription, scheduled ones included; they are not delivered to it."""

    async def work() -> None:
        async with settings.client() as client:
            if not yes:
                await _check_nothing_pending(client, (topic,), (name,), "skipped")
            skipped = await client.subscriptions.skip_all(topic, name)
            emit_one(settings, {"topic": topic, "name": name, "skipped_messages": skipped})

    run(work())


@subscription.command("pause")
@click.argument("topic", type=TOPIC)
@click.argument("names", type=SUBSCRIPTION, nargs=-1, required=True, metavar="NAME...")
@click.pass_obj
def pause(settings: Settings, topic: str, names: tuple[str, ...]) -> None:
    """Stop delivery on subscriptions of TOPIC until they are resumed, also across restarts."""

    async def work() -> None:
        async with settings.client() as client:
            await _each(names, lambda name: client.subscriptions.pause(topic, name))

    run(work())


@subscription.command("resume")
@click.argument("topic", type=TOPIC)
@click.argument("names", type=SUBSCRIPTION, nargs=-1, required=True, metavar="NAME...")
@click.pass_obj
def resume(settings: Settings, topic: str, names: tuple[str, ...]) -> None:
    """Resume delivery on paused subscriptions of TOPIC."""

    async def work() -> None:
        async with settings.client() as client:
            await _each(names, lambda name: client.subscriptions.resume(topic, name))

    run(work())


@subscription.command("get")
@click.argument("topic", type=TOPIC)
@click.argument("name", type=SUBSCRIPTION)
@click.pass_obj
def get_subscription(settings: Settings, topic: str, name: str) -> None:
    """Show a subscription and its effective settings."""

    async def work() -> None:
        async with settings.client() as client:
            found = await client.subscriptions.get(topic, name)
            emit_one(settings, _show_policies(settings, record(found)))

    run(work())


@subscription.command("list")
@click.argument("topic", type=TOPIC)
@limit_option("by name")
@click.pass_obj
def list_subscriptions(settings: Settings, topic: str, limit: int | None) -> None:
    """List the subscriptions of TOPIC."""

    async def work() -> None:
        title = f"Subscriptions of {topic}, times in {local_zone(datetime.now(UTC))}"
        rows = RowStream(settings, ["name", "type", "paused", "create_time"], title)
        async with settings.client() as client:
            async for each in client.subscriptions.list(topic, limit=limit):
                rows.add(_listed(settings, each))
        rows.end()

    run(work())


@subscription.command("owed")
@click.argument("topic", type=TOPIC)
@click.argument("name", type=SUBSCRIPTION)
@click.option(
    "--state",
    "states",
    multiple=True,
    type=click.Choice([state.name.lower() for state in postdate.OwedState]),
    help="Only messages in this state. May be repeated.",
)
@limit_option("by id")
@click.option("--payload", is_flag=True, help="Also show payloads.")
@click.pass_obj
def list_owed(
    settings: Settings, topic: str, name: str, states: tuple[str, ...], limit: int | None, payload: bool
) -> None:
    """List messages that are due on subscription NAME of TOPIC: ready, leased by a consumer, or retrying."""

    async def work() -> None:
        columns = [*_OWED_COLUMNS, "payload"] if payload else _OWED_COLUMNS
        title = f"{topic}, {name}, times in {local_zone(datetime.now(UTC))}"
        rows = RowStream(settings, columns, title, {"id", "state"})
        async with settings.client() as client:
            chosen = [postdate.OwedState[state.upper()] for state in states]
            async for each in client.subscriptions.owed(topic, name, *chosen, limit=limit, payloads=payload):
                rows.add(_owed(settings, each))
        rows.end()

    run(work())


@subscription.command("delete")
@click.argument("topic", type=TOPIC)
@click.argument("names", type=SUBSCRIPTION, nargs=-1, required=True, metavar="NAME...")
@_YES
@click.pass_obj
def delete_subscriptions(settings: Settings, topic: str, names: tuple[str, ...], yes: bool) -> None:
    """Delete subscriptions of TOPIC; their consumers are disconnected."""

    async def work() -> None:
        async with settings.client() as client:
            if not yes:
                await _check_nothing_pending(client, (topic,), names, "deleted")
            await _each(names, lambda name: client.subscriptions.delete(topic, name))

    run(work())


@click.command("info", cls=Command)
@click.pass_obj
def info(settings: Settings) -> None:
    """Show the version, name, clock and limits of the broker."""

    async def work() -> postdate.ServerInfo:
        async with settings.client() as client:
            return await client.server_info()

    found = run(work())
    emit_one(settings, {"address": settings.address} | record(found))


@click.command(
    "stats", cls=Command, short_help="Count scheduled, ready and leased messages and dead letters."
)
@click.argument("topics", type=TOPIC, nargs=-1, metavar="[TOPIC]...")
@click.pass_obj
def stats(settings: Settings, topics: tuple[str, ...]) -> None:
    """Show how many messages are scheduled, ready and leased, the age of the oldest, and the dead letters."""

    async def work() -> tuple[postdate.TopicStats, ...]:
        async with settings.client() as client:
            return await client.stats(*topics)

    found = run(work())
    if settings.output != "table":
        emit_rows(settings, [record(each) for each in found], [])
        return
    columns = ["topic", "scheduled_messages", "scheduled_bytes", "next_due", "ledgers", "storage_bytes"]
    rows = [
        record(each) | {"next_due": each.next_due_time and local_time(each.next_due_time)} for each in found
    ]
    emit_rows(settings, rows, columns, f"Topics, times in {local_zone(datetime.now(UTC))}")
    rows = [_counts(each.topic, one) for each in found for one in each.subscriptions]
    columns = ["topic", "subscription", "type", "ready", "oldest_ready", "leased", "scheduled"]
    emit_rows(settings, rows, [*columns, "dead_letters", "consumers", "paused", "paced"], "Subscriptions")


def _counts(topic: str, stats: postdate.SubscriptionStats) -> dict[str, Any]:
    """A row of the table, whose columns are named in short."""
    return {
        "topic": topic,
        "subscription": stats.name,
        "type": stats.type.name,
        "ready": stats.ready_messages,
        "oldest_ready": stats.oldest_ready_age or None,
        "leased": stats.leased_messages,
        "scheduled": stats.scheduled_messages,
        "dead_letters": stats.dead_letter_messages,
        "consumers": stats.consumers,
        "paused": stats.paused,
        "paced": stats.paced,
    }


async def _check_nothing_pending(
    client: postdate.Client, topics: tuple[str, ...], subscriptions: tuple[str, ...], done: str
) -> None:
    """Refuse to go on without --yes if messages wait in what is named; no subscription named means all of a topic."""
    pending = 0
    for name in topics:
        try:
            (stats,) = await client.stats(name)
        except postdate.NotFound:
            continue  # the command itself says so
        counts = [
            each.scheduled_messages + each.ready_messages + each.leased_messages
            for each in stats.subscriptions
            if not subscriptions or each.name in subscriptions
        ]
        # Without a subscription messages wait for the first one.
        pending += max(counts, default=0 if subscriptions else stats.scheduled_messages)
    if pending:
        raise not_confirmed(done, f"{counted(pending, 'message')} {'waits' if pending == 1 else 'wait'}")


async def _each(names: tuple[str, ...], action: Callable[[str], Awaitable[object]]) -> None:
    """Act on every name; if some fail, say which and go on."""
    errors: list[postdate.PostdateError] = []
    for name in names:
        try:
            await action(name)
        except postdate.PostdateError as error:
            errors.append(error)
            if len(names) > 1:
                click.echo(plain(f"postdate: {name}: {describe(error)}"), err=True)
    if len(errors) == len(names):
        raise errors[0]
    if errors:
        raise CommandFailed(f"{len(errors)} of {len(names)} failed", EXIT_PARTLY)


def _listed(
    settings: Settings, described: postdate.TopicDescription | postdate.SubscriptionDescription
) -> dict[str, Any]:
    """One row; a table has times of this machine's clock."""
    row = record(described)
    return row | {"create_time": local_time(described.create_time)} if settings.output == "table" else row


def _show_topic(settings: Settings, described: postdate.TopicDescription) -> dict[str, Any]:
    return _show_policies(settings, record(described))


def _show_policies(settings: Settings, fields: dict[str, Any]) -> dict[str, Any]:
    if settings.output == "table":
        for name in ("policy", "effective_policy"):
            fields[name] = {key: value for key, value in fields[name].items() if value is not None}
    return fields


def _owed(settings: Settings, message: postdate.OwedMessage) -> dict[str, Any]:
    fields: dict[str, Any] = {"id": str(message.id), "state": message.state.name}
    if settings.output == "table":
        until = message.lease_end or message.next_attempt
        fields |= {
            "until": "" if until is None else local_time(until),
            "consumer": message.consumer_name,
            "attempts": message.attempts,
            "last_reason": message.last_reason,
            "due": local_time(message.deliver_at),
            "key": message.key,
        }
    else:
        fields |= {
            "attempts": message.attempts,
            "last_reason": message.last_reason,
            "publish_time": message.publish_time.isoformat(),
            "deliver_at": message.deliver_at.isoformat(),
            "consumer_name": message.consumer_name,
            "lease_end": None if message.lease_end is None else message.lease_end.isoformat(),
            "next_attempt": None if message.next_attempt is None else message.next_attempt.isoformat(),
            "size_bytes": message.size_bytes,
            "key": message.key,
            "properties": dict(message.properties),
        }
    return fields if message.payload is None else fields | payload_fields(message.payload)
