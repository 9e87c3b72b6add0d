"""AdminService: what it refuses, how it pages, and that a repeated request_id changes nothing."""

from __future__ import annotations

import asyncio
import base64
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.field_mask_pb2 import FieldMask

from broker.folder.broker import Broker
from broker.observe.cluster_view import ClusterView, OwnerRoute
from broker.observe.metrics import ClusterSnapshot
from broker.runtime.ownership import AlwaysOwner
from broker.server import OwnedShard, Server
from postdate_api.v1 import admin_pb2, consumer_pb2, schedule_pb2
from tests.configs import broker_config
from tests.wire.conftest import Message, Wire, now_ms, on_shared, refused, within

INVALID = grpc.StatusCode.INVALID_ARGUMENT
NOT_FOUND = grpc.StatusCode.NOT_FOUND
EXISTS = grpc.StatusCode.ALREADY_EXISTS
UNIMPLEMENTED = grpc.StatusCode.UNIMPLEMENTED


async def call(wire: Wire, method: str, **fields: Any) -> Any:
    request = getattr(admin_pb2, f"{method}Request")(**fields)
    return await within(getattr(wire.admin, method)(request))


@dataclass(frozen=True)
class Case:
    """A request that is refused."""

    name: str
    method: str
    fields: dict[str, Any]
    reason: str
    field: str = ""
    code: grpc.StatusCode = INVALID


BAD_NAMES = {
    "empty": "",
    "slash": "a/b",
    "parent": "..",
    "newline": "a\n",
    "long": "a" * 256,
    "look-alike": "аbc",
}
TOPIC_CALLS = ("CreateTopic", "GetTopic", "UpdateTopic", "DeleteTopic")
SUBSCRIPTION_CALLS = ("CreateSubscription", "GetSubscription", "DeleteSubscription")


def topic_policy(**fields: Any) -> dict[str, Any]:
    return {"name": "t", "policy": admin_pb2.TopicPolicy(**fields)}


def subscription_policy(**fields: Any) -> dict[str, Any]:
    return {"topic": "t", "name": "s", "policy": admin_pb2.SubscriptionPolicy(**fields)}


CASES = [
    *(
        Case(f"{method}: {name}", method, {"name": value}, "INVALID_NAME", "name")
        for method in TOPIC_CALLS
        for name, value in BAD_NAMES.items()
    ),
    *(
        Case(f"{method}: topic {name}", method, {"name": "s", "topic": value}, "INVALID_NAME", "topic")
        for method in SUBSCRIPTION_CALLS
        for name, value in BAD_NAMES.items()
    ),
    *(
        Case(f"{method}: {name}", method, {"name": value, "topic": "t"}, "INVALID_NAME", "name")
        for method in SUBSCRIPTION_CALLS
        for name, value in BAD_NAMES.items()
    ),
    *(
        Case(f"ListSubscriptions: {name}", "ListSubscriptions", {"topic": value}, "INVALID_NAME", "topic")
        for name, value in BAD_NAMES.items()
    ),
    Case("GetStats: bad name", "GetStats", {"topics": ["t", "a/b"]}, "INVALID_NAME", "topics[1]"),
    Case("GetStats: too many", "GetStats", {"topics": ["t"] * 1001}, "TOO_MANY_NAMES", "topics"),
    Case("negative page", "ListTopics", {"page_size": -1}, "INVALID_PAGE_SIZE", "page_size"),
    Case("page over the limit", "ListTopics", {"page_size": 1001}, "INVALID_PAGE_SIZE", "page_size"),
    *(
        Case(f"page token: {name}", "ListTopics", {"page_token": token}, "INVALID_PAGE_TOKEN", "page_token")
        for name, token in {
            "not base64": "!!!!",
            "not ASCII": "ééé",
            "cut": "YWJj" + "Y",
            "not UTF-8": base64.urlsafe_b64encode(b"\xff\xfe\xfd").decode(),
            "blank": "    ",
            "plain text": "orders",
        }.items()
    ),
    *(
        Case(f"CreateTopic: {name} {value}", "CreateTopic", topic_policy(buckets=admin_pb2.BucketPolicy(**{name: value})), "INVALID_POLICY", f"policy.buckets.{name}")
        for name in ("max_buckets", "min_index_count", "seal_after_ms", "ledgers_per_bucket", "segment_time_step_ms", "max_segment_entries")
        for value in (0, *((-1,) if name.endswith("ms") else ()))
    ),
    Case("CreateTopic: tracker that is none", "CreateTopic", topic_policy(tracker=9), "INVALID_POLICY", "policy.tracker"),
    *(
        Case(f"CreateTopic: {name} {value}", "CreateTopic", topic_policy(**{name: value}), "INVALID_POLICY", f"policy.{name}")
        for name, value in (
            ("tick_ms", 0),
            ("tick_ms", -1),
            ("tick_ms", 3_600_001),
            ("max_delay_ms", -1),
            ("max_delay_ms", (1 << 63) - 1),
            ("default_ttl_ms", -1),
            ("default_ttl_ms", (1 << 63) - 1),
            ("ledger_max_age_ms", -1),
            ("ledger_max_bytes", 0),
            ("ledger_max_bytes", 1 << 32),
            ("ledger_max_entries", 0),
        )
    ),
    *(
        Case(f"CreateSubscription: {name} {value}", "CreateSubscription", subscription_policy(**{name: value}), "INVALID_POLICY", f"policy.{name}")
        for name, value in (
            ("lease_ms", 0),
            ("lease_ms", -1),
            ("lease_ms", 43_200_001),
            ("initial_backoff_ms", -1),
            ("max_backoff_ms", -1),
            ("backoff_multiplier", 0.5),
            ("backoff_multiplier", -1.0),
            ("backoff_multiplier", float("inf")),
            ("backoff_multiplier", float("nan")),
        )
    ),
    Case("CreateSubscription: type that is none", "CreateSubscription", {"topic": "t", "name": "s", "type": 9}, "INVALID_SUBSCRIPTION_TYPE", "type"),
    Case("CreateSubscription: position that is none", "CreateSubscription", {"topic": "t", "name": "s", "initial_position": 9}, "INVALID_INITIAL_POSITION", "initial_position"),
    Case("UpdateTopic: empty mask", "UpdateTopic", {"name": "t"}, "EMPTY_UPDATE_MASK", "update_mask"),
    Case("UpdateTopic: unknown field", "UpdateTopic", {"name": "t", "update_mask": FieldMask(paths=["tick_ms", "max_buckets"])}, "UNKNOWN_POLICY_FIELD", "update_mask"),
    Case("UpdateTopic: no such topic", "UpdateTopic", {"name": "t", "update_mask": FieldMask(paths=["tick_ms"])}, "TOPIC_NOT_FOUND", code=NOT_FOUND),
    Case("UpdateTopic: value out of range", "UpdateTopic", {"name": "t", "policy": admin_pb2.TopicPolicy(tick_ms=0), "update_mask": FieldMask(paths=["tick_ms"])}, "INVALID_POLICY", "policy.tick_ms"),
    Case("CreateTopic: long request_id", "CreateTopic", {"name": "t", "request_id": "r" * 256}, "INVALID_REQUEST_ID", "request_id"),
    *(
        Case(f"{method}: no such topic", method, {"topic": "t", "name": "s"}, "TOPIC_NOT_FOUND", code=NOT_FOUND)
        for method in ("GetSubscription", "DeleteSubscription")
    ),
    *(
        Case(f"{method}: no such topic", method, {"name": "t"}, "TOPIC_NOT_FOUND", code=NOT_FOUND)
        for method in ("GetTopic", "DeleteTopic")
    ),
    Case("ListSubscriptions: no such topic", "ListSubscriptions", {"topic": "t"}, "TOPIC_NOT_FOUND", code=NOT_FOUND),
    Case("GetStats: no such topic", "GetStats", {"topics": ["t"]}, "TOPIC_NOT_FOUND", code=NOT_FOUND),
]  # fmt: skip


@on_shared
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
async def test_bad_admin_call_is_refused_and_nothing_is_stored(shared: Wire, case: Case):
    refusal = await refused(call(shared, case.method, **case.fields))
    assert (refusal.code, refusal.reason) == (case.code, case.reason)
    assert refusal.fields == ((case.field,) if case.field else ())
    assert await shared.topic_names() == []
    assert shared.broker.journal.stats().records == 0


NESTED = "lies in a nested message: that is replaced whole, and named by 'buckets'"
TOLD = {
    "a value out of range": (
        "CreateTopic",
        topic_policy(tick_ms=0),
        "policy.tick_ms must be between 1 and 3600000, not 0",
    ),
    "an enum of a policy": (
        "CreateTopic",
        topic_policy(tracker=9),
        "policy.tracker must be TRACKER_UNSPECIFIED, TRACKER_BUCKET or TRACKER_MEMORY, not 9",
    ),
    "an enum of a request": (
        "CreateSubscription",
        {"topic": "t", "name": "s", "initial_position": 9},
        "initial_position must be INITIAL_POSITION_UNSPECIFIED, INITIAL_POSITION_LATEST or INITIAL_POSITION_EARLIEST, "
        "not 9",
    ),
    "a mask that goes into a nested message": (
        "UpdateTopic",
        {"name": "t", "update_mask": FieldMask(paths=["buckets.max_buckets"])},
        f"update_mask names 'buckets.max_buckets', which {NESTED}",
    ),
    "a mask that names a nested field alone": (
        "UpdateTopic",
        {"name": "t", "update_mask": FieldMask(paths=["max_buckets"])},
        f"update_mask names 'max_buckets', which {NESTED}",
    ),
    "a mask that names nothing known": (
        "UpdateSubscription",
        {"topic": "t", "name": "s", "update_mask": FieldMask(paths=["buckets"])},
        "update_mask names 'buckets', which is no field of a policy",
    ),
}


@on_shared
@pytest.mark.parametrize("case", TOLD.values(), ids=TOLD.keys())
async def test_refusal_says_what_would_be_right(shared: Wire, case: tuple[str, dict[str, Any], str]):
    method, fields, told = case
    assert (await refused(call(shared, method, **fields))).message == told


@pytest.mark.parametrize("method", ["GetSubscription", "DeleteSubscription"])
async def test_subscription_that_is_not_there_is_not_found(wire: Wire, method: str):
    await call(wire, "CreateTopic", name="t")
    refusal = await refused(call(wire, method, topic="t", name="s"))
    assert (refusal.code, refusal.reason) == (NOT_FOUND, "SUBSCRIPTION_NOT_FOUND")


# -- garbage on every unary method -------------------------------------------------------------------------------------

METHODS = [
    *(
        f"AdminService/{name}"
        for name in admin_pb2.DESCRIPTOR.services_by_name["AdminService"].methods_by_name
    ),
    *(
        f"ScheduleService/{name}"
        for name in schedule_pb2.DESCRIPTOR.services_by_name["ScheduleService"].methods_by_name
    ),
    "ConsumerService/Receive",
    "ConsumerService/Acknowledge",
    "ConsumerService/Nack",
    "ConsumerService/ExtendLease",
    "ProducerService/Produce",
]
RAW = {"garbage": b"\xff\xfe\xfd", "cut short": b"\x0a\x05abc", "an endless varint": b"\x0a" + b"\xff" * 20}


@on_shared
@pytest.mark.parametrize("raw", RAW.values(), ids=RAW.keys())
@pytest.mark.parametrize("method", METHODS)
async def test_garbage_is_invalid_argument_on_every_method(shared: Wire, method: str, raw: bytes):
    refusal = await refused(shared.raw(f"/postdate.v1.{method}")(raw))
    assert (refusal.code, refusal.reason) == (INVALID, "MALFORMED_REQUEST")
    assert "DecodeError" not in refusal.message and "Error parsing" not in refusal.message


async def test_method_of_a_later_version_is_unimplemented(wire: Wire):
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await within(wire.raw("/postdate.v1.ScheduleService/FromALaterVersion")(b""))
    assert caught.value.code() is UNIMPLEMENTED


# -- topics and subscriptions ------------------------------------------------------------------------------------------


async def test_creating_what_exists_is_already_exists(wire: Wire):
    await call(wire, "CreateTopic", name="t")
    refusal = await refused(call(wire, "CreateTopic", name="t"))
    assert (refusal.code, refusal.reason, refusal.metadata) == (
        EXISTS,
        "TOPIC_ALREADY_EXISTS",
        {"topic": "t"},
    )
    await call(wire, "CreateSubscription", topic="t", name="s")
    refusal = await refused(call(wire, "CreateSubscription", topic="t", name="s"))
    assert (refusal.code, refusal.reason) == (EXISTS, "SUBSCRIPTION_ALREADY_EXISTS")
    assert refusal.metadata == {"topic": "t", "subscription": "s"}


async def test_of_two_that_create_one_topic_at_once_one_succeeds(wire: Wire):
    answers = await asyncio.gather(
        *(call(wire, "CreateTopic", name="t") for _ in range(10)), return_exceptions=True
    )
    refusals = [each for each in answers if isinstance(each, grpc.aio.AioRpcError)]
    assert [each.code() for each in refusals] == [EXISTS] * 9


async def test_policies_are_kept_and_completed(wire: Wire):
    created = (await call(wire, "CreateTopic", **topic_policy(tick_ms=50, max_delay_ms=0))).topic
    assert created.policy == admin_pb2.TopicPolicy(tick_ms=50, max_delay_ms=0)
    assert created.effective_policy.tick_ms == 50
    for name in admin_pb2.TopicPolicy.DESCRIPTOR.fields_by_name:
        assert created.effective_policy.HasField(name), name
    assert (await call(wire, "GetTopic", name="t")).topic == created
    subscription = (
        await call(
            wire,
            "CreateSubscription",
            topic="t",
            name="s",
            type=4,
            policy=admin_pb2.SubscriptionPolicy(lease_ms=7),
        )
    ).subscription
    assert (subscription.type, subscription.policy) == (4, admin_pb2.SubscriptionPolicy(lease_ms=7))
    for name in admin_pb2.SubscriptionPolicy.DESCRIPTOR.fields_by_name:
        assert subscription.effective_policy.HasField(name), name
    assert (await call(wire, "GetSubscription", topic="t", name="s")).subscription == subscription


async def test_unspecified_type_is_shared(wire: Wire):
    created = await call(wire, "CreateSubscription", topic="t", name="s")
    assert created.subscription.type == 1


async def test_deleted_topic_comes_back_empty(wire: Wire):
    await wire.produce("t", b"old")
    await call(wire, "CreateSubscription", topic="t", name="s")
    await call(wire, "DeleteTopic", name="t")
    assert await wire.topic_names() == []
    ids = await wire.produce("t", b"new")
    assert ids[0][0] > 1  # ledger ids are never reused
    stream = await wire.subscribe("t")
    assert (await stream.delivery()).message.payload == b"new"
    await stream.stays_quiet()


async def test_deleted_subscription_comes_back_without_its_cursor(wire: Wire):
    ids = await wire.produce("t", b"1", b"2")
    stream = await wire.subscribe("t")
    await stream.deliveries(2)
    assert await stream.ack(ids) == []
    await call(wire, "DeleteSubscription", topic="t", name="s")
    again = await wire.subscribe("t", initial_position=2)
    assert [each.delivery_attempt for each in await again.deliveries(2)] == [1, 1]


# -- pages -------------------------------------------------------------------------------------------------------------


async def test_pages_hold_every_name_once_in_order(wire: Wire):
    names = sorted([f"t{i}" for i in range(25)] + ["T", "a.b", "a-b", "a~b", "a_b"])
    for name in reversed(names):
        await call(wire, "CreateTopic", name=name)
    found: list[str] = []
    sizes: list[int] = []
    token = ""
    while True:
        page = await call(wire, "ListTopics", page_size=7, page_token=token)
        found += [topic.name for topic in page.topics]
        sizes.append(len(page.topics))
        if not (token := page.next_page_token):
            break
    assert (found, sizes) == (names, [7, 7, 7, 7, 2])


async def test_page_that_fits_exactly_is_the_last(wire: Wire):
    for name in "abc":
        await call(wire, "CreateSubscription", topic="t", name=name)
    page = await call(wire, "ListSubscriptions", topic="t", page_size=3)
    assert [each.name for each in page.subscriptions] == ["a", "b", "c"]
    assert page.next_page_token == ""


async def test_pages_stay_right_while_names_come_and_go(wire: Wire):
    for name in "abcd":
        await call(wire, "CreateTopic", name=name)
    page = await call(wire, "ListTopics", page_size=2)
    await call(wire, "DeleteTopic", name="b")
    await call(wire, "CreateTopic", name="aa")
    rest = await call(wire, "ListTopics", page_size=2, page_token=page.next_page_token)
    assert [topic.name for topic in rest.topics] == ["c", "d"]


# -- request_id --------------------------------------------------------------------------------------------------------


async def test_repeated_request_id_returns_the_first_answer(wire: Wire):
    first = await call(wire, "CreateTopic", name="t", request_id="r")
    assert await call(wire, "CreateTopic", name="t", request_id="r") == first
    first = await call(wire, "CreateSubscription", topic="t", name="s", request_id="r")
    assert await call(wire, "CreateSubscription", topic="t", name="s", request_id="r") == first
    await call(wire, "DeleteSubscription", topic="t", name="s", request_id="r")
    await call(wire, "DeleteSubscription", topic="t", name="s", request_id="r")
    await call(wire, "DeleteTopic", name="t", request_id="r")
    await call(wire, "DeleteTopic", name="t", request_id="r")


async def test_request_ids_at_the_same_time_make_one_change(wire: Wire):
    answers = await asyncio.gather(*(call(wire, "CreateTopic", name="t", request_id="r") for _ in range(10)))
    assert all(answer == answers[0] for answer in answers)
    assert wire.broker.journal.stats().records == 1


async def test_request_id_of_another_topic_is_another_request(wire: Wire):
    await call(wire, "CreateTopic", name="a", request_id="1")
    await call(wire, "CreateTopic", name="b", request_id="1")
    await call(wire, "DeleteTopic", name="a", request_id="1")
    assert await wire.topic_names() == ["b"]


async def test_request_id_with_another_request_is_refused(wire: Wire):
    await call(wire, "CreateSubscription", topic="t", name="a", request_id="1")
    refusal = await refused(call(wire, "CreateSubscription", topic="t", name="b", request_id="1"))
    assert (refusal.code, refusal.reason, refusal.fields) == (INVALID, "REQUEST_ID_REUSED", ("request_id",))


async def test_request_id_that_failed_may_be_tried_again(wire: Wire):
    assert (await refused(call(wire, "DeleteTopic", name="t", request_id="r"))).reason == "TOPIC_NOT_FOUND"
    await call(wire, "CreateTopic", name="t")
    await call(wire, "DeleteTopic", name="t", request_id="r")
    assert await wire.topic_names() == []


async def test_request_id_outlives_its_caller(wire: Wire):
    calling = wire.admin.CreateTopic(admin_pb2.CreateTopicRequest(name="t", request_id="r"))
    await asyncio.sleep(0)
    calling.cancel()
    await call(wire, "CreateTopic", name="t", request_id="r")
    assert await wire.topic_names() == ["t"]


# -- facts -------------------------------------------------------------------------------------------------------------


async def test_stats_count_by_state(wire: Wire):
    stream = await wire.subscribe("t", permits=2)
    await wire.create_subscription("t", "other")
    ids = await wire.produce("t", b"1", b"2", b"3", Message(payload=b"later", deliver_after_ms=3_600_000))
    await stream.deliveries(2)
    await stream.ack(ids[:1])
    stats = await wire.stats("t")
    counts = {
        each.name: (each.ready_messages, each.leased_messages, each.scheduled_messages, each.consumers)
        for each in stats.subscriptions
    }
    assert counts == {"s": (1, 1, 1, 1), "other": (3, 0, 1, 0)}
    assert (stats.scheduled_messages, stats.ledgers, stats.index.rebuilds) == (1, 1, 0)
    assert stats.next_due_time_ms > now_ms() + 3_500_000


async def test_stats_of_no_topic_are_those_of_all(wire: Wire):
    for name in ("b", "a"):
        await call(wire, "CreateTopic", name=name)
    assert [each.topic for each in (await call(wire, "GetStats")).topics] == ["a", "b"]


async def test_server_info_names_the_limits_of_the_contract(wire: Wire):
    info = await call(wire, "GetServerInfo")
    limits = info.limits
    assert (limits.payload_bytes_max, limits.key_bytes_max, limits.schedule_key_bytes_max) == (
        1 << 20,
        1024,
        512,
    )
    assert (limits.properties_count_max, limits.properties_bytes_max) == (64, 16_384)
    assert (limits.batch_messages_max, limits.ack_entries_max) == (5_000, 10_000)
    assert info.version and info.broker_id and info.broker_time_ms >= info.start_time_ms > 0


async def test_a_broker_without_a_cluster_owns_its_one_shard(wire: Wire):
    answer = await call(wire, "GetCluster")
    assert (answer.cluster_id, list(answer.nodes), answer.node) == ("", [], "")
    (shard,) = answer.shards
    assert (shard.number, shard.epoch, shard.owner, shard.owner_address) == (0, 0, "", "")
    before = shard.applied_lsn
    await call(wire, "CreateTopic", name="one-more")
    assert (await call(wire, "GetCluster")).shards[0].applied_lsn > before


async def test_an_owner_tells_what_its_node_knows_of_the_cluster(tmp_path: Path):
    view = ClusterView(
        cluster_id="c",
        node="a",
        nodes=(("a", "10.0.0.1:7650"), ("b", "10.0.0.2:7650")),
        shard=0,
        route=OwnerRoute(7, "a", "10.0.0.1:7650"),
        standbys=("b",),
        applied_lsn=12,
        applied_time_ms=34,
        base_lsn=5,
        base_time_ms=6,
    )

    async def open_broker(broker: Broker) -> None:
        broker.open()

    server = Server(
        broker_config(
            data_dir=str(tmp_path / "data"),
            grpc_address="127.0.0.1:0",
            http_address="127.0.0.1:0",
            drain_grace_ms=0,
        ),
        shard=OwnedShard(
            AlwaysOwner(),
            open_broker,
            lambda: view,
            lambda: ClusterSnapshot(True, 7, 1, 0, 0, 0, 1, 0, 0),
            lambda node: None,
        ),
    )
    await server.start()
    wire = Wire(server)
    try:
        answer = await call(wire, "GetCluster")
        shard = admin_pb2.ClusterShard(
            epoch=7,
            owner="a",
            owner_address="10.0.0.1:7650",
            standbys=["b"],
            applied_lsn=12,
            applied_time_ms=34,
            base_lsn=5,
            base_time_ms=6,
        )
        assert (answer.cluster_id, answer.node, list(answer.shards)) == ("c", "a", [shard])
        assert [(node.name, node.address) for node in answer.nodes] == list(view.nodes)
        await call(wire, "CreateTopic", name="t")
        stream = wire.consumer.Subscribe()
        opening = consumer_pb2.Open(topic="t", subscription="s")
        await stream.write(consumer_pb2.SubscribeRequest(open=opening))
        assert (await within(stream.read())).opened.epoch == 7
        stream.cancel()
    finally:
        await wire.disconnect()
        await within(wire.stop())
