"""Measure a broker of this checkout: throughput, latency, recovery and memory.

python -m benchmarks                                  everything, three runs each; writes docs/benchmarks.md
python -m benchmarks --only deliver,sdk-*             some rows
python -m benchmarks --only index-1g --runs 1         a row that runs only if it is spelled out
python -m benchmarks --quick                          a smoke test: one run, a tenth of the size
python -m benchmarks --profile produce-100b           where the broker's time goes (needs py-spy)
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import signal
import sys
import tempfile
import time
from dataclasses import replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, NoReturn

from benchmarks import (
    audit,
    backup,
    cluster,
    compaction,
    fairness,
    index_scenarios,
    machine,
    page,
    pending,
    report,
    schedule,
    shards,
)
from benchmarks.arguments import at_least_one, checkout, writable_folder
from benchmarks.errors import BenchmarkFailed
from benchmarks.processes import Setup
from benchmarks.profiling import Profiler
from benchmarks.report import Outcome
from benchmarks.rows import ROWS, Row
from benchmarks.scenarios import SCENARIOS, limits

ALL_SCENARIOS = (
    SCENARIOS
    | pending.SCENARIOS
    | index_scenarios.SCENARIOS
    | fairness.SCENARIOS
    | backup.SCENARIOS
    | audit.SCENARIOS
)
ALL_SCENARIOS |= schedule.SCENARIOS | compaction.SCENARIOS | cluster.SCENARIOS | shards.SCENARIOS

ROOT = Path(__file__).resolve().parents[1]
BUILD = ROOT / "build" / "bench"
PAGE = ROOT / "docs" / "benchmarks.md"


def main() -> int:
    options = _options()
    try:
        rows = _chosen(options.only or options.profile)
        BUILD.mkdir(parents=True, exist_ok=True)
        parent = options.dir or BUILD
        machine.check_folder(parent)
        profiler = Profiler(BUILD / "profiles", native=options.native) if options.profile else None
        broker_core, client_core = _cores()
    except BenchmarkFailed as error:
        print(f"bench: {error}", file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, _stop)
    folder = Path(tempfile.mkdtemp(prefix="run-", dir=parent)).resolve()
    setup = Setup(
        source=options.source.resolve(),
        folder=folder,
        broker_core=broker_core,
        client_core=client_core,
        quick=options.quick,
        entries=options.entries,
        broker_flags=tuple(options.broker_flag),
    )
    try:
        return _run(options, setup, rows, profiler)
    except KeyboardInterrupt:
        print("bench: interrupted", file=sys.stderr)
        return 130
    finally:
        if profiler is not None:
            profiler.close()
        shutil.rmtree(folder, ignore_errors=True)


def _run(options: argparse.Namespace, setup: Setup, rows: list[Row], profiler: Profiler | None) -> int:
    about = machine.describe(setup.folder, setup.source)
    print(report.describe(about, {}), flush=True)
    measured: dict[str, float] = {}
    try:
        measured = limits(setup)
        print("limits: " + ", ".join(f"{name} {report.number(value)}" for name, value in measured.items()))
    except BenchmarkFailed as error:
        print(f"limits failed: {error}")
    outcomes: dict[str, Outcome] = {row.scenario: Outcome() for row in rows}
    runs = options.runs or (1 if options.quick or options.profile else 3)
    for turn in range(runs):  # turn by turn, so that a disturbance does not hit all runs of one row
        for scenario, outcome in outcomes.items():
            wanted = profiler is not None and _matches(scenario, options.profile)
            _run_once(replace(setup, profiler=profiler if wanted else None), scenario, outcome, turn, runs)
    results = [report.row_result(row, outcomes[row.scenario]) for row in rows]
    if setup.quick:
        print("\nQuick: a tenth of the messages, a fifth of the time. A smoke test; these are no figures.")
    print(f"\n{report.table(results)}", flush=True)
    document = {
        "machine": about,
        "limits": measured,
        "options": {"runs": runs, "quick": setup.quick, "broker_flags": setup.broker_flags}
        | {"profiled": options.profile, "broker_core": setup.broker_core, "client_core": setup.client_core},
        "rows": results,
        "scenarios": {name: {"runs": o.runs, "failures": o.failures} for name, o in outcomes.items()},
    }
    path = options.json or BUILD / "results.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=2) + "\n")
    print(f"written: {path}")
    if options.source == ROOT and not (setup.quick or profiler or setup.broker_flags or setup.entries):
        command = shlex.join(["python", "-m", "benchmarks", *sys.argv[1:]])
        by_name = {result["name"]: result for result in results}
        if groups := page.measured_groups(by_name):
            PAGE.write_text(page.write_tables(PAGE.read_text(), command, about, measured, by_name, groups))
            print(f"written: {PAGE}: {', '.join(groups)}")
    return 1 if any("failed" in result for result in results) else 0


def _run_once(setup: Setup, scenario: str, outcome: Outcome, turn: int, runs: int) -> None:
    if setup.profiler is not None:
        setup.profiler.name = scenario
    begin = time.monotonic()
    label = f"[{turn + 1}/{runs}] {scenario:20}"
    try:
        figures = ALL_SCENARIOS[scenario](setup)
    except Exception as error:  # the other rows are worth their while all the same
        reason = str(error) if isinstance(error, BenchmarkFailed) else f"{type(error).__name__}: {error}"
        outcome.failures.append(reason)
        print(f"{label} failed: {reason}", flush=True)
        return
    outcome.runs.append(figures)
    shown = {name: value for name, value in figures.items() if isinstance(value, int | float)}
    shown |= {f"use_{name}": value for name, value in figures.get("use", {}).items()}
    text = " ".join(f"{name}={report.number(value)}" for name, value in shown.items())
    print(f"{label} {time.monotonic() - begin:5.1f} s  {text}", flush=True)


def _chosen(patterns: str | None) -> list[Row]:
    rows = [row for row in ROWS if _is_chosen(row, patterns)]
    if not rows:
        raise BenchmarkFailed(f"no row is called {patterns}; there are {', '.join(row.name for row in ROWS)}")
    return rows


def _is_chosen(row: Row, patterns: str | None) -> bool:
    names = (row.name, row.scenario)
    if row.on_request:  # whoever wants it spells it out
        return any(pattern.strip() in names for pattern in (patterns or "").split(","))
    return not patterns or any(_matches(name, patterns) for name in names)


def _matches(name: str, patterns: str) -> bool:
    return any(fnmatch(name, pattern.strip()) for pattern in patterns.split(","))


def _cores() -> tuple[int, int]:
    """A core for the broker and one for the client: the last two, as the first takes most interrupts."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        raise BenchmarkFailed("two cores are needed, one for the broker and one for the client")
    return cores[-2], cores[-1]


def _stop(*_: Any) -> NoReturn:
    raise KeyboardInterrupt


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", metavar="NAME", help="rows or scenarios, with commas and wildcards")
    parser.add_argument(
        "--runs", type=at_least_one, help="runs of each row (default 3; 1 with --quick or --profile)"
    )
    parser.add_argument("--quick", action="store_true", help="a tenth of the size; not for figures")
    parser.add_argument(
        "--entries", type=at_least_one, help="entries of index-* rows, instead of their own number"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="default build/bench/results.json")
    parser.add_argument(
        "--dir", type=writable_folder, help="where data goes; a real disk (default build/bench)"
    )
    parser.add_argument("--profile", metavar="NAME", help="attach py-spy to the broker in these scenarios")
    parser.add_argument("--native", action="store_true", help="with --profile: C functions too (slower)")
    parser.add_argument("--source", type=checkout, default=ROOT, help="another checkout to measure")
    parser.add_argument(
        "--broker-flag", action="append", default=[], metavar="FLAG", help="e.g. --broker-flag=--lease-ms=100"
    )
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
