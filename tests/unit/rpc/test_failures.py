"""Failures of single ids on the wire: as the generated code would write them, in the order in which they are."""

from __future__ import annotations

import asyncio
import random

import pytest

from broker.model import Position
from broker.rpc.status import FAILURE_BYTES_MAX, encode_failures
from broker.subscriptions.requests import Failure
from postdate_api.v1 import consumer_pb2

EDGES = [0, 1, *(edge + more for edge in (1 << 7, 1 << 14, 1 << 31, 1 << 32, 1 << 63) for more in (-1, 0))]
IDS = [*EDGES, (1 << 64) - 1]
CODES = {"NOT_FOUND": 5, "LEASE_LOST": 9}
AT_THE_EDGES = [
    Failure(Position(ledger_id, entry_id), reason)
    for ledger_id in IDS
    for reason in CODES
    for entry_id in IDS * 2
]


def encoded(failures: list[Failure]) -> bytes:
    return asyncio.run(encode_failures(failures, consumer_pb2.Confirmed))


@pytest.mark.parametrize(
    "failures",
    [
        AT_THE_EDGES[:1],
        AT_THE_EDGES,
        random.Random(1).sample(AT_THE_EDGES, len(AT_THE_EDGES)),
        [Failure(Position(7, entry_id), "NOT_FOUND") for entry_id in range(5_000)],
    ],
    ids=["one", "runs", "in any order", "more than at once"],
)
def test_each_failure_is_its_id_and_its_error(failures: list[Failure]) -> None:
    raw = encoded(failures)
    written = consumer_pb2.Confirmed.FromString(raw).failures
    assert [
        (Position(each.id.ledger_id, each.id.entry_id), CODES[reason], each.error.code)
        for each, reason in zip(written, (failure.reason for failure in failures), strict=True)
    ] == [(failure.position, CODES[failure.reason], CODES[failure.reason]) for failure in failures]
    assert len(raw) <= FAILURE_BYTES_MAX * len(failures)


def test_ids_of_the_greatest_length_stay_within_what_is_counted_for_them() -> None:
    most = Failure(Position((1 << 64) - 1, (1 << 64) - 1), "NOT_FOUND")
    assert all(len(encoded([most] * count)) <= FAILURE_BYTES_MAX * count for count in (1, 100))
