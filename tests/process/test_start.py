"""Refused starts, each with one clear line; and the HTTP port."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from click.testing import CliRunner

from broker.cli import main
from postdate_api.v1 import consumer_pb2, message_pb2, producer_pb2
from tests.depth import deep_but
from tests.process.conftest import ROOT, BrokerProcess, Start


async def fails(broker: BrokerProcess) -> str:
    """It ends with status 1 and one line, apart from what it logged before; the line."""
    assert await broker.wait() == 1, broker.lines
    said = [line for line in broker.lines if not line.startswith("{")]
    assert len(said) == 1, broker.lines
    assert said[0].startswith("Error: ")
    assert "Traceback" not in said[0] and "Errno" not in said[0]
    return said[0]


@dataclass(frozen=True)
class Case:
    """Settings that keep a broker from starting; `{dir}` is a folder of the test."""

    name: str
    told: tuple[str, ...]  # all in the line
    toml: str | None = None
    environ: dict[str, str] = field(default_factory=dict)
    arguments: tuple[str, ...] = ()


CASES = [
    Case("unknown key in TOML", ("leas_ms", "postdate.toml", "lease_ms"), toml="leas_ms = 5"),
    Case("table in TOML", ("broker", "postdate.toml"), toml="[broker]\nlease_ms = 5"),
    Case("bad value in TOML", ("lease_ms", "postdate.toml", "'soon'"), toml='lease_ms = "soon"'),
    Case("wrong type in TOML", ("auto_create_topics", "postdate.toml"), toml="auto_create_topics = 5"),
    Case("no TOML", ("postdate.toml", "not TOML"), toml="lease_ms = = 5"),
    Case("no such file", ("/nowhere.toml", "No such file"), arguments=("--config=/nowhere.toml",)),
    Case("unknown variable", ("POSTDATE_LEAS_MS", "POSTDATE_LEASE_MS"), environ={"POSTDATE_LEAS_MS": "5"}),
    Case("bad variable", ("POSTDATE_LEASE_MS", "lease_ms", "soon"), environ={"POSTDATE_LEASE_MS": "soon"}),
    Case("value out of range", ("--lease-ms-max", "7d", "99d"), arguments=("--lease-ms-max=99d",)),
    Case("bad address", ("--grpc-address", "7650"), arguments=("--grpc-address=7650",)),
    Case("settings that do not fit together", ("lease_ms_max", "lease_ms"), arguments=("--lease-ms-max=1s",)),
    Case("plaintext beyond this machine", ("0.0.0.0:0", "POSTDATE_ALLOW_PLAINTEXT=true", "tls_cert_file"), arguments=("--grpc-address=0.0.0.0:0",)),
    Case("spans by gRPC", ("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf"), environ={"OTEL_TRACES_EXPORTER": "otlp", "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}),
    Case("shards of a cluster", ("shards", "cluster_store"), arguments=("--shards=2", "--cluster-store=file:///nowhere", "--cluster-nodes=a=h:1")),
    Case("rights and nobody to have them", ("access_file", "tokens_file"), arguments=("--access-file=/nowhere.toml",)),
]  # fmt: skip
AT_START = [
    Case("address of another machine", ("grpc", "203.0.113.9"), arguments=("--grpc-address=203.0.113.9:0",)),
    Case("certificate that is not there", ("tls_cert_file", "/nowhere.pem", "No such file"), arguments=("--tls-cert-file=/nowhere.pem", "--tls-key-file=/nowhere.key")),
    Case("HTTP address of another machine", ("http_address", "203.0.113.9"), arguments=("--http-address=203.0.113.9:0",)),
]  # fmt: skip


def arguments_of(case: Case, folder: Path) -> list[str]:
    """Return the arguments of a case, and write its file."""
    if case.toml is None:
        return list(case.arguments)
    (folder / "postdate.toml").write_text(case.toml)
    return [*case.arguments, f"--config={folder / 'postdate.toml'}"]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_bad_configuration_ends_with_one_clear_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: Case
):
    for name in [name for name in os.environ if name.startswith("POSTDATE_")]:
        monkeypatch.delenv(name)
    monkeypatch.setattr("broker.cli._run", lambda *_: pytest.fail("it would have been started"))
    arguments = ["serve", *arguments_of(case, tmp_path), f"--data-dir={tmp_path / 'd'}"]
    result = CliRunner().invoke(main, arguments, env=case.environ)
    assert result.exit_code == 1, result.output
    assert result.stdout == ""
    [line] = result.stderr.splitlines()
    assert line.startswith("Error: ") and "Errno" not in line
    for each in case.told:
        assert each in line
    assert not (tmp_path / "d").exists()


@pytest.mark.parametrize("case", [CASES[0], *AT_START], ids=lambda case: case.name)
async def test_a_start_that_is_refused_ends_with_one_clear_line(start: Start, tmp_path: Path, case: Case):
    arguments = arguments_of(case, tmp_path)
    broker = await start(*arguments, environ=case.environ, data_dir=str(tmp_path / "d"))
    line = await fails(broker)
    for each in case.told:
        assert each in line


async def test_unknown_flag_is_a_usage_error(start_command: Start, tmp_path: Path):
    broker = await start_command("--leas-ms=5", data_dir=str(tmp_path / "d"))
    assert await broker.wait() == 2
    assert "--lease-ms" in broker.lines[-1]
    assert not (tmp_path / "d").exists()


def nicenesses(pid: int) -> set[int]:
    """Of the threads of a process, which may end meanwhile."""
    found = set()
    for thread in Path(f"/proc/{pid}/task").iterdir():
        with suppress(ProcessLookupError):
            found.add(os.getpriority(os.PRIO_PROCESS, int(thread.name)))
    return found


async def test_threads_that_read_and_write_files_give_way_to_the_loop(start: Start, tmp_path: Path):
    broker = await (await start(data_dir=str(tmp_path / "d"))).serving()
    # Answered once the thread that loads pages and metrics has ended, which gives way too.
    await asyncio.to_thread(urllib.request.urlopen, f"http://{broker.http_address}/readyz")
    pid = broker.process.pid
    own = os.getpriority(os.PRIO_PROCESS, pid)
    request = producer_pb2.ProduceRequest(topic="t", messages=[message_pb2.Message(payload=b"x")])
    async with asyncio.timeout(10):
        while nicenesses(pid) != {own, own + 5}:
            await broker.producer.Produce(request, timeout=10)
    assert os.getpriority(os.PRIO_PROCESS, pid) == own


async def test_second_broker_on_a_data_directory_is_refused_and_the_first_goes_on(
    start: Start, tmp_path: Path
):
    first = await (await start(data_dir=str(tmp_path / "d"))).serving()
    line = await fails(await start(data_dir=str(tmp_path / "d")))
    assert str(tmp_path / "d") in line
    ready = await asyncio.to_thread(urllib.request.urlopen, f"http://{first.http_address}/readyz")
    assert ready.status == 200
    await first.kill()
    await (await start(data_dir=str(tmp_path / "d"))).serving()  # a dead broker's lock is none


# A socket that is shared among brokers alone would be refused by the first and taken by the second.
@pytest.mark.parametrize(
    ("holder", "which"),
    deep_but(
        [("another broker", "grpc_address"), ("a listener", "http_address")],
        itertools.product(("a listener", "another broker"), ("grpc_address", "http_address")),
    ),
)
async def test_port_that_another_process_holds_is_refused(
    start: Start, start_command: Start, tmp_path: Path, holder: str, which: str
):
    with socket.socket() as listener:
        if holder == "a listener":
            listener.bind(("127.0.0.1", 0))
            listener.listen()
            address = f"127.0.0.1:{listener.getsockname()[1]}"
        else:
            other = await (await start(data_dir=str(tmp_path / "other"))).serving()
            address = getattr(other, which)
        # The command, which keeps gRPC from a line of its own before it imports it.
        line = await fails(await start_command(data_dir=str(tmp_path / "d"), **{which: address}))
        assert address in line
        assert which in line or which.replace("_", "-") in line


@pytest.mark.parametrize("where", ["a file", "below a file"])
async def test_data_directory_that_cannot_be_is_one_clear_line(start: Start, tmp_path: Path, where: str):
    (tmp_path / "file").write_text("")
    path = tmp_path / "file" if where == "a file" else tmp_path / "file" / "d"
    broker = await start(data_dir=str(path))
    assert await broker.wait() == 1
    assert len(broker.lines) == 1 and broker.lines[0].startswith("Error: ")
    assert str(path) in broker.lines[0] or str(tmp_path / "file") in broker.lines[0]


async def test_damaged_file_is_refused_with_its_name_and_what_to_do(start: Start, tmp_path: Path):
    broker = await (await start(data_dir=str(tmp_path / "d"))).serving()
    broker.process.send_signal(signal.SIGTERM)
    assert await broker.wait() == 0
    manifest = tmp_path / "d" / "broker.manifest"
    content = bytearray(manifest.read_bytes())
    content[len(content) // 2] ^= 0xFF
    manifest.write_bytes(bytes(content))
    again = await start(data_dir=str(tmp_path / "d"))
    assert await again.wait() == 1
    said = [line for line in again.lines if not line.startswith("{")]
    assert len(said) == 1 and str(manifest) in said[0]
    assert manifest.read_bytes() == bytes(content)


async def test_http_door_tells_life_readiness_and_metrics(start_command: Start, tmp_path: Path):
    broker = await (await start_command(data_dir=str(tmp_path / "d"), drain_grace_ms="2s")).serving()

    def get(path: str) -> tuple[int, str]:
        try:
            with urllib.request.urlopen(f"http://{broker.http_address}{path}", timeout=5) as response:
                return response.status, response.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    assert await asyncio.to_thread(get, "/livez") == (200, "ok\n")
    assert await asyncio.to_thread(get, "/readyz") == (200, "ok\n")
    status, metrics = await asyncio.to_thread(get, "/metrics")
    assert status == 200 and "postdate_" in metrics
    # A consumer that holds a message keeps the broker draining: alive, not ready.
    call = broker.consumer.Subscribe()
    permits = consumer_pb2.Permits(messages=1)
    opening = consumer_pb2.Open(topic="t", subscription="s", permits=permits)
    await call.write(consumer_pb2.SubscribeRequest(open=opening))
    await call.read()
    message = message_pb2.Message(payload=b"x")
    await broker.producer.Produce(producer_pb2.ProduceRequest(topic="t", messages=[message]))
    assert (await call.read()).batch.deliveries
    broker.process.send_signal(signal.SIGTERM)
    assert (await call.read()).HasField("draining")
    assert await asyncio.to_thread(get, "/readyz") == (503, "draining\n")
    assert (await asyncio.to_thread(get, "/livez"))[0] == 200
    await call.done_writing()
    assert await broker.wait() == 0


def test_where_only_the_sdk_is_installed_the_command_says_what_to_install():
    program = "import sys; sys.modules['numpy'] = None; from broker.__main__ import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert done.stderr.startswith("postdate-broker: a part of the broker is not installed"), done.stderr
    assert "numpy" in done.stderr and done.stderr.endswith("pip install 'postdate[broker]'\n")
    assert len(done.stderr.splitlines()) == 1


EXITS = (("", 0), ("raise SystemExit(2)", 2), ("raise SystemExit('x')", 1), ("1 / 0", 1))


@pytest.mark.parametrize(("leave", "code"), deep_but((EXITS[0], EXITS[3]), EXITS))
def test_the_interpreter_is_not_taken_apart(leave: str, code: int):
    # A thread of the library of object stores may just be giving an object back, which then aborts the process: one
    # command in ten.
    program = f"""
import atexit, os, sys
from broker.__main__ import main
from broker import cli

class TakenApart:
    def __init__(self, write=os.write):
        self.write = write
    def __del__(self):
        self.write(1, b"taken apart\\n")

def command(prog_name):
    sys.kept = TakenApart()
    atexit.register(print, "exit handler")
    {leave}

cli.main = command
main()
"""
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (code, "exit handler\n"), done.stderr


def test_a_command_whose_imports_fail_says_so_with_its_exit_code():
    # As where a library of the system is missing, or one of NumPy's does not fit the processor.
    program = """
import sys

class Broken:
    def find_spec(self, name, path=None, target=None):
        if name == "broker.cli":
            raise ImportError("libstdc++.so.6: cannot open shared object file")

sys.meta_path.insert(0, Broken())
from broker.__main__ import main
main()
"""
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert done.stderr.endswith("ImportError: libstdc++.so.6: cannot open shared object file\n")


def test_a_command_begun_with_its_output_closed_ends_as_others():
    program = """
import os, sys

os.close(1)
os.execv(sys.executable, [sys.executable, "-m", "broker", "--version"])
"""
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_a_command_tells_what_goes_wrong_beside_its_work_with_its_place(tmp_path: Path):
    (tmp_path / "bases").mkdir()
    (tmp_path / "bases" / "0000000000000001-t").write_bytes(b"")
    command = [sys.executable, "-m", "broker", "backup", "list", f"file://{tmp_path}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == ""
    for words in ("A base cannot be used", str(tmp_path), "bases/0000000000000001-t"):
        assert words in done.stderr


@pytest.mark.parametrize(("command", "code"), [(["compact"], 3), (["backup", "list"], 1)])
def test_a_command_that_finds_no_broker_ends_with_a_line_that_says_so(command: list[str], code: int):
    given = [sys.executable, "-m", "broker", *command, "--address", "127.0.0.1:1"]
    done = subprocess.run(given, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (code, "")
    *before, last = done.stderr.splitlines()
    assert "he broker cannot be reached: " in last
    if command == ["compact"]:  # it tries once
        assert not before
    else:
        (warning,) = before
        assert "WARNING no connection to 127.0.0.1:1" in warning


@pytest.mark.parametrize("by_variable", [True, False])
def test_a_file_that_is_missing_is_named_with_the_option_or_the_variable(by_variable: bool):
    given = [sys.executable, "-m", "broker", "backup", "list"]
    env = os.environ | ({"POSTDATE_TOKEN_FILE": "lost"} if by_variable else {})
    given += [] if by_variable else ["--token-file", "lost"]
    done = subprocess.run(given, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    named = "POSTDATE_TOKEN_FILE" if by_variable else "--token-file"
    assert (done.returncode, done.stderr) == (1, f"Error: {named}: the file lost does not exist\n")


def test_a_broker_loads_what_it_serves_with_and_nothing_else_before_it_serves():
    slow = {
        "aiohttp",
        "broker.jobs",
        "broker.node",
        "broker.shards",
        "cryptography",
        "jinja2",
        "jwt",
        "obstore",
        "pyspark",
    }
    program = (
        f"import sys, broker.cli, broker.server, broker.rpc.event_loop; print({slow} & sys.modules.keys())"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout == "set()\n"


def test_the_broker_is_a_module_that_can_be_run():
    done = subprocess.run(
        [sys.executable, "-m", "broker", "--version"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith("postdate-broker, version ")
