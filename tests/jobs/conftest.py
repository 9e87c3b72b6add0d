"""Spark for the tests: one session a kind of cluster, and no test that is left out unseen on a build server."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from broker.jobs.java import JavaMissing, find_java_home
from broker.jobs.spark_session import JobSession

LINES_MAX = 500
SETTINGS = {"spark.executor.memory": "512m"}
QUICK_JAVA = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
"""A Java machine that lives for a minute does not earn back what its best compiler costs."""


def needs_java(folder: Path) -> str | None:
    """JAVA_HOME for Spark. Without a Java the test is skipped; on a build server it fails."""
    try:
        return find_java_home(folder)
    except JavaMissing as missing:
        if os.environ.get("CI"):
            pytest.fail(str(missing))
        pytest.skip(str(missing))


@contextlib.contextmanager
def session_on(master: str) -> Iterator[JobSession]:
    session = JobSession(master, name="postdate tests", settings=SETTINGS)
    session.start()
    try:
        yield session
    finally:
        session.stop()


@contextlib.contextmanager
def standalone(java_home: str | None) -> Iterator[str]:
    """A master and a worker of the pip package on loopback, as two processes; gives the master's address."""
    import pyspark  # noqa: PLC0415

    home = str(Path(pyspark.__file__).parent)
    env = {
        **os.environ,
        "SPARK_HOME": home,
        "SPARK_LOCAL_IP": "127.0.0.1",
        "PYSPARK_PYTHON": sys.executable,
        **({"JAVA_HOME": java_home} if java_home else {}),
    }
    with contextlib.ExitStack() as running:
        with socket.socket() as bound:
            bound.bind(("127.0.0.1", 0))
            port = bound.getsockname()[1]
        address = f"spark://127.0.0.1:{port}"
        classes = "org.apache.spark.deploy"
        common = ["--host", "127.0.0.1", "--webui-port", "0"]
        master = running.enter_context(
            _process(home, env, [f"{classes}.master.Master", *common, "--port", str(port)])
        )
        _wait_line(master, "ALIVE")
        running.enter_context(
            _process(
                home, env, [f"{classes}.worker.Worker", *common, "--cores", "2", "--memory", "1g", address]
            )
        )
        _wait_line(master, "Registering worker")
        yield address


@contextlib.contextmanager
def _process(home: str, env: dict[str, str], arguments: list[str]) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [f"{home}/bin/spark-class", *arguments],
        env=env,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.terminate()
        process.communicate(timeout=30)


def _wait_line(process: subprocess.Popen[str], pattern: str) -> None:
    assert process.stderr is not None
    seen = []
    for line in process.stderr:
        seen.append(line)
        if re.search(pattern, line):
            return
        assert len(seen) < LINES_MAX, "".join(seen)
    pytest.fail("the process ended:\n" + "".join(seen))
