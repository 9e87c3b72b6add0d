"""Answers of a broker that may not own its state any more: completed records, and nothing else (CLUSTER-7, CLUSTER-10).

Every method of the API is called without the lease, and with a lease that ends at each await in turn. Whatever leaves
is noted with the state of the lease at that moment.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Generator, Sequence
from typing import Any, NamedTuple

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2

from broker.subscriptions.consumer import Consumer
from broker.testing.sim_clock import SimClock
from broker.testing.sim_loop import SimLoop, run_sim
from postdate_api.v1 import admin_pb2, consumer_pb2, message_pb2, producer_pb2
from tests.depth import at_depth, sampled
from tests.harness import EARLIEST, Outgoing
from tests.unit.folder.compaction_world import TOPIC
from tests.unit.owners import HeldOwner
from tests.unit.rpc.call_world import (
    CASES,
    METHODS,
    Edge,
    Refused,
    World,
    entries,
    has_request_id,
    make_world,
)

pytestmark = pytest.mark.slow

COMPLETIONS = {
    "ProducerService.Produce",
    "ProducerService.ProduceStream",
    "ConsumerService.Acknowledge",
    "ConsumerService.Nack",
    "ScheduleService.CancelScheduled",
    "ScheduleService.Reschedule",
    "AdminService.CreateTopic",
    "AdminService.UpdateTopic",
    "AdminService.DeleteTopic",
    "AdminService.CreateSubscription",
    "AdminService.UpdateSubscription",
    "AdminService.DeleteSubscription",
    "AdminService.Seek",
    "AdminService.SkipAll",
    "AdminService.Pause",
    "AdminService.Resume",
    "AdminService.RequeueDeadLetters",
    "AdminService.PurgeDeadLetters",
}
"""Methods whose case asks for records and nothing else."""
OF_NO_STATE = {"AdminService.GetServerInfo", "AdminService.GetCluster"}
UNARY = [name for name, method in METHODS.items() if not method.server_streaming]
LOST = "ENGINE_UNREACHABLE"


class Told(NamedTuple):
    """Something that left the broker."""

    frame: bytes
    reason: str
    """Of a refusal; empty for an answer."""

    was_owned: bool


class NotingEdge(Edge):
    """A call on the network that notes what it is given, when it is given."""

    def __init__(self, owner: HeldOwner, frames: Sequence[bytes] = (), *, half_closes: bool = True) -> None:
        super().__init__(frames, half_closes=half_closes)
        self.told: list[Told] = []
        self._owner = owner

    async def write(self, raw: bytes) -> None:
        self.told.append(Told(raw, "", self._owner.is_held))
        await asyncio.sleep(0.001)

    async def abort(self, code: grpc.StatusCode, details: str, trailing_metadata: Any) -> None:
        refused = Refused(status_pb2.Status.FromString(trailing_metadata[0][1]))
        self.told.append(Told(b"", refused.reason, self._owner.is_held))
        await asyncio.sleep(0)
        raise refused


async def call(world: World, owner: HeldOwner, name: str, frames: Sequence[bytes]) -> list[Told]:
    """Return what a method tells."""
    handler = world.handlers[name]
    edge = NotingEdge(owner, frames if handler.unary_unary is None else ())
    try:
        if handler.unary_unary is None:
            await handler.stream_stream(None, edge)
        else:
            answer = await handler.unary_unary(frames[0], edge)
            edge.told.append(Told(answer, "", owner.is_held))
    except Refused:
        pass
    finally:
        edge.end()
    return edge.told


class LeaseEnds:
    """Awaits something, and has the lease end while it waits for the n-th time."""

    def __init__(self, work: Awaitable[Any], owner: HeldOwner, at: int) -> None:
        self.waits = 0
        self._work = work
        self._owner = owner
        self._at = at

    def __await__(self) -> Generator[Any, Any, Any]:
        steps = self._work.__await__()
        value: Any = None
        error: BaseException | None = None
        while True:
            try:
                waits_for = steps.send(value) if error is None else steps.throw(error)
            except StopIteration as done:
                return done.value
            if self.waits == self._at:
                self._owner.is_held = False
            self.waits += 1
            value = error = None
            try:
                value = yield waits_for
            except BaseException as thrown:
                error = thrown


def stream_reasons(name: str, told: Told) -> set[str]:
    """The reasons that answers on a stream carry, or the refusal of a call."""
    if name != "ProducerService.ProduceStream" or told.reason:
        return {told.reason}
    message = producer_pb2.ProduceResponse.FromString(told.frame)
    reasons = set[str]()
    for answer in message.answers or (message,):
        info = error_details_pb2.ErrorInfo()
        if answer.error.details:
            answer.error.details[0].Unpack(info)
        reasons.add(str(info.reason))
    return reasons


def _keyed() -> producer_pb2.ProduceRequest:
    message = message_pb2.Message(payload=b"x", schedule_key="k0", deliver_after_ms=1_000)
    return producer_pb2.ProduceRequest(topic=TOPIC, messages=[message])


def _opening(subscription: str, type_: int = 0) -> consumer_pb2.SubscribeRequest:
    opening = consumer_pb2.SubscribeRequest()
    opening.open.topic, opening.open.subscription, opening.open.permits.messages = TOPIC, subscription, 10
    opening.open.type = type_  # type: ignore[assignment]
    return opening


def run(name: str, at: int, request_id: str = "", *, calls: int = 1) -> tuple[list[list[Told]], int, int]:
    """Call a method; the lease ends at an await (-1: it has ended before). What was told, how many waits and records."""

    async def scenario(__: SimLoop, clock: SimClock) -> tuple[list[list[Told]], int, int]:
        owner = HeldOwner()
        world = await make_world(clock, owner)
        requests = await CASES[name].make(world)
        for request in requests if request_id else ():
            request.request_id = request_id
        frames = [request.SerializeToString() for request in requests]
        await asyncio.sleep(120)
        lsn = world.node.broker.journal.durable_lsn
        owner.is_held = at >= 0
        work = LeaseEnds(call(world, owner, name, frames), owner, at)
        told = [await work]
        while len(told) < calls:
            told += [await call(world, owner, name, frames)]
        records = world.node.broker.journal.durable_lsn - lsn
        owner.regain()
        world.inbox.detach()
        await world.node.stop()
        assert world.node.failures == []
        return told, work.waits, records

    return run_sim(scenario, seed=1)


@pytest.mark.parametrize("name", [*UNARY, "ProducerService.ProduceStream"])
def test_without_the_lease_only_completed_records_are_told(name: str) -> None:
    (told,), _, records = run(name, -1)
    reasons = set[str]().union(*(stream_reasons(name, each) for each in told))
    if name in OF_NO_STATE:
        assert reasons == {""}
    elif name in COMPLETIONS:
        assert reasons == {""} and records
    else:
        assert reasons == {LOST}


def test_a_stream_of_deliveries_does_not_open_without_the_lease() -> None:
    (told,), _, _ = run("ConsumerService.Subscribe", -1)
    assert [each.reason for each in told] == [LOST]


REFUSED: dict[str, tuple[Any, str]] = {
    "AdminService.GetTopic": (admin_pb2.GetTopicRequest(name="nowhere"), "TOPIC_NOT_FOUND"),
    "AdminService.CreateTopic": (admin_pb2.CreateTopicRequest(name=TOPIC), "TOPIC_ALREADY_EXISTS"),
    "AdminService.Seek": (admin_pb2.SeekRequest(topic=TOPIC, subscription="billing"), "INVALID_SEEK_TARGET"),
    "ProducerService.Produce": (_keyed(), "SCHEDULE_KEY_TAKEN"),
    "ProducerService.ProduceStream": (_keyed(), "SCHEDULE_KEY_TAKEN"),
    "ConsumerService.Subscribe": (_opening("billing", 4), "SUBSCRIPTION_TYPE_MISMATCH"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_refusal_is_told_only_with_the_lease(name: str) -> None:
    async def scenario(_: SimLoop, clock: SimClock) -> None:
        owner = HeldOwner()
        world = await make_world(clock, owner)
        request, reason = REFUSED[name]
        reasons = []
        for owner.is_held in (True, False):
            (told,) = await call(world, owner, name, [request.SerializeToString()])
            reasons.append(stream_reasons(name, told))
        assert reasons == [{reason}, {LOST}]
        world.inbox.detach()
        await world.node.stop()

    run_sim(scenario, seed=1)


@pytest.mark.parametrize("name", [name for name, method in METHODS.items() if has_request_id(method)])
def test_the_first_answer_is_not_repeated_without_the_lease(name: str) -> None:
    (_, repeat), _, _ = run(name, -1, "r", calls=2)
    assert [each.reason for each in repeat] == [LOST]


@pytest.mark.parametrize("name", ["ProducerService.Produce", "ProducerService.ProduceStream"])
def test_ids_of_a_repeated_batch_are_not_told_without_the_lease(name: str) -> None:
    (_, repeat), _, _ = run(name, -1, calls=2)
    assert set[str]().union(*(stream_reasons(name, each) for each in repeat)) == {LOST}


@pytest.mark.slow
@pytest.mark.parametrize("name", [*UNARY, "ProducerService.ProduceStream"])
def test_a_lease_that_ends_at_any_await_is_seen(name: str) -> None:
    _, waits, _ = run(name, 1 << 30)
    for at in sampled(range(waits), at_depth(change=2, deep=1)):
        (told,), _, _ = run(name, at)
        for each in told:
            reasons = stream_reasons(name, each)
            assert each.was_owned or reasons == {LOST} or name in COMPLETIONS | OF_NO_STATE, (
                f"at {at} of {waits}"
            )
            assert reasons <= {"", LOST}, f"at {at} of {waits}"


# -- what a stream of deliveries tells ---------------------------------------------------------------------------------


def needs_lease(frame: bytes) -> bool:
    """Of the case's frames the first two are recorded if nothing failed; the third extends a lease."""
    response = consumer_pb2.SubscribeResponse.FromString(frame)
    confirmed = response.confirmed
    is_recorded = response.HasField("confirmed") and confirmed.request_id < 3 and not confirmed.failures
    return not is_recorded and not response.HasField("draining")


async def _subscribed(clock: SimClock, at: int) -> tuple[list[Told], int]:
    """A stream of deliveries, confirmations and a heartbeat, over which the lease ends for a minute."""
    name = "ConsumerService.Subscribe"
    owner = HeldOwner()
    world = await make_world(clock, owner)
    frames = [each.SerializeToString() for each in await CASES[name].make(world)]
    edge = NotingEdge(owner, frames, half_closes=False)
    work = LeaseEnds(world.handlers[name].stream_stream(None, edge), owner, at)

    async def served() -> None:
        await work

    stream = asyncio.create_task(served())
    await asyncio.sleep(60)
    before = len(edge.told)
    owner.regain()
    await asyncio.sleep(60)
    assert stream.done() or len(edge.told) > before, "the stream does not go on"
    stream.cancel()
    await asyncio.wait([stream])
    world.inbox.detach()
    await world.node.stop()
    assert world.node.failures == []
    return edge.told, work.waits


def subscribed(at: int) -> tuple[list[Told], int]:
    return run_sim(lambda _, clock: _subscribed(clock, at), seed=1)


def test_what_a_stream_tells_waits_for_the_lease() -> None:
    whole, waits = subscribed(1 << 30)
    assert {kind_of(each) for each in whole} == {"opened", "confirmed", "batch", "heartbeat"}
    for at in range(waits):
        told, _ = subscribed(at)
        for each in told:
            assert each.was_owned or each.reason == LOST or (each.frame and not needs_lease(each.frame)), (
                f"at {at} of {waits}"
            )
        if not told[-1].reason:  # it was not refused at its beginning: then nothing of it is lost
            assert [kind_of(each) for each in told if kind_of(each) == "confirmed"] == ["confirmed"] * 3
            assert "batch" in map(kind_of, told)


def kind_of(told: Told) -> str:
    return str(consumer_pb2.SubscribeResponse.FromString(told.frame).WhichOneof("frame"))


def test_a_batch_that_was_handed_out_waits_in_its_outbox() -> None:
    """The dispatcher had the lease, and the stream has it no more."""

    async def scenario(_: SimLoop, clock: SimClock) -> None:
        owner = HeldOwner()
        world = await make_world(clock, owner)
        edge = NotingEdge(owner, [_opening("new").SerializeToString()], half_closes=False)
        subscribe = world.handlers["ConsumerService.Subscribe"].stream_stream
        stream = asyncio.create_task(subscribe(None, edge))
        await asyncio.sleep(1)
        subscription = world.node.topic(TOPIC).subscription("new")
        (consumer,) = subscription.consumers
        deliver = consumer.deliver

        def deliver_and_lose(batch: Any) -> None:
            owner.is_held = False
            deliver(batch)

        consumer.deliver = deliver_and_lose  # type: ignore[method-assign]
        await world.node.produce(TOPIC, [Outgoing(b"x")])
        await asyncio.sleep(5)
        assert consumer.has_unsent and "batch" not in map(kind_of, edge.told)
        owner.regain()
        await asyncio.sleep(0.1)
        assert not consumer.has_unsent and kind_of(edge.told[-1]) == "batch"
        stream.cancel()
        await asyncio.wait([stream])
        world.inbox.detach()
        await world.node.stop()

    run_sim(scenario, seed=1)


def test_messages_that_a_receive_may_not_be_told_go_to_the_next_one() -> None:
    async def scenario(_: SimLoop, clock: SimClock) -> None:
        owner = HeldOwner()
        world = await make_world(clock, owner)
        await world.node.produce("one", [Outgoing(b"x")])
        await world.node.create_subscription("one", "new", position=EARLIEST)
        request = consumer_pb2.ReceiveRequest(topic="one", subscription="new", wait_ms=500, lease_ms=600_000)
        name, frames = "ConsumerService.Receive", [request.SerializeToString()]
        refused_count = 0
        while owner.is_held:
            (told,) = await LeaseEnds(call(world, owner, name, frames), owner, refused_count)
            if not owner.is_held:  # else it ended before so many awaits
                assert told.reason == LOST
                refused_count += 1
                owner.regain()
                continue
            assert consumer_pb2.ReceiveResponse.FromString(told.frame).deliveries, "held for nobody"
            break
        assert refused_count
        world.inbox.detach()
        await world.node.stop()

    run_sim(scenario, seed=1)


def test_a_receive_takes_nothing_that_it_may_not_be_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """The dispatcher had the lease, and the call has it no more: the next one gets the message, as a first delivery."""

    async def scenario(_: SimLoop, clock: SimClock) -> None:
        owner = HeldOwner()
        world = await make_world(clock, owner)
        await world.node.produce("one", [Outgoing(b"x")])
        await world.node.create_subscription("one", "new", position=EARLIEST)
        request = consumer_pb2.ReceiveRequest(topic="one", subscription="new", wait_ms=500, lease_ms=600_000)
        deliver = Consumer.deliver

        def deliver_and_lose(consumer: Consumer, batch: Any) -> None:
            owner.is_held = False
            deliver(consumer, batch)

        with monkeypatch.context() as patched:
            patched.setattr(Consumer, "deliver", deliver_and_lose)
            (told,) = await call(world, owner, "ConsumerService.Receive", [request.SerializeToString()])
        assert told.reason == LOST
        owner.regain()
        (told,) = await call(world, owner, "ConsumerService.Receive", [request.SerializeToString()])
        (delivery,) = consumer_pb2.ReceiveResponse.FromString(told.frame).deliveries
        assert delivery.delivery_attempt == 1
        world.inbox.detach()
        await world.node.stop()

    run_sim(scenario, seed=1)


# -- mixed answers -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "extra"),
    [
        ("ConsumerService.Acknowledge", message_pb2.EntrySet(ledger_id=99, entry_ids=[1])),
        ("ConsumerService.Nack", message_pb2.EntrySet(ledger_id=99, entry_ids=[1])),
        ("ConsumerService.Acknowledge", None),
        ("ScheduleService.CancelScheduled", "k9"),
        ("ScheduleService.Reschedule", "k9"),
        ("AdminService.PurgeDeadLetters", None),
    ],
)
def test_an_answer_of_which_a_part_is_no_record_is_not_told(name: str, extra: Any) -> None:
    """Names something that is not there, or (None) asks for what was done before."""

    async def scenario(_: SimLoop, clock: SimClock) -> None:
        owner = HeldOwner()
        world = await make_world(clock, owner)
        (request,) = await CASES[name].make(world)
        owner.is_held = False
        if extra is None:
            (told,) = await call(world, owner, name, [request.SerializeToString()])
            assert told.reason == ""
        elif isinstance(extra, str):
            request.selector.schedule_keys.append(extra)
        else:
            request.entries.append(extra)
        (told,) = await call(world, owner, name, [request.SerializeToString()])
        assert told.reason == LOST
        world.inbox.detach()
        await world.node.stop()

    run_sim(scenario, seed=1)


def test_an_acknowledgement_of_what_is_settled_in_part_is_not_told() -> None:
    async def scenario(_: SimLoop, clock: SimClock) -> None:
        owner = HeldOwner()
        world = await make_world(clock, owner)
        owner.is_held = False
        reasons = []
        for some in (world.dead[:1], world.dead):
            request = consumer_pb2.AcknowledgeRequest(
                topic=TOPIC, subscription="billing", entries=entries(some)
            )
            (told,) = await call(world, owner, "ConsumerService.Acknowledge", [request.SerializeToString()])
            reasons.append(told.reason)
        assert reasons == ["", LOST]
        world.inbox.detach()
        await world.node.stop()

    run_sim(scenario, seed=1)
