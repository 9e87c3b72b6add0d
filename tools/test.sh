#!/usr/bin/env bash
# Runs all tests, in two halves at once: most wait for one core or for the disk. Arguments go to pytest and replace both.
set -u
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${PYTHON:-.venv/bin/python}
if [ "$#" -gt 0 ]; then
    exec "$python" -m pytest "$@"
fi
mkdir -p build
"$python" -m pytest tests/unit tests/golden tests/architecture tests/crash > build/tests.txt 2>&1 &
other=$!
trap 'kill "$other" 2> /dev/null' INT TERM
"$python" -m pytest tests --ignore=tests/unit --ignore=tests/golden --ignore=tests/architecture --ignore=tests/crash
status=$?
wait "$other" || status=$?
cat build/tests.txt
exit "$status"
