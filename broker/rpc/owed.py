"""ConsumerService, what operators see of a subscription: the messages that it is owed, by state."""

from __future__ import annotations

from broker.config import check_name
from broker.errors import InvalidRequest
from broker.folder.broker import Broker
from broker.rpc.decode import ProduceEnvelope
from broker.rpc.entries import is_full_view, one_of
from broker.rpc.paging import check_page_size, decode_place, encode_place
from broker.topics.owed_list import LISTED, OwedList, OwedMessage, OwedState
from postdate_api.v1 import consumer_pb2, message_pb2

_STATES = {
    OwedState.READY: consumer_pb2.OWED_STATE_READY,
    OwedState.LEASED: consumer_pb2.OWED_STATE_LEASED,
    OwedState.RETRYING: consumer_pb2.OWED_STATE_RETRYING,
}
_BY_NUMBER = {number: state for state, number in _STATES.items()}


async def list_owed(broker: Broker, request: consumer_pb2.ListOwedRequest) -> consumer_pb2.ListOwedResponse:
    """Answer ListOwed."""
    check_name("topic", request.topic, "topic")
    check_name("subscription", request.subscription, "subscription")
    count = check_page_size(request.page_size)
    is_full = is_full_view(request.view)
    states = _states_of(request)
    after = decode_place(request.page_token)
    topic = broker.registry.topic(request.topic)
    room = broker.config.frame_bytes_max
    page = await OwedList(topic, topic.subscription(request.subscription), states).page(after, count, room)
    response = consumer_pb2.ListOwedResponse()
    last = page.last
    for entry in page.messages:
        message = _message(entry, is_full)
        room -= message.ByteSize()
        if room < 0 and response.owed:  # the first one goes whatever its size
            break
        response.owed.append(message)
        last = page.last if entry is page.messages[-1] else entry.position
    if last is not None:
        response.next_page_token = encode_place(last)
    return response


def _states_of(request: consumer_pb2.ListOwedRequest) -> list[OwedState]:
    for index, number in enumerate(request.states):
        if number not in _BY_NUMBER:
            names = one_of([consumer_pb2.OwedState.Name(number) for number in _BY_NUMBER])
            raise InvalidRequest(
                f"A state must be {names}, not {number}",
                field=f"states[{index}]",
                reason="INVALID_OWED_STATE",
            )
    return [_BY_NUMBER[number] for number in dict.fromkeys(request.states)] or list(LISTED)


def _message(entry: OwedMessage, is_full: bool) -> consumer_pb2.OwedMessage:
    message = message_pb2.Message.FromString(ProduceEnvelope.FromString(entry.frame).messages[0])
    if not is_full:
        message.ClearField("payload")
    return consumer_pb2.OwedMessage(
        id=message_pb2.MessageId(ledger_id=entry.position.ledger_id, entry_id=entry.position.entry_id),
        state=_STATES[entry.state],
        attempts=entry.attempts,
        last_reason=entry.last_reason,
        publish_time_ms=entry.publish_time_ms,
        deliver_at_ms=entry.deliver_at_ms or entry.publish_time_ms,
        consumer_name=entry.consumer_name,
        lease_end_ms=entry.lease_end_ms,
        next_attempt_ms=entry.next_attempt_ms,
        size_bytes=len(entry.frame),
        message=message,
    )
