#!/usr/bin/env bash
# Runs the tests of a depth: `fast`, `change`, `deep`, or those of `packaging`. Further arguments go to pytest in place
# of the choice of tests. HYPOTHESIS_SEED is the seed of Hypothesis; `deep` takes the day's where there is none.
set -u
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${PYTHON:-.venv/bin/python}
depth=$1
shift
# Each process of the tests, and each that they start, would compile every module anew without the files of bytecode.
unset PYTHONDONTWRITEBYTECODE
case $depth in
    fast | deep) export TEST_DEPTH=$depth ;;
esac
pytest=("$python" -m pytest)
if [ "$depth" = deep ]; then
    export HYPOTHESIS_SEED=${HYPOTHESIS_SEED:-$(date -u +%Y%m%d)}
    # A test of minutes is no hang.
    pytest+=(-o faulthandler_timeout=3600)
fi
if [ -n "${HYPOTHESIS_SEED:-}" ]; then
    pytest+=("--hypothesis-seed=$HYPOTHESIS_SEED")
    target=test
    [ "$depth" = change ] || target=test-$depth
    echo "Hypothesis: HYPOTHESIS_SEED=$HYPOTHESIS_SEED make $target tries the same again; ARGS=\"tests/...\" one test."
fi
if [ "$#" -gt 0 ]; then
    exec "${pytest[@]}" "$@"
fi
# Half of the test processes begin at tests that wait for most of their time (tests/lanes.py). How many tests there are
# in all no process knows: each file is read by the one that runs it.
# A process that crashed ends the run once the others are through with what they hold, as the next process would begin
# with the test that crashed it.
shared=(--dist loadfile --no-loadscope-reorder --max-worker-restart 0 -o console_output_style=classic)
case $depth in
    # What it tells of at its end is to be marked `slow`.
    fast)
        exec "${pytest[@]}" -n "${TEST_PROCESSES:-$(($(nproc) + 1))}" "${shared[@]}" --durations=10 --durations-min=0.2 \
            tests/unit tests/model
        ;;
    # Much of it is a compiler that works or a worker that waits.
    # A build may load for minutes what it needs.
    packaging)
        exec "${pytest[@]}" -o faulthandler_timeout=1800 -n "${TEST_PROCESSES:-3}" --dist loadfile \
            --max-worker-restart 0 -m packaging tests
        ;;
    *) exec "${pytest[@]}" -n "${TEST_PROCESSES:-$((2 * $(nproc)))}" "${shared[@]}" -m "not packaging" tests ;;
esac
