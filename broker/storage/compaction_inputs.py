"""Inputs and outputs of a compaction job. Pure.

`staging/<compaction_id>/inputs` is written by the broker when it gives the lease: the frame is that of manifests (magic
PDMI), the content `CompactionInputs` of compaction.proto. Everything in it is of one moment.
"""

from __future__ import annotations

from dataclasses import dataclass

from pyroaring import BitMap

from broker.storage.amendments import (
    NONE,
    Amendments,
    AmendmentsImage,
    decode_amendments,
    encode_amendments,
)
from broker.storage.blocks import LedgerCapture, SparseSizes
from broker.storage.manifest import (
    bitmap_from_bytes,
    check,
    check_id,
    check_ledger_id,
    checked_lsn,
    checked_time,
    decode_framed,
    frame_message,
)
from broker.storage.v1 import compaction_pb2 as pb

MAGIC_INPUTS = b"PDMI"
INPUTS_FILE = "inputs"


@dataclass(frozen=True, slots=True)
class InputLedger:
    """A sealed ledger to rewrite, and what is known of its entries."""

    capture: LedgerCapture
    new_generation: int
    settled: BitMap  # by every subscription
    amendments: Amendments = NONE


@dataclass(frozen=True, slots=True)
class InputBuckets:
    """Adjacent buckets to merge into one."""

    bucket_ids: tuple[int, ...]
    new_bucket_id: int
    segment_time_step_ms: int
    max_segment_entries: int
    amendments: dict[int, Amendments]  # of all ledgers that they hold something of
    gone_ledger_ids: frozenset[int]


@dataclass(frozen=True, slots=True)
class CompactionInputs:
    """Everything that one lease is about."""

    compaction_id: str
    topic_id: int
    epoch: int
    amended_lsn: int
    frontier: tuple[int, int, int]  # (deliver_at_ms, ledger_id, entry_id) that the index gave out last
    ledgers: tuple[InputLedger, ...]
    buckets: InputBuckets | None = None


@dataclass(frozen=True, slots=True)
class LedgerOutput:
    """A generation that a job has written."""

    ledger_id: int
    data_bytes: int
    present_count: int
    present_bytes: int


@dataclass(frozen=True, slots=True)
class Outputs:
    """Outputs that a job hands in."""

    ledgers: tuple[LedgerOutput, ...] = ()
    has_bucket: bool = False


def encode_inputs(inputs: CompactionInputs) -> bytes:
    message = pb.CompactionInputs(
        compaction_id=inputs.compaction_id,
        topic_id=inputs.topic_id,
        epoch=inputs.epoch,
        amended_lsn=inputs.amended_lsn,
        frontier=pb.IndexFrontier(
            deliver_at_ms=inputs.frontier[0], ledger_id=inputs.frontier[1], entry_id=inputs.frontier[2]
        ),
        ledgers=[_to_message(inputs.topic_id, ledger) for ledger in inputs.ledgers],
    )
    if (buckets := inputs.buckets) is not None:
        message.bucket_ids.extend(buckets.bucket_ids)
        message.new_bucket_id = buckets.new_bucket_id
        message.segment_time_step_ms = buckets.segment_time_step_ms
        message.max_segment_entries = buckets.max_segment_entries
        message.gone_ledger_ids.extend(sorted(buckets.gone_ledger_ids))
        for ledger_id, amendments in sorted(buckets.amendments.items()):
            message.amendments.append(
                encode_amendments(AmendmentsImage(inputs.topic_id, ledger_id, amendments))
            )
    return frame_message(MAGIC_INPUTS, message)


def decode_inputs(content: bytes, path: str) -> CompactionInputs:
    """Raises Corrupt."""
    return decode_framed(MAGIC_INPUTS, content, path, pb.CompactionInputs(), _inputs)


def _to_message(topic_id: int, ledger: InputLedger) -> pb.InputLedger:
    capture = ledger.capture
    message = pb.InputLedger(
        ledger_id=capture.ledger_id,
        generation=capture.generation,
        entry_count=capture.entry_count,
        data_bytes=capture.data_bytes,
        new_generation=ledger.new_generation,
        settled=ledger.settled.serialize(),
    )
    message.packed_bytes = capture.packed_bytes
    if capture.sparse is not None:
        message.present_count, message.present_bytes = capture.sparse
    if ledger.amendments is not NONE:
        message.amendments = encode_amendments(
            AmendmentsImage(topic_id, capture.ledger_id, ledger.amendments)
        )
    return message


def _inputs(message: pb.CompactionInputs) -> CompactionInputs:
    check_id(message.topic_id, "topic_id")
    frontier = message.frontier
    buckets = None
    if message.bucket_ids:
        images = [decode_amendments(amendments) for amendments in message.amendments]
        buckets = InputBuckets(
            tuple(message.bucket_ids),
            message.new_bucket_id,
            message.segment_time_step_ms,
            message.max_segment_entries,
            {image.ledger_id: image.amendments for image in images},
            frozenset(message.gone_ledger_ids),
        )
    return CompactionInputs(
        compaction_id=message.compaction_id,
        topic_id=message.topic_id,
        epoch=message.epoch,
        amended_lsn=checked_lsn(message.amended_lsn),
        frontier=(checked_time(frontier.deliver_at_ms), frontier.ledger_id, frontier.entry_id),
        ledgers=tuple(_ledger(message.topic_id, ledger) for ledger in message.ledgers),
        buckets=buckets,
    )


def _ledger(topic_id: int, entry: pb.InputLedger) -> InputLedger:
    check_ledger_id(entry.ledger_id)
    check(entry.new_generation > entry.generation, f"generation {entry.new_generation}")
    sparse = (
        SparseSizes(entry.present_count, entry.present_bytes) if entry.HasField("present_count") else None
    )
    capture = LedgerCapture(
        topic_id=topic_id,
        ledger_id=entry.ledger_id,
        generation=entry.generation,
        entry_count=entry.entry_count,
        data_bytes=entry.data_bytes,
        sealed=True,
        sparse=sparse,
        packed_bytes=entry.packed_bytes,
    )
    amendments = decode_amendments(entry.amendments).amendments if entry.amendments else NONE
    return InputLedger(capture, entry.new_generation, bitmap_from_bytes(entry.settled), amendments)
