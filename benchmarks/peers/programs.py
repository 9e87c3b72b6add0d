"""Programs of peers that are on this machine, and libraries of their clients in a folder of their own."""

from __future__ import annotations

import importlib
import os
import pwd
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks.errors import BenchmarkFailed

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build" / "peers"
CLIENTS = BUILD / "clients"

_INSTALL_SECONDS_MAX = 300


def program(name: str, *folders: str) -> str:
    """The path of a program; empty if it is not on this machine."""
    path = os.pathsep.join([*folders, os.environ.get("PATH", ""), "/usr/sbin", "/usr/local/sbin"])
    return shutil.which(name, path=path) or ""


def said_version(*command: str) -> str:
    """The number that a program gives as its version."""
    said = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    found = re.search(r"\d+(\.\d+)+", said.stdout + said.stderr)
    return found.group() if found else "unknown"


def library(name: str) -> Any:
    """A module of a client's library, which the types of this project do not know."""
    return importlib.import_module(name)


def install(packages: Iterable[str]) -> None:
    """Install what is not in the folder of the clients yet."""
    wanted = [package for package in packages if not (CLIENTS / f".{package}").exists()]
    if not wanted:
        return
    CLIENTS.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--upgrade"]
    command += ["--target", str(CLIENTS), *wanted]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_INSTALL_SECONDS_MAX)
    if done.returncode:
        raise BenchmarkFailed(f"{', '.join(wanted)}: {done.stderr.strip().splitlines()[-1:]}")
    for package in wanted:
        (CLIENTS / f".{package}").touch()


def unprivileged(*names: str) -> dict[str, Any]:
    """Options of a process for programs that refuse to run as root: the first of these users that there is."""
    if os.geteuid():
        return {}
    for name in (*names, "nobody"):
        try:
            user = pwd.getpwnam(name)
        except KeyError:
            continue
        return {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}
    raise BenchmarkFailed("there is no user beside root")
