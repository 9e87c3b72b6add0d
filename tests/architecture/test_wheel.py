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


# What only tests and benchmarks import.
NOT_PACKED = ROOT / "broker/testing"
LIBRARY = (
    "postdate",
    "postdate.sync",
    "postdate.testing",
    "postdate.credentials",
    "postdate_api.v1.admin_pb2_grpc",
)
OF_THE_BROKER = ("broker.server", "broker.cli", "broker.rpc.compaction_client", "postdate.commands.settings")
NOT_OF_THE_BROKER = ("obstore", "opentelemetry", "pandas", "psycopg", "pyarrow", "pyspark", "redis", "rich")
NOT_OF_THE_LIBRARY = ("aiohttp", "broker", "click", "jinja2", "numpy", "pyroaring", "rich", "uvloop")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from a copy: setuptools keeps what it built before, and would pack what is gone."""
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
    return wheel


@pytest.fixture(scope="module")
def packed(wheel: Path) -> set[str]:
    """Paths in the wheel."""
    return set(zipfile.ZipFile(wheel).namelist())


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel's files, and nothing else of this repository, in a folder."""
    folder = tmp_path_factory.mktemp("installed")
    zipfile.ZipFile(wheel).extractall(folder)
    return folder


def run(installed: Path, program: str) -> subprocess.CompletedProcess[str]:
    """Run a program with what is installed, in front of the checkout that this environment is linked to."""
    program = f"import sys; sys.path.insert(0, {str(installed)!r})\n{program}"
    return subprocess.run(
        [sys.executable, "-P", "-c", program], cwd=installed, capture_output=True, text=True, check=False
    )


def test_every_file_of_the_packages_is_in_the_wheel(packed: set[str]):
    wanted = {
        f"{name}/{path.relative_to(package).as_posix()}"
        for package, name in PACKAGES.items()
        for path in package.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts and NOT_PACKED not in path.parents
    }
    assert len(wanted) > 100
    assert wanted <= packed, sorted(wanted - packed)


def test_nothing_else_is_in_the_wheel(packed: set[str]):
    assert {path.split("/")[0] for path in packed if ".dist-info/" not in path} == set(PACKAGES.values())


def test_what_only_tests_and_benchmarks_import_is_not_in_the_wheel(packed: set[str]):
    assert any(NOT_PACKED.iterdir())
    assert not [path for path in packed if path.startswith("broker/testing")]


@pytest.mark.parametrize(
    ("modules", "missing"),
    [(LIBRARY, NOT_OF_THE_LIBRARY), (OF_THE_BROKER, NOT_OF_THE_BROKER)],
    ids=["library", "broker"],
)
def test_what_is_of_another_extra_is_not_needed(
    installed: Path, modules: tuple[str, ...], missing: tuple[str, ...]
):
    """`postdate.commands.settings` tells the commands of the broker how to reach it."""
    blocked = "".join(f"sys.modules[{name!r}] = None\n" for name in missing)
    imports = "".join(f"import {name}\n" for name in modules)
    done = run(installed, f"{blocked}{imports}print(postdate.__file__)")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(installed / "postdate/__init__.py")


def test_a_broker_for_tests_runs_from_the_wheel(installed: Path):
    program = """
import asyncio, broker, postdate.testing
async def work():
    async with postdate.testing.broker() as fake, fake.client() as client, client.producer("t") as producer:
        await producer.send(b"x")
asyncio.run(work())
print(broker.__file__)
"""
    done = run(installed, program)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(installed / "broker/__init__.py")
