"""Run seeds of the simulation: `python -m tests.sim --seed N [--count M] [--steps K]`."""

from __future__ import annotations

import argparse
import logging
import sys
import time
import traceback
from collections import Counter

from tests.sim.simulation import STEPS, Outcome, add_counts, run_seed

_TRACE_LINES = 40


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.sim", description=__doc__)
    parser.add_argument("--seed", type=int, default=1, help="the first seed")
    parser.add_argument("--count", type=int, default=1, help="how many seeds, from the first on")
    parser.add_argument("--steps", type=int, default=STEPS, help="actions in each run")
    parser.add_argument("--keep-going", action="store_true", help="do not end at the first failure")
    parser.add_argument(
        "--lines", type=int, default=_TRACE_LINES, help="lines of a failed run's trace to show"
    )
    given = parser.parse_args()
    logging.disable(logging.CRITICAL)
    total: Counter[str] = Counter()
    failed: list[int] = []
    started = time.perf_counter()
    run_count = 0
    for seed in range(given.seed, given.seed + given.count):
        outcome = run_seed(seed, given.steps)
        run_count += 1
        add_counts(total, outcome.count)
        if outcome.error is not None:
            failed.append(seed)
            print(describe_failure(outcome, given.lines), flush=True)
            if not given.keep_going:
                break
        elif given.count == 1:
            print(f"seed {seed}: well, digest {outcome.digest}")
    seconds = time.perf_counter() - started
    print(f"\nCovered by {run_count} seeds in {seconds:.1f} s:")
    for name, value in sorted(total.items()):
        print(f"  {value:>9,}  {name}")
    if failed:
        print(f"FAILED seeds: {failed}")
    return 1 if failed else 0


def describe_failure(outcome: Outcome, lines: int) -> str:
    error = outcome.error
    assert error is not None
    parts = [f"seed {outcome.seed} FAILED: {error!r}", *outcome.trace[-lines:]]
    parts += traceback.format_exception(error)[-12:]
    parts.append(f"again: python -m tests.sim --seed {outcome.seed}")
    return "\n".join(parts)


if __name__ == "__main__":
    sys.exit(main())
