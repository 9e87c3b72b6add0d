"""The book of what a consumer asked for (invariants SETTLEMENT-1, SETTLEMENT-2, SETTLEMENT-3 of `_settlement`)."""

from __future__ import annotations

import asyncio

import pytest

import postdate
from postdate._settlement import ACK, IDS_MAX, Settlements, Verb
from postdate.model import MessageId
from postdate_api.v1 import consumer_pb2
from tests.unit.client.fake_values import status


def ids(*entry_ids: int) -> list[MessageId]:
    return [MessageId(7, entry_id) for entry_id in entry_ids]


def confirmed(request_id: int, *failed: int) -> consumer_pb2.Confirmed:
    result = consumer_pb2.Confirmed(request_id=request_id)
    for entry_id in failed:
        failure = result.failures.add()
        failure.id.ledger_id, failure.id.entry_id = 7, entry_id
        failure.error.CopyFrom(status("NOT_FOUND", "MESSAGE_NOT_FOUND", f"no {entry_id}"))
    return result


def ignore(columns: object, lost: object) -> None:
    """Nobody listens to extensions here."""


class Wakes:
    count = 0

    def __call__(self) -> None:
        self.count += 1


@pytest.fixture
def book() -> Settlements:
    return Settlements(Wakes(), ignore)


def test_acks_gather_into_one_frame_of_columns(book: Settlements) -> None:
    for entry_id in range(1000):
        book.add_ack(7, entry_id)
    book.add_ack(8, 3)
    frame = book.next_frame()
    assert frame is not None
    assert [(each.ledger_id, len(each.entry_ids)) for each in frame.ack.entries] == [(7, 1000), (8, 1)]
    assert frame.ByteSize() < 2100
    assert book.next_frame() is None
    assert not book.empty
    book.confirm(confirmed(frame.ack.request_id))
    assert book.empty


def test_a_frame_has_a_limit(book: Settlements) -> None:
    for entry_id in range(IDS_MAX + 1):
        book.add_ack(7, entry_id)
    sizes = []
    while (frame := book.next_frame()) is not None:
        sizes.append(len(frame.ack.entries[0].entry_ids))
    assert sizes == [IDS_MAX, 1]


def sizes_of(book: Settlements) -> list[int]:
    """Send all frames; how many ids each has."""
    sizes = []
    while (frame := book.next_frame()) is not None:
        body = getattr(frame, str(frame.WhichOneof("frame")))
        sizes.append(sum(len(each.entry_ids) for each in body.entries))
    return sizes


@pytest.mark.parametrize("verb", [ACK, Verb("nack", 100), Verb("extend", lease_ms=5)], ids=lambda v: v.kind)
async def test_what_is_longer_than_a_frame_leaves_in_several_and_is_waited_for_as_one(
    book: Settlements, verb: Verb
) -> None:
    loop = asyncio.get_running_loop()
    book.connected(10)
    first, long, last = [loop.create_future() for _ in range(3)]
    book.add(verb, ids(*range(4)), first)
    book.add(verb, ids(*range(4, 31)), long)
    book.add(verb, ids(31), last)
    assert sizes_of(book) == [10, 10, 10, 2]
    book.confirm(confirmed(1))
    assert (first.done(), long.done()) == (True, False)
    book.confirm(confirmed(4))
    assert (long.done(), last.done()) == (False, True)
    book.confirm(confirmed(3, 25))  # the broker may finish them in any order
    assert isinstance(long.exception(), postdate.NotFound)
    book.confirm(confirmed(2))
    assert book.empty
    assert book.take_faults() == ([], 0)


async def test_acks_gathered_under_a_greater_limit_are_cut_to_the_next_brokers(book: Settlements) -> None:
    loop = asyncio.get_running_loop()
    waiting, other = loop.create_future(), loop.create_future()
    book.add(ACK, ids(*range(25)), waiting)
    assert sizes_of(book) == [25]
    book.add(ACK, ids(25), other)
    for entry_id in range(26, 40):
        book.add_ack(7, entry_id)
    barriers = book.barriers(loop.create_future)
    book.disconnected(postdate.Disconnected("broken"))
    book.connected(10)
    assert sizes_of(book) == [10, 10, 5, 10, 5]
    for request_id in range(2, 7):
        assert not all(each.done() for each in [waiting, *barriers])
        book.confirm(confirmed(request_id))
    assert waiting.result() is other.result() is None
    assert all(each.done() for each in barriers)
    assert book.empty


async def test_long_nacks_are_given_up_with_the_connection(book: Settlements) -> None:
    nacked = asyncio.get_running_loop().create_future()
    book.connected(2)
    book.add(Verb("nack"), ids(*range(5)), nacked)
    assert book.next_frame() is not None
    book.disconnected(postdate.Disconnected("broken"))
    assert isinstance(nacked.exception(), postdate.Disconnected)
    assert book.empty


def test_equal_verbs_share_a_frame_and_others_do_not(book: Settlements) -> None:
    book.add(Verb("nack", 100), ids(1))
    book.add(Verb("nack", 100), ids(2))
    book.add(Verb("nack", 0, True, "bad"), ids(3))
    book.add(Verb("extend", lease_ms=50), ids(4))
    frames = [book.next_frame() for _ in range(3)]
    first, second, third = [frame for frame in frames if frame is not None]
    assert (first.nack.redeliver_after_ms, list(first.nack.entries[0].entry_ids)) == (100, [1, 2])
    assert (second.nack.dead_letter, second.nack.reason) == (True, "bad")
    assert third.extend.lease_ms == 50


async def test_failures_reach_those_who_wait_and_only_them(book: Settlements) -> None:
    loop = asyncio.get_running_loop()
    good, bad = loop.create_future(), loop.create_future()
    book.add(ACK, ids(1), good)
    book.add(ACK, ids(2, 3), bad)
    book.add_ack(7, 4)
    assert book.next_frame() is not None
    book.confirm(confirmed(1, 3, 4))
    assert good.result() is None
    assert isinstance(bad.exception(), postdate.NotFound)
    faults, count = book.take_faults()  # of 4, for which nobody waited
    assert count == 1
    assert faults[0].message == "no 4"


async def test_acks_survive_a_broken_connection_and_nacks_do_not(book: Settlements) -> None:
    loop = asyncio.get_running_loop()
    acked, nacked, gathered = loop.create_future(), loop.create_future(), loop.create_future()
    book.add(ACK, ids(1), acked)
    book.add(Verb("nack"), ids(2), nacked)
    assert book.next_frame() is not None
    assert book.next_frame() is not None
    book.add(Verb("extend"), ids(3), gathered)
    book.disconnected(postdate.Disconnected("broken"))
    assert isinstance(nacked.exception(), postdate.Disconnected)
    assert isinstance(gathered.exception(), postdate.Disconnected)
    again = book.next_frame()
    assert again is not None
    assert list(again.ack.entries[0].entry_ids) == [1]
    assert book.next_frame() is None
    book.confirm(confirmed(1))  # of the old connection: nobody's
    assert not acked.done()
    book.confirm(confirmed(again.ack.request_id))
    assert acked.result() is None
    assert book.empty


async def test_barriers_wait_for_what_was_asked_before_them(book: Settlements) -> None:
    loop = asyncio.get_running_loop()
    book.add_ack(7, 1)
    first = book.next_frame()
    assert first is not None
    book.add_ack(7, 2)
    barriers = book.barriers(loop.create_future)
    second = book.next_frame()
    assert second is not None
    book.add_ack(7, 3)
    book.confirm(confirmed(first.ack.request_id))
    assert not all(barrier.done() for barrier in barriers)
    book.confirm(confirmed(second.ack.request_id))
    assert all(barrier.done() for barrier in barriers)
    assert not book.empty


async def test_giving_up_fails_those_who_wait_and_is_kept_for_the_others(book: Settlements) -> None:
    waiting = asyncio.get_running_loop().create_future()
    book.add(ACK, ids(1), waiting)
    book.give_up(postdate.Closed("closed"))
    assert isinstance(waiting.exception(), postdate.Closed)
    assert book.take_faults() == ([], 0)
    book.add_ack(7, 2)
    book.give_up(postdate.Closed("closed"))
    assert book.take_faults()[1] == 1
    assert book.empty
