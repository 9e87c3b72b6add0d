"""ScheduleService: what requests become, and what comes back."""

from __future__ import annotations

from typing import Any

import grpc
import pytest

from broker.model import DELIVER_AT_MS_MAX, ENTRY_ID_MAX, LEDGER_ID_MAX, TIME_MS_MAX, Position
from broker.rpc.schedule_answers import encode_returned
from broker.topics.message_look import MessageStanding
from broker.topics.owed_list import OwedState
from broker.topics.schedule_values import Cancel, DueRange, Move, ScheduledCounts
from postdate_api.v1 import message_pb2, schedule_pb2
from tests.unit.rpc.fake_schedule import NOW_MS, Edge, FakeSchedule, Refused

DONE, DELIVERED, NOT_FOUND, CANCELLED = 1, 2, 3, 4
FULL = message_pb2.MESSAGE_VIEW_FULL
NO_VIEW: Any = 9
LATER_MS = 3_000_000_000_000
OPEN = DueRange(0, TIME_MS_MAX + 1)


def ids(*entry_ids: int, ledger_id: int = 7) -> message_pb2.EntrySet:
    return message_pb2.EntrySet(ledger_id=ledger_id, entry_ids=entry_ids)


def by_ids(*sets: message_pb2.EntrySet) -> schedule_pb2.Selector:
    return schedule_pb2.Selector(entries=sets)


def by_keys(*keys: str) -> schedule_pb2.Selector:
    return schedule_pb2.Selector(schedule_keys=keys)


def cancelling(selector: schedule_pb2.Selector, **fields: Any) -> schedule_pb2.CancelScheduledRequest:
    return schedule_pb2.CancelScheduledRequest(topic="t", selector=selector, **fields)


def moving(selector: schedule_pb2.Selector, **fields: Any) -> schedule_pb2.RescheduleRequest:
    return schedule_pb2.RescheduleRequest(topic="t", selector=selector, **fields)


def listing(**fields: Any) -> schedule_pb2.ListScheduledRequest:
    return schedule_pb2.ListScheduledRequest(topic="t", **fields)


def results(answer: Any) -> list[tuple[int, int]]:
    return [(each.id.entry_id, each.result) for each in answer.outcomes]


async def refused(edge: Edge, method: str, request: Any) -> Refused:
    with pytest.raises(Refused) as caught:
        await edge.call(method, request)
    assert edge.schedule.asked == []
    return caught.value


@pytest.fixture
def edge() -> Edge:
    return Edge()


# -- get ---------------------------------------------------------------------------------------------------------


async def test_a_message_is_shown_without_its_payload_unless_that_is_asked_for(edge: Edge):
    message: dict[str, Any] = {
        "payload": b"secret",
        "key": "k",
        "schedule_key": "order-17",
        "properties": {"a": "b"},
    }
    edge.schedule.add((7, 3), 2_000_000, **message)
    for name in ({"id": message_pb2.MessageId(ledger_id=7, entry_id=3)}, {"schedule_key": "order-17"}):
        request = schedule_pb2.GetScheduledRequest(topic="t", **name)
        found = (await edge.call("GetScheduled", request)).scheduled
        assert (found.id.ledger_id, found.id.entry_id, found.schedule_key) == (7, 3, "order-17")
        assert (found.deliver_at_ms, found.publish_time_ms, found.state) == (2_000_000, 5, 1)
        assert found.size_bytes == len(edge.schedule.held[Position(7, 3)].frame)
        assert found.message == message_pb2.Message(**{**message, "payload": b""})
        request.view = FULL
        assert (await edge.call("GetScheduled", request)).scheduled.message.payload == b"secret"


async def test_what_is_not_pending_is_not_found(edge: Edge):
    for name in (
        {"schedule_key": "nobody"},
        {"id": message_pb2.MessageId(ledger_id=7)},
        {"id": message_pb2.MessageId(ledger_id=LEDGER_ID_MAX + 1)},
        {"id": message_pb2.MessageId(ledger_id=1, entry_id=ENTRY_ID_MAX + 1)},
    ):
        error = await refused(edge, "GetScheduled", schedule_pb2.GetScheduledRequest(topic="t", **name))
        assert (error.code, error.reason) == (grpc.StatusCode.NOT_FOUND, "SCHEDULED_NOT_FOUND")


# -- list --------------------------------------------------------------------------------------------------------


async def test_a_list_comes_in_pages_each_of_which_goes_on_where_the_last_one_ended(edge: Edge):
    for i in range(25):
        edge.schedule.add((7, i), 2_000_000 + i % 5, payload=b"x", schedule_key=f"k{i}")
    due = schedule_pb2.TimeRange(start_ms=1, end_ms=3_000_000)
    for page_size in (1, 7, 25, 26, 1_000):
        found: list[int] = []
        request = listing(due=due, page_size=page_size, key_prefix="k")
        while True:
            answer = await edge.call("ListScheduled", request)
            assert len(answer.scheduled) <= page_size
            found += (each.id.entry_id for each in answer.scheduled)
            if not answer.next_page_token:
                break
            request.page_token = answer.next_page_token
        assert found == sorted(range(25), key=lambda i: (i % 5, i))
    assert edge.schedule.asked[0] == (DueRange(1, 3_000_000), "k", None, 1)
    assert edge.schedule.asked[1] == (DueRange(1, 3_000_000), "k", (2_000_000, 7, 5), 1)


async def test_the_default_page_is_of_a_hundred(edge: Edge):
    await edge.call("ListScheduled", listing())
    assert edge.schedule.asked == [(OPEN, "", None, 100)]


async def test_a_page_ends_before_it_is_too_large_for_a_frame():
    edge = Edge(frame_bytes_max=3_000_000)
    for i in range(9):
        edge.schedule.add((7, i), 2_000_000, payload=bytes(700_000))
    answer = await edge.call("ListScheduled", listing(view=FULL))
    assert (len(answer.scheduled), answer.ByteSize() < 3_000_000) == (4, True)
    answer = await edge.call("ListScheduled", listing(view=FULL, page_token=answer.next_page_token))
    assert [each.id.entry_id for each in answer.scheduled] == [4, 5, 6, 7]
    assert len((await edge.call("ListScheduled", listing())).scheduled) == 9


async def test_an_empty_page_may_have_a_next_one(edge: Edge):
    edge.schedule.add((7, 1), 2_000_000)
    edge.schedule.page_max = 0
    answer = await edge.call("ListScheduled", listing())
    assert (len(answer.scheduled), bool(answer.next_page_token)) == (0, True)


@pytest.mark.parametrize(
    "other",
    [
        listing(key_prefix="k"),
        listing(due=schedule_pb2.TimeRange(start_ms=1)),
        schedule_pb2.ListScheduledRequest(topic="u"),
    ],
)
async def test_a_token_of_another_list_is_refused(edge: Edge, other: schedule_pb2.ListScheduledRequest):
    edge.add_topic("u", FakeSchedule())
    for i in range(3):
        edge.schedule.add((7, i), 2_000_000)
    other.page_token = (await edge.call("ListScheduled", listing(page_size=1))).next_page_token
    with pytest.raises(Refused) as caught:
        await edge.call("ListScheduled", other)
    assert (caught.value.reason, caught.value.field) == ("INVALID_PAGE_TOKEN", "page_token")


# -- count -------------------------------------------------------------------------------------------------------


async def test_counts_of_several_topics_add_up(edge: Edge):
    other = FakeSchedule(counts=ScheduledCounts([(200, 1), (300, 2)], 5, 6, False))
    edge.schedule.counts = ScheduledCounts([(100, 3), (200, 4)], 1, 2, True)
    edge.add_topic("t", edge.schedule, data_bytes=1_000, entry_total=10)
    edge.add_topic("u", other, data_bytes=50, entry_total=10)
    due = schedule_pb2.TimeRange(start_ms=100, end_ms=1_000)
    request = schedule_pb2.CountScheduledRequest(topics=["t", "u", "t"], due=due, width_ms=100)
    answer = await edge.call("CountScheduled", request)
    found = [(bar.start_ms, bar.messages, bar.bytes) for bar in answer.buckets]
    assert found == [(100, 3, 300), (200, 5, 405), (300, 2, 10)]
    assert (answer.before, answer.after, answer.exact) == (6, 8, False)
    assert edge.schedule.asked == other.asked == [(DueRange(100, 1_000), 100)]


async def test_without_a_width_there_is_one_bar(edge: Edge):
    await edge.call("CountScheduled", schedule_pb2.CountScheduledRequest(topics=["t"]))
    due = schedule_pb2.TimeRange(start_ms=5, end_ms=9)
    await edge.call("CountScheduled", schedule_pb2.CountScheduledRequest(topics=["t"], due=due))
    assert edge.schedule.asked == [(OPEN, TIME_MS_MAX + 1), (DueRange(5, 9), 4)]


async def test_bars_of_all_topics_together_are_limited(edge: Edge):
    edge.schedule.counts = ScheduledCounts([(i, 1) for i in range(6_000)], 0, 0, True)
    edge.add_topic("u", FakeSchedule(counts=ScheduledCounts([(-i, 1) for i in range(1, 6_000)], 0, 0, True)))
    request = schedule_pb2.CountScheduledRequest(topics=["t", "u"], width_ms=1)
    with pytest.raises(Refused, match="TOO_MANY_BARS"):
        await edge.call("CountScheduled", request)


# -- changes -----------------------------------------------------------------------------------------------------


async def test_each_id_is_answered_in_its_place_also_one_that_comes_twice_or_that_no_message_can_have(
    edge: Edge,
):
    for i in (1, 2, 3):
        edge.schedule.add((7, i), 2_000_000)
    edge.schedule.delivered[Position(7, 2)] = ("billing",)
    selector = by_ids(ids(3, 9, 1), ids(0, ledger_id=LEDGER_ID_MAX + 1), ids(2, 3, 1 << 40))
    answer = await edge.call("CancelScheduled", cancelling(selector))
    assert results(answer) == [
        (3, DONE),
        (9, NOT_FOUND),
        (1, DONE),
        (0, NOT_FOUND),
        (2, DELIVERED),
        (3, DONE),
        (1 << 40, NOT_FOUND),
    ]
    assert answer.outcomes[3].id.ledger_id == LEDGER_ID_MAX + 1
    assert list(answer.outcomes[4].delivered_to) == ["billing"]
    assert answer.matched == 3
    names = [Position(7, 3), Position(7, 9), Position(7, 1), Position(7, 2)]
    assert edge.schedule.asked == [(names, Cancel(), False)]
    answer = await edge.call("CancelScheduled", cancelling(by_ids(ids(3))))
    assert results(answer) == [(3, CANCELLED)]


async def test_each_key_is_answered_in_its_place(edge: Edge):
    edge.schedule.add((7, 1), 2_000_000, schedule_key="a")
    answer = await edge.call("CancelScheduled", cancelling(by_keys("a", "nobody", "a")))
    assert [(each.schedule_key, each.HasField("id"), each.result) for each in answer.outcomes] == [
        ("a", True, DONE),
        ("nobody", False, NOT_FOUND),
        ("a", True, DONE),
    ]
    assert answer.matched == 1
    assert edge.schedule.asked == [(["a", "nobody"], Cancel(), False)]


@pytest.mark.parametrize(
    ("time", "move", "at_ms"),
    [
        ({"deliver_at_ms": LATER_MS}, Move(deliver_at_ms=LATER_MS), LATER_MS),
        ({"deliver_after_ms": 0}, Move(deliver_after_ms=0), 2_000_000),
        ({"shift_ms": -60_000}, Move(shift_ms=-60_000), 1_940_000),
        ({"shift_ms": TIME_MS_MAX}, Move(shift_ms=TIME_MS_MAX), 2_000_000 + TIME_MS_MAX),
    ],
)
async def test_a_move_has_one_kind_of_time(edge: Edge, time: dict[str, int], move: Move, at_ms: int):
    edge.schedule.add((7, 1), 2_000_000)
    answer = await edge.call("Reschedule", moving(by_ids(ids(1)), dry_run=True, **time))
    assert edge.schedule.asked == [([Position(7, 1)], move, True)]
    assert answer.outcomes[0].deliver_at_ms == at_ms


async def test_a_repeat_with_the_same_request_id_gets_the_first_answer(edge: Edge):
    edge.schedule.add((7, 1), 2_000_000)
    edge.schedule.add((7, 2), 2_000_000)
    request = cancelling(by_ids(ids(1)), request_id="r")
    first = await edge.call("CancelScheduled", request)
    assert await edge.call("CancelScheduled", request) == first
    assert len(edge.schedule.asked) == 1
    with pytest.raises(Refused, match="REQUEST_ID_REUSED"):
        await edge.call("CancelScheduled", cancelling(by_ids(ids(2)), request_id="r"))
    edge.time.advance(600_000)
    assert results(await edge.call("CancelScheduled", request)) == [(1, CANCELLED)]


async def test_names_of_subscriptions_share_what_is_left_of_the_frame():
    edge = Edge(frame_bytes_max=1_200_000)
    names = tuple(f"{i:0255}" for i in range(40))
    count = 2_000
    for i in range(count):
        edge.schedule.delivered[Position(7, i)] = names if i % 2 else names[:1]
    answer = await edge.call("CancelScheduled", cancelling(by_ids(ids(*range(count)))))
    assert 900_000 < answer.ByteSize() <= 1_200_000 or len(answer.outcomes[1].delivered_to) == 2
    assert answer.ByteSize() <= 1_200_000
    assert results(answer) == [(i, DELIVERED) for i in range(count)]
    assert list(answer.outcomes[0].delivered_to) == [names[0]]
    assert tuple(answer.outcomes[1].delivered_to) == names[: len(answer.outcomes[1].delivered_to)]
    assert len({len(each.delivered_to) for each in answer.outcomes[1::2]}) == 1


@pytest.mark.parametrize("with_keys", [False, True])
@pytest.mark.parametrize("with_names", [False, True])
async def test_many_outcomes_are_written_as_few_are(edge: Edge, with_keys: bool, with_names: bool):
    """In bulk or one by one: what a client reads is the same."""
    for i in range(0, 400, 3):
        key = f"order-{i}" * (i % 20) if with_keys else ""
        edge.schedule.add((1 << i % 48, i), 1 << i % 50, schedule_key=key)
    if with_names:
        edge.schedule.delivered[Position(1, 1)] = ("billing",)
    places = [(1 << i % 48, i) for i in range(400)] + [((1 << 64) - 1, (1 << 64) - 1), (0, 0), (1, 1)]
    sets = [ids(entry_id, ledger_id=ledger_id) for ledger_id, entry_id in places]
    many = (await edge.call("Reschedule", moving(by_ids(*sets), shift_ms=7, dry_run=True))).outcomes
    few = []
    for each in sets:
        few += (await edge.call("Reschedule", moving(by_ids(each), shift_ms=7, dry_run=True))).outcomes
    assert list(many) == few
    assert {each.result for each in many} >= {DONE, NOT_FOUND}


# -- refusals ----------------------------------------------------------------------------------------------------

ONE = by_ids(ids(1))
TOO_FAR = TIME_MS_MAX + 1


def ranged(start_ms: int, end_ms: int) -> schedule_pb2.TimeRange:
    return schedule_pb2.TimeRange(start_ms=start_ms, end_ms=end_ms)


@pytest.mark.parametrize(
    ("method", "request_", "reason", "field"),
    [
        ("GetScheduled", schedule_pb2.GetScheduledRequest(topic="t"), "INVALID_SELECTOR", "name"),
        ("GetScheduled", schedule_pb2.GetScheduledRequest(topic="/", schedule_key="a"), "INVALID_NAME", "topic"),
        ("GetScheduled", schedule_pb2.GetScheduledRequest(topic="t", schedule_key=""), "INVALID_SCHEDULE_KEY", "schedule_key"),
        ("GetScheduled", schedule_pb2.GetScheduledRequest(topic="t", schedule_key="é" * 257), "SCHEDULE_KEY_TOO_LARGE", "schedule_key"),
        ("GetScheduled", schedule_pb2.GetScheduledRequest(topic="t", schedule_key="a", view=NO_VIEW), "INVALID_VIEW", "view"),
        ("ListScheduled", listing(view=9), "INVALID_VIEW", "view"),
        ("ListScheduled", listing(page_size=1_001), "INVALID_PAGE_SIZE", "page_size"),
        ("ListScheduled", listing(page_size=-1), "INVALID_PAGE_SIZE", "page_size"),
        ("ListScheduled", listing(page_token="!"), "INVALID_PAGE_TOKEN", "page_token"),
        ("ListScheduled", listing(page_token="YQ=="), "INVALID_PAGE_TOKEN", "page_token"),
        ("ListScheduled", listing(key_prefix="x" * 513), "SCHEDULE_KEY_TOO_LARGE", "key_prefix"),
        ("ListScheduled", listing(due=ranged(-1, 0)), "INVALID_TIME_RANGE", "due.start_ms"),
        ("ListScheduled", listing(due=ranged(0, TOO_FAR)), "INVALID_TIME_RANGE", "due.end_ms"),
        ("ListScheduled", listing(due=ranged(5, 5)), "INVALID_TIME_RANGE", "due"),
        ("CountScheduled", schedule_pb2.CountScheduledRequest(), "NO_TOPICS", "topics"),
        ("CountScheduled", schedule_pb2.CountScheduledRequest(topics=["t"] * 1_001), "TOO_MANY_NAMES", "topics"),
        ("CountScheduled", schedule_pb2.CountScheduledRequest(topics=["t", "/"]), "INVALID_NAME", "topics[1]"),
        ("CountScheduled", schedule_pb2.CountScheduledRequest(topics=["t"], width_ms=-1), "INVALID_WIDTH_MS", "width_ms"),
        ("CountScheduled", schedule_pb2.CountScheduledRequest(topics=["t"], due=ranged(9, 5)), "INVALID_TIME_RANGE", "due"),
        ("CancelScheduled", schedule_pb2.CancelScheduledRequest(topic="t"), "INVALID_SELECTOR", "selector"),
        ("CancelScheduled", schedule_pb2.CancelScheduledRequest(selector=ONE), "INVALID_NAME", "topic"),
        ("CancelScheduled", cancelling(schedule_pb2.Selector(entries=[ids(1)], schedule_keys=["a"])), "INVALID_SELECTOR", "selector"),
        ("CancelScheduled", cancelling(by_ids(ids(1), ids())), "EMPTY_ENTRY_SET", "selector.entries[1].entry_ids"),
        ("CancelScheduled", cancelling(by_keys("a", "")), "INVALID_SCHEDULE_KEY", "selector.schedule_keys[1]"),
        ("CancelScheduled", cancelling(by_keys("x" * 513)), "SCHEDULE_KEY_TOO_LARGE", "selector.schedule_keys[0]"),
        ("CancelScheduled", cancelling(ONE, request_id="x" * 256), "INVALID_REQUEST_ID", "request_id"),
        ("Reschedule", moving(ONE), "TIME_EXPECTED", "time"),
        ("Reschedule", moving(ONE, deliver_at_ms=0), "INVALID_DELIVER_AT_MS", "deliver_at_ms"),
        ("Reschedule", moving(ONE, deliver_at_ms=-1), "INVALID_DELIVER_AT_MS", "deliver_at_ms"),
        ("Reschedule", moving(ONE, deliver_at_ms=TOO_FAR), "INVALID_DELIVER_AT_MS", "deliver_at_ms"),
        ("Reschedule", moving(ONE, deliver_after_ms=-1), "INVALID_DELIVER_AFTER_MS", "deliver_after_ms"),
        ("Reschedule", moving(ONE, deliver_after_ms=DELIVER_AT_MS_MAX - NOW_MS + 1), "INVALID_DELIVER_AFTER_MS", "deliver_after_ms"),
        ("Reschedule", moving(ONE, shift_ms=-TOO_FAR), "INVALID_SHIFT_MS", "shift_ms"),
    ],
)  # fmt: skip
async def test_a_request_that_makes_no_sense_is_refused(
    edge: Edge, method: str, request_: Any, reason: str, field: str
):
    error = await refused(edge, method, request_)
    assert (error.code, error.reason, error.field) == (grpc.StatusCode.INVALID_ARGUMENT, reason, field)


async def test_an_unknown_topic_is_not_found(edge: Edge):
    del edge.registry.topics["t"]
    for method, request in (
        ("GetScheduled", schedule_pb2.GetScheduledRequest(topic="t", schedule_key="a")),
        ("ListScheduled", listing()),
        ("CountScheduled", schedule_pb2.CountScheduledRequest(topics=["t"])),
        ("CancelScheduled", cancelling(ONE)),
        ("Reschedule", moving(ONE, shift_ms=1, request_id="r")),
    ):
        assert (await refused(edge, method, request)).reason == "TOPIC_NOT_FOUND"


async def test_more_names_than_the_limit_are_refused_and_the_limit_is_told(edge: Edge):
    for selector in (
        by_ids(*[ids(i) for i in range(5_001)]),
        by_ids(ids(*range(5_001))),
        by_keys(*["a"] * 5_001),
    ):
        error = await refused(edge, "CancelScheduled", cancelling(selector))
        assert (error.reason, error.limit) == ("TOO_MANY_ENTRIES", "5000")
    error = await refused(edge, "CancelScheduled", bytes(5_000_000))  # before it is parsed
    assert (error.reason, error.limit) == ("TOO_MANY_ENTRIES", "5000")
    answer = await edge.call("CancelScheduled", cancelling(by_ids(ids(*range(5_000)))))
    assert len(answer.outcomes) == 5_000


async def test_where_keys_may_be_long_fewer_are_taken_so_that_the_answer_fits():
    edge = Edge(schedule_key_bytes_max=65_536)
    error = await refused(edge, "CancelScheduled", cancelling(by_keys(*["x" * 1_000] * 100)))
    assert (error.reason, error.limit) == ("TOO_MANY_ENTRIES", "55")
    keys = ["x" * 65_533 + f"{i:03}" for i in range(55)]
    for key in keys:
        edge.schedule.add((7, int(key[-3:])), 2_000_000, schedule_key=key)
    answer = await edge.call("CancelScheduled", cancelling(by_keys(*keys)))
    assert answer.ByteSize() <= 3_584 * 1_024


def test_as_many_subscriptions_are_told_as_fit_into_a_frame():
    message = schedule_pb2.GetScheduledResponse()
    message.scheduled.message.payload = b"x" * 4_000
    response = message.SerializeToString()
    reasons = [MessageStanding(f"s{number}", OwedState.RETRYING, 1, "r" * 1_000) for number in range(10)]
    answer = encode_returned(response, reasons, frame_bytes_max=8 * 1024)
    told = schedule_pb2.GetScheduledResponse.FromString(answer)
    assert [each.subscription for each in told.scheduled.returned] == ["s0", "s1", "s2"]
    assert len(answer) <= 8 * 1024
    assert told.scheduled.message.payload == b"x" * 4_000
    assert encode_returned(response, reasons, frame_bytes_max=4 * 1024) == response
