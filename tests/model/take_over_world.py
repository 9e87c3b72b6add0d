"""The take-over protocol as a finite world: two nodes, a store and a clock, and every order of their events.

A state is a value; `successors` gives all that can happen next. What a node decides it decides with the broker's own
functions, which `Rules` holds so that a test can switch one off. Each of these may happen at any time:
  - the store carries out a create at once, late, or never; its answer comes or is lost; "exists" is said of nothing
  - a node pauses (it takes no step), crashes and begins again as a standby, reads, applies, decides, says something
  - a base is made of what a node has applied, and the log is trimmed below the one before it
  - a node begins with either of the two newest bases: one may be damaged
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from enum import IntEnum
from functools import cache
from typing import NamedTuple

from broker.cluster import take_over
from broker.cluster.group_head import GroupKind
from broker.cluster.lease import Moment, lease_holds
from broker.cluster.take_over import Answer, AppendStep

TICK_MS = 1000
LEASE_TICKS = 2
LEASE_MS = LEASE_TICKS * TICK_MS
NODES = (0, 1)


class Group(NamedTuple):
    """A group with one record or none."""

    kind: GroupKind
    epoch: int
    node: int
    life: int  # of the node, which begins a new one with each crash: the nonce
    record: int = 0
    seen: int = 0  # records that its writer had applied when it decided this one


FIRST = Group(GroupKind.TAKE_OVER, 0, -1, 0)


class Role(IntEnum):
    """A node's role."""

    FOLLOW = 0
    TAKE_OVER = 1
    """Its take-over is under way."""

    WON = 2
    """Its take-over is stored; the bases were not read yet."""

    OWN = 3


class Flight(NamedTuple):
    """An append under way."""

    index: int
    group: Group
    begin: int
    step: AppendStep = AppendStep.CREATE


class Node(NamedTuple):
    """A node's memory and folder."""

    role: Role
    life: int
    heard: int  # when it last read a group
    epoch: int  # of what it applied
    applied: tuple[int, ...]  # records
    applied_index: int  # all below is applied
    unapplied: tuple[Group, ...] = ()  # read, and not applied yet
    flight: Flight | None = None
    take_over_index: int = 0
    lease_begin: int = -9
    lease_answered: int = -9
    fence: Group | None = None
    """A take-over at `next_index`, read or our own, which counts once the bases were read after it (CLUSTER-5)."""

    @property
    def next_index(self) -> int:
        return self.applied_index + len(self.unapplied)

    @property
    def epoch_read(self) -> int:
        return self.unapplied[-1].epoch if self.unapplied else self.epoch


class Base(NamedTuple):
    """A copy of a folder."""

    next_index: int
    epoch: int
    records: tuple[int, ...]


EMPTY = Base(1, 0, ())


class State(NamedTuple):
    """The whole world."""

    now: int
    log: tuple[Group | None, ...]  # by index, from 1 on; trimmed or free: None
    older: Base
    """The second newest base, behind which the log is trimmed (CLUSTER-17)."""

    newest: Base
    late: frozenset[tuple[int, Group]]  # creates that the store may still carry out
    nodes: tuple[Node, Node]
    answered: frozenset[int]
    decided: int = 0
    crashes: int = 0


class Bounds(NamedTuple):
    """Limits of what is explored."""

    ticks: int
    records: int
    epochs: int
    crashes: int
    heartbeats: bool = False


@cache
def _holds_from_begin(begin: int, answered: int, now: int) -> bool:
    return lease_holds(_moment(begin), _moment(now), LEASE_MS)


def _has_applied_all_before(applied_index: int, take_over_index: int) -> bool:
    """CLUSTER-8. In the broker no call decides it: a node opens its folder only once the log before was applied."""
    return applied_index >= take_over_index


def _moment(tick: int) -> Moment:
    return Moment(tick * TICK_MS * 1_000_000, tick * TICK_MS)


class Rules(NamedTuple):
    """The decisions of the protocol: those of the broker, but for what a test replaces."""

    after_create: Callable[[Answer], AppendStep] = take_over.after_create
    after_read: Callable[[object, object | None], AppendStep] = take_over.after_read
    is_removable: Callable[[GroupKind, int, int], bool] = take_over.is_removable
    is_stray: Callable[[int, int], bool] = take_over.is_stray
    is_read_stray: Callable[[int, int], bool] = take_over.is_stray
    may_decide: Callable[[int, int], bool] = _has_applied_all_before
    holds: Callable[[int, int, int], bool] = _holds_from_begin
    may_take_over: Callable[[float, int, int], bool] = take_over.may_take_over
    fences_wait: bool = True
    """A take-over is applied only after the bases were read."""


class Violation(Exception):
    """A promise that was broken."""


Step = tuple[str, State]


def begin(*, owned: bool) -> State:
    """The world at its beginning: two standbys of a new log, or an owner and its standby."""
    if not owned:
        node = Node(Role.FOLLOW, 0, 0, 0, (), 2)
        return State(0, (FIRST,), EMPTY, EMPTY, frozenset(), (node, node), frozenset())
    taken = Group(GroupKind.TAKE_OVER, 1, 0, 0)
    owner = Node(Role.OWN, 0, 0, 1, (), 3, take_over_index=2, lease_begin=0, lease_answered=0)
    standby = Node(Role.FOLLOW, 0, 0, 1, (), 3)
    return State(0, (FIRST, taken), EMPTY, EMPTY, frozenset(), (owner, standby), frozenset())


class World:
    """The events of a world within bounds, under rules."""

    def __init__(self, bounds: Bounds, rules: Rules) -> None:
        self._bounds = bounds
        self._rules = rules

    def successors(self, state: State) -> Iterator[Step]:
        """Yield what can happen next; raises Violation if that breaks a promise."""
        if state.now < self._bounds.ticks:
            yield "tick", state._replace(now=state.now + 1)
        for index, group in state.late:
            if _at(state, index) is None:
                late = state.late - {(index, group)}
                yield (
                    f"the store carries out a late create at {index}",
                    _put(state, index, group)._replace(late=late),
                )
        trimmed = self._trimmed(state)
        if trimmed != state.log:
            yield "trim", state._replace(log=trimmed)
        for number in NODES:
            yield from self._steps(state, number)

    def check(self, state: State) -> None:
        """Raise Violation unless every promise is kept."""
        for base in (state.older, state.newest):
            truth = list(base.records)
            index = base.next_index
            while (group := _at(state, index)) is not None:
                if group.record:
                    truth.append(group.record)
                index += 1
            if not state.answered.issubset(truth):
                raise Violation("an answered record is lost")
            if len(set(truth)) < len(truth):
                raise Violation("a record is there twice")
        for node in state.nodes:
            if self._may_say(node, state.now) and not state.answered.issubset(node.applied):
                raise Violation("an owner says something without knowing of an answered record")

    def _may_say(self, node: Node, now: int) -> bool:
        return (
            node.role is Role.OWN
            and self._rules.may_decide(node.applied_index, node.take_over_index)
            and self._rules.holds(node.lease_begin, node.lease_answered, now)
        )

    def _trimmed(self, state: State) -> tuple[Group | None, ...]:
        below = state.older.next_index
        return tuple(
            None if group is None or self._rules.is_removable(group.kind, index, below) else group
            for index, group in enumerate(state.log, 1)
        )

    def _steps(self, state: State, number: int) -> Iterator[Step]:
        node = state.nodes[number]
        name = "AB"[number]
        if node.flight is not None:
            yield from self._flying(state, number, node.flight)
        if node.unapplied:
            yield f"{name} applies", self._with(state, number, _applied(node))
        elif node.fence is not None and not self._rules.fences_wait:
            early = _applied(node._replace(unapplied=(node.fence,), fence=None))
            yield f"{name} applies its fence", self._with(state, number, early)
        if node.applied_index >= state.newest.next_index:
            base = Base(node.applied_index, node.epoch, node.applied)
            if (state.newest, base) != (state.older, state.newest):
                yield f"{name} makes a base", state._replace(older=state.newest, newest=base)
        if state.crashes < self._bounds.crashes:
            yield f"{name} crashes", self._crashed(state, number)
        match node.role:
            case Role.FOLLOW:
                yield from self._following(state, number)
            case Role.WON:
                for read in self._after_bases(state, node):
                    yield f"{name} reads the bases", self._with(state, number, read)
            case Role.OWN if node.flight is None:
                yield from self._owning(state, number)

    def _following(self, state: State, number: int) -> Iterator[Step]:
        node, name = state.nodes[number], "AB"[number]
        if node.fence is not None:
            reads = (
                _seeded(state, node)
                if self._rules.is_read_stray(node.next_index, state.older.next_index)
                else [node._replace(unapplied=(*node.unapplied, node.fence), fence=None)]
            )
            for read in reads:
                yield f"{name} reads the bases", self._with(state, number, read)
            return
        if (group := _at(state, node.next_index)) is not None:
            read = node._replace(heard=state.now)
            if group.kind is GroupKind.TAKE_OVER:
                read = read._replace(fence=group)
            else:
                read = read._replace(unapplied=(*node.unapplied, group))
            yield f"{name} reads {node.next_index}", self._with(state, number, read)
        elif state.newest.next_index > node.next_index:
            for seeded in _seeded(state, node):
                yield f"{name} begins with a base", self._with(state, number, seeded)
        silent_ms = (state.now - node.heard) * TICK_MS
        epoch = node.epoch_read + 1
        if epoch <= self._bounds.epochs and self._rules.may_take_over(silent_ms, LEASE_MS, 0):
            group = Group(GroupKind.TAKE_OVER, epoch, number, node.life)
            flight = Flight(node.next_index, group, state.now)
            yield (
                f"{name} begins to take over at {node.next_index}",
                self._with(state, number, node._replace(role=Role.TAKE_OVER, flight=flight)),
            )

    def _owning(self, state: State, number: int) -> Iterator[Step]:
        node, name = state.nodes[number], "AB"[number]
        if not self._rules.may_decide(node.applied_index, node.take_over_index):
            return
        index = node.take_over_index + 1 if node.unapplied else node.applied_index
        if state.decided < self._bounds.records:
            record = state.decided + 1
            group = Group(GroupKind.RECORDS, node.epoch_read, number, node.life, record, len(node.applied))
            flying = node._replace(flight=Flight(index, group, state.now))
            yield (
                f"{name} decides record {record} and appends it at {index}",
                self._with(state, number, flying)._replace(decided=record),
            )
        if self._bounds.heartbeats and state.now > node.lease_begin:
            group = Group(GroupKind.HEARTBEAT, node.epoch_read, number, node.life, 0, index)
            flying = node._replace(flight=Flight(index, group, state.now))
            yield f"{name} appends a heartbeat at {index}", self._with(state, number, flying)

    def _flying(self, state: State, number: int, flight: Flight) -> Iterator[Step]:
        name, index = "AB"[number], flight.index
        if flight.step is AppendStep.READ:
            step = self._rules.after_read(flight.group, _at(state, index))
            yield f"{name} reads {index}: {step.value}", self._stepped(state, number, flight, step)
            return
        is_free = _at(state, index) is None
        stored = _put(state, index, flight.group) if is_free else state
        late = state._replace(late=state.late | {(index, flight.group)})
        outcomes = [
            ("and is answered", stored, Answer.STORED if is_free else Answer.EXISTS),
            ("and hears nothing, though it was carried out", stored, Answer.UNKNOWN),
            ("and hears nothing, and it may be carried out later", late, Answer.UNKNOWN),
        ]
        if is_free:
            outcomes.append(("and hears that it exists, though it does not", state, Answer.EXISTS))
        for what, after, answer in outcomes:
            step = self._rules.after_create(answer)
            yield f"{name} creates {index} {what}", self._stepped(after, number, flight, step)

    def _stepped(self, state: State, number: int, flight: Flight, step: AppendStep) -> State:
        node = state.nodes[number]
        match step:
            case AppendStep.STORED:
                return self._stored(state, number, flight)
            case AppendStep.FENCED if node.role is Role.OWN:
                return self._crashed(state, number, counted=False)
            case AppendStep.FENCED:
                return self._with(
                    state, number, node._replace(role=Role.FOLLOW, flight=None, heard=state.now)
                )
        return self._with(state, number, node._replace(flight=flight._replace(step=step)))

    def _stored(self, state: State, number: int, flight: Flight) -> State:
        node = state.nodes[number]
        node = node._replace(flight=None, lease_begin=flight.begin, lease_answered=state.now)
        if node.role is Role.TAKE_OVER:
            won = node._replace(role=Role.WON, take_over_index=flight.index, fence=flight.group)
            return self._with(state, number, won)
        node = node._replace(unapplied=(*node.unapplied, flight.group))
        while node.unapplied:
            node = _applied(node)
        answered = state.answered | ({flight.group.record} - {0})
        return self._with(state, number, node)._replace(answered=answered)

    def _after_bases(self, state: State, node: Node) -> list[Node]:
        if self._rules.is_stray(node.take_over_index, state.older.next_index):
            return _seeded(state, node)
        fence = () if node.fence is None else (node.fence,)
        return [node._replace(role=Role.OWN, unapplied=(*node.unapplied, *fence), fence=None)]

    def _crashed(self, state: State, number: int, *, counted: bool = True) -> State:
        """Begin a node's next life with what its folder holds. What it had sent may still be carried out."""
        node = state.nodes[number]
        again = Node(Role.FOLLOW, node.life + 1, state.now, node.epoch, node.applied, node.applied_index)
        late = (
            state.late | {(node.flight.index, node.flight.group)} if node.flight and counted else state.late
        )
        return self._with(state, number, again)._replace(late=late, crashes=state.crashes + counted)

    def _with(self, state: State, number: int, node: Node) -> State:
        return state._replace(nodes=(node, state.nodes[1]) if number == 0 else (state.nodes[0], node))


def _at(state: State, index: int) -> Group | None:
    return state.log[index - 1] if index <= len(state.log) else None


def _put(state: State, index: int, group: Group) -> State:
    log = list(state.log) + [None] * (index - len(state.log))
    log[index - 1] = group
    return state._replace(log=tuple(log))


def _seeded(state: State, node: Node) -> list[Node]:
    """Return a node that has begun with the newest base, and one that could not use it."""
    return [
        Node(Role.FOLLOW, node.life, state.now, base.epoch, base.records, base.next_index)
        for base in (state.newest, state.older)
    ]


def _applied(node: Node) -> Node:
    group, *rest = node.unapplied
    applied = node.applied
    if group.record:
        if group.seen != len(applied):
            raise Violation("a record was decided without another one that was stored before it")
        applied = (*applied, group.record)
    return node._replace(
        unapplied=tuple(rest), applied=applied, applied_index=node.applied_index + 1, epoch=group.epoch
    )


class Explored(NamedTuple):
    """The outcome of an exploration: how many states, and the shortest way to a violation."""

    count: int
    violation: str = ""
    way: tuple[str, ...] = ()


def explore(start: State, bounds: Bounds, rules: Rules | None = None) -> Explored:
    """Visit every state that can be reached, nearest first, until a promise is broken."""
    world = World(bounds, rules or Rules())
    came_from: dict[State, tuple[State, str] | None] = {start: None}
    waiting = deque([start])
    while waiting:
        state = waiting.popleft()
        try:
            world.check(state)
            for event, after in world.successors(state):
                step = (state, event)
                if came_from.setdefault(after, step) is step:  # to hash a world costs as much as to make it
                    waiting.append(after)
        except Violation as violation:
            return Explored(len(came_from), str(violation), _way(came_from, state))
    return Explored(len(came_from))


def _way(came_from: dict[State, tuple[State, str] | None], state: State) -> tuple[str, ...]:
    events = []
    while (step := came_from[state]) is not None:
        state, event = step
        events.append(event)
    return tuple(reversed(events))
