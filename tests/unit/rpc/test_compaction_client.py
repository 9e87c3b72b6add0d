"""A compaction job of a cluster does what the node that it asks owns, and passes over the rest."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import grpc
import pytest

from broker.errors import Unavailable
from broker.rpc.call_metadata import DIRECT
from broker.rpc.compaction_client import RemoteDesk
from postdate_api.v1 import compaction_pb2 as pb


class NoCredentials:
    """A client that nobody knows."""

    def open_channel(self, options: Sequence[tuple[str, Any]]) -> grpc.aio.Channel:
        return grpc.aio.insecure_channel("unix:/nowhere")

    def metadata(self) -> tuple[tuple[str, str], ...]:
        return (("authorization", "x"),)


@pytest.mark.parametrize("reason", ["NOT_OWNER", "DRAINING"])
async def test_a_topic_of_another_node_has_no_candidates_here(
    monkeypatch: pytest.MonkeyPatch, reason: str
) -> None:
    asked: list[Any] = []

    async def refuse(request: Any, *, timeout: float, metadata: Any) -> None:
        await asyncio.sleep(0)
        asked.append(metadata)
        raise grpc.aio.AioRpcError(
            grpc.StatusCode.UNAVAILABLE, grpc.aio.Metadata(), grpc.aio.Metadata(), "elsewhere", ""
        )

    monkeypatch.setattr("broker.rpc.compaction_client._read_info", lambda error: (reason, "b:7650"))
    async with RemoteDesk(NoCredentials()) as desk:
        desk._compaction.BeginCompaction = refuse
        if reason == "NOT_OWNER":
            candidates = await desk.candidates("orders")
            assert (candidates.ledgers, candidates.buckets, candidates.owner_address) == ((), (), "b:7650")
        else:
            with pytest.raises(Unavailable):
                await desk.candidates("orders")
        with pytest.raises(Unavailable):
            await desk.begin("orders", [1], [])
        assert all((DIRECT, "1") in metadata and ("authorization", "x") in metadata for metadata in asked)
        desk._compaction.CommitCompaction = refuse
        with pytest.raises(Unavailable):
            await desk._call(refuse, pb.CommitCompactionRequest())
        assert (DIRECT, "1") not in asked[-1], "only one shard knows an id, and all are asked"
