"""Each flood of `benchmarks.strangers` in small: whoever has rights is served meanwhile, and the broker goes on."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from benchmarks.strangers.floods import FLOODS
from benchmarks.strangers.measure import access_flags, measure
from tests.process.conftest import Start

SCALE = 0.1
SECONDS = 1.5
PEAK_BYTES = 256 << 20


@pytest.mark.parametrize("access", ["open", "guarded"])
@pytest.mark.parametrize("name", FLOODS)
async def test_a_flood_keeps_nobody_out(start: Start, tmp_path: Path, name: str, access: str):
    flags = access_flags(tmp_path) if access == "guarded" else ()
    # Few places, so that a flood in small meets all limits.
    broker = await start(
        *flags,
        data_dir=str(tmp_path / "d"),
        http_connections_max="20",
        streams_max="50",
        receiving_bytes_max="32MiB",
    )
    await broker.serving()
    command = [sys.executable, "-m", "benchmarks.strangers", "--flood"]
    os.environ["GRPC_VERBOSITY"] = "NONE"
    figures = await measure(
        command,
        broker.grpc_address,
        broker.http_address,
        broker.process.pid,
        name,
        seconds=SECONDS,
        scale=SCALE,
    )
    assert figures.connections, "there was no flood"
    assert not figures.failed
    assert len(figures.produce_ms) > 3 and max(figures.produce_ms) < 5_000
    assert max(figures.probe_ms) < 5_000
    assert figures.peak_bytes < PEAK_BYTES
    assert broker.process.returncode is None
    assert not [line for line in broker.lines if '"level": "error"' in line]
