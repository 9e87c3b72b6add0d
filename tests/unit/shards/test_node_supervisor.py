"""The supervisor of a node: in which order it hands its shards over when it stops, and that it ends frozen ones."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from broker.cluster.creation import Cluster
from broker.errors import Unavailable
from broker.observe.cluster_view import ClusterView, OwnerRoute
from broker.runtime.notify import ServiceNotifier
from broker.shards import supervisor
from broker.shards.node_supervisor import NodeSupervisor
from broker.web.shard_http import ShardReadiness
from tests.configs import broker_config

NODES = {"a": "127.0.0.1:1", "b": "127.0.0.1:2"}
SHARDS = 3
SECONDS = 20.0
NEVER_MS = 3_600_000


async def eventually(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(SECONDS):
        while not holds():
            await asyncio.sleep(0.001)


async def pause() -> None:
    """Let everything run that can."""
    for _ in range(50):
        await asyncio.sleep(0)


class FakeChild:
    """A process that ends when it is told, and notes what it hears."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.pid = 100 + number
        self.starts = 1
        self.is_stopped = False
        self.heard: list[signal.Signals] = []
        self.on_signal: Callable[[], None] = lambda: None
        self.ended = asyncio.Event()

    async def run(self) -> None:
        await self.ended.wait()

    def stop(self) -> None:
        self.is_stopped = True

    def send(self, number: signal.Signals) -> None:
        self.heard.append(number)
        self.on_signal()

    def kill(self) -> None:
        self.send(signal.SIGKILL)
        self.ended.set()


class Stopping:
    """Node a, which owns the first shard and the last of three, on its way to stop."""

    def __init__(
        self, folder: Path, owner_lease_ms: int = NEVER_MS, command: Sequence[str] | None = None
    ) -> None:
        """`command`: of real processes."""
        config = broker_config(
            data_dir=str(folder),
            grpc_address=NODES["a"],
            http_address="127.0.0.1:0",
            cluster_nodes=",".join(f"{name}={address}" for name, address in NODES.items()),
            node="a",
            drain_grace_ms=0,
        )
        self.node = NodeSupervisor(
            config,
            Cluster("5" * 32, SHARDS, owner_lease_ms),
            lambda _: command or ["false"],
            notifier=ServiceNotifier({}),
            read_config=lambda: config,
        )
        self.children = [FakeChild(number) for number in range(SHARDS)]
        fake: Any = self.children
        if command is None:
            self.node._children = fake
        for number, owner in enumerate("aba"):
            self.node._views[number] = self.view(number, owner, 1)

    def view(self, number: int, owner: str, epoch: int) -> ClusterView:
        view = self.node._views[number]
        return view._replace(route=OwnerRoute(epoch, owner, NODES.get(owner, "")))

    def begin(self) -> asyncio.Task[None]:
        running = [asyncio.create_task(child.run()) for child in self.children]
        return asyncio.create_task(self.node._stop_children(running))

    def end(self, number: int) -> None:
        self.children[number].ended.set()
        self.node._note_ended(number)

    def tell(self, number: int, owner: str, epoch: int = 2) -> None:
        """Have node b tell who owns a shard."""
        self.node._peers._views.setdefault("b", {})[number] = self.view(number, owner, epoch)
        self.node._note_told()

    @property
    def stopped(self) -> list[int]:
        return [child.number for child in self.children if child.is_stopped]


async def test_a_shard_is_handed_over_once_the_one_before_has_another_owner(tmp_path: Path) -> None:
    stopping = Stopping(tmp_path)
    done = stopping.begin()
    await pause()
    assert stopping.stopped == [0]
    stopping.tell(0, "b")  # it takes over while the process drains
    await pause()
    assert stopping.stopped == [0], "its process has not ended"
    stopping.end(0)
    await eventually(lambda: stopping.stopped == [0, 2])
    stopping.end(2)
    await pause()
    stopping.tell(2, "", 2)
    stopping.tell(2, "a", 2)  # whoever says that it is still this node's is behind
    stopping.tell(1, "b")
    await pause()
    assert not done.done() and stopping.stopped == [0, 2], "nobody owns it yet"
    stopping.tell(2, "b", 3)
    await asyncio.wait_for(done, SECONDS)
    assert stopping.stopped == [0, 1, 2]


async def test_a_shard_that_is_taken_over_meanwhile_is_handed_over_as_well(tmp_path: Path) -> None:
    stopping = Stopping(tmp_path)
    stopping.node._views[0] = stopping.view(0, "b", 1)
    done = stopping.begin()
    await eventually(lambda: stopping.stopped == [2])
    stopping.node._views[1] = stopping.view(1, "a", 2)
    stopping.end(2)
    stopping.tell(2, "b")
    await eventually(lambda: 1 in stopping.stopped)
    assert stopping.stopped == [1, 2], "the shard that it does not own waits for that one"
    stopping.end(1)
    await pause()
    assert not done.done(), "nobody owns it yet"
    stopping.tell(1, "b", 3)
    await asyncio.wait_for(done, SECONDS)
    assert stopping.stopped == [0, 1, 2]


async def test_a_lease_after_the_end_of_a_shard_the_next_one_is_handed_over_whoever_owns_it(
    tmp_path: Path,
) -> None:
    stopping = Stopping(tmp_path, owner_lease_ms=200)
    loop = asyncio.get_running_loop()
    done = stopping.begin()
    await pause()
    began = loop.time()
    stopping.end(0)
    await eventually(lambda: stopping.stopped == [0, 2])
    assert loop.time() - began >= 0.2
    stopping.end(2)
    await asyncio.wait_for(done, SECONDS)


async def test_a_shard_that_does_not_end_keeps_the_others_for_a_bounded_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "_KILL_AFTER_SECONDS", 0.1)
    stopping = Stopping(tmp_path)
    await asyncio.wait_for(stopping.begin(), SECONDS)
    assert stopping.stopped == [0, 1, 2]


@pytest.mark.slow
async def test_an_owner_that_is_frozen_is_waited_for_once_when_its_node_stops(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of three real processes the one that owns a shard is stopped as SIGSTOP stops it."""
    seconds = 3.0
    monkeypatch.setattr(supervisor, "_KILL_AFTER_SECONDS", seconds)
    monkeypatch.setitem(NODES, "a", "127.0.0.1:0")
    node = Stopping(tmp_path, owner_lease_ms=1, command=("sleep", "100")).node
    running = asyncio.create_task(node.run())
    await eventually(lambda: all(child.pid for child in node._children))
    node._views[2] = node._views[2]._replace(route=OwnerRoute())  # it owns the first shard alone
    frozen = node._children[0].pid
    os.kill(frozen, signal.SIGSTOP)
    await eventually(lambda: Path(f"/proc/{frozen}/stat").read_text().rpartition(")")[2].split()[0] == "T")
    began = asyncio.get_running_loop().time()
    node._stop.set()
    async with asyncio.timeout(SECONDS):
        assert await running == 0
    assert seconds <= asyncio.get_running_loop().time() - began < 2 * seconds


@pytest.mark.slow
async def test_owners_that_are_frozen_are_stopped_together_after_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "_LOOK_SECONDS", 0.0)
    stopping = Stopping(tmp_path)
    stopping.node._views[1] = stopping.view(1, "a", 1)
    await watch(stopping, [FakeHttp(), FakeHttp(), FakeHttp(answered=1)], looks=3)
    done = stopping.begin()
    await pause()
    assert stopping.stopped == [2], "the one that answers"
    stopping.end(2)
    await pause()
    assert stopping.stopped == [2], "nobody owns it yet"
    stopping.tell(2, "b")
    await asyncio.wait_for(done, SECONDS)
    assert stopping.stopped == [0, 1, 2], "whoever waits for their ends waits for both at once"


async def test_a_process_that_has_ended_follows_nothing(tmp_path: Path) -> None:
    stopping = Stopping(tmp_path)
    now = stopping.node._views[1] = stopping.view(1, "b", 1)._replace(applied_lsn=7, applied_time_ms=8)
    stopping.node._note_ended(1)
    (told,) = stopping.node._describe(True)[1:2]
    assert (told.applied_time_ms, told.applied_lsn, told.route) == (0, 7, now.route)


class FakeHttp:
    """The HTTP socket of a process that stands by and answers now and then: the first look, unless it never did."""

    def __init__(self, was_ready: bool = True, answered: int = NEVER_MS) -> None:
        """`answered`: every so many looks there is an answer."""
        self.looks = 0
        self.was_ready = was_ready
        self._answered = answered

    async def readiness(self, _: float) -> ShardReadiness:
        await asyncio.sleep(0)
        self.looks += 1
        if self.was_ready and self.looks % self._answered == 1 % self._answered:
            return ShardReadiness(None, "standby, 0 records behind")
        return ShardReadiness("does not answer", "does not answer", is_silent=True)

    async def view(self, _: float) -> bytes | None:
        return None


async def test_a_process_of_a_node_that_was_ready_and_is_frozen_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "_LOOK_SECONDS", 0.0)
    monkeypatch.setattr(supervisor, "_FIRST_LOOK_SECONDS", 0.0)
    stopping = Stopping(tmp_path)
    frozen = [FakeHttp(was_ready=number != 1) for number in range(SHARDS)]
    looks = await watch(stopping, frozen, looks=3 * supervisor._SILENT_LOOKS_MAX)
    assert [child.heard[:1] for child in stopping.children] == [[signal.SIGKILL], [], [signal.SIGKILL]]
    # After so many looks without an answer, and so many more where that one is still there.
    assert looks[0][:2] == [1 + supervisor._SILENT_LOOKS_MAX, 1 + 2 * supervisor._SILENT_LOOKS_MAX]


async def test_silence_counts_if_there_was_no_answer_in_between(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "_LOOK_SECONDS", 0.0)
    monkeypatch.setattr(supervisor, "_FIRST_LOOK_SECONDS", 0.0)
    stopping = Stopping(tmp_path)
    slow = [FakeHttp(answered=supervisor._SILENT_LOOKS_MAX) for _ in range(SHARDS)]
    assert await watch(stopping, slow, looks=5 * supervisor._SILENT_LOOKS_MAX) == [[]] * SHARDS


async def test_a_process_that_stops_is_not_killed_for_its_silence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Perhaps it writes its last checkpoint; the stop has a bound of its own."""
    monkeypatch.setattr(supervisor, "_LOOK_SECONDS", 0.0)
    monkeypatch.setattr(supervisor, "_FIRST_LOOK_SECONDS", 0.0)
    stopping = Stopping(tmp_path)
    stopping.node._stop.set()
    silent = [FakeHttp() for _ in range(SHARDS)]
    assert await watch(stopping, silent, looks=3 * supervisor._SILENT_LOOKS_MAX) == [[]] * SHARDS


async def watch(stopping: Stopping, sockets: list[FakeHttp], *, looks: int) -> list[list[int]]:
    """Look at the processes so often; return after how many looks each was killed."""
    https: Any = sockets
    stopping.node._https = https
    killed: list[list[int]] = [[] for _ in sockets]
    for child, http in zip(stopping.children, sockets, strict=True):
        child.on_signal = partial(_note_looks, killed[child.number], http)
    watches = [asyncio.create_task(watch) for watch in stopping.node._watches()]
    await eventually(lambda: all(http.looks > looks for http in sockets))
    for each in watches:
        each.cancel()
    await asyncio.gather(*watches, return_exceptions=True)
    return killed


def _note_looks(killed: list[int], http: FakeHttp) -> None:
    killed.append(http.looks)


async def test_a_node_tells_where_its_own_pages_are_and_no_owner_among_standbys(tmp_path: Path) -> None:
    stopping = Stopping(tmp_path)
    node, own = stopping.node, ("a", stopping.node._http.address)
    for is_alone in (True, False):
        for view, owner in zip(node._describe(is_alone), "aba", strict=True):
            assert view.pages == (own,)
            assert set(view.standbys) == set(NODES) - {owner}
    told = stopping.view(1, "b", 2)._replace(node="b", pages=(("b", "0.0.0.0:7680"), ("a", "evil:1")))
    node._peers._views["b"] = {1: told}
    assert node._view(1).pages == (own, ("b", "0.0.0.0:7680")), (
        "each says where its own are, and nobody else's"
    )
    assert node._describe(True)[1].pages == (own,)
    with pytest.raises(Unavailable) as refused:
        node._find_pages(1)
    assert refused.value.reason == "NOT_OWNER"
    assert refused.value.facts["pages"] == "http://127.0.0.1:7680"
    node._peers._views["b"] = {1: told._replace(pages=())}
    with pytest.raises(Unavailable) as refused:
        node._find_pages(1)
    assert refused.value.facts["pages"] == ""
