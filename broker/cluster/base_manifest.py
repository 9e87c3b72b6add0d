"""The manifest of a base: which files a folder has, and of which chunks each is made. Pure.

Lines of JSON, each one object:

    header  `format` "postdate-base", `version` 1, `chunk_bytes`, the fields of `Base`
    file    `path`, `size`, `seal`, `chunks`: the names of its pieces of `chunk_bytes`, the last one shorter; by path
    end     `files`, how many there are; `crc32c` of all bytes before this line

A chunk's name is the sha256 of its bytes, in hex, and a nonce. A *seal* tells, without reading all of a file, that its
bytes are those of a file of the same path and size with the same seal (`seals`); files that may still change have none.

  BASE-1  A decoder gives a manifest or `Corrupt`, whatever the bytes; no path of it leads out of a folder, and its
          header tells as many files and bytes as it names.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import pairwise
from typing import Any, TypeGuard

import google_crc32c

from broker.errors import Corrupt

FORMAT = "postdate-base"
VERSION = 1
CHUNK_BYTES = 8 << 20
HEADER_BYTES_MAX = 4096
"""A header is never longer: whoever lists bases reads no more of each."""

MANIFEST_BYTES_MAX = 1 << 30
"""A manifest is never longer: enough for 100 TB."""

_TAG = r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}"
_NAME = re.compile(rf"([0-9a-f]{{16}})-({_TAG})", re.ASCII)
_CHUNK = re.compile(r"[0-9a-f]{64}-[0-9a-f]{8}", re.ASCII)
_PATH = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}(/[A-Za-z0-9][A-Za-z0-9._-]{0,127}){0,7}", re.ASCII)
_SEAL = re.compile(r"([0-9a-f]{64})?", re.ASCII)
_SIZE_MAX = 1 << 62
_CHUNK_BYTES_MAX = 64 << 20
_ADVICE = "Use another base."


class OtherVersion(Corrupt):
    """A manifest that this broker does not know how to read."""


@dataclass(frozen=True, slots=True)
class Base:
    """Header of a base. It holds every record up to `lsn`, and none after it."""

    name: str
    label: str
    broker_id: str
    create_time_ms: int
    lsn: int
    topics: int
    files: int
    bytes: int
    uploaded_bytes: int  # the rest was in the store already


@dataclass(frozen=True, slots=True)
class BaseFile:
    """A file of a base."""

    path: str  # below the folder
    size: int
    seal: str  # empty: it may still have changed after the base was made
    chunks: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class BaseManifest:
    """A base, and its files by path."""

    base: Base
    files: dict[str, BaseFile]
    chunk_bytes: int = CHUNK_BYTES

    def chunk_names(self) -> set[str]:
        return {name for file in self.files.values() for name in file.chunks}


@dataclass(frozen=True, slots=True)
class ChunkPlace:
    """A piece of a file: which chunk, and where it lies in the file."""

    name: str
    offset: int
    length: int


def base_name(lsn: int, tag: str) -> str:
    """Name of a base: names of one broker sort as their lsns do."""
    return f"{lsn:016x}-{tag}"


def base_lsn(name: str) -> int:
    """Return the lsn of the base that has a name."""
    return int(name.partition("-")[0], 16)


def is_base_name(name: str) -> bool:
    return _NAME.fullmatch(name) is not None


def is_file_path(path: str) -> bool:
    """Return whether a path below a folder can be that of a file of a base."""
    return _PATH.fullmatch(path) is not None


def is_chunk_name(name: str) -> bool:
    return _CHUNK.fullmatch(name) is not None


def digest_of(chunk_name: str) -> str:
    """The sha256 that a chunk's name states."""
    return chunk_name[:64]


def chunk_places(
    file: BaseFile, chunk_bytes: int, first: int = 0, end: int | None = None
) -> Iterator[ChunkPlace]:
    """Places of a file's chunks, or of those from number `first` to before `end`."""
    for index, name in enumerate(file.chunks[first:end], first):
        offset = index * chunk_bytes
        yield ChunkPlace(name, offset, min(chunk_bytes, file.size - offset))


def encode_manifest(manifest: BaseManifest) -> bytes:
    header = {
        "format": FORMAT,
        "version": VERSION,
        "chunk_bytes": manifest.chunk_bytes,
        **asdict(manifest.base),
    }
    lines = [_line(header)]
    for _, file in sorted(manifest.files.items()):
        lines.append(_line({"path": file.path, "size": file.size, "seal": file.seal, "chunks": file.chunks}))
    body = b"".join(lines)
    return body + _line({"files": len(manifest.files), "crc32c": int(google_crc32c.value(body))})


def decode_manifest(data: bytes, path: str) -> BaseManifest:
    """Any bytes give a manifest or Corrupt."""
    lines = data.split(b"\n")
    if len(lines) < 3 or lines[-1]:
        raise _damaged("It does not end as a base's manifest does", path)
    base, chunk_bytes = _decode_header(lines[0], path)
    end = _object(lines[-2], path)
    body_bytes = len(data) - len(lines[-2]) - 1
    if end.get("crc32c") != int(google_crc32c.value(data[:body_bytes])):
        raise _damaged("Its checksum is wrong", path)
    files = [_decode_file(line, chunk_bytes, path) for line in lines[1:-2]]
    if end.get("files") != len(files) or not _is_tree([file.path for file in files]):
        raise _damaged("Its list of files is wrong", path)
    if (base.files, base.bytes) != (len(files), sum(file.size for file in files)):
        raise _damaged("Its header is wrong", path)
    return BaseManifest(base, {file.path: file for file in files}, chunk_bytes)


def decode_header(data: bytes, path: str) -> Base:
    """The header in the first bytes of a manifest. The rest may be missing or damaged."""
    line, newline, _ = data.partition(b"\n")
    if not newline:
        raise _damaged("It does not begin as a base's manifest does", path)
    return _decode_header(line, path)[0]


def _decode_header(line: bytes, path: str) -> tuple[Base, int]:
    content = _object(line, path)
    if content.get("format") != FORMAT:
        raise _damaged("It does not begin as a base's manifest does", path)
    if content.get("version") != VERSION:
        raise OtherVersion(
            f"The base has version {content.get('version')!r:.20}, this broker knows {VERSION}",
            path=path,
            advice="Use the version of the broker that made it.",
        )
    kinds = {field.name: {"str": str, "int": int}[str(field.type)] for field in fields(Base)}
    values = {name: content.get(name) for name in kinds}
    chunk_bytes = content.get("chunk_bytes")
    whole = all(_is_of_kind(values[name], kind) for name, kind in kinds.items())
    if not whole or not _is_count(chunk_bytes) or not 0 < chunk_bytes <= _CHUNK_BYTES_MAX:
        raise _damaged("Its header is wrong", path)
    base = Base(**values)  # type: ignore[arg-type]  # each is of its kind, as was just checked
    match = _NAME.fullmatch(base.name)
    if match is None or int(match[1], 16) != base.lsn:
        raise _damaged("Its header is wrong", path)
    return base, chunk_bytes


def _decode_file(line: bytes, chunk_bytes: int, path: str) -> BaseFile:
    content = _object(line, path)
    name, size, seal, chunks = (content.get(key) for key in ("path", "size", "seal", "chunks"))
    if not (
        isinstance(name, str)
        and is_file_path(name)
        and _is_count(size)
        and isinstance(seal, str)
        and _SEAL.fullmatch(seal)
        and isinstance(chunks, list)
        and len(chunks) == -(-size // chunk_bytes)
        and all(isinstance(chunk, str) and is_chunk_name(chunk) for chunk in chunks)
    ):
        raise _damaged("One of its files is wrong", path)
    return BaseFile(name, size, seal, tuple(chunks))


def _is_of_kind(value: object, kind: type) -> bool:
    return _is_count(value) if kind is int else isinstance(value, str)


def _is_count(value: object) -> TypeGuard[int]:
    return type(value) is int and 0 <= value < _SIZE_MAX


def _is_tree(paths: Sequence[str]) -> bool:
    """Return whether paths rise, and none is a folder of another."""
    folders = {path[: match.start()] for path in paths for match in re.finditer("/", path)}
    return all(before < after for before, after in pairwise(paths)) and folders.isdisjoint(paths)


def _object(line: bytes, path: str) -> dict[str, Any]:
    try:
        content = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise _damaged("A line of it is no JSON", path) from error
    if not isinstance(content, dict):
        raise _damaged("A line of it is no object", path)
    return content


def _line(content: dict[str, Any]) -> bytes:
    return json.dumps(content, separators=(",", ":")).encode() + b"\n"


def _damaged(why: str, path: str) -> Corrupt:
    return Corrupt(f"The manifest of a base is damaged: {why[0].lower()}{why[1:]}", path=path, advice=_ADVICE)
