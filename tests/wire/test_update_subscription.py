"""UpdateSubscription: settings change by name, and consumers learn of it."""

from __future__ import annotations

import math

import grpc
import pytest
from google.protobuf.field_mask_pb2 import FieldMask

from postdate_api.v1 import admin_pb2
from tests.wire.conftest import Message, Serve, Wire, ids_of, now_ms, refused, within
from tests.wire.test_seek import counts, ends_with_draining

SHARED, KEY_SHARED, EXCLUSIVE, FAILOVER = 1, 2, 3, 4
EARLIEST = 2
Policy = admin_pb2.SubscriptionPolicy


def updating(wire: Wire, policy: Policy, *paths: str, **fields: str):
    request = admin_pb2.UpdateSubscriptionRequest(
        topic="t", name="s", policy=policy, update_mask=FieldMask(paths=paths), **fields
    )
    return wire.admin.UpdateSubscription(request)


async def update(wire: Wire, policy: Policy, *paths: str) -> admin_pb2.Subscription:
    return (await within(updating(wire, policy, *paths))).subscription


async def test_an_update_names_what_it_changes_and_leaves_the_rest(serve: Serve, tmp_path):
    folder = str(tmp_path / "data")
    wire = await serve(data_dir=folder)
    await wire.create_subscription("t", policy=Policy(lease_ms=5_000, initial_backoff_ms=7))
    changed = await update(wire, Policy(lease_ms=9_000, initial_backoff_ms=99), "lease_ms")
    assert changed.policy == Policy(lease_ms=9_000, initial_backoff_ms=7)
    assert changed.effective_policy.lease_ms == 9_000
    changed = await update(wire, Policy(), "initial_backoff_ms")
    assert changed.policy == Policy(lease_ms=9_000), "what is unset inherits again"
    assert changed.effective_policy.initial_backoff_ms == wire.broker.config.initial_backoff_ms
    await wire.disconnect()
    await wire.stop()
    wire = await serve(data_dir=folder)
    shown = await within(wire.admin.GetSubscription(admin_pb2.GetSubscriptionRequest(topic="t", name="s")))
    assert shown.subscription == changed


async def test_a_new_lease_counts_for_consumers_that_come(wire: Wire):
    await wire.create_subscription("t")
    before = wire.stream()
    assert (await before.open("t", "s")).lease_ms == wire.broker.config.lease_ms
    await update(wire, Policy(lease_ms=4_321), "lease_ms")
    after = wire.stream()
    assert (await after.open("t", "s")).lease_ms == 4_321


@pytest.mark.parametrize(
    ("policy", "paths", "reason"),
    [
        (Policy(), (), "EMPTY_UPDATE_MASK"),
        (Policy(), ("lease_ms", "nonsense"), "UNKNOWN_POLICY_FIELD"),
        (Policy(lease_ms=-1), ("lease_ms",), "INVALID_POLICY"),
        (Policy(dead_letter_topic="a/b"), ("dead_letter_topic",), "INVALID_NAME"),
        (Policy(max_delivery_rate=math.nan), ("max_delivery_rate",), "INVALID_POLICY"),
        (Policy(max_delivery_rate=-0.1), ("max_delivery_rate",), "INVALID_POLICY"),
        (Policy(max_leased_messages=2**31), ("max_leased_messages",), "INVALID_POLICY"),
    ],
    ids=["nothing named", "no such field", "out of range", "no name", "no rate", "below none", "too many"],
)
async def test_an_update_that_cannot_be_is_refused(
    wire: Wire, policy: Policy, paths: tuple[str, ...], reason: str
):
    await wire.create_subscription("t")
    refusal = await refused(updating(wire, policy, *paths))
    assert (refusal.code, refusal.reason) == (grpc.StatusCode.INVALID_ARGUMENT, reason)


@pytest.mark.parametrize("type_", [SHARED, KEY_SHARED], ids=["SHARED", "KEY_SHARED"])
async def test_what_always_honours_times_cannot_ignore_them(wire: Wire, type_: int):
    await wire.create_subscription("t", type=type_)
    refusal = await refused(updating(wire, Policy(honor_delay=False), "honor_delay"))
    assert refusal.reason == "HONOR_DELAY_MISMATCH"
    await update(wire, Policy(honor_delay=True), "honor_delay")


async def test_an_update_of_what_is_not_there_is_refused(wire: Wire):
    assert (await refused(updating(wire, Policy(), "lease_ms"))).reason == "TOPIC_NOT_FOUND"
    await wire.create_subscription("t", "another")
    assert (await refused(updating(wire, Policy(), "lease_ms"))).reason == "SUBSCRIPTION_NOT_FOUND"


@pytest.mark.parametrize("type_", [EXCLUSIVE, FAILOVER], ids=["EXCLUSIVE", "FAILOVER"])
async def test_delays_begin_to_count_while_a_consumer_is_attached(wire: Wire, type_: int):
    await wire.create_subscription("t", type=type_, initial_position=EARLIEST)
    stream = await wire.subscribe("t")
    due_ms = now_ms() + 600
    ids = await wire.produce(
        "t",
        b"now",
        Message(payload=b"acked early", deliver_after_ms=3_600_000),
        Message(payload=b"out", deliver_at_ms=due_ms),
        Message(payload=b"far", deliver_after_ms=3_600_000),
    )
    await stream.deliveries(4)  # in arrival order, whatever their time
    await stream.ack(ids[:2])
    assert await counts(wire) == (0, 2, 0)
    await update(wire, Policy(honor_delay=True), "honor_delay")
    await ends_with_draining(stream)
    stream = wire.stream()
    assert (await stream.open("t", "s")).honor_delay
    again = await stream.delivery()
    assert now_ms() >= due_ms
    assert (ids_of([again]), again.delivery_attempt) == ([ids[2]], 1)  # the broker took it back
    assert await counts(wire) == (0, 1, 1)
    await stream.stays_quiet()


@pytest.mark.parametrize("type_", [EXCLUSIVE, FAILOVER], ids=["EXCLUSIVE", "FAILOVER"])
async def test_delays_cease_to_count_while_a_consumer_is_attached(wire: Wire, type_: int):
    await wire.create_subscription(
        "t", type=type_, initial_position=EARLIEST, policy=Policy(honor_delay=True)
    )
    stream = await wire.subscribe("t")
    ids = await wire.produce("t", Message(payload=b"far", deliver_after_ms=3_600_000), b"now")
    assert ids_of(await stream.deliveries(1)) == [ids[1]]
    await stream.ack([ids[1]])
    assert await counts(wire) == (0, 0, 1)
    await update(wire, Policy(), "honor_delay")
    await ends_with_draining(stream)
    stream = wire.stream()
    assert not (await stream.open("t", "s")).honor_delay
    assert ids_of(await stream.deliveries(1)) == [ids[0]]
    assert await counts(wire) == (0, 1, 0)
    await stream.stays_quiet()


async def test_other_settings_end_no_stream(wire: Wire):
    stream = await wire.subscribe("t")
    await update(wire, Policy(max_backoff_ms=5_000, honor_delay=True), "max_backoff_ms", "honor_delay")
    await wire.produce("t", b"1")
    assert (await stream.delivery()).message.payload == b"1"


@pytest.mark.parametrize("type_", [SHARED, KEY_SHARED, EXCLUSIVE, FAILOVER])
async def test_pacing_changes_while_a_consumer_waits(wire: Wire, type_: int):
    stream = await wire.subscribe("t", type=type_, initial_position=EARLIEST)
    await update(wire, Policy(max_delivery_rate=0.001), "max_delivery_rate")
    ids = await wire.produce("t", *(Message(payload=b"%d" % i, key="k") for i in range(5)))
    assert ids_of(await stream.deliveries(1)) == ids[:1]
    await stream.stays_quiet()
    shown = (await wire.stats("t")).subscriptions[0]
    assert (shown.ready_messages, shown.paced) == (4, True)
    assert 900_000 < shown.paced_until_ms - now_ms() <= 1_000_000
    await update(wire, Policy(max_leased_messages=3), "max_delivery_rate", "max_leased_messages")
    assert ids_of(await stream.deliveries(2)) == ids[1:3]
    await stream.stays_quiet()
    shown = (await wire.stats("t")).subscriptions[0]
    assert (shown.leased_messages, shown.paced, shown.paced_until_ms) == (3, True, 0)
    await stream.ack(ids[:1])
    assert ids_of(await stream.deliveries(1)) == ids[3:4]
    await stream.stays_quiet()
    await update(wire, Policy(), "max_leased_messages")
    assert ids_of(await stream.deliveries(1)) == ids[4:]
    shown = (await wire.stats("t")).subscriptions[0]
    assert (shown.ready_messages, shown.paced) == (0, False)


async def test_receive_finds_nothing_while_the_rate_is_used_up(wire: Wire):
    await wire.create_subscription("t", policy=Policy(max_delivery_rate=0.001))
    await wire.produce("t", b"1", b"2")
    for count in (1, 0):
        received = await wire.receive("t", max_messages=10, wait_ms=50)
        assert len(received.deliveries) == count


async def test_settings_that_do_not_go_together_are_refused(wire: Wire):
    for fields in (
        {"policy": Policy(honor_delay=False)},
        {"policy": Policy(initial_backoff_ms=2_000, max_backoff_ms=1_999)},
        {"policy": Policy(initial_backoff_ms=61_000)},  # over what it inherits
    ):
        with pytest.raises(grpc.aio.AioRpcError):
            await wire.create_subscription("t", "refused", **fields)
    await wire.create_subscription("t")
    with pytest.raises(grpc.aio.AioRpcError):
        await update(wire, Policy(max_backoff_ms=999), "max_backoff_ms")
    request = admin_pb2.GetSubscriptionRequest(topic="t", name="s")
    assert (await wire.admin.GetSubscription(request)).subscription.effective_policy.honor_delay
