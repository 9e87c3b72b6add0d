"""Uploads, removals and sweeps at the same time never take a chunk from a base."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.cluster import base_plan
from broker.cluster.base_manifest import Base, base_name
from broker.cluster.base_plan import (
    HOUR_MS,
    REST_MS,
    TRUSTED_MS,
    ChunkPlan,
    StoredBase,
    choose_base,
    newest_base,
    plan_retention,
    plan_sweep,
    removable_from_ms,
)
from broker.cluster.object_store import ObjectInfo
from broker.errors import NotFound
from tests.depth import at_depth

DIGESTS = [f"{number:02x}" * 32 for number in range(6)]
BROKERS = ("one", "two")
STEPS = 1_500
SEEDS = at_depth(fast=10, change=20, deep=1_000)


def a_base(lsn: int, broker_id: str = "one", modified_ms: int = 0, tag: str = "a") -> StoredBase:
    return StoredBase(Base(base_name(lsn, tag), "", broker_id, 0, lsn, 1, 1, 1, 1), modified_ms)


class World:
    """A store, and actors who do one call of it after the other while hours pass between."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.now_ms = 0
        self.chunks: dict[str, int] = {}
        self.bases: dict[str, tuple[StoredBase, frozenset[str]]] = {}
        self.removed = self.swept = self.reused = 0
        self._lsns = count(1)
        self._nonces = count(1)

    def is_whole(self) -> bool:
        return all(names <= self.chunks.keys() for _, names in self.bases.values())

    def run(self) -> bool:
        actors: list[Iterator[None]] = []
        for _ in range(STEPS):
            if len(actors) < 4:
                make = self.rng.choice([self.upload, self.upload, self.retain, self.sweep])
                actors.append(make())
            self.now_ms += self.rng.choices((0, HOUR_MS // 5, HOUR_MS, 11 * HOUR_MS), (40, 50, 12, 2))[0]
            actor = self.rng.choice(actors)
            if next(actor, "end") == "end":
                actors.remove(actor)
            if not self.is_whole():
                return False
        return True

    def upload(self) -> Iterator[None]:
        broker_id, lsn, begun_ms = self.rng.choice(BROKERS), next(self._lsns), self.now_ms
        yield
        newest = newest_base((stored for stored, _ in self.bases.values()), broker_id)
        named = frozenset[str]() if newest is None else self.bases[newest.base.name][1]
        yield
        plan = base_plan.ChunkPlan(named, self.listed(), begun_ms, f"{next(self._nonces):08x}")
        names = set()
        for digest in self.rng.sample(DIGESTS, self.rng.randint(1, 4)):
            yield
            choice = plan.choose(digest, 1)
            if not choice.is_stored:
                self.chunks.setdefault(choice.name, self.now_ms)
                plan.note_stored(choice.name, 1)
            self.reused += choice.is_stored
            names.add(choice.name)
        yield
        if self.now_ms - begun_ms <= base_plan.UPLOAD_MS:
            stored = a_base(lsn, broker_id, self.now_ms)
            self.bases[stored.base.name] = stored, frozenset(names)

    def retain(self) -> Iterator[None]:
        now_ms = self.now_ms
        yield
        bases = [stored for stored, _ in self.bases.values()]
        for name in plan_retention(bases, self.rng.choice(BROKERS), now_ms, 1, 0):
            yield
            self.removed += self.bases.pop(name, None) is not None

    def sweep(self) -> Iterator[None]:
        now_ms = self.now_ms
        yield
        named = frozenset[str]().union(*(names for _, names in self.bases.values()))
        yield
        for name in plan_sweep(self.listed(), named, now_ms):
            yield
            self.swept += self.chunks.pop(name, None) is not None

    def listed(self) -> list[ObjectInfo]:
        return [ObjectInfo(name, 1, modified_ms) for name, modified_ms in self.chunks.items()]


@pytest.mark.slow
def test_no_base_ever_lacks_a_chunk() -> None:
    worlds = [World(seed) for seed in range(SEEDS)]
    assert [seed for seed, world in enumerate(worlds) if not world.run()] == []
    for what in ("removed", "swept", "reused"):
        assert sum(getattr(world, what) for world in worlds) > 2 * SEEDS, what


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rule", "name", "value"),
    [
        ("KEEP-1: an upload may take days", "UPLOAD_MS", 99 * HOUR_MS),
        ("KEEP-2: any chunk that is there is relied on", "TRUSTED_MS", 9999 * HOUR_MS),
        ("KEEP-3 and KEEP-4: what is surplus goes at once", "REST_MS", 0),
        (
            "KEEP-5: a name is given again",
            "ChunkPlan",
            lambda named, present, now_ms, nonce: ChunkPlan(named, present, now_ms, "00000000"),
        ),
        ("KEEP-3: the newest may go", "removable_from_ms", lambda bases, name: 0),
    ],
)
def test_without_any_of_the_rules_one_does(
    monkeypatch: pytest.MonkeyPatch, rule: str, name: str, value: object
) -> None:
    monkeypatch.setattr(base_plan, name, value)
    assert not all(World(seed).run() for seed in range(100)), rule


def chunk(digest: str, age_ms: int, nonce: str = "0000000b", size: int = 1) -> ObjectInfo:
    return ObjectInfo(f"{digest}-{nonce}", size, 1_000 * HOUR_MS - age_ms)


NOW_MS = 1_000 * HOUR_MS
OLD, YOUNG = TRUSTED_MS, TRUSTED_MS - 1
NAMED, NEW = f"{DIGESTS[0]}-0000000b", f"{DIGESTS[0]}-0000000a"


@pytest.mark.parametrize(
    ("present", "named", "expected"),
    [
        ([], False, (NEW, False)),
        ([chunk(DIGESTS[0], YOUNG)], False, (NAMED, True)),
        ([chunk(DIGESTS[0], OLD)], False, (NEW, False)),
        ([chunk(DIGESTS[0], OLD)], True, (NAMED, True)),
        ([chunk(DIGESTS[0], YOUNG, size=2)], True, (NEW, False)),
        ([chunk(DIGESTS[0], OLD, "0000000c"), chunk(DIGESTS[0], YOUNG)], False, (NAMED, True)),
        ([chunk("other", YOUNG)], False, (NEW, False)),
    ],
)
def test_the_name_of_a_chunk(present: list[ObjectInfo], named: bool, expected: tuple[str, bool]) -> None:
    plan = ChunkPlan({NAMED} if named else set(), present, NOW_MS, "0000000a")
    assert plan.choose(DIGESTS[0], 1) == expected
    plan.note_stored(expected[0], 1)
    assert plan.choose(DIGESTS[0], 1) == (expected[0], True)
    assert plan.has(NAMED, 1) == any(info[:2] == (NAMED, 1) for info in present)


@given(
    st.lists(st.tuples(st.integers(0, 40), st.sampled_from(BROKERS), st.integers(0, 90)), max_size=12),
    st.data(),
)
def test_retention_keeps_the_two_newest_of_each_broker_and_what_others_made(
    facts: list[tuple[int, str, int]], data: st.DataObject
) -> None:
    bases = [
        a_base(lsn, broker_id, (100 - hours) * HOUR_MS, f"t{number}")
        for number, (lsn, broker_id, hours) in enumerate(facts)
    ]
    keep_count, age_hours = data.draw(st.integers(0, 5)), data.draw(st.integers(0, 60))
    names = plan_retention(bases, "one", 100 * HOUR_MS, keep_count, age_hours * HOUR_MS)
    own = sorted((stored for stored in bases if stored.base.broker_id == "one"), key=lambda s: s.base.name)
    assert set(names) <= {stored.base.name for stored in own[:-2]}
    for rank, stored in enumerate(reversed(own)):
        aged = sum(newer.modified_ms + REST_MS <= 100 * HOUR_MS for newer in own[len(own) - rank :])
        unwanted = (keep_count and rank >= keep_count) or (
            age_hours and 100 * HOUR_MS - stored.modified_ms > age_hours * HOUR_MS
        )
        assert (stored.base.name in names) == bool(unwanted and aged >= 2)
        from_ms = removable_from_ms(bases, stored.base.name)
        assert (from_ms is not None and from_ms <= 100 * HOUR_MS) == (aged >= 2)


def test_a_sweep_takes_only_chunks_that_are_old_and_that_nobody_names() -> None:
    chunks = [
        chunk(DIGESTS[0], REST_MS),
        chunk(DIGESTS[1], REST_MS - 1),
        chunk(DIGESTS[2], REST_MS),
        chunk(DIGESTS[2], REST_MS, "0000000a"),
        chunk("README", REST_MS),
    ]
    assert plan_sweep(chunks, {chunks[2].name}, NOW_MS) == [chunks[0].name, chunks[3].name]


def test_which_base_is_meant() -> None:
    bases = [a_base(9), a_base(10), a_base(3)]
    assert choose_base(bases, "", "s3://b").lsn == 10
    assert choose_base(bases, bases[2].base.name, "s3://b").lsn == 3
    with pytest.raises(NotFound, match="no base 'x'"):
        choose_base(bases, "x", "s3://b")
    with pytest.raises(NotFound, match="has no base"):
        choose_base([], "", "s3://b")
    both = [*bases, a_base(2, "two")]
    with pytest.raises(NotFound, match=r"2 brokers.*s3://b#NAME.*000a-a, 0000000000000002-a"):
        choose_base(both, "", "s3://b")
    assert choose_base(both, both[3].base.name, "s3://b").broker_id == "two"
