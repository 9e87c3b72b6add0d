"""CompactionService: leases for compaction jobs, and the commit of what they wrote."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable
from typing import Any

from google.protobuf.message import Message

from broker.config import check_name
from broker.errors import InvalidRequest
from broker.rpc.access_rules import Right
from broker.rpc.caller import may_see
from broker.rpc.calls import Handler, unary
from broker.storage.compaction_inputs import LedgerOutput, Outputs
from broker.topics.broker import Broker
from broker.topics.compaction_values import Lease
from broker.topics.generations import Refusal
from postdate.v1 import compaction_pb2 as pb

SERVICE = "postdate.v1.CompactionService"

_REFUSALS = {
    Refusal.GONE: pb.COMPACTION_REFUSAL_GONE,
    Refusal.REPLACED: pb.COMPACTION_REFUSAL_REPLACED,
    Refusal.OWED: pb.COMPACTION_REFUSAL_OWED,
    Refusal.MOVED: pb.COMPACTION_REFUSAL_MOVED,
    Refusal.DAMAGED: pb.COMPACTION_REFUSAL_DAMAGED,
}


class CompactionService:
    """See the module's description."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._desk = broker.compactions
        self._data_dir = os.path.abspath(broker.config.data_dir)

    def handlers(self) -> dict[str, Handler]:
        calls: dict[str, tuple[type[Message], Callable[[Any], Awaitable[Message]]]] = {
            "BeginCompaction": (pb.BeginCompactionRequest, self._begin),
            "CommitCompaction": (pb.CommitCompactionRequest, self._commit),
            "AbortCompaction": (pb.AbortCompactionRequest, self._abort),
            "ListCompactions": (pb.ListCompactionsRequest, self._list),
        }
        return {name: unary(self._broker, kind, call) for name, (kind, call) in calls.items()}

    async def _begin(self, request: pb.BeginCompactionRequest) -> Message:
        self._broker.check_serving()
        check_name("topic", request.topic, "topic")
        if request.lease_ms < 0:
            raise InvalidRequest("lease_ms is negative", field="lease_ms", reason="INVALID_LEASE_MS")
        response = pb.BeginCompactionResponse(data_dir=self._data_dir)
        if not request.dry_run:
            lease = await self._desk.begin(
                request.topic, request.ledger_ids, request.bucket_ids, request.lease_ms
            )
            response.compaction.CopyFrom(_describe(lease))
            return response
        candidates = await self._desk.candidates(request.topic)
        for ledger in candidates.ledgers:
            response.ledgers.add(
                ledger_id=ledger.ledger_id,
                generation=ledger.generation,
                entry_count=ledger.entry_count,
                present_count=ledger.present_count,
                settled_count=ledger.settled_count,
                disk_bytes=ledger.disk_bytes,
            )
        for bucket in candidates.buckets:
            response.buckets.add(
                bucket_id=bucket.bucket_id,
                entry_count=bucket.entry_count,
                waiting_count=bucket.waiting_count,
                disk_bytes=bucket.disk_bytes,
            )
        return response

    async def _commit(self, request: pb.CommitCompactionRequest) -> Message:
        self._broker.check_serving()
        outputs = Outputs(
            tuple(
                LedgerOutput(each.ledger_id, each.data_bytes, each.present_count, each.present_bytes)
                for each in request.ledgers
            ),
            request.has_bucket,
        )
        committed = await self._desk.commit(request.compaction_id, request.epoch, outputs)
        return pb.CommitCompactionResponse(
            ledger_ids=committed.ledger_ids,
            refused=[
                pb.RefusedOutput(ledger_id=ledger_id, refusal=_REFUSALS[refusal])
                for ledger_id, refusal in sorted(committed.refused.items())
            ],
            bucket_swapped=committed.bucket_swapped,
            is_repeat=committed.is_repeat,
        )

    async def _abort(self, request: pb.AbortCompactionRequest) -> Message:
        self._broker.check_serving()
        await self._desk.abort(request.compaction_id, request.epoch)
        return pb.AbortCompactionResponse()

    async def _list(self, request: pb.ListCompactionsRequest) -> Message:
        leases = [
            each for each in self._desk.leases() if may_see(each.topic, frozenset({Right.COMPACT}), None)
        ]
        return pb.ListCompactionsResponse(compactions=[_describe(each) for each in leases])


def _describe(lease: Lease) -> pb.Compaction:
    return pb.Compaction(
        compaction_id=lease.compaction_id,
        epoch=lease.epoch,
        topic=lease.topic,
        ledger_ids=lease.ledger_ids,
        bucket_ids=lease.bucket_ids,
        folder=lease.folder,
        expires_at_ms=lease.expires_at_ms,
    )
