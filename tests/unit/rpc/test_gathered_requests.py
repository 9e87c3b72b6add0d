"""Requests that gather on a produce stream: taken in order, bounded, and answered as if each were taken alone."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from typing import Any

import pytest

from broker.errors import InvalidRequest
from broker.model import IdRange
from broker.rpc import gathered_requests, producer
from broker.rpc.field_counts import CHEAP_BYTES
from broker.rpc.gathered_requests import GatheredBytes, GatheredRequests, put_together
from broker.testing.mem_vfs import MemVfs
from broker.testing.sim_clock import SimClock
from broker.testing.sim_loop import SimLoop, run_sim
from broker.topics.intake import Accepted
from postdate_api.v1 import message_pb2, producer_pb2
from tests.harness import EARLIEST, Node, small_config
from tests.unit.rpc.call_world import Edge

CONFIG = small_config()
REQUESTS_MAX, BYTES_MAX, UNDER_WAY = 16, 64 * 1024, 2


def request(number: int, *payloads: bytes, topic: str = "orders", **fields: Any) -> Any:
    of_request = {name: fields.pop(name) for name in ("producer_name", "replace") if name in fields}
    messages = [message_pb2.Message(payload=payload, **fields) for payload in payloads]
    return producer_pb2.ProduceRequest(
        topic=topic, messages=messages, request_id=number, join_answers=True, **of_request
    )


def accepted() -> Accepted:
    return Accepted((IdRange(1, 0, 1),), 0, asyncio.get_running_loop().create_future())


def under_way(gathered: GatheredRequests) -> list[Accepted]:
    """Put so many records of a stream on their way that the next request waits."""
    records = [accepted() for _ in range(UNDER_WAY)]
    for record in records:
        gathered.submitted(record)
    return records


def take(gathered: GatheredRequests) -> list[bytes]:
    with gathered.taken() as requests:
        return requests


async def test_what_comes_while_two_requests_are_on_their_way_waits_until_one_is_stored():
    gathered = GatheredRequests(GatheredBytes())
    records = []
    for raw in (b"first", b"second"):
        gathered.add(raw)
        assert not gathered.may_wait
        assert take(gathered) == [raw]
        gathered.submitted(record := accepted())
        records.append(record)
    gathered.submitted(None)  # one that was refused
    for raw in (b"third", b"fourth"):
        gathered.add(raw)
        assert gathered.may_wait
    released = asyncio.ensure_future(gathered.wait_released())
    await asyncio.sleep(0)
    assert not released.done()
    records[0].durable.set_result(None)
    await asyncio.wait_for(released, 1)
    assert not gathered.may_wait
    assert take(gathered) == [b"third", b"fourth"]
    assert gathered.may_wait  # for there is nothing


async def test_what_comes_while_requests_are_on_their_way_together_waits_until_they_are_stored():
    gathered = GatheredRequests(GatheredBytes())
    gathered.submitted(together := accepted(), 5)
    gathered.add(b"x")
    assert gathered.may_wait
    together.durable.set_result(None)
    await asyncio.sleep(0)
    assert not gathered.may_wait


async def test_a_record_that_failed_is_on_its_way_no_more():
    gathered = GatheredRequests(GatheredBytes())
    records = under_way(gathered)
    gathered.add(b"x")
    assert gathered.may_wait
    records[0].durable.set_exception(OSError())
    await asyncio.sleep(0)
    assert not gathered.may_wait
    records[0].durable.exception()


async def test_a_record_that_was_stored_before_somebody_waits_for_it_releases_what_has_gathered():
    gathered = GatheredRequests(GatheredBytes())
    records = under_way(gathered)
    gathered.add(b"x")
    for record in records:
        record.durable.set_result(None)
    await asyncio.sleep(0)
    await asyncio.wait_for(gathered.wait_released(), 1)
    assert take(gathered) == [b"x"]


@pytest.mark.parametrize("size", [1, BYTES_MAX // 4, BYTES_MAX])
async def test_what_was_taken_counts_until_it_is_on_its_way(size: int):
    of_all = GatheredBytes()
    gathered = GatheredRequests(of_all)
    under_way(gathered)
    gathered.add(bytes(size))
    with gathered.taken():
        assert of_all.held == size
        count = 1
        while gathered.may_wait and size * count < BYTES_MAX:
            gathered.add(bytes(size))
            count += 1
        assert count == min(REQUESTS_MAX, -(-BYTES_MAX // size))
    assert of_all.held == size * (count - 1)
    gathered.close()
    assert of_all.held == 0
    assert take(gathered) == []


@pytest.mark.parametrize("size", [1, BYTES_MAX // 4, BYTES_MAX - 1, BYTES_MAX, BYTES_MAX + 1])
async def test_a_stream_holds_a_bounded_number_of_requests_and_bytes(size: int):
    of_all = GatheredBytes()
    gathered = GatheredRequests(of_all)
    under_way(gathered)
    count = 0
    while gathered.may_wait:
        assert count < REQUESTS_MAX
        assert count * size < BYTES_MAX
        gathered.add(bytes(size))
        count += 1
    assert count == min(REQUESTS_MAX, -(-BYTES_MAX // size))
    assert of_all.held == count * size
    take(gathered)
    assert of_all.held == 0


async def test_all_streams_together_hold_a_bounded_number_of_bytes():
    of_all = GatheredBytes(bytes_max=100)
    streams = [GatheredRequests(of_all) for _ in range(3)]
    for stream in streams:
        for _ in range(UNDER_WAY):
            stream.submitted(accepted())
    streams[0].add(bytes(60))
    assert streams[0].may_wait
    streams[1].add(bytes(60))
    streams[2].add(b"x")
    assert not streams[1].may_wait
    assert not streams[2].may_wait
    take(streams[1])
    assert streams[2].may_wait
    assert of_all.held == 61


def test_requests_side_by_side_are_one_with_the_messages_of_all():
    each = [request(1, b"a", b"b"), request(2, b"c", deliver_after_ms=5), request(3, b"d", key="k")]
    together = put_together([one.SerializeToString() for one in each], CONFIG)
    assert together is not None
    assert list(together.counts) == [2, 1, 1]
    assert [envelope.request_id for envelope in together.of_each] == [1, 2, 3]
    messages = [message for one in each for message in one.messages]
    assert together.raw == producer_pb2.ProduceRequest(topic="orders", messages=messages).SerializeToString()


@pytest.mark.parametrize(
    "other",
    [
        request(2, b"x", topic="others"),
        request(2, b"x", producer_name="p", sequence_id=1),
        request(2, b"x", replace=True),
        request(2),
    ],
    ids=["topic", "producer", "replace", "nothing"],
)
@pytest.mark.parametrize("is_first", [True, False])
def test_a_request_that_needs_a_look_of_its_own_is_not_put_together(other: Any, is_first: bool):
    pair = [request(1, b"x"), other]
    if is_first:
        pair.reverse()
    assert put_together([one.SerializeToString() for one in pair], CONFIG) is None


@pytest.mark.parametrize("is_first", [True, False])
def test_requests_with_more_fields_than_they_can_mean_are_not_parsed(is_first: bool):
    pair = [request(1, b"x").SerializeToString(), b"\x10\x01" * CHEAP_BYTES]
    if is_first:
        pair.reverse()
    with pytest.raises(InvalidRequest) as refusal:
        put_together(pair, CONFIG)
    assert refusal.value.reason == "TOO_MANY_FIELDS"


class Unread(Edge):
    """A client whose requests come when it is told so, and which reads no answer until then."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: asyncio.Queue[Any] = asyncio.Queue()
        self.reads = asyncio.Event()

    async def read(self) -> Any:
        return await self.sent.get()

    async def write(self, raw: bytes) -> None:
        await self.reads.wait()
        self.written.append(raw)


@pytest.mark.parametrize("joins", [True, False])
def test_what_gathers_while_no_answer_is_read_is_answered_without_another_request(
    monkeypatch: pytest.MonkeyPatch, joins: bool
):
    monkeypatch.setattr(producer, "_IN_FLIGHT_MAX", 3)
    numbers: list[int] = []

    async def scenario(_: SimLoop, clock: SimClock) -> None:
        node = Node(MemVfs(), clock, config=small_config(ledger_max_entries=50))
        node.open()
        await node.broker.registry.topic_or_create("orders")
        edge = Unread()
        stream: Any = producer.ProducerService(node.broker).handlers()["ProduceStream"].stream_stream
        serving = asyncio.ensure_future(stream(None, edge))
        is_stored = node.hold_up_groups()
        for sent in (range(1, 11), range(11, 12)):
            for number in sent:
                each = request(number, b"x")
                each.join_answers = joins
                edge.sent.put_nowait(each.SerializeToString())
            await asyncio.sleep(0.05)
            # The first is stored, and then eight are taken, whose answers find no room.
            is_stored.set()
            if len(sent) > 1:
                is_stored.clear()
            await asyncio.sleep(0.05)
        edge.reads.set()
        await asyncio.sleep(1)
        for raw in edge.written:
            message = producer_pb2.ProduceResponse.FromString(raw)
            numbers.extend(answer.request_id for answer in message.answers or (message,))
        serving.cancel()
        await asyncio.wait([serving])
        await node.stop()

    run_sim(scenario, seed=1)
    assert numbers == list(range(1, 12))


class Slow(Edge):
    """A client all of whose requests have come."""

    async def write(self, raw: bytes) -> None:
        await asyncio.sleep(0)
        self.written.append(raw)


Outcome = tuple[list[tuple[Any, ...]], list[bytes], int]


def outcome(requests: Sequence[Any], *, ledger_entries: int = 50, **settings: Any) -> Outcome:
    """Return the answers of a stream to requests, the payloads that are stored in order, and the number of records."""
    answers: list[tuple[Any, ...]] = []
    payloads: list[bytes] = []
    records: list[int] = []

    async def scenario(_: SimLoop, clock: SimClock) -> None:
        vfs = MemVfs()
        config = small_config(ledger_max_entries=ledger_entries, topics_max=2, **settings)
        node = Node(vfs, clock, config=config)
        node.open()
        await node.broker.registry.topic_or_create("orders")
        lsn = node.broker.journal.durable_lsn
        is_stored = node.hold_up_groups()
        edge = Slow([each.SerializeToString() for each in requests])
        stream: Any = producer.ProducerService(node.broker).handlers()["ProduceStream"].stream_stream
        serving = asyncio.ensure_future(stream(None, edge))
        await asyncio.sleep(0.05)
        is_stored.set()
        await serving
        records.append(node.broker.journal.durable_lsn - lsn)
        for raw in edge.written:
            message = producer_pb2.ProduceResponse.FromString(raw)
            for answer in message.answers or (message,):
                ids = [
                    (each.ledger_id, each.first_entry_id, each.count, each.duplicate) for each in answer.ids
                ]
                answers.append((answer.request_id, ids, answer.error.code, answer.error.message))
        await node.stop()
        node = Node(vfs, clock, config=config)  # what is stored is what a recovery finds
        node.open()
        for name in sorted(node.broker.registry.by_name):
            await node.create_subscription(name, "all", position=EARLIEST)
            inbox = await node.subscribe(name, "all")
            await asyncio.sleep(2)
            payloads.extend(each.payload for each in sorted(inbox.poll(), key=lambda each: each.position))
        await node.stop()

    run_sim(scenario, seed=1)
    return answers, payloads, records[0]


def one_by_one(monkeypatch: pytest.MonkeyPatch, requests: Sequence[Any], **settings: Any) -> Outcome:
    with monkeypatch.context() as patch:
        patch.setattr(gathered_requests, "_REQUESTS_MAX", 1)
        return outcome(requests, **settings)


def test_requests_that_gathered_are_one_record(monkeypatch: pytest.MonkeyPatch):
    requests = [request(number, b"%d" % number, b"%d+" % number) for number in range(1, 13)]
    answers, payloads, records = outcome(requests)
    assert (answers, payloads) == one_by_one(monkeypatch, requests)[:2]
    assert [ids[0][1] for _, ids, *_ in answers] == list(range(0, 24, 2))
    assert payloads == [message.payload for each in requests for message in each.messages]
    assert records == UNDER_WAY + 1


def test_what_would_not_fit_into_a_ledger_together_is_taken_one_by_one(monkeypatch: pytest.MonkeyPatch):
    requests = [request(number, b"%d" % number) for number in range(1, 13)]
    answers, *_ = outcome(requests, ledger_entries=8)
    assert answers == one_by_one(monkeypatch, requests, ledger_entries=8)[0]
    assert [ids[0][1] for _, ids, *_ in answers] == [*range(8), *range(4)]


def test_a_schedule_key_that_comes_twice_is_refused_once(monkeypatch: pytest.MonkeyPatch):
    keys = ["", "", "", "a", "b", "a", ""]
    requests = [
        request(number, b"x", schedule_key=key, deliver_after_ms=1_000) for number, key in enumerate(keys)
    ]
    answers, payloads, _ = outcome(requests)
    assert (answers, payloads) == one_by_one(monkeypatch, requests)[:2]
    assert [bool(ids) for _, ids, *_ in answers] == [True] * 5 + [False, True]


def any_request(rng: random.Random, number: int, odd: Sequence[int]) -> Any:
    """Return a request, one of ten of an odd kind."""
    payloads = [b"%d.%d" % (number, index) for index in range(rng.randint(1, 4))]
    match rng.choice(odd) if not rng.randrange(10) else None:
        case 0:
            return request(number, *payloads, topic="others")
        case 1:
            return request(number, *payloads, topic="no name: /")
        case 2:
            return request(number, *payloads, topic="one too many")
        case 3:
            return request(number, payloads[0], producer_name="p", sequence_id=rng.randint(1, 9))
        case 4:
            return request(number, *payloads, schedule_key=rng.choice("abc"), deliver_after_ms=100)
        case 5:
            return request(
                number, payloads[0], schedule_key=rng.choice("abc"), deliver_after_ms=100, replace=True
            )
        case 6:
            return request(number, *payloads, deliver_at_ms=-1)
        case 7:
            return request(number)
        case 8:
            return request(number, bytes(5_000))
        case 9:
            return request(number, *payloads, deliver_after_ms=rng.randint(1, 100))
        case 10:
            return request(number, *payloads, key="k", properties={"a": "b"})
        case _:
            return request(number, *payloads)


@pytest.mark.parametrize("seed", range(20))
def test_whatever_gathers_is_answered_and_stored_as_if_each_were_taken_alone(
    monkeypatch: pytest.MonkeyPatch, seed: int
):
    monkeypatch.setattr(producer, "_APART_MAX", seed % 3)
    rng = random.Random(seed)
    odd = rng.sample(range(11), 2)  # of all of them at once nothing would be taken together
    requests = [any_request(rng, number, odd) for number in range(1, 61)]
    settings = {"payload_bytes_max": 4_000, "ledger_entries": rng.choice((8, 50, 1_000))}
    answers, payloads, records = outcome(requests, **settings)
    alone = one_by_one(monkeypatch, requests, **settings)
    assert answers == alone[0]
    assert payloads == alone[1]
    assert [number for number, *_ in answers] == list(range(1, 61))
    assert records <= alone[2]
