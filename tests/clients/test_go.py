"""The example in Go: it builds from the protos alone, and its worker goes on over a restart of the broker."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.clients.worker import ROOT, build, check_restart, check_stop, copied
from tests.process.conftest import Start, start
from tests.programs import need_program

__all__ = ["start"]  # the fixture

GENERATOR = ROOT / "build/protos-venv/bin/python"


def need_go() -> None:
    """Skip where Go is missing or too old, on a build server too: Debian 12 has 1.19, the example needs that of go.mod."""
    needed = re.search(r"^go (\d+)\.(\d+)", (ROOT / "clients/go/go.mod").read_text(), re.MULTILINE)
    assert needed
    if shutil.which("go") is None:
        pytest.skip(f"Go {'.'.join(needed.groups())} is not installed; Debian 12 has 1.19")
    told = subprocess.run(["go", "env", "GOVERSION"], capture_output=True, text=True, check=True).stdout
    found = re.match(r"go(\d+)\.(\d+)", told)
    # A Go of 1.21 or later fetches the one that go.mod asks for.
    if found is None or tuple(map(int, found.groups())) < (1, 21):
        pytest.skip(f"{told.strip()} is too old; the example needs {'.'.join(needed.groups())}")


@pytest.fixture(scope="module")
def command(tmp_path_factory: pytest.TempPathFactory) -> str:
    """How to start the example."""
    need_go()
    root = tmp_path_factory.mktemp("go")
    (root / "bin").mkdir()
    if GENERATOR.exists():
        protoc = root / "bin/protoc"
        protoc.write_text(f'#!/bin/sh\nexec {GENERATOR} -m grpc_tools.protoc "$@"\n')
        protoc.chmod(0o755)
    else:
        need_program("protoc", "protobuf-compiler")
    folder = copied("go", root)
    build("go", "generate", ".", folder=folder, PATH=f"{root / 'bin'}:{os.environ['PATH']}")
    build("go", "vet", "./...", folder=folder)
    build("go", "build", "-o", str(root / "bin/example"), "./example", folder=folder)
    assert build("gofmt", "-l", "worker.go", "generate.go", "example", folder=folder) == ""
    return str(root / "bin/example")


async def test_a_worker_goes_on_over_a_restart_and_holds_its_leases(
    command: str, start: Start, tmp_path: Path
):
    await check_restart(start, tmp_path, command, WORK="4s")


async def test_a_worker_that_is_terminated_leaves_in_good_order(command: str, start: Start, tmp_path: Path):
    await check_stop(start, tmp_path, command, status=0, WORK="1s")


def test_dependencies_are_pinned_and_name_no_host():
    assert "replace" not in (ROOT / "clients/go/go.mod").read_text()
    assert (ROOT / "clients/go/go.sum").read_text().count("h1:") > 4
