"""The audit trail: every change over gRPC leaves a line that says who, what and what came of it, and a flood of them few."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest

from broker.observe import audit_trail
from broker.observe.audit_trail import AuditTrail
from broker.observe.logs import JsonFormatter, TextFormatter
from broker.rpc.audit_trail import NOT_CHANGES
from broker.testing.sim_clock import SimClock
from broker.testing.sim_loop import SimLoop, run_sim
from postdate_api.v1 import admin_pb2, consumer_pb2, schedule_pb2
from tests.unit.folder.compaction_world import TOPIC
from tests.unit.rpc.call_world import CASES, METHODS, Refused, World, make_world

pytestmark = pytest.mark.slow

STREAMED = {"Produce", "ProduceStream", "Subscribe"}
"""Methods that move messages, and create what is missing."""
CREATES = {
    "ProducerService.Produce": {("CreateTopic", "fresh")},
    "ProducerService.ProduceStream": {("CreateTopic", "fresh")},
    "ConsumerService.Receive": {("CreateSubscription", TOPIC)},
}


def lines(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    """The fields of each line of the trail."""
    return [vars(each)["fields"] for each in caplog.records if each.getMessage().startswith("Audit: ")]


def call(method: str, caplog: pytest.LogCaptureFixture, **changes: Any) -> list[dict[str, Any]]:
    """Return the lines of the trail about one call."""

    async def scenario(_: SimLoop, clock: SimClock) -> None:
        world = await make_world(clock)
        requests = await CASES[method].make(world)
        for request in requests:
            for field, value in changes.items():
                setattr(request, field, value)
        caplog.clear()
        try:
            await world.call(method, [each.SerializeToString() for each in requests])
        except Refused:
            assert changes
        await world.node.stop()

    with caplog.at_level(logging.INFO):
        run_sim(scenario, seed=1)
    return lines(caplog)


def test_what_is_no_change_only_looks_or_moves_messages() -> None:
    methods = {name.rpartition(".")[2] for name in METHODS}
    assert methods >= NOT_CHANGES
    looks = {name for name in NOT_CHANGES if name.startswith(("Get", "List", "Count", "Preview", "Verify"))}
    assert NOT_CHANGES - looks == {"Receive", "Acknowledge", "Nack", "ExtendLease"}


@pytest.mark.parametrize("name", METHODS)
def test_every_change_leaves_one_line(name: str, caplog: pytest.LogCaptureFixture) -> None:
    method = name.rpartition(".")[2]
    found = call(name, caplog)
    if method in NOT_CHANGES | STREAMED:
        assert {(each["action"], each["topic"]) for each in found} == CREATES.get(name, set())
    else:
        assert [each["action"] for each in found] == [method]
        assert found[0]["topic"] or method.endswith(
            ("Backup", "CommitCompaction", "AbortCompaction", "MoveShard")
        )
    for each in found:
        assert (each["result"], each["principal"], each["peer"]) == (
            "done",
            "anonymous",
            "ipv4:127.0.0.1:1",
        )


def test_counts_and_what_was_asked_for_are_in_the_line(caplog: pytest.LogCaptureFixture) -> None:
    (cancelled,) = call("ScheduleService.CancelScheduled", caplog)
    assert (cancelled["matched"], cancelled["done"]) == (2, 2)
    assert cancelled["asked_selector"] == "{schedule_keys=k0, k1}"
    (skipped,) = call("AdminService.SkipAll", caplog)
    assert (skipped["asked_subscription"], skipped["skipped_messages"]) == ("billing", 10)
    (made,) = call("AdminService.CreateSubscription", caplog, type=consumer_pb2.SUBSCRIPTION_TYPE_SHARED)
    assert made["asked_type"] == "SUBSCRIPTION_TYPE_SHARED"
    (purged,) = call("AdminService.PurgeDeadLetters", caplog)
    assert purged["purged_messages"] == 3


def test_dry_run_is_no_change(caplog: pytest.LogCaptureFixture) -> None:
    assert call("ScheduleService.CancelScheduled", caplog, dry_run=True) == []


def test_refused_change_says_why(caplog: pytest.LogCaptureFixture) -> None:
    (refused,) = call("AdminService.DeleteTopic", caplog, name="nowhere")
    assert refused["result"] == "TOPIC_NOT_FOUND"


def test_line_is_short_and_escaped_whatever_was_asked_for(caplog: pytest.LogCaptureFixture) -> None:
    evil = "x\n2026-01-01 INFO Audit: a change\u202e"

    async def scenario(_: SimLoop, clock: SimClock) -> None:
        world: World = await make_world(clock)
        caplog.clear()
        selector = schedule_pb2.Selector(schedule_keys=[f"{evil}{i}" * 10 for i in range(1_000)])
        requests: list[tuple[str, Any]] = [
            (
                "ScheduleService.CancelScheduled",
                schedule_pb2.CancelScheduledRequest(topic=TOPIC, selector=selector),
            ),
            ("AdminService.CreateTopic", admin_pb2.CreateTopicRequest(name=evil * 50_000)),
        ]
        for name, request in requests:
            try:
                await world.call(name, [request.SerializeToString()])
            except Refused:
                continue
        await world.node.stop()

    with caplog.at_level(logging.INFO):
        run_sim(scenario, seed=1)
    records = [each for each in caplog.records if each.getMessage() == "Audit: a change"]
    assert len(records) == 2
    for record in records:
        for formatter in (TextFormatter(), JsonFormatter()):
            text = formatter.format(record)
            assert text.isprintable()
            assert len(text) < 10_000


def test_flood_by_one_is_summed_up_and_hides_nobody_else(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(loop: SimLoop, clock: SimClock) -> None:
        trail = AuditTrail(clock)

        def note(principal: str, result: str = "done") -> None:
            trail.note("CancelScheduled", result, principal=principal, peer="p", topic="t")

        for number in range(audit_trail.LINES_MAX + 50):
            note("token:loud", "done" if number % 2 else "TOPIC_NOT_FOUND")
        note("token:quiet")
        written = lines(caplog)
        assert len(written) == audit_trail.LINES_MAX + 1
        assert written[-1]["principal"] == "token:quiet"
        clock_ms = loop.time() * 1000
        while len(lines(caplog)) == audit_trail.LINES_MAX + 1:
            await asyncio.sleep(1)  # virtual
        assert loop.time() * 1000 - clock_ms <= audit_trail.WINDOW_MS + 1
        (summed,) = lines(caplog)[audit_trail.LINES_MAX + 1 :]
        assert summed["principal"] == "token:loud"
        assert (summed["changes"], summed["result_done"], summed["result_topic_not_found"]) == (50, 25, 25)
        note("token:loud")  # and is written again
        assert lines(caplog)[-1]["result"] == "done"

    with caplog.at_level(logging.INFO):
        run_sim(scenario, seed=1)


def test_principals_that_are_counted_apart_have_a_limit(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(_: SimLoop, clock: SimClock) -> None:
        trail = AuditTrail(clock)
        for number in range(2_000):
            trail.note("Pause", "done", principal=f"jwt:{number}", peer="p", topic="t")
        assert len(lines(caplog)) == 1_000 + audit_trail.LINES_MAX
        trail.flush()
        (summed,) = lines(caplog)[1_000 + audit_trail.LINES_MAX :]
        assert summed["changes"] == 1_000 - audit_trail.LINES_MAX

    with caplog.at_level(logging.INFO):
        run_sim(scenario, seed=1)
