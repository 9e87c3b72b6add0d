"""AdminService, what concerns backups."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from google.protobuf.message import Message

from broker.folder.broker import Broker
from broker.rpc.paging import page_by_name
from broker.rpc.request_ids import RequestIds
from broker.storage.backup_marker import Backup
from postdate_api.v1 import admin_pb2

Call = tuple[type[Message], Callable[[Any], Awaitable[Message]]]

_NO_TOPIC = ""


class BackupCalls:
    """See the module's description. Part of the AdminService, whose answers to repeats it shares."""

    def __init__(self, broker: Broker, request_ids: RequestIds) -> None:
        self._broker = broker
        self._request_ids = request_ids

    def calls(self) -> dict[str, Call]:
        return {
            "CreateBackup": (admin_pb2.CreateBackupRequest, self._create),
            "ListBackups": (admin_pb2.ListBackupsRequest, self._list),
            "DeleteBackup": (admin_pb2.DeleteBackupRequest, self._delete),
        }

    async def _create(self, request: admin_pb2.CreateBackupRequest) -> Message:
        self._broker.check_serving()

        async def create() -> Message:
            backup = await self._broker.backups.create(request.label)
            path = self._broker.backups.path(backup.name)
            return admin_pb2.CreateBackupResponse(backup=describe_backup(backup, path))

        return await self._request_ids.once(_NO_TOPIC, request, create)

    async def _list(self, request: admin_pb2.ListBackupsRequest) -> Message:
        self._broker.check_serving()
        backups = await self._broker.backups.list()
        page, token = page_by_name(backups, request.page_size, request.page_token)
        return admin_pb2.ListBackupsResponse(
            backups=[describe_backup(backup, self._broker.backups.path(backup.name)) for backup in page],
            next_page_token=token,
        )

    async def _delete(self, request: admin_pb2.DeleteBackupRequest) -> Message:
        self._broker.check_serving()

        async def delete() -> Message:
            await self._broker.backups.delete(request.name)
            return admin_pb2.DeleteBackupResponse()

        return await self._request_ids.once(_NO_TOPIC, request, delete)


def describe_backup(backup: Backup, path: str) -> admin_pb2.Backup:
    """Return a backup as answers tell it."""
    return admin_pb2.Backup(
        name=backup.name,
        label=backup.label,
        path=path,
        broker_id=backup.broker_id,
        create_time_ms=backup.create_time_ms,
        lsn=backup.lsn,
        topics=backup.topics,
        files=backup.files,
        bytes=backup.bytes,
        copied_bytes=backup.copied_bytes,
        duration_ms=backup.duration_ms,
    )
