"""A running broker as a compaction job on its machine sees it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict
from types import TracebackType
from typing import Any, Protocol, TypeVar

import grpc
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2

from broker.errors import NotFound, PostdateError, Refused, Unavailable
from broker.folder.compaction_values import (
    BucketCandidate,
    Candidates,
    Committed,
    Lease,
    LedgerCandidate,
)
from broker.folder.shard_folders import SHARD_NAME
from broker.rpc.call_metadata import DIRECT
from broker.rpc.status import DETAILS_KEY
from broker.storage.compaction_inputs import Outputs
from broker.topics.generations import Refusal
from postdate_api.v1 import admin_pb2, admin_pb2_grpc, compaction_pb2_grpc
from postdate_api.v1 import compaction_pb2 as pb

T = TypeVar("T")

_CALL_SECONDS = 60.0
_COMMIT_SECONDS = 3_600.0
_REFUSALS = {pb.CompactionRefusal.Value(f"COMPACTION_REFUSAL_{refusal.name}"): refusal for refusal in Refusal}
_CLASSES: dict[grpc.StatusCode, type[PostdateError]] = {
    grpc.StatusCode.NOT_FOUND: NotFound,
    grpc.StatusCode.FAILED_PRECONDITION: Refused,
    grpc.StatusCode.UNAVAILABLE: Unavailable,
}


class Credentials(Protocol):
    """Credentials of a client, as those of the SDK."""

    def open_channel(self, options: Sequence[tuple[str, Any]]) -> grpc.aio.Channel: ...

    def metadata(self) -> tuple[tuple[str, str], ...]: ...


class RemoteDesk:
    """A `jobs.compact.Desk` over gRPC: calls, and what they answer, are those of the broker's own."""

    def __init__(self, credentials: Credentials, data_dir: str = "") -> None:
        """`data_dir` is where the broker's data directory is seen here, if that is another place.

        Of a broker with several shards: the folder around theirs.
        """
        self._seen = data_dir
        self._data_dirs: dict[str, str] = {}  # by topic
        self._credentials = credentials
        self._channel = credentials.open_channel(())
        self._admin = admin_pb2_grpc.AdminServiceStub(self._channel)
        self._compaction = compaction_pb2_grpc.CompactionServiceStub(self._channel)

    async def __aenter__(self) -> RemoteDesk:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._channel.close(grace=None)

    def data_dir(self, topic: str) -> str:
        return self._data_dirs[topic]

    async def topics(self) -> list[str]:
        names: list[str] = []
        token = ""
        while True:
            request = admin_pb2.ListTopicsRequest(page_size=1_000, page_token=token)
            page = await self._call(self._admin.ListTopics, request)
            names += [topic.name for topic in page.topics]
            if not (token := page.next_page_token):
                return names

    async def candidates(self, topic: str) -> Candidates:
        """Return the compaction candidates of a topic; none where another node owns it, as its files are there."""
        request = pb.BeginCompactionRequest(topic=topic, dry_run=True)
        try:
            response = await self._call(self._compaction.BeginCompaction, request, direct=True)
        except Unavailable as error:
            if error.reason != "NOT_OWNER":
                raise
            return Candidates(topic, (), (), str(error.facts["owner_address"]))
        self._data_dirs[topic] = seen_at(self._seen, response.data_dir)
        return Candidates(
            topic,
            tuple(_value(LedgerCandidate, ledger) for ledger in response.ledgers),
            tuple(_value(BucketCandidate, bucket) for bucket in response.buckets),
        )

    async def begin(self, topic: str, ledger_ids: Sequence[int], bucket_ids: Sequence[int]) -> Lease:
        request = pb.BeginCompactionRequest(topic=topic, ledger_ids=ledger_ids, bucket_ids=bucket_ids)
        response = await self._call(self._compaction.BeginCompaction, request, direct=True)
        return _value(Lease, response.compaction)

    async def commit(self, compaction_id: str, epoch: int, outputs: Outputs) -> Committed:
        request = pb.CommitCompactionRequest(
            compaction_id=compaction_id,
            epoch=epoch,
            ledgers=[pb.LedgerOutput(**asdict(ledger)) for ledger in outputs.ledgers],
            has_bucket=outputs.has_bucket,
        )
        response = await self._call(self._compaction.CommitCompaction, request, _COMMIT_SECONDS)
        return Committed(
            tuple(response.ledger_ids),
            {
                refused.ledger_id: _REFUSALS.get(refused.refusal, Refusal.DAMAGED)
                for refused in response.refused
            },
            response.bucket_swapped,
            response.is_repeat,
        )

    async def abort(self, compaction_id: str, epoch: int) -> None:
        request = pb.AbortCompactionRequest(compaction_id=compaction_id, epoch=epoch)
        await self._call(self._compaction.AbortCompaction, request)

    async def _call(
        self,
        method: Callable[..., Awaitable[Any]],
        request: Any,
        seconds: float = _CALL_SECONDS,
        *,
        direct: bool = False,
    ) -> Any:
        """`direct`: a node of a cluster is not to pass the call on to another one."""
        metadata = (*self._credentials.metadata(), *([(DIRECT, "1")] if direct else []))
        try:
            return await method(request, timeout=seconds, metadata=metadata)
        except grpc.aio.AioRpcError as error:
            kind = _CLASSES.get(error.code(), PostdateError)
            reason, owner = _read_info(error)
            text = error.details() or error.code().name
            if reason == grpc.StatusCode.UNAVAILABLE.name:  # nobody has answered: these are gRPC's own words
                text = f"The broker cannot be reached: {text}; is it running, and is --address right?"
            raise kind(text, reason=reason, owner_address=owner) from error


def seen_at(seen: str, told: str) -> str:
    """Return where a data directory is seen from here, of which a broker tells where it has it.

    `seen` may be the folder around those of shards, one of which is told; empty: it is seen where the broker has it.
    """
    name = told.rpartition("/")[2]
    if not seen or seen.rstrip("/").rpartition("/")[2] == name or SHARD_NAME.fullmatch(name) is None:
        return seen or told
    return f"{seen.rstrip('/')}/{name}"


def _value(kind: type[T], message: Message) -> T:
    """The value whose fields are named as those of a message."""
    values = {field.name: getattr(message, field.name) for field in message.DESCRIPTOR.fields}
    return kind(
        **{name: value if isinstance(value, int | str) else tuple(value) for name, value in values.items()}
    )


def _read_info(error: grpc.aio.AioRpcError) -> tuple[str, str]:
    """Return the reason of an error, and the address of the owner if it tells of one."""
    metadata: Any = error.trailing_metadata() or ()
    for key, value in metadata:
        if key == DETAILS_KEY:
            for detail in status_pb2.Status.FromString(value).details:
                info = error_details_pb2.ErrorInfo()
                if detail.Unpack(info):
                    return str(info.reason), str(info.metadata.get("owner_address", ""))
    return error.code().name, ""
