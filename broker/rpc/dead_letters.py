"""AdminService, what operators do with dead letters: list them, send them again, drop them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
from google.protobuf.message import Message

from broker.config import check_name
from broker.errors import InvalidRequest
from broker.folder.broker import Broker
from broker.model import Entries, Position, count_entries, without_entries
from broker.rpc.answer_ownership import answer_without_ownership
from broker.rpc.decode import ProduceEnvelope
from broker.rpc.delays import check_delay_ms
from broker.rpc.entries import entries_of, is_full_view
from broker.rpc.paging import check_page_size, decode_place, encode_place
from broker.rpc.request_ids import RequestIds
from broker.rpc.schedule_requests import due_range
from broker.rpc.status import encode_failures
from broker.runtime.supervise import YieldBudget
from broker.settings import MIB
from broker.storage.manifest import REASON_BYTES_MAX
from broker.subscriptions.requests import FailedIds, failed_ids
from broker.subscriptions.subscription import Subscription
from broker.topics import dead_letter_frames as frames
from broker.topics.dead_letter_list import LOOKED_MAX, LetterSearch, letters_after
from broker.topics.refusals import check_max_delay
from broker.topics.topic import Topic
from postdate_api.v1 import admin_pb2, message_pb2

_LOOKED_BYTES_MAX = 16 * MIB

Call = tuple[type[Message], Callable[[Any], Awaitable[Message]]]
Answer = admin_pb2.RequeueDeadLettersResponse | admin_pb2.PurgeDeadLettersResponse
Request = admin_pb2.RequeueDeadLettersRequest | admin_pb2.PurgeDeadLettersRequest


class DeadLetterCalls:
    """See the module's description. Part of the AdminService, whose answers to repeats it shares."""

    def __init__(self, broker: Broker, request_ids: RequestIds) -> None:
        self._broker = broker
        self._office = broker.dead_letters
        self._request_ids = request_ids

    def calls(self) -> dict[str, Call]:
        return {
            "ListDeadLetters": (admin_pb2.ListDeadLettersRequest, self._list),
            "RequeueDeadLetters": (admin_pb2.RequeueDeadLettersRequest, self._requeue),
            "PurgeDeadLetters": (admin_pb2.PurgeDeadLettersRequest, self._purge),
        }

    async def _list(self, request: admin_pb2.ListDeadLettersRequest) -> Message:
        _, subscription = self._find(request.topic, request.subscription)
        count = check_page_size(request.page_size)
        is_full = is_full_view(request.view)
        search = _search_of(request)
        response = admin_pb2.ListDeadLettersResponse()
        room, bytes_left = self._broker.config.frame_bytes_max, _LOOKED_BYTES_MAX
        places, last = self._office.places(subscription), decode_place(request.page_token)
        budget, looked = YieldBudget(self._broker.clock), 0
        async for topic, position, frame in letters_after(places, last, search.step(count)):
            if len(response.dead_letters) == count or looked == LOOKED_MAX or bytes_left <= 0:
                return _cut(response, last)
            looked, bytes_left = looked + 1, bytes_left - len(frame)
            letter = _letter(topic.name, position, frame, is_full)
            if search.matches(letter.reason, letter.last_reason, letter.dead_letter_time_ms):
                room -= letter.ByteSize()
                if room < 0 and response.dead_letters:  # the first one goes whatever its size
                    return _cut(response, last)
                response.dead_letters.append(letter)
            last = position
            await budget.spent()
        return response

    async def _requeue(self, request: admin_pb2.RequeueDeadLettersRequest) -> Message:
        self._broker.check_serving()
        topic, _ = self._find(request.topic, request.subscription)
        chosen, failures = self._chosen(request)
        _check_delay(request.deliver_after_ms, topic)

        async def requeue() -> Answer:
            _, subscription = self._find(request.topic, request.subscription)
            moved = await self._office.requeue(subscription, chosen, request.deliver_after_ms)
            response = admin_pb2.RequeueDeadLettersResponse(requeued_messages=count_entries(moved))
            return await _with_failures(response, chosen, moved, failures)

        return await self._request_ids.once(request.topic, request, requeue)

    async def _purge(self, request: admin_pb2.PurgeDeadLettersRequest) -> Message:
        self._broker.check_serving()
        self._find(request.topic, request.subscription)
        chosen, failures = self._chosen(request)

        async def purge() -> Answer:
            _, subscription = self._find(request.topic, request.subscription)
            purged = await self._office.purge(subscription, chosen)
            response = admin_pb2.PurgeDeadLettersResponse(purged_messages=count_entries(purged))
            return await _with_failures(response, chosen, purged, failures)

        return await self._request_ids.once(request.topic, request, purge)

    def _find(self, topic_name: str, name: str) -> tuple[Topic, Subscription]:
        check_name("topic", topic_name, "topic")
        check_name("subscription", name, "subscription")
        topic = self._broker.registry.topic(topic_name)
        return topic, topic.subscription(name)

    def _chosen(self, request: Request) -> tuple[Entries | None, list[FailedIds]]:
        """The letters that a request names; None for all of them. And failures of ids that no message has."""
        if not request.entries and not request.all:
            raise InvalidRequest(
                "The request selects no dead letters: give entries, or set all",
                field="entries",
                reason="INVALID_SELECTION",
            )
        if request.entries and request.all:
            raise InvalidRequest(
                "The request has both entries and all: give one of them",
                field="entries",
                reason="INVALID_SELECTION",
            )
        if request.all:
            return None, []
        return entries_of(request.entries, "entries", self._broker.config.tuning.ack_entries_max)


def _check_delay(deliver_after_ms: int, topic: Topic) -> None:
    check_delay_ms(deliver_after_ms, "deliver_after_ms")
    check_max_delay(np.array([deliver_after_ms]), 0, topic.policy, lambda _: "deliver_after_ms")


def _search_of(request: admin_pb2.ListDeadLettersRequest) -> LetterSearch:
    if len(request.reason.encode()) > REASON_BYTES_MAX:
        raise InvalidRequest(
            f"reason is at most {REASON_BYTES_MAX} bytes", field="reason", reason="REASON_TOO_LARGE"
        )
    return LetterSearch(request.reason, due_range(request.dead_letter_time, "dead_letter_time"))


def _cut(response: admin_pb2.ListDeadLettersResponse, last: Position) -> admin_pb2.ListDeadLettersResponse:
    """A page after which there is more; `last`: the last letter that was looked at."""
    response.next_page_token = encode_place(last)
    return response


def _letter(topic: str, position: Position, frame: bytes, is_full: bool) -> admin_pb2.DeadLetter:
    message = message_pb2.Message.FromString(ProduceEnvelope.FromString(frame).messages[0])
    properties = dict(message.properties)
    for name in frames.RESERVED:
        message.properties.pop(name, None)
    payload_bytes = len(message.payload)
    if not is_full:
        message.ClearField("payload")
    return admin_pb2.DeadLetter(
        id=message_pb2.MessageId(ledger_id=position.ledger_id, entry_id=position.entry_id),
        dead_letter_topic=topic,
        original_id=message_pb2.MessageId(
            ledger_id=int(properties[frames.LEDGER_ID]), entry_id=int(properties[frames.ENTRY_ID])
        ),
        delivery_attempts=int(properties[frames.ATTEMPTS]),
        reason=properties[frames.REASON],
        dead_letter_time_ms=int(properties[frames.TIME_MS]),
        payload_bytes=payload_bytes,
        message=message,
        last_reason=properties.get(frames.LAST_REASON, ""),
    )


async def _with_failures(
    response: Answer, chosen: Entries | None, done: Entries, failures: list[FailedIds]
) -> Answer:
    """The answer, with what was chosen and is no dead letter of this subscription."""
    missing = without_entries(chosen, done) if chosen is not None else {}
    failures = failures + failed_ids(missing, "NOT_FOUND")
    encoded = await encode_failures(failures, type(response), of_dead_letters=True)
    response.MergeFromString(encoded)
    if done and not failures:
        answer_without_ownership()
    return response
