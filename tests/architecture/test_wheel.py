"""The wheel holds all that runs: a file beside the code that the build forgets is missed only by those who install it."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.packaging

ROOT = Path(__file__).resolve().parents[2]
# Where a package lies in the repository, and in the wheel.
PACKAGES = {
    ROOT / "broker": "broker",
    ROOT / "clients/python/postdate": "postdate",
    ROOT / "postdate_api": "postdate_api",
}


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """Paths in the wheel, built from a copy: setuptools keeps what it built before, and would pack what is gone."""
    folder = tmp_path_factory.mktemp("wheel")
    for package in PACKAGES:
        shutil.copytree(
            package,
            folder / "source" / package.relative_to(ROOT),
            ignore=shutil.ignore_patterns("__pycache__"),
        )
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder / "source")
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "--no-index",
    ]
    run = subprocess.run(
        [*command, "--disable-pip-version-check", "--wheel-dir", str(folder), str(folder / "source")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    (wheel,) = folder.glob("*.whl")
    return set(zipfile.ZipFile(wheel).namelist())


def test_every_file_of_the_packages_is_in_the_wheel(packed: set[str]):
    wanted = {
        f"{name}/{path.relative_to(package).as_posix()}"
        for package, name in PACKAGES.items()
        for path in package.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert len(wanted) > 100
    assert wanted <= packed, sorted(wanted - packed)


def test_nothing_else_is_in_the_wheel(packed: set[str]):
    assert {path.split("/")[0] for path in packed if ".dist-info/" not in path} == set(PACKAGES.values())
