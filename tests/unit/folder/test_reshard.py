"""Resharding: what is refused before anything is done, ids that no two shards give, and real files."""

from __future__ import annotations

import asyncio
import os
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from broker.cli import main
from broker.errors import NotFound, PostdateError
from broker.folder import reshard
from broker.folder.recovery import Manifests, open_manifests
from broker.folder.reshard import Reshard, common_absences, plan_reshard
from broker.folder.shard_folders import open_shard_folders, read_shards, shard_folder
from broker.jobs.reshard import reshard_folder
from broker.jobs.verify import verify_data_dir
from broker.policy import SubscriptionPolicy
from broker.runtime.vfs import LocalVfs
from broker.storage.alive import ABSENCES_MAX, Absence, Alive, read_alive, write_alive
from broker.storage.layout import Layout
from broker.storage.manifest import BrokerImage
from broker.testing.sim_clock import SimClock
from broker.testing.sim_loop import SimLoop, run_sim
from broker.topic_shards import ALL_TOPICS, ID_STRIDE, TopicShard, shard_of
from broker.topics import control
from tests.harness import EARLIEST, Node, Outgoing, small_config

VFS = LocalVfs()
POLICY = SubscriptionPolicy(max_delivery_attempts=1)


def made(
    tmp_path: Path, *topics: str, policy: SubscriptionPolicy = POLICY, shard: TopicShard | None = None
) -> str:
    """Return the folder of a broker that was stopped, with these topics and some messages in each."""
    folder = str(tmp_path / "d") if shard is None else shard_folder(str(tmp_path / "d"), shard.number)

    async def scenario(_: SimLoop, clock: SimClock) -> None:
        config = replace(small_config(data_dir=folder), topic_shard=shard or ALL_TOPICS)
        node = Node(VFS, clock, config).open()  # type: ignore[arg-type]
        for topic in topics:
            await node.create_subscription(topic, "s", position=EARLIEST, policy=policy)
            for index in range(3):
                await node.produce(topic, [Outgoing(b"%d" % index)] * 7)
        await node.stop()

    run_sim(scenario, seed=1)
    return folder


def manifests(folder: str) -> Manifests:
    return open_manifests(VFS, Layout(folder), 0)


def reason_of(folder: str, shards: int, to: str | None = None) -> str:
    with pytest.raises(PostdateError) as caught:
        asyncio.run(reshard_folder(VFS, folder, shards, to))
    return caught.value.reason


def tree(folder: str) -> list[str]:
    return sorted(
        str(path) for path in Path(folder).rglob("*") if path.name != "lock" and "journal" not in str(path)
    )


@pytest.mark.slow
def test_sealed_ledgers_are_linked_and_a_folder_goes_to_several_shards_and_back(tmp_path: Path) -> None:
    folder = made(tmp_path, "orders", "b", "topic9")
    files = list(Path(folder).rglob("*.data"))
    inodes = {path.stat().st_ino for path in files}
    held = [path.open("rb") for path in files]  # so that no new file gets the number of one that is gone
    for shards in (4, 2, 3, 1):
        done = CliRunner().invoke(main, ["reshard", folder, f"--shards={shards}"])
        assert done.exit_code == 0, done.output
        assert f"{folder} has {shards} shard" in done.output and "3 topics" in done.output
        files = list(Path(folder).rglob("*.data"))
        linked = [path for path in files if path.stat().st_ino in inodes]
        assert len(files) == 9 and len(linked) == 6  # the last ledger of each topic still grows
        assert all(path.stat().st_nlink == 1 for path in files)
        folders = [shard_folder(folder, number) for number in range(shards)] if shards > 1 else [folder]
        assert not any(verify_data_dir(VFS, each).problems for each in folders)
        for number, each in enumerate(folders):
            topics = manifests(each).root.topics.values()
            assert shards == 1 or all(shard_of(topic, shards) == number for topic in topics)
    for file in held:
        file.close()


@pytest.mark.slow
def test_another_folder_is_made_and_the_first_one_stays(tmp_path: Path) -> None:
    folder = made(tmp_path, "orders", "b", "topic9")
    before, to = tree(folder), str(tmp_path / "new")
    for shards, source, target in ((3, folder, to), (1, to, str(tmp_path / "back"))):
        asyncio.run(reshard_folder(VFS, source, shards, target))
        assert (read_shards(VFS, target) or 1) == shards
    assert [each for each in tree(folder) if each not in before] == []
    assert not verify_data_dir(VFS, str(tmp_path / "back")).problems
    assert reason_of(folder, 3, to) == "RESTORE_NOT_EMPTY"


@pytest.mark.slow
def test_what_cannot_be_resharded_is_refused_and_stays_as_it_is(tmp_path: Path) -> None:
    folder = made(tmp_path, "orders", "b", "topic9")
    assert reason_of(folder, 1) == "SAME_SHARD_COUNT"
    lock = VFS.lock(f"{folder}/lock")
    assert lock is not None
    assert reason_of(folder, 2) == "DATA_DIR_LOCKED"
    lock.close()
    asyncio.run(reshard_folder(VFS, folder, 2))
    assert reason_of(folder, 2) == "SAME_SHARD_COUNT"
    supervisor = open_shard_folders(VFS, folder, 2)
    assert reason_of(folder, 3) == "DATA_DIR_LOCKED"
    supervisor.close()
    backup = Path(shard_folder(folder, 1), "backups", "20261121T205812345Z")
    backup.mkdir(parents=True)
    before = tree(folder)
    assert reason_of(folder, 3) == "BACKUPS_IN_THE_WAY"
    assert tree(folder) == before
    for empty in (tmp_path / "nothing", tmp_path / "empty"):
        with pytest.raises(NotFound):
            asyncio.run(reshard_folder(VFS, str(empty), 2))
        (tmp_path / "empty").mkdir(exist_ok=True)
    (tmp_path / "node" / "shards").mkdir(parents=True)
    assert reason_of(str(tmp_path / "node"), 2) == "CLUSTER_FOLDER"


def test_dead_letters_that_would_part_from_their_topic_are_named(tmp_path: Path) -> None:
    place = next(name for name in ("x", "y", "z") if shard_of(name, 2) != shard_of("orders", 2))
    folder = made(
        tmp_path, "orders", policy=SubscriptionPolicy(max_delivery_attempts=1, dead_letter_topic=place)
    )
    before = tree(folder)
    with pytest.raises(PostdateError, match=f"'{place}' of 'orders'") as caught:
        asyncio.run(reshard_folder(VFS, folder, 2))
    assert caught.value.reason == "DEAD_LETTER_TOPIC_ELSEWHERE"
    assert tree(folder) == before


def test_dead_letters_that_lie_elsewhere_since_before_the_name_changed_are_named_too(tmp_path: Path) -> None:
    place = next(name for name in ("x", "y", "z") if shard_of(name, 2) != shard_of("orders", 2))
    folder = str(tmp_path / "d")

    async def scenario(_: SimLoop, clock: SimClock) -> None:
        node = Node(VFS, clock, small_config(data_dir=folder)).open()  # type: ignore[arg-type]
        policy = SubscriptionPolicy(max_delivery_attempts=1, dead_letter_topic=place)
        subscription = await node.create_subscription("orders", "s", policy=policy)
        inbox = await node.subscribe("orders", "s")
        await node.produce("orders", [Outgoing(b"1")])
        await inbox.nack([(await inbox.wait(1))[0].position])
        await asyncio.sleep(1)
        assert subscription.dead_letters
        named = {"dead_letter_topic"}
        await control.update_policy(node.topic("orders"), subscription, SubscriptionPolicy(), named)
        await node.stop()

    run_sim(scenario, seed=1)
    assert reason_of(folder, 2) == "DEAD_LETTER_TOPIC_ELSEWHERE"


@pytest.mark.slow
def test_no_two_shards_give_the_same_ids_from_the_first_start_on(tmp_path: Path) -> None:
    names = {number: next(name for name in "abcdefgh" if shard_of(name, 2) == number) for number in (0, 1)}
    open_shard_folders(VFS, str(tmp_path / "d"), 2).close()
    folders = [made(tmp_path, names[number], shard=TopicShard(number, 2)) for number in (0, 1)]
    asyncio.run(reshard_folder(VFS, str(tmp_path / "d"), 1))
    assert sorted(manifests(str(tmp_path / "d")).root.topics.values()) == sorted(names.values())
    assert not any(map(os.path.exists, folders))


@pytest.mark.slow
def test_shards_that_gave_the_same_ids_are_refused(tmp_path: Path) -> None:
    open_shard_folders(VFS, str(tmp_path / "d"), 2).close()
    for number in (0, 1):
        (tmp_path / "d" / f"shard-{number:04}").rmdir()
        (tmp_path / str(number)).mkdir()
        Path(made(tmp_path / str(number), f"topic{number}")).rename(tmp_path / "d" / f"shard-{number:04}")
    assert reason_of(str(tmp_path / "d"), 3) == "SHARDS_SHARE_IDS"


def test_each_new_shard_goes_on_above_all_ids_and_apart_from_the_others(tmp_path: Path) -> None:
    source = manifests(made(tmp_path, "orders", "b"))
    plans = plan_reshard([source], 3)
    assert [plan.root.next_ledger_id for plan in plans] == [number * ID_STRIDE + 1 for number in (1, 2, 3)]
    assert {plan.root.checkpoint_lsn for plan in plans} == {source.root.checkpoint_lsn}
    assert plan_reshard([source], 1)[0].root.next_ledger_id == source.root.next_ledger_id
    source.root = type(source.root)("", 1, {}, 1, (1 << 48) - ID_STRIDE, 1)
    with pytest.raises(PostdateError) as caught:
        plan_reshard([source], 2)
    assert caught.value.reason == "LEDGER_IDS_EXHAUSTED"
    for shards in (3, 4):  # the last one needs a whole range, too
        source.root = type(source.root)("", 1, {}, 1, (1 << 48) - shards * ID_STRIDE + 1, 1)
        plan_reshard([source], shards - 1)
        with pytest.raises(PostdateError):
            plan_reshard([source], shards)


def test_only_a_time_in_which_no_shard_was_there_is_an_absence_of_all() -> None:
    one = Alive(50, (Absence(10, 20), Absence(30, 40)))
    assert common_absences([one]) == one
    assert common_absences([one, Alive(60, (Absence(15, 35),))]) == Alive(
        60, (Absence(15, 20), Absence(30, 35))
    )
    assert common_absences([one, Alive(0)]) == Alive(50)
    assert common_absences([one, Alive(0, (Absence(20, 30),))]) == Alive(50), "a moment is no absence"


def test_the_newest_common_absences_are_kept_and_no_more() -> None:
    """Each of two shards may have been away so often that there are more times without both."""
    one = Alive(0, tuple(Absence(20 * n, 20 * n + 15) for n in range(ABSENCES_MAX)))
    two = Alive(0, tuple(Absence(20 * n + 10, 20 * n + 25) for n in range(ABSENCES_MAX)))
    kept = common_absences([one, two]).absences
    assert len(kept) == ABSENCES_MAX and kept[-1] == Absence(20 * ABSENCES_MAX - 10, 20 * ABSENCES_MAX - 5)


@pytest.mark.slow
def test_what_was_known_of_absences_goes_to_each_new_shard(tmp_path: Path) -> None:
    folder = made(tmp_path, "orders", "b", "topic9")
    write_alive(VFS, Layout(folder).alive, Alive(50, (Absence(10, 20),)), durable=True)
    work = Reshard(VFS, folder, 2)
    work.begin()
    work.run()
    work.close()
    for number in (0, 1):
        found = read_alive(VFS, Layout(shard_folder(folder, number)).alive)
        assert found == Alive(50, (Absence(10, 20),))


@pytest.mark.slow
def test_a_damaged_record_of_absences_is_of_a_shard_that_may_always_have_been_there(tmp_path: Path) -> None:
    folder = made(tmp_path, "orders", "b", "topic9")
    asyncio.run(reshard_folder(VFS, folder, 2))
    write_alive(VFS, Layout(shard_folder(folder, 0)).alive, Alive(50, (Absence(10, 20),)), durable=True)
    Path(Layout(shard_folder(folder, 1)).alive).write_bytes(b"damaged")
    work = Reshard(VFS, folder, 1)
    work.begin()
    work.run()
    work.close()
    assert read_alive(VFS, Layout(folder).alive) == Alive(50)


def test_a_new_shard_was_there_for_as_long_as_any_of_the_old_ones(tmp_path: Path) -> None:
    root = BrokerImage("", 1, {}, 1, 1, 0)
    sources = [Manifests(replace(root, last_alive_ms=alive_ms)) for alive_ms in (5, 9, 7)]
    for shards in (1, 2):
        assert {plan.root.last_alive_ms for plan in plan_reshard(sources, shards)} == {9}


@pytest.mark.parametrize("kind", ["topics", "ledgers"])
def test_either_kind_of_ids_alone_is_refused(tmp_path: Path, kind: str) -> None:
    sources = []
    for number, topic in enumerate(("orders", "b")):
        (tmp_path / topic).mkdir()
        source = manifests(made(tmp_path / topic, topic))
        (image,) = source.topics
        if kind == "topics":
            ledgers = [
                replace(ledger, capture=replace(ledger.capture, ledger_id=ledger.ledger_id + 100 * number))
                for ledger in image.ledgers
            ]
            source.topics[:] = [replace(image, ledgers=type(image.ledgers)(ledgers))]
        else:
            source.topics[:] = [replace(image, topic_id=image.topic_id + number)]
        sources.append(source)
    with pytest.raises(PostdateError) as caught:
        plan_reshard(sources, 1)
    assert caught.value.reason == "SHARDS_SHARE_IDS"


@pytest.mark.slow
def test_the_command_finishes_what_was_cut_once_all_was_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = made(tmp_path, "orders", "b", "topic9")
    work = Reshard(VFS, folder, 2)
    work.begin()
    with monkeypatch.context() as cut:
        cut.setattr(reshard, "settle_shard_folders", lambda *_: None)
        work.run()
    work.close()
    with pytest.raises(PostdateError) as caught:
        read_shards(VFS, folder)
    assert caught.value.reason == "RESHARD_UNFINISHED"
    assert reason_of(folder, 2) == "SAME_SHARD_COUNT"
    assert read_shards(VFS, folder) == 2
    assert {path.name for path in Path(folder).iterdir()} == {
        "lock",
        "shard-0000",
        "shard-0001",
        "shards.json",
    }


@pytest.mark.slow
def test_nobody_opens_a_folder_or_its_shards_during_a_reshard(tmp_path: Path) -> None:
    folder = made(tmp_path, "orders", "b", "topic9")
    asyncio.run(reshard_folder(VFS, folder, 2))
    work = Reshard(VFS, folder, 3, str(tmp_path / "new"))
    folders = work.begin()
    assert VFS.lock(Layout(folder).lock) is None
    work.run()
    assert all(VFS.lock(Layout(each).lock) is None for each in (folder, *folders))
    work.close()
    open_shard_folders(VFS, folder, 2).close()


@pytest.mark.slow
def test_backups_of_a_shard_are_in_nobodys_way_where_its_folder_stays(tmp_path: Path) -> None:
    folder = made(tmp_path, "orders", "b", "topic9")
    asyncio.run(reshard_folder(VFS, folder, 2))
    Path(shard_folder(folder, 1), "backups", "20261121T205812345Z").mkdir(parents=True)
    asyncio.run(reshard_folder(VFS, folder, 3, str(tmp_path / "new")))
    assert read_shards(VFS, str(tmp_path / "new")) == 3


def test_a_folder_that_holds_more_than_its_checkpoint_is_not_resharded(tmp_path: Path) -> None:
    folder = str(tmp_path / "d")

    async def scenario(_: SimLoop, clock: SimClock) -> None:
        node = Node(VFS, clock, small_config(data_dir=folder)).open()  # type: ignore[arg-type]
        await node.produce("orders", [Outgoing(b"1")])
        node.abandon()
        node.broker._let_go()

    run_sim(scenario, seed=1)
    work = Reshard(VFS, folder, 2)
    work.begin()
    with pytest.raises(PostdateError, match="checkpoint"):
        work.run()
    work.close()
    asyncio.run(reshard_folder(VFS, folder, 2))  # which writes one
    assert read_shards(VFS, folder) == 2
