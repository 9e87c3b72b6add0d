"""Inputs of a job survive encoding, and any bytes give inputs or Corrupt."""

from __future__ import annotations

import random

import numpy as np
import pytest
from pyroaring import BitMap

from broker.errors import Corrupt
from broker.storage.amendments import NONE
from broker.storage.blocks import LedgerCapture, SparseSizes
from broker.storage.compaction_inputs import (
    CompactionInputs,
    InputBuckets,
    InputLedger,
    decode_inputs,
    encode_inputs,
)
from tests.unit.storage.ledger_book import ids

AMENDMENTS = NONE.cancel(BitMap([4])).move(ids([2, 3]), np.array([10, 20]), 7)


def inputs(*, with_buckets: bool) -> CompactionInputs:
    dense = LedgerCapture(3, 11, 0, 100, 5_000, True)
    sparse = LedgerCapture(3, 12, 4, 100, 50, True, sparse=SparseSizes(2, 48))
    buckets = InputBuckets((5, 9, 6), 10, 300_000, 5_000, {11: AMENDMENTS}, frozenset({1, 2}))
    return CompactionInputs(
        compaction_id="0123456789abcdef",
        topic_id=3,
        epoch=1_750_000_000_000,
        amended_lsn=99,
        frontier=(1_750_000_000_000, 1 << 62, 1 << 62),
        ledgers=(
            InputLedger(dense, 1, BitMap(range(90)), AMENDMENTS),
            InputLedger(sparse, 5, BitMap(), NONE),
        ),
        buckets=buckets if with_buckets else None,
    )


@pytest.mark.parametrize("with_buckets", [False, True])
def test_inputs_come_back_as_they_were(with_buckets: bool):
    given = inputs(with_buckets=with_buckets)
    found = decode_inputs(encode_inputs(given), "")
    assert encode_inputs(found) == encode_inputs(given)
    assert [(each.capture, each.new_generation, each.settled) for each in found.ledgers] == [
        (each.capture, each.new_generation, each.settled) for each in given.ledgers
    ]
    assert found.ledgers[0].amendments.revisions_of(ids([1, 2, 3])).tolist() == [0, 1, 1]
    assert found.ledgers[1].amendments is NONE
    assert (found.buckets is None) == (not with_buckets)
    assert found.frontier == given.frontier


def test_any_bytes_give_inputs_or_corrupt():
    rng = random.Random(5)
    content = encode_inputs(inputs(with_buckets=True))
    for _ in range(2_000):
        damaged = bytearray(content)
        for _ in range(rng.randrange(1, 4)):
            damaged[rng.randrange(len(damaged))] = rng.randrange(256)
        damaged = damaged[: rng.choice([len(damaged), rng.randrange(len(damaged) + 1)])]
        if bytes(damaged) != content:
            with pytest.raises(Corrupt):
                decode_inputs(bytes(damaged), "")
