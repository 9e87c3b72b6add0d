"""The scenarios of compaction: ledgers that one message of next year keeps; an index whose buckets are mostly
delivered; and a broker that goes on while its data is compacted."""

from __future__ import annotations

import re
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
from benchmarks.processes import Broker, Client, Setup, environment, spawn
from benchmarks.scenarios import Figures, Scenario
from broker.model import FLAG_DELAYED, ROW, Position
from broker.storage.blocks import HEADER_BYTES, BlockChecksums
from broker.storage.manifest import decode_topic, encode_topic
from broker.testing.data_folder import FolderWriter, StoredLedger, StoredSubscription

_ENTRIES = 50_000
_FRAME_BYTES = 1_024
_NEXT_YEAR_MS = (time.time_ns() // 1_000_000) + 365 * 86_400_000
_SECONDS_MAX = 600
_TOPIC_ENTRIES = 2_500_000
_BUCKETS = 4
_HOUR_MS = 3_600_000
_MONTH_MS = 30 * 24 * _HOUR_MS
_RATE = 200.0


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


def compact_index_5m(setup: Setup) -> Figures:
    return _compact_index(setup, setup.entries or setup.sized(5_000_000))


def compact_index_50m(setup: Setup) -> Figures:
    return _compact_index(setup, setup.entries or setup.sized(50_000_000))


def compact_live(setup: Setup) -> Figures:
    """A quiet topic's lateness and produce, without and with a compaction of others; the job has the other core."""
    jobs: list[subprocess.Popen[str]] = []
    said: list[str] = []
    broker = Broker(setup, "compact-live")
    _write_index(broker.data_folder, setup.sized(20_000_000))
    with broker:
        broker.wait_quiet()

        def begin() -> None:
            # As deploy/systemd runs it: the client, which measures, has the same core.
            command = _command("--address", broker.address, "--apply")
            env = environment(setup.source)
            job = spawn(
                setup.client_core,
                command,
                niceness=15,
                env=env,
                cwd=setup.source,
                stdout=subprocess.PIPE,
            )
            jobs.append(job)

        def end() -> None:
            output, _ = jobs[0].communicate(timeout=_SECONDS_MAX)
            if jobs[0].returncode:
                raise BenchmarkFailed(f"compact ended with {jobs[0].returncode}: {output}")
            said.append(output)

        client = Client(
            setup,
            broker,
            "quiet",
            rate=_RATE,
            seconds=setup.seconds(15.0),
            disturbances=("nothing", "compaction"),
        )
        try:
            found = client.run(on_phase={"begin compaction": begin, "end compaction": end})
        finally:
            for job in jobs:
                job.kill()
                job.wait()
    quiet, busy = found["nothing"], found["compaction"]
    return {
        "seconds": _seconds(said[0])[0],
        "early": found["early"],
        **{
            f"{prefix}{what}_p99_ms": each[kind]["p99"]
            for prefix, each in (("quiet_", quiet), ("", busy))
            for what, kind in (("late", "late"), ("produce", "answered"))
        },
        "late_ratio": busy["late"]["p99"] / quiet["late"]["p99"],
        "produce_ratio": busy["answered"]["p99"] / quiet["answered"]["p99"],
    }


SCENARIOS: dict[str, Scenario] = {
    "compact-ledgers": compact_ledgers,
    "compact-index-5m": compact_index_5m,
    "compact-index-50m": compact_index_50m,
    "compact-live": compact_live,
}


def _compact_index(setup: Setup, count: int) -> Figures:
    """The merges of a night, with all that a run does after its start: the job's work, and the broker's look at it."""
    folder = setup.folder / "merged"
    figures: Figures = {}
    for prefix, options in (("", ["--engine", "spark", "--master", "local[2]"]), ("inline_", [])):
        try:
            _write_index(folder, count)
            seconds, start_up = _seconds(_run(setup, folder, "--apply", *options))
            figures |= {f"{prefix}seconds": seconds, f"{prefix}start_up_s": start_up}
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    return figures


def _write_index(folder: Path, count: int) -> None:
    """Topics with 2,500,000 entries that wait, in four buckets each of which just more than half was delivered."""
    random = np.random.default_rng(7)
    now_ms = time.time_ns() // 1_000_000
    with FolderWriter(str(folder), frontier_ms=now_ms - _MONTH_MS) as writer:
        topics = max(1, count // _TOPIC_ENTRIES)
        rows = count // topics // _BUCKETS
        for topic in range(topics):
            ledgers = []
            for number in range(1, _BUCKETS + 1):
                times = np.full(2 * rows + 1_000, now_ms - _HOUR_MS)
                times[::2][:rows] = now_ms + random.integers(_HOUR_MS, _MONTH_MS, rows)
                ledgers.append(StoredLedger(topic * 10 + number, times, hollow=True))
            writer.add_topic(f"topic-{topic}", ledgers, [StoredSubscription("s")], ledgers_per_bucket=1)


def _seconds(output: str) -> tuple[float, float]:
    """Of a run, and of the start-up before."""
    match = re.search(r"; ([\d.]+) s on .* after ([\d.]+) s of", output)
    if match is None or "buckets of 0 topics" in output:
        raise BenchmarkFailed(f"nothing was merged: {output}")
    return float(match[1]), float(match[2])


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
    named = tuple(
        replace(each, capture=replace(each.capture, data_bytes=data_bytes)) for each in image.ledgers
    )
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


def _command(*options: str) -> list[str]:
    # Of an option that comes twice the last one counts.
    return [sys.executable, "-m", "broker.cli", "compact", "--engine", "inline", *options]


def _run(setup: Setup, folder: Path, *options: str) -> str:
    done = subprocess.run(
        _command("--offline", str(folder), *options),
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
