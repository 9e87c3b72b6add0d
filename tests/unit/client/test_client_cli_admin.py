"""Commands that change topics and subscriptions, and those about dead letters, against the fake broker."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import click
import pytest

import postdate as sdk
from postdate.cli import cli
from postdate.commands.values import parse_size, parse_target
from postdate_api.v1 import admin_pb2, consumer_pb2, message_pb2
from tests.unit.client.fake_server import FakeBroker

Run = Callable[..., Any]


async def test_topic_settings_are_set_changed_and_inherited_again(broker: FakeBroker, postdate: Run) -> None:
    created = await postdate(
        *("topic", "create", "t", "--max-delay", "0", "--retention", "3d", "--retention-bytes", "1.5GiB"),
        *("--delayed-delivery", "disabled", "--overdue-action", "dead-letter", "--max-buckets", "3"),
    )
    assert created.code == 0
    assert broker.topics["t"].policy == admin_pb2.TopicPolicy(
        max_delay_ms=0,
        retention_ms=3 * 86_400_000,
        retention_bytes=3 << 29,
        delayed_delivery=admin_pb2.DELAYED_DELIVERY_DISABLED,
        overdue_action=admin_pb2.OVERDUE_ACTION_DEAD_LETTER,
        buckets=admin_pb2.BucketPolicy(max_buckets=3),
    )
    updated = await postdate(
        *("topic", "update", "t", "--max-produce-rate", "0", "--retention-bytes", "10"),
        *("--inherit", "max-delay", "--inherit", "retention", "-o", "json"),
    )
    shown = updated.json["policy"]
    assert (shown["max_produce_rate"], shown["retention_bytes"]) == (0, 10)
    assert (shown["max_delay_ms"], shown["retention_ms"]) == (None, None)
    assert shown["overdue_action"] == "DEAD_LETTER"


async def test_settings_of_the_index_are_changed_one_by_one(broker: FakeBroker, postdate: Run) -> None:
    await postdate("topic", "create", "t", "--max-buckets", "3")
    await postdate("topic", "update", "t", "--seal-after", "5s")
    assert broker.topics["t"].policy.buckets == admin_pb2.BucketPolicy(max_buckets=3, seal_after_ms=5000)
    await postdate("topic", "update", "t", "--inherit", "max-buckets")
    assert broker.topics["t"].policy.buckets == admin_pb2.BucketPolicy(seal_after_ms=5000)
    await postdate("topic", "update", "t", "--inherit", "seal-after")
    assert not broker.topics["t"].policy.HasField("buckets")


async def test_subscription_settings_are_set_changed_and_inherited_again(
    broker: FakeBroker, postdate: Run
) -> None:
    created = await postdate(
        *("subscription", "create", "t", "s", "--type", "key_shared", "--from", "earliest"),
        *("--max-delivery-attempts", "3", "--dead-letter-topic", "lost", "--backoff-multiplier", "1.5"),
        *("-o", "json"),
    )
    assert (created.json["type"], created.json["policy"]["dead_letter_topic"]) == ("KEY_SHARED", "lost")
    updated = await postdate(
        *("subscription", "update", "t", "s", "--max-delivery-attempts", "0", "--honor-delay"),
        *("--inherit", "dead-letter-topic"),
    )
    assert updated.code == 0
    assert "max_delivery_attempts=0, backoff_multiplier=1.500, honor_delay=yes" in updated.out
    await postdate("subscription", "update", "t", "s", "--inherit", "honor-delay", "--lease", "9s")
    assert broker.topics["t"].subscriptions["s"].policy == admin_pb2.SubscriptionPolicy(
        max_delivery_attempts=0, backoff_multiplier=1.5, lease_ms=9000
    )


@pytest.mark.slow
async def test_seek_and_skip(broker: FakeBroker, postdate: Run) -> None:
    await postdate("produce", "t", "--payload", "x", "--count", "5")
    await postdate("subscription", "create", "t", "s")
    moved = await postdate("subscription", "seek", "t", "s", "7:3", "-o", "json")
    assert moved.json == {"topic": "t", "name": "s", "position": "7:3"}
    assert (await postdate("subscription", "seek", "t", "s", "latest", "-o", "json")).json[
        "position"
    ] == "7:5"
    assert (await postdate("subscription", "seek", "t", "s", "2020-01-01T00:00:00Z")).out.split()[-1] == "7:0"
    skipped = await postdate("subscription", "skip-all", "t", "s", "-o", "json")
    assert skipped.json["skipped_messages"] == 5
    assert (await postdate("subscription", "skip-all", "t", "nope")).code == 3


async def test_pause_and_resume(broker: FakeBroker, postdate: Run) -> None:
    for name in ("a", "b"):
        await postdate("subscription", "create", "t", name)
    assert (await postdate("subscription", "pause", "t", "a", "b")).code == 0
    rows = (await postdate("subscription", "list", "t", "-o", "jsonl")).lines
    assert [row["paused"] for row in rows] == [True, True]
    partly = await postdate("subscription", "resume", "t", "a", "nope")
    assert (partly.code, partly.err.splitlines()[-1]) == (5, "postdate: 1 of 2 failed")
    assert (await postdate("subscription", "get", "t", "a", "-o", "json")).json["paused"] is False
    assert broker.topics["t"].subscriptions["b"].paused


async def test_stats_table_has_every_count(broker: FakeBroker, postdate: Run) -> None:
    await postdate("subscription", "create", "t", "s")
    await postdate("subscription", "pause", "t", "s")
    table = await postdate("stats")
    for column in (
        "oldest ready",
        "leased",
        "scheduled",
        "dead letters",
        "consumers",
        "paused",
        "paced",
        "1.5s",
    ):
        assert column in table.out
    found = (await postdate("stats", "-o", "json")).json[0]["subscriptions"][0]
    assert (found["oldest_ready_age_ms"], found["paused"], found["type"]) == (1500, True, "SHARED")
    assert (found["paced"], found["paced_until"]) == (True, None)


@pytest.fixture
async def dead(broker: FakeBroker, client: sdk.Client) -> list[str]:
    """Three dead letters of t/s."""
    async with client.producer("t") as producer, client.subscribe("t", "s") as subscription:
        await producer.send_many([b"x"] * 3)
        for message in [await anext(subscription) for _ in range(3)]:
            await message.nack(dead_letter=True, reason="no use")
    return [str(letter.id) async for letter in client.dead_letters.list("t", "s")]


async def test_dead_letters_are_listed(broker: FakeBroker, postdate: Run, dead: list[str]) -> None:
    rows = (await postdate("dlq", "list", "t", "s", "-o", "jsonl")).lines
    assert [row["id"] for row in rows] == dead
    assert (rows[0]["original_id"], rows[0]["reason"], "payload" in rows[0]) == ("7:0", "no use", False)
    some = (await postdate("dlq", "list", "t", "s", "--limit", "2", "--payload", "-o", "json")).json
    assert [row["payload"] for row in some] == ["given up", "given up"]
    table = (await postdate("dlq", "list", "t", "s")).out
    assert "no use" in table and "payload bytes" in table
    assert (await postdate("dlq", "list", "t", "nope")).code == 3


async def test_dead_letters_are_searched(broker: FakeBroker, postdate: Run, dead: list[str]) -> None:
    rows = await postdate(
        "dlq", "list", "t", "s", "--reason", "use", "--from", "1h", "--until", "2999-01-01T00:00Z"
    )
    assert rows.code == 0
    asked = broker.unary[-1]
    an_hour_ago = datetime.now(UTC) - timedelta(hours=1)
    assert (asked.reason, asked.dead_letter_time.end_ms) == ("use", 32472144000000)
    assert abs(asked.dead_letter_time.start_ms - an_hour_ago.timestamp() * 1000) < 60_000
    assert "so long ago" in (await postdate("dlq", "list", "t", "s", "--from", "x")).err


async def test_what_is_owed_is_shown(broker: FakeBroker, postdate: Run) -> None:
    broker.owed = [
        consumer_pb2.OwedMessage(
            id=message_pb2.MessageId(ledger_id=7, entry_id=1),
            state=consumer_pb2.OWED_STATE_LEASED,
            consumer_name="worker-1",
            lease_end_ms=1_700_000_002_000,
            message=message_pb2.Message(key="k", payload=b"p"),
        )
    ]
    [row] = (
        await postdate("subscription", "owed", "t", "s", "--state", "leased", "--payload", "-o", "jsonl")
    ).lines
    assert list(broker.unary[-1].states) == [consumer_pb2.OWED_STATE_LEASED]
    assert (row["id"], row["state"], row["consumer_name"], row["payload"]) == (
        "7:1",
        "LEASED",
        "worker-1",
        "p",
    )
    assert (row["lease_end"], row["next_attempt"]) == ("2023-11-14T22:13:22+00:00", None)
    assert "worker-1" in (await postdate("subscription", "owed", "t", "s")).out
    assert (await postdate("subscription", "owed", "t", "s", "--state", "settled")).code == 2


@pytest.mark.slow
@pytest.mark.parametrize("bar", ["--progress", "--no-progress"])
async def test_dead_letters_are_requeued_and_purged(
    broker: FakeBroker, postdate: Run, dead: list[str], bar: str
) -> None:
    one = await postdate("dlq", "requeue", "t", "s", dead[0], "--delay", "1h", "-o", "json", bar)
    assert (one.code, one.json) == (0, {"requeued": 1, "failed": []})
    assert ("requeued" in one.err) is (bar == "--progress")
    partly = await postdate("dlq", "purge", "t", "s", dead[0], dead[1], "--yes", "-o", "json", bar)
    assert (partly.code, partly.json) == (5, {"purged": 1, "failed": [dead[0]]})
    assert "postdate: 1 were not purged: no dead letter (NOT_FOUND)" in partly.err
    gone = await postdate("dlq", "purge", "t", "s", dead[1], "--yes", bar)
    assert (gone.code, gone.out) == (3, "")
    every = await postdate("dlq", "requeue", "t", "s", "--all", "--yes", "-o", "json", bar)
    assert (every.code, every.json["requeued"]) == (0, 1)
    nothing = await postdate("dlq", "purge", "t", "s", "--all", "--yes", "-o", "json", bar)
    assert (nothing.code, nothing.json["purged"]) == (0, 0)
    assert (await postdate("dlq", "purge", "t", "nope", "--all", "--yes", bar)).code == 3


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["dlq", "requeue", "t", "s"], "give either ids or --all"),
        (["dlq", "requeue", "t", "s", "8:0", "--all", "--yes"], "give either ids or --all"),
        (["dlq", "requeue", "t", "s", "8-0"], "not a message id"),
        (["topic", "update", "t"], "give at least one setting"),
        (["topic", "update", "t", "--tick", "1s", "--inherit", "tick"], "not both"),
        (["topic", "update", "t", "--inherit", "nonsense"], "nonsense"),
        (["topic", "create", "t", "--retention-bytes", "5MB"], "not a size"),
        (["subscription", "update", "t", "s"], "give at least one setting"),
        (["subscription", "seek", "t", "s", "yesterday"], "a message id looks like 7:1234"),
        (["subscription", "pause", "t"], "Missing argument"),
    ],
)
async def test_usage(broker: FakeBroker, postdate: Run, arguments: list[str], says: str) -> None:
    result = await postdate(*arguments)
    assert result.code == 2
    assert says in result.err
    assert broker.unary == []


def test_sizes_and_targets_as_people_write_them() -> None:
    assert [parse_size(text) for text in ("0", "4096", "64KiB", "1.5GiB")] == [0, 4096, 65536, 3 << 29]
    for wrong in ("", "1k", "5MB", "-1", "KiB"):
        with pytest.raises(ValueError, match="is not a size"):
            parse_size(wrong)
    assert parse_target("Earliest") is sdk.InitialPosition.EARLIEST
    assert parse_target("7:12") == (7, 12)
    assert parse_target("2026-12-24T18:00:00Z") == datetime(2026, 12, 24, 18, tzinfo=UTC)
    with pytest.raises(ValueError, match="has no time zone"):
        parse_target("2026-12-24T18:00:00")


# What each changes that was not named one by one, or cannot be had back. A command that is not here changes what it was
# given by name alone.
NEEDS_YES = [
    "schedule cancel t --all",
    "schedule cancel t --key-prefix o",
    "schedule move t --from 2000-01-01T00:00:00Z --by 1h",
    "schedule send-now t --until 2200-01-01T00:00:00Z",
    "dlq requeue t s --all",
    "dlq purge t s --all",
    "dlq purge t s 8:0",
    "topic delete t",
    "topic delete nope t",
    "subscription delete t s",
    "subscription skip-all t s",
]


@pytest.mark.slow
@pytest.mark.parametrize("command", NEEDS_YES)
async def test_without_yes_nothing_is_changed_and_the_exit_code_says_so(
    broker: FakeBroker, postdate: Run, dead: list[str], command: str
) -> None:
    await postdate("produce", "t", "--payload", "x", "--at", "2100-01-01T00:00:00Z", "--schedule-key", "o-1")
    before = len(broker.unary)
    refused = await postdate(*command.split())
    assert refused.code == 2
    assert refused.err.rstrip().endswith("add --yes to go on")
    assert re.search(r"\b[1-9]", refused.out + refused.err), "it does not say how much there is"
    changes = [each for each in broker.unary[before:] if not is_read(each)]
    assert changes == []


def is_read(request: object) -> bool:
    name = type(request).__name__
    return name.startswith(("Get", "List", "Count")) or bool(getattr(request, "dry_run", False))


def test_every_command_that_asks_for_yes_is_in_the_table() -> None:
    asking = {
        f"{group} {name}"
        for group, commands in cli.commands.items()
        if isinstance(commands, click.Group)
        for name, command in commands.commands.items()
        if any(param.name == "yes" for param in command.params)
    }
    assert asking == {" ".join(each.split()[:2]) for each in NEEDS_YES}


@pytest.mark.slow
async def test_dead_letters_are_counted_before_they_are_touched(
    broker: FakeBroker, postdate: Run, dead: list[str]
) -> None:
    for verb, done in (("requeue", "requeued"), ("purge", "purged")):
        refused = await postdate("dlq", verb, "t", "s", "--all", "-o", "json")
        assert (refused.code, refused.json) == (2, {"matched": 3, done: 0})
        assert refused.err == f"postdate: nothing was {done}; add --yes to go on\n"
        assert (await postdate("dlq", verb, "t", "nope", "--all")).code == 3
    named = await postdate("dlq", "purge", "t", "s", *dead[:2], dead[0], "-o", "json")
    assert (named.code, named.json) == (2, {"matched": 2, "purged": 0})
    await postdate("dlq", "purge", "t", "s", "--all", "--yes")
    for verb, done in (("requeue", "requeued"), ("purge", "purged")):
        nothing = await postdate("dlq", verb, "t", "s", "--all", "-o", "json")
        assert (nothing.code, nothing.json) == (0, {"matched": 0, done: 0})


async def test_deleting_what_nothing_waits_in_needs_no_yes(broker: FakeBroker, postdate: Run) -> None:
    await postdate("topic", "create", "t")
    await postdate("subscription", "create", "t", "s")
    assert (await postdate("subscription", "skip-all", "t", "s")).code == 0
    assert (await postdate("subscription", "delete", "t", "s")).code == 0
    assert (await postdate("topic", "delete", "t")).code == 0
    await postdate("produce", "t", "--payload", "x", "--at", "2100-01-01T00:00:00Z")
    refused = await postdate("topic", "delete", "t")
    assert refused.err == "postdate: 1 message waits, and nothing was deleted; add --yes to go on\n"
    assert (await postdate("topic", "delete", "t", "--yes")).code == 0
