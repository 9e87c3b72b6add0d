"""Contents of a job's Spark session: settings, which the operator's override, and its own code."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from broker.jobs.spark_session import JobSession, pack_package
from tests.jobs.conftest import QUICK_JAVA

ROOT = Path(__file__).parents[2]


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


@pytest.mark.packaging
def test_the_packaged_java_is_there_for_as_long_as_the_machine_that_was_started_with_it(
    tmp_path: Path,
) -> None:
    """Executors are started with the JAVA_HOME of PySpark's Java machine, which outlives the session that began it."""
    script = (
        "import os\n"
        "from broker.jobs.spark_session import JobSession\n"
        "homes = []\n"
        "for master in ('local[1]', 'local[1]'):\n"
        "    session = JobSession(master, name='t')\n"
        "    assert session.start().range(3).count() == 3\n"
        "    homes.append(os.environ['JAVA_HOME'])\n"
        "    session.stop()\n"
        "    assert 'JAVA_HOME' not in os.environ\n"
        "    assert os.access(homes[0] + '/bin/java', os.X_OK), 'it went with the session'\n"
        "print(homes[0], homes[1])\n"
    )
    programs = tmp_path / "bin"  # a machine without a Java of its own
    programs.mkdir()
    for name in ("bash", "sh", "dirname", "ps", "cat", "uname", "env"):
        if (found := shutil.which(name)) is not None:
            (programs / name).symlink_to(found)
    environ = {key: value for key, value in os.environ.items() if key != "JAVA_HOME"}
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**environ, "PATH": str(programs), "PYTHONPATH": str(ROOT), "JAVA_TOOL_OPTIONS": QUICK_JAVA},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.split()
    assert first == second
    assert not Path(first).exists(), "it stays when the process has ended"


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
