"""Each flood of `benchmarks.strangers` in small: whoever has rights is served meanwhile, and the broker goes on."""

from __future__ import annotations

import itertools
import os
import sys
from dataclasses import dataclass
from operator import ge
from pathlib import Path

import pytest

from benchmarks.strangers.floods import FLOODS
from benchmarks.strangers.measure import HEADER, access_flags, measure
from tests.depth import deep_but
from tests.process.conftest import ROOT, Start

SCALE = 0.1
SECONDS = 1.5
PEAK_BYTES = 256 << 20


@dataclass(frozen=True)
class Least:
    """Least figures of a flood of this size."""

    connections: int
    calls: int = 0
    sent_kib: int = 0
    """If the broker does not refuse it by its headers."""
    has_token: bool = False


LEAST = {
    "idle connections, gRPC": Least(150),
    "idle connections, HTTP": Least(150),
    "half handshakes": Least(100, 0, 1),
    "handshakes and no call": Least(100, 0, 4),
    "calls without a message": Least(2, 500),
    "streams without a message": Least(2, 500),
    "probes without a message": Least(2, 500),
    "half-sent messages of 15 MiB": Least(1, 10, 16 << 10),
    "half-sent later messages of 15 MiB": Least(1, 10, 16 << 10, has_token=True),
    "a window of each message": Least(4, 1_000, 4 << 10),
    "streams of large messages": Least(1, 10, 32 << 10, has_token=True),
    "messages byte by byte": Least(5, 50, 10),
    "calls reset at once": Least(1, 1_000, 100),
    "pings": Least(1, 0, 100),
    "oversize messages": Least(1, 50, 500),
    "whole calls": Least(1, 500, 50),
    "large calls without a right": Least(1, 20, 32 << 10, has_token=True),
    "acks whose answers are not read": Least(1, 100, 1 << 10),
    "half-sent HTTP forms": Least(50, 50, 1 << 10),
    "slow HTTP headers": Least(50, 0, 2),
}


def test_the_document_has_a_row_for_each_flood():
    lines = (ROOT / "docs/security.md").read_text().splitlines()
    begin = lines.index(HEADER.splitlines()[0])
    named = [tuple(line.split(" | ")[:2]) for line in lines[begin + 2 : begin + 2 + 2 * len(FLOODS)]]
    assert named == [(f"| {name}", access) for access in ("off", "on") for name in FLOODS]
    assert list(LEAST) == list(FLOODS)


# A change meets each flood once, with or without access control in turn.
@pytest.mark.parametrize(
    ("name", "access"),
    deep_but(
        [(name, ("open", "guarded")[number % 2]) for number, name in enumerate(FLOODS)],
        itertools.product(FLOODS, ("open", "guarded")),
    ),
)
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
    least = LEAST[name]
    sent_kib = least.sent_kib if access == "open" or least.has_token else 0
    did = (figures.connections, figures.calls, figures.sent_bytes >> 10)
    assert all(map(ge, did, (least.connections, least.calls, sent_kib))), f"there was no flood: {did}"
    assert not figures.failed
    assert len(figures.produce_ms) > 3 and max(figures.produce_ms) < 5_000
    assert max(figures.probe_ms) < 5_000
    assert figures.peak_bytes < PEAK_BYTES
    assert broker.process.returncode is None
    assert not [line for line in broker.lines if '"level": "error"' in line]
