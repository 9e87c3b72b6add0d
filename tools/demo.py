"""Start a broker in build/demo-data, replay a real log through it, stop it. `make audit` then audits what it left."""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

BIN = Path(sys.executable).parent
FOLDER = Path(__file__).resolve().parents[1] / "build" / "demo-data"
LOGS = ("/var/log/dpkg.log", "/var/log/alternatives.log", "/var/log/bootstrap.log")
START_SECONDS_MAX = 30
REPLAY_SECONDS_MAX = 60
PENDING_MESSAGES = 50_000
PENDING_DELAYS = ("1d", "4d", "11d", "30d")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--speed", type=float, default=1000, help="how many times faster than it was written")
    parser.add_argument("log", nargs="?", type=Path, help="a file whose lines begin with a date and time")
    arguments = parser.parse_args()
    try:
        return replay(arguments.log or first_log(), arguments.speed)
    except KeyboardInterrupt:
        print("demo: interrupted", file=sys.stderr)
        return 130


def replay(log: Path, wanted_speed: float) -> int:
    speed, why = replay_speed(wanted_speed, span_seconds(log))
    with broker() as address:
        print(f"demo: replaying {log}, {speed:,.0f} times faster than it was written{why}", flush=True)
        if postdate(address, "bench", "replay", log, "--speed", f"{speed:g}", "--keep"):
            return 1  # and it has said why
        print("demo: leaving messages of the coming month in topic pending, for make audit", flush=True)
        status = 0
        for delay in PENDING_DELAYS:
            options = ("--messages", str(PENDING_MESSAGES), "--delay", delay, "--topic", "pending")
            status = postdate(address, "bench", "produce", *options, output=subprocess.DEVNULL) or status
        return status


def replay_speed(wanted: float, span_seconds: float) -> tuple[float, str]:
    """Tell how fast a log is replayed, and why if that is not what was wanted."""
    least = span_seconds / REPLAY_SECONDS_MAX
    if wanted >= least:
        return wanted, ""
    return least, f"; {wanted:,.10g} times would take longer than {REPLAY_SECONDS_MAX} seconds"


def postdate(address: str, *arguments: str | Path, output: int | None = None) -> int:
    env = os.environ | {"POSTDATE_ADDRESS": address}
    return subprocess.run([BIN / "postdate", *arguments], env=env, stdout=output, check=False).returncode


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
    refuse_another()
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.parent.mkdir(exist_ok=True)
    grpc, http = (f"127.0.0.1:{port}" for port in free_ports(2))
    addresses = ["--grpc-address", grpc, "--http-address", http]
    command = [str(BIN / "postdate-broker"), "serve", "--data-dir", str(FOLDER), *addresses]
    with open(FOLDER.with_suffix(".log"), "w+") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        try:
            wait_ready(process, http, Path(output.name))
            yield grpc
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait()


def refuse_another() -> None:
    """Its data would be removed under it."""
    with contextlib.suppress(FileNotFoundError), open(FOLDER / "lock") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            sys.exit(f"demo: another one is at work in {FOLDER}")


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
