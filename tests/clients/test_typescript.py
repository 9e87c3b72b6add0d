"""The client example in TypeScript: it installs, is typed, and does on a real broker what it says."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import postdate
from tests.process.conftest import Start, start
from tests.programs import need_program

pytestmark = pytest.mark.packaging

__all__ = ["start"]  # the fixture

ROOT = Path(__file__).parents[2]
CLIENT = ROOT / "clients/typescript"
PACKAGE = ("package.json", "package-lock.json", ".npmrc")
LIMIT_SECONDS = 120
# Node and npm of the environment come first: they are pinned, what the machine has may be old.
PATH = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])


def run(*command: str, folder: Path, **environ: str) -> str:
    """Return the output of the command, which must succeed."""
    done = subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, "PATH": PATH, "NO_COLOR": "1", **environ},
        capture_output=True,
        text=True,
        check=False,
        timeout=LIMIT_SECONDS,
    )
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def built() -> Path:
    """A folder with the client, its packages and its compiled code. Packages are installed once for each lock file."""
    if shutil.which("npm", path=PATH) is None:
        need_program("npm")
    digest = hashlib.sha256(b"".join((CLIENT / name).read_bytes() for name in PACKAGE)).hexdigest()[:16]
    # As deep below the root as clients/typescript is, so that relative paths to the protos hold.
    folder = ROOT / "build" / f"typescript-{digest}"
    installed = folder / "node_modules/.installed"
    if not installed.exists():
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        for name in PACKAGE:
            shutil.copy(CLIENT / name, folder)
        run("npm", "ci", folder=folder)
        installed.touch()
    for name in ("src", "dist"):
        shutil.rmtree(folder / name, ignore_errors=True)
    shutil.copytree(CLIENT / "src", folder / "src", ignore=shutil.ignore_patterns("generated"))
    shutil.copy(CLIENT / "tsconfig.json", folder)
    run("npm", "run", "build", folder=folder)  # generates the types and checks all of it; any error fails
    return folder


def test_types_are_checked_strictly():
    options = json.loads((CLIENT / "tsconfig.json").read_text())["compilerOptions"]
    assert options["strict"] and options["noEmitOnError"]


def test_lock_file_names_no_registry():
    lock = (CLIENT / "package-lock.json").read_text()
    assert '"resolved"' not in lock
    packages = json.loads(lock)["packages"]
    assert all("integrity" in each for name, each in packages.items() if name)


async def test_it_does_what_it_says(built: Path, start: Start, tmp_path: Path):
    broker = await (await start(data_dir=str(tmp_path / "data"))).serving()
    command = ("node", "--test", "--test-reporter=tap", "dist/client.test.js")
    told = await asyncio.to_thread(run, *command, folder=built, POSTDATE_ADDRESS=broker.grpc_address)
    assert re.search(r"^# pass 8$", told, re.MULTILINE), told
    async with postdate.connect(broker.grpc_address) as client:
        left = [
            (each.topic, reading.ready_messages, reading.leased_messages, reading.scheduled_messages)
            for each in await client.stats()
            for reading in each.subscriptions
        ]
    assert len(left) == 6
    assert all(counts == [0, 0, 0] for _, *counts in left), "the broker holds what the client acknowledged"


async def test_the_example_runs(built: Path, start: Start, tmp_path: Path):
    broker = await (await start(data_dir=str(tmp_path / "data"))).serving()
    command = ("node", "dist/example.js")
    told = await asyncio.to_thread(run, *command, folder=built, POSTDATE_ADDRESS=broker.grpc_address)
    lines = told.splitlines()
    assert lines[1] == "The reminder: CHANGE_RESULT_DONE"
    assert re.fullmatch(r'"close order 17 unless it is paid" came \d+ ms after its time\.', lines[2])
