"""Failures as they look on the wire: a status code, a reason, and what to do about it."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Iterator, Sequence
from typing import TypeAlias

import grpc
import numpy as np
from google.protobuf import any_pb2, duration_pb2
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2

from broker import errors
from broker.model import Int64Column, UInt64Column
from broker.observe.logs import get_logger
from broker.storage.message_fields import tag_of, tags_of
from broker.storage.octets import U8Column
from broker.subscriptions.requests import FailedIds
from postdate_api.v1 import consumer_pb2, message_pb2

log = get_logger(__name__)

Context: TypeAlias = "grpc.aio.ServicerContext[bytes, bytes]"
"""Calls arrive as bytes and leave as bytes."""

DOMAIN = "postdate.dev"
DETAILS_KEY = "grpc-status-details-bin"

_IDS_AT_ONCE = 2_000
_ID, _ = tags_of(consumer_pb2.EntryFailure, "id", "error").values()
_LEDGER_ID, _ENTRY_ID = (
    bytes((tag,)) for tag in tags_of(message_pb2.MessageId, "ledger_id", "entry_id").values()
)
_WIDTHS = 11
"""Of a varint, with that of 0."""
_VARINT_BEGINS = np.array([1, *(1 << 7 * width for width in range(1, 10))], np.uint64)
"""Least numbers that take one byte more."""

# The first class that fits decides, so the narrower ones come first.
_CODES: tuple[tuple[type[errors.PostdateError], grpc.StatusCode], ...] = (
    (errors.OutOfRange, grpc.StatusCode.OUT_OF_RANGE),
    (errors.InvalidRequest, grpc.StatusCode.INVALID_ARGUMENT),
    (errors.NotFound, grpc.StatusCode.NOT_FOUND),
    (errors.AlreadyExists, grpc.StatusCode.ALREADY_EXISTS),
    (errors.Refused, grpc.StatusCode.FAILED_PRECONDITION),
    (errors.Unauthenticated, grpc.StatusCode.UNAUTHENTICATED),
    (errors.PermissionDenied, grpc.StatusCode.PERMISSION_DENIED),
    (errors.LimitReached, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (errors.Unavailable, grpc.StatusCode.UNAVAILABLE),
    (errors.Fenced, grpc.StatusCode.ABORTED),
    (errors.Corrupt, grpc.StatusCode.DATA_LOSS),
)


def to_status(error: BaseException) -> status_pb2.Status:
    """The status of a failure. A bug becomes INTERNAL with an id that the log has too, and nothing of its text."""
    code = next((code for kind, code in _CODES if isinstance(error, kind)), None)
    if code is None or not isinstance(error, errors.PostdateError):
        return _internal(error)
    metadata: dict[str, str] = {}
    if error.names_files:
        log.warning("A request failed because a file is damaged or cannot be read", error=error)
    else:
        metadata = {key: str(value) for key, value in error.facts.items()}
    details: list[Message] = [
        error_details_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN, metadata=metadata)
    ]
    if isinstance(error, errors.InvalidRequest | errors.AlreadyExists) and error.field:
        violation = error_details_pb2.BadRequest.FieldViolation(field=error.field, description=error.message)
        details.append(error_details_pb2.BadRequest(field_violations=[violation]))
    if isinstance(error, errors.LimitReached | errors.Unavailable):
        delay = duration_pb2.Duration()
        delay.FromMilliseconds(error.retry_after_ms)
        details.append(error_details_pb2.RetryInfo(retry_delay=delay))
    return _status(code, error.told, details)


async def abort(context: Context, error: BaseException) -> None:
    """End a call with the status of a failure; does not return."""
    status = to_status(error)
    code = next(code for code in grpc.StatusCode if code.value[0] == status.code)
    trailers = ((DETAILS_KEY, status.SerializeToString()),)
    await context.abort(code, status.message, trailing_metadata=trailers)


async def encode_failures(
    failures: Sequence[FailedIds], answer: type[Message], *, of_dead_letters: bool = False
) -> bytes:
    """Failures of single ids, for an answer that otherwise went well: its field `failures` on the wire form.

    There may be thousands, and all of one reason have the same status: it is encoded once, and the
    answer is put together from bytes. Lengths are padded to two bytes, which protobuf allows. The loop gets its turn
    now and then.
    """
    if not failures:
        return b""  # nearly always
    errors_by_reason = _DEAD_LETTER_ERRORS if of_dead_letters else _ENTRY_ERRORS
    tag = tag_of("failures", answer)
    parts: list[bytes] = []
    for ledger_ids, entry_ids, reason in failures:
        for begin in range(0, len(entry_ids), _IDS_AT_ONCE):
            if parts:
                await asyncio.sleep(0)
            some = slice(begin, begin + _IDS_AT_ONCE)
            parts += _encode_ids(tag, ledger_ids[some], entry_ids[some], errors_by_reason[reason])
    return b"".join(parts)


def _encode_ids(tag: int, ledger_ids: UInt64Column, entry_ids: UInt64Column, error: bytes) -> Iterator[bytes]:
    """Failures of entries for one reason, those together whose ids take as many bytes."""
    widths = _varint_widths(ledger_ids) * _WIDTHS + _varint_widths(entry_ids)
    order = np.argsort(widths, kind="stable")
    for run in np.split(order, np.flatnonzero(np.diff(widths[order])) + 1):
        ledger_width, entry_width = divmod(int(widths[run[0]]), _WIDTHS)
        ledger, entry = (_LEDGER_ID if ledger_width else b""), (_ENTRY_ID if entry_width else b"")
        name_bytes = len(ledger) + ledger_width + len(entry) + entry_width
        head = _head_of_failure(tag, name_bytes, error) + ledger
        rows = np.empty((len(run), len(head) - len(ledger) + name_bytes + len(error)), np.uint8)
        at = _fill(rows, 0, head)
        at = _fill_varints(rows, at, ledger_ids[run], ledger_width)
        at = _fill(rows, at, entry)
        at = _fill_varints(rows, at, entry_ids[run], entry_width)
        _fill(rows, at, error)
        yield rows.tobytes()


def _varint_widths(numbers: UInt64Column) -> Int64Column:
    """Return how many bytes each number takes; 0 is left out."""
    return np.searchsorted(_VARINT_BEGINS, numbers, side="right")


def _fill(rows: U8Column, at: int, octets: bytes) -> int:
    """Write the same bytes into each row; return where they end."""
    rows[:, at : at + len(octets)] = np.frombuffer(octets, np.uint8)
    return at + len(octets)


def _fill_varints(rows: U8Column, at: int, numbers: UInt64Column, width: int) -> int:
    """Write a number of so many bytes into each row; return where it ends."""
    for place in range(width):
        octets = numbers >> np.uint64(7 * place) & np.uint64(0x7F)
        rows[:, at + place] = octets | np.uint64(0x80 if place < width - 1 else 0)
    return at + width


def _head_of_failure(tag: int, name_bytes: int, error: bytes) -> bytes:
    """The bytes before the id of an entry and the error."""
    size = 2 + name_bytes + len(error)
    return bytes((tag, size & 0x7F | 0x80, size >> 7, _ID, name_bytes))


def _internal(error: BaseException) -> status_pb2.Status:
    error_id = uuid.uuid4().hex[:12]
    log.error("A request failed with an internal error", exc_info=error, error_id=error_id)
    info = error_details_pb2.ErrorInfo(reason="INTERNAL", domain=DOMAIN, metadata={"error_id": error_id})
    return _status(grpc.StatusCode.INTERNAL, f"Internal error {error_id}; the broker's log says more", [info])


def _status(code: grpc.StatusCode, message: str, details: list[Message]) -> status_pb2.Status:
    status = status_pb2.Status(code=code.value[0], message=message)
    for detail in details:
        packed = any_pb2.Any()
        packed.Pack(detail)
        status.details.append(packed)
    return status


def _entry_error(code: grpc.StatusCode, reason: str, text: str) -> bytes:
    """`EntryFailure.error` on its wire form."""
    info = error_details_pb2.ErrorInfo(reason=reason, domain=DOMAIN)
    return consumer_pb2.EntryFailure(error=_status(code, text, [info])).SerializeToString()


_ENTRY_ERRORS = {
    "NOT_FOUND": _entry_error(
        grpc.StatusCode.NOT_FOUND,
        "NOT_FOUND",
        "This message is not known to have been sent on this subscription",
    ),
    "LEASE_LOST": _entry_error(
        grpc.StatusCode.FAILED_PRECONDITION, "LEASE_LOST", "This consumer does not hold this message"
    ),
}
FAILURE_BYTES_MAX = 32 + max(map(len, _ENTRY_ERRORS.values()))
"""Bytes that one failure takes at most in the answer to an Ack, Nack or Extend."""


_DEAD_LETTER_ERRORS = {
    "NOT_FOUND": _entry_error(
        grpc.StatusCode.NOT_FOUND, "NOT_FOUND", "This message is no dead letter of this subscription"
    ),
}
