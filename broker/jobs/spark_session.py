"""A Spark session for a job: on this machine or on a cluster, with the code of this package shipped to it."""

from __future__ import annotations

import os
import sys
import tempfile
import zipfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from broker.jobs.java import find_java_home

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_LOGGING = """rootLogger.level = error
rootLogger.appenderRef.stderr.ref = stderr
appender.stderr.type = Console
appender.stderr.name = stderr
appender.stderr.target = SYSTEM_ERR
appender.stderr.layout.type = PatternLayout
appender.stderr.layout.pattern = spark: %p %c{1}: %m%n
"""

_PACKAGES = ("broker", "postdate_api")
"""Of the broker, and the messages of its API, whose fields are read from their description."""


class SparkMissing(Exception):
    """PySpark is not installed."""

    def __init__(self) -> None:
        super().__init__(
            "PySpark is not installed: pip install 'postdate[broker,spark]', or use --engine inline"
        )


class JobSession:
    """One Spark session, and the files that it needs while it lives."""

    def __init__(self, master: str, *, name: str, settings: Mapping[str, str] | None = None) -> None:
        """`settings`: of Spark, besides those that every job has."""
        self.master = master
        self._name = name
        self._extra = settings or {}
        self._java_home: str | None = None  # as it was
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._spark: SparkSession | None = None

    @property
    def _is_here(self) -> bool:
        """Return whether tasks run in processes of this machine that find what this one finds."""
        return self.master == "local" or self.master.startswith("local[")

    @property
    def spark(self) -> SparkSession:
        assert self._spark is not None, "the session was not started"
        return self._spark

    def start(self) -> SparkSession:
        """Raises SparkMissing, JavaMissing."""
        try:
            from pyspark.sql import SparkSession  # noqa: PLC0415 - half a second, and it may not be there
        except ImportError as error:
            raise SparkMissing from error
        self._folder = tempfile.TemporaryDirectory(prefix="postdate-spark-")
        folder = Path(self._folder.name)
        java_home = find_java_home(Path(_java_folder().name))
        self._java_home = os.environ.get("JAVA_HOME")
        if java_home is not None:
            os.environ["JAVA_HOME"] = java_home
        os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
        logging = folder / "log4j2.properties"
        logging.write_text(_LOGGING)
        builder = SparkSession.builder.master(self.master).appName(self._name)
        for key, value in self._settings(logging).items():
            builder = builder.config(key, value)
        self._spark = builder.getOrCreate()
        if not self._is_here:
            # Tasks import this package where they run, so it travels with the job. What it imports does not: numpy,
            # pyarrow, pandas, pyroaring, google-crc32c and protobuf must be installed there (docs/pipeline.md).
            self._spark.sparkContext.addPyFile(str(pack_package(folder / "postdate-broker.zip")))
        return self._spark

    def _settings(self, logging: Path) -> dict[str, str]:
        settings = {
            "spark.ui.enabled": "false",
            "spark.ui.showConsoleProgress": "false",
            "spark.driver.memory": "1g",
            "spark.driver.extraJavaOptions": f"-Dlog4j2.configurationFile={logging.as_uri()}",
            "spark.speculation": "false",
            "spark.sql.shuffle.partitions": "1",
            "spark.log.level": "ERROR",
        }
        if self._is_here or self.master.startswith("local-cluster"):
            # Nobody else has to reach the driver, and a name that does not resolve must not keep it from starting.
            settings |= {"spark.driver.bindAddress": "127.0.0.1", "spark.driver.host": "127.0.0.1"}
        # What the operator's own configuration says of these is left alone.
        settings |= self._extra
        given = os.environ.get("PYSPARK_SUBMIT_ARGS", "")
        return {key: value for key, value in settings.items() if f"{key}=" not in given}

    def stop(self) -> None:
        if self._spark is not None:
            self._spark.stop()
            self._spark = None
        if self._folder is not None:
            os.environ.pop("JAVA_HOME", None)
            if self._java_home is not None:
                os.environ["JAVA_HOME"] = self._java_home
            self._folder.cleanup()
            self._folder = None


@cache
def _java_folder() -> tempfile.TemporaryDirectory[str]:
    """Return where the script for the packaged Java lies.

    Until this process ends, as does the Java machine that PySpark begins once and starts executors from.
    """
    return tempfile.TemporaryDirectory(prefix="postdate-java-")


def pack_package(path: Path) -> Path:
    """Put the Python files that tasks import into a zip that Python can import from."""
    root = Path(__file__).resolve().parents[2]
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as packed:
        for package in _PACKAGES:
            for file in sorted((root / package).rglob("*.py")):
                packed.write(file, file.relative_to(root))
    return path
