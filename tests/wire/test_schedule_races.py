"""Changes of what is pending, while it is handed out, moved by others, seeked to, or across a restart."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp
import pytest

from postdate_api.v1 import admin_pb2, consumer_pb2, schedule_pb2
from tests.wire.conftest import Ahead, Id, Serve, Wire, ids_of, now_ms, within
from tests.wire.schedule_calls import (
    CANCELLED,
    DELIVERED,
    DONE,
    HOUR_MS,
    after,
    at,
    by_filter,
    by_ids,
    by_keys,
    cancel,
    change_all,
    count,
    get,
    listed,
    move,
    name_of,
    results,
    shown_ids,
)

EARLIEST = consumer_pb2.INITIAL_POSITION_EARLIEST


async def ready(wire: Wire, messages: int) -> None:
    """Wait until so many are ready on the topic's subscription."""

    async def are_ready() -> bool:
        return (await wire.stats("t")).subscriptions[0].ready_messages == messages

    async with asyncio.timeout(10):
        while not await are_ready():
            await asyncio.sleep(0.005)


async def restarted(wire: Wire, serve: Serve) -> Wire:
    await wire.disconnect()
    await wire.stop()
    return await serve(data_dir=wire.server.config.data_dir, clock_recheck_ms=20)


async def test_what_is_queued_on_a_paused_subscription_can_still_be_cancelled_and_moved(wire: Wire):
    stream = await wire.subscribe("t")
    await within(wire.admin.Pause(admin_pb2.PauseRequest(topic="t", subscription="s")))
    first, second, third = await wire.produce("t", after(1), after(1), after(1))
    await ready(wire, 3)
    assert results(await cancel(wire, by_ids(first))) == [DONE]
    assert results(await move(wire, by_ids(second), deliver_after_ms=HOUR_MS)) == [DONE]
    await within(wire.admin.Resume(admin_pb2.ResumeRequest(topic="t", subscription="s")))
    assert ids_of([await stream.delivery()]) == [third]
    await stream.stays_quiet()
    shown = await get(wire, id=name_of(second))
    assert (shown.state, shown.revision) == (schedule_pb2.SCHEDULED_STATE_WAITING, 1)
    assert shown_ids(await listed(wire)) == [second]


async def test_what_a_consumer_has_no_permits_for_can_still_be_cancelled(wire: Wire):
    stream = await wire.subscribe("t", permits=1)
    ids = await wire.produce("t", *[after(1) for _ in range(5)])
    assert ids_of([await stream.delivery()]) == ids[:1]
    assert results(await cancel(wire, by_ids(*ids))) == [DELIVERED, DONE, DONE, DONE, DONE]
    await stream.send(permits=consumer_pb2.Permits(messages=10))
    await stream.stays_quiet()


@pytest.mark.parametrize(
    "type_", [consumer_pb2.SUBSCRIPTION_TYPE_SHARED, consumer_pb2.SUBSCRIPTION_TYPE_KEY_SHARED]
)
async def test_each_message_of_a_herd_is_either_delivered_or_cancelled(timed: Wire, ahead: Ahead, type_: Any):
    """Cancels and hand-outs of the same messages at the same time: each answer holds."""
    wire = timed
    stream = await wire.subscribe("t", permits=10_000, type=type_)
    ids = await wire.produce("t", *[after(key=f"k{i % 50}") for i in range(3_000)])

    async def cancel_some(part: list[Id]) -> list[tuple[Id, int]]:
        found = []
        for start in range(0, len(part), 50):
            chunk = part[start : start + 50]
            response = await cancel(wire, by_ids(*chunk))
            found += zip(chunk, results(response), strict=True)
            if start == 200:
                ahead.step(HOUR_MS)  # all that is left comes due
        return found

    answered = await asyncio.gather(*[cancel_some(ids[i::3]) for i in range(3)])
    outcomes = dict(pair for part in answered for pair in part)
    assert set(outcomes.values()) <= {DONE, DELIVERED}
    kept = {id_ for id_, result in outcomes.items() if result == DELIVERED}
    assert set(ids_of(await stream.deliveries(len(kept)))) == kept
    await stream.stays_quiet()


async def test_of_two_cancels_at_once_one_is_told_so(wire: Wire):
    ids = await wire.produce("t", *[after() for _ in range(200)])
    first, second = await asyncio.gather(cancel(wire, by_ids(*ids)), cancel(wire, by_ids(*ids)))
    assert {tuple(sorted(pair)) for pair in zip(results(first), results(second), strict=True)} == {
        (DONE, CANCELLED)
    }


async def test_of_two_moves_at_once_the_later_one_holds(wire: Wire):
    [id_] = await wire.produce("t", after())
    await asyncio.gather(*[move(wire, by_ids(id_), shift_ms=1_000) for _ in range(5)])
    shown = await get(wire, id=name_of(id_))
    assert (shown.revision, shown.deliver_at_ms - shown.publish_time_ms) == (5, HOUR_MS + 5_000)


async def test_a_key_that_is_freed_and_taken_at_once_names_one_message(wire: Wire):
    await wire.produce("t", after(schedule_key="a"))

    async def replace_it() -> int:
        while True:
            if results(await cancel(wire, by_keys("a"))) == [DONE]:
                await wire.produce("t", after(schedule_key="a"))
                return 1

    assert sum(await asyncio.gather(*[replace_it() for _ in range(8)])) == 8
    [shown] = await listed(wire)
    assert shown == await get(wire, schedule_key="a")


async def test_neither_a_new_subscription_nor_a_seek_back_brings_a_cancelled_message(
    timed: Wire, ahead: Ahead
):
    wire = timed
    stream = await wire.subscribe("t")
    first, second, third = await wire.produce("t", after(), after(), b"now")
    assert ids_of([await stream.delivery()]) == [third]
    assert results(await cancel(wire, by_ids(first))) == [DONE]
    ahead.step(HOUR_MS)
    assert ids_of([await stream.delivery()]) == [second]
    assert await stream.ack([second, third]) == []
    late = await wire.subscribe("t", "late", initial_position=EARLIEST)
    assert sorted(ids_of(await late.deliveries(2))) == [second, third]
    await late.stays_quiet()
    request = admin_pb2.SeekRequest(topic="t", subscription="s", initial_position=EARLIEST)
    await within(wire.admin.Seek(request))
    again = await wire.subscribe("t")
    assert sorted(ids_of(await again.deliveries(2))) == [second, third]
    await again.stays_quiet()


async def test_moves_and_their_revisions_survive_a_restart(timed: Wire, serve: Serve, ahead: Ahead):
    wire = timed
    await wire.create_subscription("t")
    start_ms = now_ms() + HOUR_MS
    ids = await wire.produce("t", *[at(start_ms + i, schedule_key=f"k{i}") for i in range(4)])
    await move(wire, by_ids(ids[0]), deliver_at_ms=start_ms + 10)
    await move(wire, by_ids(ids[0]), deliver_at_ms=start_ms + 20)
    await move(wire, by_ids(ids[1]), deliver_at_ms=start_ms - 1)
    await move(wire, by_keys("k2"), deliver_after_ms=HOUR_MS // 2)
    before = await listed(wire)
    wire = await restarted(wire, serve)
    assert await listed(wire) == before
    assert [(each.schedule_key, each.revision) for each in before] == [
        ("k2", 1),
        ("k1", 1),
        ("k3", 0),
        ("k0", 2),
    ]
    assert (await get(wire, schedule_key="k0")).id == name_of(ids[0])
    stream = await wire.subscribe("t")
    ahead.step(HOUR_MS // 2)
    assert ids_of([await stream.delivery()]) == [ids[2]]
    await stream.stays_quiet()
    ahead.step(HOUR_MS)
    assert ids_of(await stream.deliveries(3)) == [ids[1], ids[3], ids[0]]


async def test_a_page_of_a_list_goes_on_after_a_restart(serve: Serve):
    wire = await serve()
    start_ms = now_ms() + HOUR_MS
    ids = await wire.produce("t", *[at(start_ms + 10 * i) for i in range(9)])
    page = await within(
        wire.schedule.ListScheduled(schedule_pb2.ListScheduledRequest(topic="t", page_size=2))
    )
    wire = await restarted(wire, serve)
    request = schedule_pb2.ListScheduledRequest(topic="t", page_token=page.next_page_token, page_size=1_000)
    rest = await within(wire.schedule.ListScheduled(request))
    assert shown_ids(page.scheduled) + shown_ids(rest.scheduled) == ids


async def test_what_was_due_before_a_restart_may_have_been_delivered(serve: Serve):
    wire = await serve()
    await wire.create_subscription("t")
    [id_] = await wire.produce("t", after(1))
    await ready(wire, 1)
    wire = await restarted(wire, serve)
    response = await cancel(wire, by_ids(id_))
    assert (results(response), list(response.outcomes[0].delivered_to)) == ([DELIVERED], ["s"])
    assert ids_of([await (await wire.subscribe("t")).delivery()]) == [id_]


@pytest.mark.parametrize("tracker", [admin_pb2.TRACKER_BUCKET, admin_pb2.TRACKER_MEMORY])
async def test_both_trackers_show_and_change_alike(wire: Wire, tracker: Any):
    policy = admin_pb2.TopicPolicy(tracker=tracker, buckets=admin_pb2.BucketPolicy(min_index_count=1))
    await within(wire.admin.CreateTopic(admin_pb2.CreateTopicRequest(name="t", policy=policy)))
    start_ms = now_ms() + HOUR_MS
    ids = [id_ for i in range(6) for id_ in await wire.produce("t", at(start_ms + i * 1_000))]
    assert results(await cancel(wire, by_ids(ids[1]))) == [DONE]
    assert results(await move(wire, by_ids(ids[0]), deliver_at_ms=start_ms + 3_500)) == [DONE]
    assert results(await move(wire, by_ids(ids[5]), deliver_at_ms=start_ms + 1)) == [DONE]
    assert shown_ids(await listed(wire, page_size=2)) == [ids[5], ids[2], ids[3], ids[0], ids[4]]
    counts = await count(wire)
    assert sum(bar.messages for bar in counts.buckets) == 5
    assert (await wire.stats("t")).scheduled_messages == 5
    change = await change_all(wire, by_filter(start_ms + 2_000, start_ms + 4_000), cancel=True)
    assert (change.matched_messages, change.done_messages) == (3, 3)
    assert shown_ids(await listed(wire)) == [ids[5], ids[4]]


async def test_changes_are_counted_in_metrics(wire: Wire):
    ids = await wire.produce("t", *[after() for _ in range(5)])
    await cancel(wire, by_ids(*ids[:2]))
    await move(wire, by_ids(*ids), shift_ms=1)
    await move(wire, by_ids(ids[4]), shift_ms=1)

    async def metrics() -> str:
        url = f"http://{wire.server.http_address}/metrics"
        async with aiohttp.ClientSession() as session, session.get(url) as response:
            return await response.text()

    text = await within(metrics())
    assert 'postdate_cancelled_messages_total{topic="t"} 2.0' in text
    assert 'postdate_moved_messages_total{topic="t"} 4.0' in text


async def test_the_index_agrees_with_the_log_after_many_changes(wire: Wire):
    start_ms = now_ms() + HOUR_MS
    ids = await wire.produce("t", *[at(start_ms + i) for i in range(500)])
    changes: list[Callable[[], Awaitable[Any]]] = [
        lambda: cancel(wire, by_ids(*ids[::7])),
        lambda: move(wire, by_ids(*ids[::5]), shift_ms=250),
        lambda: change_all(wire, by_filter(start_ms, start_ms + 100), shift_ms=300),
        lambda: change_all(wire, by_filter(start_ms + 400, 0), cancel=True),
        lambda: change_all(wire, by_filter(), shift_ms=-50),
    ]
    for change in changes:
        await change()
    check = await within(wire.admin.VerifyTopic(admin_pb2.VerifyTopicRequest(name="t")))
    assert (check.finding_count, list(check.findings)) == (0, [])
    shown = await listed(wire, page_size=100)
    assert len(shown) == (await wire.stats("t")).scheduled_messages
    assert sum(bar.messages for bar in (await count(wire)).buckets) == len(shown)
