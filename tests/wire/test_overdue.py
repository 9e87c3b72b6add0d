"""Messages whose time came while the broker was stopped, over gRPC. Crashes and clocks: tests/unit/folder/test_overdue.py."""

from __future__ import annotations

import time

import pytest

from broker.runtime.clock import SystemClock
from postdate_api.v1 import admin_pb2
from tests.wire.conftest import Message, Serve, Wire, ids_of, within

HOUR_MS = 3_600_000
ACTIONS = {
    "deliver": admin_pb2.OVERDUE_ACTION_DELIVER,
    "expire": admin_pb2.OVERDUE_ACTION_EXPIRE,
    "dead_letter": admin_pb2.OVERDUE_ACTION_DEAD_LETTER,
}


async def stats_of(wire: Wire, name: str) -> admin_pb2.SubscriptionStats:
    return next(each for each in (await wire.stats("t")).subscriptions if each.name == name)


@pytest.mark.parametrize("by_topic", [True, False], ids=["topic's own", "broker's default"])
@pytest.mark.parametrize("action", ACTIONS)
async def test_overdue_messages(serve: Serve, monkeypatch: pytest.MonkeyPatch, action: str, by_topic: bool):
    offset_ms = 0
    monkeypatch.setattr(SystemClock, "now_ms", lambda _: time.time_ns() // 1_000_000 + offset_ms)
    settings = {"clock_recheck_ms": 20, "overdue_action": "deliver" if by_topic else action}
    wire = await serve(**settings)
    policy = admin_pb2.TopicPolicy(overdue_action=ACTIONS[action] if by_topic else 0)
    await within(wire.admin.CreateTopic(admin_pb2.CreateTopicRequest(name="t", policy=policy)))
    for name in ("connected", "never"):
        await wire.create_subscription("t", name)
    stream = await wire.subscribe("t", "connected")
    await wire.produce("t", b"at once")
    assert await stream.ack(ids_of(await stream.deliveries(1))) == []
    await wire.produce(
        "t",
        Message(payload=b"absence", deliver_after_ms=HOUR_MS),
        Message(payload=b"later", deliver_after_ms=3 * HOUR_MS),
    )
    await wire.disconnect()
    await wire.stop()
    offset_ms = 2 * HOUR_MS
    wire = await serve(data_dir=wire.server.config.data_dir, **settings)
    stream = await wire.subscribe("t", "connected")
    if action == "deliver":
        assert (await stream.delivery()).message.payload == b"absence"
    await stream.stays_quiet()
    for name in ("connected", "never"):
        request = admin_pb2.ListDeadLettersRequest(topic="t", subscription=name)
        letters = (await within(wire.admin.ListDeadLetters(request))).dead_letters
        found = [(each.reason, each.delivery_attempts) for each in letters]
        assert found == ([("overdue", 0)] if action == "dead_letter" else [])
    stats = await stats_of(wire, "never")
    assert stats.ready_messages == (2 if action == "deliver" else 1)  # the first one is its own too
    offset_ms = 3 * HOUR_MS + 1_000
    assert (await stream.delivery()).message.payload == b"later"
