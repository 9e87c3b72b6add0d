from google.rpc import status_pb2 as _status_pb2
from postdate_api.v1 import message_pb2 as _message_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class SubscriptionType(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SUBSCRIPTION_TYPE_UNSPECIFIED: _ClassVar[SubscriptionType]
    SUBSCRIPTION_TYPE_SHARED: _ClassVar[SubscriptionType]
    SUBSCRIPTION_TYPE_KEY_SHARED: _ClassVar[SubscriptionType]
    SUBSCRIPTION_TYPE_EXCLUSIVE: _ClassVar[SubscriptionType]
    SUBSCRIPTION_TYPE_FAILOVER: _ClassVar[SubscriptionType]

class InitialPosition(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    INITIAL_POSITION_UNSPECIFIED: _ClassVar[InitialPosition]
    INITIAL_POSITION_LATEST: _ClassVar[InitialPosition]
    INITIAL_POSITION_EARLIEST: _ClassVar[InitialPosition]

class OwedState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    OWED_STATE_UNSPECIFIED: _ClassVar[OwedState]
    OWED_STATE_READY: _ClassVar[OwedState]
    OWED_STATE_LEASED: _ClassVar[OwedState]
    OWED_STATE_RETRYING: _ClassVar[OwedState]
SUBSCRIPTION_TYPE_UNSPECIFIED: SubscriptionType
SUBSCRIPTION_TYPE_SHARED: SubscriptionType
SUBSCRIPTION_TYPE_KEY_SHARED: SubscriptionType
SUBSCRIPTION_TYPE_EXCLUSIVE: SubscriptionType
SUBSCRIPTION_TYPE_FAILOVER: SubscriptionType
INITIAL_POSITION_UNSPECIFIED: InitialPosition
INITIAL_POSITION_LATEST: InitialPosition
INITIAL_POSITION_EARLIEST: InitialPosition
OWED_STATE_UNSPECIFIED: OwedState
OWED_STATE_READY: OwedState
OWED_STATE_LEASED: OwedState
OWED_STATE_RETRYING: OwedState

class SubscribeRequest(_message.Message):
    __slots__ = ("open", "permits", "ack", "nack", "extend", "drain")
    OPEN_FIELD_NUMBER: _ClassVar[int]
    PERMITS_FIELD_NUMBER: _ClassVar[int]
    ACK_FIELD_NUMBER: _ClassVar[int]
    NACK_FIELD_NUMBER: _ClassVar[int]
    EXTEND_FIELD_NUMBER: _ClassVar[int]
    DRAIN_FIELD_NUMBER: _ClassVar[int]
    open: Open
    permits: Permits
    ack: Ack
    nack: Nack
    extend: Extend
    drain: Drain
    def __init__(self, open: _Optional[_Union[Open, _Mapping[str, object]]] = ..., permits: _Optional[_Union[Permits, _Mapping[str, object]]] = ..., ack: _Optional[_Union[Ack, _Mapping[str, object]]] = ..., nack: _Optional[_Union[Nack, _Mapping[str, object]]] = ..., extend: _Optional[_Union[Extend, _Mapping[str, object]]] = ..., drain: _Optional[_Union[Drain, _Mapping[str, object]]] = ...) -> None: ...

class Open(_message.Message):
    __slots__ = ("topic", "subscription", "type", "initial_position", "consumer_name", "permits", "lease_ms", "honor_delay")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    SUBSCRIPTION_FIELD_NUMBER: _ClassVar[int]
    TYPE_FIELD_NUMBER: _ClassVar[int]
    INITIAL_POSITION_FIELD_NUMBER: _ClassVar[int]
    CONSUMER_NAME_FIELD_NUMBER: _ClassVar[int]
    PERMITS_FIELD_NUMBER: _ClassVar[int]
    LEASE_MS_FIELD_NUMBER: _ClassVar[int]
    HONOR_DELAY_FIELD_NUMBER: _ClassVar[int]
    topic: str
    subscription: str
    type: SubscriptionType
    initial_position: InitialPosition
    consumer_name: str
    permits: Permits
    lease_ms: int
    honor_delay: bool
    def __init__(self, topic: _Optional[str] = ..., subscription: _Optional[str] = ..., type: _Optional[_Union[SubscriptionType, str]] = ..., initial_position: _Optional[_Union[InitialPosition, str]] = ..., consumer_name: _Optional[str] = ..., permits: _Optional[_Union[Permits, _Mapping[str, object]]] = ..., lease_ms: _Optional[int] = ..., honor_delay: bool = ...) -> None: ...

class Permits(_message.Message):
    __slots__ = ("messages", "bytes")
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    messages: int
    bytes: int
    def __init__(self, messages: _Optional[int] = ..., bytes: _Optional[int] = ...) -> None: ...

class Ack(_message.Message):
    __slots__ = ("request_id", "entries")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ENTRIES_FIELD_NUMBER: _ClassVar[int]
    request_id: int
    entries: _containers.RepeatedCompositeFieldContainer[_message_pb2.EntrySet]
    def __init__(self, request_id: _Optional[int] = ..., entries: _Optional[_Iterable[_Union[_message_pb2.EntrySet, _Mapping[str, object]]]] = ...) -> None: ...

class Nack(_message.Message):
    __slots__ = ("request_id", "entries", "redeliver_after_ms", "dead_letter", "reason", "release")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ENTRIES_FIELD_NUMBER: _ClassVar[int]
    REDELIVER_AFTER_MS_FIELD_NUMBER: _ClassVar[int]
    DEAD_LETTER_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    RELEASE_FIELD_NUMBER: _ClassVar[int]
    request_id: int
    entries: _containers.RepeatedCompositeFieldContainer[_message_pb2.EntrySet]
    redeliver_after_ms: int
    dead_letter: bool
    reason: str
    release: bool
    def __init__(self, request_id: _Optional[int] = ..., entries: _Optional[_Iterable[_Union[_message_pb2.EntrySet, _Mapping[str, object]]]] = ..., redeliver_after_ms: _Optional[int] = ..., dead_letter: bool = ..., reason: _Optional[str] = ..., release: bool = ...) -> None: ...

class Extend(_message.Message):
    __slots__ = ("request_id", "entries", "lease_ms")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ENTRIES_FIELD_NUMBER: _ClassVar[int]
    LEASE_MS_FIELD_NUMBER: _ClassVar[int]
    request_id: int
    entries: _containers.RepeatedCompositeFieldContainer[_message_pb2.EntrySet]
    lease_ms: int
    def __init__(self, request_id: _Optional[int] = ..., entries: _Optional[_Iterable[_Union[_message_pb2.EntrySet, _Mapping[str, object]]]] = ..., lease_ms: _Optional[int] = ...) -> None: ...

class Drain(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SubscribeResponse(_message.Message):
    __slots__ = ("opened", "batch", "confirmed", "heartbeat", "draining")
    OPENED_FIELD_NUMBER: _ClassVar[int]
    BATCH_FIELD_NUMBER: _ClassVar[int]
    CONFIRMED_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    opened: Opened
    batch: Batch
    confirmed: Confirmed
    heartbeat: Heartbeat
    draining: Draining
    def __init__(self, opened: _Optional[_Union[Opened, _Mapping[str, object]]] = ..., batch: _Optional[_Union[Batch, _Mapping[str, object]]] = ..., confirmed: _Optional[_Union[Confirmed, _Mapping[str, object]]] = ..., heartbeat: _Optional[_Union[Heartbeat, _Mapping[str, object]]] = ..., draining: _Optional[_Union[Draining, _Mapping[str, object]]] = ...) -> None: ...

class Opened(_message.Message):
    __slots__ = ("consumer_id", "lease_ms", "heartbeat_ms", "type", "honor_delay", "ack_entries_max", "epoch")
    CONSUMER_ID_FIELD_NUMBER: _ClassVar[int]
    LEASE_MS_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_MS_FIELD_NUMBER: _ClassVar[int]
    TYPE_FIELD_NUMBER: _ClassVar[int]
    HONOR_DELAY_FIELD_NUMBER: _ClassVar[int]
    ACK_ENTRIES_MAX_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    consumer_id: str
    lease_ms: int
    heartbeat_ms: int
    type: SubscriptionType
    honor_delay: bool
    ack_entries_max: int
    epoch: int
    def __init__(self, consumer_id: _Optional[str] = ..., lease_ms: _Optional[int] = ..., heartbeat_ms: _Optional[int] = ..., type: _Optional[_Union[SubscriptionType, str]] = ..., honor_delay: bool = ..., ack_entries_max: _Optional[int] = ..., epoch: _Optional[int] = ...) -> None: ...

class Batch(_message.Message):
    __slots__ = ("deliveries",)
    DELIVERIES_FIELD_NUMBER: _ClassVar[int]
    deliveries: _containers.RepeatedCompositeFieldContainer[Delivery]
    def __init__(self, deliveries: _Optional[_Iterable[_Union[Delivery, _Mapping[str, object]]]] = ...) -> None: ...

class Delivery(_message.Message):
    __slots__ = ("id", "message", "publish_time_ms", "deliver_at_ms", "delivery_attempt")
    ID_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    PUBLISH_TIME_MS_FIELD_NUMBER: _ClassVar[int]
    DELIVER_AT_MS_FIELD_NUMBER: _ClassVar[int]
    DELIVERY_ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    id: _message_pb2.MessageId
    message: _message_pb2.Message
    publish_time_ms: int
    deliver_at_ms: int
    delivery_attempt: int
    def __init__(self, id: _Optional[_Union[_message_pb2.MessageId, _Mapping[str, object]]] = ..., message: _Optional[_Union[_message_pb2.Message, _Mapping[str, object]]] = ..., publish_time_ms: _Optional[int] = ..., deliver_at_ms: _Optional[int] = ..., delivery_attempt: _Optional[int] = ...) -> None: ...

class Confirmed(_message.Message):
    __slots__ = ("request_id", "failures")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    FAILURES_FIELD_NUMBER: _ClassVar[int]
    request_id: int
    failures: _containers.RepeatedCompositeFieldContainer[EntryFailure]
    def __init__(self, request_id: _Optional[int] = ..., failures: _Optional[_Iterable[_Union[EntryFailure, _Mapping[str, object]]]] = ...) -> None: ...

class EntryFailure(_message.Message):
    __slots__ = ("id", "error")
    ID_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    id: _message_pb2.MessageId
    error: _status_pb2.Status
    def __init__(self, id: _Optional[_Union[_message_pb2.MessageId, _Mapping[str, object]]] = ..., error: _Optional[_Union[_status_pb2.Status, _Mapping[str, object]]] = ...) -> None: ...

class Heartbeat(_message.Message):
    __slots__ = ("broker_time_ms", "ready_messages", "next_due_time_ms")
    BROKER_TIME_MS_FIELD_NUMBER: _ClassVar[int]
    READY_MESSAGES_FIELD_NUMBER: _ClassVar[int]
    NEXT_DUE_TIME_MS_FIELD_NUMBER: _ClassVar[int]
    broker_time_ms: int
    ready_messages: int
    next_due_time_ms: int
    def __init__(self, broker_time_ms: _Optional[int] = ..., ready_messages: _Optional[int] = ..., next_due_time_ms: _Optional[int] = ...) -> None: ...

class Draining(_message.Message):
    __slots__ = ("grace_ms",)
    GRACE_MS_FIELD_NUMBER: _ClassVar[int]
    grace_ms: int
    def __init__(self, grace_ms: _Optional[int] = ...) -> None: ...

class ReceiveRequest(_message.Message):
    __slots__ = ("topic", "subscription", "max_messages", "wait_ms", "lease_ms", "initial_position", "attempt_id")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    SUBSCRIPTION_FIELD_NUMBER: _ClassVar[int]
    MAX_MESSAGES_FIELD_NUMBER: _ClassVar[int]
    WAIT_MS_FIELD_NUMBER: _ClassVar[int]
    LEASE_MS_FIELD_NUMBER: _ClassVar[int]
    INITIAL_POSITION_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_ID_FIELD_NUMBER: _ClassVar[int]
    topic: str
    subscription: str
    max_messages: int
    wait_ms: int
    lease_ms: int
    initial_position: InitialPosition
    attempt_id: str
    def __init__(self, topic: _Optional[str] = ..., subscription: _Optional[str] = ..., max_messages: _Optional[int] = ..., wait_ms: _Optional[int] = ..., lease_ms: _Optional[int] = ..., initial_position: _Optional[_Union[InitialPosition, str]] = ..., attempt_id: _Optional[str] = ...) -> None: ...

class ReceiveResponse(_message.Message):
    __slots__ = ("deliveries", "consumer_id", "next_due_time_ms")
    DELIVERIES_FIELD_NUMBER: _ClassVar[int]
    CONSUMER_ID_FIELD_NUMBER: _ClassVar[int]
    NEXT_DUE_TIME_MS_FIELD_NUMBER: _ClassVar[int]
    deliveries: _containers.RepeatedCompositeFieldContainer[Delivery]
    consumer_id: str
    next_due_time_ms: int
    def __init__(self, deliveries: _Optional[_Iterable[_Union[Delivery, _Mapping[str, object]]]] = ..., consumer_id: _Optional[str] = ..., next_due_time_ms: _Optional[int] = ...) -> None: ...

class AcknowledgeRequest(_message.Message):
    __slots__ = ("topic", "subscription", "entries")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    SUBSCRIPTION_FIELD_NUMBER: _ClassVar[int]
    ENTRIES_FIELD_NUMBER: _ClassVar[int]
    topic: str
    subscription: str
    entries: _containers.RepeatedCompositeFieldContainer[_message_pb2.EntrySet]
    def __init__(self, topic: _Optional[str] = ..., subscription: _Optional[str] = ..., entries: _Optional[_Iterable[_Union[_message_pb2.EntrySet, _Mapping[str, object]]]] = ...) -> None: ...

class AcknowledgeResponse(_message.Message):
    __slots__ = ("failures",)
    FAILURES_FIELD_NUMBER: _ClassVar[int]
    failures: _containers.RepeatedCompositeFieldContainer[EntryFailure]
    def __init__(self, failures: _Optional[_Iterable[_Union[EntryFailure, _Mapping[str, object]]]] = ...) -> None: ...

class NackRequest(_message.Message):
    __slots__ = ("topic", "subscription", "consumer_id", "entries", "redeliver_after_ms", "dead_letter", "reason", "release")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    SUBSCRIPTION_FIELD_NUMBER: _ClassVar[int]
    CONSUMER_ID_FIELD_NUMBER: _ClassVar[int]
    ENTRIES_FIELD_NUMBER: _ClassVar[int]
    REDELIVER_AFTER_MS_FIELD_NUMBER: _ClassVar[int]
    DEAD_LETTER_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    RELEASE_FIELD_NUMBER: _ClassVar[int]
    topic: str
    subscription: str
    consumer_id: str
    entries: _containers.RepeatedCompositeFieldContainer[_message_pb2.EntrySet]
    redeliver_after_ms: int
    dead_letter: bool
    reason: str
    release: bool
    def __init__(self, topic: _Optional[str] = ..., subscription: _Optional[str] = ..., consumer_id: _Optional[str] = ..., entries: _Optional[_Iterable[_Union[_message_pb2.EntrySet, _Mapping[str, object]]]] = ..., redeliver_after_ms: _Optional[int] = ..., dead_letter: bool = ..., reason: _Optional[str] = ..., release: bool = ...) -> None: ...

class NackResponse(_message.Message):
    __slots__ = ("failures",)
    FAILURES_FIELD_NUMBER: _ClassVar[int]
    failures: _containers.RepeatedCompositeFieldContainer[EntryFailure]
    def __init__(self, failures: _Optional[_Iterable[_Union[EntryFailure, _Mapping[str, object]]]] = ...) -> None: ...

class ExtendLeaseRequest(_message.Message):
    __slots__ = ("topic", "subscription", "consumer_id", "entries", "lease_ms")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    SUBSCRIPTION_FIELD_NUMBER: _ClassVar[int]
    CONSUMER_ID_FIELD_NUMBER: _ClassVar[int]
    ENTRIES_FIELD_NUMBER: _ClassVar[int]
    LEASE_MS_FIELD_NUMBER: _ClassVar[int]
    topic: str
    subscription: str
    consumer_id: str
    entries: _containers.RepeatedCompositeFieldContainer[_message_pb2.EntrySet]
    lease_ms: int
    def __init__(self, topic: _Optional[str] = ..., subscription: _Optional[str] = ..., consumer_id: _Optional[str] = ..., entries: _Optional[_Iterable[_Union[_message_pb2.EntrySet, _Mapping[str, object]]]] = ..., lease_ms: _Optional[int] = ...) -> None: ...

class ExtendLeaseResponse(_message.Message):
    __slots__ = ("failures",)
    FAILURES_FIELD_NUMBER: _ClassVar[int]
    failures: _containers.RepeatedCompositeFieldContainer[EntryFailure]
    def __init__(self, failures: _Optional[_Iterable[_Union[EntryFailure, _Mapping[str, object]]]] = ...) -> None: ...

class ListOwedRequest(_message.Message):
    __slots__ = ("topic", "subscription", "states", "view", "page_size", "page_token")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    SUBSCRIPTION_FIELD_NUMBER: _ClassVar[int]
    STATES_FIELD_NUMBER: _ClassVar[int]
    VIEW_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    topic: str
    subscription: str
    states: _containers.RepeatedScalarFieldContainer[OwedState]
    view: _message_pb2.MessageView
    page_size: int
    page_token: str
    def __init__(self, topic: _Optional[str] = ..., subscription: _Optional[str] = ..., states: _Optional[_Iterable[_Union[OwedState, str]]] = ..., view: _Optional[_Union[_message_pb2.MessageView, str]] = ..., page_size: _Optional[int] = ..., page_token: _Optional[str] = ...) -> None: ...

class ListOwedResponse(_message.Message):
    __slots__ = ("owed", "next_page_token")
    OWED_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    owed: _containers.RepeatedCompositeFieldContainer[OwedMessage]
    next_page_token: str
    def __init__(self, owed: _Optional[_Iterable[_Union[OwedMessage, _Mapping[str, object]]]] = ..., next_page_token: _Optional[str] = ...) -> None: ...

class OwedMessage(_message.Message):
    __slots__ = ("id", "state", "attempts", "last_reason", "publish_time_ms", "deliver_at_ms", "consumer_name", "lease_end_ms", "next_attempt_ms", "size_bytes", "message")
    ID_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    ATTEMPTS_FIELD_NUMBER: _ClassVar[int]
    LAST_REASON_FIELD_NUMBER: _ClassVar[int]
    PUBLISH_TIME_MS_FIELD_NUMBER: _ClassVar[int]
    DELIVER_AT_MS_FIELD_NUMBER: _ClassVar[int]
    CONSUMER_NAME_FIELD_NUMBER: _ClassVar[int]
    LEASE_END_MS_FIELD_NUMBER: _ClassVar[int]
    NEXT_ATTEMPT_MS_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    id: _message_pb2.MessageId
    state: OwedState
    attempts: int
    last_reason: str
    publish_time_ms: int
    deliver_at_ms: int
    consumer_name: str
    lease_end_ms: int
    next_attempt_ms: int
    size_bytes: int
    message: _message_pb2.Message
    def __init__(self, id: _Optional[_Union[_message_pb2.MessageId, _Mapping[str, object]]] = ..., state: _Optional[_Union[OwedState, str]] = ..., attempts: _Optional[int] = ..., last_reason: _Optional[str] = ..., publish_time_ms: _Optional[int] = ..., deliver_at_ms: _Optional[int] = ..., consumer_name: _Optional[str] = ..., lease_end_ms: _Optional[int] = ..., next_attempt_ms: _Optional[int] = ..., size_bytes: _Optional[int] = ..., message: _Optional[_Union[_message_pb2.Message, _Mapping[str, object]]] = ...) -> None: ...
