"""CompactionService: leases for compaction jobs, and the commit of what they wrote."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from typing import Any

from google.protobuf.message import Message

from broker.config import check_name
from broker.errors import InvalidRequest
from broker.folder.broker import Broker
from broker.rpc.access_rules import Right
from broker.rpc.caller import may_see
from broker.rpc.calls import Handler, unary
from broker.storage.compaction_inputs import LedgerOutput, Outputs
from postdate_api.v1 import compaction_pb2 as pb

SERVICE = "postdate.v1.CompactionService"


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
            response.compaction.CopyFrom(pb.Compaction(**asdict(lease)))
            return response
        candidates = await self._desk.candidates(request.topic)
        response.ledgers.extend(pb.LedgerCandidate(**asdict(ledger)) for ledger in candidates.ledgers)
        response.buckets.extend(pb.BucketCandidate(**asdict(bucket)) for bucket in candidates.buckets)
        return response

    async def _commit(self, request: pb.CommitCompactionRequest) -> Message:
        self._broker.check_serving()
        outputs = Outputs(
            tuple(
                LedgerOutput(ledger.ledger_id, ledger.data_bytes, ledger.present_count, ledger.present_bytes)
                for ledger in request.ledgers
            ),
            request.has_bucket,
        )
        committed = await self._desk.commit(request.compaction_id, request.epoch, outputs)
        return pb.CommitCompactionResponse(
            ledger_ids=committed.ledger_ids,
            refused=[
                pb.RefusedOutput(ledger_id=ledger_id, refusal=f"COMPACTION_REFUSAL_{refusal.name}")
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
            lease for lease in self._desk.leases() if may_see(lease.topic, frozenset({Right.COMPACT}), None)
        ]
        return pb.ListCompactionsResponse(compactions=[pb.Compaction(**asdict(lease)) for lease in leases])
