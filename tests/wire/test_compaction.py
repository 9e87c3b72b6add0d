"""CompactionService on the wire: what is refused, and a whole hand-off on real files."""

from __future__ import annotations

import asyncio
from pathlib import Path

import grpc
import pytest

from broker.jobs.compact import CompactRequest, Tell, run_compact
from broker.jobs.compact_plan import CompactLimits
from broker.jobs.engine import InlineEngine
from broker.rpc.compaction_client import RemoteDesk
from postdate.credentials import Credentials
from postdate_api.v1 import compaction_pb2 as pb
from postdate_api.v1 import compaction_pb2_grpc, consumer_pb2
from tests.wire.conftest import Message, Serve, Wire, ids_of, refused, sets, within


def stub(wire: Wire) -> compaction_pb2_grpc.CompactionServiceStub:
    return compaction_pb2_grpc.CompactionServiceStub(wire.channel)


@pytest.mark.parametrize(
    ("request_", "code", "reason"),
    [
        (pb.BeginCompactionRequest(topic=""), "INVALID_ARGUMENT", "INVALID_NAME"),
        (pb.BeginCompactionRequest(topic="none"), "NOT_FOUND", "TOPIC_NOT_FOUND"),
        (pb.BeginCompactionRequest(topic="none", dry_run=True), "NOT_FOUND", "TOPIC_NOT_FOUND"),
        (pb.BeginCompactionRequest(topic="t"), "INVALID_ARGUMENT", "EMPTY_COMPACTION"),
        (pb.BeginCompactionRequest(topic="t", lease_ms=-1), "INVALID_ARGUMENT", "INVALID_LEASE_MS"),
        (
            pb.BeginCompactionRequest(topic="t", ledger_ids=[9]),
            "FAILED_PRECONDITION",
            "COMPACTION_INPUT_CHANGED",
        ),
        (
            pb.BeginCompactionRequest(topic="t", ledger_ids=range(10_001)),
            "INVALID_ARGUMENT",
            "TOO_MANY_ENTRIES",
        ),
    ],
)
async def test_what_cannot_begin_is_refused(
    wire: Wire, request_: pb.BeginCompactionRequest, code: str, reason: str
):
    await wire.produce("t", Message(payload=b"."))
    refusal = await refused(stub(wire).BeginCompaction(request_))
    assert (refusal.code.name, refusal.reason) == (code, reason)


async def test_leases_that_there_are_not_are_not_found(wire: Wire):
    for call in (
        stub(wire).CommitCompaction(pb.CommitCompactionRequest(compaction_id="x", epoch=1)),
        stub(wire).AbortCompaction(pb.AbortCompactionRequest(compaction_id="x", epoch=1)),
    ):
        refusal = await refused(call)
        assert (refusal.code, refusal.reason) == (grpc.StatusCode.NOT_FOUND, "COMPACTION_NOT_FOUND")
    listed = await within(stub(wire).ListCompactions(pb.ListCompactionsRequest()))
    assert list(listed.compactions) == []


async def test_a_whole_hand_off(serve: Serve, tmp_path: Path):
    wire = await serve(ledger_max_entries=5_000, checkpoint_interval_ms=50, seal_after_ms=50)
    await wire.produce(
        "t", *[Message(payload=b".")] * 4_999, Message(payload=b"!", deliver_after_ms=3_600_000)
    )
    await wire.produce("t", Message(payload=b"next ledger"))
    await wire.create_subscription("t", initial_position=2)
    done = 0
    while done < 5_000:
        received = await within(
            wire.consumer.Receive(
                consumer_pb2.ReceiveRequest(topic="t", subscription="s", max_messages=2_000, wait_ms=1_000)
            )
        )
        request = consumer_pb2.AcknowledgeRequest(
            topic="t", subscription="s", entries=sets(ids_of(received.deliveries))
        )
        await within(wire.consumer.Acknowledge(request))
        done += len(received.deliveries)
    async with RemoteDesk(Credentials(wire.server.grpc_address)) as desk:
        async with asyncio.timeout(10):
            while not (await desk.candidates("t")).ledgers:
                await asyncio.sleep(0.02)
        (candidate,) = (await desk.candidates("t")).ledgers
        assert (candidate.entry_count, candidate.present_count, candidate.settled_count) == (
            5_000,
            5_000,
            4_999,
        )
        lease = await desk.begin("t", [candidate.ledger_id], [])
        listed = await within(stub(wire).ListCompactions(pb.ListCompactionsRequest()))
        assert [each.compaction_id for each in listed.compactions] == [lease.compaction_id]
        refusal = await refused(
            stub(wire).AbortCompaction(
                pb.AbortCompactionRequest(compaction_id=lease.compaction_id, epoch=lease.epoch + 1)
            )
        )
        assert (refusal.code, refusal.reason) == (grpc.StatusCode.ABORTED, "COMPACTION_FENCED")
        again = await refused(
            stub(wire).BeginCompaction(pb.BeginCompactionRequest(topic="t", ledger_ids=[candidate.ledger_id]))
        )
        assert again.reason == "COMPACTION_RUNNING"
        await desk.abort(lease.compaction_id, lease.epoch)
        request = CompactRequest(apply=True, limits=CompactLimits(reclaim_bytes_min=0))
        (result,) = await run_compact(desk, InlineEngine(1), request, Tell())
        assert result.committed is not None
        assert result.committed.ledger_ids == (candidate.ledger_id,)
        ended = wire.server.broker.counters.compactions
        assert ended == {"committed": 1, "refused": 0, "aborted": 1, "expired": 0}
        (candidate,) = (await desk.candidates("t")).ledgers
        assert (candidate.generation, candidate.entry_count, candidate.present_count) == (1, 5_000, 1)
