"""Measure Postdate beside other servers: the same work, a core for the server, one for the client.

python -m benchmarks.peers                                      everything, three runs each: hours
python -m benchmarks.peers --quick --runs 1                     less of everything, once: a quarter of an hour
python -m benchmarks.peers --peers postdate,redis --rows 'single*'

Libraries of clients, nats-server where there is Go, and Pulsar where there are Maven and a JDK, are installed in
build/peers. Other programs that are not on this machine are left out. The tables in docs/benchmarks-peers.md are
written when no row is left out by --rows.
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
from dataclasses import asdict
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from benchmarks import machine
from benchmarks.arguments import at_least_one
from benchmarks.errors import BenchmarkFailed
from benchmarks.peers import PEERS, page, peer_class, programs, runs
from benchmarks.peers.page import About, Results
from benchmarks.peers.rows import FULL, QUICK, SCENARIOS, Take
from benchmarks.report import number

_PAGE = programs.ROOT / "docs" / "benchmarks-peers.md"
_AGAIN_MAX, _QUICK_AGAIN_MAX = 3, 1


def main() -> int:
    options = _options()
    try:
        names = _chosen("peer", options.peers, list(PEERS))
        scenarios = _chosen("row", options.rows, list(SCENARIOS))
        programs.BUILD.mkdir(parents=True, exist_ok=True)
        machine.check_folder(programs.BUILD)
        server_core, client_core = _cores()
    except BenchmarkFailed as error:
        print(f"bench-peers: {error}", file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, _stop)
    folder = Path(tempfile.mkdtemp(prefix="run-", dir=programs.BUILD)).resolve()
    folder.chmod(0o755)  # servers that refuse root run as somebody else
    limits = runs.Machine(
        folder, server_core, client_core, options.foreign_max, probe_ratio_max=2.0, seconds_max=900.0
    )
    try:
        results = _run(options, limits, names, scenarios)
    except KeyboardInterrupt:
        print("bench-peers: interrupted", file=sys.stderr)
        return 130
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print(f"\n{page.render(results)}")
    _write_json(results)
    if not options.rows:
        _PAGE.write_text(page.write_page(_PAGE.read_text(), results))
        print(f"written: {_PAGE}")
    return 1 if results.failures else 0


def _run(
    options: argparse.Namespace, limits: runs.Machine, names: list[str], scenarios: list[str]
) -> Results:
    peers, skipped = _present(names)
    sizes = QUICK if options.quick else FULL
    about = machine.describe(limits.folder, programs.ROOT)
    takes: dict[tuple[str, str], list[Take]] = {(peer, name): [] for name in scenarios for peer in peers}
    instead = {(peer, name): peer_class(peer).instead_of(name) for peer, name in takes}
    failures: dict[tuple[str, str], str] = {}
    again_max = _QUICK_AGAIN_MAX if options.quick else _AGAIN_MAX
    for turn in range(options.runs):
        for scenario in scenarios:
            for peer in peers:  # in turns, so that a slow hour is everybody's
                if instead[peer, scenario]:
                    continue
                label = f"[{turn + 1}/{options.runs}] {scenario:14} {peer:11}"
                measure = partial(runs.measure, limits, peer, SCENARIOS[scenario], sizes)
                try:
                    found = runs.take_until_quiet(measure, again_max, partial(_say, label))
                    takes[peer, scenario] += found
                except Exception as error:  # the other rows are worth their while all the same
                    failures[peer, scenario] = reason = str(error) or type(error).__name__
                    print(f"{label} failed: {reason}", flush=True)
    command = shlex.join(["python", "-m", "benchmarks.peers", *sys.argv[1:]])
    return Results(about, command, sizes, options.runs, peers, takes, failures, skipped, instead)


def _present(names: list[str]) -> tuple[dict[str, About], dict[str, str]]:
    """The peers that can run, and why others cannot."""
    present, skipped = {}, {}
    for name in names:
        kind = peer_class(name)
        try:
            kind.install()
            if missing := kind.missing():
                raise BenchmarkFailed(f"{missing} is not on this machine")
            programs.install(kind.libraries)
            present[name] = About(kind.title, kind.version(), kind.answer, kind.setup)
        except Exception as error:
            skipped[kind.title] = str(error)
            print(f"{kind.title} is left out: {error}", flush=True)
    return present, skipped


def _say(label: str, take: Take) -> None:
    text = " ".join(f"{name}={number(value)}" for name, value in take.figures.items())
    thrown = f"  thrown away: {take.disturbed}" if take.disturbed else ""
    print(f"{time.strftime('%H:%M:%S')} {label} {text}{thrown}", flush=True)


def _write_json(results: Results) -> None:
    document = {
        "machine": results.machine,
        "command": results.command,
        "sizes": asdict(results.sizes),
        "peers": {name: asdict(about) for name, about in results.peers.items()},
        "takes": {"/".join(key): [asdict(take) for take in takes] for key, takes in results.takes.items()},
        "failures": {"/".join(key): reason for key, reason in results.failures.items()},
        "skipped": results.skipped,
    }
    (programs.BUILD / "results.json").write_text(json.dumps(document, indent=2) + "\n")


def _chosen(what: str, patterns: str | None, names: list[str]) -> list[str]:
    """The names that match one of the patterns; all without patterns."""
    if not patterns:
        return names
    chosen = [name for name in names if any(fnmatch(name, each.strip()) for each in patterns.split(","))]
    if not chosen:
        raise BenchmarkFailed(f"no {what} is called {patterns}; there are {', '.join(names)}")
    return chosen


def _cores() -> tuple[int, int]:
    """A core for the server and one for the client: the last two, as the first takes most interrupts."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        raise BenchmarkFailed("two cores are needed, one for the server and one for the client")
    return cores[-2], cores[-1]


def _stop(*_: Any) -> NoReturn:
    raise KeyboardInterrupt


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.peers",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--quick", action="store_true", help="less of everything")
    parser.add_argument("--runs", type=at_least_one, default=3, help="runs of each row (default 3)")
    parser.add_argument("--peers", metavar="NAME", help="peers, with commas and wildcards")
    parser.add_argument(
        "--rows", metavar="NAME", help="rows, with commas and wildcards; the page stays as it is"
    )
    parser.add_argument(
        "--foreign-max", type=float, default=0.25, metavar="CORES", help="what others may take (default 0.25)"
    )
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
