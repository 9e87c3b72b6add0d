"""Failures of single ids on the wire: as the generated code would write them, in the order in which they are."""

from __future__ import annotations

import asyncio
import random

import numpy as np
import pytest

from broker.rpc.entries import entries_of
from broker.rpc.status import FAILURE_BYTES_MAX, encode_failures
from broker.subscriptions.requests import FailedIds, failed_ids
from postdate_api.v1 import consumer_pb2, message_pb2

EDGES = [0, 1, *(edge + more for edge in (1 << 7, 1 << 14, 1 << 31, 1 << 32, 1 << 63) for more in (-1, 0))]
IDS = [*EDGES, (1 << 64) - 1]
CODES = {"NOT_FOUND": 5, "LEASE_LOST": 9}
AT_THE_EDGES = [(ledger_id, entry_id) for ledger_id in IDS for entry_id in IDS * 2]


def failed(ids: list[tuple[int, int]], reason: str = "NOT_FOUND") -> FailedIds:
    ledger_ids, entry_ids = np.array(ids, np.uint64).T
    return FailedIds(ledger_ids, entry_ids, reason)


def encoded(failures: list[FailedIds]) -> bytes:
    return asyncio.run(encode_failures(failures, consumer_pb2.Confirmed))


@pytest.mark.parametrize(
    "failures",
    [
        [failed(AT_THE_EDGES[:1])],
        [failed(AT_THE_EDGES, reason) for reason in CODES],
        [failed(random.Random(1).sample(AT_THE_EDGES, len(AT_THE_EDGES)))],
        [failed([(7, entry_id) for entry_id in range(5_000)])],
        [failed([(ledger_id, 1) for ledger_id in range(5_000)])],
    ],
    ids=["one", "runs", "in any order", "more than at once", "many ledgers"],
)
def test_each_failure_is_its_id_and_its_error(failures: list[FailedIds]) -> None:
    raw = encoded(failures)
    written = consumer_pb2.Confirmed.FromString(raw).failures
    expected = [
        (ledger_id, entry_id, CODES[each.reason])
        for each in failures
        for ledger_id, entry_id in zip(each.ledger_ids.tolist(), each.entry_ids.tolist(), strict=True)
    ]
    assert sorted((each.id.ledger_id, each.id.entry_id, each.error.code) for each in written) == sorted(
        expected
    )
    assert len(raw) <= FAILURE_BYTES_MAX * len(expected)


def test_failures_of_one_ledger_stay_in_order() -> None:
    written = consumer_pb2.Confirmed.FromString(encoded([failed([(7, i) for i in range(5_000)])])).failures
    assert [each.id.entry_id for each in written] == list(range(5_000))


def test_ids_of_the_greatest_length_stay_within_what_is_counted_for_them() -> None:
    greatest = (1 << 64) - 1
    for count in (1, 100):
        assert len(encoded([failed([(greatest, greatest)] * count)])) <= FAILURE_BYTES_MAX * count


@pytest.mark.slow
def test_ids_that_do_not_exist_are_columns_and_not_objects() -> None:
    """Whoever names ten thousand of them, each of another ledger too, would keep the event loop busy for long."""
    possible = [message_pb2.EntrySet(ledger_id=1 + ledger_id, entry_ids=[2]) for ledger_id in range(5_000)]
    impossible = [
        message_pb2.EntrySet(ledger_id=ledger_id, entry_ids=[1 << 40]) for ledger_id in range(5_000)
    ]
    entries, failures = entries_of([*possible, *impossible], "entries", 10_000)
    [strange], [unknown] = failures, failed_ids(entries, "NOT_FOUND")
    assert sorted(strange.ledger_ids.tolist()) == list(range(5_000)) and set(strange.entry_ids.tolist()) == {
        1 << 40
    }
    assert unknown.ledger_ids.tolist() == list(range(1, 5_001)) and set(unknown.entry_ids.tolist()) == {2}
