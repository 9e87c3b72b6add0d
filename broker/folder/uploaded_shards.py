"""Backups of brokers with several shards as they lie in an object store: what they hold, and which one is meant.

    backups/<name>               names a base of each shard; from when it is there, the backup counts
    parts/<shard>/bases/<name>   bases of each shard by itself, as of a broker without shards, with chunks of its own
    parts/<shard>/chunks/...

They are made and removed in `shard_uploads.py`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from urllib.parse import urlsplit, urlunsplit

import google_crc32c

from broker.cluster.base_manifest import OtherVersion, is_base_name
from broker.cluster.base_store import BaseStore
from broker.cluster.object_store import ObjectStore
from broker.cluster.patient_store import PatientStore
from broker.cluster.shard_store import ShardStore
from broker.errors import Corrupt, NotFound
from broker.observe.logs import get_logger
from broker.runtime.clock import Clock
from broker.runtime.flight import for_all
from broker.storage.backup_marker import is_backup_name

log = get_logger(__name__)

_FORMAT = "postdate-sharded-backup"
_BYTES_MAX = 1 << 20
_IN_FLIGHT = 16
_PARTS = "parts"


@dataclass(frozen=True, slots=True)
class ShardedBackup:
    """A backup of all shards of a broker."""

    name: str
    label: str
    broker_id: str
    create_time_ms: int
    topics: int
    bytes: int
    uploaded_bytes: int
    bases: tuple[str, ...]
    """Names of the bases of the shards, in order."""


class ShardedBackups:
    """The backups of brokers with several shards under one prefix of an object store."""

    def __init__(self, store: ObjectStore, clock: Clock) -> None:
        self._objects = store
        self._store = PatientStore(store)
        self._clock = clock

    async def backups(self) -> list[ShardedBackup]:
        """All backups that can be read, the oldest first."""
        backups, unread = await self._read_all()
        for error in unread:
            log.warning("A backup cannot be used", url=self._store.url, error=error.message)
        return backups

    async def _read_all(self) -> tuple[list[ShardedBackup], list[Corrupt]]:
        """All backups, the oldest first, and why others cannot be read."""
        names = sorted(
            info.name for info in await self._store.objects("backups") if is_backup_name(info.name)
        )
        found: dict[str, ShardedBackup] = {}
        unread: dict[str, Corrupt] = {}

        async def read(name: str) -> None:
            try:
                found[name] = await self._read(name)
            except FileNotFoundError:  # removed since it was listed
                pass
            except Corrupt as error:
                unread[name] = error

        await for_all(iter(names), read, _IN_FLIGHT)
        return [found[name] for name in sorted(found)], [unread[name] for name in sorted(unread)]

    async def find(self, name: str) -> ShardedBackup:
        """Return the backup of a name. Raises NotFound, Corrupt."""
        try:
            if not is_backup_name(name):
                raise FileNotFoundError(name)
            return await self._read(name)
        except FileNotFoundError as error:
            raise NotFound(f"{self._store.url} has no backup {name!a}", reason="BACKUP_NOT_FOUND") from error

    async def choose(self, name: str) -> ShardedBackup | None:
        """Return the backup that the URL of the store means with this name, or without one; None if that is a base.

        Raises NotFound, also if backups of several brokers are there and none is named, and Corrupt.
        """
        if is_backup_name(name):
            return await self.find(name)
        backups, unread = ([], []) if name else await self._read_all()
        if unread:  # it may be the newest: whoever wants an older one says so by name
            raise unread[0]
        if not backups:
            return None
        bases = [stored.base for stored in await BaseStore(self._objects, self._clock).bases()]
        newest = {base.broker_id: base.name for base in bases}
        newest |= {backup.broker_id: backup.name for backup in backups}
        if len(newest) > 1:
            raise NotFound(
                f"{self._store.url} has backups of {len(newest)} brokers: name one of them, as in "
                f"{self._store.url}#NAME. Their newest: {', '.join(newest.values())}",
                reason="BACKUP_NOT_FOUND",
            )
        return backups[-1]

    async def _read(self, name: str) -> ShardedBackup:
        return decode_backup(await self._store.read_range(f"backups/{name}", 0, _BYTES_MAX), name)

    def _part(self, number: int) -> BaseStore:
        return BaseStore(ShardStore(self._objects, number, _PARTS), self._clock)


def part_urls(url: str, backup: ShardedBackup) -> Sequence[str]:
    """Return the URL of each part of a backup, by shard; `url` is that of the store."""
    parts = urlsplit(url)
    folder = f"{parts.path.rstrip('/')}/{_PARTS}"
    return [
        urlunsplit(parts._replace(path=f"{folder}/{number}", fragment=name))
        for number, name in enumerate(backup.bases)
    ]


def encode_backup(backup: ShardedBackup) -> bytes:
    content = {"format": _FORMAT, "version": 1, **asdict(backup), "bases": list(backup.bases)}
    return json.dumps({**content, "crc32c": _crc(content)}, sort_keys=True).encode() + b"\n"


def decode_backup(data: bytes, name: str) -> ShardedBackup:
    """Any bytes give a backup or Corrupt."""
    try:
        content = json.loads(data)
        crc, kind, version = (content.pop(key) for key in ("crc32c", "format", "version"))
        backup = ShardedBackup(**{**content, "bases": tuple(content["bases"])})
        names_parts = bool(backup.bases) and all(map(is_base_name, backup.bases))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise _damaged(name) from error
    whole = {"format": kind, "version": version, **content}
    if (kind, crc, backup.name) != (_FORMAT, _crc(whole), name) or not names_parts:
        raise _damaged(name)
    if version != 1:
        raise OtherVersion(
            f"The backup {name} has version {version}, which is newer than this", path=f"backups/{name}"
        )
    return backup


def _damaged(name: str) -> Corrupt:
    return Corrupt(
        "The object that names the parts of a backup is damaged",
        path=f"backups/{name}",
        advice="Use another backup.",
    )


def _crc(content: dict[str, object]) -> int:
    plain = json.dumps(content, sort_keys=True, separators=(",", ":")).encode()
    return int(google_crc32c.value(plain))
