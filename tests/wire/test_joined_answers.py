"""Answers that come several in one message of a produce stream, with clients that know of it and clients that do not."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import grpc
import pytest

import postdate
from broker.rpc.gathered_requests import GatheredRequests
from broker.runtime import vfs
from postdate._connection import Stream
from postdate_api.v1 import producer_pb2
from tests.wire.conftest import Wire, batch, eventually, within

COUNT = 20


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Writes of the journal wait until it is set."""
    is_open, write = threading.Event(), vfs.LocalFile.pwrite_synced
    is_open.set()

    def gated(self: vfs.LocalFile, *args: Any) -> None:
        assert is_open.wait(10)
        write(self, *args)

    monkeypatch.setattr(vfs.LocalFile, "pwrite_synced", gated)
    yield is_open
    is_open.set()


@pytest.fixture
def come(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Sizes of the requests of streams that were read."""
    sizes: list[int] = []
    add = GatheredRequests.add

    def noted(self: GatheredRequests, request: bytes) -> None:
        sizes.append(len(request))
        add(self, request)

    monkeypatch.setattr(GatheredRequests, "add", noted)
    return sizes


async def answered(
    wire: Wire, come: list[int], disk: threading.Event, *, joins: bool
) -> Sequence[producer_pb2.ProduceResponse]:
    """Return the messages with the answers to requests that all came while the first was being written."""
    await wire.produce("t", b"first")
    disk.clear()
    call = wire.producer.ProduceStream()
    for number in range(COUNT):
        await within(call.write(batch("t", b"x", request_id=number, join_answers=joins)))
    await eventually(lambda: len(come) == COUNT)
    disk.set()
    await within(call.done_writing())
    messages: list[producer_pb2.ProduceResponse] = []
    while (message := await within(call.read())) is not grpc.aio.EOF:  # type: ignore[attr-defined]
        messages.append(message)
    assert await within(call.code()) is grpc.StatusCode.OK
    return messages


async def test_a_client_that_asks_for_it_gets_answers_together(
    wire: Wire, come: list[int], disk: threading.Event
):
    messages = await answered(wire, come, disk, joins=True)
    assert not messages[0].answers  # it was alone on the disk, and others came later
    answers = [answer for message in messages for answer in message.answers or (message,)]
    assert [answer.request_id for answer in answers] == list(range(COUNT))
    assert [answer.ids[0].first_entry_id for answer in answers] == list(range(1, COUNT + 1))
    assert len(messages) <= COUNT // 4


async def test_a_client_that_does_not_know_of_it_gets_one_answer_a_message(
    wire: Wire, come: list[int], disk: threading.Event
):
    messages = await answered(wire, come, disk, joins=False)
    assert [message.request_id for message in messages] == list(range(COUNT))
    assert not any(message.answers for message in messages)


async def test_the_sdk_takes_answers_together(
    wire: Wire, come: list[int], disk: threading.Event, monkeypatch: pytest.MonkeyPatch
):
    answers: list[int] = []
    read = Stream.read

    async def noted(self: Any) -> Any:
        message = await read(self)
        if isinstance(message, producer_pb2.ProduceResponse):
            answers.append(len(message.answers))
        return message

    monkeypatch.setattr(Stream, "read", noted)
    await wire.produce("t", b"first")
    disk.clear()
    async with (
        postdate.connect(wire.server.grpc_address) as client,
        client.producer("t", in_flight_max=COUNT) as producer,
    ):
        sending = [asyncio.create_task(producer.send_many([b"x", b"y"])) for _ in range(COUNT)]
        await eventually(lambda: len(come) == COUNT)
        disk.set()
        receipts = await within(asyncio.gather(*sending))
    entry_ids = [entry_id for each in receipts for _, entry_id in each.ids()]
    assert entry_ids == list(range(1, 2 * COUNT + 1))
    assert answers[0] == 0
    assert len(answers) <= COUNT // 4
