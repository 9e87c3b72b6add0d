"""UpdateTopic: settings change with messages pending, count at once, and outlive a restart."""

from __future__ import annotations

from google.protobuf.field_mask_pb2 import FieldMask

from postdate_api.v1 import admin_pb2
from tests.wire.conftest import Ahead, Message, Serve, eventually, ids_of


def buckets(**limits: int) -> admin_pb2.TopicPolicy:
    return admin_pb2.TopicPolicy(buckets=admin_pb2.BucketPolicy(**limits))


async def test_limits_of_buckets_shrink_and_grow_with_messages_pending_and_all_arrive(
    serve: Serve, ahead: Ahead
):
    wire = await serve(seal_after_ms=3_600_000, clock_recheck_ms=20)
    stream = await wire.subscribe("t", permits=1_000)
    ids = []

    async def update(policy: admin_pb2.TopicPolicy, *paths: str) -> admin_pb2.Topic:
        answer = await wire.admin.UpdateTopic(
            admin_pb2.UpdateTopicRequest(name="t", policy=policy, update_mask=FieldMask(paths=paths))
        )
        return answer.topic

    async def produce(count: int) -> None:
        for i in range(count):
            ids.extend(await wire.produce("t", Message(payload=b"x", deliver_after_ms=600_000 + 10 * i)))

    tracker = wire.broker.registry.topic("t").index.tracker
    await produce(20)
    assert tracker.stats().bucket_count == 0
    topic = await update(
        buckets(min_index_count=5, max_buckets=1, max_segment_entries=1, segment_time_step_ms=1), "buckets"
    )
    assert (
        topic.policy.buckets
        == buckets(min_index_count=5, max_buckets=1, max_segment_entries=1, segment_time_step_ms=1).buckets
    )
    assert topic.effective_policy.buckets.seal_after_ms == 3_600_000
    await eventually(lambda: tracker.stats().bucket_count == 1)
    await produce(20)
    await eventually(lambda: tracker.buckets.counters.merges > 0)
    topic = await update(buckets(), "buckets")
    assert not topic.policy.HasField("buckets")
    assert topic.effective_policy.buckets.min_index_count == 50_000
    await produce(5)
    ahead.step(1_200_000)
    assert sorted(ids_of(await stream.deliveries(45))) == sorted(ids)


async def test_an_update_names_what_it_changes_and_leaves_the_rest(serve: Serve):
    wire = await serve()
    await wire.admin.CreateTopic(
        admin_pb2.CreateTopicRequest(name="t", policy=admin_pb2.TopicPolicy(tick_ms=5, max_delay_ms=7_000))
    )
    answer = await wire.admin.UpdateTopic(
        admin_pb2.UpdateTopicRequest(
            name="t",
            policy=admin_pb2.TopicPolicy(max_delay_ms=9_000, tick_ms=77),
            update_mask=FieldMask(paths=["max_delay_ms"]),
        )
    )
    assert (answer.topic.policy.max_delay_ms, answer.topic.policy.tick_ms) == (9_000, 5)
    shown = await wire.admin.GetTopic(admin_pb2.GetTopicRequest(name="t"))
    assert shown.topic == answer.topic
