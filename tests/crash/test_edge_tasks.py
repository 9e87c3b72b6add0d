"""Background tasks of the edges and of nodes of a cluster: each is interrupted, and does what its row in `TASKS` says.

`tests/crash/test_background_tasks.py` has the table, and interrupts the tasks of the broker itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from broker.node.owning import Owning
from broker.observe.cluster_view import ClusterView, OwnerRoute
from broker.observe.metrics import BrokerCounters
from broker.rpc import forward, silent
from broker.rpc import peers as rpc_peers
from broker.rpc.front import Front, FrontHost
from broker.rpc.peers import Peers
from broker.runtime.clock import SystemClock
from broker.runtime.notify import ServiceNotifier
from broker.runtime.process_upkeep import with_upkeep
from broker.runtime.supervise import Supervisor
from broker.server import Server
from broker.testing.mem_vfs import MemVfs
from broker.testing.sim_clock import SimClock
from broker.testing.sim_loop import SimLoop, run_sim
from tests.configs import broker_config
from tests.crash.interrupted import BUGS, ERRORS, Interrupted, Interruption, Kind
from tests.crash.test_background_tasks import ENDS, TASKS, row_of, survived_at
from tests.depth import DAY
from tests.harness import Outgoing
from tests.sim.shard_brokers import LEASE_MS, ShardBroker, make_bucket
from tests.sim.test_shard_bases import bases_of
from tests.unit.folder import compaction_world
from tests.unit.runtime.test_process_upkeep import serve_until_asked
from tests.wire.access_files import Files

LIMIT_SECONDS = 20.0
VIRTUAL_LIMIT_SECONDS = 600.0
OF_NODES = ("heartbeats", "bases", "checkpoints of silences", "rewrites of ledgers")
OF_FRONTS = ("unread calls", "route of the front")
OF_PEERS = "questions to node *"
OF_PROCESSES = ("cycle collection", "trim of the heap")
EDGES = [name for name, row in TASKS.items() if not row.runs_here]
Case = tuple[str, Kind, str]


def cases(names: list[str]) -> list[Case]:
    """Each task with a bug at its first await; and with an error that it survives, where it says so."""
    told = [(name, [*BUGS][(number + DAY) % len(BUGS)], "") for number, name in enumerate(names)]
    survived = [
        (name, [*kinds][DAY % len(kinds)], where)
        for name in names
        for where, kinds in TASKS[name].survives.items()
    ]
    return told + survived


class Target:
    """The task that is interrupted."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, case: Case) -> None:
        self.name, self.kind, where = case
        self.interruption = Interruption(ERRORS[self.kind](), where)
        self.task: asyncio.Task[None] | None = None
        inner = Supervisor.spawn

        def spawn(this: Supervisor, name: str, coro: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
            if row_of(name) != self.name or self.task is not None:
                return inner(this, name, coro)
            self.task = inner(this, name, Interrupted(coro, self.interruption))
            return self.task

        monkeypatch.setattr(Supervisor, "spawn", spawn)

    async def check(
        self,
        supervisor: Supervisor,
        turn: Callable[[], Awaitable[None]],
        limit_seconds: float = LIMIT_SECONDS,
    ) -> None:
        """Wait until it was hit, and expect of it what its row says; `turn` lets some time pass."""
        async with asyncio.timeout(limit_seconds):
            while not self.interruption.hit or self.task is None:
                await turn()
            for _ in range(5):
                await turn()
            if self.kind in survived_at(self.name, self.interruption.hit):
                assert supervisor.failure is None
                assert self.task.done() == (TASKS[self.name].life == ENDS)
                return
            while supervisor.failure is None:
                await turn()
        if self.kind is not Kind.CANCELLED:
            assert supervisor.failure is self.interruption.error


@pytest.mark.parametrize(
    "case",
    cases([name for name in EDGES if name not in (*OF_NODES, *OF_FRONTS, OF_PEERS, *OF_PROCESSES)]),
    ids=str,
)
async def test_a_task_of_the_edges_survives_or_tells(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, case: Case
) -> None:
    monkeypatch.setattr(silent, "LOOK_SECONDS", 0.01)
    target = Target(monkeypatch, case)
    config = broker_config(
        data_dir=str(tmp_path / "data"),
        grpc_address="127.0.0.1:0",
        http_address="127.0.0.1:0",
        disk_reserve_bytes=0,
        drain_grace_ms=0,
        **Files(tmp_path).settings | {"security_recheck_ms": 10},
    )
    notifier = ServiceNotifier({"NOTIFY_SOCKET": str(tmp_path / "nobody"), "WATCHDOG_USEC": "20000"})
    monkeypatch.setattr(
        "broker.rpc.unfinished_messages.UnfinishedMessages.may_be_too_much", lambda self, memory_bytes: True
    )
    # As with many streams.
    monkeypatch.setattr("broker.rpc.unfinished_messages.UnfinishedMessages.needs_watch", True)
    server = Server(config, notifier=notifier, read_config=lambda: config)
    await server.start()
    try:
        server.reload_soon()
        await target.check(server.broker.supervisor, lambda: asyncio.sleep(0.01))
        if server.broker.supervisor.failure is not None:
            await asyncio.wait_for(server.wait_stop(), LIMIT_SECONDS)
            assert server.failure is not None
    finally:
        await server.stop()


@pytest.mark.parametrize("case", cases(list(OF_FRONTS)), ids=str)
async def test_a_task_of_a_front_tells(monkeypatch: pytest.MonkeyPatch, case: Case) -> None:
    monkeypatch.setattr(forward, "ASK_SECONDS", 0.01)
    target = Target(monkeypatch, case)
    supervisor = Supervisor(lambda name, error: None)
    config = broker_config(grpc_address="127.0.0.1:0")
    view = ClusterView("c", "here", (), 0, OwnerRoute(1, "owner", "127.0.0.1:1"))
    front = Front(FrontHost(config, SystemClock(), BrokerCounters()), lambda: view)
    await front.start(supervisor.spawn_lasting)
    try:
        await target.check(supervisor, lambda: asyncio.sleep(0.01))
    finally:
        await front.stop()


@pytest.mark.parametrize("case", cases(list(OF_PROCESSES)), ids=str)
async def test_a_task_of_a_process_tells(monkeypatch: pytest.MonkeyPatch, case: Case) -> None:
    monkeypatch.setattr("broker.runtime.cycles._LOOK_SECONDS", 0.01)
    monkeypatch.setattr("broker.runtime.allocator._LOOK_SECONDS", 0.01)
    target = Target(monkeypatch, case)

    async with asyncio.timeout(LIMIT_SECONDS):
        assert await with_upkeep(serve_until_asked()) == 1
    assert target.interruption.hit


@pytest.mark.parametrize("kind", Kind, ids=str)
async def test_another_node_is_asked_again_or_it_is_told(monkeypatch: pytest.MonkeyPatch, kind: Kind) -> None:
    for pause in ("_LOOK_SECONDS", "_PAUSE_SECONDS"):
        monkeypatch.setattr(rpc_peers, pause, 0.01)
    target = Target(monkeypatch, (OF_PEERS, kind, "Peers._ask"))
    supervisor = Supervisor(lambda name, error: None)
    Peers(broker_config(), "c", {"b": "127.0.0.1:1"}).start(supervisor.spawn_lasting)
    try:
        await target.check(supervisor, lambda: asyncio.sleep(0.01))
    finally:
        await supervisor.stop()


@pytest.mark.parametrize("case", cases(list(OF_NODES)), ids=str)
def test_a_task_of_a_node_survives_or_tells(monkeypatch: pytest.MonkeyPatch, case: Case) -> None:
    async def scenario(loop: SimLoop, clock: SimClock) -> None:
        bucket = make_bucket()
        settings = (
            compaction_world.config(checkpoint_interval_ms=5_000)
            if case[0] == "rewrites of ledgers"
            else None
        )
        owner, standby = (ShardBroker(bucket, loop, name, MemVfs(), settings) for name in ("a", "b"))
        await (await owner.follow())
        node = await owner.own()
        target = Target(monkeypatch, case)
        spawn_lasting = node.broker.supervisor.spawn_lasting
        if target.name == "heartbeats":
            owning = object.__new__(Owning)  # of which this is the one task, and the rest a server
            owning._lease, owning._beat_seconds = owner.lease, LEASE_MS / 4000
            spawn_lasting("heartbeats", owning._beat(node.broker))
        if target.name == "bases":
            bases = bases_of(bucket, loop, owner.vfs, "a")
            spawn_lasting("bases", bases.keep(node.broker, owner.log, patience=1.0))
        hit = node
        if target.name == "checkpoints of silences":
            await node.produce("orders", [Outgoing(b"1")])
            await standby.follow(rank=1)
            hit = standby.node
            await standby.reach(node.broker.journal.durable_lsn)
            owner.kill()  # now the log falls silent
        if target.name == "rewrites of ledgers":
            await standby.follow(rank=1)
            hit = standby.node
            await compaction_world.fill(node, 3)
            await compaction_world.compact(node)
        await target.check(hit.broker.supervisor, lambda: asyncio.sleep(1), VIRTUAL_LIMIT_SECONDS)
        assert bool(hit.failures) == (hit.broker.supervisor.failure is not None)

    run_sim(scenario, seed=1)


def test_each_task_that_the_broker_alone_does_not_run_is_interrupted_here() -> None:
    assert {*OF_NODES, *OF_FRONTS, OF_PEERS, *OF_PROCESSES} <= set(EDGES)
    assert len(EDGES) == 16
