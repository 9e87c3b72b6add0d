"""ScheduleService over gRPC: what is pending is seen, cancelled, moved, with definite answers."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest

from broker.rpc.schedule import RETURNED_SHOWN
from postdate_api.v1 import admin_pb2, consumer_pb2, schedule_pb2
from tests.wire.conftest import Ahead, Serve, Wire, ids_of, now_ms, refused, sets, within
from tests.wire.schedule_calls import (
    CANCELLED,
    DELIVERED,
    DONE,
    FULL,
    HOUR_MS,
    NOT_FOUND,
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

# -- seeing ------------------------------------------------------------------------------------------------------


async def test_a_pending_message_is_shown_by_id_and_by_key(wire: Wire):
    before_ms = now_ms()
    message = after(payload=b"secret", key="k", schedule_key="order-17", properties={"a": "b"})
    [id_] = await wire.produce("t", message)
    shown = await get(wire, id=name_of(id_))
    assert shown == await get(wire, schedule_key="order-17")
    assert (shown.id, shown.schedule_key, shown.revision) == (name_of(id_), "order-17", 0)
    assert shown.state == schedule_pb2.SCHEDULED_STATE_WAITING
    assert before_ms <= shown.publish_time_ms == shown.deliver_at_ms - HOUR_MS
    assert (shown.message.payload, shown.message.key, dict(shown.message.properties)) == (
        b"",
        "k",
        {"a": "b"},
    )
    assert (await get(wire, id=name_of(id_), view=FULL)).message == message
    error = await refused(get(wire, schedule_key="order-18"))
    assert (error.code, error.reason) == (grpc.StatusCode.NOT_FOUND, "SCHEDULED_NOT_FOUND")


async def test_a_message_without_a_time_and_one_that_was_delivered_are_not_pending(wire: Wire):
    stream = await wire.subscribe("t")
    ids = await wire.produce("t", b"now", after(1))
    await stream.deliveries(2)
    for id_ in ids:
        assert (await refused(get(wire, id=name_of(id_)))).reason == "SCHEDULED_NOT_FOUND"


async def test_what_is_due_and_was_sent_to_nobody_is_shown_as_due(wire: Wire):
    await wire.create_subscription("t")
    [id_] = await wire.produce("t", after(1, schedule_key="a"))
    async with asyncio.timeout(10):
        while (await wire.stats("t")).subscriptions[0].ready_messages != 1:
            await asyncio.sleep(0.005)
    assert (await get(wire, id=name_of(id_))).state == schedule_pb2.SCHEDULED_STATE_DUE
    assert (await refused(get(wire, schedule_key="a"))).reason == "SCHEDULED_NOT_FOUND"  # its key is free
    [outcome] = (await cancel(wire, by_keys("a"))).outcomes
    assert (outcome.result, outcome.id) == (NOT_FOUND, name_of(id_))  # which can be cancelled by its id
    assert await listed(wire) == []


async def test_what_came_back_is_shown_by_id_until_it_is_settled(wire: Wire):
    stream = await wire.subscribe("t", "b")
    other = await wire.subscribe("t", "a")
    ids = await wire.produce("t", b"now", after(1, b"payload", schedule_key="k"))
    await stream.deliveries(2)
    await other.deliveries(2)
    for id_ in ids:  # what is held for the first time came back to nobody
        assert (await refused(get(wire, id=name_of(id_)))).reason == "SCHEDULED_NOT_FOUND"
    assert await stream.nack(ids, reason="boom", redeliver_after_ms=HOUR_MS) == []
    now, delayed = [await get(wire, id=name_of(id_), view=FULL) for id_ in ids]
    for shown in (now, delayed):
        assert shown.state == schedule_pb2.SCHEDULED_STATE_RETURNED
        assert list(shown.returned) == [
            schedule_pb2.ReturnedMessage(subscription="b", attempts=1, last_reason="boom")
        ]
    assert (now.message.payload, now.deliver_at_ms) == (b"now", now.publish_time_ms)
    assert (delayed.message.payload, delayed.schedule_key) == (b"payload", "k")
    assert delayed.deliver_at_ms == delayed.publish_time_ms + 1
    assert (await get(wire, id=name_of(ids[0]))).message.payload == b""
    assert (await refused(get(wire, schedule_key="k"))).reason == "SCHEDULED_NOT_FOUND"  # its key is free
    assert await other.nack(ids[:1], reason="broken", redeliver_after_ms=1) == []
    await other.deliveries(1)  # also while it is out once more
    assert [
        (each.subscription, each.attempts, each.last_reason)
        for each in (await get(wire, id=name_of(ids[0]))).returned
    ] == [("a", 1, "broken"), ("b", 1, "boom")]
    assert await other.ack(ids) == []
    assert [each.subscription for each in (await get(wire, id=name_of(ids[0]))).returned] == ["b"]
    await wire.ack("t", ids, "b")
    for id_ in ids:
        assert (await refused(get(wire, id=name_of(id_)))).reason == "SCHEDULED_NOT_FOUND"


async def test_what_came_back_to_one_that_ignores_delays_is_shown_with_its_reason_while_it_waits(wire: Wire):
    policy = admin_pb2.SubscriptionPolicy(honor_delay=False)
    exclusive = consumer_pb2.SUBSCRIPTION_TYPE_EXCLUSIVE
    await wire.create_subscription("t", "eager", type=exclusive, policy=policy)
    stream = await wire.subscribe("t", "eager", type=exclusive)
    [id_] = await wire.produce("t", after(schedule_key="k"))
    await stream.deliveries(1)
    assert await stream.nack([id_], reason="boom", redeliver_after_ms=HOUR_MS) == []
    for shown in (await get(wire, id=name_of(id_)), await get(wire, schedule_key="k")):
        assert shown.state == schedule_pb2.SCHEDULED_STATE_WAITING
        assert [(each.subscription, each.last_reason) for each in shown.returned] == [("eager", "boom")]


async def test_of_many_subscriptions_to_which_a_message_came_back_the_first_hundred_are_told(wire: Wire):
    names = [f"s{number:03}" for number in range(RETURNED_SHOWN + 1)]
    for name in names:
        await wire.create_subscription("t", name)
    [id_] = await wire.produce("t", b"x")
    for name in reversed(names):
        received = await wire.receive("t", name, max_messages=1)
        request = consumer_pb2.NackRequest(
            topic="t",
            subscription=name,
            consumer_id=received.consumer_id,
            entries=sets([id_]),
            redeliver_after_ms=HOUR_MS,
            reason="é" * 512,
        )
        assert not (await within(wire.consumer.Nack(request))).failures
    shown = await get(wire, id=name_of(id_))
    assert [each.subscription for each in shown.returned] == names[:RETURNED_SHOWN]
    assert {each.last_reason for each in shown.returned} == {"é" * 512}


async def test_lists_are_in_due_order_page_by_page(wire: Wire):
    start_ms = now_ms() + HOUR_MS
    times = [(i * 7) % 10 for i in range(30)]
    ids = await wire.produce(
        "t", *[at(start_ms + n, schedule_key=f"{'ab'[i % 2]}{i}") for i, n in enumerate(times)]
    )
    ordered = [id_ for _, id_ in sorted(zip(times, ids, strict=True))]
    for page_size in (0, 1, 7, 30, 1_000):
        assert shown_ids(await listed(wire, page_size=page_size)) == ordered
    due = schedule_pb2.TimeRange(start_ms=start_ms + 3, end_ms=start_ms + 5)
    assert [each.deliver_at_ms - start_ms for each in await listed(wire, due=due)] == [3, 3, 3, 4, 4, 4]
    odd = await listed(wire, key_prefix="b", page_size=4)
    assert sorted(shown_ids(odd)) == sorted(ids[1::2])
    assert shown_ids(odd) == [id_ for id_ in ordered if id_ in shown_ids(odd)]


async def test_pages_stay_right_while_messages_come_and_go(wire: Wire):
    start_ms = now_ms() + HOUR_MS
    ids = await wire.produce("t", *[at(start_ms + 10 * i) for i in range(10)])
    request = schedule_pb2.ListScheduledRequest(topic="t", page_size=3)
    response = await within(wire.schedule.ListScheduled(request))
    found = shown_ids(response.scheduled)
    await cancel(wire, by_ids(ids[0], ids[5]))
    [before, behind] = await wire.produce("t", at(start_ms + 1), at(start_ms + 71))
    request.page_token, request.page_size = response.next_page_token, 1_000
    found += shown_ids((await within(wire.schedule.ListScheduled(request))).scheduled)
    assert found == [*ids[:5], *ids[6:8], behind, *ids[8:]]
    assert before not in found


async def test_counts_come_in_bars(wire: Wire):
    start_ms = now_ms() + HOUR_MS
    await wire.produce("t", *[at(start_ms + n) for n in (0, 5, 9, 10, 25, 40, 41)])
    counts = await count(
        wire, due=schedule_pb2.TimeRange(start_ms=start_ms + 5, end_ms=start_ms + 40), width_ms=10
    )
    bars = [(bar.start_ms - start_ms, bar.messages) for bar in counts.buckets]
    assert (bars, counts.before, counts.after, counts.exact) == ([(5, 3), (25, 1)], 1, 2, True)
    whole = await count(wire)
    assert ([bar.messages for bar in whole.buckets], whole.before, whole.after) == ([7], 0, 0)
    assert whole.buckets[0].bytes > 0
    await change_all(wire, by_filter(), cancel=True)
    assert len((await count(wire)).buckets) == 0
    wide = schedule_pb2.CountScheduledRequest(topics=["t"], width_ms=1)
    await wire.produce("t", at(start_ms), at(start_ms + 20_000))
    assert (await refused(wire.schedule.CountScheduled(wide))).reason == "TOO_MANY_BARS"


# -- cancel ------------------------------------------------------------------------------------------------------


async def test_what_was_cancelled_is_never_delivered_and_its_key_is_free(timed: Wire, ahead: Ahead):
    wire = timed
    stream = await wire.subscribe("t")
    first, second = await wire.produce("t", after(schedule_key="a"), after(payload=b"kept"))
    response = await cancel(wire, by_ids(first, (first[0], 77)), dry_run=True)
    assert (results(response), response.matched) == ([DONE, NOT_FOUND], 1)
    response = await cancel(wire, by_keys("a", "nobody"))
    assert (results(response), response.matched) == ([DONE, NOT_FOUND], 1)
    outcomes = [(each.schedule_key, each.HasField("id")) for each in response.outcomes]
    assert outcomes == [("a", True), ("nobody", False)]
    assert response.outcomes[0].id == name_of(first)
    again = await cancel(wire, by_keys("a", "nobody"))
    assert (results(again), again.matched) == ([CANCELLED, NOT_FOUND], 1)
    assert again.outcomes[0].id == name_of(first)
    assert results(await cancel(wire, by_ids(first))) == [CANCELLED]
    [third] = await wire.produce("t", after(2 * HOUR_MS, schedule_key="a"))
    assert (await get(wire, schedule_key="a")).id == name_of(third)
    ahead.step(HOUR_MS)
    assert ids_of([await stream.delivery()]) == [second]
    await stream.stays_quiet()
    assert results(await cancel(wire, by_ids(second))) == [DELIVERED]


async def test_all_or_nothing_over_subscriptions(wire: Wire):
    """One that was sent the message keeps all of them from losing it; one that ignores delays does not count."""
    for name in ("first", "second"):
        await wire.create_subscription("t", name)
    reader = await wire.subscribe("t", "reader", type=consumer_pb2.SUBSCRIPTION_TYPE_EXCLUSIVE)
    await wire.create_subscription("t", "later", type=consumer_pb2.SUBSCRIPTION_TYPE_EXCLUSIVE)
    ids = await wire.produce("t", after(1), after())
    stream = await wire.subscribe("t", "first")
    assert ids_of([await stream.delivery()]) == ids[:1]
    assert ids_of(await reader.deliveries(2)) == ids
    response = await cancel(wire, by_ids(*ids))
    assert results(response) == [DELIVERED, DONE]
    assert list(response.outcomes[0].delivered_to) == ["first"]
    for name in ("second", "later"):
        other = await wire.subscribe("t", name)
        assert ids_of([await other.delivery()]) == ids[:1]
        await other.stays_quiet()


async def test_what_is_due_but_was_sent_to_nobody_can_still_be_cancelled(wire: Wire):
    await wire.create_subscription("t")
    [id_] = await wire.produce("t", after(1))
    async with asyncio.timeout(10):
        while (await wire.stats("t")).subscriptions[0].ready_messages != 1:
            await asyncio.sleep(0.005)
    assert results(await cancel(wire, by_ids(id_))) == [DONE]
    await (await wire.subscribe("t")).stays_quiet()
    assert (await wire.stats("t")).subscriptions[0].ready_messages == 0


async def test_a_cancel_survives_a_restart(timed: Wire, serve: Serve, ahead: Ahead):
    await timed.create_subscription("t")
    [id_, other] = await timed.produce("t", after(schedule_key="a"), after())
    assert results(await cancel(timed, by_keys("a"))) == [DONE]
    await timed.disconnect()
    await timed.stop()
    wire = await serve(data_dir=timed.server.config.data_dir, clock_recheck_ms=20)
    assert results(await cancel(wire, by_ids(id_))) == [CANCELLED]
    stream = await wire.subscribe("t")
    ahead.step(HOUR_MS)
    assert ids_of([await stream.delivery()]) == [other]
    await stream.stays_quiet()


async def test_five_thousand_at_once_and_a_filter_over_more(wire: Wire):
    ids = [id_ for _ in range(3) for id_ in await wire.produce("t", *[after() for _ in range(4_000)])]
    response = await cancel(wire, by_ids(*ids[:5_000]), request_id="r")
    assert results(response) == [DONE] * 5_000
    assert await cancel(wire, by_ids(*ids[:5_000]), request_id="r") == response
    assert (await wire.stats("t")).scheduled_messages == 7_000
    change = await change_all(wire, by_filter(), cancel=True)
    assert (change.total_messages, change.matched_messages, change.done_messages) == (7_000, 7_000, 7_000)
    assert (await wire.stats("t")).scheduled_messages == 0


# -- move --------------------------------------------------------------------------------------------------------


async def test_a_move_keeps_the_id_and_raises_the_revision(wire: Wire):
    start_ms = now_ms() + HOUR_MS
    [id_] = await wire.produce("t", at(start_ms, schedule_key="a"))
    for revision, (fields, wanted_ms) in enumerate(
        [
            ({"deliver_at_ms": start_ms + 5}, start_ms + 5),
            ({"shift_ms": -HOUR_MS // 2}, start_ms + 5 - HOUR_MS // 2),
            ({"deliver_at_ms": start_ms}, start_ms),  # back to its first time
        ],
        start=1,
    ):
        response = await move(wire, by_keys("a"), **fields)
        assert (results(response), response.outcomes[0].deliver_at_ms) == ([DONE], wanted_ms)
        shown = await get(wire, schedule_key="a")
        assert (shown.id, shown.deliver_at_ms, shown.revision) == (name_of(id_), wanted_ms, revision)
    assert shown_ids(await listed(wire)) == [id_]


async def test_a_move_earlier_later_and_to_now_is_obeyed(timed: Wire, ahead: Ahead):
    wire = timed
    stream = await wire.subscribe("t")
    later, sooner, now = await wire.produce("t", after(), after(), after())
    assert results(await move(wire, by_ids(later), deliver_after_ms=2 * HOUR_MS)) == [DONE]
    moved = await move(wire, by_ids(sooner), deliver_after_ms=HOUR_MS // 2)
    response = await move(wire, by_ids(now), deliver_after_ms=0)
    assert results(moved) == results(response) == [DONE]
    assert ids_of([await stream.delivery()]) == [now]
    await stream.stays_quiet()
    ahead.step(HOUR_MS // 2)
    delivery = await stream.delivery()
    assert (ids_of([delivery]), delivery.deliver_at_ms) == ([sooner], moved.outcomes[0].deliver_at_ms)
    ahead.step(HOUR_MS)  # past its first time
    await stream.stays_quiet()
    assert shown_ids(await listed(wire)) == [later]
    assert results(await move(wire, by_ids(now), shift_ms=1)) == [DELIVERED]
    ahead.step(HOUR_MS // 2)
    assert ids_of([await stream.delivery()]) == [later]


async def test_a_shift_inside_its_own_range_moves_each_message_once(wire: Wire):
    start_ms = now_ms() + HOUR_MS
    await wire.produce("t", *[at(start_ms + 60_000 * i) for i in range(20)])
    chosen = by_filter(start_ms, start_ms + 24 * HOUR_MS)
    change = await change_all(wire, chosen, shift_ms=600_000)
    assert (change.matched_messages, change.done_messages) == (20, 20)
    shown = await listed(wire)
    assert [each.deliver_at_ms for each in shown] == [start_ms + 60_000 * i + 600_000 for i in range(20)]
    assert {each.revision for each in shown} == {1}


async def test_a_dry_run_changes_nothing(wire: Wire):
    await wire.produce("t", *[after(schedule_key=f"order-{i}") for i in range(5)])
    before = await listed(wire)
    change = await change_all(wire, by_filter(key_prefix="order-"), shift_ms=5, dry_run=True)
    assert (change.matched_messages, change.done_messages) == (5, 5)
    response = await move(wire, by_keys("order-0", "order-1"), shift_ms=5, dry_run=True)
    assert (results(response), response.matched) == ([DONE] * 2, 2)
    assert response.outcomes[0].deliver_at_ms == before[0].deliver_at_ms + 5
    assert results(await cancel(wire, by_keys("order-0"), dry_run=True)) == [DONE]
    assert await listed(wire) == before


async def test_a_delay_over_the_limit_is_refused_and_nothing_changes(wire: Wire):
    limits = admin_pb2.TopicPolicy(max_delay_ms=2 * HOUR_MS)
    await within(wire.admin.CreateTopic(admin_pb2.CreateTopicRequest(name="t", policy=limits)))
    ids = await wire.produce("t", after(1 + HOUR_MS // 2), after(HOUR_MS))
    for fields in ({"deliver_after_ms": 3 * HOUR_MS}, {"shift_ms": HOUR_MS + HOUR_MS // 4}):
        error = await refused(move(wire, by_ids(*ids), **fields))
        assert (error.code, error.reason) == (grpc.StatusCode.OUT_OF_RANGE, "DELIVER_AT_TOO_FAR")
        assert (error.fields, error.metadata["max_delay_ms"]) == (tuple(fields), str(2 * HOUR_MS))
        too_far = ids[0] if "deliver_after_ms" in fields else ids[1]
        assert "The delay of message {}:{} exceeds".format(*too_far) in error.message
    assert {each.revision for each in await listed(wire)} == {0}
    error = await refused(move(wire, by_ids(*ids), shift_ms=(1 << 53) - 1))
    assert (error.code, error.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_NEW_TIME")
    assert error.fields == ("shift_ms",)
    assert {each.revision for each in await listed(wire)} == {0}
    await wire.produce("t", after(HOUR_MS))


async def test_a_moved_message_lives_as_long_after_its_new_time(timed: Wire, ahead: Ahead):
    stream = await timed.subscribe("t")
    ids = await timed.produce("t", *[after(ttl_ms=HOUR_MS // 2) for _ in range(2)])
    assert results(await move(timed, by_ids(ids[0]), deliver_after_ms=2 * HOUR_MS)) == [DONE]
    ahead.step(2 * HOUR_MS)  # the other one has expired before anybody looked
    assert ids_of([await stream.delivery()]) == ids[:1]
    await stream.stays_quiet()


# -- the service -------------------------------------------------------------------------------------------------


async def test_requests_are_refused_before_anything_is_looked_at(wire: Wire):
    await wire.produce("t", after())
    for call, reason, field in (
        (cancel(wire, schedule_pb2.Selector()), "INVALID_SELECTOR", "selector"),
        (move(wire, by_keys("a")), "TIME_EXPECTED", "time"),
        (get(wire), "INVALID_SELECTOR", "name"),
    ):
        error = await refused(call)
        assert (error.code, error.reason, error.fields) == (
            grpc.StatusCode.INVALID_ARGUMENT,
            reason,
            (field,),
        )
    error = await refused(wire.raw("/postdate.v1.ScheduleService/Reschedule")(b"\xff"))
    assert error.reason == "MALFORMED_REQUEST"
    unknown = schedule_pb2.CancelScheduledRequest(topic="u", selector=by_keys("a"))
    assert (await refused(wire.schedule.CancelScheduled(unknown))).reason == "TOPIC_NOT_FOUND"


@pytest.mark.parametrize("method", ["CancelScheduled", "Reschedule"])
async def test_five_thousand_ids_fit_and_one_more_does_not(wire: Wire, method: str):
    await wire.produce("t", after())
    kind = (
        schedule_pb2.CancelScheduledRequest if method == "CancelScheduled" else schedule_pb2.RescheduleRequest
    )
    request: Any = kind(topic="t", selector=by_ids(*[(9, i) for i in range(5_001)]))
    if method == "Reschedule":
        request.shift_ms = 1
    error = await refused(getattr(wire.schedule, method)(request))
    assert (error.reason, error.metadata["limit"]) == ("TOO_MANY_ENTRIES", "5000")
    del request.selector.entries[0].entry_ids[0]
    assert results(await within(getattr(wire.schedule, method)(request))) == [NOT_FOUND] * 5_000
