"""`client.schedule` and `postdate schedule` with a broker."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

import postdate
from postdate import ChangeResult, OutgoingMessage, cli
from tests.wire.conftest import Serve, Wire, within

HOUR = timedelta(hours=1)


@pytest.fixture
async def client(wire: Wire) -> AsyncIterator[postdate.Client]:
    async with postdate.connect(wire.server.grpc_address) as connected:
        yield connected


def soon() -> datetime:
    now = datetime.now(UTC) + HOUR
    return now.replace(microsecond=now.microsecond // 1_000 * 1_000)


async def produce(
    client: postdate.Client, count: int, start: datetime, **fields: Any
) -> list[postdate.MessageId]:
    """Messages a second apart."""
    async with client.producer("t") as producer:
        messages = [
            OutgoingMessage(
                b"%d" % i, deliver_at=start + timedelta(seconds=i), schedule_key=f"order-{i}", **fields
            )
            for i in range(count)
        ]
        return (await producer.send_many(messages)).ids()


async def test_get_shows_the_reason_of_the_last_nack(
    client: postdate.Client, wire: Wire, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
):
    caplog.set_level("INFO")
    async with client.producer("t") as producer, client.subscribe("t", "s") as subscription:
        receipt = await producer.send(b"close")
        message = await within(anext(subscription))
        await message.nack(HOUR, reason="card \x1b[31mdeclined")
        shown = await client.schedule.get("t", receipt.id, payload=True)
        assert (shown.state, shown.payload) == (postdate.ScheduledState.RETURNED, b"close")
        assert shown.deliver_at == shown.publish_time
        assert shown.returned == (postdate.ReturnedMessage("s", 1, "card \x1b[31mdeclined"),)
    [line] = [each for each in caplog.records if each.getMessage() == "Messages were nacked"]
    assert line.__dict__["fields"] == {
        "topic": "t",
        "subscription": "s",
        "messages": 1,
        "first": tuple(receipt.id),
        "reason": "card \x1b[31mdeclined",
    }
    arguments = ["--address", wire.server.grpc_address, "schedule", "get", "t", str(receipt.id)]
    assert await asyncio.to_thread(cli.run, arguments) == 0
    text = capfd.readouterr().out
    assert "s: 1 attempts, last reason card \\x1b[31mdeclined" in " ".join(text.split())
    assert await asyncio.to_thread(cli.run, [*arguments, "-o", "json"]) == 0
    fields = json.loads(capfd.readouterr().out)
    assert fields["state"] == "RETURNED"
    assert fields["returned"] == [
        {"subscription": "s", "attempts": 1, "last_reason": "card \x1b[31mdeclined"}
    ]


async def test_the_way_of_one_message(client: postdate.Client):
    start = soon()
    async with client.producer("t") as producer, client.subscribe("t", "s") as subscription:
        receipt = await producer.send(b"close", deliver_at=start, schedule_key="order-17")
        with pytest.raises(postdate.AlreadyExists):
            await producer.send(b"again", deliver_at=start, schedule_key="order-17")
        shown = await client.schedule.get("t", schedule_key="order-17", payload=True)
        assert (shown.id, shown.payload, shown.deliver_at) == (receipt.id, b"close", start)
        moved = await client.schedule.move("t", schedule_key="order-17", shift=-HOUR / 2)
        assert (moved.done, moved.deliver_at) == (True, start - HOUR / 2)
        newer = await producer.send(b"other", deliver_at=start, schedule_key="order-17", replace=True)
        assert (await client.schedule.cancel("t", receipt.id)).result is ChangeResult.ALREADY_CANCELLED
        assert (await client.schedule.get("t", schedule_key="order-17")).id == newer.id
        assert (await client.schedule.send_now("t", schedule_key="order-17")).done
        message = await within(anext(subscription))
        assert message.payload == b"other"
        late = await client.schedule.cancel("t", newer.id)
        assert (late.result, late.delivered_to) == (ChangeResult.ALREADY_DELIVERED, ("s",))
        for outcome in (
            await client.schedule.cancel("t", schedule_key="order-17"),
            await client.schedule.move("t", schedule_key="order-17", shift=HOUR),
        ):
            assert (outcome.result, outcome.delivered_to, outcome.id) == (late.result, ("s",), newer.id)
        await message.ack()
        with pytest.raises(postdate.NotFound):
            await client.schedule.get("t", newer.id)


async def test_many_are_seen_and_changed(client: postdate.Client, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("postdate.schedule.NAMES_MAX", 70)
    monkeypatch.setattr("postdate.schedule._PAGE_SIZE", 90)
    start = soon()
    ids = await produce(client, 300, start)
    assert [each.id async for each in client.schedule.list("t")] == ids
    counts = await client.schedule.count("t", start=start, width=timedelta(minutes=1))
    assert [bar.messages for bar in counts.bars] == [60] * 5
    seen: list[tuple[int, int]] = []
    change = await client.schedule.cancel_many("t", ids[::2], progress=lambda *each: seen.append(each))
    assert (change.done, change.matched, max(seen)) == (150, 150, (150, 150))
    assert await client.schedule.count_matching("t", key_prefix="order-1") == 1 + 5 + 50
    moved = await client.schedule.move_matching("t", end=start + timedelta(seconds=100), shift=HOUR)
    assert (moved.done, moved.matched) == (50, 50)
    times = [each.deliver_at async for each in client.schedule.list("t")]
    assert (len(times), times) == (150, sorted(times))
    again = await client.schedule.cancel_many("t", schedule_keys=[f"order-{i}" for i in range(300)])
    assert again.counts == {ChangeResult.DONE: 150, ChangeResult.ALREADY_CANCELLED: 150}
    assert [each async for each in client.schedule.list("t")] == []


async def test_a_key_answers_what_became_of_its_message_also_after_a_restart(serve: Serve, tmp_path: Path):
    async def ask(client: postdate.Client, key: str) -> postdate.ChangeOutcome:
        return await client.schedule.cancel("t", schedule_key=key)

    data_dir = str(tmp_path / "data")
    wire = await serve(data_dir=data_dir)
    async with postdate.connect(wire.server.grpc_address) as client:
        async with client.producer("t") as producer, client.subscribe("t", "s") as subscription:
            sent = await producer.send(b"1", deliver_after=HOUR / 3_600_000, schedule_key="sent")
            cancelled = await producer.send(b"2", deliver_after=HOUR, schedule_key="cancelled")
            await (await within(anext(subscription))).ack()
        assert (await ask(client, "cancelled")).done
        before = [await ask(client, key) for key in ("sent", "cancelled", "never")]
    assert [(each.result, each.id) for each in before] == [
        (ChangeResult.ALREADY_DELIVERED, sent.id),
        (ChangeResult.ALREADY_CANCELLED, cancelled.id),
        (ChangeResult.NOT_FOUND, None),
    ]
    await wire.stop()
    wire = await serve(data_dir=data_dir)
    async with postdate.connect(wire.server.grpc_address) as client:
        assert [await ask(client, key) for key in ("sent", "cancelled", "never")] == before


async def test_a_broker_with_a_lower_limit_is_asked_for_less(serve: Serve):
    wire = await serve(schedule_names_max=7)
    async with postdate.connect(wire.server.grpc_address) as client:
        ids = await produce(client, 30, soon())
        assert (await client.schedule.cancel_many("t", ids[:20])).done == 20
        assert (await client.schedule.cancel_matching("t")).done == 10


async def test_the_command_with_a_broker(
    wire: Wire, client: postdate.Client, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("POSTDATE_ADDRESS", wire.server.grpc_address)
    await client.subscriptions.create("t", "s")
    await produce(client, 130, soon())

    async def run(*arguments: str) -> tuple[int, str, str]:
        capfd.readouterr()
        code = await asyncio.to_thread(cli.run, ("schedule", *arguments))
        return (code, *capfd.readouterr())

    code, out, err = await run("list", "t", "-o", "jsonl")
    assert (code, len(out.splitlines()), err[:14]) == (0, 100, "the first 100;")
    code, out, _ = await run("histogram", "t", "--width", "1m")
    assert (code, out.splitlines()[0].startswith("130 messages due, in bars of 1m")) == (0, True)
    assert (await run("histogram", "t", "--until", "1m"))[0] == 0
    code, out, err = await run("cancel", "t", "--all", "--dry-run", "-o", "json")
    assert (code, json.loads(out)) == (0, {"matched": 130, "would_be_cancelled": 130})
    assert err == "dry run: nothing was changed; 130 messages would be cancelled\n"
    code, out, err = await run("cancel", "t", "--key-prefix", "order-1", "-o", "json")
    assert (code, json.loads(out), "--yes" in err) == (2, {"matched": 41, "cancelled": 0}, True)
    code, out, _ = await run("cancel", "t", "--key-prefix", "order-1", "--yes", "-o", "json")
    assert (code, json.loads(out)["cancelled"]) == (0, 41)
    code, out, _ = await run("move", "t", "--all", "--by", "1s", "--yes", "--no-wait", "-o", "json")
    begun = json.loads(out)
    assert (code, begun["change"], begun["total"]) == (0, "move by 1s", 89)
    code, out, _ = await run("bulk-change", "t", str(begun["id"]), "--wait", "-o", "json")
    assert (code, json.loads(out)["state"], json.loads(out)["done"]) == (0, "DONE", 89)
    code, out, _ = await run("bulk-change", "t", str(begun["id"]), "--cancel", "-o", "json")
    assert (code, json.loads(out)["state"]) == (0, "DONE")
    code, out, _ = await run("bulk-changes", "t", "-o", "json")
    assert [each["change"] for each in json.loads(out)] == [
        "move by 1s",
        "cancel",
        "cancel, dry run",
        "cancel, dry run",
    ]
    assert (await run("cancel", "t", "--all", "--no-wait"))[0] == 2
    assert (await run("bulk-change", "t", "99"))[0] == 3
    code, out, _ = await run("send-now", "t", "-k", "order-20", "-k", "order-1", "-o", "json")
    assert (code, json.loads(out)["sent"]) == (5, 1)
    assert (await client.receive("t", "s", wait=timedelta(seconds=5))).messages[0].payload == b"20"
    assert (await run("get", "t", "--schedule-key", "order-20"))[0] == 3
    code, out, _ = await run("get", "t", "--schedule-key", "order-21", "-o", "json")
    assert (code, json.loads(out)["state"]) == (0, "WAITING")


async def test_a_histogram_of_what_is_centuries_apart(
    wire: Wire, client: postdate.Client, capfd: pytest.CaptureFixture[str]
):
    start = soon()
    await produce(client, 5, start)
    async with client.producer("t") as producer:
        far = await producer.send(b"far", deliver_at=datetime(2900, 1, 1, tzinfo=UTC))

    async def width() -> timedelta:
        arguments = ("schedule", "histogram", "t", "-o", "json", "--address", wire.server.grpc_address)
        assert await asyncio.to_thread(cli.run, arguments) == 0
        found = json.loads(capfd.readouterr().out)
        assert found["messages"] == (await client.schedule.count("t")).messages
        return timedelta(milliseconds=found["width_ms"])

    assert await width() > timedelta(days=10_000)
    await client.schedule.cancel("t", far.id)
    assert await width() < HOUR
