"""Seals of files that never change: digests of the parts that hold the checksums of all else in them.

A file of the same path and size with the same seal holds the same bytes, so an upload need not read it:

    ledgers/* of a sealed ledger                     the ends of `times` and `rows`: checksums of all blocks, whose rows
                                                     hold the checksum of every frame
    buckets/*.bucket                                 the beginning: checksums of metadata, segments and bitmaps
    keys/*.keys                                      the beginning: checksums of filter and blocks

Everything else is small, or may still change, and has none. Everything blocks.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator

from broker.model import ROW
from broker.runtime.vfs import Vfs, size_if_there
from broker.storage.blocks import HEADER_BYTES, KINDS, TIME, LedgerCapture, file_lengths
from broker.storage.layout import Layout
from broker.storage.manifest import TopicImage, decode_topic
from broker.storage.named_files import read_named
from broker.storage.packed_rows import end_bytes

_BEGINNING_BYTES = 64 * 1024


def read_seals(vfs: Vfs, layout: Layout, topic_id: int) -> dict[str, str]:
    """Seals of a topic's files, by path. Those that cannot be read have none."""
    path = layout.topic_manifest(topic_id)
    image = decode_topic(read_named(vfs, path), path)
    seals: dict[str, str] = {}
    for ledger in image.ledgers:
        if ledger.capture.sealed:
            with contextlib.suppress(OSError):
                seals.update(_ledger_seals(vfs, layout, ledger.capture))
    for path in _runs(layout, image):
        with contextlib.suppress(OSError):
            seals[path] = _digest(_read(vfs, path, 0, _BEGINNING_BYTES))
    return seals


def _ledger_seals(vfs: Vfs, layout: Layout, capture: LedgerCapture) -> dict[str, str]:
    name, lengths = capture.name(layout.ledgers(capture.topic_id)), file_lengths(capture)
    if any(size_if_there(vfs, name.path(kind)) != length for kind, length in lengths.items()):
        return {}
    rows_end = lengths["rows"] - end_bytes(capture.row_count) if capture.packed_bytes else 0
    seal = _digest(
        _read(vfs, name.path("times"), HEADER_BYTES + capture.row_count * TIME.itemsize),
        _read(vfs, name.path("rows"), rows_end or HEADER_BYTES + capture.row_count * ROW.itemsize),
    )
    return {name.path(kind): seal for kind in KINDS}


def _runs(layout: Layout, image: TopicImage) -> Iterator[str]:
    for bucket_id in image.bucket_ids:
        yield f"{layout.buckets(image.topic_id)}/{bucket_id}.bucket"
    for run_id in image.key_run_ids:
        yield f"{layout.keys(image.topic_id)}/{run_id}.keys"


def _read(vfs: Vfs, path: str, offset: int, length_max: int | None = None) -> bytes:
    file = vfs.open(path)
    try:
        return file.pread(file.size() - offset if length_max is None else length_max, offset)
    finally:
        file.close()


def _digest(*parts: bytes) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.hexdigest()
