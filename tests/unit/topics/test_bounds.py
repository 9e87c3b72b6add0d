"""Every number of every record and manifest at the bounds of its type: the broker starts, works and starts again.

What is tried is found, not listed: the fields of the manifests' messages by their descriptors, those of the records
in what a history of the broker wrote. A field that the history does not show fails here until it does.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import struct
from collections.abc import Callable, Iterable, Iterator
from enum import Enum
from operator import itemgetter
from typing import Any, TypeVar, get_args

import numpy as np
import pytest
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pyroaring import BitMap

from broker.config import BrokerConfig
from broker.errors import Corrupt, Fenced, PostdateError
from broker.model import ENTRY_ID_MAX, EXPIRE_MS_MAX, TIME_MS_MAX, Position
from broker.policy import POLICY_SPECS, SubscriptionPolicy, TopicPolicy
from broker.runtime.vfs import replace_file
from broker.storage.bulk import MAGIC_BULK, BulkDefinition, BulkKind
from broker.storage.changes import Changed
from broker.storage.ledger_facts import LedgerFacts
from broker.storage.manifest import (
    FRAME_BYTES,
    MAGIC_BROKER,
    MAGIC_CURSOR,
    MAGIC_TOPIC,
    decode_topic,
    encode_topic,
    frame_content,
)
from broker.storage.producers_file import MAGIC_PRODUCERS
from broker.storage.records import Produced, Record, decode_record
from broker.storage.recurring import MAGIC_RECURRING
from broker.storage.recurring_values import Definition, OverdueRuns, RecurringRule
from broker.storage.v1 import bulk_pb2, recurring_pb2
from broker.storage.v1 import manifest_pb2 as pb
from broker.subscriptions import requests
from broker.testing.mem_vfs import CrashPolicy, MemVfs
from broker.testing.sim_clock import SimClock
from broker.testing.sim_loop import Latency, SimLoop, run_sim
from broker.topics import control
from broker.topics.schedule_values import Cancel, DueRange, Move
from broker.topics.topic import Topic
from tests.depth import DAY, DEPTH, TODAY, at_depth, sampled
from tests.harness import EARLIEST, Node, Outgoing, entries_of
from tests.unit.folder import compaction_world

HOUR_MS = 3_600_000
T = TypeVar("T")
TIMES = (0, TIME_MS_MAX, TIME_MS_MAX + 1, EXPIRE_MS_MAX, EXPIRE_MS_MAX + 1)

OF_SETTINGS = at_depth(change=2, deep=1)
INTEGERS = (-1, 0, 1, ENTRY_ID_MAX, ENTRY_ID_MAX + 1, *TIMES, 1 << 62, (1 << 63) - 1, 1 << 63, (1 << 64) - 1)
LEFT_OUT = {"Cancelled.ledgers.new_ms", "Replaced.cancelled.ledgers.new_ms"} | {
    f"{name}.produced.sequences" for name in ("Replaced", "Transferred")
}
LEFT_OUT |= {"Recurred.produced", "Recurred.cancelled.ledgers.new_ms", "BulkStepped.change"}
LEFT_OUT |= {"BulkStepped.step.definition", "BulkStepped.step.forgotten_ids"}  # the file has the former
"""Fields that a record of a type never sets, or that another type's record sets for it."""

NAMES = {"topic_id", "subscription_id", "ledger_id", "first_entry_id", "entry_ids", "offset", "length"}
NAMES |= {"entry_id", "generation", "from_generation", "data_bytes", "present_bytes", "floor"}
"""Names and places that the broker gave: whether there is what a record names is not in its bytes, nor has it a bound."""

MANIFESTS: dict[bytes, type[Message]] = {
    MAGIC_BROKER: pb.BrokerManifest,
    MAGIC_TOPIC: pb.TopicManifest,
    MAGIC_CURSOR: pb.CursorFile,
    MAGIC_PRODUCERS: pb.ProducersFile,
    MAGIC_RECURRING: recurring_pb2.RecurringFile,
    MAGIC_BULK: bulk_pb2.BulkFile,
}
COLUMNS = {
    "ProducerEntry.sequence_ids": np.uint64,
    "ProducerEntry.counts": np.uint32,
    "ProducerEntry.ledger_ids": np.uint64,
    "ProducerEntry.entry_ids": np.uint32,
    "ProducerEntry.publish_times_ms": np.int64,
    "WaitingTimes.times": np.int64,
    "RecurringDefinition.message": np.int64,
    "LedgerBitmap.bitmap": BitMap,
    "AttemptBits.bitmap": BitMap,
    "WaitingTimes.bitmap": BitMap,
}
"""Contents of fields of bytes."""

# -- the history -----------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class History:
    """A folder with manifests and a journal, and a record of each type that was written to it."""

    vfs: MemVfs
    records: dict[type, Record]


@functools.cache
def history() -> History:
    records: dict[type, Record] = {}

    async def scenario(_: SimLoop, clock: SimClock) -> MemVfs:
        node = Node(MemVfs(), clock, config())
        submit = node.broker._submit

        def noted(record: Record, apply: Callable[[int], None]) -> asyncio.Future[None]:
            if not isinstance(record, Produced) or record.sequences is not None:
                records[type(record)] = record
            return submit(record, apply)

        node.broker._submit = noted  # type: ignore[method-assign]
        node.open()
        await compaction_world.fill(node, 1)
        await compaction_world.compact(node)
        await use_everything(node, "first")
        await node.checkpoint()
        await use_everything(node, "second")
        return node.crash(CrashPolicy.KEEP_ALL).vfs

    return History(simulate(scenario), records)


async def use_everything(node: Node, name: str) -> None:
    """Leave a record of every type, and something in every field of the manifests."""
    topic = await node.broker.registry.create_topic(name, TopicPolicy(default_ttl_ms=HOUR_MS))
    policy = SubscriptionPolicy(max_delivery_attempts=2)
    for each in ("one", "two"):
        await node.create_subscription(name, each, position=EARLIEST, policy=policy)
    inbox = node.attach(topic, topic.subscription("one"))
    numbered = [Outgoing(b"n%d" % number, sequence_id=2 * number + 1) for number in range(3)]
    ready = await node.produce(name, numbered, "producer")
    later = await node.produce(name, [Outgoing(b"later", deliver_after_ms=HOUR_MS) for _ in range(6)])
    keyed = [Outgoing(b"keyed", deliver_after_ms=HOUR_MS, schedule_key="key")]
    await node.produce(name, keyed)
    await node.produce(name, keyed, replace=True)
    await topic.schedule.change(later[:2], Move(deliver_after_ms=2 * HOUR_MS), dry_run=False)
    await topic.schedule.change(later[2:3], Cancel(), dry_run=False)
    await inbox.wait(3)
    await inbox.ack(ready[1:2])
    await inbox.nack(ready[2:], HOUR_MS, "boom")
    held_by = inbox.consumer.consumer_id
    await requests.give_back(topic.subscription("one"), held_by, entries_of(ready[:1]), 0, dead_letter=True)
    inbox.detach()
    await control.pause(topic, topic.subscription("two"), paused=True)
    await topic.change_policy(TopicPolicy(default_ttl_ms=2 * HOUR_MS))
    hourly = RecurringRule(interval_ms=HOUR_MS)
    cron = RecurringRule(cron="0 3 * * *", zone="Europe/Berlin")
    listed = RecurringRule(times_ms=(node.clock.now_ms() + HOUR_MS,))
    for schedule, rule in (("hourly", hourly), ("cron", cron), ("list", listed), ("gone", hourly)):
        definition = Definition(rule, b"", 1, 1 << 42, 5_000, OverdueRuns.ONE)
        await node.broker.recurring.put(topic, schedule, definition)
    await node.broker.recurring.delete(topic, "gone")
    await node.broker.recurring.pause(topic, "list", paused=True)
    dry = BulkDefinition(
        BulkKind.DELAY, node.clock.now_ms(), 1, 1 << 42, "k", True, "r", "somebody", node.clock.now_ms()
    )
    for bulk in (dry, BulkDefinition(BulkKind.SHIFT, 1, begin_ms=1)):
        await node.broker.bulk_changes.begin(topic, bulk)
    await node.create_subscription(name, "three")
    await control.seek(topic, topic.subscription("three"), Position(0, 0))
    await topic.subscriptions.delete("three")
    gone = await node.produce(name, [Outgoing(b"gone", deliver_after_ms=HOUR_MS) for _ in range(10)])
    await topic.schedule.change(gone, Cancel(), dry_run=False)
    await asyncio.sleep(10)  # sealed, reclaimed, written
    await node.broker.registry.create_topic(f"{name}-deleted", TopicPolicy())
    await node.broker.registry.delete_topic(f"{name}-deleted")


def config() -> BrokerConfig:
    return compaction_world.config(reclaim_interval_ms=1_000, clock_recheck_ms=1_000)


def simulate(scenario: Callable[[SimLoop, SimClock], Any]) -> Any:
    return run_sim(scenario, seed=3, latency=Latency(max_ms=1.0, slow_every=0))


# -- what is tried ---------------------------------------------------------------------------------------------------


async def check_it_lives(vfs: MemVfs, clock: SimClock) -> bool:
    """Start, work, write a checkpoint, and once more from what is on the disk. False: refused as damage, or as foreign."""
    node = Node(vfs, clock, config())
    try:
        node.open()
    except Corrupt:
        return False
    except Fenced as error:
        if error.reason != "DATA_DIR_OF_ANOTHER_SHARD":
            raise
        return False
    for name in ("first", "second"):
        await work(node, name)
    await node.checkpoint()
    assert node.failures == []
    node = node.crash(CrashPolicy.LOSE_UNSYNCED).open()
    await work(node, "first")
    await node.stop()
    assert node.failures == []
    return True


async def work(node: Node, name: str) -> None:
    """Work as a client does; refusals are as good an answer."""
    with contextlib.suppress(PostdateError):
        topic = node.topic(name)
        sent = [Outgoing(b"w", deliver_after_ms=HOUR_MS, ttl_ms=1), Outgoing(b"w", sequence_id=1 << 40)]
        some = await node.produce(name, sent, "producer")
        for each in (*await waiting(topic), *some):
            for ms in (TIME_MS_MAX, node.clock.now_ms() + HOUR_MS):
                await topic.schedule.change([each], Move(deliver_at_ms=ms), dry_run=False)
        for subscription in list(topic.subscriptions.values()):
            inbox = node.attach(topic, subscription)
            await asyncio.sleep(0.1)
            held = [each.position for each in inbox.poll()]
            await inbox.ack(held[:1])
            await inbox.nack(held[1:])
            inbox.detach()
            topic.counts.of(subscription)
        await topic.schedule.count(DueRange(), 0)


async def waiting(topic: Topic) -> list[Position]:
    """A few of those whose time has not come."""
    found = []
    for ledger in topic.log:
        for entry_id in range(min(2, ledger.entry_count)):
            position = Position(ledger.name.ledger_id, entry_id)
            with contextlib.suppress(PostdateError):
                await topic.schedule.get(position)
                found.append(position)
    return found


# -- manifests -------------------------------------------------------------------------------------------------------


def bounds_of(field: Any) -> list[Any]:
    """Values at the borders of a field's type, and of what the broker calls a time."""
    kinds = FieldDescriptor
    match field.type:
        case kinds.TYPE_INT64:
            return [-(1 << 63), -1, (1 << 63) - 1, *TIMES]
        case kinds.TYPE_UINT64 if is_counter(field.name):  # of the broker's own: none gets near its end
            return [0, 1, 1 << 47, 1 << 62, 1 << 63, (1 << 64) - 1]
        case kinds.TYPE_UINT64:
            return [0, 1, (1 << 48) - 1, 1 << 48, (1 << 63) - 1, 1 << 63, (1 << 64) - 1]
        case kinds.TYPE_UINT32 | kinds.TYPE_FIXED32:
            return [0, (1 << 31) - 1, (1 << 32) - 1]
        case kinds.TYPE_DOUBLE:
            return [-1.0, 0.0, 1.0, 1e308, float("inf"), float("nan")]
        case kinds.TYPE_BOOL:
            return [False, True]
        case kinds.TYPE_STRING:
            return ["", "a" * 255]
        case kinds.TYPE_BYTES:
            of = COLUMNS[".".join(field.full_name.split(".")[-2:])]
            if of is BitMap:
                return [BitMap(ids).serialize() for ids in ([], [0], [(1 << 32) - 1])]
            info = np.iinfo(of)
            return [np.array([value], of).tobytes() for value in (info.min, 0, 1, info.max)]
    raise AssertionError(f"a field of a type that nothing is known of: {field.full_name}")


def is_counter(name: str) -> bool:
    """Return whether the broker goes on counting from a field."""
    return name.startswith("next_") or name.endswith("lsn")


def fields_of(descriptor: Any) -> set[str]:
    """Every field of a message and of what it holds."""
    found = set()
    for field in descriptor.fields:
        found.add(f"{descriptor.name}.{field.name}")
        if field.message_type is not None:
            found |= fields_of(field.message_type)
    return found


def changes_of(message: Message, held: set[str]) -> Iterator[tuple[str, Any, Message]]:
    """Copies of a message with one field changed; `held`: the fields that the message shows."""
    for field in message.DESCRIPTOR.fields:
        value = getattr(message, field.name)
        name = f"{message.DESCRIPTOR.name}.{field.name}"
        if field.message_type is None:
            held.add(name)
            for bound in bounds_of(field):
                changed = type(message)()
                changed.CopyFrom(message)
                if field.is_repeated:
                    del getattr(changed, field.name)[:]
                    getattr(changed, field.name).append(bound)
                else:
                    setattr(changed, field.name, bound)
                yield name, bound, changed
            continue
        parts = list(value) if field.is_repeated else [value] if message.HasField(field.name) else []
        if parts:
            held.add(name)
        for index, part in enumerate(parts):
            for inner, bound, changed_part in changes_of(part, held):
                changed = type(message)()
                changed.CopyFrom(message)
                target = getattr(changed, field.name)
                (target[index] if field.is_repeated else target).CopyFrom(changed_part)
                yield inner, bound, changed


def manifests_in(vfs: MemVfs) -> list[tuple[str, bytes, Message]]:
    found = []
    for path, content in sorted(vfs.snapshot().items()):
        if (kind := MANIFESTS.get(content[:4])) is not None:
            message = kind()
            message.ParseFromString(content[FRAME_BYTES:])
            found.append((path, content[:4], message))
    return found


def folder() -> MemVfs:
    """The history's folder, for one who changes it."""
    vfs = history().vfs
    return vfs.crashed(vfs.op_count, CrashPolicy.KEEP_ALL)


@functools.cache
def manifest_cases() -> tuple[dict[str, dict[Any, tuple[str, bytes]]], set[str]]:
    """By field and bound the file and what replaces it; and the fields that the history's manifests show."""
    cases: dict[str, dict[Any, tuple[str, bytes]]] = {}
    held: set[str] = set()
    for path, magic, message in manifests_in(history().vfs):
        for name, bound, changed in changes_of(message, held):
            content = frame_content(magic, changed.SerializeToString(deterministic=True))
            cases.setdefault(name, {}).setdefault(bound, (path, content))
    return cases, held


MANIFEST_FIELDS = sorted(set().union(*(fields_of(kind.DESCRIPTOR) for kind in MANIFESTS.values())))


@pytest.mark.slow
@pytest.mark.parametrize("field", MANIFEST_FIELDS)
def test_a_manifest_with_a_field_at_a_bound_is_refused_or_lived_with(field: str) -> None:
    cases, held = manifest_cases()
    assert field in held, f"no manifest of the history has {field}: let it have one"
    for bound, (path, content) in tried(cases.get(field, {}).items()):

        async def scenario(_: SimLoop, clock: SimClock, path: str = path, content: bytes = content) -> None:
            vfs = folder()
            replace_file(vfs, path, [content])
            await check_it_lives(vfs, clock)

        with told(f"{field} = {bound!r}"):
            simulate(scenario)


@contextlib.contextmanager
def told(what: str) -> Iterator[None]:
    """Say what was tried if it fails."""
    try:
        yield
    except Exception as error:
        error.add_note(what)
        raise


# -- records ---------------------------------------------------------------------------------------------------------


Variants = Iterator[tuple[str, Any, Any]]
"""(field, bound, value with that field at that bound)"""


def tried(bounds: Iterable[tuple[Any, T]]) -> list[tuple[Any, T]]:
    """Of the bounds of one field those that this run tries: a change the greatest."""
    found = sorted(bounds, key=itemgetter(0))
    return found if DEPTH == "deep" else found[-1:]


def variants(value: Any, name: str) -> Variants:
    """Of every number in a value."""
    match value:
        case bool() | str() | bytes() | memoryview() | Enum() | None:
            return iter(())
        case int():
            return ((name, bound, bound) for bound in INTEGERS)
        case BitMap():
            return ((name, bound, BitMap([bound])) for bound in (0, ENTRY_ID_MAX))
        case np.ndarray():
            return _columns(value, name)
        case dict():
            last = max(value)
            return ((path, at, {**value, last: part}) for path, at, part in variants(value[last], name))
        case Position():
            return _fields(value, Position._fields, value._replace, name)
        case tuple():
            if not value:
                return iter(())
            return ((path, at, (*value[:-1], part)) for path, at, part in variants(value[-1], name))
        case TopicPolicy() | SubscriptionPolicy():
            return _settings(value, name)
    assert dataclasses.is_dataclass(value), f"{name} is of a type that nothing is known of: {type(value)}"
    names = tuple(field.name for field in dataclasses.fields(value) if field.init)
    return _fields(value, names, functools.partial(dataclasses.replace, value), name)  # type: ignore[type-var]


def _fields(value: Any, fields: tuple[str, ...], change: Callable[..., Any], name: str) -> Variants:
    for field in fields:
        for path, bound, part in variants(getattr(value, field), f"{name}.{field}"):
            yield path, bound, change(**{field: part})


def _settings(policy: Any, name: str) -> Variants:
    for field in dataclasses.fields(policy):
        spec = POLICY_SPECS[field.name]
        bounds = (0, len(spec.choices)) if spec.choices else (spec.low, spec.high)
        for bound in bounds if bounds[1] else ():
            yield f"{name}.{field.name}", bound, dataclasses.replace(policy, **{field.name: bound})


def _columns(column: np.ndarray, name: str) -> Variants:
    for field in column.dtype.names or ("",):
        kind = column.dtype[field] if field else column.dtype
        for bound in {np.iinfo(kind).min, np.iinfo(kind).max, *(t for t in TIMES if t <= np.iinfo(kind).max)}:
            changed = column.copy()
            (changed[field] if field else changed)[-1] = bound
            yield f"{name}.{field}" if field else name, bound, changed


def missing_in(value: Any, name: str) -> Iterator[str]:
    """Report numbers that a record could hold and this one does not: they would not be tried."""
    if isinstance(value, TopicPolicy | SubscriptionPolicy):
        return
    if value is None or (isinstance(value, dict | tuple | BitMap) and not len(value)):
        yield name
    elif isinstance(value, dict):
        yield from missing_in(value[max(value)], name)
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from missing_in(getattr(value, field.name), f"{name}.{field.name}")


def continuing(record: Any) -> Any:
    """The record, with its batch in a ledger of its own, which it begins."""
    if isinstance(record, Produced):
        rows = record.rows.copy()
        rows["offset"] -= rows["offset"][0]
        given = record.sequences
        if given is not None:  # none of them was stored before
            given = dataclasses.replace(given, sequence_ids=given.sequence_ids + np.uint64(1_000))
        return dataclasses.replace(record, ledger_id=1 << 40, first_entry_id=0, rows=rows, sequences=given)
    inner = getattr(record, "produced", None)
    return record if inner is None else dataclasses.replace(record, produced=continuing(inner))


@pytest.mark.slow
@pytest.mark.parametrize("kind", get_args(Record), ids=lambda kind: kind.__name__)
def test_a_record_with_a_field_at_a_bound_is_refused_or_lived_with(kind: type) -> None:
    assert kind in history().records, f"the history has no {kind.__name__}: let it have one"
    record = continuing(history().records[kind])
    assert set(missing_in(record, kind.__name__)) <= LEFT_OUT
    bounds: dict[str, list[tuple[Any, Any]]] = {}
    for path, bound, changed in variants(record, kind.__name__):
        if path.rpartition(".")[2] not in NAMES:
            bounds.setdefault(path, []).append((bound, changed))
    paths = [path for path in bounds if ".policy." not in path]
    # Each setting comes in two records: a change tries it in one of them, on the next day in the other.
    shift = TODAY - DAY + kind.__name__.endswith("Created")
    paths += sampled((path for path in bounds if ".policy." in path), OF_SETTINGS, shift)
    for path, bound, changed in ((each, *one) for each in paths for one in tried(bounds[each])):
        with told(f"{path} = {bound}"):
            try:
                found = decode_record(record.type, memoryview(b"".join(map(bytes, changed.encode()))))
            except (struct.error, ValueError, OverflowError, PostdateError):
                continue  # it is refused, or has no form on disk

            async def scenario(_: SimLoop, clock: SimClock, found: Record = found) -> None:
                node = Node(folder(), clock, config()).open(start=False)
                node.broker.supervisor.spawn("journal", node.broker.journal.run())
                await node.broker.journal.submit(found.type, found.encode(), lambda _: None)
                await check_it_lives(node.crash(CrashPolicy.LOSE_UNSYNCED).vfs, clock)

            simulate(scenario)


# -- the sum that left its type --------------------------------------------------------------------------------------


@given(
    expire_ms=st.integers(1, EXPIRE_MS_MAX),
    times=st.lists(st.integers(1, TIME_MS_MAX), min_size=2, max_size=9),
    often=st.sampled_from([1, 1_100]),
)
@example(expire_ms=EXPIRE_MS_MAX, times=[1, TIME_MS_MAX], often=1)
@settings(max_examples=at_depth(fast=5, change=15, deep=300))
def test_no_row_of_moves_brings_a_ledgers_expiry_out_of_its_type(
    expire_ms: int, times: list[int], often: int
) -> None:
    facts = LedgerFacts(1, 1, expire_ms, 1)
    changes = [
        Changed(np.zeros(1, np.uint32), np.array([old_ms]), np.array([new_ms]))
        for old_ms, new_ms in zip(times, [*times[1:], times[0]], strict=True)
    ]
    for changed in changes * often:
        assert changed.new_ms is not None
        before, facts = facts, facts.moved(changed.old_ms, changed.new_ms)
        assert before.last_expire_ms <= facts.last_expire_ms <= EXPIRE_MS_MAX


@pytest.mark.slow
@pytest.mark.parametrize("expire_ms", [EXPIRE_MS_MAX + 1, 1 << 63, 1 << 70])
def test_whatever_a_sum_came_to_a_manifest_is_written(expire_ms: int) -> None:
    (path, _, _) = next(each for each in manifests_in(history().vfs) if each[1] == MAGIC_TOPIC)
    image = decode_topic(history().vfs.snapshot()[path], path)
    first = dataclasses.replace(image.ledgers[0], facts=LedgerFacts(1, 1, expire_ms, 1))
    found = decode_topic(encode_topic(dataclasses.replace(image, ledgers=(first, *image.ledgers[1:]))), path)
    assert found.ledgers[0].facts.last_expire_ms == EXPIRE_MS_MAX


def test_a_sum_that_a_manifest_holds_from_before_is_read_as_the_greatest_expiry(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (path, _, _) = next(each for each in manifests_in(history().vfs) if each[1] == MAGIC_TOPIC)
    image = decode_topic(history().vfs.snapshot()[path], path)
    first = dataclasses.replace(image.ledgers[0], facts=LedgerFacts(1, 1, (1 << 63) - 1, 1))
    with monkeypatch.context() as before:
        before.setattr("broker.storage.manifest.EXPIRE_MS_MAX", 1 << 63)
        written = encode_topic(dataclasses.replace(image, ledgers=(first, *image.ledgers[1:])))
    assert decode_topic(written, path).ledgers[0].facts.last_expire_ms == EXPIRE_MS_MAX


@pytest.mark.deep
def test_a_message_that_is_moved_to_the_end_of_time_and_back_leaves_a_broker_that_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each move to a later time put the ledger's expiry off, and none took it back: 1,024 of them passed int64."""
    # Folders hold such moves from before they were refused; with the limit of today it would take 37,000 of them.
    monkeypatch.setattr("broker.topics.changing.DELIVER_AT_MS_MAX", TIME_MS_MAX)

    async def scenario(_loop: SimLoop, clock: SimClock) -> None:
        node = Node(MemVfs(), clock, config()).open()
        (position,) = await node.produce("orders", [Outgoing(b"m", deliver_after_ms=HOUR_MS, ttl_ms=HOUR_MS)])
        for _ in range(1_100):
            for ms in (TIME_MS_MAX, clock.now_ms() + HOUR_MS):
                await node.topic("orders").schedule.change([position], Move(deliver_at_ms=ms), dry_run=False)
        node = node.crash(CrashPolicy.LOSE_UNSYNCED).open()
        await node.checkpoint()
        await node.stop()
        assert node.failures == []

    simulate(scenario)
