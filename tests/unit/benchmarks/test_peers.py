"""Benchmarks beside other servers: arithmetic, what is thrown away, the page, and one measurement of a fake peer."""

from __future__ import annotations

import asyncio
import fnmatch
import os
import re
import sys
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import pytest

from benchmarks import peers
from benchmarks.errors import BenchmarkFailed
from benchmarks.figures import markers
from benchmarks.peers import nats, page, programs, pulsar, rabbitmq, runs, work
from benchmarks.peers.page import About, Results
from benchmarks.peers.peer import Peer
from benchmarks.peers.rows import FULL, QUICK, ROWS, SCENARIOS, Figure, Sizes, Take, best, figure_of
from benchmarks.peers.work import answers_per_second

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[3]
RATE, SECONDS = ROWS[0], next(row for row in ROWS if row.figure == "seconds")
BEGIN, END = markers(page.FIGURES)
LIMITS = runs.Machine(Path(), 0, 0, foreign_max=0.25, probe_ratio_max=2.0, seconds_max=60.0)


def test_the_median_is_of_the_takes_that_count():
    takes = [Take({"rate": 10}), Take({"rate": 999}, "others"), Take({"rate": 30}), Take({"rate": 20})]
    assert figure_of(RATE, takes) == Figure(20, 3)


def test_without_a_quiet_take_the_disturbed_ones_are_shown_as_such():
    assert figure_of(RATE, [Take({"rate": 10}, "x"), Take({"rate": 30}, "x")]) == Figure(
        20, 2, disturbed=True
    )


def test_without_takes_there_is_no_figure():
    assert figure_of(RATE, []) is None


def test_the_best_is_the_most_of_a_rate_and_the_least_of_a_time():
    figures = {"a": Figure(1, 3), "b": Figure(2, 3), "c": Figure(float("nan"), 3)}
    assert best(RATE, figures) == {"b"}
    assert best(SECONDS, figures) == {"a"}
    assert best(RATE, {}) == set()
    assert best(RATE, {"a": Figure(1, 3), "b": Figure(1, 3)}) == {"a", "b"}


def test_a_rate_counts_answers_by_the_time_between_them():
    assert answers_per_second([10.0, 10.5, 11.0]) == 2.0
    with pytest.raises(AssertionError, match="fewer than two"):
        answers_per_second([10.0])


def arrived(*due_and_number: tuple[int, int]) -> work.Arrived:
    found = work.Arrived()
    for due_ms, number in due_and_number:
        found.note([due_ms.to_bytes(8, "little") + number.to_bytes(8, "little")])
    return found


def test_what_comes_again_is_counted_and_its_first_delivery_is_what_was_late(monkeypatch: pytest.MonkeyPatch):
    now = iter([100.0, 100.004, 100.9])
    monkeypatch.setattr("benchmarks.peers.work.time.time", lambda: next(now))
    late = arrived((99_998, 0), (100_005, 1), (99_998, 0)).lateness(2)
    assert late["max"] == pytest.approx(2.0) and late["early"] == 1 and late["again"] == 1


@pytest.mark.parametrize("numbers", [(0,), (0, 0), (0, 2), (0, 1, 2)])
def test_a_message_that_did_not_come_or_was_not_awaited_fails_the_row(numbers: tuple[int, ...]):
    with pytest.raises(AssertionError, match="of the 2 awaited"):
        arrived(*((0, number) for number in numbers)).lateness(2)


@pytest.mark.parametrize(
    ("foreign", "before", "after", "disturbed"),
    [(0.25, 100, 200, False), (0.26, 100, 100, True), (0, 100, 201, True), (0, 201, 100, True)],
)
def test_others_and_a_disk_that_changed_disturb(foreign: float, before: float, after: float, disturbed: bool):
    assert bool(runs.Watch(foreign, before, after).disturbance(LIMITS)) == disturbed


@pytest.mark.parametrize(
    ("takes", "again_max", "used"),
    [(["", ""], 2, 1), (["x", "", ""], 2, 2), (["x", "x", "x", ""], 2, 3), (["x", ""], 0, 1)],
)
def test_what_is_disturbed_is_measured_again_a_bounded_number_of_times(
    takes: list[str], again_max: int, used: int
):
    left = deque(Take({"rate": 1}, reason) for reason in takes)
    said: list[Take] = []
    found = runs.take_until_quiet(left.popleft, again_max, said.append)
    assert [take.disturbed for take in found] == takes[:used]
    assert said == found


def test_every_row_belongs_to_a_scenario_and_every_scenario_has_a_row():
    assert {row.scenario for row in ROWS} == SCENARIOS.keys()


@pytest.mark.parametrize("sizes", [FULL, QUICK])
def test_counts_are_whole_batches(sizes: Sizes):
    tasks = [scenario.task(sizes) for scenario in SCENARIOS.values()]
    assert not [task for task in tasks if task.get("count", 0) % 1000]


def results(
    takes: dict[tuple[str, str], list[Take]],
    failures: dict[tuple[str, str], str],
    instead: dict[tuple[str, str], str] | None = None,
) -> Results:
    return Results(
        machine={
            "commit": "c0ffee",
            "date": "2026-01-01",
            "cores": 2,
            "cpu": "A Processor",
            "memory_gib": 8,
            "system": "A System",
            "kernel": "6.1",
            "file_system": "ext4 at /",
            "python": "3.11",
        },
        command="python -m benchmarks.peers --quick",
        sizes=QUICK,
        runs=3,
        peers={
            "one": About("One", "1.0", "synced", "as shipped"),
            "two": About("Two", "2.0", "synced", "tuned"),
        },
        takes=takes,
        failures=failures,
        skipped={"Three": "three-server is not on this machine"},
        instead=instead or {},
    )


def test_the_page_has_figures_in_the_place_of_the_old_ones():
    probes = {"probe_before_us": 200.0, "probe_after_us": 300.0}
    takes = {
        ("one", "herd-100b"): [Take({"seconds": 0.5, **probes})],
        ("two", "herd-100b"): [Take({"seconds": 1.5, **probes}, "others")],
    }
    old = f"# Title\n\n{BEGIN}\n\nold figures\n\n{END}\n\nmore\n"
    new = page.write_page(old, results(takes, {("two", "single-1kb"): "it died\nand more"}))
    assert new.startswith("# Title\n\n") and new.endswith("\n\nmore\n") and "old figures" not in new
    assert "| 10,000 due at once, all acknowledged, 100 B | **0.5 s** | 1.5 s * |" in new
    assert "python -m benchmarks.peers --quick`, commit c0ffee, 2026-01-01; 2 cores of A Processor" in new
    assert "200 to 300 µs" in new and "1 of 2 were disturbed" in new
    assert "Two: `single-1kb` failed: it died." in new and "and more" not in new
    assert "| the same, 1 KB | failed | failed |" in new
    assert "Left out: Three (three-server is not on this machine)." in new
    assert "| One | 1.0 | synced | as shipped |" in new
    assert page.write_page(new, results(takes, {})).count(BEGIN) == 1


def test_a_row_that_a_peer_does_not_run_says_so_and_is_not_the_best():
    takes = {("one", "herd-100b"): [Take({"seconds": 0.5})], ("two", "herd-100b"): []}
    written = page.table(results(takes, {}, {("two", "herd-100b"): "as One"}))
    assert "| 10,000 due at once, all acknowledged, 100 B | **0.5 s** | as One |" in written


def test_rows_that_were_not_measured_are_not_on_the_page():
    assert page.table(results({}, {})).count("\n") == 1


def test_a_page_without_markers_is_refused():
    with pytest.raises(BenchmarkFailed, match="markers"):
        page.write_page("# Title", results({}, {}))


def test_the_document_has_the_markers():
    assert page.write_page((ROOT / "docs" / "benchmarks-peers.md").read_text(), results({}, {}))


@pytest.mark.parametrize("name", peers.PEERS)
def test_every_peer_says_what_it_is(name: str):
    kind = peers.peer_class(name)
    assert kind.title and kind.answer and kind.setup and isinstance(kind.missing(), str)


def test_a_peer_leaves_out_the_rows_that_its_patterns_name():
    left_out = {name for name in SCENARIOS if pulsar.PulsarStrict.instead_of(name)}
    assert left_out == SCENARIOS.keys() - {"herd-100b", "lateness", "pending"}
    assert pulsar.PulsarStrict.instead_of("single-1kb") == "as Pulsar"
    assert not any(pulsar.Pulsar.instead_of(name) for name in SCENARIOS)


@pytest.mark.parametrize("name", peers.PEERS)
def test_what_a_peer_leaves_out_is_a_row(name: str):
    assert all(fnmatch.filter(SCENARIOS, each) for each in peers.peer_class(name).not_measured)


def test_a_delay_in_rabbitmq_is_the_sum_of_the_queues_on_its_way():
    """Follow the bindings and the dead letter exchanges for every delay."""
    queues: dict[str, list[tuple[str, int, str]]] = {}
    following = rabbitmq.DUE
    for level in reversed(rabbitmq.LEVELS):
        queues[level.exchange] = [(level.pattern(0), 0, following)]
        queues[level.exchange] += [
            (level.pattern(digit), digit * level.seconds, following) for digit in range(1, level.radix)
        ]
        following = level.exchange
    for seconds in range(rabbitmq.SECONDS_MAX + 1):
        exchange, key = rabbitmq.route(seconds)
        waited = []
        while exchange != rabbitmq.DUE:
            [(wait, exchange)] = [
                (wait, target) for pattern, wait, target in queues[exchange] if bound(pattern, key)
            ]
            waited.append(wait)
        assert sum(waited) == seconds
        assert not waited or waited[0] > 0, "the first exchange has a queue for it"
    with pytest.raises(AssertionError, match="no queues"):
        rabbitmq.route(rabbitmq.SECONDS_MAX + 1)


def bound(pattern: str, key: str) -> bool:
    """Tell if a topic exchange takes a key for a pattern of words, stars and `#` at the end."""
    head, _, _ = pattern.partition("#")
    wanted, words = head.rstrip(".").split("."), key.split(".")
    return len(words) >= len(wanted) and all(
        each in ("*", word) for each, word in zip(wanted, words, strict=False)
    )


def test_a_delay_in_whole_seconds_is_never_too_short(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("benchmarks.peers.rabbitmq.time.time", lambda: 1_000.25)
    due_ms = (999_000, 1_000_250, 1_000_251, 1_001_250, 1_001_251)
    assert [rabbitmq.seconds_until(each) for each in due_ms] == [0, 0, 1, 1, 2]


class Written:
    """A writer of nothing, for a publisher whose answers a test gives."""

    def __init__(self) -> None:
        self.frames: list[bytes] = []

    def write(self, frames: bytes) -> None:
        self.frames.append(frames)

    def close(self) -> None:
        pass


def confirm(tag: int, *, multiple: bool = False) -> bytes:
    return b"\1\0\1" + (13).to_bytes(4) + b"\0\x3c\0\x50" + tag.to_bytes(8) + bytes([multiple]) + b"\xce"


async def test_a_batch_for_rabbitmq_is_answered_when_each_of_its_messages_is_confirmed():
    reader, written = asyncio.StreamReader(), Written()
    publisher = rabbitmq.Publisher(reader, cast(asyncio.StreamWriter, written))
    first = asyncio.create_task(publisher.publish(3, b"abc"))
    second = asyncio.create_task(publisher.publish(2, b"de"))
    await asyncio.sleep(0)
    assert written.frames == [b"abc", b"de"]
    reader.feed_data(confirm(5) + confirm(2) + confirm(2, multiple=True))
    await read_out(reader)
    assert not first.done() and not second.done()
    reader.feed_data(confirm(3))
    await first
    assert not second.done()
    reader.feed_data(confirm(4, multiple=True))
    await second
    publisher.close()


async def test_a_message_that_rabbitmq_refuses_fails_the_batches_that_wait():
    reader = asyncio.StreamReader()
    publisher = rabbitmq.Publisher(reader, cast(asyncio.StreamWriter, Written()))
    batches = [asyncio.create_task(publisher.publish(2, b"")) for _ in range(2)]
    await asyncio.sleep(0)
    reader.feed_data(confirm(1).replace(b"\0\x3c\0\x50", b"\0\x3c\0\x78"))
    for each in batches:
        with pytest.raises(AssertionError, match="not a confirm"):
            await each
    publisher.close()


async def read_out(reader: asyncio.StreamReader) -> None:
    """Let a task take what a reader holds."""
    while reader._buffer:  # type: ignore[attr-defined]
        await asyncio.sleep(0)
    await asyncio.sleep(0)


def test_pulsar_unpacks_libraries_in_its_own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(pulsar, "configured", lambda text, settings: text)
    monkeypatch.setattr(pulsar, "_HOME", tmp_path)
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf/standalone.conf").touch()
    peer = pulsar.Pulsar(tmp_path / "peer", (1, 2, 3), 0)
    peer.prepare_folder()
    assert peer.environment()["JDK_JAVA_OPTIONS"] == f'"-Djava.io.tmpdir={tmp_path}/peer/tmp"'
    assert (tmp_path / "peer/tmp").is_dir()


def test_a_configuration_of_pulsar_is_changed_where_it_names_a_setting():
    text = "# one=comment\none=1\nanother=2\n"
    assert pulsar.configured(text, {"one": "3"}) == "# one=comment\none=3\nanother=2\n"
    with pytest.raises(BenchmarkFailed, match="two is 0 times"):
        pulsar.configured(text, {"two": "3"})


def test_what_is_alive_in_a_heap_is_read_from_the_tool_of_java():
    histogram = (
        " num     #instances         #bytes  class name (module)\n"
        "-------------------------------------------------------\n"
        "   1:         13047         794864  [B (java.base@17.0.21.1)\n"
        "   2:          3003         361016  java.lang.Class (java.base@17.0.21.1)\n"
        "Total         16050        1155880\n"
    )
    assert pulsar.alive_bytes(f"28226:\n{histogram}") == 1_155_880
    with pytest.raises(BenchmarkFailed, match="no such process"):
        pulsar.alive_bytes("no such process")


def test_servers_of_nats_without_schedules_are_told_from_those_with_them():
    assert [nats.has_schedules(each) for each in ("2.9.10", "2.11.9", "2.12", "2.15.2", "3.0.0")] == [
        *(False, False, True, True, True)
    ]


FAKE = '''
import asyncio, bisect, sys
from benchmarks.peers.peer import Peer

SERVER = """
import socket, sys, threading, time
kept, lock = [], threading.Lock()
def serve(connection):
    file = connection.makefile("rwb")
    while line := file.readline():
        if line.startswith(b"take"):
            now = time.time() * 1000
            with lock:
                due = [each for each in kept if each[0] <= now]
                kept[:] = [each for each in kept if each[0] > now]
            file.write(b"%d\\\\n" % len(due) + b"".join(each[1] + b"\\\\n" for each in due))
        else:
            due_ms, text = line.split()
            with lock: kept.append((int(due_ms), text))
            open("data/log", "ab").write(line)
            file.write(b"ok\\\\n")
        file.flush()
listener = socket.create_server(("127.0.0.1", int(sys.argv[1])))
for line in open("data/log", "rb") if __import__("os").path.exists("data/log") else ():
    kept.append((int(line.split()[0]), line.split()[1]))
while True:
    threading.Thread(target=serve, args=(listener.accept()[0],), daemon=True).start()
"""

class Fake(Peer):
    title, answer, setup = "Fake", "nothing", "none"
    in_flight = 1
    def command(self): return [sys.executable, "-c", SERVER, str(self.ports[0])]
    async def connect(self):
        self.reader, self.writer = await asyncio.open_connection("127.0.0.1", self.ports[0], limit=1 << 24)
    async def produce(self, payload, due_ms): await self.produce_batch([payload], [due_ms])
    async def produce_batch(self, payloads, due_ms):
        self.writer.writelines(b"%d %s\\n" % (due, payload.hex().encode()) for payload, due in zip(payloads, due_ms))
        for _ in payloads: assert await self.reader.readline() == b"ok\\n"
    async def consume(self, count, note):
        reader, writer = await asyncio.open_connection("127.0.0.1", self.ports[0], limit=1 << 24)
        while count > 0:
            writer.write(b"take\\n")
            found = [bytes.fromhex((await reader.readline()).decode()) for _ in range(int(await reader.readline()))]
            count -= len(found)
            note(found) if found else await asyncio.sleep(0.01)
        writer.close()
    async def close(self): self.writer.close()
'''


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A server of a few lines; the client's process finds it by the same name."""
    (tmp_path / "fake_peer.py").write_text(FAKE)
    hook = "from benchmarks import peers; peers.PEERS['fake'] = 'fake_peer:Fake'"
    (tmp_path / "sitecustomize.py").write_text(hook)
    monkeypatch.setattr(programs, "CLIENTS", tmp_path)
    monkeypatch.setattr(runs, "CLIENTS", tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setitem(peers.PEERS, "fake", "fake_peer:Fake")
    return "fake"


TINY = Sizes(warm_seconds=0.05, seconds=0.2, herd=1_000, pending=2_000, lateness_seconds=1)


@pytest.mark.parametrize(
    ("scenario", "wanted"),
    [
        ("single-100b", {"rate", "p50"}),
        ("herd-100b", {"seconds", "early"}),
        ("pending", {"memory", "disk", "first_s"}),
    ],
)
def test_a_fake_peer_is_measured_and_nothing_of_it_is_left(
    fake: str, tmp_path: Path, scenario: str, wanted: set[str]
):
    core = min(os.sched_getaffinity(0))
    folder = tmp_path / "run"
    folder.mkdir()
    limits = runs.Machine(folder, core, core, foreign_max=64, probe_ratio_max=1e9, seconds_max=60.0)
    try:
        take = runs.measure(limits, fake, SCENARIOS[scenario], TINY)
    except BenchmarkFailed as error:
        if "before the messages were due" not in str(error):  # the machine stood still for a second
            raise
        take = runs.measure(limits, fake, SCENARIOS[scenario], TINY)
    assert wanted <= take.figures.keys() and not take.disturbed
    assert take.figures.get("early", 0) == 0
    assert all(take.figures[name] > 0 for name in wanted - {"early", "memory"})
    assert [path.name for path in folder.iterdir()] == ["client.log"]
    assert not processes_with(str(folder))


def test_a_failed_client_leaves_no_server(fake: str, tmp_path: Path):
    core = min(os.sched_getaffinity(0))
    limits = runs.Machine(tmp_path / "run", core, core, 64, 1e9, seconds_max=60.0)
    limits.folder.mkdir()
    tiny = Sizes(0.05, 0.2, herd=999, pending=1_000, lateness_seconds=1)
    with pytest.raises(BenchmarkFailed, match="not a multiple"):
        runs.measure(limits, fake, SCENARIOS["herd-100b"], tiny)
    assert not processes_with(str(limits.folder))


def processes_with(folder: str) -> list[str]:
    """Processes that work in a folder, as far as they are ours to see."""
    found = []
    for path in Path("/proc").iterdir():
        try:
            if path.name.isdigit() and re.match(re.escape(folder), os.readlink(path / "cwd")):
                found.append(path.name)
        except OSError:
            continue
    return found


def test_a_dead_server_is_noticed(tmp_path: Path):
    class Dying(Peer):
        title = "Dying"

        def command(self) -> list[str]:
            return [sys.executable, "-c", "raise SystemExit('no room')"]

    peer = Dying(tmp_path / "server", [], min(os.sched_getaffinity(0)))
    peer.start()
    try:
        assert peer._process is not None
        peer._process.wait(60)
        with pytest.raises(BenchmarkFailed, match="Dying ended with 1; its log ends: no room"):
            peer.check_alive()
    finally:
        peer.stop()
    assert not (tmp_path / "server").exists()


async def test_a_slow_peer_is_measured_until_some_answers_came(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    class Slow(Peer):
        async def produce_batch(self, payloads: Sequence[bytes], due_ms: Sequence[int]) -> None:
            await asyncio.sleep(0.1)

    async def go_on(name: str) -> None:
        pass

    monkeypatch.setattr(work, "phase", go_on)
    task = {"payload_bytes": 20, "warm_seconds": 0.0, "seconds": 0.01}
    found = await work.bursts(Slow(tmp_path, [], 0), task)
    assert 0 < found["rate"] <= 1000 / 0.099
