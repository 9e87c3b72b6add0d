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

pytestmark = pytest.mark.packaging

__all__ = ["start"]  # the fixture

GO_MOD = (ROOT / "clients/go/go.mod").read_text()
NEEDED = tuple(map(int, re.findall(r"^go (\d+)\.(\d+)", GO_MOD, re.MULTILINE)[0]))
NEEDS = f"gRPC for Go, as pinned in go.mod, needs Go {NEEDED[0]}.{NEEDED[1]}; Debian 12 has 1.19"
GENERATOR = ROOT / "build/protos-venv/bin/python"


def need_go() -> None:
    """Skip where Go is missing or too old, on a build server too: Debian 12 has 1.19, and gRPC needs a newer one."""
    if shutil.which("go") is None:
        pytest.skip(f"Go is not installed; {NEEDS}")
    ask = ["go", "env", "GOVERSION", "GOTOOLCHAIN"]  # a line each; empty for what this Go does not know
    told = subprocess.run(ask, capture_output=True, text=True, check=True, cwd=ROOT).stdout
    version, toolchain = told.split("\n")[:2]
    if is_too_old(version, toolchain):
        pytest.skip(f"{version} is too old; {NEEDS}")


def is_too_old(version: str, toolchain: str) -> bool:
    """Return whether this Go can neither build the example nor, as from 1.21 on, fetch the toolchain of go.mod."""
    found = re.match(r"go(\d+)\.(\d+)", version)
    if found is None:
        return True
    may_fetch = toolchain != "local"
    return tuple(map(int, found.groups())) < ((1, 21) if may_fetch else NEEDED)


@pytest.mark.parametrize(
    ("version", "toolchain", "too_old"),
    [
        ("go1.19.8", "", True),  # Debian 12
        ("go1.20.14", "auto", True),
        ("go1.21.0", "auto", False),
        ("go1.24.4", "local", True),
        ("go1.24.4", "auto", False),
        ("go{}.{}.1", "local", False),
        ("devel +abcdef", "auto", True),
    ],
)
def test_which_go_will_do(version: str, toolchain: str, too_old: bool):
    assert is_too_old(version.format(*NEEDED), toolchain) == too_old


@pytest.fixture(scope="module")
def command(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the command that starts the example."""
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
    assert "replace" not in GO_MOD
    assert (ROOT / "clients/go/go.sum").read_text().count("h1:") > 4
