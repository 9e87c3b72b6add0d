"""Backups, which the broker makes in a folder on its own machine."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass
from datetime import datetime, timedelta

from postdate._rpc import Rpc
from postdate._time import moment
from postdate_api.v1 import admin_pb2

_PAGE_SIZE = 1000
_CREATE_S = 24 * 3_600.0
_DELETE_S = 3_600.0


@dataclass(frozen=True, slots=True)
class Backup:
    """A complete backup: every change up to `lsn`, of all topics, in the folder `path` on the broker's machine.

    `copied_bytes` of its `bytes` were copied; the rest are links to files that never change.
    """

    name: str
    label: str
    path: str
    broker_id: str
    create_time: datetime
    lsn: int
    topics: int
    files: int
    bytes: int
    copied_bytes: int
    duration: timedelta


class Backups:
    """`client.backups`. Changes of which the answer is lost raise `Disconnected`; `list` tells what came of them."""

    def __init__(self, rpc: Rpc) -> None:
        self._rpc = rpc

    async def create(self, label: str = "") -> Backup:
        """Make a backup; returns when it is complete and durable. Delivery goes on meanwhile.

        `FailedPrecondition` while another one is made or deleted. Who stops waiting does not stop the backup.
        """
        request = admin_pb2.CreateBackupRequest(label=label, request_id=uuid.uuid4().hex)
        response = await self._rpc.call_once(self._rpc.admin.CreateBackup, request, wait_s=_CREATE_S)
        return _backup(response.backup)

    def list(self, *, limit: int | None = None) -> AsyncIterator[Backup]:
        """All complete backups, the oldest first, page by page as the iteration goes on; at most `limit`."""
        return self._rpc.rows(
            self._rpc.admin.ListBackups,
            admin_pb2.ListBackupsRequest(),
            lambda page: [_backup(each) for each in page.backups],
            page_size=_PAGE_SIZE,
            limit=limit,
        )

    async def delete(self, name: str) -> None:
        """Delete a backup; `NotFound` if there is none of that name."""
        request = admin_pb2.DeleteBackupRequest(name=name, request_id=uuid.uuid4().hex)
        await self._rpc.call_once(self._rpc.admin.DeleteBackup, request, wait_s=_DELETE_S)


def _backup(backup: admin_pb2.Backup) -> Backup:
    return Backup(
        name=backup.name,
        label=backup.label,
        path=backup.path,
        broker_id=backup.broker_id,
        create_time=moment(backup.create_time_ms),
        lsn=backup.lsn,
        topics=backup.topics,
        files=backup.files,
        bytes=backup.bytes,
        copied_bytes=backup.copied_bytes,
        duration=timedelta(milliseconds=backup.duration_ms),
    )
