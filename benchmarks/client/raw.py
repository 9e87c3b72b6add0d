"""The API without an SDK: bytes in, bytes out, requests that were serialized beforehand."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Sequence
from typing import Any

import grpc

from benchmarks.client.control import check
from postdate_api.v1 import admin_pb2, admin_pb2_grpc, consumer_pb2, message_pb2, producer_pb2

TOPIC = "bench"
EOF: Any = vars(grpc.aio)["EOF"]

_OPTIONS = (
    ("grpc.max_receive_message_length", 64 << 20),
    ("grpc.max_send_message_length", -1),
    ("grpc.use_local_subchannel_pool", 1),
    # A broker that is being restarted is looked for often.
    ("grpc.initial_reconnect_backoff_ms", 10),
    ("grpc.min_reconnect_backoff_ms", 1_000),
    ("grpc.max_reconnect_backoff_ms", 20),
)


def connect(address: str) -> Any:
    return grpc.aio.insecure_channel(address, options=_OPTIONS)


def produce_stream(channel: Any) -> Any:
    return channel.stream_stream("/postdate.v1.ProducerService/ProduceStream")()


def produce_unary(channel: Any) -> Any:
    return channel.unary_unary("/postdate.v1.ProducerService/Produce")


def subscribe_stream(channel: Any) -> Any:
    return channel.stream_stream("/postdate.v1.ConsumerService/Subscribe")()


async def create_subscriptions(channel: Any, count: int, tracker: str = "bucket") -> list[str]:
    """Create the topic with so many SHARED subscriptions from its first message on."""
    admin: Any = admin_pb2_grpc.AdminServiceStub(channel)
    policy = admin_pb2.TopicPolicy(tracker=f"TRACKER_{tracker.upper()}")
    request: Any = admin_pb2.CreateTopicRequest(name=TOPIC, policy=policy)
    await admin.CreateTopic(request, wait_for_ready=True)
    names = [f"subscription-{number}" for number in range(count)]
    for name in names:
        request = admin_pb2.CreateSubscriptionRequest(
            topic=TOPIC,
            name=name,
            type=consumer_pb2.SUBSCRIPTION_TYPE_SHARED,
            initial_position=consumer_pb2.INITIAL_POSITION_EARLIEST,
        )
        await admin.CreateSubscription(request)
    return names


async def topic_stats(channel: Any) -> admin_pb2.TopicStats:
    admin: Any = admin_pb2_grpc.AdminServiceStub(channel)
    response = await admin.GetStats(admin_pb2.GetStatsRequest(topics=[TOPIC]))
    stats: admin_pb2.TopicStats = response.topics[0]
    return stats


Times = Callable[[], dict[str, Any]]


def times(delay: dict[str, Any], rng: random.Random) -> Times:
    """Return the time fields of `Message`, drawn anew for every message.

    `{"after_ms": [low, high]}` counts from the moment the broker accepts it, `{"at_ms": [low, high]}` is the
    wall clock; both uniform, both ends included.
    """
    (kind, (low, high)) = next(iter(delay.items()))
    field = {"after_ms": "deliver_after_ms", "at_ms": "deliver_at_ms"}[kind]
    return lambda: {field: rng.randint(low, high)}


def requests(
    count: int, batch: int, payload_bytes: int, delay: dict[str, Any], topic: str = TOPIC
) -> list[bytes]:
    """Distinct serialized requests of random payloads; `request_id` is the place in the list."""
    draw = times(delay, random.Random(7))
    return [
        producer_pb2.ProduceRequest(
            topic=topic,
            messages=[message_pb2.Message(payload=os.urandom(payload_bytes), **draw()) for _ in range(batch)],
            request_id=place,
            join_answers=True,
        ).SerializeToString()
        for place in range(count)
    ]


def answers_in(raw: bytes) -> Sequence[bytes]:
    """Return the answers of a message of a produce stream, which may hold several."""
    answer = producer_pb2.ProduceResponse.FromString(raw)
    return [each.SerializeToString() for each in answer.answers] or (raw,)


class Ledgers:
    """The ids that were given out: dense in every ledger, from 0 unless it had messages before; or the run fails."""

    def __init__(self, *, from_zero: bool = True) -> None:
        self.counts: dict[int, int] = {}
        self._from_zero = from_zero

    def take(self, raw: bytes, request_id: int, batch: int) -> None:
        """Check one answer."""
        answer = producer_pb2.ProduceResponse.FromString(raw)
        check(not answer.HasField("error"), f"a batch was refused: {answer.error.message}")
        check(answer.request_id == request_id, "answers do not come in the order of the requests")
        stored = 0
        for ids in answer.ids:
            end = self.counts.get(ids.ledger_id, 0 if self._from_zero else ids.first_entry_id)
            check(ids.first_entry_id == end, f"ids have a hole: {ids.first_entry_id} after {end}")
            check(not ids.duplicate, "a batch was taken for a duplicate")
            self.counts[ids.ledger_id] = end + ids.count
            stored += ids.count
        check(stored == batch, f"{stored} ids for a batch of {batch}")
