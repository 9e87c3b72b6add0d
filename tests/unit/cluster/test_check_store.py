"""The check of a store: what is sound passes, and each fault that stores were found to have is told."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from broker.cluster.check_store import StoreCheck, check_store
from broker.cluster.object_store import ObjectInfo, ObjectStore, StoreRefused
from broker.cluster.stores import open_store
from broker.runtime.vfs import Buffer
from tests.s3_server import CREDENTIALS, need_server, s3_server, store_url
from tests.unit.cluster.object_logs import STORES, object_store


class PlainStore:
    """Objects in a dictionary; a create looks, lets others work, and stores."""

    url = "plain://"

    def __init__(self, *, objects: dict[str, bytes] | None = None, pauses: int = 0) -> None:
        self._objects = {} if objects is None else objects
        self._pauses = pauses

    async def create(self, name: str, body: Buffer) -> None:
        is_there = name in self._objects
        for _ in range(self._pauses):
            await asyncio.sleep(0)
        if is_there:
            raise FileExistsError(name)
        self._objects[name] = bytes(body)

    async def read(self, name: str) -> bytes:
        try:
            return self._objects[name]
        except KeyError:
            raise FileNotFoundError(name) from None

    async def read_range(self, name: str, start: int, length: int) -> bytes:
        return (await self.read(name))[start : start + length]

    async def info(self, name: str) -> ObjectInfo:
        return ObjectInfo(name, len(await self.read(name)), 0)

    async def objects(self, folder: str, *, after: str = "") -> AsyncIterator[ObjectInfo]:
        for name, body in sorted(self._objects.items()):
            if name.startswith(f"{folder}/") and name > after:
                yield ObjectInfo(name, len(body), 0)

    async def remove(self, name: str) -> None:
        self._objects.pop(name, None)


async def check(*stores: ObjectStore) -> StoreCheck:
    return await check_store(stores, names=5, clients=16, cut_names=3, rng=random.Random(1))


@pytest.mark.slow
@pytest.mark.parametrize("kind", STORES)
async def test_a_sound_store_passes_and_nothing_stays(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with object_store(kind, tmp_path, monkeypatch) as store:
        result = await check(store)
        assert result.passed, result.problems
        assert (result.names, result.creates, result.cut) == (8, 20 + 5 * 16 + 3 * 8, 24)
        assert 0 < result.create_ms(0.5) <= result.create_ms(0.99)
        assert [info async for info in store.objects("")] == []


async def test_a_server_that_does_not_keep_the_condition_is_found_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("obstore")
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    async with s3_server(need_server(), tmp_path, "--nometa") as port:
        result = await check(open_store(store_url(port)))
    assert "the store ignores the condition" in result.problems[0]


class DeafStore(PlainStore):
    async def create(self, name: str, body: Buffer) -> None:
        self._objects[name] = bytes(body)


async def test_a_store_that_ignores_the_condition_is_found_out() -> None:
    result = await check(DeafStore())
    assert not result.passed and "the store ignores the condition" in result.problems[0]


async def test_a_store_that_looks_before_it_stores_is_found_out() -> None:
    result = await check(PlainStore(pauses=2))
    assert "of 16 were told that they created it" in result.problems[0]


async def test_endpoints_that_do_not_know_of_each_other_are_found_out() -> None:
    result = await check(PlainStore(), PlainStore())
    assert any("endpoints do not show the same object" in problem for problem in result.problems)


async def test_endpoints_of_one_store_pass() -> None:
    objects: dict[str, bytes] = {}
    result = await check(PlainStore(objects=objects), PlainStore(objects=objects))
    assert result.passed and objects == {}


class LossyStore(PlainStore):
    async def create(self, name: str, body: Buffer) -> None:
        await super().create(name, body)
        if "race-3" in name:
            del self._objects[name]


async def test_a_store_that_loses_an_object_is_found_out() -> None:
    result = await check(LossyStore())
    assert any("race-3: created, and not there" in problem for problem in result.problems)


class HidingStore(PlainStore):
    async def objects(self, folder: str, *, after: str = "") -> AsyncIterator[ObjectInfo]:
        async for info in super().objects(folder, after=after):
            if "race" not in info.name:
                yield info


async def test_a_store_that_lists_late_is_found_out() -> None:
    result = await check(HidingStore())
    assert any("not listed" in problem for problem in result.problems)


class ReplacingStore(PlainStore):
    async def read(self, name: str) -> bytes:
        body = await super().read(name)
        if "race" in name:
            self._objects[name] = body[::-1]
        return body


async def test_an_object_that_changes_is_found_out() -> None:
    result = await check(ReplacingStore())
    assert any("an object has changed" in problem for problem in result.problems)


class ClosedStore(PlainStore):
    async def create(self, name: str, body: Buffer) -> None:
        raise StoreRefused("no rights")


async def test_a_store_that_cannot_be_used_is_no_store_that_failed() -> None:
    with pytest.raises(StoreRefused):
        await check(ClosedStore())
