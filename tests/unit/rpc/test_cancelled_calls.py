"""A call that is cancelled, at whichever await, leaves nothing behind: no lock, lease, reservation, place or task.

Every method of the API is called in a world of its own and cancelled where it first waits, then in another world where
it waits next, and so on to its end. Afterwards the broker is looked through, object by object: each lock, semaphore,
set and flag is as it was before the call or as it is after one that nobody cancelled; and the same call works.
"""

from __future__ import annotations

import asyncio
import re
from collections import deque
from collections.abc import Awaitable, Generator, Iterator
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from types import FunctionType, MethodType
from typing import Any

import pytest

from broker.jobs.verify import verify_data_dir
from broker.testing.sim_clock import SimClock
from broker.testing.sim_loop import SimLoop, run_sim
from tests.depth import at_depth, sampled
from tests.harness import DATA_DIR
from tests.unit.rpc.call_world import CASES, METHODS, Refused, World, has_request_id, make_world

SETTLE_SECONDS = 120
NEVER = -1
_PASSES = re.compile(r"counters|_(ms|ns)\b|lsn|\[\d+\]$|_number\b|_sum\b")
"""Numbers that grow with time and with each record, and positions: they say nothing of what is held."""
State = dict[str, Any]
WITH_REQUEST_ID = [name for name, method in METHODS.items() if has_request_id(method)]


class Cut:
    """Awaits something, and has its task cancelled while it waits for the n-th time, as a call is whose client left."""

    def __init__(self, work: Awaitable[Any], at: int) -> None:
        self.waits = 0
        self._work = work
        self._at = at

    def __await__(self) -> Generator[Any, Any, Any]:
        steps = self._work.__await__()
        value: Any = None
        error: BaseException | None = None
        while True:
            try:
                waits_for = steps.send(value) if error is None else steps.throw(error)
            except StopIteration as done:
                return done.value
            if self.waits == self._at:
                task = asyncio.current_task()
                assert task is not None
                task.cancel()
            self.waits += 1
            value = error = None
            try:
                value = yield waits_for
            except BaseException as thrown:
                error = thrown


# -- what a broker holds -----------------------------------------------------------------------------------------------


def state_of(world: World) -> State:
    """Every lock, semaphore, flag, future and size of a collection that can be reached, by the way to it."""
    found: State = {}
    seen: set[int] = set()
    todo: deque[tuple[str, Any]] = deque((type(root).__name__, root) for root in world.roots)
    while todo:
        path, each = todo.popleft()
        if isinstance(each, bool) or (isinstance(each, int) and not _PASSES.search(path)):
            found[path] = each
        elif isinstance(each, asyncio.Lock):
            found[path] = each.locked()
        elif isinstance(each, asyncio.Semaphore):
            found[path] = each._value
        elif isinstance(each, asyncio.Future):
            found[path] = "done" if each.done() else "pending"
        elif (
            each is None
            or isinstance(each, str | bytes | int | float | Enum | type | FunctionType | MethodType)
            or id(each) in seen
        ):
            continue
        else:
            seen.add(id(each))
            todo += _parts(path, each, found)
    tasks = [task for task in asyncio.all_tasks() if not task.done()]
    found["tasks"] = sorted(task.get_coro().__qualname__ for task in tasks)  # type: ignore[union-attr]
    return found


def _parts(path: str, each: Any, found: State) -> Iterator[tuple[str, Any]]:
    if isinstance(each, dict):
        found[f"{path}{{}}"] = len(each)
        yield from ((f"{path}[{key!r}]", value) for key, value in each.items())
    elif isinstance(each, list | tuple | set | frozenset | deque):
        found[f"{path}[]"] = len(each)
        if not isinstance(each, set | frozenset):
            yield from ((f"{path}[{number}]", value) for number, value in enumerate(each))
    elif type(each).__module__.startswith("broker.") and not type(each).__module__.startswith(
        "broker.testing"
    ):
        names = list(getattr(each, "__dict__", ()))
        for kind in type(each).__mro__:
            names += getattr(kind, "__slots__", ())
        yield from ((f"{path}.{name}", getattr(each, name)) for name in names if hasattr(each, name))


# -- the check ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Run:
    """Observations of one call."""

    waits: int
    before: State
    after: State
    repeated: State
    """After the same call again: not looked at where a cancelled call has left nothing that differs."""

    def left(self, uncut: Run) -> State:
        """Return what a cancelled call has left behind, compared with one that was not cancelled."""
        return {
            path: found
            for path, found in differing(self.after, uncut).items()
            # Half of it may be done, such as a topic made and nothing stored in it; the same call again does the rest.
            if self.repeated.get(path) not in (uncut.after.get(path), uncut.repeated.get(path))
        }


def differing(after: State, uncut: Run) -> State:
    """Return what is neither as before a call nor as after one that was not cancelled."""
    return {
        path: found
        for path in after.keys() | uncut.before.keys()
        if (found := after.get(path)) not in (uncut.before.get(path), uncut.after.get(path))
    }


async def run_case(clock: SimClock, name: str, at: int, request_id: str, uncut: Run | None) -> Run:
    """Call a method in a new world and cancel it at an await."""
    world = await make_world(clock)
    case = CASES[name]
    requests = await case.make(world)
    for each in requests if request_id else ():
        each.request_id = request_id
    frames = [each.SerializeToString() for each in requests]
    await asyncio.sleep(SETTLE_SECONDS)
    before = state_of(world) if uncut is None else uncut.before  # it is that of every run of the case
    cut = Cut(world.call(name, frames), at)

    async def whole() -> None:
        await cut

    with suppress(asyncio.CancelledError):
        await asyncio.create_task(whole())
    await asyncio.sleep(SETTLE_SECONDS)
    after = state_of(world)
    is_undone = case.is_undone and at != NEVER
    try:
        await world.call(name, frames)
    except Refused as refused:
        known = () if is_undone else case.repeats
        if refused.reason not in known:
            pytest.fail(f"await {at}, the same call again: {refused.reason}: {refused}")
    await asyncio.sleep(SETTLE_SECONDS)
    is_alike = uncut is not None and not differing(after, uncut)
    run = Run(cut.waits, before, after, after if is_alike else state_of(world))
    world.inbox.detach()
    await world.node.stop()
    assert world.node.failures == []
    assert verify_data_dir(world.node.vfs, DATA_DIR).problems == []
    return run


def test_every_method_has_a_case() -> None:
    assert set(CASES) == set(METHODS)


def run(name: str, at: int, request_id: str, uncut: Run | None = None) -> Run:
    async def scenario(_: SimLoop, clock: SimClock) -> Run:
        return await run_case(clock, name, at, request_id, uncut)

    return run_sim(scenario, seed=1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "request_id"),
    [(name, "") for name in METHODS]
    + [(name, "r") for name in sampled(WITH_REQUEST_ID, at_depth(change=4, deep=1))],
)
def test_cancelled_call_leaves_nothing_behind(name: str, request_id: str) -> None:
    uncut = run(name, NEVER, request_id)
    for at in sampled(range(uncut.waits), at_depth(change=2, deep=1)):
        left = run(name, at, request_id, uncut).left(uncut)
        assert not left, f"cancelled at await {at} of {uncut.waits}"
