"""`make setup` ends with all that is pinned and a stamp, or with neither a stamp nor a process that goes on."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LIMIT_SECONDS = 60

# Makes an environment that holds itself. As pip it writes down its process and the names that it would install, and
# then fails or waits as a file says.
PYTHON = f"""#!/bin/sh
case "$*" in
    "-m venv .venv")
        mkdir -p .venv/bin .venv/lib/python{sys.version_info[0]}.{sys.version_info[1]}/site-packages
        cp "$0" .venv/bin/python
        echo "command = python -m venv $(pwd -P)/.venv" > .venv/pyvenv.cfg
        ;;
    "-m pip "*)
        for what do :; done
        case $what in
            *.txt) names=$(sed -n 's/==.*//p' "$what" | tr '\\n' ' ') ;;
            *) names=$what ;;
        esac
        echo "$$ $names" >> pips
        case "$names" in
            *"$(cat fails)"*) exit 1 ;;
            *"$(cat waits)"*) exec sleep {LIMIT_SECONDS} ;;
        esac
        ;;
    *) exec {sys.executable} -c "import sys; sys.base_prefix = '/one'; $2" ;;
esac
"""
LOCK = """# of all
{} \\
    --hash=sha256:00
    # via postdate
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkout whose lock files pin a few names."""
    (tmp_path / "tools").mkdir()
    shutil.copy(ROOT / "tools/setup.sh", tmp_path / "tools")
    locks = {
        "requirements.txt": ["setuptools"],
        "requirements-dev.txt": ["py4j", "pyspark", "ruff", "setuptools"],
    }
    for name, pinned in locks.items():
        (tmp_path / name).write_text("".join(LOCK.format(f"{each}==1.0") for each in pinned))
    (tmp_path / "python").write_text(PYTHON)
    (tmp_path / "python").chmod(0o755)
    for name in ("fails", "waits"):
        (tmp_path / name).write_text("nothing")
    return tmp_path


def begin(folder: Path, python: str = "python") -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        ("sh", "tools/setup.sh"),
        cwd=folder,
        env={**os.environ, "PYTHON": f"{folder}/{python}"},
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )


def pips(folder: Path) -> dict[str, int]:
    """The process that installed, or installs, each list of names."""
    path = folder / "pips"
    lines = path.read_text().splitlines() if path.exists() else []
    return {names.strip(): int(pid) for pid, _, names in (line.partition(" ") for line in lines)}


def is_there(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def wait_until_both_wait(folder: Path) -> None:
    end = time.monotonic() + LIMIT_SECONDS
    while not {"pyspark", "py4j ruff setuptools"} <= pips(folder).keys():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_all_that_is_pinned_is_installed_once(folder: Path) -> None:
    assert begin(folder).wait(LIMIT_SECONDS) == 0
    assert sorted(pips(folder)) == [".", "py4j ruff setuptools", "pyspark", "setuptools"]
    assert (folder / ".venv/.ready").read_text().strip() == str(folder.resolve())


def test_an_environment_stays_until_another_interpreter_of_the_same_version_is_named(folder: Path) -> None:
    (folder / "other").write_text(PYTHON.replace("/one", "/two"))
    (folder / "other").chmod(0o755)
    assert begin(folder).wait(LIMIT_SECONDS) == 0
    (folder / ".venv/kept").touch()
    assert begin(folder).wait(LIMIT_SECONDS) == 0
    assert (folder / ".venv/kept").exists()
    assert begin(folder, "other").wait(LIMIT_SECONDS) == 0
    assert not (folder / ".venv/kept").exists()


def test_the_path_of_the_environment_leads_to_the_sdk(folder: Path) -> None:
    assert begin(folder).wait(LIMIT_SECONDS) == 0
    lines = [path.read_text() for path in folder.glob(".venv/lib/python3.*/site-packages/*.pth")]
    assert lines == [f"{folder.resolve()}/clients/python\n"]


@pytest.mark.parametrize("fails", ["setuptools ", "pyspark", "py4j", "."])
def test_whatever_fails_there_is_no_stamp(folder: Path, fails: str) -> None:
    assert begin(folder).wait(LIMIT_SECONDS) == 0
    (folder / "fails").write_text(fails)
    assert begin(folder).wait(LIMIT_SECONDS) == 1
    assert not (folder / ".venv/.ready").exists()


def test_a_failure_to_pack_pyspark_ends_what_installs_the_others(folder: Path) -> None:
    (folder / "fails").write_text("pyspark")
    (folder / "waits").write_text("py4j")
    assert begin(folder).wait(LIMIT_SECONDS / 2) != 0
    assert not [names for names, pid in pips(folder).items() if is_there(pid)]


def test_an_interrupted_setup_leaves_no_process_and_no_stamp(folder: Path) -> None:
    (folder / "waits").write_text("py")  # both
    setup = begin(folder)
    wait_until_both_wait(folder)
    os.killpg(setup.pid, signal.SIGINT)  # as a terminal does
    assert setup.wait(LIMIT_SECONDS / 2) != 0
    left = [names for names, pid in pips(folder).items() if is_there(pid)]
    assert not left
    assert not (folder / ".venv/.ready").exists()
