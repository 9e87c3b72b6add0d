"""Programs from the system's packages that some tests drive: chromium, initdb, promtool, redis-server, strace."""

from __future__ import annotations

import os
import shutil

import pytest


def need_program(name: str, package: str = "") -> str:
    """Return the path of a program. Without it the test is skipped, or fails on a build server, which installs all."""
    path = shutil.which(name)
    if path is not None:
        return path
    reason = f"{name} is not installed (Debian: apt-get install {package or name})"
    if os.environ.get("CI"):
        pytest.fail(reason)
    pytest.skip(reason)
