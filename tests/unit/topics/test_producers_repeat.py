"""Repeats of a producer are found: durable or on their way, in whole or in part, and never stored twice."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.config import BrokerConfig
from broker.errors import InvalidRequest, LimitReached, OutOfRange, Refused
from broker.model import Batch, IdRange
from broker.policy import EffectiveTopicPolicy
from broker.rpc.decode import ProduceEnvelope
from broker.storage.records import Produced, decode_record
from broker.topics.deduplication import Deduplication, check_rising
from broker.topics.plan import LedgerEnd
from broker.topics.producers import DedupMemory, Producers
from tests.harness import Outgoing, batch_of

CONFIG = BrokerConfig()
POLICY = EffectiveTopicPolicy(
    max_delay_ms=1_000,
    default_ttl_ms=0,
    ledger_max_age_ms=0,
    ledger_max_bytes=1 << 30,
    ledger_max_entries=1 << 30,
    dedup_window_ms=100,
    dedup_entries=5,
)
NOW = 10_000


def batch(*sequence_ids: int, producer: str = "p") -> Batch:
    messages = [
        Outgoing(f"{producer}/{place}/{each}".encode(), sequence_id=each)
        for place, each in enumerate(sequence_ids)
    ]
    return batch_of("t", messages, CONFIG, producer)


class Desk:
    """A topic's produce path without its disk: what is submitted is applied when the test says so."""

    def __init__(self, *, producers_max: int = 3, policy: EffectiveTopicPolicy = POLICY) -> None:
        self.policy = policy
        self.loop = asyncio.new_event_loop()
        self.in_flight: deque[tuple[Produced, asyncio.Future[None]]] = deque()
        self.payloads: list[bytes] = []  # by entry id
        self.now_ms = NOW
        self.memory = DedupMemory(producers_max, 1 << 30, 60_000)
        self.begin(Producers(None))

    def begin(self, producers: Producers) -> None:
        self.producers = producers
        self.memory.used_bytes = 0
        self.deduplication = Deduplication(producers, self.memory)
        self.deduplication.start()

    def send(self, *sequence_ids: int, producer: str = "p") -> tuple[IdRange, ...]:
        """The ids that a batch gets."""
        return self.send_batch(batch(*sequence_ids, producer=producer))[0]

    def send_batch(self, sent: Batch) -> tuple[tuple[IdRange, ...], asyncio.Future[None]]:
        asyncio.set_event_loop(self.loop)
        return self.loop.run_until_complete(self._send(sent))

    async def _send(self, sent: Batch) -> tuple[tuple[IdRange, ...], asyncio.Future[None]]:
        look = self.deduplication.look(sent, self.now_ms, self.policy)
        if look.durable is not None:
            return look.ids(None), look.durable
        end = LedgerEnd(1, len(self.payloads), 0, NOW)
        record = look.plan(sent, 1, end, lambda: 1, self.now_ms, self.policy)
        durable = self.loop.create_future()
        self.deduplication.reserve(record, durable)
        assert look.fresh is not None
        stored = ProduceEnvelope.FromString(look.fresh.frames).messages
        assert len(stored) == look.fresh.count
        self.payloads += stored
        # As the journal would bring it back.
        body = b"".join(bytes(part) for part in record.encode())
        again = decode_record(record.type, memoryview(body))
        assert isinstance(again, Produced)
        self.in_flight.append((again, durable))
        return look.ids(IdRange(1, record.first_entry_id, len(record.times))), durable

    def apply(self, count: int = 1_000) -> None:
        while self.in_flight and count:
            record, durable = self.in_flight.popleft()
            self.producers.apply(record, 1)
            durable.set_result(None)
            count -= 1

    def restart(self) -> None:
        """Everything on its way is lost."""
        self.in_flight.clear()
        self.begin(Producers(self.producers.content(1).image()))


@pytest.fixture(params=["durable", "on its way", "after a restart"])
def settle(request):
    """Brings a desk's batches where the test wants them."""

    def move(desk: Desk) -> None:
        if request.param != "on its way":
            desk.apply()
        if request.param == "after a restart":
            desk.restart()

    return move


def test_a_repeat_gets_the_ids_of_the_first(settle):
    desk = Desk()
    assert desk.send(1, 2, 3) == (IdRange(1, 0, 3),)
    settle(desk)
    assert desk.send(1, 2, 3) == (IdRange(1, 0, 3, True),)
    assert desk.send(2) == (IdRange(1, 1, 1, True),)
    assert desk.send(4) == (IdRange(1, 3, 1),)


def test_batches_with_other_boundaries_store_what_is_new(settle):
    desk = Desk(policy=replace(POLICY, dedup_entries=100))
    desk.send(1, 2, 3)
    desk.send(10, producer="q")
    desk.send(4, 5)
    settle(desk)
    assert desk.send(2, 3, 4, 5, 6, 7) == (IdRange(1, 1, 2, True), IdRange(1, 4, 2, True), IdRange(1, 6, 2))
    assert desk.payloads[6:] == [batch_payload(4, 6), batch_payload(5, 7)]
    settle(desk)
    assert desk.send(5, 6, 7, 8) == (IdRange(1, 5, 3, True), IdRange(1, 8, 1))


def batch_payload(place: int, sequence_id: int) -> bytes:
    text = f"p/{place}/{sequence_id}".encode()
    message = batch_of("t", [Outgoing(text, sequence_id=sequence_id)], CONFIG)
    return bytes(ProduceEnvelope.FromString(message.frames).messages[0])


def test_what_was_never_stored_is_new_even_after_later_ones(settle):
    desk = Desk()
    desk.send(1)
    desk.send(5)
    settle(desk)
    assert desk.send(3) == (IdRange(1, 2, 1),)
    settle(desk)
    assert desk.send(1, 3, 4, 5) == (
        IdRange(1, 0, 1, True),
        IdRange(1, 2, 1, True),
        IdRange(1, 3, 1),
        IdRange(1, 1, 1, True),
    )


def test_messages_without_a_sequence_id_are_stored_each_time(settle):
    desk = Desk()
    assert desk.send(0, 1, 0, 2) == (IdRange(1, 0, 4),)
    settle(desk)
    assert desk.send(0, 1, 0, 2) == (
        IdRange(1, 4, 1),
        IdRange(1, 1, 1, True),
        IdRange(1, 5, 1),
        IdRange(1, 3, 1, True),
    )


def test_only_so_many_ids_are_remembered_and_the_rest_is_too_old(settle):
    desk = Desk()
    desk.send(1, 2, 3)
    desk.send(4, 5, 6, 7)
    settle(desk)
    assert desk.send(3, 4, 5, 6, 7) == (IdRange(1, 2, 5, True),)
    with pytest.raises(Refused) as caught:
        desk.send(2, 3, 8)
    assert caught.value.reason == "SEQUENCE_TOO_OLD"
    assert caught.value.message == (
        "sequence_id 2 (messages[0]) may have been stored already: this producer has sent ids up to 7, and the broker "
        "no longer remembers the answer to this one"
    )
    assert caught.value.facts == {"sequence_id": 2, "highest_sequence_id": 7}
    assert len(desk.payloads) == 7
    desk.policy = replace(POLICY, dedup_entries=1)  # counts at once
    with pytest.raises(Refused):
        desk.send(6)
    assert desk.send(7) == (IdRange(1, 6, 1, True),)


def test_a_batch_larger_than_what_is_remembered_is_remembered_in_its_last_part(settle):
    desk = Desk()
    desk.send(*range(1, 9))
    settle(desk)
    assert desk.send(4, 5, 6, 7, 8) == (IdRange(1, 3, 5, True),)
    with pytest.raises(Refused):
        desk.send(*range(1, 9))


def test_beyond_the_window_a_repeat_is_too_old(settle):
    desk = Desk()
    desk.send(1)
    desk.now_ms += 60
    desk.send(2)
    settle(desk)
    desk.now_ms += 39
    assert desk.send(1) == (IdRange(1, 0, 1, True),)
    desk.now_ms += 1
    with pytest.raises(Refused):
        desk.send(1)
    assert desk.send(2) == (IdRange(1, 1, 1, True),)
    desk.now_ms += 1_000
    with pytest.raises(Refused):
        desk.send(2)
    assert desk.send(3) == (IdRange(1, 2, 1),)
    desk.apply()
    assert desk.producers.by_name["p"].floor == 3
    assert desk.producers.by_name["p"].id_count == 1


def test_what_fills_a_hole_is_remembered_for_its_own_window(settle):
    desk = Desk()
    desk.send(1)
    desk.send(9)
    desk.now_ms += 60
    desk.send(5)
    settle(desk)
    desk.now_ms += 50
    for too_old in (1, 9):
        with pytest.raises(Refused):
            desk.send(too_old)
    assert desk.send(5) == (IdRange(1, 2, 1, True),)


def test_the_clock_may_step_back(settle):
    desk = Desk()
    desk.send(1)
    settle(desk)
    desk.now_ms -= 5_000
    assert desk.send(1) == (IdRange(1, 0, 1, True),)
    assert desk.send(2) == (IdRange(1, 1, 1),)


def test_the_greatest_sequence_id_is_never_stored_twice(settle):
    desk = Desk()
    last = (1 << 64) - 1
    assert desk.send(last - 1, last) == (IdRange(1, 0, 2),)
    settle(desk)
    assert desk.send(last - 1, last) == (IdRange(1, 0, 2, True),)
    desk.now_ms += 1_000
    for each in (last - 1, last):
        with pytest.raises(Refused):
            desk.send(each)


@pytest.mark.parametrize(
    ("ids", "at"), [((2, 1), 1), ((1, 1), 1), ((1, 0, 5, 0, 5), 4), ((0, 7, 8, 3, 9), 3)]
)
def test_sequence_ids_rise_in_a_batch(ids, at):
    with pytest.raises(InvalidRequest) as caught:
        check_rising(batch(*ids))
    assert caught.value.reason == "SEQUENCE_NOT_RISING"
    assert caught.value.field == f"messages[{at}].sequence_id"


def test_a_refusal_of_what_is_new_names_the_message_of_the_request():
    desk = Desk()
    desk.send(1, 2)
    messages = [Outgoing(b"", sequence_id=each) for each in (1, 2, 3)]
    messages.append(Outgoing(b"", sequence_id=4, deliver_after_ms=5_000))
    with pytest.raises(OutOfRange) as caught:
        desk.send_batch(batch_of("t", messages, CONFIG, "p"))
    assert caught.value.field == "messages[3].deliver_after_ms"
    assert len(desk.payloads) == 2


def test_a_repeat_waits_for_the_first_one_s_way_to_the_disk():
    desk = Desk()
    _, first = desk.send_batch(batch(1))
    _, repeat = desk.send_batch(batch(1))
    assert not repeat.done()
    desk.apply()
    assert first.done() and repeat.done()
    _, late = desk.send_batch(batch(1))
    assert late.done()


def test_a_repeat_of_what_could_not_be_written_fails_too():
    desk = Desk()
    _, first = desk.send_batch(batch(1))
    _, repeat = desk.send_batch(batch(1))
    first.set_exception(OSError("full"))
    with pytest.raises(OSError, match="full"):
        repeat.result()


def test_what_was_on_its_way_when_the_power_went_is_new():
    desk = Desk()
    desk.send(1)
    desk.apply()
    desk.send(2)
    desk.restart()
    desk.payloads.pop()
    assert desk.send(1, 2) == (IdRange(1, 0, 1, True), IdRange(1, 1, 1))


def test_producers_do_not_meet(settle):
    desk = Desk()
    desk.send(1, producer="p")
    settle(desk)
    assert desk.send(1, producer="q") == (IdRange(1, 1, 1),)
    assert desk.send(1, producer="p") == (IdRange(1, 0, 1, True),)


def test_the_producer_idle_longest_gives_way_once_its_window_is_over(settle):
    desk = Desk()
    for name in ("a", "b", "c"):
        desk.send(1, producer=name)
        desk.now_ms += 10
    desk.send(2, producer="a")  # so that b is idle longest
    settle(desk)
    with pytest.raises(LimitReached) as caught:
        desk.send(1, producer="d")
    assert caught.value.reason == "TOO_MANY_PRODUCERS"
    assert caught.value.retry_after_ms == 80
    assert caught.value.facts == {"producers_per_topic_max": 3}
    assert desk.send(3, producer="a")  # who is known goes on
    desk.apply()
    desk.now_ms += 80
    assert desk.send(1, producer="d")
    with pytest.raises(LimitReached):
        desk.send(1, producer="e")  # c is not idle for long enough
    desk.apply()
    assert set(desk.producers.by_name) == {"a", "c", "d"}
    assert desk.send(3, producer="a")[0].duplicate


def test_what_a_forgotten_name_repeats_is_stored_again():
    desk = Desk(producers_max=1, policy=replace(POLICY, dedup_window_ms=10))
    assert desk.send(7, producer="a") == (IdRange(1, 0, 1),)
    desk.apply()
    desk.now_ms += 10
    desk.send(1, producer="b")
    desk.apply()
    desk.now_ms += 10
    assert desk.send(7, producer="a") == (IdRange(1, 2, 1),)


def test_what_a_refusal_says_to_wait_fits_an_answer():
    desk = Desk(producers_max=1, policy=replace(POLICY, dedup_window_ms=1 << 53))
    desk.send(1, producer="a")
    with pytest.raises(LimitReached) as caught:
        desk.send(1, producer="b")
    assert 0 < caught.value.retry_after_ms <= 3_600_000


def test_a_producer_with_something_on_its_way_does_not_give_way():
    desk = Desk(producers_max=1, policy=replace(POLICY, dedup_window_ms=1))
    desk.send(1, producer="a")
    desk.now_ms += 100
    with pytest.raises(LimitReached):
        desk.send(1, producer="b")
    desk.apply()
    assert desk.send(1, producer="b")


def test_the_second_state_is_let_go_when_nothing_is_on_its_way():
    desk = Desk()
    desk.send(1)
    desk.deduplication.let_go()
    assert desk.send(1)[0].duplicate
    desk.apply()
    desk.deduplication.let_go()
    (ahead,) = desk.deduplication._known().values()
    assert ahead.producer is desk.producers.by_name["p"]
    desk.send(2)
    assert desk.producers.by_name["p"].highest == 1  # the durable one is not touched by what is on its way
    desk.apply()
    assert desk.send(1, 2) == (IdRange(1, 0, 2, True),)


asks = st.lists(
    st.tuples(
        st.sampled_from(["send", "send", "send", "apply", "restart", "wait", "let go"]),
        st.sampled_from("ab"),
        st.lists(st.integers(0, 25), min_size=1, max_size=6),
    ),
    max_size=40,
)


@pytest.mark.slow
@given(asks)
def test_no_id_is_ever_stored_twice_and_a_repeat_gets_its_own(steps):
    desk = Desk(producers_max=2, policy=replace(POLICY, dedup_entries=8))
    stored: dict[
        tuple[str, int], int
    ] = {}  # what an answer may still name: entry by producer and sequence id
    applied_length = 0
    for step, name, asked in steps:
        match step:
            case "apply":
                desk.apply(1)
            case "wait":
                desk.now_ms += 30
            case "let go":
                desk.deduplication.let_go()
            case "restart":
                lost = sum(len(record.times) for record, _ in desk.in_flight)
                desk.restart()
                applied_length = len(desk.payloads) - lost
                del desk.payloads[applied_length:]
                stored = {key: entry for key, entry in stored.items() if entry < applied_length}
            case "send":
                rising = iter(sorted({each for each in asked if each}))
                ids = [next(rising, 0) if each else 0 for each in asked]
                if not any(ids):
                    continue
                before = len(desk.payloads)
                try:
                    ranges = desk.send(*ids, producer=name)
                except Refused:
                    assert len(desk.payloads) == before
                    continue
                entries = [
                    (r.first_entry_id + offset, r.duplicate) for r in ranges for offset in range(r.count)
                ]
                assert len(entries) == len(ids)
                for sequence_id, (entry, duplicate) in zip(ids, entries, strict=True):
                    if duplicate:
                        assert stored[name, sequence_id] == entry
                    else:
                        assert (name, sequence_id) not in stored
                        assert entry >= before
                        if sequence_id:
                            stored[name, sequence_id] = entry


def test_a_part_of_a_batch_is_its_messages():
    whole = batch(*range(1, 10))
    part = whole.part(np.array([0, 3, 4, 8]))
    frames = ProduceEnvelope.FromString(whole.frames).messages
    assert ProduceEnvelope.FromString(part.frames).messages == [frames[each] for each in (0, 3, 4, 8)]
    assert part.sequence_ids is not None and part.sequence_ids.tolist() == [1, 4, 5, 9]
    assert int(part.lengths.sum()) == len(part.frames)
    assert part.crcs.tolist() == [whole.crcs[each] for each in (0, 3, 4, 8)]
