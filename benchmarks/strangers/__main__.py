"""Flood a broker of this checkout as a stranger could, and print what a caller with rights notices.

python -m benchmarks.strangers --seconds 4    the table of docs/security.md: every flood, each twice
python -m benchmarks.strangers --only pings   one of them, without and with access control
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
from pathlib import Path

from benchmarks import machine
from benchmarks.errors import BenchmarkFailed
from benchmarks.processes import Broker, Setup
from benchmarks.strangers.floods import FLOODS, OVER_TLS, Flood
from benchmarks.strangers.measure import CERTIFICATE, HEADER, Figures, access_flags, measure, tls_flags

ROOT = Path(__file__).resolve().parents[2]


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.strangers",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--only", choices=sorted(FLOODS), help="one flood")
    parser.add_argument(
        "--seconds", type=float, default=4.0, help="of each flood; with eight more for memory to come back"
    )
    parser.add_argument("--flood", help=argparse.SUPPRESS)  # a child of ours: the flood itself
    options = parser.parse_args()
    if options.flood:
        return asyncio.run(_flood(json.loads(options.flood)))
    print(json.dumps(machine.describe(ROOT, ROOT)), flush=True)
    print(HEADER, flush=True)
    try:
        with tempfile.TemporaryDirectory(prefix="strangers-") as folder:
            for guarded in (False, True):
                for name in [options.only] if options.only else FLOODS:
                    figures = _run(Path(folder), name, guarded=guarded, seconds=options.seconds)
                    print(figures.row(name, guarded=guarded), flush=True)
    except BenchmarkFailed as error:
        print(f"strangers: {error}", file=sys.stderr)
        return 1
    return 0


def _run(folder: Path, name: str, *, guarded: bool, seconds: float) -> Figures:
    flags = access_flags(folder) if guarded else ()
    if name in OVER_TLS:
        flags += tls_flags(folder)
    setup = Setup(ROOT, folder, 0, 1, quick=False, broker_flags=tuple(flags))
    folder_name = f"{'guarded' if guarded else 'open'}-{name.replace(' ', '-')}"
    env = {"TUNING": '{"first_message_ms": "5s"}'}
    with Broker(setup, folder_name, script=ROOT / "tests/tuned_broker.py", env=env) as broker:
        command = [sys.executable, "-m", "benchmarks.strangers", "--flood"]
        return asyncio.run(
            measure(
                command,
                broker.address,
                broker.http_address,
                broker.pid,
                name,
                seconds=seconds,
                certificate=folder / CERTIFICATE if name in OVER_TLS else None,
            )
        )


async def _flood(task: dict[str, object]) -> int:
    name = str(task.pop("name"))
    flood = Flood(**task)  # type: ignore[arg-type]
    await flood.run(name)
    print(
        json.dumps({"connections": flood.connections, "calls": flood.calls, "sent_bytes": flood.sent_bytes})
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
