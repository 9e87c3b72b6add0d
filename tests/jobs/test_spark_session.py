"""What a job brings along to Spark: settings that the operator's own ones win over, and its own code."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from broker.jobs.spark_session import JobSession, pack_package


def test_settings_of_the_operator_win(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYSPARK_SUBMIT_ARGS", "--conf spark.driver.memory=4g pyspark-shell")
    settings = JobSession("spark://host:7077", name="t", settings={"spark.x": "1"})._settings(Path("/x/log"))
    assert "spark.driver.memory" not in settings
    assert settings["spark.x"] == "1"
    assert settings["spark.ui.enabled"] == "false"


@pytest.mark.parametrize(
    ("master", "is_bound"),
    [("local", True), ("local[*]", True), ("local-cluster[2,1,1024]", True), ("spark://h:7077", False)],
)
def test_only_a_driver_alone_on_its_machine_hides_on_loopback(master: str, is_bound: bool) -> None:
    settings = JobSession(master, name="t")._settings(Path("/x/log"))
    assert ("spark.driver.host" in settings) == is_bound


def test_the_package_works_from_its_zip(tmp_path: Path) -> None:
    packed = pack_package(tmp_path / "broker.zip")
    script = (
        f"import sys; sys.path.insert(0, {str(packed)!r})\n"
        "import broker.jobs.units, broker.storage.v1.manifest_pb2\n"
        "print(broker.jobs.units.__file__)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.startswith(str(packed))
