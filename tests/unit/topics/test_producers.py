"""Producers' sequence ids: ranges against the plainest model, and the file they are kept in."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.errors import Corrupt
from broker.model import ROW, UInt64Column
from broker.storage.manifest import frame_message
from broker.storage.producers_file import (
    MAGIC_PRODUCERS,
    SEQUENCE_ID_MAX,
    ProducerImage,
    ProducersImage,
    decode_producers,
)
from broker.storage.records import Produced, Sequences
from broker.storage.v1 import manifest_pb2 as pb
from broker.topics.producers import ProducerHistory, Producers


def column(*sequence_ids: int) -> UInt64Column:
    return np.array(sequence_ids, dtype=np.uint64)


@dataclass
class Plain:
    """One producer, id by id."""

    floor: int = 0
    highest: int = 0
    stored: dict[int, tuple[int, int, int]] = field(default_factory=dict)  # ledger, entry, time

    def add(self, ids: list[int], ledger_id: int, entry_id: int, time_ms: int) -> None:
        for place, sequence_id in enumerate(ids):
            if sequence_id:
                self.stored[sequence_id] = (ledger_id, entry_id + place, time_ms)
                self.highest = max(self.highest, sequence_id)

    def forget_below(self, floor: int) -> None:
        self.floor = max(self.floor, floor)
        self.stored = {i: at for i, at in self.stored.items() if i >= self.floor}

    def floor_at(self, now_ms: int, window_ms: int, entries_max: int) -> int:
        floor = self.floor
        rest = sorted(self.stored)
        while rest and self.stored[rest[0]][2] <= now_ms - window_ms:
            floor = max(floor, rest.pop(0) + 1)
        while len(rest) > entries_max:
            floor = max(floor, rest.pop(0) + 1)
        return floor


def found_by(producer: ProducerHistory, ids: list[int]) -> dict[int, tuple[int, int, int]]:
    found = producer.find(column(*ids))
    rows = zip(
        ids,
        found.is_known.tolist(),
        found.ledger_ids.tolist(),
        found.entry_ids.tolist(),
        found.publish_times_ms.tolist(),
        strict=True,
    )
    return {i: (ledger, entry, time) for i, known, ledger, entry, time in rows if known}


steps = st.lists(
    st.tuples(
        st.lists(st.integers(0, 60), min_size=1, max_size=12),
        st.integers(1, 2),
        st.sampled_from([0, 0, 1, 7, 40]),
        st.integers(0, 1),
    ),
    min_size=1,
    max_size=25,
)


@given(steps, st.sampled_from([1, 15, 50, 10_000]), st.sampled_from([1, 3, 10, 1_000]))
def test_runs_remember_what_a_dict_of_ids_does(steps, window_ms, entries_max):
    producer, plain = ProducerHistory(), Plain()
    entry_id, now_ms = 0, 1_000
    for asked, ledger_id, later_ms, gap in steps:
        now_ms += later_ms
        # New ones, in rising order; zeros stay where they are.
        fresh = {i for i in asked if i and i >= plain.floor and i not in plain.stored and i != plain.highest}
        rising = iter(sorted(fresh))
        ids = [next(rising, 0) if i else 0 for i in asked]
        given_ids = [i for i in ids if i]
        if not given_ids:
            continue
        trial = Plain(plain.floor, plain.highest, dict(plain.stored))
        trial.add(ids, ledger_id, entry_id + gap, now_ms)
        expected_floor = trial.floor_at(now_ms, window_ms, entries_max)
        floor = producer.floor_after(column(*given_ids), now_ms, window_ms, entries_max)
        assert floor == expected_floor
        for each in (producer, plain):
            each.floor_at(now_ms, window_ms, entries_max)
        producer.add(column(*ids), ledger_id, entry_id + gap, now_ms)
        producer.forget_below(floor)
        plain.add(ids, ledger_id, entry_id + gap, now_ms)
        plain.forget_below(floor)
        entry_id += gap + len(ids)
        assert (producer.floor, producer.highest) == (plain.floor, plain.highest)
        assert producer.id_count == len(plain.stored)
        assert found_by(producer, list(range(1, 70))) == plain.stored
        for later in (0, 5, 30, 100):
            at = now_ms + later
            assert producer.floor_at(at, window_ms, entries_max) == plain.floor_at(at, window_ms, entries_max)
        # What a file keeps is the same producer.
        again = ProducerHistory.restore(producer.image("p"))
        assert again.image("p") == producer.image("p") == producer.copy().image("p")
        assert (again.id_count, again.run_count) == (producer.id_count, producer.run_count)


def test_a_batch_is_one_run_and_messages_of_one_millisecond_are_one_too():
    producer = ProducerHistory()
    producer.add(np.arange(1, 5_001, dtype=np.uint64), 3, 100, 50)
    assert producer.run_count == 1
    for sequence_id in range(5_001, 5_011):
        producer.add(column(sequence_id), 3, 99 + sequence_id, 60)
    assert producer.run_count == 2
    producer.add(column(5_011), 3, 5_110, 61)  # another time
    producer.add(column(5_012), 4, 5_111, 61)  # another ledger
    producer.add(column(5_014), 4, 5_112, 61)  # a gap
    producer.add(column(5_015), 4, 5_114, 61)  # something of another producer in between
    assert producer.run_count == 6
    assert found_by(producer, [5_000, 5_010, 5_013, 5_015]) == {
        5_000: (3, 5_099, 50),
        5_010: (3, 5_109, 60),
        5_015: (4, 5_114, 61),
    }


def test_memory_of_forgotten_runs_is_given_back():
    producer = ProducerHistory()
    for sequence_id in range(1, 5_000):
        ids = column(sequence_id)
        floor = producer.floor_after(ids, sequence_id, 10_000, 10)
        producer.add(ids, 1, 2 * sequence_id, sequence_id)
        producer.forget_below(floor)
    assert (producer.id_count, producer.run_count, producer.floor) == (10, 10, 4_990)
    assert len(producer._firsts) < 600


def test_the_greatest_sequence_id_of_all_is_remembered_for_good():
    producer = ProducerHistory()
    last = column(SEQUENCE_ID_MAX)
    producer.add(last, 1, 0, 5)
    floor = producer.floor_at(10_000, 1, 1)
    assert floor == SEQUENCE_ID_MAX  # no 64 bits hold the one after it
    producer.forget_below(floor)
    assert found_by(producer, [SEQUENCE_ID_MAX]) == {SEQUENCE_ID_MAX: (1, 0, 5)}
    assert Producers(decode_producers(image_of(producer).encode(), "f")).content(9).image() == image_of(
        producer
    )


def produced(name: str, *ids: int, floor: int = 0, forgotten: str = "", entry_id: int = 0) -> Produced:
    return Produced(
        topic_id=1,
        ledger_id=2,
        first_entry_id=entry_id,
        publish_time_ms=7,
        times=np.zeros(len(ids), np.int64),
        rows=np.zeros(len(ids), ROW),
        frames=b"",
        sequences=Sequences(name, floor, column(*ids), forgotten),
    )


def test_a_record_says_what_is_forgotten():
    producers = Producers(None)
    producers.apply(produced("a", 1, 2, 3), 1)
    producers.apply(produced("b", 1, entry_id=3), 1)
    producers.apply(produced("c", 9, forgotten="a", entry_id=4), 1)
    assert set(producers.by_name) == {"b", "c"}
    producers.apply(produced("b", 5, 6, floor=6, entry_id=5), 1)
    assert producers.by_name["b"].image("b").sequence_ids == struct.pack("<Q", 6)
    producers.apply(produced("d", 1, forgotten="nobody", entry_id=7), 1)
    assert set(producers.by_name) == {"b", "c", "d"}


def test_a_capture_stays_as_it_was_taken():
    producers = Producers(None)
    producers.apply(produced("a", 1, 2), 1)
    producers.apply(produced("b", 1, entry_id=2), 1)
    capture = producers.content(1)
    before = capture.encode()
    producers.apply(produced("a", 3, floor=3, entry_id=3), 1)
    producers.apply(produced("a", 9, entry_id=5), 1)
    producers.apply(produced("c", 1, forgotten="b", entry_id=4), 1)
    producers.apply(produced("b", 7, entry_id=6), 1)
    assert capture.encode() == before
    assert found_by(producers.by_name["a"], [1, 2, 3, 9]).keys() == {3, 9}
    assert found_by(producers.by_name["b"], [1, 7]).keys() == {7}


def test_a_record_without_sequence_ids_changes_nothing():
    producers = Producers(None)
    producers.apply(replace(produced("a", 1), sequences=None), 1)
    assert not producers.changed and not producers.by_name


# -- the file ----------------------------------------------------------------------------------------------------------


def image_of(producer: ProducerHistory) -> ProducersImage:
    return ProducersImage(9, (producer.image("übung"),))


def example() -> ProducersImage:
    producer = ProducerHistory()
    producer.add(column(1, 2, 0, 5, 6), 3, 100, 50)
    producer.add(column(9), 4, 0, 60)
    producer.forget_below(2)
    return ProducersImage(9, (ProducerHistory().image("a"), producer.image("b")))


def test_a_file_comes_back_as_it_was():
    assert decode_producers(example().encode(), "f") == example()


@given(st.binary(max_size=200))
def test_any_bytes_are_a_file_or_corrupt(content):
    message = pb.ProducersFile()
    try:
        message.ParseFromString(content)
    except Exception:
        return
    try:
        decode_producers(frame_message(MAGIC_PRODUCERS, message), "f")
    except Corrupt:
        return


@given(st.binary(min_size=1, max_size=100))
def test_any_framed_bytes_are_a_file_or_corrupt(content):
    for each in (content, example().encode()[: len(content)], content + example().encode()):
        with pytest.raises(Corrupt):
            decode_producers(each, "f")


def q(*values: int) -> bytes:
    return struct.pack(f"<{len(values)}Q", *values)


def i(*values: int) -> bytes:
    return struct.pack(f"<{len(values)}I", *values)


GOOD = ProducerImage("p", 20, 3, q(3, 10), i(4, 11), q(1, 2), i(0, 5), q(6, 7))


def test_the_good_one_is_good():
    assert decode_producers(ProducersImage(1, (GOOD,)).encode(), "f").producers == (GOOD,)


@pytest.mark.parametrize(
    "bad",
    [
        replace(GOOD, name=""),
        replace(GOOD, sequence_ids=q(3)),
        replace(GOOD, sequence_ids=q(3, 10)[:-1]),
        replace(GOOD, counts=i(4)),
        replace(GOOD, counts=i(0, 11)),
        replace(GOOD, counts=i(8, 11)),
        replace(GOOD, counts=i(4, 12)),
        replace(GOOD, sequence_ids=q(10, 3)),
        replace(GOOD, sequence_ids=q(0, 10)),
        replace(GOOD, sequence_ids=q(3, 3)),
        replace(GOOD, sequence_ids=q(3, 21)),
        replace(GOOD, floor=4),
        replace(GOOD, highest_sequence_id=9),
        replace(GOOD, ledger_ids=q(0, 2)),
        replace(GOOD, ledger_ids=q(1, 1 << 48)),
        replace(GOOD, entry_ids=i(0, (1 << 32) - 1)),
        replace(GOOD, publish_times_ms=q(6, 1 << 63)),
    ],
)
def test_what_no_producer_can_be_is_corrupt(bad):
    with pytest.raises(Corrupt):
        decode_producers(ProducersImage(1, (bad,)).encode(), "f")


def test_names_come_once_and_in_order_and_the_topic_has_an_id():
    other = replace(GOOD, name="a")
    for producers in ((GOOD, GOOD), (GOOD, other)):
        with pytest.raises(Corrupt):
            decode_producers(ProducersImage(1, producers).encode(), "f")
    with pytest.raises(Corrupt):
        decode_producers(ProducersImage(0, (other, GOOD)).encode(), "f")
