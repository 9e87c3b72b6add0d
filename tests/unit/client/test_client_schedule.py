"""`client.schedule` against the fake broker: typed results, pages, calls of bounded size, failures on the way."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

import postdate
from postdate import ChangeResult, MessageId, ScheduledState
from postdate.recurring import Recurring
from postdate_api.v1 import schedule_pb2
from tests.unit.client.fake_server import FakeBroker
from tests.unit.client.fake_values import LEDGER, status

HOUR = timedelta(hours=1)
PAST = datetime(2020, 1, 1, tzinfo=UTC)
HOURLY = postdate.RecurringSchedule(name="hourly", interval=HOUR)
DONE, DELIVERED = ChangeResult.DONE, ChangeResult.ALREADY_DELIVERED
NOT_FOUND, CANCELLED = ChangeResult.NOT_FOUND, ChangeResult.ALREADY_CANCELLED
UNAVAILABLE = status("INVALID_ARGUMENT", "BROKEN", "broken")


def ids(*entry_ids: int) -> list[MessageId]:
    return [MessageId(LEDGER, each) for each in entry_ids]


def asked(broker: FakeBroker, kind: type[Any]) -> list[Any]:
    return [each for each in broker.unary if isinstance(each, kind)]


def broken(client: postdate.Client) -> bool:
    """Return whether the client has found out that nobody is there."""
    channel = client._rpc.front.connection.channel
    return channel.get_state() is grpc.ChannelConnectivity.TRANSIENT_FAILURE


@pytest.fixture
async def pending(broker: FakeBroker, client: postdate.Client) -> datetime:
    """Messages 0 to 4 of `t`, due an hour apart from when this says, with keys order-0 to order-4; 5 is due."""
    start = datetime(2100, 1, 1, tzinfo=UTC)
    messages = [
        postdate.OutgoingMessage(
            b"%d" % i, key="k", properties={"a": "b"}, deliver_at=start + i * HOUR, schedule_key=f"order-{i}"
        )
        for i in range(5)
    ]
    async with client.producer("t") as producer:
        await producer.send_many([*messages, postdate.OutgoingMessage(b"due")])
    return start


async def test_get_shows_a_message_by_id_or_key(client: postdate.Client, pending: datetime) -> None:
    shown = await client.schedule.get("t", schedule_key="order-1")
    assert shown == await client.schedule.get("t", MessageId(LEDGER, 1))
    assert (shown.id, shown.schedule_key, shown.deliver_at) == ((LEDGER, 1), "order-1", pending + HOUR)
    assert (shown.state, shown.revision, shown.payload) == (ScheduledState.WAITING, 0, None)
    assert (shown.key, dict(shown.properties), shown.ttl, shown.event_time) == ("k", {"a": "b"}, None, None)
    assert (await client.schedule.get("t", MessageId(LEDGER, 1), payload=True)).payload == b"1"
    with pytest.raises(postdate.NotFound) as caught:
        await client.schedule.get("t", MessageId(LEDGER, 5))
    assert caught.value.reason == "SCHEDULED_NOT_FOUND"


async def test_list_goes_through_all_pages_in_due_order(
    broker: FakeBroker, client: postdate.Client, pending: datetime
) -> None:
    listed = [each async for each in client.schedule.list("t", payloads=True)]
    assert [each.payload for each in listed] == [b"0", b"1", b"2", b"3", b"4"]
    some = client.schedule.list("t", start=pending + HOUR, end=pending + 3 * HOUR, key_prefix="order-")
    assert [each.id.entry_id async for each in some] == [1, 2]
    first = asked(broker, schedule_pb2.ListScheduledRequest)[-1]
    assert first.due.start_ms == round((pending + HOUR).timestamp() * 1000)
    assert [each.id.entry_id async for each in client.schedule.list("t", limit=3)] == [0, 1, 2]
    assert [each.page_size for each in asked(broker, schedule_pb2.ListScheduledRequest)[-2:]] == [3, 1]
    assert [each async for each in client.schedule.list("t", key_prefix="x")] == []


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not holds():
            await asyncio.sleep(0)


async def taken(rows: Any, count: int) -> list[int]:
    return [(await anext(rows)).id.entry_id for _ in range(count)]


async def test_from_the_second_page_on_the_next_one_is_asked_for_while_rows_are_taken(
    broker: FakeBroker, client: postdate.Client, pending: datetime
) -> None:
    rows = client.schedule.list("t")
    assert await taken(rows, 2) == [0, 1]
    assert len(asked(broker, schedule_pb2.ListScheduledRequest)) == 1
    assert await taken(rows, 1) == [2]
    await until(lambda: len(asked(broker, schedule_pb2.ListScheduledRequest)) == 3)
    assert await taken(rows, 2) == [3, 4]
    with pytest.raises(StopAsyncIteration):
        await anext(rows)
    requests = asked(broker, schedule_pb2.ListScheduledRequest)
    assert [(each.page_token, each.page_size) for each in requests] == [
        ("", 1_000),
        ("2", 1_000),
        ("4", 1_000),
    ]


@pytest.fixture
def pages(client: postdate.Client, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The tokens of the pages that were asked for; that of token 4 never comes."""
    tokens: list[str] = []
    method = client._rpc.schedule.ListScheduled

    def noting(request: Any, **arguments: Any) -> Any:
        tokens.append(request.page_token)
        return asyncio.Future() if request.page_token == "4" else method(request, **arguments)

    monkeypatch.setattr(client._rpc, "schedule", SimpleNamespace(ListScheduled=noting))
    return tokens


async def test_a_page_is_asked_for_before_rows_are_taken_by_a_loop_that_never_waits(
    client: postdate.Client, pending: datetime, pages: list[str]
) -> None:
    await taken(client.schedule.list("t"), 3)
    assert pages == ["", "2", "4"]  # and nothing was awaited since the third row


async def test_no_page_is_asked_for_that_the_limit_leaves_out(
    client: postdate.Client, pending: datetime, pages: list[str]
) -> None:
    assert await taken(client.schedule.list("t", limit=4), 4) == [0, 1, 2, 3]
    assert pages == ["", "2"]


async def test_a_page_asked_for_ahead_is_no_longer_than_the_limit_leaves_it(
    broker: FakeBroker, client: postdate.Client, pending: datetime
) -> None:
    assert await taken(client.schedule.list("t", limit=5), 5) == [0, 1, 2, 3, 4]
    assert [each.page_size for each in asked(broker, schedule_pb2.ListScheduledRequest)] == [5, 3, 1]


async def test_whoever_is_cancelled_as_the_next_page_is_asked_for_leaves_none_to_come(
    client: postdate.Client, pending: datetime, pages: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    taking = asyncio.create_task(taken(client.schedule.list("t"), 3))
    keep = client._rpc.keep

    def cancelling(task: asyncio.Future[Any]) -> None:
        keep(task)
        if "2" in pages:
            taking.cancel()

    monkeypatch.setattr(client._rpc, "keep", cancelling)
    await asyncio.wait([taking])
    assert taking.cancelled()
    await until(lambda: not client._rpc._keeping)


async def test_a_page_asked_for_ahead_in_vain_is_asked_for_once_more(
    broker: FakeBroker, client: postdate.Client, pending: datetime
) -> None:
    rows = client.schedule.list("t")
    assert await taken(rows, 2) == [0, 1]
    broker.knobs.schedule_errors.extend((None, UNAVAILABLE))
    assert await taken(rows, 1) == [2]
    await until(lambda: len(asked(broker, schedule_pb2.ListScheduledRequest)) == 3)
    await until(lambda: not client._rpc._keeping)
    assert await taken(rows, 2) == [3, 4]


async def test_the_page_after_those_of_a_list_that_is_left_is_not_waited_for(
    client: postdate.Client, pending: datetime, pages: list[str]
) -> None:
    rows = client.schedule.list("t")
    await taken(rows, 3)
    assert client._rpc._keeping
    await rows.aclose()  # type: ignore[attr-defined]
    await until(lambda: not client._rpc._keeping)


async def test_a_list_of_a_client_that_is_closed_says_so(
    broker: FakeBroker, client: postdate.Client, pending: datetime
) -> None:
    rows = client.schedule.list("t")
    await taken(rows, 4)
    await client.close()
    with pytest.raises(postdate.Closed):
        await anext(rows)


async def test_counts_come_in_bars(broker: FakeBroker, client: postdate.Client, pending: datetime) -> None:
    counts = await client.schedule.count(
        "t", start=pending + HOUR, end=pending + 4 * HOUR, width=timedelta(hours=2)
    )
    assert counts.bars == (
        postdate.ScheduledBar(pending + HOUR, 2, 20),
        postdate.ScheduledBar(pending + 3 * HOUR, 1, 10),
    )
    assert (counts.before, counts.after, counts.messages, counts.exact) == (1, 1, 3, True)
    broker.knobs.counts_exact = False
    one = await client.schedule.count("t", "t")
    assert ([bar.messages for bar in one.bars], one.exact) == ([10], False)


async def test_one_message_is_cancelled_or_moved_with_a_definite_answer(
    client: postdate.Client, pending: datetime
) -> None:
    outcome = await client.schedule.cancel("t", schedule_key="order-1", dry_run=True)
    assert outcome == await client.schedule.cancel("t", schedule_key="order-1")
    assert (bool(outcome), outcome.done, outcome.id, outcome.deliver_at, outcome.delivered_to) == (
        True,
        True,
        (LEDGER, 1),
        None,
        (),
    )
    assert (await client.schedule.cancel("t", MessageId(LEDGER, 1))).result is CANCELLED
    nobody = await client.schedule.cancel("t", schedule_key="nobody")
    assert (nobody.result, nobody.id, nobody.schedule_key) == (NOT_FOUND, None, "nobody")
    assert not nobody, "what was not done is false, as its name in a condition suggests"
    late = await client.schedule.move("t", MessageId(LEDGER, 5), shift=HOUR)
    assert (late.result, late.delivered_to) == (DELIVERED, ("billing", "audit"))
    moved = await client.schedule.move("t", schedule_key="order-2", deliver_at=pending)
    assert (moved.result, moved.deliver_at) == (DONE, pending)
    moved = await client.schedule.move("t", schedule_key="order-2", shift=-HOUR)
    assert moved.deliver_at == pending - HOUR
    assert (await client.schedule.get("t", schedule_key="order-2")).revision == 2


@pytest.mark.slow
async def test_send_now_delivers_at_once(client: postdate.Client, pending: datetime) -> None:
    async with client.subscribe("t", "s") as subscription:
        assert (await anext(subscription)).payload == b"due"
        assert (await client.schedule.send_now("t", schedule_key="order-4")).done
        assert (await anext(subscription)).payload == b"4"


async def test_many_ids_go_in_calls_of_bounded_size_each_name_once(
    broker: FakeBroker, client: postdate.Client, pending: datetime, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("postdate.schedule.NAMES_MAX", 2)
    seen: list[tuple[int, int]] = []
    change = await client.schedule.cancel_many(
        "t", ids(0, 1, 2, 0, 5, 9, 1), progress=lambda done, total: seen.append((done, total))
    )
    assert (change.done, change.matched) == (3, 4)
    assert change.counts == {DONE: 3, DELIVERED: 1, NOT_FOUND: 1}
    assert sorted((each.id, each.result) for each in change.not_done if each.id) == [
        ((LEDGER, 5), DELIVERED),
        ((LEDGER, 9), NOT_FOUND),
    ]
    assert sorted(seen)[-1] == (5, 5)
    requests = asked(broker, schedule_pb2.CancelScheduledRequest)
    assert sorted(list(each.selector.entries[0].entry_ids) for each in requests) == [[0, 1], [2, 5], [9]]
    assert len({each.request_id for each in requests}) == 3


async def test_many_keys_are_moved(client: postdate.Client, pending: datetime) -> None:
    change = await client.schedule.move_many("t", schedule_keys=["order-0", "order-0", "x"], shift=HOUR)
    assert (change.done, [each.schedule_key for each in change.not_done]) == (1, ["x"])
    assert (await client.schedule.get("t", schedule_key="order-0")).deliver_at == pending + HOUR
    nothing = await client.schedule.cancel_many("t")
    assert (nothing.done, nothing.matched, nothing.not_done) == (0, 0, ())


async def test_a_broker_that_takes_fewer_names_gets_them_in_smaller_calls(
    broker: FakeBroker, client: postdate.Client, pending: datetime
) -> None:
    broker.knobs.schedule_names_max = 2
    assert (await client.schedule.cancel_many("t", ids(0, 1, 2))).done == 3


async def test_all_that_match_are_changed_by_the_broker(
    broker: FakeBroker, client: postdate.Client, pending: datetime
) -> None:
    assert await client.schedule.count_matching("t", start=pending + HOUR, key_prefix="order-") == 4
    seen: list[tuple[int, int]] = []
    change = await client.schedule.move_matching(
        "t",
        start=pending + HOUR,
        key_prefix="order-",
        shift=HOUR,
        progress=lambda done, total: seen.append((done, total)),
    )
    assert (change.done, change.matched, seen) == (4, 4, [(4, 4)])
    assert (change.state, change.shift, change.key_prefix) == (postdate.BulkChangeState.DONE, HOUR, "order-")
    begun = asked(broker, schedule_pb2.StartBulkChangeRequest)
    assert len({each.request_id for each in begun}) == len(begun) == 2
    times = [each.deliver_at async for each in client.schedule.list("t")]
    assert times == [pending, *(pending + i * HOUR for i in range(2, 6))]
    dry = await client.schedule.cancel_matching("t", end=pending + HOUR, dry_run=True)
    assert (dry.done, await client.schedule.count_matching("t")) == (1, 5)
    running = await client.schedule.cancel_matching("t", wait=False)
    assert (running.state, running.end_time) == (postdate.BulkChangeState.RUNNING, None)
    assert (await client.schedule.wait_bulk_change("t", running.id)).done == 5
    found = await client.schedule.bulk_changes("t")
    assert [each.id for each in found] == [5, 4, 3, 2, 1]
    assert (
        found[0]
        == await client.schedule.bulk_change("t", 5)
        == await client.schedule.cancel_bulk_change("t", 5)
    )


async def test_a_bulk_change_that_fails_says_how_far_it_came(
    broker: FakeBroker, client: postdate.Client, pending: datetime
) -> None:
    broker.knobs.bulk_change_fails = True
    with pytest.raises(
        postdate.BulkChangeFailed, match=r"5 messages were changed, then .* failed: too far"
    ) as caught:
        await client.schedule.move_matching("t", shift=HOUR)
    assert (caught.value.reason, caught.value.change.done) == ("DELIVER_AT_TOO_FAR", 5)


async def test_a_count_that_somebody_cancels_is_no_count(
    client: postdate.Client, pending: datetime, monkeypatch: pytest.MonkeyPatch
) -> None:
    schedule = client.schedule
    monkeypatch.setattr(schedule, "bulk_change", schedule.cancel_bulk_change)
    with pytest.raises(postdate.BulkChangeFailed, match="cancelled the count") as caught:
        await schedule.count_matching("t")
    assert caught.value.change.state is postdate.BulkChangeState.CANCELLED


async def test_a_bulk_change_is_begun_again_with_its_request_id_where_the_answer_is_lost(
    broker: FakeBroker, client: postdate.Client, pending: datetime
) -> None:
    broker.knobs.change_status = grpc.StatusCode.UNAVAILABLE
    await client.schedule.cancel_matching("t")
    first, second = asked(broker, schedule_pb2.StartBulkChangeRequest)
    assert first.request_id == second.request_id != ""


async def test_a_call_that_fails_on_the_way_leaves_what_others_did(
    broker: FakeBroker, client: postdate.Client, pending: datetime, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("postdate.schedule.NAMES_MAX", 1)
    broker.knobs.schedule_errors.extend((None, UNAVAILABLE))
    with pytest.raises(postdate.PartlyChanged, match="changed, then a call failed: broken"):
        await client.schedule.cancel_many("t", ids(2, 3, 4))
    broker.knobs.schedule_errors.append(UNAVAILABLE)
    with pytest.raises(postdate.InvalidRequest, match="broken"):
        await client.schedule.cancel_many("t", ids(2))


async def test_a_change_is_not_made_again_by_a_broker_that_died_in_it(
    broker: FakeBroker, client: postdate.Client, pending: datetime
) -> None:
    broker.knobs.die_in_change = True
    with pytest.raises(postdate.Disconnected, match="may have happened or not"):
        await client.schedule.move("t", MessageId(LEDGER, 1), shift=HOUR)
    await broker.rebirth
    moved = await client.schedule.get("t", MessageId(LEDGER, 1))
    assert (moved.revision, moved.deliver_at) == (1, pending + 2 * HOUR)
    assert len(asked(broker, schedule_pb2.RescheduleRequest)) == 1
    assert (await client.schedule.move("t", MessageId(LEDGER, 1), shift=HOUR)).done


@pytest.mark.parametrize("code", ["UNAVAILABLE", "INTERNAL", "CANCELLED"])
async def test_a_change_whose_answer_is_lost_is_in_doubt(
    broker: FakeBroker, client: postdate.Client, pending: datetime, code: str
) -> None:
    broker.knobs.change_status = grpc.StatusCode[code]
    with pytest.raises(postdate.Disconnected, match="may have happened or not: broken"):
        await client.schedule.send_now("t", schedule_key="order-1")
    assert len(asked(broker, schedule_pb2.RescheduleRequest)) == 1
    broker.knobs.schedule_errors.append(status("UNAVAILABLE", "STORAGE_FAILED", "no disk"))
    with pytest.raises(postdate.Disconnected) as caught:
        await client.schedule.cancel("t", schedule_key="order-2")
    assert caught.value.reason == "STORAGE_FAILED"


async def test_changes_that_are_cut_say_what_was_answered_before(
    broker: FakeBroker, client: postdate.Client, pending: datetime, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("postdate.schedule.NAMES_MAX", 2)
    monkeypatch.setattr("postdate.schedule._IN_FLIGHT", 1)

    def cut(done: int, total: int) -> None:
        broker.knobs.die_in_change = done == 2

    with pytest.raises(postdate.PartlyChanged) as caught:
        await client.schedule.move_many("t", ids(0, 1, 2, 3, 4), shift=HOUR, progress=cut)
    assert (caught.value.change.done, caught.value.change.matched) == (2, 2)
    assert isinstance(caught.value.__cause__, postdate.Disconnected)
    await broker.rebirth
    revisions = [each.revision async for each in client.schedule.list("t")]
    assert sorted(revisions) == [0, 1, 1, 1, 1]


async def test_a_change_waits_for_a_broker_that_has_done_nothing(
    broker: FakeBroker, client: postdate.Client, pending: datetime
) -> None:
    broker.knobs.schedule_errors.append(status("UNAVAILABLE", "RECOVERING", "starting", retry_ms=1))
    assert (await client.schedule.move("t", MessageId(LEDGER, 1), shift=HOUR)).done
    assert len(asked(broker, schedule_pb2.RescheduleRequest)) == 2
    await broker.stop()
    change = asyncio.create_task(client.schedule.move("t", MessageId(LEDGER, 1), shift=HOUR))
    while not broken(client):
        await asyncio.sleep(0)
    await broker.start(broker.port)
    assert (await change).deliver_at == pending + 3 * HOUR


async def test_a_change_is_not_sent_to_a_broker_that_is_away(
    broker: FakeBroker, client: postdate.Client, pending: datetime
) -> None:
    await broker.stop()
    async with postdate.connect(f"127.0.0.1:{broker.port}", retry_for=timedelta(0)) as other:
        for _ in range(2):
            with pytest.raises(postdate.Unavailable, match="no connection"):
                await other.schedule.cancel("t", schedule_key="order-1")
        waiting = asyncio.create_task(client.schedule.cancel("t", schedule_key="order-1"))
        while not broken(client):
            await asyncio.sleep(0)
        await client.close()
        with pytest.raises(postdate.Closed):
            await waiting
    await broker.start(broker.port)
    assert asked(broker, schedule_pb2.CancelScheduledRequest) == []


async def test_arguments_that_make_no_sense_are_refused_before_anything_is_sent(
    broker: FakeBroker, client: postdate.Client
) -> None:
    naive = datetime(2100, 1, 1)
    one = MessageId(1, 1)
    schedule = client.schedule
    for call in (
        schedule.get("t"),
        schedule.get("t", one, schedule_key="a"),
        schedule.cancel("t"),
        schedule.cancel_many("t", [one], schedule_keys=["a"]),
        schedule.cancel_matching("t", start=naive),
        schedule.move("t", one),
        schedule.move("t", one, shift=HOUR, deliver_after=HOUR),
        schedule.move("t", one, deliver_at=naive),
        schedule.move("t", one, deliver_after=-HOUR),
        schedule.move("t", one, shift=timedelta.max),
        schedule.count("t", width=timedelta(0)),
        schedule.count("t", end=naive),
    ):
        with pytest.raises(ValueError, match=r"\w"):
            await call
    with pytest.raises(ValueError, match=r"\w"):
        schedule.list("t", start=naive)
    shift: Any = 5
    with pytest.raises(TypeError):
        await schedule.move("t", one, shift=shift)
    with pytest.raises(TypeError, match="schedule_keys is a list"):
        await schedule.cancel_many("t", schedule_keys="far")
    one_id: Any = one
    with pytest.raises(TypeError, match="ids is a list"):
        await schedule.move_many("t", one_id, shift=HOUR)
    assert broker.unary == []


async def test_a_fraction_of_a_millisecond_makes_a_shift_later(
    broker: FakeBroker, client: postdate.Client, pending: datetime
) -> None:
    for shift in (timedelta(microseconds=1), timedelta(microseconds=-1)):
        await client.schedule.move("t", MessageId(LEDGER, 0), shift=shift, dry_run=True)
    assert [each.shift_ms for each in asked(broker, schedule_pb2.RescheduleRequest)] == [1, 0]


CHANGES: dict[str, Callable[[Recurring], Awaitable[Any]]] = {
    "put": lambda recurring: recurring.put("t", HOURLY),
    "pause": lambda recurring: recurring.pause("t", "hourly"),
    "resume": lambda recurring: recurring.resume("t", "hourly"),
    "delete": lambda recurring: recurring.delete("t", "hourly"),
    "trigger": lambda recurring: recurring.trigger("t", "hourly"),
    "backfill": lambda recurring: recurring.backfill("t", "hourly", PAST, PAST + HOUR),
}


@pytest.mark.parametrize("change", CHANGES)
async def test_a_change_of_a_recurring_schedule_is_not_made_twice(
    broker: FakeBroker, client: postdate.Client, pending: datetime, change: str
) -> None:
    await client.recurring.put("t", HOURLY)
    before = len(broker.unary)
    broker.knobs.schedule_errors.append(status("UNAVAILABLE", "STORAGE_FAILED", "no disk"))
    with pytest.raises(postdate.Disconnected, match="may have happened or not"):
        await CHANGES[change](client.recurring)
    assert len(broker.unary) == before + 1


async def test_a_backfill_that_is_cut_says_where_to_go_on(
    broker: FakeBroker, client: postdate.Client, pending: datetime
) -> None:
    broker.knobs.schedule_errors.extend((None, None, status("RESOURCE_EXHAUSTED", "QUOTA_EXCEEDED", "full")))
    with pytest.raises(
        postdate.PartlyStored, match=r"2 occurrences were stored, those before .*00:02:00"
    ) as caught:
        await client.recurring.backfill("t", "hourly", PAST, PAST + HOUR)
    assert caught.value.stored_count == 2
    assert isinstance(caught.value.__cause__, postdate.LimitReached)
