"""The folder around those of shards: made once, for one number of them."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner

from broker.cli import main
from broker.cluster.creation import Cluster
from broker.errors import Corrupt, Fenced, Refused
from broker.folder.shard_folders import (
    check_shards,
    note_begun,
    open_shard_folders,
    prepare_folder,
    read_shards,
    refuse_shard_folders,
    settle_shard_folders,
    shard_folder,
    write_shards,
)
from broker.node.member import member_config
from broker.runtime.vfs import LocalVfs
from broker.storage.layout import Layout
from tests.configs import broker_config

VFS = LocalVfs()


@pytest.fixture
def folder(tmp_path: Path) -> str:
    return str(tmp_path / "d")


def test_a_folder_is_made_for_a_number_of_shards_and_opened_for_no_other(folder: str) -> None:
    open_shard_folders(VFS, folder, 3).close()
    assert read_shards(VFS, folder) == 3
    assert all(Path(shard_folder(folder, number)).is_dir() for number in range(3))
    open_shard_folders(VFS, folder, 3).close()
    for number in (1, 2, 4):
        with pytest.raises(Refused, match=r"--shards 3.*postdate-broker reshard") as caught:
            check_shards(VFS, folder, number)
        assert caught.value.reason == "OTHER_SHARD_COUNT"
    with pytest.raises(Refused):
        open_shard_folders(VFS, folder, 2)
    open_shard_folders(VFS, folder, 3).close()  # a refusal keeps no lock


def test_a_folder_of_a_broker_without_shards_is_not_taken_over(folder: str) -> None:
    Path(folder, "journal").mkdir(parents=True)
    with pytest.raises(Refused, match="--shards 1"):
        open_shard_folders(VFS, folder, 2)
    assert read_shards(VFS, folder) == 0
    check_shards(VFS, folder, 1)


def refused_start(folder: str, *settings: str) -> str:
    started = CliRunner().invoke(main, ["serve", f"--data-dir={folder}", *settings])
    assert started.exit_code == 1
    return started.stderr


@pytest.mark.parametrize("made_of", ["broker.manifest", "journal", "topics", "shards.json"])
def test_a_folder_of_a_broker_without_a_cluster_is_no_node_s(folder: str, made_of: str) -> None:
    Path(folder, made_of).mkdir(parents=True)
    with pytest.raises(Fenced) as caught:
        prepare_folder(VFS, folder, in_cluster=True)
    assert caught.value.reason == "DATA_DIR_OF_ANOTHER_SHARD"
    # Before anything of the cluster is read or made.
    cluster = f"--cluster-store=file://{folder}-store", "--cluster-nodes=a=127.0.0.1:1", "--node=a"
    assert "to a broker without a cluster" in refused_start(folder, *cluster)
    assert [path.name for path in Path(folder).iterdir()] == [made_of]


@pytest.mark.parametrize("shards", [1, 2])
def test_a_folder_of_a_node_is_not_of_a_broker_without_a_cluster(folder: str, shards: int) -> None:
    node = f"{folder}/shards/0"
    assert member_config(broker_config(data_dir=folder), Cluster("0" * 32, 1, 10_000), 0).data_dir == node
    Path(node).mkdir(parents=True)
    prepare_folder(VFS, folder, in_cluster=True)
    assert "to a node of a cluster" in refused_start(
        folder, f"--shards={shards}", "--grpc-address=127.0.0.1:0", "--http-address=127.0.0.1:0"
    )
    assert {path.name for path in Path(folder).iterdir()} <= {"shards", "lock"}


def fill_one_shard(folder: str) -> None:
    layout = Layout(folder)
    for each in (layout.journal, layout.topics, layout.staging):
        Path(each).mkdir(parents=True)
        Path(each, "1").write_bytes(b"stored")
    for each in (layout.manifest, layout.alive):
        Path(each).write_bytes(b"stored")


def tree(folder: str) -> dict[str, bytes]:
    files = [path for path in Path(folder).rglob("*") if path.is_file() and path.name != "lock"]
    return {str(path): path.read_bytes() for path in files}


def open_as(folder: str, shards: int) -> None:
    if shards == 1:
        prepare_folder(VFS, folder)
    else:
        open_shard_folders(VFS, folder, shards).close()


@pytest.mark.parametrize("shards", [1, 2, 3])
@pytest.mark.parametrize("part", ["broker.manifest", "journal", "topics", "alive", "staging"])
def test_a_marker_that_was_copied_beside_a_broker_without_shards_removes_nothing(
    folder: str, shards: int, part: str
) -> None:
    fill_one_shard(folder)
    for each in Path(folder).iterdir():
        if each.name != part:
            each.rename(Path(folder).parent / f"aside-{each.name}")
    write_shards(VFS, folder, 2)
    before = tree(folder)
    with pytest.raises(Refused, match="Nothing was changed") as caught:
        open_as(folder, shards)
    assert caught.value.reason == "DATA_DIR_MIXED"
    done = CliRunner().invoke(main, ["reshard", folder, "--shards=3"])
    assert done.exit_code == 1 and "shards.json" in done.output, done.output
    assert tree(folder) == before


@pytest.mark.parametrize("shards", [1, 3])
def test_a_marker_that_promises_what_is_not_there_removes_nothing(folder: str, shards: int) -> None:
    Path(folder).mkdir()
    for number in range(2):
        fill_one_shard(shard_folder(folder, number))
    write_shards(VFS, folder, shards, is_moving=True)
    before = tree(folder)
    with pytest.raises(Corrupt, match="is missing"):
        open_as(folder, shards)
    assert tree(folder) == before


@pytest.mark.parametrize("flags", [{}, {"is_joining": True}, {"is_moving": True}])
def test_a_start_with_another_number_removes_nothing(folder: str, flags: dict[str, bool]) -> None:
    open_shard_folders(VFS, folder, 2).close()
    for name in ("shard-0000", "shard-0000.new", "shard-0001.new", "shard-0005"):
        fill_one_shard(f"{folder}/{name}")
    if flags:
        fill_one_shard(folder)
    write_shards(VFS, folder, 2, **flags)
    before = tree(folder)
    for shards in (1, 3):
        with pytest.raises(Refused) as caught:
            open_as(folder, shards)
        assert caught.value.reason == "OTHER_SHARD_COUNT"
        assert tree(folder) == before


def test_what_a_reshard_left_is_removed_with_a_line_for_each(
    folder: str, caplog: pytest.LogCaptureFixture
) -> None:
    open_shard_folders(VFS, folder, 2).close()
    fill_one_shard(folder)
    fill_one_shard(f"{folder}/shard-0000.new")
    write_shards(VFS, folder, 2, is_joining=True)
    before = set(os.listdir(folder))
    with caplog.at_level("INFO"):
        settle_shard_folders(VFS, folder)
    gone = before - set(os.listdir(folder))
    assert gone == {"broker.manifest", "journal", "topics", "alive", "staging", "shard-0000.new"}
    lines = [str(vars(record)) for record in caplog.records]
    assert len(lines) == len(gone) and all(any(f"{folder}/{name}" in line for line in lines) for name in gone)
    assert json.loads(Path(folder, "shards.json").read_text()) == {"format": 1, "shards": 2}


@pytest.mark.parametrize("left", ["nothing", "a folder", "empty folders"])
def test_a_shard_that_served_and_holds_nothing_is_lost_and_not_begun_anew(folder: str, left: str) -> None:
    open_shard_folders(VFS, folder, 2).close()
    for number in range(2):
        fill_one_shard(shard_folder(folder, number))
    note_begun(VFS, folder)
    open_as(folder, 2)
    lost = shard_folder(folder, 1)
    shutil.rmtree(lost)
    if left != "nothing":
        Path(lost).mkdir()
    if left == "empty folders":
        Path(lost, "journal").mkdir()
    before = tree(folder)
    with pytest.raises(Corrupt, match="served before") as caught:
        open_as(folder, 2)
    assert caught.value.path == lost
    for command in (["verify"], ["audit", "--engine=inline"], ["reshard", "--shards=3"]):
        done = CliRunner().invoke(main, [command[0], folder, *command[1:]])
        assert done.exit_code and "served before" in done.output, done.output
    done = CliRunner().invoke(main, ["compact", f"--offline={folder}", "--engine=inline", "--apply"])
    assert done.exit_code and "served before" in done.output, done.output
    assert tree(folder) == before
    write_shards(VFS, folder, 2)  # as the advice says
    open_as(folder, 2)


def test_two_supervisors_do_not_share_a_folder(folder: str) -> None:
    lock = open_shard_folders(VFS, folder, 2)
    with pytest.raises(Fenced):
        open_shard_folders(VFS, folder, 2)
    lock.close()


@pytest.mark.parametrize(
    "marker",
    [
        b"",
        b"{",
        b"[]",
        b'{"format": 2, "shards": 3}',
        b'{"format": 1, "shards": "3"}',
        b'{"format": 1, "shards": 1}',
        b'{"format": 1, "shards": 1, "joining": true}',
        b'{"format": 1, "shards": 2, "joining": 1}',
        b'{"format": 1, "shards": 2, "moving": true, "joining": true}',
    ],
)
def test_a_marker_that_cannot_be_read_is_no_missing_one(folder: str, marker: bytes) -> None:
    Path(folder).mkdir()
    Path(folder, "shards.json").write_bytes(marker)
    for number in (1, 2, 3):
        with pytest.raises(Corrupt):
            check_shards(VFS, folder, number)


def test_commands_on_the_folder_around_name_the_folders_within(folder: str) -> None:
    open_shard_folders(VFS, folder, 2).close()
    with pytest.raises(Refused, match=r"shard-0000 to .*shard-0001") as caught:
        refuse_shard_folders(VFS, folder)
    assert caught.value.reason == "SHARD_NOT_NAMED"
    refuse_shard_folders(VFS, shard_folder(folder, 0))
    done = CliRunner().invoke(main, ["serve", f"--data-dir={folder}"])
    assert done.exit_code == 1, done.output
    assert "shard" in done.output and "Traceback" not in done.output, done.output


def test_the_marker_is_what_it_says(folder: str) -> None:
    open_shard_folders(VFS, folder, 2).close()
    assert json.loads(Path(folder, "shards.json").read_text()) == {"format": 1, "shards": 2}
