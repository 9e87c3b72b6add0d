"""Check that a store's create-if-absent is atomic, through all of its endpoints: everything else rests on that.

    probe/<run>/<name>   what a check writes; it removes all of it

A store that lets two create one object, ignores the condition, or shows an object to one reader and not to another,
loses answered messages. A check that passes proves nothing for every time to come; one that fails proves enough.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum

from broker.cluster.object_store import ObjectStore, StoreRefused

NAMES = 200
CLIENTS = 64
CUT_NAMES = 50
CUT_CLIENTS = 8
PROBLEMS_MAX = 5
ATTEMPTS_MAX = 10
PAUSE_SECONDS = 0.1

BODY_BYTES = 2000


class _Told(Enum):
    """Outcome of a create, as its client was told."""

    STORED = "stored"
    EXISTS = "exists"
    NOTHING = "nothing"


@dataclass
class StoreCheck:
    """The result of a check."""

    names: int = 0
    creates: int = 0
    cut: int = 0
    unanswered: int = 0
    problems: list[str] = field(default_factory=list)
    create_seconds: list[float] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        return not self.problems

    def create_ms(self, part: float) -> float:
        """Return a quantile of the time of a create that met no other."""
        ordered = sorted(self.create_seconds)
        return 1000 * ordered[min(int(part * len(ordered)), len(ordered) - 1)] if ordered else 0.0


async def check_store(
    stores: Sequence[ObjectStore],
    *,
    names: int = NAMES,
    clients: int = CLIENTS,
    cut_names: int = CUT_NAMES,
    rng: random.Random | None = None,
    note: Callable[[int], None] = lambda done: None,
) -> StoreCheck:
    """Check one store through each of its endpoints. Raises OSError if it cannot be used at all."""
    check = _Check(stores, rng or random.Random())
    try:
        await check.alone()
        for number in range(names):
            if check.is_hopeless:
                break
            await check.race(f"race-{number}", clients)
            note(number + 1)
        for number in range(cut_names):
            if check.is_hopeless:
                break
            await check.race_with_cuts(f"cut-{number}")
            note(names + number + 1)
        await check.read_again()
    finally:
        await check.clean_up()
    return check.result


class _Check:
    """One run of the check."""

    def __init__(self, stores: Sequence[ObjectStore], rng: random.Random) -> None:
        self.result = StoreCheck()
        self._stores = stores
        self._rng = rng
        self._run = f"probe/{uuid.uuid4().hex}"
        self._stored: dict[str, bytes] = {}  # by name, as it was first read
        self._names: list[str] = []

    @property
    def is_hopeless(self) -> bool:
        return len(self.result.problems) >= PROBLEMS_MAX

    async def alone(self) -> None:
        """Check the condition where nobody else is at work; the store must answer here."""
        for number in range(10):
            name = self._name(f"alone-{number}")
            first, second = self._pick(), self._pick()
            started = time.perf_counter()
            await first.create(name, self._body(name, 0))
            self.result.create_seconds.append(time.perf_counter() - started)
            try:
                await second.create(name, self._body(name, 1))
            except FileExistsError:
                pass
            else:
                self._problem(f"{name}: created, and created again: the store ignores the condition")
            self.result.creates += 2
            await self._look(name, {0: _Told.STORED, 1: _Told.EXISTS})

    async def race(self, label: str, clients: int) -> None:
        """Let many create one name at once; one must win, and every reader see what it stored."""
        name = self._name(label)
        told = await asyncio.gather(*(self._create(name, client) for client in range(clients)))
        self.result.names += 1
        self.result.creates += clients
        await self._look(name, dict(enumerate(told)))

    async def race_with_cuts(self, label: str) -> None:
        """As `race`, but connections are cut before, in and after the request; each client repeats its own."""
        name = self._name(label)

        async def cut_then_create(client: int) -> _Told:
            with contextlib.suppress(TimeoutError, FileExistsError, OSError):
                # What was sent may be carried out after all, also after it is sent once more.
                async with asyncio.timeout(self._rng.uniform(0, 2 * self.result.create_ms(0.5) / 1000)):
                    await self._pick().create(name, self._body(name, client))
            self.result.cut += 1
            return await self._create(name, client)

        told = await asyncio.gather(*(cut_then_create(client) for client in range(CUT_CLIENTS)))
        self.result.names += 1
        self.result.creates += CUT_CLIENTS
        await self._look(name, dict(enumerate(told)))

    async def read_again(self) -> None:
        """Check that nothing has changed since: no late attempt has replaced an object."""
        for name, body in self._stored.items():
            if not self.is_hopeless and await self._read(self._pick(), name) != body:
                self._problem(f"{name}: an object has changed after it was stored")

    async def clean_up(self) -> None:
        for first in range(0, len(self._names), CLIENTS):
            batch = self._names[first : first + CLIENTS]
            await asyncio.gather(*(self._stores[0].remove(name) for name in batch), return_exceptions=True)

    async def _create(self, name: str, client: int) -> _Told:
        try:
            await self._pick().create(name, self._body(name, client))
        except FileExistsError:
            return _Told.EXISTS
        except StoreRefused:
            raise
        except OSError:
            self.result.unanswered += 1
            return _Told.NOTHING
        return _Told.STORED

    async def _look(self, name: str, told: dict[int, _Told]) -> None:
        """Compare what is there, through every endpoint, with what clients were told."""
        winners = [client for client, answer in told.items() if answer is _Told.STORED]
        if len(winners) > 1:
            self._problem(f"{name}: {len(winners)} of {len(told)} were told that they created it")
        bodies = {client: self._body(name, client) for client in told}
        there = [await self._read(store, name) for store in self._stores]
        if any(body != there[0] for body in there):
            self._problem(f"{name}: endpoints do not show the same object")
        if there[0] is None:
            if winners or _Told.EXISTS in told.values():
                self._problem(f"{name}: created, and not there")
            return
        if there[0] not in bodies.values():
            self._problem(f"{name}: holds what nobody stored")
        elif len(winners) == 1 and there[0] != bodies[winners[0]]:
            self._problem(f"{name}: one was told that it created it, another one's object is there")
        for store in self._stores:
            if name not in [info.name async for info in store.objects(self._run)]:
                self._problem(f"{name}: there, and not listed by {store.url}")
        self._stored[name] = there[0]

    async def _read(self, store: ObjectStore, name: str) -> bytes | None:
        for attempt in range(ATTEMPTS_MAX):
            try:
                return await store.read(name)
            except FileNotFoundError:
                return None
            except OSError:
                if attempt == ATTEMPTS_MAX - 1:
                    raise
                await asyncio.sleep(PAUSE_SECONDS)
        raise AssertionError

    def _pick(self) -> ObjectStore:
        return self._rng.choice(self._stores)

    def _name(self, label: str) -> str:
        name = f"{self._run}/{label}"
        self._names.append(name)
        return name

    def _body(self, name: str, client: int) -> bytes:
        return f"{name} {client} ".encode().ljust(BODY_BYTES, b".")

    def _problem(self, problem: str) -> None:
        self.result.problems.append(problem)
