"""The command that starts the process of a shard."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from broker.config import load_config
from broker.shards.supervisor import shard_command


def test_a_shard_of_an_installed_command_takes_no_code_from_the_working_directory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", None)
    for module in ("broker", "logging"):
        (tmp_path / f"{module}.py").write_text("raise SystemExit('code of the working directory')")
    command = shard_command(load_config({"shards": "2"}, {}), None, {}, os.getpid())(0)
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    ended = subprocess.run(
        [*command, "--help"], cwd=tmp_path, env=environ, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr
    assert "serve-shard" in ended.stdout


def test_a_shard_that_is_started_again_has_the_number_of_shards_and_the_folder_of_its_supervisor(
    tmp_path: Path,
) -> None:
    path = tmp_path / "postdate.toml"
    path.write_text('shards = 2\ndata_dir = "old"\n')
    command = shard_command(load_config({}, {}, str(path)), str(path), {"lease_ms": "5s"}, 7)
    path.write_text('shards = 3\ndata_dir = "new"\n')
    flags = dict(argument[2:].split("=") for argument in command(1) if argument.startswith("--"))
    assert flags.pop("config") == str(path)
    assert (flags.pop("number"), flags.pop("supervisor")) == ("1", "7")
    again = load_config({name.replace("-", "_"): value for name, value in flags.items()}, {}, str(path))
    assert (again.shards, again.data_dir, again.lease_ms) == (2, "old", 5_000)
