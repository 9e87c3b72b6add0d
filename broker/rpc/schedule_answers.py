"""Answers of the schedule, on their wire form. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import cast

import numpy as np
from google.protobuf.message import DecodeError

from broker.delayed.due_rows import Key
from broker.model import Array
from broker.rpc.decode import MessageColumns, ProduceEnvelope
from broker.rpc.encode import message_heads
from broker.storage.message_fields import tag_of, tags_of, varint_at
from broker.storage.varint import encode_varint
from broker.topics.message_look import MessageStanding
from broker.topics.schedule_values import Outcome, OutcomeColumns, Scheduled, ScheduledColumns
from postdate_api.v1 import message_pb2, schedule_pb2

_REST_BYTES = 1 << 10
"""Bytes that an answer holds besides its list: counts and a token."""
_NAME_HEAD_BYTES = 3
_ITEM_HEAD_BYTES = 5
_OUTCOME = tag_of("outcomes", schedule_pb2.CancelScheduledResponse, schedule_pb2.RescheduleResponse)
_ID, _SCHEDULE_KEY, _RESULT, _DELIVER_AT_MS, _ = tags_of(
    schedule_pb2.ChangeOutcome, "id", "schedule_key", "result", "deliver_at_ms", "delivered_to"
).values()
_SCHEDULE_KEY_HEAD = bytes((_SCHEDULE_KEY,))
_SCHEDULED = tag_of("scheduled", schedule_pb2.ListScheduledResponse, schedule_pb2.GetScheduledResponse)
_SCHEDULED_HEAD = bytes((_SCHEDULED,))
(
    _SHOWN_ID,
    _SHOWN_KEY,
    _SHOWN_DELIVER_AT_MS,
    _PUBLISH_TIME_MS,
    _STATE,
    _REVISION,
    _SIZE_BYTES,
    _MESSAGE,
    _,
) = tags_of(
    schedule_pb2.ScheduledMessage,
    "id",
    "schedule_key",
    "deliver_at_ms",
    "publish_time_ms",
    "state",
    "revision",
    "size_bytes",
    "message",
    "returned",
).values()
_SHOWN_KEY_HEAD = bytes((_SHOWN_KEY,))
_SHORT_KEY_HEADS = [_SHOWN_KEY_HEAD + encode_varint(length) for length in range(0x80)]
"""Tag and length of a key, by its length: of a page, nearly all are that short."""
_MESSAGE_HEAD = bytes((_MESSAGE,))
_PAYLOAD_HEAD = bytes((tag_of("payload", message_pb2.Message),))
_FEW_SCHEDULED = 16
_FEW_OUTCOMES = 16
"""Up to so many outcomes, writing them one by one costs less than the NumPy calls that many share."""


def encode_outcomes(outcomes: Sequence[Outcome], frame_bytes_max: int) -> bytes:
    """Outcomes as `repeated ChangeOutcome outcomes = 1`."""
    if isinstance(outcomes, OutcomeColumns) and not outcomes.delivered_to:
        return _encode_columns(
            outcomes.ledger_ids, outcomes.entry_ids, outcomes.results, outcomes.deliver_at_ms, []
        )
    if len(outcomes) > _FEW_OUTCOMES and all(
        outcome.position is not None and not outcome.delivered_to for outcome in outcomes
    ):
        return _encode_plain(outcomes)
    response = schedule_pb2.CancelScheduledResponse()  # any that has them
    _put_outcomes(response, outcomes, frame_bytes_max)
    return bytes(response.SerializeToString())


def _encode_plain(outcomes: Sequence[Outcome]) -> bytes:
    """Thousands of outcomes with an id and without names of subscriptions."""
    count = len(outcomes)
    names = chain.from_iterable(outcome.position or () for outcome in outcomes)
    positions = np.fromiter(names, np.uint64, 2 * count)  # also of ids that no message can have
    keys = [outcome.schedule_key.encode() for outcome in outcomes]
    return _encode_columns(
        positions[0::2],
        positions[1::2],
        np.fromiter((outcome.result for outcome in outcomes), np.int64, count),
        np.fromiter((outcome.deliver_at_ms for outcome in outcomes), np.int64, count),
        [_SCHEDULE_KEY_HEAD + encode_varint(len(key)) + key if key else b"" for key in keys]
        if any(keys)
        else [],
    )


def _encode_columns(
    ledger_ids: Array, entry_ids: Array, results: Array, deliver_at_ms: Array, tails: Sequence[bytes]
) -> bytes:
    """Outcomes as the rows of one matrix, and `tails` (if there are any) between them.

    Varints are as wide as the widest of their column, which protobuf allows. One by one, five thousand of them would
    hold up deliveries for as long as it takes to store them.
    """
    count = len(results)
    if not count:
        return b""
    facts = [(_RESULT, results), (_DELIVER_AT_MS, deliver_at_ms)]
    following = np.fromiter(map(len, tails), np.int64, count) if tails else np.zeros(count, dtype=np.int64)
    rows = message_heads(_OUTCOME, (_ID, ledger_ids, entry_ids), facts, following)
    if not tails:
        return rows.tobytes()
    parts: list[bytes] = [b""] * (2 * count)
    parts[0::2] = np.frombuffer(rows.tobytes(), dtype=f"V{rows.shape[1]}").tolist()
    parts[1::2] = tails
    return b"".join(parts)


def _put_outcomes(
    response: schedule_pb2.CancelScheduledResponse, outcomes: Sequence[Outcome], frame_bytes_max: int
) -> None:
    """Add outcomes to an answer.

    Thousands of them may each name thousands of subscriptions. The names come last, and share what is left of the
    frame, the same for each outcome: what became of the messages is never left out.
    """
    add = response.outcomes.add
    told: list[tuple[schedule_pb2.ChangeOutcome, tuple[str, ...]]] = []
    for outcome in outcomes:
        item = add(
            schedule_key=outcome.schedule_key,
            result=outcome.result.value,
            deliver_at_ms=outcome.deliver_at_ms,
        )
        if outcome.position is not None:
            item.id.ledger_id, item.id.entry_id = outcome.position
        if outcome.delivered_to:
            told.append((item, outcome.delivered_to))
    if told:
        share = max(0, frame_bytes_max - _REST_BYTES - response.ByteSize()) // len(told)
        for item, names in told:
            item.delivered_to.extend(_fitting(names, share))


def encode_scheduled(
    scheduled: Sequence[Scheduled], frame_bytes_max: int, *, is_full: bool
) -> tuple[bytes, Key | None]:
    """Messages as `repeated ScheduledMessage scheduled = 1`, and where the next page begins if they do not all fit.

    The first one always goes in.
    """
    room = frame_bytes_max - _REST_BYTES
    messages = list(ProduceEnvelope.FromString(b"".join(_frames(scheduled))).messages)
    if isinstance(scheduled, ScheduledColumns) and len(scheduled) > _FEW_SCHEDULED:
        plain = _read_plain(scheduled, messages)
        if plain is not None:
            without, keys = plain
            return _encode_page(scheduled, messages if is_full else without, keys, room)
    parts: list[bytes] = []
    head, rest = schedule_pb2.ScheduledMessage(), message_pb2.Message()  # for all: each sets every field
    id_ = head.id
    for entry, message in zip(scheduled, messages, strict=True):
        id_.ledger_id, id_.entry_id = entry.position
        head.schedule_key = entry.schedule_key
        head.deliver_at_ms = entry.deliver_at_ms
        head.publish_time_ms = entry.publish_time_ms
        head.state = cast("schedule_pb2.ScheduledState", entry.state.value)  # the numbers are the same
        head.revision = entry.revision
        head.size_bytes = len(entry.frame)
        if is_full:
            shown = message
        else:
            rest.ParseFromString(message)
            rest.ClearField("payload")
            shown = rest.SerializeToString()
        encoded = b"".join((head.SerializeToString(), _MESSAGE_HEAD, encode_varint(len(shown)), shown))
        room -= len(encoded) + _ITEM_HEAD_BYTES
        if room < 0 and parts:
            return b"".join(parts), (entry.deliver_at_ms, *entry.position)
        parts += (_SCHEDULED_HEAD, encode_varint(len(encoded)), encoded)
    return b"".join(parts), None


def _frames(scheduled: Sequence[Scheduled]) -> Sequence[bytes]:
    if isinstance(scheduled, ScheduledColumns):
        return scheduled.frames
    return [entry.frame for entry in scheduled]


def _read_plain(page: ScheduledColumns, messages: list[bytes]) -> tuple[list[bytes], list[bytes]] | None:
    """The messages without their payloads, and the schedule keys of those that have one, in order; None if one of them
    is not as its producer's library writes it, or may not be."""
    without = [
        message[2 + message[1] :]
        if message[:1] == _PAYLOAD_HEAD and message[1] < 0x80
        else _behind_payload(message)
        for message in messages
    ]
    try:
        # Messages side by side are one message with each field repeated, which the parser reads at once.
        columns = MessageColumns.FromString(b"".join(without))
    except DecodeError:
        return None
    # Whoever has a hash has a key: as many keys as hashes are one of each, in order.
    if len(columns.payload) or len(columns.schedule_key) != np.count_nonzero(page.schedule_hashes):
        return None
    return without, [key.encode() for key in columns.schedule_key]


def _behind_payload(message: bytes) -> bytes:
    """The fields that follow the payload of a message, if it begins with that."""
    if message[:1] != _PAYLOAD_HEAD:
        return message
    length, at = varint_at(message, 1)
    return message[at + length :]


def _encode_page(
    page: ScheduledColumns, messages: list[bytes], keys: list[bytes], room: int
) -> tuple[bytes, Key | None]:
    """As `encode_scheduled`: what has a fixed width as the rows of one matrix, then message and key."""
    count, entries = len(page), page.entries
    sizes = np.fromiter(map(len, messages), np.int64, count)
    facts = [
        (_SHOWN_DELIVER_AT_MS, entries.deliver_at_ms),
        (_PUBLISH_TIME_MS, page.publish_time_ms),
        (_STATE, np.full(count, page.state.value)),
        (_REVISION, page.revisions),
        (_SIZE_BYTES, np.fromiter(map(len, page.frames), np.int64, count)),
        (_MESSAGE, sizes),
    ]
    tails = [b""] * count
    for place, key in zip(np.flatnonzero(page.schedule_hashes).tolist(), keys, strict=True):
        length = len(key)
        head = _SHORT_KEY_HEADS[length] if length < 0x80 else _SHOWN_KEY_HEAD + encode_varint(length)
        tails[place] = head + key
    following = sizes + np.fromiter(map(len, tails), np.int64, count)
    rows = message_heads(_SCHEDULED, (_SHOWN_ID, entries.ledger_ids, entries.entry_ids), facts, following)
    head_width = rows.shape[1]
    fitting = max(1, int((following + head_width).cumsum().searchsorted(room, "right")))
    parts: list[bytes] = [b""] * (3 * fitting)
    parts[0::3] = np.frombuffer(rows[:fitting].tobytes(), dtype=f"V{head_width}").tolist()
    parts[1::3] = messages[:fitting]
    parts[2::3] = tails[:fitting]
    return b"".join(parts), entries.key(fitting) if fitting < count else None


def encode_returned(response: bytes, returned: Sequence[MessageStanding], frame_bytes_max: int) -> bytes:
    """Return the answer about one message, with the first of those subscriptions that got it back, as many as fit."""
    told = schedule_pb2.GetScheduledResponse.FromString(response)
    room = frame_bytes_max - _REST_BYTES - len(response)
    for owed in returned:
        one = schedule_pb2.ReturnedMessage(
            subscription=owed.subscription, attempts=owed.attempts, last_reason=owed.last_reason
        )
        room -= one.ByteSize() + _ITEM_HEAD_BYTES
        if room < 0:
            break
        told.scheduled.returned.append(one)
    return bytes(told.SerializeToString())


def _fitting(names: Sequence[str], room: int) -> Sequence[str]:
    """The first names that take no more than so many bytes."""
    for index, name in enumerate(names):
        room -= len(name.encode()) + _NAME_HEAD_BYTES
        if room < 0:
            return names[:index]
    return names
