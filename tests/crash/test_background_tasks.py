"""No background task ends in silence: after an error at any of its awaits all works on, or the broker has failed loudly.

Every task that the broker spawns has a row in `TASKS`, which says what errors it survives and where; one without a row
fails here. A task of the broker without its edges is interrupted while a broker is at work: in the place of what it
waits for it gets an error. Where it is to survive that, everything is asked for that any task does, whichever was hit, so
that a task that hangs or has forgotten something shows. Any other error is to end the broker.
`tests/crash/test_edge_tasks.py` interrupts those of the edges.
"""

from __future__ import annotations

import ast
import asyncio
import contextlib
import re
from collections import Counter
from collections.abc import Coroutine, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from broker.config import BrokerConfig
from broker.folder import ledger_packing, rates
from broker.model import Position
from broker.policy import SubscriptionPolicy
from broker.runtime.supervise import Supervisor
from broker.storage.bulk import BulkDefinition, BulkKind
from broker.storage.recurring_values import Definition, RecurringRule
from broker.subscriptions.subscription import Subscription
from broker.testing.mem_vfs import CrashPolicy, MemVfs
from broker.testing.sim_clock import SimClock
from broker.testing.sim_loop import SimLoop, run_sim
from broker.topics.schedule_values import Cancel
from tests.crash.interrupted import ANY_FILE, BUGS, ERRORS, READ, Interrupted, Interruption, Kind, is_on
from tests.depth import DAY, at_depth, sampled
from tests.harness import DATA_DIR, EARLIEST, Node, Outgoing, small_config

ROOT = Path(__file__).resolve().parents[2]

HOUR_MS = 3_600_000
TURNS = at_depth(change=7, deep=9)
"""Of a broker at work: enough for every await that a row names."""
EVERY = at_depth(change=8, deep=1)
"""Of so many rows, and of so many places of theirs, one is tried, on each day of a build server others."""
LASTS, ENDS = "lasts", "ends by itself"


class Row(NamedTuple):
    """One task."""

    life: str
    survives: Mapping[str, Kind] = {}
    """The errors that it survives, by a function of the broker that awaits or by an await (`Interruption.matches`).
    All others end the broker."""
    runs_here: bool = True


CHECKPOINT = {"Checkpointer._in_thread": Kind.DISK, "Journal.trim": Kind.DISK}
BACKUP = {"Backups._in_thread": ANY_FILE, "Backups._steps": ANY_FILE}
TASKS = {
    # by the name as it stands in the code, with * for what differs
    "journal": Row(ENDS),  # at `close`, or at a failure that it tells of itself
    "ledger tails": Row(LASTS, {"Ledger.flush": Kind.DISK, "Broker._make_topic_folders": Kind.DISK}),
    "checkpoints": Row(LASTS, {**CHECKPOINT, "Journal.shrink": Kind.DISK}),
    "disk space": Row(LASTS),
    "reclaim": Row(
        LASTS,
        {
            "Reclaimer._last_live_due_ms": ANY_FILE,
            "SettledUpkeep._remember": ANY_FILE,
            "SettledKeys.flush": ANY_FILE,
        },
    ),
    "compaction leases": Row(LASTS),
    "rates of the last hour": Row(LASTS),
    "packing of rows": Row(LASTS, {"LedgerPacking._pack": ANY_FILE}),
    "rewrites of ledgers": Row(LASTS, {"LedgerRewrites._rewrite": READ}, runs_here=False),
    "recurring schedules": Row(LASTS),
    "recurring schedules of topic *": Row(ENDS, {"RecurringSchedules._store_some": READ}),
    "bulk changes of topic *": Row(ENDS, {"BulkChanges._make": READ}),
    "overdue messages": Row(ENDS, {"Overdue._sweep_topic": READ}),
    "signs of life": Row(LASTS, {"Patience.wait_done": Kind.DISK}),
    "wall clock": Row(LASTS),
    "index of topic *": Row(LASTS, {"IndexPump._restore": ANY_FILE, "IndexPump._step": READ}),
    # Ends when nobody is there and nothing is held.
    "dispatcher of subscription *": Row(
        ENDS, {"Dispatcher._step": READ, "Dispatcher.run > YieldBudget.spent": READ}
    ),
    "dead letters of subscription *": Row(ENDS, {"DeadLetters._give_up": READ}),
    "seal of a bucket": Row(ENDS, {"run_step": ANY_FILE}),
    "merge of buckets": Row(ENDS, {"run_step": ANY_FILE, "RunStorage._run": ANY_FILE}),
    "search for stale rows": Row(ENDS, {"RunStorage._run": ANY_FILE}),
    "reading of schedule keys of topic *": Row(ENDS, {"RunStorage._run": ANY_FILE}),
    "seal of schedule keys of topic *": Row(
        ENDS, {"run_step": ANY_FILE, "RunStorage._run": ANY_FILE, "Ledger._read": ANY_FILE}
    ),
    "merge of schedule keys of topic *": Row(
        ENDS, {"run_step": ANY_FILE, "RunStorage._run": ANY_FILE, "Ledger._read": ANY_FILE}
    ),
    "merge of settled schedule keys of topic *": Row(ENDS, {"run_step": ANY_FILE}),
    "counts of topic *": Row(ENDS, {"Ledger._read": READ, "YieldBudget.spent": Kind.UNAVAILABLE}),
    "oldest messages of topic *": Row(ENDS, {"Ledger._read": READ, "YieldBudget.spent": READ}),
    "backup": Row(ENDS, {**CHECKPOINT, **BACKUP, "Backups._alone": READ}),
    "deletion of a backup": Row(ENDS, {**BACKUP, "Backups._alone": READ}),
    "backups of an earlier life": Row(ENDS, {"Backups._in_thread": ANY_FILE}),
    # of the edges
    "loop lag": Row(LASTS, runs_here=False),
    "limits": Row(LASTS, runs_here=False),
    "security files": Row(LASTS, runs_here=False),
    "silent connections": Row(LASTS, {"SilentConnections.watch > to_thread": Kind.DISK}, runs_here=False),
    "unfinished messages": Row(LASTS, {"UnfinishedMessages.watch > to_thread": Kind.DISK}, runs_here=False),
    "reload": Row(ENDS, runs_here=False),
    "unread calls": Row(LASTS, runs_here=False),  # of a front; an owner that does not answer is asked again
    "route of the front": Row(LASTS, runs_here=False),
    # Whatever a node answers, it is asked again.
    "questions to node *": Row(LASTS, {"Peers._ask": ANY_FILE | Kind.BUG}, runs_here=False),
    "service watchdog": Row(ENDS, runs_here=False),  # where nobody listens there is nothing to do
    # of any process that serves
    "cycle collection": Row(LASTS, runs_here=False),
    "trim of the heap": Row(LASTS, runs_here=False),
    # of a node of a cluster, which the broker of this world is not
    "heartbeats": Row(LASTS, runs_here=False),
    "bases": Row(LASTS, {"ShardBases._look": ANY_FILE}, runs_here=False),
    "checkpoints of silences": Row(LASTS, {"Checkpointer._in_thread": Kind.DISK}, runs_here=False),
}
OF_SUPERVISOR = {"process of shard *", "looks at a shard"}
"""Tasks of the supervisor of shards; `tests/unit/shards/test_supervisor.py` has each fail."""
HERE = [name for name, row in TASKS.items() if row.runs_here]


@cache
def row_of(name: str) -> str:
    """The row that names a task as it runs."""
    found = [row for row in TASKS if re.fullmatch(re.escape(row).replace(r"\*", ".*"), name)]
    assert found, f"the task {name!r} has no row"
    return max(found, key=len)


# -- every task has a row ------------------------------------------------------------------------------------------


SPAWNS = re.compile("spawn|OneAtATime")
"""Nothing else that spawns is in a file without one of these words, which are found sooner than calls in a tree."""


def spawned_names() -> set[str]:
    """The first argument of every call that spawns, with * for what is filled in."""
    names = set()
    for path in sorted((ROOT / "broker").rglob("*.py")):
        text = path.read_text()
        if not SPAWNS.search(text) and path.name not in ("backup.py", "port.py"):
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args:
                spawns = {"spawn", "_spawn", "spawn_lasting"} | (
                    {"_do"} if path.name == "backup.py" else set()
                )
                if node.func.attr in spawns:
                    names.add(_pattern(node.args[0], path))
            elif isinstance(node, ast.Call) and ast.unparse(node.func) == "spawn_lasting":
                names.add(_pattern(node.args[0], path))
            elif isinstance(node, ast.Yield) and path.name == "port.py" and isinstance(node.value, ast.Tuple):
                names.add(_pattern(node.value.elts[0], path))
            elif isinstance(node, ast.Call) and ast.unparse(node.func) == "OneAtATime":
                names.add(_pattern(node.args[1], path))
    return names


def _pattern(node: ast.expr, path: Path) -> str:
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=parts):
            return "".join(part.value if isinstance(part, ast.Constant) else "*" for part in parts)  # type: ignore[misc]
        case ast.Name(id="name") | ast.Attribute(attr="_name") if path.name == "supervise.py":
            return ""
        case ast.Name() if path.name in ("server.py", "front.py", "shard_front.py", "site.py"):
            return ""  # of the port, which yields them with their names; of jobs, which name theirs
        case ast.Name() if path.name == "dead_letters.py":
            return "dead letters of subscription *"
        case ast.Name() if path.name == "topic_subscriptions.py":
            return "dispatcher of subscription *"
        case ast.Name() if path.name == "backup.py":
            return "backup"
    return f"{path.name}:{node.lineno}"


def test_every_task_that_is_spawned_has_a_row() -> None:
    assert spawned_names() - {"", "spawn"} == set(TASKS) | OF_SUPERVISOR


# -- a broker at work ----------------------------------------------------------------------------------------------


def config() -> BrokerConfig:
    return small_config(
        ledger_max_entries=4,
        checkpoint_interval_ms=500,
        reclaim_interval_ms=1_000,
        seal_after_ms=500,
        overdue_action="expire",
        clock_recheck_ms=1_000,
        compaction_lease_ms=2_000,
        compaction_cleanup_ms=1_000,
        packed_rows_min=1,
    )


@cache
def first_life() -> tuple[MemVfs, int]:
    """The disk that a life has left, so that the next one has something to take up, and the time some way after it."""

    async def scenario(_: SimLoop, clock: SimClock) -> tuple[MemVfs, int]:
        node = Node(MemVfs(), clock, config()).open()
        await node.create_subscription(
            "orders", "billing", policy=SubscriptionPolicy(max_delivery_attempts=1), position=EARLIEST
        )
        await node.produce("orders", _messages(b"before", 6, after_ms=60_000))
        await asyncio.sleep(2)
        (far, *_) = await node.produce("orders", [_keyed(-number, HOUR_MS) for number in range(100, 112)])
        await asyncio.sleep(2)
        await node.checkpoint()
        await node.topic("orders").schedule.change([far], Cancel(), dry_run=False)
        await node.broker.backups.create("first")
        await node.stop()
        return node.vfs, clock.now_ms() + 90_000  # what waits comes due meanwhile

    return run_sim(scenario, 1)


class World:
    """A broker whose tasks can be interrupted, and what each of them does."""

    def __init__(self, clock: SimClock, monkeypatch: pytest.MonkeyPatch) -> None:
        disk, _ = first_life()
        self.vfs = disk.crashed(disk.op_count, CrashPolicy.KEEP_ALL)
        self.seen: Counter[str] = Counter()
        self.running: set[str] = set()
        self.target = ""
        self.interruption = Interruption()
        inner = Supervisor.spawn

        def spawn(this: Supervisor, name: str, coro: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
            row = row_of(name)
            self.seen[row] += 1
            if row == self.target:
                coro = Interrupted(coro, self.interruption)
            return inner(this, name, coro)

        monkeypatch.setattr(Supervisor, "spawn", spawn)
        # Or it would not be their turn in the time of a test.
        monkeypatch.setattr(rates, "_NOTE_SECONDS", 1)
        monkeypatch.setattr(ledger_packing, "_LOOK_SECONDS", 1)
        self.node = Node(self.vfs, clock, config())  # not before: its parts hold on to what spawns

    def failed(self) -> bool:
        return bool(self.node.failures) or self.node.broker.supervisor.failure is not None

    async def work(self, turns: int = TURNS, *, until_hit: bool = False) -> None:
        """Ask for everything that any task does; TimeoutError says that something was not done."""
        node = self.node
        broker, topic = node.broker, node.topic("orders")
        counters = broker.counters
        billing = topic.subscription("billing")
        later = topic.subscriptions.find("later") or await node.create_subscription("orders", "later")
        idle = topic.subscriptions.find("idle") or await node.create_subscription("orders", "idle")
        before = (counters.checkpoints, counters.removed_ledgers, sum(counters.index_operations.values()))
        broker.disk_free_bytes = -1
        recurs = await broker.registry.topic_or_create("recurs", always=True)
        await broker.recurring.put(recurs, "each second", Definition(RecurringRule(interval_ms=1_000), b""))
        await broker.bulk_changes.begin(topic, BulkDefinition(BulkKind.SHIFT, 1, begin_ms=1))
        for turn in range(turns):
            was_hit = until_hit and bool(self.interruption.hit)  # what it has spoilt takes one more turn
            await node.produce(
                "orders", [_keyed(turn * 4 + number, HOUR_MS) for number in range(4)], replace=True
            )
            # Together: a record that comes alone needs no turn of the journal's task.
            due, later_due = await asyncio.gather(
                node.produce("orders", _messages(b"%d" % turn, 4, after_ms=0)),
                node.produce("orders", _messages(b"%d" % turn, 4, after_ms=1_500)),
            )
            sent = [*due, *later_due]
            if turn:
                (replaced,) = await node.produce("orders", [_keyed(-turn, 1_000)], replace=True)
                sent.append(replaced)
            await self._receive(billing, sent, nack=sent[:1])
            await self._receive(later, sent)
            topic.counts.known_oldest_age_ms(idle, topic.counts.of(idle))
            if was_hit:
                break
        # Settled before they are due: reclaim reads when the rest of their ledger is.
        cancelled = await node.produce("orders", _messages(b"cancelled", 8, after_ms=HOUR_MS))
        await topic.schedule.change(cancelled, Cancel(), dry_run=False)
        await self._until(lambda: counters.checkpoints > before[0])
        await self._until(lambda: counters.removed_ledgers > before[1])
        await self._until(lambda: sum(counters.index_operations.values()) > before[2])
        await self._until(lambda: broker.disk_free_bytes >= 0)
        await self._until(lambda: not broker._tail_writer.unwritten_bytes)
        await self._until(lambda: bool(broker.dead_letters.still_held(topic.subscription("billing"))))
        assert await topic.keys.find(["no such key"]) == [None]
        await asyncio.wait_for(topic.index.caught_up(), 60)
        await self._until(lambda: topic.index.is_exact)
        assert await asyncio.wait_for(topic.counts.find_oldest_age_ms(idle), 60) > 0
        await topic.subscriptions.delete("idle")
        backup = await asyncio.wait_for(broker.backups.create("again"), 60)
        await asyncio.wait_for(broker.backups.delete(backup.name), 60)
        await self._lease_ends()
        alive = self.vfs.snapshot().get(f"{DATA_DIR}/alive")
        await self._until(lambda: self.vfs.snapshot().get(f"{DATA_DIR}/alive") != alive)

    async def _receive(
        self, subscription: Subscription, positions: list[Position], nack: Sequence[Position] = ()
    ) -> None:
        """As a client does: it connects again if its stream was ended."""
        left, topic = set(positions), self.node.topic("orders")
        async with asyncio.timeout(120):
            while left:
                inbox = self.node.attach(topic, subscription)
                try:
                    while left and inbox.consumer.closed_because is None:
                        with contextlib.suppress(TimeoutError):
                            await inbox.wait(1, seconds=5)
                        found = {each.position for each in inbox.received}
                        inbox.received.clear()
                        left -= found
                        await inbox.nack(found & set(nack))
                        await inbox.ack(found - set(nack))
                finally:
                    inbox.detach()

    async def _lease_ends(self) -> None:
        desk = self.node.broker.compactions
        found = await desk.candidates("orders")
        if not found.ledgers:
            return
        await desk.begin("orders", [found.ledgers[0].ledger_id], [], 1_000)
        await self._until(lambda: not desk.leases() and not desk._staging.has_orphans)

    async def _until(self, is_so: Any) -> None:
        async with asyncio.timeout(120):
            while not is_so():
                await asyncio.sleep(0.25)


def _messages(word: bytes, count: int, after_ms: int) -> list[Outgoing]:
    return [Outgoing(b"%s-%d" % (word, number), deliver_after_ms=after_ms) for number in range(count)]


def _keyed(number: int, after_ms: int) -> Outgoing:
    return Outgoing(b"keyed", deliver_after_ms=after_ms, schedule_key=f"key-{number}")


async def _unless_failed(world: World, work: Coroutine[Any, Any, None]) -> BaseException | None:
    """Let work go on as long as the broker has not failed; what it raised."""
    working = asyncio.ensure_future(work)
    while not working.done() and not world.failed():
        await asyncio.wait([working], timeout=1)
    if world.failed():
        working.cancel()
        await asyncio.wait([working])
        return None
    return working.exception()


def _is_from(outcome: BaseException | None, error: BaseException) -> bool:
    while outcome is not None and outcome is not error:
        outcome = outcome.__cause__
    return outcome is error


def run_world(monkeypatch: pytest.MonkeyPatch, target: str, interruption: Interruption) -> World:
    """Interrupt a task at one of its awaits; what is asked for afterwards is done, or the broker has failed."""

    _, start_ms = first_life()

    async def scenario(_: SimLoop, clock: SimClock) -> World:
        world = World(clock, monkeypatch)
        world.target, world.interruption = target, interruption
        world.node.open()
        outcome = await _unless_failed(world, world.work(until_hit=True))
        if outcome is not None and (
            interruption.error is None or not _is_from(outcome, interruption.error)
        ):  # else who asked for it was told
            raise outcome
        world.target = ""
        if interruption.hit and not world.failed():
            outcome = await _unless_failed(world, world.work(turns=3))
            if outcome is not None:
                raise outcome
        world.running = {row_of(name) for name in world.node.broker.supervisor.names()}
        world.node.abandon()
        return world

    with monkeypatch.context() as patched:
        monkeypatch = patched
        return run_sim(scenario, 1, start_ms=start_ms)


def test_a_broker_at_work_runs_every_task(monkeypatch: pytest.MonkeyPatch) -> None:
    world = run_world(monkeypatch, "", Interruption())
    assert not world.failed()
    assert set(world.seen) == set(HERE)


def survived_at(target: str, path: str) -> Kind:
    """Return the errors that a task survives at an await."""
    kinds = Kind(0)
    for where, survived in TASKS[target].survives.items():
        if is_on(path, where):
            kinds |= survived
    return kinds


def interrupt(monkeypatch: pytest.MonkeyPatch, target: str, kind: Kind, where: str) -> None:
    """Interrupt a task, and expect of it what its row says; with "" its first await is hit."""
    interruption = Interruption(ERRORS[kind](), where)
    try:
        world = run_world(monkeypatch, target, interruption)
    except TimeoutError as late:
        raise AssertionError(f"{target}, hit by {kind} at {where}: something is not done") from late
    assert interruption.hit, f"{target} was not hit at {where or 'any await'}"
    if kind in survived_at(target, interruption.hit):
        assert not world.failed(), f"{target} was to survive {kind} at {interruption.hit}"
        assert TASKS[target].life == ENDS or target in world.running
    else:
        assert world.failed(), f"{target} was to tell of {kind} at {interruption.hit}"


@pytest.mark.parametrize("target", [*sampled(HERE, EVERY)])
def test_an_error_that_is_not_survived_ends_the_broker(monkeypatch: pytest.MonkeyPatch, target: str) -> None:
    interrupt(monkeypatch, target, [*BUGS][(HERE.index(target) + DAY) % len(BUGS)], "")


@pytest.mark.parametrize(
    ("target", "where"),
    [*sampled([(name, where) for name in HERE for where in TASKS[name].survives], EVERY)],
)
def test_an_error_is_survived_where_the_row_says_so(
    monkeypatch: pytest.MonkeyPatch, target: str, where: str
) -> None:
    kinds = [*TASKS[target].survives[where]]
    interrupt(monkeypatch, target, kinds[(HERE.index(target) + DAY) % len(kinds)], where)


@pytest.mark.deep
@pytest.mark.parametrize("kind", ERRORS, ids=str)
@pytest.mark.parametrize("target", HERE)
def test_every_error_at_every_await_is_survived_as_the_row_says_or_told(
    monkeypatch: pytest.MonkeyPatch, target: str, kind: Kind
) -> None:
    noted = Interruption()
    run_world(monkeypatch, target, noted)
    for path in noted.seen:
        interrupt(monkeypatch, target, kind, path)
