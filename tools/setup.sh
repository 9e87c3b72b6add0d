#!/bin/sh
# Prepares .venv: finds a Python, makes the environment, installs what requirements-dev.txt pins, links the
# checkout into it. `make setup` calls this when there is something to do; PYTHON names another interpreter.
set -eu
cd "$(dirname "$0")/.."

fail() {
    echo "setup: $*" >&2
    exit 1
}

# Asks the interpreter itself: a command of that name may be a stub that only says what to install.
suits() {
    "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' >/dev/null 2>&1
}

find_python() {
    for candidate in python3.11 python3.12 python3.13 python3; do
        if suits "$candidate"; then
            command -v "$candidate"
            return
        fi
    done
    fail "Python 3.11 to 3.13 not found; install it (Debian: apt-get install python3.11 python3.11-venv) or name it: make setup PYTHON=/path/to/python"
}

version() {
    "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null
}

# Two of one version may be compiled differently; an environment knows where the one that made it is installed.
installation() {
    "$1" -c 'import os, sys; print(os.path.realpath(sys.base_prefix))' 2>/dev/null
}

same_interpreter() {
    [ "$(version .venv/bin/python)" = "$(version "$python")" ] || return 1
    # Whoever names none is content with any that made .venv.
    [ -z "${PYTHON:-}" ] || [ "$(installation .venv/bin/python)" = "$(installation "$python")" ]
}

# An environment names its own folder and its interpreter in many files, so a moved one is made anew.
usable() {
    grep -qs -e " $(pwd -P)/\.venv\$" .venv/pyvenv.cfg && same_interpreter
}

if [ -n "${PYTHON:-}" ]; then
    python=$PYTHON
    suits "$python" || fail "PYTHON=$python is not a Python 3.11 to 3.13"
else
    python=$(find_python)
fi
"$python" -c 'import venv, ensurepip' >/dev/null 2>&1 ||
    fail "$python lacks the venv module; install it (Debian: apt-get install python$(version "$python")-venv)"

rm -f .venv/.ready
if ! usable; then
    echo "setup: creating .venv with $python"
    rm -rf .venv
    "$python" -m venv .venv
fi
echo "setup: installing what requirements-dev.txt pins; the first time this takes minutes"
set -- .venv/bin/python -m pip --disable-pip-version-check install --quiet
# Wheels only: building from source would need a compiler and packages that nobody pinned. PySpark alone comes as
# source, though there is nothing to compile: it is packed by the setuptools that the first of the two locks pins.
# It is half a gigabyte, and is packed on one core while another installs all else.
"$@" --require-hashes --only-binary :all: --requirement requirements.txt
mkdir -p build
awk '/^[^ #]/ { of_pyspark = /^pyspark==/ } of_pyspark' requirements-dev.txt > build/requirements-pyspark.txt
awk '/^[^ #]/ { of_pyspark = /^pyspark==/ } !of_pyspark' requirements-dev.txt > build/requirements-others.txt
"$@" --require-hashes --only-binary :all: --requirement build/requirements-others.txt &
others=$!
# A process in the background does not hear of Ctrl-C, and no other setup may find it at work.
trap '{ kill "$others" && wait "$others"; } 2> /dev/null || true' EXIT
trap 'exit 1' INT TERM
# pip announces here what it will do otherwise one day, which is nothing to a reader; errors and warnings are shown.
PYTHONWARNINGS=ignore:DEPRECATION "$@" --require-hashes --no-deps --no-binary pyspark --use-pep517 --no-build-isolation --requirement build/requirements-pyspark.txt
wait "$others"
trap - EXIT INT TERM
"$@" --no-deps --no-build-isolation --no-index --editable .
# An import hook comes after the path: without this line a checkout called postdate, beside a script, would be the SDK.
echo "$(pwd -P)/clients/python" > ".venv/lib/python$(version .venv/bin/python)/site-packages/postdate-sdk.pth"
pwd -P > .venv/.ready
echo "setup: .venv is ready"
