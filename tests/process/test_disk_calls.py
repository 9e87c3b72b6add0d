"""A real broker process under strace: in which order it writes, syncs, renames and answers, and what an error does.

The broker is forked, and begins once strace looks on. Injected errors hit calls by their number in each thread; what is
synced before the broker serves is synced in its first thread, so small numbers hit the journal's.
"""

from __future__ import annotations

import asyncio
import os
import re
import resource
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import grpc
import pytest

from broker.server import SPARE_DESCRIPTORS
from broker.storage.segment import HEADER_BYTES
from postdate_api.v1 import consumer_pb2, message_pb2, producer_pb2, producer_pb2_grpc
from tests import tuned_broker
from tests.process.conftest import LIMIT_SECONDS, BrokerProcess, until
from tests.process.fork_server import ForkServer
from tests.process.load import EARLIEST, TOPIC
from tests.process.test_crash import verify
from tests.programs import need_program

CALLS = "openat,pwritev,pwritev2,pwrite64,fdatasync,fsync,rename,unlink,sendmsg,mkdir"
COUNT = 30
BODY = b"x" * 8000
"""With 30 messages the journal rolls three times, and the ledger too."""
SETTINGS = {
    "grpc_address": "127.0.0.1:0",
    "http_address": "127.0.0.1:0",
    "log_format": "json",
    "checkpoint_interval_ms": "1h",
    "disk_reserve_bytes": "0",
    "journal_segment_bytes": "64KiB",
    "ledger_max_entries": "10",
    "request_bytes_max": "64KiB",
    "payload_bytes_max": "16KiB",
    "batch_messages_max": "20",
}
SEGMENT = re.compile(r"/journal/[0-9a-f]{16}\.seg$")
_LINE = re.compile(r"^(\d+) +(?:<\.\.\. (\w+) resumed>|(\w+)\()(.*)$")

Traced = Callable[..., Awaitable[BrokerProcess]]


@dataclass
class Call:
    """One system call, and between which lines of the trace it happened."""

    name: str
    arguments: str
    began: int
    ended: int = 1 << 60
    result: str = ""

    @property
    def file(self) -> str:
        """The file of its descriptor, or its first path."""
        match = re.match(r'\d+<([^>]*)>|(?:AT_FDCWD[^,]*, )?"([^"]*)"', self.arguments)
        return (match[1] or match[2]) if match else ""


def read_trace(path: Path) -> list[Call]:
    """The calls, in the order in which they began."""
    calls: list[Call] = []
    unfinished: dict[str, Call] = {}
    for number, line in enumerate(path.read_text(errors="replace").splitlines()):
        if (match := _LINE.match(line)) is None:
            continue
        thread, resumed, name, rest = match.groups()
        if resumed:
            call = unfinished.pop(thread)
        else:
            call = Call(name.replace("pwritev2", "pwritev"), rest, number)
            calls.append(call)
        if rest.endswith("<unfinished ...>"):
            unfinished[thread] = call
        else:
            call.ended, call.result = number, rest.rpartition(" = ")[2]
    return calls


def first(calls: list[Call], after: int, name: str, file: str) -> Call:
    """The first such call that began after a line of the trace."""
    for call in calls:
        if call.began > after and call.name == name and call.file == file:
            return call
    raise AssertionError(f"no {name} of {file} after line {after} of the trace")


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    return tmp_path / "trace"


@pytest.fixture
async def start(fork_server: ForkServer, tmp_path: Path, trace: Path) -> AsyncIterator[Traced]:
    """Starts a broker on one folder, under strace if options for it are given."""
    processes: list[BrokerProcess] = []
    tracers: list[asyncio.subprocess.Process] = []
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("POSTDATE_", "GRPC_"))}

    async def start_one(*options: str, **settings: str) -> BrokerProcess:
        flags, tuning = tuned_broker.split({**SETTINGS, **settings, "data_dir": str(tmp_path / "data")})
        process = await fork_server.fork(
            ("-m", "tests.tuned_broker", "serve", *flags),
            {**inherited, **tuning},
            is_traced=bool(options),
        )
        processes.append(BrokerProcess(process))
        if options:
            # A SIGCONT that came before its own SIGSTOP would be of no use.
            await until(partial(has_stopped, process.pid), "the process has not stopped itself")
            tracer = await asyncio.create_subprocess_exec(
                *(need_program("strace"), "-f", "-qq", "-y", "-s", "10000", "-o", str(trace)),
                *(*options, "-p", str(process.pid)),
            )
            tracers.append(tracer)
            await until(partial(is_traced, process.pid), "strace does not look on")
            process.send_signal(signal.SIGCONT)
        return await processes[-1].serving()

    yield start_one
    for process in processes:
        await process.clean_up()
    for tracer in tracers:
        await tracer.wait()


async def has_stopped(pid: int) -> bool:
    return "State:\tT" in await status_of(pid)


async def is_traced(pid: int) -> bool:
    return "TracerPid:\t0\n" not in await status_of(pid)


async def status_of(pid: int) -> str:
    return await asyncio.to_thread(Path(f"/proc/{pid}/status").read_text)


def payload(number: int) -> bytes:
    return b"payload-%04d-" % number + BODY


async def produce(broker: BrokerProcess, number: int) -> None:
    """Over a connection of its own, so that the answer names its status in full and not by a number."""
    options = [("grpc.use_local_subchannel_pool", 1), ("grpc.enable_retries", 0)]
    async with grpc.aio.insecure_channel(broker.grpc_address, options=options) as channel:
        message = message_pb2.Message(payload=payload(number))
        request = producer_pb2.ProduceRequest(topic=TOPIC, messages=[message])
        await producer_pb2_grpc.ProducerServiceStub(channel).Produce(request, timeout=30)


async def produce_all(broker: BrokerProcess) -> tuple[set[int], bool]:
    """Produce until a refusal; returns the answers and whether there was one. Nothing may be answered after it."""
    answered: set[int] = set()
    refused = False
    for number in range(COUNT):
        try:
            await produce(broker, number)
        except grpc.aio.AioRpcError as error:
            # CANCELLED is gRPC's answer to a call that comes as the server ends.
            if error.code() not in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED):
                raise
            refused = True
            continue
        assert not refused, "a message was answered after one that could not be written"
        answered.add(number)
    return answered, refused


async def assert_kept(start: Traced, answered: set[int], tmp_path: Path) -> None:
    """A broker that starts again, on a disk that is well, has every message that was answered, whole."""
    broker = await start()
    call = broker.consumer.Subscribe()
    opening = consumer_pb2.Open(
        topic=TOPIC,
        subscription="all",
        initial_position=EARLIEST,
        permits=consumer_pb2.Permits(messages=10_000),
    )
    await call.write(consumer_pb2.SubscribeRequest(open=opening))
    missing = {payload(number) for number in answered}
    async with asyncio.timeout(30):
        while missing:
            frame = await call.read()
            missing -= {each.message.payload for each in frame.batch.deliveries}
    call.cancel()
    await end(broker)
    verify(tmp_path / "data")


async def end(broker: BrokerProcess) -> int:
    broker.process.send_signal(signal.SIGTERM)
    return await broker.wait(60)


async def test_write_then_sync_then_answer_and_sync_then_rename_then_sync_of_the_folder(
    start: Traced, trace: Path, tmp_path: Path
):
    broker = await start("-e", f"trace={CALLS}")
    answered, refused = await produce_all(broker)
    assert len(answered) == COUNT and not refused
    assert await end(broker) == 0
    calls, data = read_trace(trace), str(tmp_path / "data")
    for number in range(COUNT):
        assert_answered_after_its_sync(calls, f"{data}/journal/", b"payload-%04d-" % number)
    assert_replaced_in_order(calls, data)
    assert_ledgers_synced(calls, data)
    assert_private(calls, data)
    await assert_kept(start, answered, tmp_path)


async def test_at_rest_a_segment_goes_after_the_next_one_is_there_for_good(
    start: Traced, trace: Path, tmp_path: Path
):
    broker = await start("-e", f"trace={CALLS}", checkpoint_interval_ms="300ms")
    answered, refused = await produce_all(broker)
    assert len(answered) == COUNT and not refused
    journal = tmp_path / "data/journal"
    async with asyncio.timeout(LIMIT_SECONDS):
        while not has_shrunk(journal):
            await asyncio.sleep(0.05)
    await produce(broker, COUNT)
    broker.process.kill()
    await broker.wait(LIMIT_SECONDS)
    calls = read_trace(trace)
    assert_replaced_in_order(calls, str(tmp_path / "data"))
    gone = [call for call in calls if call.name == "unlink" and SEGMENT.search(call.file)]
    assert gone
    for call in gone:
        renames = [each for each in calls if each.name == "rename" and each.began < call.began]
        begun = [each for each in renames if SEGMENT.search(each.arguments.split('"')[3])][-1]
        assert first(calls, begun.ended, "fsync", str(journal)).ended < call.began
    assert_answered_after_its_sync(calls, f"{journal}/", b"payload-%04d-" % COUNT)
    await assert_kept(start, {*answered, COUNT}, tmp_path)


def has_shrunk(journal: Path) -> bool:
    """Return whether a journal is one segment that holds nothing. A file of it may go while it is looked at."""
    try:
        return [path.stat().st_size for path in journal.iterdir()] == [HEADER_BYTES]
    except FileNotFoundError:
        return False


def assert_answered_after_its_sync(calls: list[Call], journal: str, marker: bytes) -> None:
    writes = [
        call
        for call in calls
        if call.name == "pwritev" and call.file.startswith(journal) and marker.decode() in call.arguments
    ]
    assert len(writes) == 1, f"{marker!r} was written {len(writes)} times to the journal"
    assert "RWF_DSYNC" in writes[0].arguments, "the write does not sync"
    answers = [
        call
        for call in calls
        if call.began > writes[0].began and call.name == "sendmsg" and "grpc-status" in call.arguments
    ]
    assert answers and writes[0].ended < answers[0].began, f"{marker!r} was answered before its sync returned"


def assert_replaced_in_order(calls: list[Call], data: str) -> None:
    """Whatever takes its name by a rename was written and synced before, and its folder is synced after."""
    renames = [call for call in calls if call.name == "rename" and call.file.startswith(data)]
    targets = [call.arguments.split('"')[3] for call in renames]
    wanted = [f"{data}/broker.manifest", f"{data}/topics/1/manifest", f"{data}/journal/"]
    for path in wanted:
        assert any(target.startswith(path) for target in targets), f"nothing was renamed to {path}"
    for rename, target in zip(renames, targets, strict=True):
        writes = [
            call
            for call in calls
            if call.name in ("pwritev", "pwrite64") and call.file == rename.file and call.ended < rename.began
        ]
        if target.endswith(".seg") and rename.file.endswith(".seg") and "spare" not in rename.file:
            continue  # a segment that becomes a spare: its bytes are nobody's any more
        assert writes, f"{rename.file} was renamed and never written"
        sync = first(calls, writes[-1].ended, "fdatasync", rename.file)
        assert sync.ended < rename.began, f"{rename.file} was renamed before its sync returned"
        folder = target.rpartition("/")[0]
        synced = first(calls, rename.ended, "fsync", folder)
        if target == f"{data}/topics/1/manifest":
            root = next(
                c for c, t in zip(renames, targets, strict=True) if c.began > rename.ended and "broker" in t
            )
            assert synced.ended < root.began, "the root was replaced before a manifest's name was durable"


def assert_ledgers_synced(calls: list[Call], data: str) -> None:
    """Before the last manifest was put in its place, all that it names was on disk, and had its name there."""
    manifest = [c for c in calls if c.name == "rename" and c.file == f"{data}/topics/1/manifest.new"][-1]
    ledgers = f"{data}/topics/1/ledgers"
    files = {c.file for c in calls if c.name == "pwritev" and c.file.startswith(ledgers)}
    assert len(files) >= 9, "three files of three ledgers"
    for file in files:
        written = [c for c in calls if c.name == "pwritev" and c.file == file][-1]
        synced = first(calls, written.ended, "fdatasync", file)
        assert synced.ended < manifest.began, f"{file} was named before it was synced"
        made = next(c for c in calls if c.name == "openat" and c.file == file and "O_CREAT" in c.arguments)
        assert first(calls, made.ended, "fsync", ledgers).ended < manifest.began


def assert_private(calls: list[Call], data: str) -> None:
    opened = [c for c in calls if c.name == "openat" and c.file.startswith(data) and "O_RDWR" in c.arguments]
    assert len(opened) > 10
    for call in opened:
        assert "O_NOFOLLOW" in call.arguments and "O_CLOEXEC" in call.arguments, call
        assert "O_CREAT" not in call.arguments or made_with(call, "0600"), call
    made = [c for c in calls if c.name == "mkdir" and c.file.startswith(data)]
    assert made and all(made_with(call, "0700") for call in made)


def made_with(call: Call, mode: str) -> bool:
    """Return whether the mode is the call's last argument, whether it returned in the same line of the trace or later."""
    return re.search(rf", {mode}(\)| <unfinished)", call.arguments) is not None


@pytest.mark.parametrize(
    "injection",
    [
        "pwritev,pwritev2:error=EIO:when=7",  # the journal's call also fails where its sync does
        "pwritev,pwritev2:error=ENOSPC:when=7",
        pytest.param("pwritev,pwritev2:error=EIO:when=20", marks=pytest.mark.deep),
    ],
)
async def test_nothing_is_answered_after_a_write_or_sync_that_failed(
    start: Traced, tmp_path: Path, injection: str
):
    broker = await start("-e", f"trace={CALLS}", "-e", f"inject={injection}")
    answered, refused = await produce_all(broker)
    assert refused, "the error was not noticed"
    assert 0 < len(answered) < COUNT
    assert await broker.wait(60) == 1
    # The journal tells it of itself, a ledger by the task that wrote it.
    assert any("Writing has stopped" in line or "StorageFailed" in line for line in broker.lines)
    await assert_kept(start, answered, tmp_path)


async def test_writes_that_the_system_takes_nothing_of_are_made_by_the_next_call(
    start: Traced, tmp_path: Path
):
    broker = await start("-e", f"trace={CALLS}", "-e", "inject=pwritev,pwritev2:retval=0:when=3+3")
    answered, refused = await produce_all(broker)
    assert len(answered) == COUNT and not refused
    assert await end(broker) == 0
    await assert_kept(start, answered, tmp_path)


async def test_a_write_that_the_system_takes_a_part_of_is_not_answered_unless_the_rest_follows(
    start: Traced, tmp_path: Path
):
    # A limit to the length of files, in the middle of a message: the write is short, and the next call is an error.
    broker = await start()
    await produce(broker, 0)
    journal = tmp_path / "data/journal/0000000000000001.seg"
    # Its file is longer than what was written into it.
    length = len(journal.read_bytes().rstrip(b"\0")) + len(payload(1)) // 2
    resource.prlimit(broker.process.pid, resource.RLIMIT_FSIZE, (length, length))
    with pytest.raises(grpc.aio.AioRpcError) as refusal:
        await produce(broker, 1)
    assert refusal.value.code() is grpc.StatusCode.UNAVAILABLE
    assert await broker.wait(LIMIT_SECONDS) == 1
    assert "File too large" in str(broker.logged("Writing has stopped"))
    assert len(journal.read_bytes().rstrip(b"\0")) == length, "the write was not cut short"
    await assert_kept(start, {0}, tmp_path)


LEDGER, JOURNAL = "topics/1/ledgers/1.0.data", "journal/spare-001.seg"
CHECKPOINT = ("topics/1/manifest.new", "topics/1/ledgers")


@pytest.mark.parametrize(
    ("error", "count", "files", "remedy"),
    [
        pytest.param("ENOMEM", 4, (JOURNAL, LEDGER, *CHECKPOINT), "is retried", marks=pytest.mark.deep),
        ("EMFILE", 4, (JOURNAL, LEDGER, *CHECKPOINT), "files are opened with the reserved ones"),
        pytest.param(
            "ENFILE",
            4,
            (JOURNAL, LEDGER, *CHECKPOINT),
            "files are opened with the reserved ones",
            marks=pytest.mark.deep,
        ),
        # More than there are spares; they belong to all threads, and each thread counts its errors for itself.
        ("EMFILE", SPARE_DESCRIPTORS + 4, (JOURNAL,), "is retried"),
    ],
)
async def test_files_that_cannot_be_opened_for_a_while_hold_nobody_up_for_good(
    start: Traced, trace: Path, tmp_path: Path, error: str, count: int, files: tuple[str, ...], remedy: str
):
    # A segment is opened by the journal's roll, a ledger by its first write, the others by the last checkpoint.
    paths = [option for file in files for option in ("-P", str(tmp_path / "data" / file))]
    broker = await start(*paths, "-e", "trace=openat", "-e", f"inject=openat:error={error}:when=1..{count}")
    answered, refused = await produce_all(broker)
    assert len(answered) == COUNT and not refused
    assert await end(broker) == 0
    failed = {call.file for call in read_trace(trace) if "INJECTED" in call.result}
    assert failed >= {str(tmp_path / "data" / file) for file in files if file not in CHECKPOINT}
    assert broker.logged(remedy)
    await assert_kept(start, answered, tmp_path)
