"""A PostgreSQL of the tests' own, on a unix socket, in a folder of its own."""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg
import pytest

from tests.programs import need_program

START_SECONDS = 30.0


class PostgresServer:
    """See the module's description; it refuses to run as root, so root runs it as the user that its package makes."""

    def __init__(self, folder: Path, programs: Path) -> None:
        self._folder = folder
        self._programs = programs
        self._user = "postgres" if os.geteuid() == 0 else None
        self._process: subprocess.Popen[bytes] | None = None
        self.user = self._user or pwd.getpwuid(os.geteuid()).pw_name
        if self._user:
            shutil.chown(folder, self._user)
        self._run("initdb", "--pgdata", str(folder / "data"), "--auth", "trust", "--no-sync")

    def conninfo(self, database: str = "postgres") -> str:
        return f"host={self._folder} user={self.user} dbname={database}"

    def start(self) -> None:
        command = [str(self._programs / "postgres"), "-D", str(self._folder / "data")]
        command += ["-c", "listen_addresses=", "-c", f"unix_socket_directories={self._folder}"]
        # Tests end the process and not the machine. With syncs, a start after a crash waits for each file of the
        # database, beside a busy disk for longer than any test does.
        command += ["-c", "fsync=off"]
        with open(self._folder / "log", "ab") as log:
            self._process = subprocess.Popen(
                [*self._as_user, *command], cwd=self._folder, stdout=log, stderr=log
            )
        deadline = time.monotonic() + START_SECONDS
        while True:
            try:
                psycopg.connect(self.conninfo()).close()
                return
            except psycopg.OperationalError:
                if time.monotonic() > deadline or self._process.poll() is not None:
                    status = self._process.returncode
                    pytest.fail(f"status {status}: {(self._folder / 'log').read_text()}")
                time.sleep(0.05)

    def stop(self, how: signal.Signals = signal.SIGQUIT) -> None:
        """End it as a crash would, by default."""
        if self._process is not None:
            self._process.send_signal(how)
            self._process.wait()
            self._process = None

    @property
    def _as_user(self) -> list[str]:
        """Words before a command. With `user=` Python would fork, and gRPC's handlers of forks crash now and then."""
        if self._user is None:
            return []
        return ["setpriv", f"--reuid={self._user}", f"--regid={self._user}", "--clear-groups"]

    def _run(self, program: str, *arguments: str) -> None:
        command = [str(self._programs / program), *arguments]
        done = subprocess.run([*self._as_user, *command], cwd=self._folder, capture_output=True, check=False)
        if done.returncode:
            pytest.fail(f"{program}: {(done.stdout + done.stderr).decode()}")


@contextmanager
def postgres_server() -> Iterator[PostgresServer]:
    """A server that runs. Without an installed PostgreSQL the test is skipped."""
    # Debian keeps the programs of the server out of the path.
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb")) or [need_program("initdb", "postgresql")]
    # The path of a socket has at most a hundred characters.
    folder = Path(tempfile.mkdtemp(prefix="postdate-pg-", dir="/tmp"))
    try:
        server = PostgresServer(folder, Path(found[-1]).resolve().parent)
        server.start()
        try:
            yield server
        finally:
            server.stop()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def new_database(server: PostgresServer, name: str) -> str:
    """Return the conninfo of a new, empty database."""
    with psycopg.connect(server.conninfo(), autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name}")  # type: ignore[arg-type]
    return server.conninfo(name)
