"""Messages damaged on disk as clients see them: absent, and where they were set aside; nothing of the server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import aiohttp
import grpc
import pytest

from broker.storage.blocks import HEADER_BYTES
from postdate_api.v1 import admin_pb2, consumer_pb2, message_pb2, schedule_pb2
from tests.wire.conftest import (
    Id,
    Message,
    Refusal,
    Serve,
    Stream,
    Wire,
    batch,
    eventually,
    ids_of,
    sets,
    within,
)

SECRET = b"pin 4711"
FULL = message_pb2.MESSAGE_VIEW_FULL
EARLIEST = consumer_pb2.INITIAL_POSITION_EARLIEST
TYPES = {"SHARED": 1, "KEY_SHARED": 2, "EXCLUSIVE": 3, "FAILOVER": 4}


async def damage(wire: Wire, topic: str, position: Id) -> None:
    """Flip a bit in the stored form of a message, behind the broker's back."""
    await wire.broker.checkpointer.checkpoint()
    ledger_id, entry_id = position
    ledger = wire.broker.registry.topic(topic).log.find(ledger_id)
    assert ledger is not None
    rows = await ledger.read_rows(entry_id, 1)
    at = HEADER_BYTES + int(rows["offset"][0]) + int(rows["length"][0]) // 2
    with (Path(wire.server.config.data_dir) / ledger.name.path("data")).open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1]))


async def all_settled(wire: Wire, topic: str) -> None:
    """Wait until a dead letter, which may need a topic of its own first, is where it belongs."""
    subscription = wire.broker.registry.topic(topic).subscription("s")
    await eventually(lambda: not subscription.unsettled_count())


async def metrics(wire: Wire) -> str:
    async with (
        aiohttp.ClientSession() as session,
        session.get(f"http://{wire.server.http_address}/metrics") as response,
    ):
        return await response.text()


async def letters_of(wire: Wire, topic: str) -> list[admin_pb2.DeadLetter]:
    request = admin_pb2.ListDeadLettersRequest(topic=topic, subscription="s", view=FULL)
    return list((await within(wire.admin.ListDeadLetters(request))).dead_letters)


def says_nothing_of_the_server(wire: Wire, shown: object) -> None:
    text = str(shown)
    for what in (wire.server.config.data_dir, "topics/", ".data", "offset", SECRET.decode()):
        assert what not in text, f"{what} in {text}"


async def _opened(
    wire: Wire, type_: int, policy: admin_pb2.SubscriptionPolicy
) -> tuple[Stream, Id, list[Id]]:
    """A stream, and the ids of a damaged message and of four whole ones around it that it is owed."""
    for topic in ("bad", "good"):
        await wire.create_subscription(topic, type=type_, policy=policy, initial_position=EARLIEST)
    ids = await wire.produce("bad", b"0", b"1", SECRET, b"3", b"4")
    await damage(wire, "bad", ids[2])
    stream = await wire.subscribe("bad")
    return stream, ids[2], [*ids[:2], *ids[3:]]


@pytest.mark.parametrize("type_", TYPES.values(), ids=TYPES.keys())
@pytest.mark.parametrize("has_letters", [True, False], ids=["dead letters", "none"])
async def test_a_damaged_message_is_set_aside_and_its_stream_goes_on(
    wire: Wire, caplog: pytest.LogCaptureFixture, type_: int, has_letters: bool
):
    policy = admin_pb2.SubscriptionPolicy(max_delivery_attempts=3 if has_letters else 0)
    stream, bad, whole = await _opened(wire, type_, policy)
    assert sorted(ids_of(await stream.deliveries(4))) == whole
    assert await stream.ack(whole) == []
    # The same stream gets what comes later, and other topics know nothing of it.
    later = await wire.produce("bad", b"5")
    assert ids_of(await stream.deliveries(1)) == later
    assert await stream.ack(later) == []
    await all_settled(wire, "bad")
    fine = await wire.produce("good", b"6")
    other = await wire.subscribe("good")
    assert ids_of(await other.deliveries(1)) == fine
    letters = await letters_of(wire, "bad")
    assert [(each.original_id.ledger_id, each.original_id.entry_id) for each in letters] == [
        bad
    ] * has_letters
    assert [each.reason for each in letters] == ["damaged"] * has_letters
    assert not any(each.message.payload or each.payload_bytes for each in letters)
    assert [each.dead_letter_messages for each in (await wire.stats("bad")).subscriptions] == [has_letters]
    text = await metrics(wire)
    assert 'postdate_damaged_messages_total{subscription="s",topic="bad"} 1.0' in text
    assert 'postdate_damaged_messages_total{subscription="s",topic="good"} 0.0' in text
    says_nothing_of_the_server(wire, (letters, text))
    # The operator's log, which no client sees, says where; what the message said stands there neither.
    [told] = [
        str(vars(each)) for each in caplog.records if "were moved to the dead letters" in each.getMessage()
    ]
    assert wire.server.config.data_dir in told or ".data" in told
    assert not [each for each in caplog.records if SECRET.decode() in str(vars(each))]
    # It was settled for good: an acknowledgement is confirmed, and nobody is owed anything.
    assert await stream.ack([bad]) == []
    await stream.stays_quiet()
    assert await stream.close() is grpc.StatusCode.OK


async def test_what_is_set_aside_stays_so_after_a_restart(serve: Serve, tmp_path: Path):
    folder = str(tmp_path / "data")
    wire = await serve(data_dir=folder)
    stream, bad, _ = await _opened(wire, 1, admin_pb2.SubscriptionPolicy(max_delivery_attempts=3))
    assert await stream.ack(ids_of(await stream.deliveries(4))) == []
    await all_settled(wire, "bad")
    await within(wire.stop())
    again = await serve(data_dir=folder)
    stream = await again.subscribe("bad")
    await stream.stays_quiet()
    [letter] = await letters_of(again, "bad")
    assert (letter.original_id.ledger_id, letter.original_id.entry_id) == bad


async def test_receive_gets_the_others(wire: Wire):
    await wire.create_subscription("t", policy=admin_pb2.SubscriptionPolicy(max_delivery_attempts=3))
    ids = await wire.produce("t", b"0", SECRET, b"2")
    await damage(wire, "t", ids[1])
    found: list[Id] = []
    while len(found) < 2:
        found += ids_of((await wire.receive("t", max_messages=10, wait_ms=5_000)).deliveries)
    assert sorted(found) == [ids[0], ids[2]]
    assert await wire.ack("t", found) == []
    await all_settled(wire, "t")
    assert len(await letters_of(wire, "t")) == 1


async def test_answers_about_a_damaged_message_say_nothing_of_the_server(wire: Wire):
    """Whatever names it: answered or refused, with DATA_LOSS at most."""
    message = Message(payload=SECRET, schedule_key="order/1", deliver_after_ms=3_600_000)
    [bad] = await wire.produce("t", message)
    await wire.create_subscription("t", initial_position=EARLIEST)
    await damage(wire, "t", bad)
    id_ = message_pb2.MessageId(ledger_id=bad[0], entry_id=bad[1])
    chosen = schedule_pb2.Selector(entries=sets([bad]))
    schedule, admin = wire.schedule, wire.admin
    told: list[Any] = []
    calls: list[tuple[Any, Any]] = [
        (schedule.GetScheduled, schedule_pb2.GetScheduledRequest(topic="t", id=id_, view=FULL)),
        (
            schedule.GetScheduled,
            schedule_pb2.GetScheduledRequest(topic="t", schedule_key="order/1", view=FULL),
        ),
        (schedule.ListScheduled, schedule_pb2.ListScheduledRequest(topic="t", view=FULL)),
        (schedule.CountScheduled, schedule_pb2.CountScheduledRequest(topics=["t"])),
        (wire.producer.Produce, batch("t", message)),
        (wire.producer.Produce, batch("t", message, replace=True)),
        (
            schedule.Reschedule,
            schedule_pb2.RescheduleRequest(topic="t", selector=chosen, deliver_after_ms=3_600_000),
        ),
        (schedule.CancelScheduled, schedule_pb2.CancelScheduledRequest(topic="t", selector=chosen)),
        (admin.VerifyTopic, admin_pb2.VerifyTopicRequest(name="t")),
    ]
    for call, request in calls:  # a call is under way from when it is made
        try:
            told.append(await within(call(request)))
        except grpc.aio.AioRpcError as error:
            refusal = Refusal.of_error(error)
            told.append((refusal.code.name, refusal.reason, error.details(), error.trailing_metadata()))
    refused = [each[:2] for each in told if isinstance(each, tuple)]
    assert refused == [("DATA_LOSS", "CORRUPT")] * 2 + [("ALREADY_EXISTS", "SCHEDULE_KEY_TAKEN")]
    says_nothing_of_the_server(wire, told)
