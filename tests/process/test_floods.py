"""Each flood of `benchmarks.strangers` in small: whoever has rights is served meanwhile, and the broker goes on."""

from __future__ import annotations

import itertools
import os
import sys
from dataclasses import dataclass
from operator import ge
from pathlib import Path

import pytest

from benchmarks.strangers.floods import FLOODS, OVER_TLS
from benchmarks.strangers.measure import CERTIFICATE, HEADER, access_flags, measure, tls_flags
from tests.depth import TODAY, at_depth, deep_but
from tests.process.conftest import ROOT, Start

SCALE = 0.1
SECONDS = at_depth(change=1_500, deep=4_000) / 1_000
"""At least; it lasts until it was a flood."""
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
    "half TLS handshakes": Least(100, 0, 10),
    "TLS handshakes": Least(50),
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
    "headers without end": Least(1, 1, 4 << 10),
    "large headers": Least(4, 1_000, 8 << 10),
    "settings": Least(1, 200, 100),
    "empty frames": Least(1, 1, 4 << 10),
    "oversize messages": Least(1, 50, 500),
    "whole calls": Least(1, 500, 50),
    "large calls without a right": Least(1, 20, 32 << 10, has_token=True),
    "acks whose answers are not read": Least(1, 100, 1 << 10),
    "half-sent HTTP forms": Least(50, 50, 1 << 10),
    "slow HTTP headers": Least(50, 0, 2),
}


KINDS = (
    ("idle connections, gRPC", "idle connections, HTTP", "slow HTTP headers", "half-sent HTTP forms"),
    ("half handshakes", "handshakes and no call", "half TLS handshakes", "TLS handshakes"),
    ("calls without a message", "streams without a message", "probes without a message"),
    ("half-sent messages of 15 MiB", "half-sent later messages of 15 MiB"),
    ("a window of each message", "messages byte by byte"),
    ("streams of large messages", "large calls without a right", "oversize messages"),
    ("calls reset at once", "whole calls", "pings", "settings"),
    ("headers without end", "large headers", "empty frames"),
    ("acks whose answers are not read",),
)
"""Floods that take the same of a broker."""
OF_THE_DAY = [
    (kind[TODAY % len(kind)], ("open", "guarded")[(number + TODAY // 12) % 2])
    for number, kind in enumerate(KINDS)
]


def test_each_flood_is_of_a_kind():
    assert sorted(itertools.chain(*KINDS)) == sorted(FLOODS)


def test_the_document_has_a_row_for_each_flood():
    lines = (ROOT / "docs/security.md").read_text().splitlines()
    begin = lines.index(HEADER.splitlines()[0])
    named = [tuple(line.split(" | ")[:2]) for line in lines[begin + 2 : begin + 2 + 2 * len(FLOODS)]]
    assert named == [(f"| {name}", access) for access in ("off", "on") for name in FLOODS]
    assert list(LEAST) == list(FLOODS)


# A change meets one flood of each kind, on each day another, with or without access control.
@pytest.mark.parametrize(
    ("name", "access"), deep_but(OF_THE_DAY, itertools.product(FLOODS, ("open", "guarded")))
)
async def test_a_flood_keeps_nobody_out(start: Start, tmp_path: Path, name: str, access: str):
    print(f"HYPOTHESIS_SEED={TODAY} tries the floods of this day again")
    flags = access_flags(tmp_path) if access == "guarded" else ()
    if name in OVER_TLS:
        flags += tls_flags(tmp_path)
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
    sends = access == "open" or LEAST[name].has_token
    least = (LEAST[name].connections, LEAST[name].calls, LEAST[name].sent_kib << 10 if sends else 0)
    figures = await measure(
        command,
        broker.grpc_address,
        broker.http_address,
        broker.process.pid,
        name,
        seconds=SECONDS,
        scale=SCALE,
        least=least,
        certificate=tmp_path / CERTIFICATE if name in OVER_TLS else None,
    )
    did = (figures.connections, figures.calls, figures.sent_bytes)
    assert all(map(ge, did, least)), f"there was no flood: {did}"
    assert not figures.failed
    assert len(figures.produce_ms) > 3 and max(figures.produce_ms) < 5_000
    assert max(figures.probe_ms) < 5_000
    assert figures.peak_bytes < PEAK_BYTES
    assert broker.process.returncode is None
    assert not [line for line in broker.lines if '"level": "error"' in line]
