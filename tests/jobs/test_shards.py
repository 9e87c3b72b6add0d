"""verify, audit and compact on the data directory of a broker with shards: all of them, and whose each finding is."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from click.testing import CliRunner, Result

from broker.cli import main
from broker.errors import Fenced
from broker.folder.shard_folders import open_shard_folders, shard_folder, write_shards
from broker.jobs.engine import InlineEngine
from broker.jobs.folder import open_folders
from broker.jobs.reshard import reshard_folder
from broker.jobs.verify import verify_folder
from broker.runtime.vfs import LocalVfs
from broker.storage.manifest import decode_broker
from broker.topic_shards import shard_of
from tests.depth import at_depth, deep_but
from tests.jobs.folders import write_pinned_folder

VFS = LocalVfs()
SHARDS = 3


def run(*command: str, processes: int = 1) -> Result:
    """Run a command whose engine has so many processes. To start one takes longer than all the work there is."""
    with patch("broker.jobs.engines.InlineEngine", lambda: InlineEngine(processes)):
        return CliRunner().invoke(main, command)


def audited(data: Path, *options: str, processes: int = 1) -> tuple[int, dict[str, Any]]:
    command = ("audit", str(data), "--engine=inline", "--output=json", "--level=deep", *options)
    done = run(*command, processes=processes)
    assert done.exit_code < 3, done.output
    return done.exit_code, json.loads(done.stdout)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Three shards with four topics, of which much is worth compacting."""
    write_pinned_folder(tmp_path / "data", topics=4)
    asyncio.run(reshard_folder(VFS, str(tmp_path / "data"), SHARDS))
    return tmp_path / "data"


def topics_of(data: Path, count: int = SHARDS) -> dict[str, int]:
    shards = {}
    for number in range(count):
        path = f"{shard_folder(str(data), number)}/broker.manifest"
        shards.update(dict.fromkeys(decode_broker(Path(path).read_bytes(), path).topics.values(), number))
    return shards


def damage(data: Path) -> tuple[str, int]:
    """Damage a message; return the topic and its shard."""
    path = sorted(data.rglob("*.data"))[-1]
    content = bytearray(path.read_bytes())
    content[40] ^= 1
    path.write_bytes(content)
    shard, _, topic_id, *_ = path.relative_to(data).parts
    manifest = str(data / shard / "broker.manifest")
    topics = decode_broker(Path(manifest).read_bytes(), manifest).topics
    return topics[int(topic_id)], int(shard.removeprefix("shard-"))


def test_verify_checks_all_shards_and_names_the_one_that_is_wrong(data: Path) -> None:
    done = run("verify", str(data))
    assert done.exit_code == 0, done.output
    for number in range(SHARDS):
        assert f"shard {number}: " in done.output
    _, number = damage(data)
    done = run("verify", str(data))
    assert done.exit_code == 2, done.output
    problems = [line for line in done.output.splitlines() if line.startswith("problem: ")]
    assert problems and all(line.startswith(f"problem: shard {number}: ") for line in problems)


def test_verify_reports_a_topic_in_the_wrong_shard_and_a_shard_that_was_never_started(data: Path) -> None:
    one, other = shard_folder(str(data), 0), shard_folder(str(data), 1)
    Path(one).rename(data / "aside")
    Path(other).rename(one)
    (data / "aside").rename(other)
    problems = verify_folder(VFS, str(data)).problems
    assert len(problems) == sum(number < 2 for number in topics_of(data).values())
    assert all("belongs to shard" in problem for problem in problems)
    new = str(data.parent / "new")
    open_shard_folders(VFS, new, 2).close()
    report = verify_folder(VFS, new)
    assert report.problems == [] and len(report.notes) == 2


def unused(data: Path, made: str) -> int:
    """Leave a shard as a process leaves it that was killed before it had begun; return its number."""
    number = next(iter(topics_of(data).values()))
    folder = Path(shard_folder(str(data), number))
    write_shards(VFS, str(data), SHARDS)  # not all of them have served
    shutil.rmtree(folder)
    if made != "nothing":
        folder.mkdir()
    if made == "folders":
        (folder / "journal").mkdir()
        (folder / "topics").mkdir()
        (folder / "broker.manifest.new").write_bytes(b"half of it")
    return number


@pytest.mark.parametrize("made", deep_but(("nothing", "folders"), ("nothing", "a folder", "folders")))
def test_a_shard_in_which_nothing_was_ever_stored_keeps_nobody_from_the_others(data: Path, made: str) -> None:
    topics = topics_of(data)
    number = unused(data, made)
    there = sorted(topic for topic in topics if topics[topic] != number)
    lost = next(topic for topic in topics if topics[topic] == number)
    assert f"shard {number}: Nothing was ever stored here" in run("verify", str(data)).output
    told = run("audit", str(data), "--engine=inline")
    assert told.exit_code < 2 and f"shard {number}: nothing was ever stored here\n" in told.output
    _, report = audited(data)
    assert ([line["topic"] for line in report["topics"]], report["unused_shards"]) == (there, [number])
    for finding in report["findings"]:
        assert finding["path"].startswith(shard_folder(str(data), topics[finding["topic"]]))
    missing = run("audit", str(data), "--engine=inline", f"--topic={there[0]}", f"--topic={lost}")
    assert missing.exit_code == 3 and f"no topic {lost!r}" in missing.output
    worth = "--live-ratio=0.9", "--reclaim-mib=0"
    compacted = run("compact", f"--offline={data}", "--engine=inline", *worth)
    assert compacted.exit_code == 0, compacted.output
    assert f"Shard {number}: nothing was ever stored here." in compacted.output
    assert all(f"{topic}: rewrite" in compacted.output for topic in there)
    missing = run("compact", f"--offline={data}", "--engine=inline", *worth, f"--topic={lost}")
    assert missing.exit_code == 1 and f"{lost}: There is no topic" in missing.output
    done = run("reshard", str(data), f"--shards={SHARDS + 1}")
    assert done.exit_code == 0, done.output
    assert sorted(topics_of(data, SHARDS + 1)) == there
    assert verify_folder(VFS, str(data)).problems == []


def test_a_folder_all_of_whose_shards_are_unused_says_so(tmp_path: Path) -> None:
    data = str(tmp_path / "new")
    open_shard_folders(VFS, data, 2).close()
    for command in (
        ("audit", data, "--engine=inline"),
        ("compact", f"--offline={data}"),
        ("reshard", data, "--shards=3"),
    ):
        done = run(*command)
        assert done.exit_code and data in done.output, command
        assert "Nothing was ever stored" in done.output or "no files of a broker" in done.output


def test_a_shard_that_lost_its_root_manifest_is_damaged_and_not_unused(data: Path) -> None:
    number = next(iter(topics_of(data).values()))
    Path(shard_folder(str(data), number), "broker.manifest").unlink()
    assert run("verify", str(data)).exit_code == 2
    assert run("audit", str(data), "--engine=inline").exit_code == 2
    assert run("compact", f"--offline={data}", "--engine=inline").exit_code == 3
    assert run("reshard", str(data), f"--shards={SHARDS + 1}").exit_code == 1


def test_a_backup_without_the_part_of_a_shard_is_not_whole(data: Path) -> None:
    for folder in (data, *(Path(shard_folder(str(data), number)) for number in range(SHARDS))):
        (folder / "backup.json").write_bytes(b"{}")
    number = unused(data, "nothing")
    done = run("verify", str(data))
    assert (
        done.exit_code == 2 and f"problem: shard {number}: The part of this shard is missing" in done.output
    )
    assert run("audit", str(data), "--engine=inline").exit_code == 3


def test_nothing_is_read_beside_a_broker(data: Path) -> None:
    supervisor = open_shard_folders(VFS, str(data), SHARDS)
    try:
        with pytest.raises(Fenced):
            verify_folder(VFS, str(data))
        assert run("compact", f"--offline={data}", "--engine=inline", "--apply").exit_code == 4
        assert run("audit", str(data), "--engine=inline").exit_code == 4
    finally:
        supervisor.close()
    lock = VFS.lock(f"{shard_folder(str(data), 1)}/lock")
    assert lock is not None
    assert run("audit", str(data), "--engine=inline").exit_code == 4
    lock.close()


def test_an_audit_keeps_a_broker_from_starting_and_no_shard_of_one_that_runs(data: Path) -> None:
    with open_folders(str(data)) as folders:
        assert [folder.path for folder in folders] == [
            shard_folder(str(data), each) for each in range(SHARDS)
        ]
        with pytest.raises(Fenced):
            open_shard_folders(VFS, str(data), SHARDS)
    supervisor = open_shard_folders(VFS, str(data), SHARDS)
    with pytest.raises(Fenced), open_folders(str(data)):
        pass
    lock = VFS.lock(f"{shard_folder(str(data), 0)}/lock")
    assert lock is not None
    lock.close()
    supervisor.close()


def test_an_audit_of_a_backup_takes_no_lock(data: Path) -> None:
    (data / "backup.json").write_bytes(b"{}")
    for number in range(SHARDS):
        Path(shard_folder(str(data), number), "backup.json").write_bytes(b"{}")
    for lock in data.rglob("lock"):
        lock.unlink()
    with open_folders(str(data)) as folders:
        assert len(folders) == SHARDS
    assert list(data.rglob("lock")) == []


def test_an_audit_is_one_report_of_all_shards(data: Path) -> None:
    code, report = audited(data, processes=2)
    topics = topics_of(data)
    assert code < 2
    assert [line["topic"] for line in report["topics"]] == sorted(topics)
    assert report["folder"] == str(data)
    assert len(set(topics.values())) > 1
    for finding in report["findings"]:  # ledgers that are worth compacting
        assert finding["path"].startswith(shard_folder(str(data), topics[finding["topic"]]))
    topic, number = damage(data)
    code, report = audited(data)
    assert code == 2
    wrong = [finding for finding in report["findings"] if finding["severity"] == "error"]
    assert {finding["topic"] for finding in wrong} == {topic}
    assert all(finding["path"].startswith(shard_folder(str(data), number)) for finding in wrong)


def test_an_audit_of_some_topics_asks_their_shards_alone(data: Path) -> None:
    topic = sorted(topics_of(data))[0]
    _, report = audited(data, f"--topic={topic}")
    assert [line["topic"] for line in report["topics"]] == [topic]
    assert run("audit", str(data), "--engine=inline", "--topic=nobody").exit_code == 3


def test_a_compaction_of_a_stopped_broker_goes_through_all_shards(data: Path) -> None:
    def compacted(*options: str, processes: int = 1) -> str:
        given = (f"--offline={data}", "--engine=inline", "--live-ratio=0.9", "--reclaim-mib=0")
        done = run("compact", *given, *options, processes=processes)
        assert done.exit_code == 0, done.output
        return done.output

    planned = compacted()
    topics = topics_of(data)
    for number in range(SHARDS):
        assert f"Shard {number}:" in planned
    assert [topic for topic in topics if f"{topic}: rewrite" in planned] == list(topics)
    one = sorted(topics)[0]
    assert "0 refused" in compacted("--apply", f"--topic={one}")
    assert f"Shard {shard_of(one, SHARDS)}:" in planned
    left = compacted()
    assert [topic for topic in topics if f"{topic}: rewrite" in left] == [
        each for each in topics if each != one
    ]
    compacted("--apply", processes=at_depth(change=1, deep=2))
    assert verify_folder(VFS, str(data)).problems == []
    assert "rewrite" not in compacted()
