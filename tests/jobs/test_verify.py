"""`verify`: clean after every history and every crash, and blind to no damaged byte."""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Callable
from functools import cache

import google_crc32c
import numpy as np
import pytest
from click.testing import CliRunner
from pyroaring import BitMap

from broker.cli import main
from broker.errors import Fenced, NotFound
from broker.folder.consistency import History, find_batch_problems, find_cursor_problems
from broker.jobs.verify import LINES_MAX, Report, verify_data_dir
from broker.model import FLAG_DELAYED, ROW, Position
from broker.policy import TopicPolicy
from broker.runtime.vfs import LocalVfs, replace_file
from broker.storage.blocks import LedgerCapture
from broker.storage.dump import dump_file
from broker.storage.frame import RECORD_TYPE_FIRST, encode_group
from broker.storage.ledger_facts import LedgerFacts
from broker.storage.manifest import (
    CursorImage,
    LedgerImage,
    LedgerTimes,
    SubscriptionImage,
    TopicImage,
    decode_broker,
    decode_cursor,
    decode_topic,
    encode_broker,
    encode_cursor,
    encode_topic,
)
from broker.storage.records import (
    LedgersDropped,
    Produced,
    Record,
    Settled,
    SettleReason,
    SubscriptionCreated,
    TopicCreated,
    TopicDeleted,
)
from broker.storage.segment import find_end
from broker.testing.mem_vfs import CrashPolicy, MemVfs
from broker.testing.sim_clock import SimClock
from broker.testing.sim_loop import run_sim
from tests.depth import DAY, at_depth
from tests.harness import DATA_DIR, Node, Outgoing

Files = dict[str, bytes]
START_MS = 1_750_000_000_000


# Histories of a real broker


@cache
def lived() -> tuple[MemVfs, int]:
    """A disk after a broker's life that ended well, and the moment at which its last checkpoint began."""
    vfs = MemVfs()
    moments = []

    async def scenario(loop, clock: SimClock) -> None:
        node = Node(vfs, clock).open()
        await node.create_subscription("orders", "billing")
        inbox = await node.subscribe("orders", "billing")
        for number in range(7):
            delay_ms = 0 if number % 2 else 1_000
            batch = [
                Outgoing(b"message %d" % number, deliver_after_ms=delay_ms, sequence_id=3 * number + each)
                for each in (1, 2, 3)
            ]
            await node.produce("orders", batch, "p")
            if number == 3:
                await node.checkpoint()
        await node.produce("gone", [Outgoing(b"x")])
        got = await inbox.wait(9)
        await inbox.ack(each.position for each in got[2:6])
        await inbox.nack([got[7].position], after_ms=60_000)
        await node.broker.registry.delete_topic("gone")
        moments.append(vfs.op_count)
        await node.stop()

    run_sim(scenario, seed=3, start_ms=START_MS)
    return vfs, moments[0]


def files_at_rest() -> Files:
    """Files of a stopped broker, without the zeros that the journal's was lengthened by: they say nothing."""
    files = lived()[0].snapshot()
    path = journal_of(files)
    files[path] = files[path][: find_end(files[path], int(path[-20:-4], 16), path).offset]
    return files


def disk_of(files: Files) -> MemVfs:
    vfs = MemVfs()
    for path, content in files.items():
        folder = ""
        for part in path.split("/")[:-1]:
            folder = f"{folder}/{part}" if folder else part
            vfs.make_dir(folder)
        vfs.open(path, create=True).pwrite([content], 0)
    return vfs


def verify(files: Files) -> Report:
    return verify_data_dir(disk_of(files), DATA_DIR)


def test_what_a_broker_leaves_is_clean_and_stays_as_it_is() -> None:
    files = files_at_rest()
    vfs = disk_of(files)
    report = verify_data_dir(vfs, DATA_DIR)
    assert (report.problems, report.notes) == ([], [])
    assert report.summary == (
        "1 topics, 4 ledgers with 21 entries, 1 subscriptions, 0 journal records: 0 problems, 0 notes"
    )
    assert vfs.snapshot() == files


@pytest.mark.parametrize("policy", CrashPolicy)
def test_what_a_crash_leaves_is_no_problem(policy: CrashPolicy) -> None:
    vfs, _ = lived()
    rng = random.Random(1)
    noted = 0
    # Each policy at every eighth moment, all of them together at every moment.
    for at in range(list(CrashPolicy).index(policy), vfs.op_count + 1, 8):
        crashed = vfs.crashed(at, policy, rng)
        before = crashed.snapshot()
        try:
            report = verify_data_dir(crashed, DATA_DIR)
        except NotFound:  # it had not begun
            assert f"{DATA_DIR}/broker.manifest" not in before
            continue
        assert report.problems == [], f"at {at}"
        noted += bool(report.notes)
        after = crashed.snapshot()
        after.pop(f"{DATA_DIR}/lock", None)
        before.pop(f"{DATA_DIR}/lock", None)
        assert after == before
    assert noted


def test_what_a_killed_broker_left_in_its_journal_is_followed() -> None:
    vfs, moment = lived()
    report = verify_data_dir(vfs.crashed(moment, CrashPolicy.KEEP_ALL), DATA_DIR)
    assert report.problems == []
    assert " 0 journal records" not in report.summary


PLACES = at_depth(change=7, deep=20)


@pytest.mark.slow
@pytest.mark.parametrize("change", ["flip", "cut", "remove"])
def test_no_damage_to_a_named_file_is_missed(change: str) -> None:
    files = files_at_rest()
    rng = random.Random(5 + DAY)
    for path, content in files.items():
        if path.endswith("/lock") or "/spare-" in path:
            continue
        places = sorted(rng.sample(range(len(content)), min(len(content), PLACES)))
        for place in places if change != "remove" else places[:1]:
            damaged = dict(files)
            if change == "flip":
                byte = content[place] ^ 1 << rng.randrange(8)
                damaged[path] = content[:place] + bytes([byte]) + content[place + 1 :]
            elif change == "cut":
                damaged[path] = content[:place]
            else:
                del damaged[path]
            assert verify(damaged).problems, f"{path} at {place}"
            if change != "remove":
                list(dump_file(disk_of(damaged), path))


def test_damage_in_one_place_does_not_hide_another() -> None:
    files = files_at_rest()
    wanted = ["rows", "data", "cursors"]
    for part in wanted:
        path = next(path for path in files if part in path.rpartition("topics")[2])
        files[path] = files[path][:40] + bytes([files[path][40] ^ 1]) + files[path][41:]
    problems = verify(files).problems
    for part in wanted:
        assert any(part in problem for problem in problems)


def test_what_nobody_names_is_a_note() -> None:
    files = files_at_rest()
    strangers = ["stranger", "topics/9/manifest", "topics/1/x", "topics/1/ledgers/77.0.data", "journal/y"]
    strangers += ["topics/1/cursors/1.ffff", "topics/1/buckets/z", "broker.manifest.new"]
    for name in strangers:
        files[f"{DATA_DIR}/{name}"] = b"?"
    report = verify(files)
    assert report.problems == []
    assert len(report.notes) == len(strangers)


def test_a_longer_file_of_the_open_ledger_is_a_note_and_of_a_sealed_one_a_problem() -> None:
    files = files_at_rest()
    data = sorted(path for path in files if path.endswith(".data"))
    files[data[-1]] += b"torn"
    report = verify(files)
    assert (len(report.problems), len(report.notes)) == (0, 1)
    files[data[0]] += b"torn"
    assert len(verify(files).problems) == 1


def journal_of(files: Files) -> str:
    """The journal's last segment."""
    return max(path for path in files if path.endswith(".seg") and "/spare-" not in path)


def test_the_rest_of_a_recycled_journal_file_is_not_worth_a_note() -> None:
    files = files_at_rest()
    path = journal_of(files)
    first_lsn = int(path.rpartition("/")[2].removesuffix(".seg"), 16)
    parts, _ = encode_group(first_lsn + 7, len(files[path]), [(RECORD_TYPE_FIRST, (b"former life",), 11)])
    for rest in (b"".join(parts), b"\0" * 4096, b"?" * 100):
        report = verify(files | {path: files[path] + rest})
        assert (report.problems, report.notes) == ([], [])


def test_a_torn_group_of_the_journal_is_a_note() -> None:
    files = files_at_rest()
    path = journal_of(files)
    first_lsn = int(path.rpartition("/")[2].removesuffix(".seg"), 16)
    parts, length = encode_group(first_lsn, len(files[path]), [(RECORD_TYPE_FIRST, (b"torn",), 4)])
    files[path] += b"".join(parts)[: length - 8]
    report = verify(files)
    assert report.problems == []
    [note] = report.notes
    assert "The journal's last group is not whole" in note


def test_an_absent_root_beside_data_is_a_problem_and_an_empty_folder_is_none() -> None:
    files = files_at_rest()
    del files[f"{DATA_DIR}/broker.manifest"]
    assert any("broker.manifest is missing" in each or "missing" in each for each in verify(files).problems)
    vfs = MemVfs()
    vfs.make_dir(DATA_DIR)
    with pytest.raises(NotFound):
        verify_data_dir(vfs, DATA_DIR)
    with pytest.raises(NotFound):
        verify_data_dir(vfs, "elsewhere")
    vfs.make_dir(f"{DATA_DIR}/journal")
    assert verify_data_dir(vfs, DATA_DIR).problems == []


def test_a_running_broker_is_left_alone() -> None:
    vfs = disk_of(files_at_rest())
    held = vfs.lock(f"{DATA_DIR}/lock")
    assert held is not None
    with pytest.raises(Fenced):
        verify_data_dir(vfs, DATA_DIR)
    held.close()
    verify_data_dir(vfs, DATA_DIR)
    verify_data_dir(vfs, DATA_DIR)  # and it lets go of the lock


def test_lines_are_bounded() -> None:
    files = files_at_rest() | {f"{DATA_DIR}/{number}": b"" for number in range(LINES_MAX + 5)}
    report = verify(files)
    assert len(report.notes) == LINES_MAX + 1
    assert report.notes[-1] == "... and 5 more"


# Files that are whole, and disagree


def rewrite(files: Files, path: str, change: Callable[[bytes], bytes]) -> Files:
    vfs = disk_of(files)
    replace_file(vfs, path, [change(files[path])])
    return vfs.snapshot()


TOPIC = f"{DATA_DIR}/topics/1/manifest"
ROOT = f"{DATA_DIR}/broker.manifest"


def changed_topic(**changes: object) -> Files:
    def change(content: bytes) -> bytes:
        return encode_topic(dataclasses.replace(decode_topic(content, TOPIC), **changes))  # type: ignore[arg-type]

    return rewrite(files_at_rest(), TOPIC, change)


def changed_root(**changes: object) -> Files:
    def change(content: bytes) -> bytes:
        return encode_broker(dataclasses.replace(decode_broker(content, ROOT), **changes))  # type: ignore[arg-type]

    return rewrite(files_at_rest(), ROOT, change)


def changed_cursor(**changes: object) -> Files:
    files = files_at_rest()
    path = next(path for path in files if "/cursors/" in path)

    def change(content: bytes) -> bytes:
        return encode_cursor(dataclasses.replace(decode_cursor(content, path), **changes))  # type: ignore[arg-type]

    return rewrite(files, path, change)


@pytest.mark.parametrize(
    ("damaged", "said"),
    [
        pytest.param(lambda: changed_topic(topic_id=2), "of another topic", id="topic-id"),
        pytest.param(lambda: changed_topic(name="other"), "of another topic", id="topic-name"),
        pytest.param(lambda: changed_topic(applied_lsn=999), "ends before", id="journal-too-short"),
        pytest.param(
            lambda: changed_root(checkpoint_lsn=999), "ends before", id="journal-too-short-for-root"
        ),
        pytest.param(lambda: changed_root(next_ledger_id=2), "given a second time", id="ledger-id-again"),
        pytest.param(
            lambda: changed_root(topics={1: "orders", 2: "lost"}), "empty or gone", id="no-manifest"
        ),
        pytest.param(lambda: changed_cursor(subscription_id=8), "another subscription", id="cursor-owner"),
        pytest.param(lambda: changed_cursor(settled={1: BitMap([0])}), "too low", id="settled-at-mark"),
        pytest.param(lambda: changed_cursor(settled={99: BitMap([0])}), "not there", id="no-such-ledger"),
        pytest.param(
            lambda: changed_cursor(waiting={4: LedgerTimes(BitMap([99]), bytes(8))}),
            "holds",
            id="beyond-ledger",
        ),
    ],
)
def test_files_that_disagree_are_found(damaged: Callable[[], Files], said: str) -> None:
    problems = verify(damaged()).problems
    assert any(said in problem for problem in problems), problems


def image_of(ledgers: tuple[LedgerImage, ...], **changes: object) -> TopicImage:
    image = TopicImage(1, "t", 0, TopicPolicy(), 5, ledgers, (), 2, Position(0, 0), 0, 0)
    return dataclasses.replace(image, **changes)  # type: ignore[arg-type]


def ledger(ledger_id: int, count: int) -> LedgerImage:
    return LedgerImage(LedgerCapture(1, ledger_id, 0, count, count * 10, True), LedgerFacts(0))


LOG = (ledger(3, 10), ledger(7, 4))
SUBSCRIPTION = SubscriptionImage(1, "s", 1, 0, Position(3, 0), mark=Position(3, 5))


@pytest.mark.parametrize(
    ("subscription", "cursor", "said"),
    [
        ({"mark": Position(7, 5)}, {}, "beyond the log"),
        ({"mark": Position(3, 11)}, {}, "beyond the log"),
        ({"start": Position(3, 11), "mark": Position(7, 0)}, {}, "beyond the log"),
        ({"start": Position(3, 6)}, {}, "before the start"),
        ({}, {"settled": {3: BitMap([5])}}, "too low"),
        ({}, {"settled": {3: BitMap([4, 8])}}, "below the mark"),
        ({}, {"settled": {3: BitMap([10])}}, "holds 10"),
        ({}, {"settled": {4: BitMap([1])}}, "not there"),
        ({}, {"attempts": {3: [BitMap([6]), BitMap([20])]}}, "holds 10"),
        ({}, {"attempts": {3: [BitMap([1])]}}, "below the mark"),
        ({}, {"waiting": {7: LedgerTimes(BitMap([4]), bytes(8))}}, "holds 4"),
        (
            {},
            {"settled": {7: BitMap([1])}, "waiting": {7: LedgerTimes(BitMap([1]), bytes(8))}},
            "and settled",
        ),
    ],
)
def test_cursors_that_do_not_fit_the_log_are_found(subscription, cursor, said) -> None:
    found = CursorImage(1, 1, {}, {}, {})
    of = dataclasses.replace(SUBSCRIPTION, **subscription)
    problems = list(find_cursor_problems(image_of(LOG), of, dataclasses.replace(found, **cursor)))
    assert len(problems) == 1, problems
    assert said in problems[0]


def test_cursors_that_fit_are_not_complained_about() -> None:
    whole = CursorImage(1, 1, {3: BitMap([6]), 7: BitMap([3])}, {3: [BitMap(), BitMap([7])]}, {})
    assert list(find_cursor_problems(image_of(LOG), SUBSCRIPTION, whole)) == []
    for mark in (Position(3, 10), Position(7, 4)):
        at_end = dataclasses.replace(SUBSCRIPTION, mark=mark)
        assert list(find_cursor_problems(image_of(LOG), at_end, CursorImage(1, 1, {}, {}, {}))) == []
    nothing = dataclasses.replace(SUBSCRIPTION, start=Position(0, 0), mark=Position(0, 0))
    assert list(find_cursor_problems(image_of(()), nothing, CursorImage(1, 1, {}, {}, {}))) == []
    gone_end = Position(9, 3)  # of ledgers that were dropped, at the end and in the middle
    for ledgers, start, mark in (
        (LOG, Position(5, 99), gone_end),
        (LOG, gone_end, gone_end),
        ((), gone_end, gone_end),
    ):
        image = dataclasses.replace(image_of(ledgers), log_end=gone_end)
        at_gone = dataclasses.replace(SUBSCRIPTION, start=start, mark=mark)
        assert list(find_cursor_problems(image, at_gone, CursorImage(1, 1, {}, {}, {}))) == []
        beyond = dataclasses.replace(at_gone, mark=Position(9, 4))
        assert len(list(find_cursor_problems(image, beyond, CursorImage(1, 1, {}, {}, {})))) == 1


# Records


def batch(
    ledger_id: int = 7, first: int = 4, *, offset: int = 40, topic_id: int = 1, count: int = 2
) -> Produced:
    frames = [b"\x12\x08" + bytes(8)] * count
    rows = np.zeros(count, ROW)
    rows["publish_time_ms"] = 1
    rows["offset"] = np.arange(count) * 10 + offset
    rows["length"] = 10
    rows["crc"] = google_crc32c.value(frames[0])
    times = np.array([0, 9] * count, np.int64)[:count]
    rows["flags"] = np.where(times > 0, FLAG_DELAYED, 0)
    return Produced(topic_id, ledger_id, first, 1, times, rows, b"".join(frames))


def follow(*records: Record, first_lsn: int = 6, next_ledger_id: int = 8) -> list[str]:
    subscription = dataclasses.replace(SUBSCRIPTION, name="s")
    image = image_of(LOG, subscriptions=(subscription,))
    root = dataclasses.replace(decode_broker(files_at_rest()[ROOT], ROOT), next_ledger_id=next_ledger_id)
    history = History(root, [image])
    found = list(history.begin())
    for lsn, record in enumerate(records, first_lsn):
        found += history.apply(lsn, record)
    return [*found, *history.end()]


def test_records_that_continue_the_log_are_followed() -> None:
    created = SubscriptionCreated(1, SubscriptionImage(2, "new", 1, 0, Position(7, 6), mark=Position(7, 6)))
    settled = Settled(1, 1, SettleReason.ACKED, {7: BitMap([5])})
    rolled = batch(8, 0, offset=0)
    other = TopicCreated(2, "u", 0, TopicPolicy())
    elsewhere = batch(9, 0, offset=0, topic_id=2)
    assert follow(batch(), created, settled, rolled, other, elsewhere, batch(8, 2, offset=20)) == []
    assert follow(batch(7, 0, offset=0), first_lsn=5) == []  # held by the manifest already
    assert follow(batch(topic_id=12), Settled(1, 44, SettleReason.ACKED, {99: BitMap([1])})) == []  # deleted
    assert follow(TopicDeleted(1), TopicCreated(2, "t", 0, TopicPolicy())) == []


def test_ledgers_that_are_dropped_are_followed() -> None:
    dropped, settled = LedgersDropped(1, (7,)), Settled(1, 1, SettleReason.ACKED, {7: BitMap([5])})
    created = SubscriptionCreated(1, SubscriptionImage(2, "new", 1, 0, Position(7, 6), mark=Position(7, 6)))
    assert follow(batch(), dropped, settled, created, batch(8, 0, offset=0)) == []
    assert follow(LedgersDropped(1, (3, 7)), LedgersDropped(1, (3,))) == []  # one had to stay the first time
    # What the manifest says is gone, records before it say so too.
    assert follow(batch(5, 0, offset=0), LedgersDropped(1, (5,)), first_lsn=4) == []
    assert follow(settled, LedgersDropped(1, (3,)), first_lsn=4) == []


@pytest.mark.parametrize(
    ("records", "first_lsn", "said"),
    [
        ([LedgersDropped(1, (7,)), batch()], 6, "which was dropped"),
        ([LedgersDropped(1, (6,))], 6, "is dropped, and is not there"),
        ([batch(5, 0, offset=0)], 5, "it is not there"),
        ([batch(5, 0, offset=0), LedgersDropped(1, (5,))], 5, "it is not there"),
    ],
)
def test_records_that_contradict_what_was_dropped_are_found(
    records: list[Record], first_lsn: int, said: str
) -> None:
    problems = follow(*records, first_lsn=first_lsn)
    assert any(said in problem for problem in problems), problems


@pytest.mark.parametrize(
    ("records", "said"),
    [
        ([batch(first=5)], "come next"),
        ([batch(first=3)], "come next"),
        ([batch(offset=41)], "come next"),
        ([batch(8, 1, offset=0)], "come next"),
        ([batch(3, 10, offset=100)], "has begun"),
        ([batch(), batch()], "come next"),
        ([Settled(1, 1, SettleReason.ACKED, {7: BitMap([4])})], "holds 4"),
        ([Settled(1, 1, SettleReason.ACKED, {70: BitMap([4])})], "holds 0"),
        ([SubscriptionCreated(1, dataclasses.replace(SUBSCRIPTION, name="x"))], "second time"),
        ([SubscriptionCreated(1, dataclasses.replace(SUBSCRIPTION, subscription_id=2))], "is named"),
        ([TopicCreated(2, "t", 0, TopicPolicy())], "Two topics"),
        (
            [TopicCreated(2, "u", 0, TopicPolicy()), batch(7, 0, offset=0, topic_id=2)],
            "the id of one of topic 1",
        ),
    ],
)
def test_records_that_contradict_the_log_are_found(records: list[Record], said: str) -> None:
    problems = follow(*records)
    assert any(said in problem for problem in problems), problems


def test_a_batch_that_is_applied_must_be_in_its_ledger() -> None:
    assert "is applied" in follow(batch(first=3), first_lsn=5)[0]


def test_ids_that_could_be_given_again_are_found() -> None:
    assert "given a second time" in follow(next_ledger_id=7)[0]


@pytest.mark.parametrize(
    ("column", "value", "said"),
    [
        ("flags", 0, "DELAYED"),
        ("publish_time_ms", 2, "publish time"),
        ("offset", 51, "does not continue"),
        ("crc", 1, "not the one"),
    ],
)
def test_columns_of_a_batch_that_disagree_are_found(column: str, value: int, said: str) -> None:
    assert list(find_batch_problems(batch())) == []
    record = batch()
    record.rows[column][1] = value
    assert said in next(find_batch_problems(record))


def test_a_record_that_cannot_be_decoded_is_named_by_its_lsn() -> None:
    vfs = disk_of(files_at_rest())
    root = decode_broker(files_at_rest()[ROOT], ROOT)
    name = sorted(name for name in vfs.list_dir(f"{DATA_DIR}/journal") if not name.startswith("spare"))[-1]
    file = vfs.open(f"{DATA_DIR}/journal/{name}")
    first_lsn = int(name[:16], 16)
    bad = batch(99, 3)
    body = b"".join(bytes(part) for part in bad.encode())
    records = [(9, [b"?"], 1), (2, [body], len(body))]
    file.pwrite(encode_group(first_lsn, file.size(), records)[0], file.size())
    problems = verify_data_dir(vfs, DATA_DIR).problems
    assert [problem.split(": ")[1] for problem in problems] == [
        f"lsn {root.checkpoint_lsn + 1}",
        f"lsn {root.checkpoint_lsn + 2}",
    ]


# The command


def test_the_command_says_what_it_found(tmp_path) -> None:
    for path, content in files_at_rest().items():
        target = tmp_path / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content)
    data_dir = str(tmp_path / DATA_DIR)
    run = CliRunner().invoke
    clean = run(main, ["verify", data_dir])
    assert (clean.exit_code, clean.output.count("\n")) == (0, 1)
    report = json.loads(run(main, ["verify", data_dir, "--output", "json"]).output)
    assert report["problems"] == [] and report["summary"]
    held = LocalVfs().lock(f"{data_dir}/lock")
    assert held is not None
    refused = run(main, ["verify", data_dir])
    held.close()
    assert (refused.exit_code, refused.output.count("\n")) == (1, 1)
    assert run(main, ["verify", str(tmp_path / "nowhere")]).exit_code == 1
    (tmp_path / TOPIC).write_bytes(b"PDMT")
    bad = run(main, ["verify", data_dir])
    assert bad.exit_code == 2 and "problem: " in bad.output
    assert json.loads(run(main, ["verify", data_dir, "--output", "json"]).output)["problems"]
