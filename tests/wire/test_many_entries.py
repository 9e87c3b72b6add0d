"""Acknowledge, nack and extend with very many ids: refused beyond the limit, cheap up to it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grpc
import pytest

from broker.rpc.status import FAILURE_BYTES_MAX
from postdate_api.v1 import consumer_pb2, message_pb2
from tests.depth import deep_but
from tests.wire.conftest import Refusal, Serve, Wire, refused, sets, within

INVALID = grpc.StatusCode.INVALID_ARGUMENT
ONE = sets([(1, 0)])
REQUESTS = {
    "Acknowledge": consumer_pb2.AcknowledgeRequest,
    "Nack": consumer_pb2.NackRequest,
    "ExtendLease": consumer_pb2.ExtendLeaseRequest,
}
FRAMES = {"ack": consumer_pb2.Ack, "nack": consumer_pb2.Nack, "extend": consumer_pb2.Extend}
IDS_MAX = 10_000
SUBSCRIBE = "/postdate.v1.ConsumerService/Subscribe"


def spread(count: int, of: int = 1) -> list[message_pb2.EntrySet]:
    """So many ids, `of` in a set; each set in a ledger of its own."""
    return [
        message_pb2.EntrySet(ledger_id=(1 << 64) - 1 - i, entry_ids=range(i, min(i + of, count)))
        for i in range(0, count, of)
    ]


TOO_MANY: dict[str, Callable[[], list[message_pb2.EntrySet]]] = {
    "one set": lambda: [message_pb2.EntrySet(ledger_id=1, entry_ids=range(IDS_MAX + 1))],
    "one id again and again": lambda: [message_pb2.EntrySet(ledger_id=1, entry_ids=[0] * (IDS_MAX + 1))],
    "two sets": lambda: [*ONE, message_pb2.EntrySet(ledger_id=1, entry_ids=range(IDS_MAX))],
    "a set each": lambda: spread(IDS_MAX + 1),
    "empty sets": lambda: [message_pb2.EntrySet()] * (IDS_MAX + 1),
    "500,000": lambda: [message_pb2.EntrySet(ledger_id=1, entry_ids=range(500_000))],
    "16 MB": lambda: [message_pb2.EntrySet(ledger_id=1, entry_ids=bytes(16_000_000))],
}


FOR_ALL = ("one set", "a set each")


def too_many(*verbs: str) -> list[object]:
    """Every verb with every case; unless deep, one verb with all of them and the others with two."""
    cases = [(verb, case) for verb in verbs for case in TOO_MANY]
    return deep_but([each for each in cases if each[0] == verbs[0] or each[1] in FOR_ALL], cases)


@pytest.mark.parametrize(("call", "case"), too_many("Acknowledge", "Nack", "ExtendLease"))
async def test_call_with_too_many_ids_is_refused_at_once_and_settles_nothing(
    wire: Wire, call: str, case: str
):
    await wire.produce("t", b"x")
    received = await wire.receive("t", wait_ms=1000)
    fields = {} if call == "Acknowledge" else {"consumer_id": received.consumer_id}
    request = REQUESTS[call](topic="t", subscription="s", entries=[*ONE, *TOO_MANY[case]()], **fields)
    refusal = await refused(getattr(wire.consumer, call)(request))
    assert (refusal.code, refusal.reason) == (INVALID, "TOO_MANY_ENTRIES")
    assert (refusal.fields, refusal.metadata) == (("entries",), {"limit": str(IDS_MAX)})
    stats = (await wire.stats("t")).subscriptions[0]
    assert (stats.leased_messages, stats.ready_messages) == (1, 0)


@pytest.mark.parametrize(("kind", "case"), too_many("ack", "nack", "extend"))
async def test_frame_with_too_many_ids_ends_the_stream_and_settles_nothing(wire: Wire, kind: str, case: str):
    await wire.produce("t", b"x")
    stream = await wire.subscribe("t")
    await stream.delivery()
    await stream.send(**{kind: FRAMES[kind](entries=[*ONE, *TOO_MANY[case]()])})
    refusal = await stream.refusal()
    assert (refusal.code, refusal.reason) == (INVALID, "TOO_MANY_ENTRIES")
    assert (refusal.fields, refusal.metadata) == ((f"{kind}.entries",), {"limit": str(IDS_MAX)})
    delivery = await (await wire.subscribe("t")).delivery()
    assert (delivery.id.entry_id, delivery.delivery_attempt) == (0, 2)


MANY: dict[str, Callable[[], list[message_pb2.EntrySet]]] = {
    "of one ledger": lambda: [message_pb2.EntrySet(ledger_id=1, entry_ids=range(1, IDS_MAX + 1))],
    "a set each, of one ledger": lambda: [
        message_pb2.EntrySet(ledger_id=1, entry_ids=[7 + i * 70_000]) for i in range(IDS_MAX)
    ],
    "a set each, of other ledgers": lambda: [
        message_pb2.EntrySet(ledger_id=1_000_000 + i, entry_ids=[i]) for i in range(IDS_MAX)
    ],
    "greatest numbers": lambda: [
        message_pb2.EntrySet(ledger_id=(1 << 64) - 1 - i, entry_ids=[(1 << 64) - 1]) for i in range(IDS_MAX)
    ],
}


@pytest.mark.parametrize("case", deep_but(["a set each, of one ledger", "greatest numbers"], MANY))
async def test_as_many_failures_as_can_be_fit_into_a_frame(wire: Wire, case: str):
    entries = MANY[case]()
    ids = await wire.produce("t", b"x")
    stream = await wire.subscribe("t")
    await stream.delivery()
    assert (await stream.extend(ids, 5_000), wire.broker.config.tuning.ack_entries_max) == ([], IDS_MAX)
    for kind, frame in FRAMES.items():
        await stream.send(**{kind: frame(request_id=5, entries=entries)})
        confirmed = await stream.frame("confirmed")
        assert confirmed.request_id == 5
        assert len({(each.id.ledger_id, each.id.entry_id) for each in confirmed.failures}) == IDS_MAX
        assert {Refusal.of(each.error).reason for each in confirmed.failures[::997]} == {"NOT_FOUND"}
        assert confirmed.ByteSize() <= IDS_MAX * FAILURE_BYTES_MAX < 3.5 * (1 << 20)
    for call, request in REQUESTS.items():
        response = await within(
            getattr(wire.consumer, call)(request(topic="t", subscription="s", entries=entries))
        )
        assert len(response.failures) == IDS_MAX
    assert await stream.ack(ids) == []


async def test_as_many_ids_as_allowed_are_settled(serve: Serve):
    wire = await serve(ack_entries_max=3, read_batch_entries=3)
    ids = await wire.produce("t", *[b"x"] * 6)
    stream = wire.stream()
    assert (await stream.open("t", "s")).ack_entries_max == 3
    await stream.deliveries(6)
    assert await stream.extend(ids[:3], 10_000) == []
    assert await stream.ack(ids[:3]) == []
    assert await wire.ack("t", ids[3:]) == []
    request = consumer_pb2.AcknowledgeRequest(topic="t", subscription="s", entries=sets(ids[:4]))
    assert (await refused(wire.consumer.Acknowledge(request))).metadata == {"limit": "3"}


def led(by: bytes, frame: consumer_pb2.SubscribeRequest) -> bytes:
    """A frame behind a field that stands first, which no library writes and every parser takes."""
    return by + frame.SerializeToString()


UNKNOWN = b"\x9a\x06\x04rest"
PERMITS = consumer_pb2.SubscribeRequest(permits=consumer_pb2.Permits(messages=1)).SerializeToString()


@pytest.mark.parametrize("by", [UNKNOWN, PERMITS], ids=["an unknown field", "another frame"])
@pytest.mark.parametrize("kind", ["ack", "nack", "extend"])
async def test_a_frame_is_what_the_parser_says_and_not_its_first_byte(wire: Wire, by: bytes, kind: str):
    ids = await wire.produce("t", b"x")
    call = wire.raw_stream(SUBSCRIBE)()
    opening = consumer_pb2.Open(topic="t", subscription="s", permits=consumer_pb2.Permits(messages=1))
    await within(call.write(consumer_pb2.SubscribeRequest(open=opening).SerializeToString()))
    answers: list[consumer_pb2.SubscribeResponse] = []
    while not answers or not answers[-1].HasField("batch"):
        answers.append(consumer_pb2.SubscribeResponse.FromString(await within(call.read())))
    frame = consumer_pb2.SubscribeRequest(**{kind: FRAMES[kind](request_id=7, entries=sets(ids))})
    await within(call.write(led(by, frame)))
    while not answers[-1].HasField("confirmed"):
        answers.append(consumer_pb2.SubscribeResponse.FromString(await within(call.read())))
    assert answers[-1].confirmed == consumer_pb2.Confirmed(request_id=7)


@pytest.mark.parametrize("frame", [{"drain": consumer_pb2.Drain()}, {"permits": consumer_pb2.Permits()}])
async def test_a_frame_larger_than_one_of_ids_may_be_ends_the_stream(wire: Wire, frame: dict[str, Any]):
    call = wire.raw_stream(SUBSCRIBE)()
    opening = consumer_pb2.Open(topic="t", subscription="s")
    await within(call.write(consumer_pb2.SubscribeRequest(open=opening).SerializeToString()))
    await within(call.read())
    padding = b"\x9a\x06\x80\x80\x40" + bytes(1 << 20)
    await within(call.write(led(padding, consumer_pb2.SubscribeRequest(**frame))))
    refusal = await refused(call.read())
    assert (refusal.code, refusal.reason, refusal.fields) == (INVALID, "TOO_MANY_ENTRIES", ("frame",))
