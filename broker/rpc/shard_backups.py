"""Backups at the front of several shards: each shard makes its part, and all are one folder.

A part that fails leaves none of the others: they are deleted, and what cannot be deleted then lies in the folder of a
shard, where nobody takes it for a backup of the whole.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from functools import partial
from typing import Any, Protocol, TypeVar

import grpc
from google.protobuf.message import Message

from broker.errors import PostdateError
from broker.folder.backup import BackupFailed, backup_folder
from broker.folder.shard_backups import ShardBackups
from broker.observe.logs import get_logger
from broker.rpc.backups import describe_backup
from broker.rpc.calls import parse
from broker.rpc.front import FrontHost
from broker.rpc.paging import page_by_name
from broker.rpc.request_ids import RequestIds
from broker.rpc.status import Context
from broker.runtime.vfs import LocalVfs
from broker.storage.backup_marker import Backup, check_label
from postdate_api.v1 import admin_pb2

log = get_logger(__name__)

T = TypeVar("T")

CREATE, LIST, DELETE = (
    f"/postdate.v1.AdminService/{method}" for method in ("CreateBackup", "ListBackups", "DeleteBackup")
)

_REMOVAL_SECONDS = 30.0


class AskShard(Protocol):
    """A call of a shard for the caller of the front, within a time or until that one's deadline."""

    def __call__(
        self, path: str, number: int, message: bytes, context: Context, *, seconds: float | None = None
    ) -> Awaitable[bytes]: ...


class ShardBackupCalls:
    """See the module's description. Rights are judged by the shards, which are asked for every call."""

    def __init__(self, host: FrontHost, shards: int, ask: AskShard) -> None:
        self._host = host
        self._shards = shards
        self._ask = ask
        self._request_ids = RequestIds(host.clock)
        self._backups = ShardBackups(LocalVfs(), backup_folder(host.config))
        self._under_way: set[asyncio.Task[Message]] = set()

    async def stop(self) -> None:
        """Give up what is under way; what is left of it counts for nothing."""
        for task in self._under_way:
            task.cancel()
        await asyncio.gather(*self._under_way, return_exceptions=True)

    async def create_backup(self, message: bytes, context: Context) -> Message:
        request = parse(admin_pb2.CreateBackupRequest, message, self._host.config)
        check_label(request.label)
        await self._check_rights(context)
        return await self._request_ids.once(
            "", request, lambda: self._to_its_end(self._create(request.label, context))
        )

    async def list_backups(self, message: bytes, context: Context) -> Message:
        request = parse(admin_pb2.ListBackupsRequest, message, self._host.config)
        await self._check_rights(context)
        page, token = page_by_name(
            await _in_thread(self._backups.list), request.page_size, request.page_token
        )
        backups = [describe_backup(backup, self._backups.path(backup.name)) for backup in page]
        return admin_pb2.ListBackupsResponse(backups=backups, next_page_token=token)

    async def delete_backup(self, message: bytes, context: Context) -> Message:
        request = parse(admin_pb2.DeleteBackupRequest, message, self._host.config)
        await self._check_rights(context)
        return await self._request_ids.once("", request, lambda: self._to_its_end(self._delete(request.name)))

    async def _check_rights(self, context: Context) -> None:
        """Raise what the first shard answers to a caller that may not do anything with backups."""
        await self._ask(LIST, 0, admin_pb2.ListBackupsRequest(page_size=1).SerializeToString(), context)

    async def _to_its_end(self, work: Coroutine[Any, Any, Message]) -> Message:
        """Do what a caller who goes away must not stop half-way."""
        task = asyncio.create_task(work)
        self._under_way.add(task)
        task.add_done_callback(self._ended)
        return await asyncio.shield(task)

    def _ended(self, task: asyncio.Task[Message]) -> None:
        self._under_way.discard(task)
        if not task.cancelled():
            task.exception()  # perhaps nobody waits for it any more

    async def _delete(self, name: str) -> Message:
        def work() -> None:
            with self._backups.hold():
                self._backups.delete(name)

        await _in_thread(work)
        return admin_pb2.DeleteBackupResponse()

    async def _create(self, label: str, context: Context) -> Message:
        with contextlib.ExitStack() as held:
            await _in_thread(partial(held.enter_context, self._backups.hold()))
            config, begun = self._host.config, time.monotonic()
            now_ms = self._host.clock.now_ms()
            parts = await self._make_parts(label, context)
            try:
                backup = Backup(
                    name=await _in_thread(partial(self._backups.free_name, now_ms, label)),
                    label=label,
                    broker_id=parts[0].broker_id,
                    create_time_ms=now_ms,
                    lsn=0,  # each shard has its own
                    topics=sum(part.topics for part in parts),
                    files=sum(part.files for part in parts),
                    bytes=sum(part.bytes for part in parts),
                    copied_bytes=sum(part.copied_bytes for part in parts),
                    duration_ms=round((time.monotonic() - begun) * 1000),
                )
                await _in_thread(partial(self._backups.assemble, backup, [part.path for part in parts]))
            except PostdateError:
                await self._remove_parts(parts, context)
                raise
            path = self._backups.path(backup.name)
            log.info("Backup completed", path=path, shards=self._shards, bytes=backup.bytes)
            keep = config.backup_keep_count, config.backup_max_age_ms
            for name in await _in_thread(partial(self._backups.prune, backup.broker_id, now_ms, *keep)):
                log.info("An old backup was deleted", name=name)
            return admin_pb2.CreateBackupResponse(backup=describe_backup(backup, path))

    async def _make_parts(self, label: str, context: Context) -> list[admin_pb2.Backup]:
        """Have each shard make its part. Raises what the first one answers that fails; then there is none."""
        message = admin_pb2.CreateBackupRequest(label=label).SerializeToString()
        answers = await asyncio.gather(
            *(self._ask(CREATE, number, message, context) for number in range(self._shards)),
            return_exceptions=True,
        )
        failures = [answer for answer in answers if isinstance(answer, BaseException)]
        parts = [
            admin_pb2.CreateBackupResponse.FromString(answer).backup
            for answer in answers
            if not isinstance(answer, BaseException)
        ]
        if failures:
            log.error("The backup of a shard failed; no backup was made", error=failures[0])
            await self._remove_parts(parts, context)
            raise failures[0]
        return parts

    async def _remove_parts(self, parts: Sequence[admin_pb2.Backup], context: Context) -> None:
        """Delete parts of a backup that failed, as far as they are where their shards made them."""
        for part in parts:
            number = int(part.path.rpartition("/")[0].rpartition("-")[2])
            message = admin_pb2.DeleteBackupRequest(name=part.name).SerializeToString()
            try:
                await self._ask(DELETE, number, message, context, seconds=_REMOVAL_SECONDS)
            except (grpc.aio.AioRpcError, PostdateError) as error:
                log.warning("A part of a failed backup could not be removed", path=part.path, error=error)


async def _in_thread(work: Callable[[], T]) -> T:
    try:
        return await asyncio.to_thread(work)
    except OSError as error:
        raise BackupFailed(error) from error
