"""Any file of a data directory as JSON-able lines, recognised by its first bytes, whatever its name is.

Every line says in `line` what it is. A damaged file gives what can be read of it and ends in a line "error"; so
does a file that is none of ours. What a crash may leave (a torn last group, rows that no manifest names) is
printed as it is and is no error. Nothing is changed, and no broker is needed; of a running one, a file that grows
meanwhile may end in a row or group that is not whole.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any, assert_never

import numpy as np
from pyroaring import BitMap

from broker.errors import Corrupt
from broker.model import Entries
from broker.policy import SubscriptionPolicy, TopicPolicy, set_values
from broker.runtime.vfs import Vfs, read_file
from broker.storage.alive import MAGIC as MAGIC_ALIVE
from broker.storage.alive import decode_alive
from broker.storage.amendments import MAGIC as MAGIC_AMENDMENTS
from broker.storage.blocks import MAGICS
from broker.storage.bucket_dump import dump_amendments, dump_bucket
from broker.storage.bucket_snapshot import MAGIC as MAGIC_BUCKET
from broker.storage.bulk import MAGIC_BULK, decode_bulk
from broker.storage.changes import Cancelled, Changed, Moved
from broker.storage.compacted import CompactedLedger, LedgersCompacted
from broker.storage.frame import COMMIT
from broker.storage.frame import decode_record as decode_framed
from broker.storage.key_run import MAGIC as MAGIC_KEY_RUN
from broker.storage.key_run_dump import dump_key_run
from broker.storage.ledger_check import dump_ledger
from broker.storage.local_group_log import SEGMENT_NAME
from broker.storage.manifest import (
    CONTENT_BYTES_MAX,
    FRAME_BYTES,
    MAGIC_BROKER,
    MAGIC_CURSOR,
    MAGIC_TOPIC,
    VERSION,
    BrokerImage,
    CursorImage,
    SubscriptionImage,
    TopicImage,
    decode_broker,
    decode_cursor,
    decode_topic,
    frame_content,
)
from broker.storage.producers_file import MAGIC_PRODUCERS, decode_producers
from broker.storage.records import (
    BulkStepped,
    GivenBack,
    LedgersDropped,
    Produced,
    Record,
    Recurred,
    Replaced,
    Seeked,
    Settled,
    SubscriptionChanged,
    SubscriptionCreated,
    SubscriptionDeleted,
    TopicCreated,
    TopicDeleted,
    TopicPolicyChanged,
    Transferred,
    decode_record,
)
from broker.storage.recurring import MAGIC_RECURRING, RecurringStep, decode_recurring
from broker.storage.segment import MAGIC as MAGIC_SEGMENT
from broker.storage.segment import Line as SegmentLine
from broker.storage.segment import describe

Line = dict[str, Any]

_FIRST_IDS = 10


def dump_file(vfs: Vfs, path: str) -> Iterator[Line]:
    """One file, line by line. Blocks; raises OSError if it cannot be read, and nothing for its bytes."""
    file = vfs.open(path)
    try:
        magic, file_bytes = file.pread(4, 0), file.size()
    finally:
        file.close()
    dumper = _DUMPERS.get(magic)
    if dumper is None:
        what = "The file is empty" if file_bytes == 0 else f"No file of Postdate begins with {magic!r}"
        yield _error(what, path, 0)
        return
    try:
        yield from dumper(vfs, path)
    except Corrupt as error:
        yield _error(error.message, path, error.offset)


def dump_segment(vfs: Vfs, path: str) -> Iterator[SegmentLine]:
    """A journal segment and what its records say, whatever its bytes are."""
    data = read_file(vfs, path)
    # The name tells what the header said, should that be damaged.
    match = SEGMENT_NAME.fullmatch(path.rpartition("/")[2])
    first_lsn = int(match[1], 16) if match else int.from_bytes(data[8:16], "little")
    view = memoryview(data)
    for line in describe(data, first_lsn, path):
        if line["kind"] == "header":
            first_lsn = int(line["first_lsn"])
        if line["kind"] == "record":
            framed = decode_framed(view, first_lsn, int(line["offset"]))
            assert framed is not None and framed.type != COMMIT  # it has verified before
            yield {**line, **_record_fields(framed.type, framed.body)}
        else:
            yield line


def _record_fields(record_type: int, body: memoryview) -> Line:
    try:
        record = decode_record(record_type, body)
    except Corrupt as error:
        return {"error": error.message}
    return {"record": type(record).__name__, **_fields_of(record)}


def _fields_of(record: Record) -> Line:
    match record:
        case Produced():
            delayed = record.times[record.times > 0]
            return {
                "topic_id": record.topic_id,
                "ledger_id": record.ledger_id,
                "first_entry_id": record.first_entry_id,
                "count": len(record.times),
                "publish_time_ms": record.publish_time_ms,
                "delayed_count": len(delayed),
                "first_deliver_at_ms": int(np.min(delayed)) if len(delayed) else 0,
                "last_deliver_at_ms": int(np.max(delayed)) if len(delayed) else 0,
                "frames_bytes": len(record.frames),
                **_sequences(record),
            }
        case Settled() | GivenBack():
            return {
                "topic_id": record.topic_id,
                "subscription_id": record.subscription_id,
                "reason": record.reason.name,
                **_waits_of(record),
                "entries": _entries(record.entries),
            }
        case TopicCreated():
            return {
                "topic_id": record.topic_id,
                "name": record.name,
                "create_time_ms": record.create_time_ms,
                "policy": _policy(record.policy),
            }
        case TopicDeleted():
            return {"topic_id": record.topic_id}
        case TopicPolicyChanged():
            return {"topic_id": record.topic_id, "policy": _policy(record.policy)}
        case SubscriptionCreated() | SubscriptionDeleted() | SubscriptionChanged() | Seeked():
            return {"topic_id": record.topic_id, **_subscription_fields(record)}
        case LedgersDropped():
            return {
                "topic_id": record.topic_id,
                "ledger_ids": list(record.ledger_ids),
                "came_due_ms": record.came_due_ms,
            }
        case LedgersCompacted():
            return {
                "topic_id": record.topic_id,
                "amended_lsn": record.amended_lsn,
                "ledgers": [_compacted(ledger) for ledger in record.ledgers],
                **({"files_follow": True} if record.files_follow else {}),
            }
        case Cancelled() | Moved():
            return {
                "topic_id": record.topic_id,
                "ledgers": [_changed(*ledger) for ledger in record.ledgers.items()],
            }
        case BulkStepped() | Recurred() | Replaced() | Transferred():
            return _fields_of_parts(record)
        case _:
            assert_never(record)


def _fields_of_parts(record: BulkStepped | Recurred | Replaced | Transferred) -> Line:
    match record:
        case BulkStepped():
            change = (
                {}
                if record.change is None
                else {type(record.change).__name__.lower(): _fields_of(record.change)}
            )
            return {"topic_id": record.topic_id, **change, "bulk_change": dataclasses.asdict(record.step)}
        case Recurred():
            parts = {"produced": record.produced, "cancelled": record.cancelled}
            fields = {name: _fields_of(part) for name, part in parts.items() if part is not None}
            steps = [_without_payload(step) for step in record.steps]
            return {"topic_id": record.topic_id, **fields, "schedules": steps}
        case Replaced():
            return {"produced": _fields_of(record.produced), "cancelled": _fields_of(record.cancelled)}
        case Transferred():
            only = {"only_for_subscription_id": record.subscription_id} if record.subscription_id else {}
            return {"produced": _fields_of(record.produced), "settled": _fields_of(record.settled), **only}
        case _:
            assert_never(record)


def _subscription_fields(
    record: SubscriptionCreated | SubscriptionDeleted | SubscriptionChanged | Seeked,
) -> Line:
    match record:
        case SubscriptionCreated():
            return _subscription(record.subscription)
        case SubscriptionDeleted():
            return {"subscription_id": record.subscription_id}
        case SubscriptionChanged():
            return {
                "subscription_id": record.subscription_id,
                "policy": _policy(record.policy),
                "paused": record.paused,
            }
        case Seeked():
            return {"subscription_id": record.subscription_id, "start": list(record.start)}
        case _:
            assert_never(record)


def _without_payload(step: RecurringStep) -> Line:
    fields = dataclasses.asdict(step)
    if step.definition is not None:
        fields["definition"]["message"] = f"{len(step.definition.message)} bytes"
    return fields


def _waits_of(record: Settled | GivenBack) -> Line:
    if isinstance(record, Settled):
        return {}
    return {"not_before_ms": record.not_before_ms, "text": record.text}


def _compacted(ledger: CompactedLedger) -> Line:
    return dataclasses.asdict(ledger) | {"present": list(ledger.present)}


def _changed(ledger_id: int, changed: Changed) -> Line:
    new = {} if changed.new_ms is None else {"deliver_at_ms": changed.new_ms.tolist()}
    return {
        "ledger_id": ledger_id,
        "entry_ids": changed.entry_ids.tolist(),
        "before_ms": changed.old_ms.tolist(),
        **new,
    }


def _sequences(record: Produced) -> Line:
    sequences = record.sequences
    if sequences is None:
        return {}
    given = sequences.sequence_ids[sequences.sequence_ids > 0]
    forgotten = {"forgotten_producer": sequences.forgotten_name} if sequences.forgotten_name else {}
    return {
        "producer": sequences.producer_name,
        "first_sequence_id": int(given[0]),
        "last_sequence_id": int(given[-1]),
        "floor": sequences.floor,
        **forgotten,
    }


def _dump_segment(vfs: Vfs, path: str) -> Iterator[Line]:
    wrong: Corrupt | None = None
    for line in dump_segment(vfs, path):
        kind = line.pop("kind")
        yield {"line": kind, **line}
        if wrong is not None:
            continue
        if kind == "header" and not line["ok"]:
            wrong = Corrupt(str(line["error"]), offset=0)
        elif kind == "record" and line["committed"] and "error" in line:
            wrong = Corrupt(f"lsn {line['lsn']}: {line['error']}", offset=int(line["offset"]))
        elif kind == "end" and line["damaged"]:
            what = f"A group is damaged: the group committed at offset {line['later_commit']} was written after it"
            wrong = Corrupt(what, offset=int(line["offset"]))
    if wrong is not None:
        raise wrong


def _dump_manifest(
    what: str, magic: bytes, lines_of: Callable[[bytes, str], Iterator[Line]]
) -> Callable[[Vfs, str], Iterator[Line]]:
    def dump(vfs: Vfs, path: str) -> Iterator[Line]:
        framed = read_file(vfs, path, FRAME_BYTES + CONTENT_BYTES_MAX + 1)
        version = framed[4] if len(framed) > 4 else 0
        yield {"line": "header", "file": what, "version": version, "file_bytes": len(framed)}
        try:
            yield from lines_of(framed, path)
        except Corrupt as damage:
            if version == VERSION:
                # The content may still be readable, though no checksum vouches for it.
                try:
                    yield from lines_of(frame_content(magic, framed[FRAME_BYTES:]), path)
                except Corrupt as unreadable:
                    raise damage from unreadable
            raise

    return dump


def _broker_lines(framed: bytes, path: str) -> Iterator[Line]:
    image: BrokerImage = decode_broker(framed, path)
    yield {
        "line": "broker",
        "broker_id": image.broker_id,
        "checkpoint_lsn": image.checkpoint_lsn,
        "next_topic_id": image.next_topic_id,
        "next_ledger_id": image.next_ledger_id,
        "last_alive_ms": image.last_alive_ms,
        **({"shard": image.shard, "epoch": image.epoch} if image.shard else {}),
    }
    for topic_id, name in image.topics.items():
        yield {"line": "topic", "topic_id": topic_id, "name": name}


def _topic_lines(framed: bytes, path: str) -> Iterator[Line]:
    image: TopicImage = decode_topic(framed, path)
    yield {
        "line": "topic",
        "topic_id": image.topic_id,
        "name": image.name,
        "create_time_ms": image.create_time_ms,
        "policy": _policy(image.policy),
        "applied_lsn": image.applied_lsn,
        "next_subscription_id": image.next_subscription_id,
        "indexed_through": list(image.indexed_through),
        "index_lsn": image.index_lsn,
        "frontier_ms": image.frontier_ms,
        "bucket_ids": list(image.bucket_ids),
        "next_bucket_id": image.next_bucket_id,
        "key_run_ids": list(image.key_run_ids),
        "next_key_run_id": image.next_key_run_id,
        "keys_through": None if image.keys_through is None else list(image.keys_through),
        "gone_ledgers": [list(ledger) for ledger in image.gone_ledgers],
    }
    for ledger in image.ledgers:
        fields = dataclasses.asdict(ledger)
        yield {"line": "ledger", **fields.pop("capture"), **fields}
    for subscription in image.subscriptions:
        yield {"line": "subscription", **_subscription(subscription)}


def _cursor_lines(framed: bytes, path: str) -> Iterator[Line]:
    image: CursorImage = decode_cursor(framed, path)
    yield {"line": "cursor", "topic_id": image.topic_id, "subscription_id": image.subscription_id}
    for ledger_id, bitmap in image.settled.items():
        yield {"line": "settled", "ledger_id": ledger_id, **_bitmap(bitmap)}
    for ledger_id, digits in image.attempts.items():
        for bit, bitmap in enumerate(digits):
            yield {"line": "attempts", "ledger_id": ledger_id, "bit": bit, **_bitmap(bitmap)}
    for ledger_id, due in image.waiting.items():
        times = due.column
        between = {"first_not_before_ms": int(times.min()), "last_not_before_ms": int(times.max())}
        yield {"line": "waiting", "ledger_id": ledger_id, **_bitmap(due.entries), **between}
    for (ledger_id, entry_id), text in image.reasons.items():
        yield {"line": "reason", "ledger_id": ledger_id, "entry_id": entry_id, "text": text}


def _producers_lines(framed: bytes, path: str) -> Iterator[Line]:
    image = decode_producers(framed, path)
    yield {"line": "producers", "topic_id": image.topic_id}
    for producer in image.producers:
        counts = np.frombuffer(producer.counts, np.uint32)
        yield {
            "line": "producer",
            "name": producer.name,
            "highest_sequence_id": producer.highest_sequence_id,
            "floor": producer.floor,
            "runs": len(counts),
            "sequence_ids": int(counts.sum()),
        }


def _recurring_lines(framed: bytes, path: str) -> Iterator[Line]:
    image = decode_recurring(framed, path)
    yield {"line": "recurring", "topic_id": image.topic_id}
    for name, state in image.by_name.items():
        fields = dataclasses.asdict(state)
        fields["definition"]["message"] = f"{len(state.definition.message)} bytes"
        yield {"line": "schedule", "name": name, **fields}


def _bulk_lines(framed: bytes, path: str) -> Iterator[Line]:
    image = decode_bulk(framed, path)
    yield {"line": "bulk changes", "topic_id": image.topic_id, "last_id": image.last_id}
    for bulk_id, standing in image.by_id.items():
        yield {"line": "bulk change", "bulk_id": bulk_id, **dataclasses.asdict(standing)}


def _subscription(image: SubscriptionImage) -> Line:
    return {
        "subscription_id": image.subscription_id,
        "name": image.name,
        "type": image.type,
        "create_time_ms": image.create_time_ms,
        "start": list(image.start),
        "policy": _policy(image.policy),
        "cursor_file": image.cursor_file,
        "mark": list(image.mark),
    }


def _policy(policy: TopicPolicy | SubscriptionPolicy) -> Line:
    """Return the fields that are set; the others have the broker's default."""
    return set_values(policy)


def _entries(entries: Entries) -> list[Line]:
    return [{"ledger_id": ledger_id, **_bitmap(bitmap)} for ledger_id, bitmap in entries.items()]


def _bitmap(bitmap: BitMap) -> Line:
    # Never the whole set: a few bytes of it may stand for millions of entries.
    return {"count": len(bitmap), "first_ids": list(islice(bitmap, _FIRST_IDS))}


def _error(message: str, path: str, offset: int) -> Line:
    return {"line": "error", "message": message, "path": path, "offset": offset}


def _dump_alive(vfs: Vfs, path: str) -> Iterator[Line]:
    alive = decode_alive(read_file(vfs, path), path)
    yield {
        "line": "alive",
        "alive_ms": alive.alive_ms,
        "absences": [list(absence) for absence in alive.absences],
    }


_DUMPERS: dict[bytes, Callable[[Vfs, str], Iterator[Line]]] = {
    MAGIC_SEGMENT: _dump_segment,
    MAGIC_BROKER: _dump_manifest("broker manifest", MAGIC_BROKER, _broker_lines),
    MAGIC_TOPIC: _dump_manifest("topic manifest", MAGIC_TOPIC, _topic_lines),
    MAGIC_CURSOR: _dump_manifest("cursor", MAGIC_CURSOR, _cursor_lines),
    MAGIC_PRODUCERS: _dump_manifest("producers", MAGIC_PRODUCERS, _producers_lines),
    MAGIC_BULK: _dump_manifest("bulk changes", MAGIC_BULK, _bulk_lines),
    MAGIC_RECURRING: _dump_manifest("recurring schedules", MAGIC_RECURRING, _recurring_lines),
    **dict.fromkeys(MAGICS.values(), dump_ledger),
    MAGIC_BUCKET: dump_bucket,
    MAGIC_KEY_RUN: dump_key_run,
    MAGIC_AMENDMENTS: dump_amendments,
    MAGIC_ALIVE: _dump_alive,
}
