"""The lock files hold names, versions and hashes, so that any package index serves them and none is named."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LOCKS = ("requirements.txt", "requirements-jobs.txt", "requirements-dev.txt", "requirements-protos.txt")
LINE = re.compile(
    r"""
      \s*\#.*
    | [a-z0-9.-]+ == [A-Za-z0-9.]+ (\ (;|and)\ [a-z_]+\ [!=<>]+\ '[A-Za-z0-9._]+')* \ \\
    | \ {4}--hash=sha256:[0-9a-f]{64} (\ \\)?
    """,
    re.VERBOSE,
)
PIN = re.compile(r"^([a-z0-9.-]+)==(\S+)", re.MULTILINE)


def pins(name: str) -> dict[str, str]:
    return dict(PIN.findall((ROOT / name).read_text()))


@pytest.mark.parametrize("name", LOCKS)
def test_lock_holds_names_versions_and_hashes_only(name):
    text = (ROOT / name).read_text()
    assert not [line for line in text.splitlines() if not LINE.fullmatch(line)]
    assert "://" not in text
    assert " /" not in text


@pytest.mark.parametrize("name", LOCKS)
def test_every_pin_has_hashes(name):
    for entry in re.split(r"^(?=[a-z0-9])", (ROOT / name).read_text(), flags=re.MULTILINE)[1:]:
        assert "--hash=sha256:" in entry, entry.splitlines()[0]


def test_development_runs_what_production_runs():
    """And the nightly jobs have the broker's own versions, for they read its files."""
    assert pins("requirements.txt").items() <= pins("requirements-jobs.txt").items()
    assert pins("requirements-jobs.txt").items() <= pins("requirements-dev.txt").items()


def test_every_dependency_is_pinned():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    groups = project["dependency-groups"]
    extras = project["project"]["optional-dependencies"]
    run = [*project["project"]["dependencies"], *extras["broker"], *extras["cli"]]
    for lock, wanted in (
        ("requirements.txt", [*run, *groups["build"]]),
        (
            "requirements-jobs.txt",
            [*run, *extras["spark"], *groups["build"]],
        ),
        ("requirements-dev.txt", [item for item in groups["dev"] if isinstance(item, str)]),
        ("requirements-protos.txt", groups["protos"]),
    ):
        names = {re.split(r"[^A-Za-z0-9._-]", item)[0].lower() for item in wanted}
        assert names <= pins(lock).keys()
