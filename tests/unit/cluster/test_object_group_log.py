"""A log of groups in an object store: what its appends make of faults, and whom it refuses."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from broker.cluster.group_head import GroupKind, Shard, decode_head
from broker.cluster.group_objects import Trimmed
from broker.cluster.lease import OwnerLease, SystemLeaseClock
from broker.cluster.object_group_log import LOG_ATTEMPT, REMOVED_TOGETHER, ObjectGroupLog
from broker.cluster.object_store import ObjectInfo, ObjectStore, StoreFailed
from broker.cluster.stores import open_store
from broker.errors import Corrupt, Fenced
from broker.runtime.vfs import WriteFailed
from broker.storage.record_types import RecordType
from tests.cutting_proxy import Cut, CuttingProxy
from tests.depth import at_depth
from tests.s3_server import CREDENTIALS, need_server, s3_server, store_url
from tests.unit.cluster.faulty_store import CreateFault, FaultyStore
from tests.unit.cluster.object_logs import (
    LEASE_MS,
    SHARD,
    create_log,
    make_log,
    object_store,
    open_object_log,
)

FOLDER = "shards/3/log"
LOSSES = [CreateFault.REQUEST_LOST, CreateFault.ANSWER_LOST, CreateFault.LATE, CreateFault.SAYS_EXISTS]


@pytest.fixture
async def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[FaultyStore]:
    async with object_store("memory", tmp_path, monkeypatch) as objects:
        faulty = FaultyStore(objects)
        await create_log(faulty, SHARD)
        faulty.created.clear()
        yield faulty


async def append(log: ObjectGroupLog, body: bytes) -> int:
    index = log.next_index
    await log.append(index, [(2, [body], len(body))])
    return index


def bodies(log: ObjectGroupLog, from_index: int = 1) -> list[bytes]:
    return [
        bytes(record.body)
        for group in log.read(from_index)
        for record in group.records
        if record.type != RecordType.LOG_BLANK
    ]


async def names(store: ObjectStore) -> list[int]:
    return sorted([int(info.name.rpartition("/")[2], 16) async for info in store.objects(FOLDER)])


@pytest.mark.parametrize("second", LOSSES)
@pytest.mark.parametrize("first", LOSSES)
async def test_an_append_without_an_answer_is_repeated_as_it_was(
    store: FaultyStore, first: CreateFault, second: CreateFault
) -> None:
    log = await open_object_log(store)
    store.create_faults.extend([first, second])
    store.failing_reads = 1
    await append(log, b"once")
    assert len(set(store.created)) == 1, "same index, same bytes (CLUSTER-2)"
    await store.arrive()
    store.failing_reads = 0
    await append(log, b"twice")
    assert bodies(await open_object_log(store)) == [b"once", b"twice"]
    assert await names(store) == [1, 2, 3]


@pytest.mark.parametrize("fault", [None, *LOSSES])
async def test_whoever_finds_another_ones_group_is_fenced(
    store: FaultyStore, fault: CreateFault | None
) -> None:
    first, second = await open_object_log(store, "a"), await open_object_log(store, "b")
    await first.take_over(2, epoch=1)
    assert await second.follow() is not None
    await second.take_over(3, epoch=2)
    store.create_faults.append(fault)
    with pytest.raises(Fenced, match="Node 'b' stored a group of epoch 2") as caught:
        await append(first, b"from a zombie")
    assert caught.value.reason == "JOURNAL_FENCED"
    assert caught.value.facts == {"node": "b", "epoch": 2}
    await store.arrive()
    await append(second, b"from the owner")
    assert bodies(await open_object_log(store)) == [b"from the owner"]


async def test_a_group_that_arrives_late_behind_a_fence_is_not_stored(store: FaultyStore) -> None:
    first, second = await open_object_log(store, "a"), await open_object_log(store, "b")
    store.create_faults.append(CreateFault.LATE)
    appending = asyncio.ensure_future(append(first, b"late"))
    while not store.created:
        await asyncio.sleep(0)
    await second.take_over(2, epoch=1)
    await store.arrive()
    with pytest.raises(Fenced):
        await appending
    assert bodies(await open_object_log(store)) == []


async def test_of_two_whose_groups_look_alike_one_wins(store: FaultyStore) -> None:
    logs = [await open_object_log(store, "a") for _ in range(2)]
    outcomes = await asyncio.gather(*(log.take_over(2, epoch=1) for log in logs), return_exceptions=True)
    assert sorted(isinstance(outcome, Fenced) for outcome in outcomes) == [False, True]


async def test_an_owner_that_was_fenced_has_no_lease(store: FaultyStore) -> None:
    lease = OwnerLease(SystemLeaseClock(), 60_000)
    log = ObjectGroupLog(store, SHARD, "a", lease)
    await log.open(2, 0)
    assert not lease.holds()
    await log.take_over(2, epoch=1)
    assert lease.holds()
    other = await open_object_log(store, "b")
    await other.take_over(3, epoch=2)
    with pytest.raises(Fenced):
        await append(log, b"")
    assert not lease.holds()


async def test_an_owner_that_finds_what_is_no_group_where_its_own_was_to_go_has_no_lease(
    store: FaultyStore,
) -> None:
    lease = OwnerLease(SystemLeaseClock(), LEASE_MS)
    log = await opened(store, lease)
    await log.take_over(2, 1)
    assert lease.holds()
    await store.create_behind(f"{FOLDER}/{3:016x}", b"no group at all")
    with pytest.raises(Fenced, match="is no valid group"):
        await append(log, b"lost")
    assert not lease.holds()


async def test_an_owner_that_has_read_another_ones_group_has_no_lease(store: FaultyStore) -> None:
    lease = OwnerLease(SystemLeaseClock(), LEASE_MS)
    log, other = await opened(store, lease), await open_object_log(store, "other")
    await log.take_over(2, 1)
    await other.follow()
    await other.take_over(3, 2)
    await log.follow()
    assert lease.holds()
    with pytest.raises(Fenced, match="goes on with lsn 4"):
        await log.append(3, [(2, [b"x"], 1)])
    assert not lease.holds()


async def opened(store: ObjectStore, lease: OwnerLease) -> ObjectGroupLog:
    log = ObjectGroupLog(store, SHARD, "owner", lease, repeat_pause_seconds=0.001)
    await log.open(1, 0)
    await log.follow()
    return log


async def test_a_trim_that_fails_leaves_nothing_under_way_and_is_repeated(store: FaultyStore) -> None:
    log = await open_object_log(store, "a")
    await log.take_over(2, 1)
    for number in range(40):
        await append(log, b"%d" % number)
    before, removed = await names(store), list[str]()

    class Failing(FaultyStore):
        async def remove(self, name: str) -> None:
            removed.append(name)
            await asyncio.sleep(0)
            if len(removed) > 5:
                raise StoreFailed("away")
            await super().remove(name)

    trimming = ObjectGroupLog(Failing(store), SHARD, "b", OwnerLease(SystemLeaseClock(), LEASE_MS))
    with pytest.raises(StoreFailed):
        await trimming.trim(43)
    count = len(removed)
    for _ in range(50):
        await asyncio.sleep(0)
    assert len(removed) == count and len(asyncio.all_tasks()) == 1
    left = await names(store)
    assert left[:2] == [1, 2] and set(before) - set(left) <= set(range(3, 3 + REMOVED_TOGETHER + 5)), (
        "oldest first"
    )
    await log.trim(43)
    assert await names(store) == [1, 2, 42]


async def test_a_hole_in_the_log_is_never_read_over(store: FaultyStore) -> None:
    log = await open_object_log(store, "a")
    await log.take_over(2, 1)
    for number in range(20):
        await append(log, b"%d" % number)
    await store.remove(f"{FOLDER}/{9:016x}")
    for from_index in (1, 5):
        with pytest.raises(Trimmed, match="no group with lsn 9"):
            bodies(log, from_index)
    assert bodies(log, 10) == [b"%d" % number for number in range(7, 20)]
    await store.remove(f"{FOLDER}/{22:016x}")
    with pytest.raises(Trimmed, match="no group with lsn 22"):
        bodies(log, 10)


async def test_a_store_that_says_exists_of_nothing_is_asked_again_after_a_pause(store: FaultyStore) -> None:
    log = ObjectGroupLog(
        store, SHARD, "a", OwnerLease(SystemLeaseClock(), LEASE_MS), repeat_pause_seconds=3_600
    )
    await log.open(1, 0)
    await log.follow()
    store.create_faults.extend([CreateFault.SAYS_EXISTS] * 50)
    taking = log.take_over(2, 1)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(taking, 0.3)
    assert len(store.created) == 1


async def test_a_store_that_shows_the_first_group_and_lists_nothing_is_told(store: FaultyStore) -> None:
    class Forgetful(FaultyStore):
        async def objects(self, folder: str, *, after: str = "") -> AsyncIterator[ObjectInfo]:
            nothing: list[ObjectInfo] = []
            for info in nothing:
                yield info

    log = ObjectGroupLog(Forgetful(store), SHARD, "a", OwnerLease(SystemLeaseClock(), LEASE_MS))
    with pytest.raises(Corrupt, match="does not list"):
        await log.open(1, 0)


async def test_an_owner_that_resigned_has_no_lease_and_says_so(store: FaultyStore) -> None:
    lease = OwnerLease(SystemLeaseClock(), 60_000)
    log = ObjectGroupLog(store, SHARD, "a", lease)
    await log.open(2, 0)
    await log.take_over(2, epoch=1)
    resigning = log.resign(3, to="b")
    assert not lease.holds(), "before it is stored"
    await resigning
    assert not lease.holds()
    follower = make_log(store, "b")
    await follower.open(1, 0)
    entries = []
    while (entry := await follower.follow()) is not None:
        entries.append((entry.head.kind, entry.head.node, entry.head.epoch, entry.resigned_to))
    assert entries == [
        (GroupKind.TAKE_OVER, "", 0, None),
        (GroupKind.TAKE_OVER, "a", 1, None),
        (GroupKind.RESIGN, "a", 1, "b"),
    ]


async def test_blanks_take_an_lsn_and_have_no_record(store: FaultyStore) -> None:
    log = await open_object_log(store)
    await log.take_over(2, epoch=1)
    await log.append(3, [(RecordType.LOG_BLANK, (), 0)])
    await append(log, b"a record")
    assert decode_head(await store.read(f"{FOLDER}/{3:016x}"), "").kind is GroupKind.HEARTBEAT
    assert (log.next_index, bodies(log)) == (5, [b"a record"])


async def test_fences_stay_and_what_came_late_goes_with_the_next_trim(store: FaultyStore) -> None:
    log = await open_object_log(store)
    await log.take_over(2, epoch=1)
    for number in range(3, 8):
        await append(log, b"%d" % number)
    late = await store.read(f"{FOLDER}/{4:016x}")
    await log.take_over(8, epoch=2)
    await append(log, b"9")
    await log.trim(9)
    assert await names(store) == [1, 2, 8, 9]
    await store.create(f"{FOLDER}/{4:016x}", late)
    await log.trim(9)
    assert await names(store) == [1, 2, 8, 9], "CLUSTER-4, CLUSTER-17"


async def test_a_reader_whose_groups_were_trimmed_finds_out(store: FaultyStore) -> None:
    log = await open_object_log(store)
    follower = make_log(store, "b")
    await follower.open(1, 0)
    await follower.follow()
    assert not await follower.is_cut_off()
    for number in range(2, 9):
        await append(log, b"%d" % number)
    assert not await follower.is_cut_off()
    await log.trim(7)
    assert await follower.follow() is None and await follower.is_cut_off()
    with pytest.raises(Corrupt, match="no group with lsn 2 any more"):
        list(log.read(2))


@pytest.mark.slow
async def test_groups_are_read_in_order_however_they_arrive(store: FaultyStore) -> None:
    log = await open_object_log(store)
    expected = [b"%d" % number for number in range(40)]
    for body in expected:
        await append(log, body)
    assert bodies(log) == expected
    assert bodies(log, 20) == expected[18:]


@pytest.mark.slow
async def test_an_owner_that_opens_its_folder_repeats_reads_that_fail_in_passing(store: FaultyStore) -> None:
    """Else it ends, and nobody owns the shard until it has started anew and has waited for a lease."""
    log = await open_object_log(store)
    expected = [b"%d" % number for number in range(3)]
    for body in expected:
        await append(log, body)
    store.failing_reads, store.failing_lists = 2, 2
    found = [bytes(record.body) async for group in log.groups(2) for record in group.records]
    assert found == expected
    assert (store.failing_reads, store.failing_lists) == (0, 0)


async def test_a_log_without_its_first_group_is_refused(store: FaultyStore) -> None:
    await store.remove(f"{FOLDER}/{1:016x}")
    with pytest.raises(Corrupt, match="no first group"):
        await make_log(store).open(1, 0)


async def test_a_folder_that_is_ahead_of_the_log_is_refused(store: FaultyStore) -> None:
    log = await open_object_log(store)
    await append(log, b"2")
    await make_log(store).open(3, 0)
    with pytest.raises(Corrupt, match="the data directory contains lsn 3: it belongs to another journal"):
        await make_log(store).open(4, 0)


@pytest.mark.parametrize("other", [Shard(bytes(16), 3, 8), Shard(SHARD.cluster, 3, 9)])
async def test_a_log_of_another_cluster_is_refused(store: FaultyStore, other: Shard) -> None:
    log = make_log(store, shard=other)
    with pytest.raises(Corrupt, match="is of shard 3 of 8"):
        await log.open(1, 0)


async def test_an_object_that_is_no_group_is_refused(store: FaultyStore) -> None:
    await store.create(f"{FOLDER}/README", b"do not touch")
    with pytest.raises(Corrupt, match="Not a group"):
        await make_log(store).open(1, 0)


async def test_epochs_rise_also_for_who_begins_in_the_middle(store: FaultyStore) -> None:
    log = await open_object_log(store)
    await log.take_over(2, epoch=5)
    later = make_log(store, "b")
    await later.open(3, 5)
    assert later.epoch == 5


async def test_an_older_epoch_behind_a_newer_one_is_refused(store: FaultyStore) -> None:
    log, zombie = await open_object_log(store), await open_object_log(store, "zombie")
    await log.take_over(2, epoch=5)
    await store.remove(f"{FOLDER}/{2:016x}")  # as a life-cycle rule would
    await zombie.take_over(2, epoch=3)
    assert log.next_index == 3
    await append(zombie, b"void")
    with pytest.raises(Corrupt, match="epoch 3 follows one of epoch 5"):
        await log.follow()


async def test_closing_gives_up_an_append_whose_outcome_stays_unknown(store: FaultyStore) -> None:
    log = ObjectGroupLog(store, SHARD, "a", OwnerLease(SystemLeaseClock(), 50))
    await log.open(2, 0)
    store.create_faults.extend([CreateFault.REQUEST_LOST] * 1000)
    appending = log.append(2, [(2, [b""], 0)])
    await log.close()
    with pytest.raises(WriteFailed, match="closed before it was known"):
        await appending


async def test_closing_lets_an_append_be_repeated_first(store: FaultyStore) -> None:
    log = await open_object_log(store)
    store.create_faults.extend([CreateFault.REQUEST_LOST] * 3)
    appending = log.append(2, [(2, [b"kept"], 4)])
    await log.close()
    await appending
    assert bodies(await open_object_log(store)) == [b"kept"]


async def test_an_append_goes_on_when_nobody_waits_for_it(store: FaultyStore) -> None:
    log = await open_object_log(store)
    store.hold()
    appending = log.append(2, [(2, [b"kept"], 4)])
    while not store.created:
        await asyncio.sleep(0)
    appending.cancel()
    with pytest.raises(AssertionError, match="one append at a time"):
        log.append(2, [(2, [b"another"], 7)])
    store.work()
    await log.close()
    assert bodies(await open_object_log(store)) == [b"kept"]


async def compete(stores: list[ObjectStore], rng: random.Random, groups: int) -> dict[int, bytes]:
    """Two nodes that append and take over from each other; returns what was answered, by index."""
    answered: dict[int, bytes] = {}
    epoch = 0

    async def own(node: int, count: int) -> None:
        nonlocal epoch
        log = await open_object_log(stores[node], f"node-{node}")
        epoch = max(epoch, log.epoch) + 1
        try:
            index = log.next_index
            await log.take_over(index, epoch)
            for number in range(count):
                body = b"%d.%d.%d" % (node, epoch, number)
                answered[await append(log, body)] = body
        except Fenced:
            return
        finally:
            await log.close()

    left = groups
    while left > 0:
        count = rng.randint(1, 8)
        await asyncio.gather(own(0, count), own(1, rng.randint(1, 8)))
        left -= count
    return answered


async def check_log(store: ObjectStore, answered: dict[int, bytes]) -> None:
    """All that was answered is in the log, where it was answered; and the log has no hole."""
    log = await open_object_log(store, "checker")
    stored = {}
    expected = 1
    for group in log.read(1):
        assert group.first_lsn == expected
        expected += len(group.records)
        for lsn, record in enumerate(group.records, group.first_lsn):
            stored[lsn] = bytes(record.body)
    assert answered.items() <= stored.items()
    assert sum(body != b"" for body in stored.values()) >= len(answered)
    texts = [body for body in stored.values() if body]
    assert len(texts) == len(set(texts)), "nothing twice"


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(at_depth(change=2, deep=5)))
async def test_two_who_compete_over_a_faulty_store_lose_nothing(store: FaultyStore, seed: int) -> None:
    rng = random.Random(seed)
    store.create_faults.extend(rng.choice([None, None, *LOSSES]) for _ in range(100))
    answered = await compete([store, store], rng, groups=60)
    store.create_faults.clear()
    await store.arrive()
    assert len(answered) > 20
    await check_log(store, answered)


@pytest.mark.slow
@pytest.mark.parametrize("server", ["versitygw", pytest.param("minio", marks=pytest.mark.deep)])
async def test_two_who_compete_through_connections_that_are_cut_lose_nothing(
    server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("obstore")
    program = need_server(server)
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    rng = random.Random(1)
    async with s3_server(program, tmp_path) as port:
        store = open_store(store_url(port), LOG_ATTEMPT)
        await create_log(store, SHARD)
        proxies = [CuttingProxy(), CuttingProxy()]
        for proxy in proxies:
            proxy.cuts.extend(rng.choice([None, *Cut]) for _ in range(60))
        async with proxies[0].before(port) as first, proxies[1].before(port) as second:
            stores = [open_store(store_url(through), LOG_ATTEMPT) for through in (first, second)]
            answered = await compete(stores, rng, groups=60)
        assert sum(proxy.cut_count for proxy in proxies) > 40 and len(answered) > 20
        await check_log(store, answered)
