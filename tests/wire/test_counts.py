"""GetStats: what each subscription is owed, by state, exactly, whoever is connected."""

from __future__ import annotations

import asyncio

import pytest

from postdate_api.v1 import admin_pb2
from tests.wire.conftest import (
    Message,
    Serve,
    Wire,
    batch,
    eventually,
    ids_of,
    now_ms,
    refused,
    within,
)
from tests.wire.test_seek import TYPES, counts, id_of, seek, skip_all

SHARED, KEY_SHARED, EXCLUSIVE, FAILOVER = 1, 2, 3, 4
LATEST, EARLIEST = 1, 2
HOUR_MS = 3_600_000
BOTH_TRACKERS = pytest.mark.parametrize("tracker", ["bucket", "memory"])


def later(count: int, after_ms: int = HOUR_MS) -> list[Message]:
    return [Message(payload=b"later", deliver_after_ms=after_ms + i) for i in range(count)]


async def stats(wire: Wire, subscription: str = "s", topic: str = "t") -> admin_pb2.SubscriptionStats:
    return {each.name: each for each in (await wire.stats(topic)).subscriptions}[subscription]


async def settles(wire: Wire, expected: tuple[int, int, int], subscription: str = "s") -> None:
    """The counts become these: what is due is noticed within some milliseconds."""
    async with asyncio.timeout(10):
        while await counts(wire, subscription) != expected:
            await asyncio.sleep(0.005)


async def restarted(serve: Serve, wire: Wire, tracker: str = "bucket") -> Wire:
    folder = wire.server.config.data_dir
    await wire.disconnect()
    await wire.stop()
    return await serve(data_dir=folder, tracker=tracker)


@BOTH_TRACKERS
async def test_counts_are_exact_without_consumers_and_after_a_restart(serve: Serve, tracker: str):
    wire = await serve(tracker=tracker)
    await wire.create_subscription("t", initial_position=EARLIEST)
    await wire.produce("t", b"1", b"2", *later(3), *later(2, 40))
    await settles(wire, (4, 0, 3))
    await wire.create_subscription("t", "latest", initial_position=LATEST)
    assert await counts(wire, "latest") == (0, 0, 0)
    await wire.produce("t", b"3", *later(2))
    for _ in range(2):
        await settles(wire, (5, 0, 5))
        assert await counts(wire, "latest") == (1, 0, 2)
        assert (await wire.stats("t")).scheduled_messages == 5
        wire = await restarted(serve, wire, tracker)
    await wire.create_subscription("t", "everything", initial_position=EARLIEST)
    assert await counts(wire, "everything") == (5, 0, 5)


@BOTH_TRACKERS
async def test_what_lies_before_the_start_is_not_owed_before_or_after_it_comes_due(
    serve: Serve, tracker: str
):
    wire = await serve(tracker=tracker)
    await wire.create_subscription("t", "all", initial_position=EARLIEST)
    ids = await wire.produce("t", *later(5, 300), *later(4))
    await wire.create_subscription("t", initial_position=LATEST)
    await wire.create_subscription("t", "middle", initial_position=EARLIEST)
    await seek(wire, subscription="middle", id=id_of(ids[3]))
    wire = await restarted(serve, wire, tracker)
    await wire.produce("t", *later(2, 300), *later(1))
    await settles(wire, (7, 0, 5), "all")
    assert await counts(wire) == (2, 0, 1)
    assert await counts(wire, "middle") == (4, 0, 5)


@TYPES
async def test_each_state_is_counted_once(wire: Wire, type_: int):
    await wire.create_subscription(
        "t", type=type_, initial_position=EARLIEST, policy=admin_pb2.SubscriptionPolicy(honor_delay=True)
    )
    await wire.produce("t", *[b"now"] * 10, *later(4))
    assert await counts(wire) == (10, 0, 4)
    stream = await wire.subscribe("t", permits=6)
    got = ids_of(await stream.deliveries(6))
    assert await counts(wire) == (4, 6, 4)
    await stream.ack(got[:1])
    assert await counts(wire) == (4, 5, 4)
    await stream.nack(got[1:3], redeliver_after_ms=HOUR_MS)
    assert await counts(wire) == (4, 3, 6)
    assert await stream.close() is not None
    await settles(wire, (7, 0, 6))
    assert (await stats(wire)).consumers == 0


async def test_a_subscription_that_ignores_times_has_nothing_scheduled_but_what_was_nacked(wire: Wire):
    await wire.create_subscription("t", type=EXCLUSIVE, initial_position=EARLIEST)
    await wire.produce("t", b"now", *later(2))
    assert await counts(wire) == (3, 0, 0)
    stream = await wire.subscribe("t")
    got = ids_of(await stream.deliveries(3))
    await stream.nack(got[2:], redeliver_after_ms=HOUR_MS)
    assert await counts(wire) == (0, 2, 1)
    await stream.ack(got[:2])
    assert await counts(wire) == (0, 0, 1)


async def test_waits_of_nacked_messages_are_counted_after_a_restart(serve: Serve):
    wire = await serve()
    await wire.create_subscription("t", initial_position=EARLIEST)
    await wire.produce("t", b"1", b"2", b"3", *later(1))
    stream = await wire.subscribe("t")
    got = ids_of(await stream.deliveries(3))
    await stream.nack(got[:1], redeliver_after_ms=HOUR_MS)
    await stream.ack(got[1:2])
    wire = await restarted(serve, wire)
    assert await counts(wire) == (1, 0, 2)


async def test_dead_letters_are_counted_until_somebody_deals_with_them(serve: Serve):
    wire = await serve()
    await wire.produce("t", b"1", b"2")
    stream = await wire.subscribe("t")
    got = ids_of(await stream.deliveries(2))
    await stream.nack(got, dead_letter=True, reason="no use")
    for _ in range(2):
        assert (await stats(wire)).dead_letter_messages == 2
        assert await counts(wire) == (0, 0, 0)
        wire = await restarted(serve, wire)
    purge = admin_pb2.PurgeDeadLettersRequest(topic="t", subscription="s", all=True)
    await within(wire.admin.PurgeDeadLetters(purge))
    assert (await stats(wire)).dead_letter_messages == 0


async def test_what_was_requeued_with_a_delay_is_scheduled_for_its_subscription_alone(serve: Serve):
    wire = await serve()
    await wire.produce("t", b"1")
    stream = await wire.subscribe("t")
    await wire.create_subscription("t", "other", initial_position=EARLIEST)
    await stream.nack(ids_of(await stream.deliveries(1)), dead_letter=True)
    request = admin_pb2.RequeueDeadLettersRequest(
        topic="t", subscription="s", all=True, deliver_after_ms=HOUR_MS
    )
    await within(wire.admin.RequeueDeadLetters(request))
    for _ in range(2):
        assert await counts(wire) == (0, 0, 1)
        assert await counts(wire, "other") == (1, 0, 0)
        wire = await restarted(serve, wire)


async def test_the_oldest_ready_message_gives_the_age(wire: Wire):
    await wire.create_subscription("t", initial_position=EARLIEST)
    assert (await stats(wire)).oldest_ready_age_ms == 0
    before_ms = now_ms()
    await wire.produce("t", *later(2), Message(payload=b"due", deliver_after_ms=50), b"now")
    after_ms = now_ms()
    await settles(wire, (2, 0, 2))
    low_ms, age_ms, high_ms = now_ms(), (await stats(wire)).oldest_ready_age_ms, now_ms()
    assert low_ms - after_ms <= age_ms <= high_ms - before_ms, "the one that was ready at once"
    stream = await wire.subscribe("t")
    got = {each.message.payload: each for each in await stream.deliveries(2)}
    assert (await stats(wire)).oldest_ready_age_ms == 0
    await stream.ack(ids_of([got[b"now"]]))
    await stream.close()
    await settles(wire, (1, 0, 2))
    due_ms = got[b"due"].deliver_at_ms
    low_ms, age_ms, high_ms = now_ms(), (await stats(wire)).oldest_ready_age_ms, now_ms()
    assert low_ms - due_ms <= age_ms <= high_ms - due_ms, "what came back is as old as it is due"


async def test_the_oldest_ready_message_is_found_among_many_ledgers_and_after_a_restart(serve: Serve):
    wire = await serve(ledger_max_entries=3)
    await wire.create_subscription("t", initial_position=EARLIEST)
    times = []
    for _ in range(6):
        await wire.produce("t", *later(1))
        response = await wire.producer.Produce(batch("t", b"now"))
        times.append((response.publish_time_ms, (response.ids[0].ledger_id, response.ids[0].first_entry_id)))
        await eventually(lambda: now_ms() > times[-1][0])
    for index, (time_ms, id_) in enumerate(times[:-1]):
        low_ms, age_ms, high_ms = now_ms(), (await stats(wire)).oldest_ready_age_ms, now_ms()
        assert low_ms - time_ms <= age_ms <= high_ms - time_ms
        assert await wire.ack("t", [id_]) == []
        if index == 2:
            wire = await restarted(serve, wire)


async def test_counts_come_in_pages(wire: Wire):
    names = [f"topic-{i}" for i in range(5)]
    for name in names:
        await wire.produce(name, b"1")
    request = admin_pb2.GetStatsRequest(page_size=2)
    sizes: list[int] = []
    found: list[str] = []
    while not sizes or request.page_token:
        page = await within(wire.admin.GetStats(request))
        found += [topic.topic for topic in page.topics]
        sizes.append(len(page.topics))
        request.page_token = page.next_page_token
    assert (found, sizes) == (names, [2, 2, 1])
    page = await within(wire.admin.GetStats(admin_pb2.GetStatsRequest(topics=names[3:0:-1], page_size=2)))
    assert [topic.topic for topic in page.topics] == names[1:3]
    request = admin_pb2.GetStatsRequest(topics=names[1:4], page_size=2, page_token=page.next_page_token)
    page = await within(wire.admin.GetStats(request))
    assert ([topic.topic for topic in page.topics], page.next_page_token) == (names[3:4], "")


async def test_pages_of_counts_that_cannot_be_are_refused(wire: Wire):
    for request, reason in (
        (admin_pb2.GetStatsRequest(page_size=1_001), "INVALID_PAGE_SIZE"),
        (admin_pb2.GetStatsRequest(page_size=-1), "INVALID_PAGE_SIZE"),
        (admin_pb2.GetStatsRequest(page_token="?"), "INVALID_PAGE_TOKEN"),
        (admin_pb2.GetStatsRequest(topics=["nowhere"]), "TOPIC_NOT_FOUND"),
    ):
        assert (await refused(wire.admin.GetStats(request))).reason == reason


async def test_skip_after_a_restart_leaves_nothing(serve: Serve):
    wire = await serve()
    await wire.create_subscription("t", initial_position=EARLIEST)
    await wire.create_subscription("t", "other", initial_position=EARLIEST)
    await wire.produce("t", *later(7), b"1")
    wire = await restarted(serve, wire)
    assert await skip_all(wire) == 8
    assert await counts(wire) == (0, 0, 0)
    assert await counts(wire, "other") == (1, 0, 7)
    await seek(wire, initial_position=EARLIEST)
    assert await counts(wire) == (1, 0, 7)
