"""Times, ids, receipts, errors: the values of the public API."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import grpc
import pytest
from google.rpc import status_pb2

import postdate
from postdate._backoff import Backoff
from postdate._status import connection_broke, error_from_rpc, error_from_status
from postdate._time import duration_ms, epoch_ms, moment, span
from postdate.model import IdRange
from tests.unit.client.fake_values import DETAILS_KEY, status

NOON = datetime(2026, 6, 1, 12, tzinfo=UTC)


@pytest.mark.parametrize(
    ("when", "ms"),
    [
        (datetime(1970, 1, 1, tzinfo=UTC), 0),
        (datetime(1970, 1, 1, 0, 0, 0, 1, tzinfo=UTC), 1),
        (datetime(1970, 1, 1, 0, 0, 0, 1000, tzinfo=UTC), 1),
        (datetime(1970, 1, 1, 0, 0, 0, 1001, tzinfo=UTC), 2),
        (datetime(1970, 1, 1, 2, tzinfo=timezone(timedelta(hours=2))), 0),
    ],
)
def test_times_round_up_so_that_nothing_is_early(when: datetime, ms: int) -> None:
    assert epoch_ms(when, "deliver_at") == ms


def test_naive_time_is_refused_with_advice() -> None:
    with pytest.raises(ValueError, match="deliver_at has no time zone"):
        epoch_ms(datetime(2026, 1, 1), "deliver_at")


def test_what_is_no_time_is_a_type_error() -> None:
    wrong: Any = 5
    with pytest.raises(TypeError, match="deliver_at must be a datetime"):
        epoch_ms(wrong, "deliver_at")
    with pytest.raises(TypeError, match="ttl must be a timedelta"):
        duration_ms(wrong, "ttl")


def test_durations_round_up_and_are_not_negative() -> None:
    assert duration_ms(timedelta(microseconds=1), "ttl") == 1
    assert duration_ms(timedelta(minutes=15), "ttl") == 900_000
    with pytest.raises(ValueError, match="ttl is negative"):
        duration_ms(timedelta(microseconds=-1), "ttl")
    assert duration_ms(timedelta(milliseconds=2**53 - 1), "ttl") == 2**53 - 1
    for long in (timedelta(milliseconds=2**53 - 1, microseconds=1), timedelta.max):
        with pytest.raises(ValueError, match="deliver_after is too long"):
            duration_ms(long, "deliver_after")


def test_times_beyond_what_python_knows_do_not_break_the_reader() -> None:
    assert moment(2**62).year == 9999
    assert span(2**63 - 1) == timedelta.max


@pytest.mark.parametrize("length", [timedelta(days=200_000), timedelta(milliseconds=2**53 - 1)])
def test_a_duration_that_the_broker_takes_comes_back_as_it_was(length: timedelta) -> None:
    assert span(duration_ms(length, "ttl")) == length


def test_ids_order_and_travel_as_text() -> None:
    assert postdate.MessageId(1, 9) < postdate.MessageId(2, 0)
    assert postdate.MessageId.parse(str(postdate.MessageId(7, 12))) == (7, 12)
    with pytest.raises(ValueError, match="not a message id"):
        postdate.MessageId.parse("7")


def test_receipts_read_as_a_sequence_over_ranges() -> None:
    receipts = postdate.Receipts([IdRange(1, 8, 2, NOON, False), IdRange(2, 0, 3, NOON, True)])
    assert [str(receipt.id) for receipt in receipts] == ["1:8", "1:9", "2:0", "2:1", "2:2"]
    assert [receipts[index] for index in range(len(receipts))] == list(receipts)
    assert receipts[-1].duplicate
    assert receipts[1:3] == list(receipts)[1:3]
    assert receipts.ids() == [receipt.id for receipt in receipts]
    with pytest.raises(IndexError):
        receipts[5]
    assert len(postdate.Receipts([])) == 0


CASES: list[tuple[str, type[postdate.PostdateError]]] = [
    ("INVALID_ARGUMENT", postdate.InvalidRequest),
    ("OUT_OF_RANGE", postdate.OutOfRange),
    ("NOT_FOUND", postdate.NotFound),
    ("ALREADY_EXISTS", postdate.AlreadyExists),
    ("FAILED_PRECONDITION", postdate.FailedPrecondition),
    ("RESOURCE_EXHAUSTED", postdate.LimitReached),
    ("PERMISSION_DENIED", postdate.PermissionDenied),
    ("UNAUTHENTICATED", postdate.Unauthenticated),
    ("UNIMPLEMENTED", postdate.Unsupported),
    ("UNAVAILABLE", postdate.Unavailable),
    ("DEADLINE_EXCEEDED", postdate.DeadlineExceeded),
    ("CANCELLED", postdate.Disconnected),
    ("INTERNAL", postdate.Internal),
    ("DATA_LOSS", postdate.Internal),
]


@pytest.mark.parametrize(("code", "kind"), CASES)
def test_each_code_has_its_type(code: str, kind: type[postdate.PostdateError]) -> None:
    error = error_from_status(
        status(code, "REASON", "text", field="messages[3].key", retry_ms=250, limit="9")
    )
    assert type(error) is kind
    assert (error.code, error.reason, error.field, error.message) == (
        code,
        "REASON",
        "messages[3].key",
        "text",
    )
    assert error.metadata == {"limit": "9"}
    assert error.retry_after == timedelta(milliseconds=250)


def test_lost_lease_has_a_type_of_its_own() -> None:
    assert type(error_from_status(status("FAILED_PRECONDITION", "LEASE_LOST", "x"))) is postdate.LeaseLost


def test_unknown_codes_are_internal() -> None:
    assert type(error_from_status(status_pb2.Status(code=99))) is postdate.Internal


@pytest.mark.parametrize("details", [b"", b"\xff\xff\xff", b"\x08\x05\x12\x02hi"])
def test_any_details_give_an_error_with_the_code_of_the_call(details: bytes) -> None:
    trailing = grpc.aio.Metadata((DETAILS_KEY, details))
    rpc_error = grpc.aio.AioRpcError(grpc.StatusCode.NOT_FOUND, grpc.aio.Metadata(), trailing, "gone", None)
    error = error_from_rpc(rpc_error)
    assert isinstance(error, postdate.NotFound)
    assert error.message in {"gone", "hi", "NOT_FOUND"}


def test_broken_connections_are_told_from_answers() -> None:
    assert connection_broke(error_from_status(status_pb2.Status(code=13, message="RST_STREAM")))
    assert not connection_broke(error_from_status(status("INTERNAL", "BUG", "x")))
    assert not connection_broke(postdate.NotFound("x"))


class _Highest:
    def uniform(self, _low: float, high: float) -> float:
        return high


def test_backoff_doubles_up_to_a_limit_and_heeds_advice() -> None:
    rng: Any = _Highest()
    backoff = Backoff(rng, first_s=1, longest_s=5)
    assert [backoff.next_s() for _ in range(4)] == [1, 2, 4, 5]
    backoff.succeeded()
    assert backoff.next_s(timedelta(seconds=3)) == 3
