"""backup.json: what makes a folder a backup, and says what is in it. Pure.

One JSON object: `format` "postdate-backup", `version` 1, the fields of `Backup`, and `crc32c` of all of it but
itself, encoded with sorted keys and without spaces. It is written last, so a folder without it is no backup.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from typing import Protocol

import google_crc32c

from broker.errors import Corrupt, InvalidRequest, NotFound

FORMAT = "postdate-backup"
VERSION = 1

_LABEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", re.ASCII)
_NAME = re.compile(r"[0-9]{8}T[0-9]{9}Z(-[A-Za-z0-9][A-Za-z0-9._-]{0,63})?", re.ASCII)
_ADVICE = "Use another backup."


@dataclass(frozen=True, slots=True)
class Backup:
    """One backup. It holds every record up to `lsn`, of all topics, and none after it."""

    name: str
    label: str
    broker_id: str
    create_time_ms: int
    lsn: int
    topics: int
    files: int
    bytes: int
    copied_bytes: int  # the rest are links to files that the broker never changes
    duration_ms: int


def backup_name(create_time_ms: int, label: str) -> str:
    """`20261121T205812345Z-label`: safe as the name of a folder, and names sort as times do."""
    moment = datetime.fromtimestamp(create_time_ms // 1000, UTC)
    return f"{moment:%Y%m%dT%H%M%S}{create_time_ms % 1000:03d}Z" + (f"-{label}" if label else "")


def is_backup_name(name: str) -> bool:
    # A label may end as an unfinished folder's name does; such a folder must stay one that nobody takes for a backup.
    return _NAME.fullmatch(name) is not None and not name.endswith(".partial")


def check_label(label: str) -> None:
    """Raise InvalidRequest unless it may be a part of a backup's name; empty may."""
    if label and (not _LABEL.fullmatch(label) or label.endswith(".partial")):
        raise InvalidRequest(
            "A label has up to 64 of A-Z a-z 0-9 . _ -, a letter or digit first, and does not end in .partial",
            field="label",
            reason="INVALID_LABEL",
        )


def check_backup_name(name: str) -> None:
    """Raise NotFound unless this can be a backup's name: it becomes a path, which must not leave its folder."""
    if not is_backup_name(name):
        shown = ascii(name if len(name) <= 100 else name[:100] + "...")
        raise NotFound(f"Backup {shown} does not exist", reason="BACKUP_NOT_FOUND")


def encode_marker(backup: Backup) -> bytes:
    content = {"format": FORMAT, "version": VERSION, **asdict(backup)}
    return json.dumps({**content, "crc32c": _crc(content)}, indent=2).encode() + b"\n"


def decode_marker(data: bytes, path: str) -> Backup:
    """Any bytes give a backup or Corrupt."""
    try:
        content = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise Corrupt("The file is not JSON", path=path, offset=0, advice=_ADVICE) from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise Corrupt("The file does not describe a backup", path=path, offset=0, advice=_ADVICE)
    if content.get("version") != VERSION:
        raise Corrupt(
            f"The backup has version {content.get('version')!r:.20}; this broker reads version {VERSION}",
            path=path,
            offset=0,
            advice="Use the version of the broker that made it.",
        )
    crc = content.pop("crc32c", None)
    kinds = {field.name: {"str": str, "int": int}[str(field.type)] for field in fields(Backup)}
    values = {name: content.get(name) for name in kinds}
    if crc != _crc(content) or not all(type(values[name]) is kind for name, kind in kinds.items()):
        raise Corrupt("The file that describes the backup is damaged", path=path, offset=0, advice=_ADVICE)
    return Backup(**values)  # type: ignore[arg-type]  # each is of its kind, as was just checked


class Dated(Protocol):
    """A backup of a broker, wherever it lies."""

    @property
    def name(self) -> str: ...

    @property
    def broker_id(self) -> str: ...

    @property
    def create_time_ms(self) -> int: ...


def plan_prune(
    backups: Sequence[Dated], broker_id: str, now_ms: int, keep_count: int, max_age_ms: int
) -> list[str]:
    """Names of the broker's own backups that are too many or too old; never the newest. 0 means no limit."""
    own = sorted(
        (backup for backup in backups if backup.broker_id == broker_id), key=_age_order, reverse=True
    )
    return [
        backup.name
        for index, backup in enumerate(own)
        if index
        and (
            (keep_count and index >= keep_count)
            or (max_age_ms and now_ms - backup.create_time_ms > max_age_ms)
        )
    ]


def _age_order(backup: Dated) -> tuple[int, str]:
    return backup.create_time_ms, backup.name


def _crc(content: dict[str, object]) -> int:
    plain = json.dumps(content, sort_keys=True, separators=(",", ":")).encode()
    return int(google_crc32c.value(plain))
