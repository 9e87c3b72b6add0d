"""Start a broker in a temporary folder, replay a real log through it, stop it."""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

BIN = Path(sys.executable).parent
LOGS = ("/var/log/dpkg.log", "/var/log/alternatives.log", "/var/log/bootstrap.log")
START_SECONDS_MAX = 30
REPLAY_SECONDS_MAX = 60


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--speed", type=float, default=1000, help="how many times faster than it was written")
    parser.add_argument("log", nargs="?", type=Path, help="a file whose lines begin with a date and time")
    arguments = parser.parse_args()
    log = arguments.log or first_log()
    speed = max(arguments.speed, span_seconds(log) / REPLAY_SECONDS_MAX)
    with broker() as address:
        print(f"demo: replaying {log}, {speed:,.0f} times faster than it was written", flush=True)
        command = [BIN / "postdate", "bench", "replay", log, "--speed", f"{speed:g}"]
        return subprocess.run(command, env=os.environ | {"POSTDATE_ADDRESS": address}, check=False).returncode


def first_log() -> Path:
    for name in LOGS:
        path = Path(name)
        if os.access(path, os.R_OK) and span_seconds(path) > 0:
            return path
    sys.exit("demo: no log with dated lines found; name one: make demo LOG=/path/to/file")


def span_seconds(log: Path) -> float:
    """Tell how long the log covers; 0 when its first or last line does not begin with a date and time."""
    try:
        lines = log.read_text(errors="replace").splitlines()
        first, last = (datetime.fromisoformat(line[:19]) for line in (lines[0], lines[-1]))
    except (IndexError, ValueError):
        return 0
    except OSError as error:
        sys.exit(f"demo: {error}")
    return (last - first).total_seconds()


@contextlib.contextmanager
def broker() -> Iterator[str]:
    """Run a broker of one's own, so that a running one and its data stay out of it."""
    folder = tempfile.mkdtemp(prefix="postdate-demo-")
    grpc, http = (f"127.0.0.1:{port}" for port in free_ports(2))
    addresses = ["--grpc-address", grpc, "--http-address", http]
    command = [str(BIN / "postdate-broker"), "serve", "--data-dir", folder, *addresses]
    with open(Path(folder) / "broker.log", "w+") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        try:
            wait_ready(process, http, Path(output.name))
            yield grpc
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait()
            shutil.rmtree(folder, ignore_errors=True)


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for bound in sockets:
            bound.bind(("127.0.0.1", 0))
        return [bound.getsockname()[1] for bound in sockets]


def wait_ready(process: subprocess.Popen[bytes], http: str, output: Path) -> None:
    deadline = time.monotonic() + START_SECONDS_MAX
    while process.poll() is None and time.monotonic() < deadline:
        with contextlib.suppress(urllib.error.URLError, OSError):
            urllib.request.urlopen(f"http://{http}/readyz", timeout=1)
            return
        time.sleep(0.05)
    sys.exit(f"demo: the broker did not start:\n{output.read_text()}")


if __name__ == "__main__":
    sys.exit(main())
