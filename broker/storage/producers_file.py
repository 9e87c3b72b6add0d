"""File of a topic's sequence ids by producer: `topics/<topic_id>/cursors/producers.<lsn>`.

Framed as the manifests are (`manifest.py`), with the magic bytes PDMP. The columns of runs are bytes in the message,
so that encoding and decoding copy memory and build no list. Pure: bytes in, dataclasses out; any bytes give a value or
`Corrupt`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from broker.model import ENTRY_ID_MAX, LEDGER_ID_MAX
from broker.storage.manifest import check, check_id, decode_framed, frame_message
from broker.storage.v1 import manifest_pb2 as pb

MAGIC_PRODUCERS = b"PDMP"

SEQUENCE_ID_MAX = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class ProducerImage:
    """Ranges of one producer's sequence ids: columns, little-endian, one element a range, rising."""

    name: str
    highest_sequence_id: int
    floor: int
    sequence_ids: bytes  # uint64: the first of each run
    counts: bytes  # uint32
    ledger_ids: bytes  # uint64
    entry_ids: bytes  # uint32: the first of each run
    publish_times_ms: bytes  # int64


@dataclass(frozen=True, slots=True)
class ProducersImage:
    """Sequence ids of a topic's producers."""

    topic_id: int
    producers: tuple[ProducerImage, ...]  # by name

    def encode(self) -> bytes:
        message = pb.ProducersFile(topic_id=self.topic_id)
        for producer in self.producers:
            message.producers.add(
                name=producer.name,
                highest_sequence_id=producer.highest_sequence_id,
                floor=producer.floor,
                sequence_ids=producer.sequence_ids,
                counts=producer.counts,
                ledger_ids=producer.ledger_ids,
                entry_ids=producer.entry_ids,
                publish_times_ms=producer.publish_times_ms,
            )
        return frame_message(MAGIC_PRODUCERS, message)


def decode_producers(content: bytes, path: str) -> ProducersImage:
    return decode_framed(MAGIC_PRODUCERS, content, path, pb.ProducersFile(), _image_of)


def _image_of(message: pb.ProducersFile) -> ProducersImage:
    check_id(message.topic_id, "topic_id")
    producers = tuple(_producer_of(entry) for entry in message.producers)
    names = [producer.name for producer in producers]
    check(names == sorted(set(names)), "producers are out of order")
    return ProducersImage(message.topic_id, producers)


def _producer_of(entry: pb.ProducerEntry) -> ProducerImage:
    image = ProducerImage(
        name=entry.name,
        highest_sequence_id=entry.highest_sequence_id,
        floor=entry.floor,
        sequence_ids=entry.sequence_ids,
        counts=entry.counts,
        ledger_ids=entry.ledger_ids,
        entry_ids=entry.entry_ids,
        publish_times_ms=entry.publish_times_ms,
    )
    check(bool(image.name), "a producer has no name")
    firsts = np.frombuffer(image.sequence_ids, np.uint64)
    counts = np.frombuffer(image.counts, np.uint32).astype(np.uint64)
    ledger_ids = np.frombuffer(image.ledger_ids, np.uint64)
    entry_ids = np.frombuffer(image.entry_ids, np.uint32).astype(np.uint64)
    times = np.frombuffer(image.publish_times_ms, np.int64)
    check(
        len(firsts) == len(counts) == len(ledger_ids) == len(entry_ids) == len(times),
        "the columns of a producer differ in length",
    )
    if not len(firsts):
        return image
    one = np.uint64(1)
    check(bool(counts.all()) and int(firsts[0]) > 0, "a run of sequence ids is empty, or begins with none")
    # As differences, which cannot overflow where sums could.
    room = np.append(firsts[1:], np.uint64(image.highest_sequence_id)) - firsts
    rises = bool((firsts[1:] > firsts[:-1]).all()) and image.highest_sequence_id >= int(firsts[-1])
    check(rises and bool((counts[:-1] <= room[:-1]).all()), "runs of sequence ids are out of order")
    check(int(counts[-1] - one) <= int(room[-1]), "a run of sequence ids passes the highest")
    check(image.floor <= int(firsts[0]), "a run of sequence ids begins below the floor")
    check(
        bool(ledger_ids.all()) and int(ledger_ids.max()) <= LEDGER_ID_MAX, "a run has a ledger of no such id"
    )
    check(int((entry_ids + counts).max()) <= ENTRY_ID_MAX + 1, "a run passes the end of its ledger")
    check(int(times.min()) >= 0, "a run was produced before all time")
    return image
