"""The scenario of compaction: ledgers that one message of next year keeps, rewritten by the command offline."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
from google_crc32c import value
from pyroaring import BitMap

from benchmarks.errors import BenchmarkFailed
from benchmarks.processes import Setup, environment
from benchmarks.scenarios import Figures, Scenario
from broker.model import FLAG_DELAYED, ROW, Position
from broker.storage.blocks import HEADER_BYTES, BlockChecksums
from broker.storage.manifest import decode_topic, encode_topic
from broker.testing.data_folder import FolderWriter, StoredLedger, StoredSubscription

_ENTRIES = 50_000
_FRAME_BYTES = 1_024
_NEXT_YEAR_MS = (time.time_ns() // 1_000_000) + 365 * 86_400_000
_SECONDS_MAX = 600


def compact_ledgers(setup: Setup) -> Figures:
    """200 ledgers of 50,000 messages of 1 KB, all delivered but one each."""
    folder = setup.folder / "compacted"
    try:
        ledgers = setup.sized(200)
        _write(folder, ledgers)
        before = _ledger_bytes(folder)
        started = time.monotonic()
        _run(setup, folder, "--apply")
        seconds = time.monotonic() - started
        if "rewrite" in _run(setup, folder):  # of buckets the broker merges some itself meanwhile
            raise BenchmarkFailed("a second run would do more")
        after = _ledger_bytes(folder)
        return {"seconds": seconds, "left_percent": 100 * after / before, "before_mb": before / 1e6}
    finally:
        shutil.rmtree(folder, ignore_errors=True)


SCENARIOS: dict[str, Scenario] = {"compact-ledgers": compact_ledgers}


def _write(folder: Path, ledgers: int) -> None:
    times = np.zeros(_ENTRIES, np.int64)
    times[-1] = _NEXT_YEAR_MS
    done = BitMap(range(_ENTRIES - 1))
    with FolderWriter(str(folder)) as writer:
        stored = [StoredLedger(ledger_id, times, hollow=True) for ledger_id in range(1, ledgers + 1)]
        settled = dict.fromkeys(range(2, ledgers + 1), done)
        writer.add_topic("t", stored, [StoredSubscription("s", settled, Position(1, _ENTRIES - 1))])
    topic = folder / "topics/1"
    manifest = topic / "manifest"
    image = decode_topic(manifest.read_bytes(), str(manifest))
    data_bytes = _ENTRIES * _FRAME_BYTES
    named = tuple(replace(each, data_bytes=data_bytes) for each in image.ledgers)
    manifest.write_bytes(encode_topic(replace(image, ledgers=named)))
    rows, frame = _rows(times)
    for ledger_id in range(1, ledgers + 1):
        _fill(topic / "ledgers" / f"{ledger_id}.0.rows", [(HEADER_BYTES, rows)])
        # What was delivered is a hole in the file: nobody reads it. It counts in full.
        _fill(topic / "ledgers" / f"{ledger_id}.0.data", [(HEADER_BYTES + data_bytes - len(frame), frame)])


def _rows(times: np.ndarray) -> tuple[bytes, bytes]:
    """All rows with their footer, and the frame that each of them names."""
    payload = bytes(_FRAME_BYTES - 6)
    frame = b"\x12\xfd\x07\x0a\xfa\x07" + payload
    assert len(frame) == _FRAME_BYTES
    rows = np.zeros(len(times), ROW)
    rows["publish_time_ms"] = 1
    rows["length"] = len(frame)
    rows["offset"] = np.arange(len(times)) * len(frame)
    rows["crc"] = value(frame)
    rows["flags"] = np.where(times > 0, FLAG_DELAYED, 0)
    checksums = BlockChecksums(ROW.itemsize)
    checksums.extend(rows)
    return rows.tobytes() + checksums.encode_footer(), frame


def _fill(path: Path, parts: list[tuple[int, bytes]]) -> None:
    with path.open("r+b") as file:
        for offset, content in parts:
            file.seek(offset)
            file.write(content)


def _run(setup: Setup, folder: Path, *options: str) -> str:
    command = [
        sys.executable,
        "-m",
        "broker.cli",
        "compact",
        "--engine",
        "inline",
        "--offline",
        str(folder),
        *options,
    ]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        cwd=setup.source,
        env=environment(setup.source),
        timeout=_SECONDS_MAX,
        check=False,
    )
    if done.returncode != 0:
        raise BenchmarkFailed(f"compact ended with {done.returncode}: {done.stdout}{done.stderr}")
    return done.stdout


def _ledger_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("topics/*/ledgers/*"))
