from postdate_api.v1 import message_pb2 as _message_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ChangeResult(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    CHANGE_RESULT_UNSPECIFIED: _ClassVar[ChangeResult]
    CHANGE_RESULT_DONE: _ClassVar[ChangeResult]
    CHANGE_RESULT_ALREADY_DELIVERED: _ClassVar[ChangeResult]
    CHANGE_RESULT_NOT_FOUND: _ClassVar[ChangeResult]
    CHANGE_RESULT_ALREADY_CANCELLED: _ClassVar[ChangeResult]

class ScheduledState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SCHEDULED_STATE_UNSPECIFIED: _ClassVar[ScheduledState]
    SCHEDULED_STATE_WAITING: _ClassVar[ScheduledState]
    SCHEDULED_STATE_DUE: _ClassVar[ScheduledState]
    SCHEDULED_STATE_RETURNED: _ClassVar[ScheduledState]
CHANGE_RESULT_UNSPECIFIED: ChangeResult
CHANGE_RESULT_DONE: ChangeResult
CHANGE_RESULT_ALREADY_DELIVERED: ChangeResult
CHANGE_RESULT_NOT_FOUND: ChangeResult
CHANGE_RESULT_ALREADY_CANCELLED: ChangeResult
SCHEDULED_STATE_UNSPECIFIED: ScheduledState
SCHEDULED_STATE_WAITING: ScheduledState
SCHEDULED_STATE_DUE: ScheduledState
SCHEDULED_STATE_RETURNED: ScheduledState

class TimeRange(_message.Message):
    __slots__ = ("start_ms", "end_ms")
    START_MS_FIELD_NUMBER: _ClassVar[int]
    END_MS_FIELD_NUMBER: _ClassVar[int]
    start_ms: int
    end_ms: int
    def __init__(self, start_ms: _Optional[int] = ..., end_ms: _Optional[int] = ...) -> None: ...

class ScheduleFilter(_message.Message):
    __slots__ = ("due", "key_prefix")
    DUE_FIELD_NUMBER: _ClassVar[int]
    KEY_PREFIX_FIELD_NUMBER: _ClassVar[int]
    due: TimeRange
    key_prefix: str
    def __init__(self, due: _Optional[_Union[TimeRange, _Mapping[str, object]]] = ..., key_prefix: _Optional[str] = ...) -> None: ...

class Selector(_message.Message):
    __slots__ = ("entries", "schedule_keys", "filter")
    ENTRIES_FIELD_NUMBER: _ClassVar[int]
    SCHEDULE_KEYS_FIELD_NUMBER: _ClassVar[int]
    FILTER_FIELD_NUMBER: _ClassVar[int]
    entries: _containers.RepeatedCompositeFieldContainer[_message_pb2.EntrySet]
    schedule_keys: _containers.RepeatedScalarFieldContainer[str]
    filter: ScheduleFilter
    def __init__(self, entries: _Optional[_Iterable[_Union[_message_pb2.EntrySet, _Mapping[str, object]]]] = ..., schedule_keys: _Optional[_Iterable[str]] = ..., filter: _Optional[_Union[ScheduleFilter, _Mapping[str, object]]] = ...) -> None: ...

class ScheduledMessage(_message.Message):
    __slots__ = ("id", "schedule_key", "deliver_at_ms", "publish_time_ms", "state", "revision", "size_bytes", "message", "returned")
    ID_FIELD_NUMBER: _ClassVar[int]
    SCHEDULE_KEY_FIELD_NUMBER: _ClassVar[int]
    DELIVER_AT_MS_FIELD_NUMBER: _ClassVar[int]
    PUBLISH_TIME_MS_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    RETURNED_FIELD_NUMBER: _ClassVar[int]
    id: _message_pb2.MessageId
    schedule_key: str
    deliver_at_ms: int
    publish_time_ms: int
    state: ScheduledState
    revision: int
    size_bytes: int
    message: _message_pb2.Message
    returned: _containers.RepeatedCompositeFieldContainer[ReturnedMessage]
    def __init__(self, id: _Optional[_Union[_message_pb2.MessageId, _Mapping[str, object]]] = ..., schedule_key: _Optional[str] = ..., deliver_at_ms: _Optional[int] = ..., publish_time_ms: _Optional[int] = ..., state: _Optional[_Union[ScheduledState, str]] = ..., revision: _Optional[int] = ..., size_bytes: _Optional[int] = ..., message: _Optional[_Union[_message_pb2.Message, _Mapping[str, object]]] = ..., returned: _Optional[_Iterable[_Union[ReturnedMessage, _Mapping[str, object]]]] = ...) -> None: ...

class ReturnedMessage(_message.Message):
    __slots__ = ("subscription", "attempts", "last_reason")
    SUBSCRIPTION_FIELD_NUMBER: _ClassVar[int]
    ATTEMPTS_FIELD_NUMBER: _ClassVar[int]
    LAST_REASON_FIELD_NUMBER: _ClassVar[int]
    subscription: str
    attempts: int
    last_reason: str
    def __init__(self, subscription: _Optional[str] = ..., attempts: _Optional[int] = ..., last_reason: _Optional[str] = ...) -> None: ...

class GetScheduledRequest(_message.Message):
    __slots__ = ("topic", "id", "schedule_key", "view")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    SCHEDULE_KEY_FIELD_NUMBER: _ClassVar[int]
    VIEW_FIELD_NUMBER: _ClassVar[int]
    topic: str
    id: _message_pb2.MessageId
    schedule_key: str
    view: _message_pb2.MessageView
    def __init__(self, topic: _Optional[str] = ..., id: _Optional[_Union[_message_pb2.MessageId, _Mapping[str, object]]] = ..., schedule_key: _Optional[str] = ..., view: _Optional[_Union[_message_pb2.MessageView, str]] = ...) -> None: ...

class GetScheduledResponse(_message.Message):
    __slots__ = ("scheduled",)
    SCHEDULED_FIELD_NUMBER: _ClassVar[int]
    scheduled: ScheduledMessage
    def __init__(self, scheduled: _Optional[_Union[ScheduledMessage, _Mapping[str, object]]] = ...) -> None: ...

class ListScheduledRequest(_message.Message):
    __slots__ = ("topic", "due", "key_prefix", "view", "page_size", "page_token")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    DUE_FIELD_NUMBER: _ClassVar[int]
    KEY_PREFIX_FIELD_NUMBER: _ClassVar[int]
    VIEW_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    topic: str
    due: TimeRange
    key_prefix: str
    view: _message_pb2.MessageView
    page_size: int
    page_token: str
    def __init__(self, topic: _Optional[str] = ..., due: _Optional[_Union[TimeRange, _Mapping[str, object]]] = ..., key_prefix: _Optional[str] = ..., view: _Optional[_Union[_message_pb2.MessageView, str]] = ..., page_size: _Optional[int] = ..., page_token: _Optional[str] = ...) -> None: ...

class ListScheduledResponse(_message.Message):
    __slots__ = ("scheduled", "next_page_token")
    SCHEDULED_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    scheduled: _containers.RepeatedCompositeFieldContainer[ScheduledMessage]
    next_page_token: str
    def __init__(self, scheduled: _Optional[_Iterable[_Union[ScheduledMessage, _Mapping[str, object]]]] = ..., next_page_token: _Optional[str] = ...) -> None: ...

class CountScheduledRequest(_message.Message):
    __slots__ = ("topics", "due", "width_ms")
    TOPICS_FIELD_NUMBER: _ClassVar[int]
    DUE_FIELD_NUMBER: _ClassVar[int]
    WIDTH_MS_FIELD_NUMBER: _ClassVar[int]
    topics: _containers.RepeatedScalarFieldContainer[str]
    due: TimeRange
    width_ms: int
    def __init__(self, topics: _Optional[_Iterable[str]] = ..., due: _Optional[_Union[TimeRange, _Mapping[str, object]]] = ..., width_ms: _Optional[int] = ...) -> None: ...

class CountScheduledResponse(_message.Message):
    __slots__ = ("buckets", "before", "after", "exact")
    BUCKETS_FIELD_NUMBER: _ClassVar[int]
    BEFORE_FIELD_NUMBER: _ClassVar[int]
    AFTER_FIELD_NUMBER: _ClassVar[int]
    EXACT_FIELD_NUMBER: _ClassVar[int]
    buckets: _containers.RepeatedCompositeFieldContainer[ScheduledCount]
    before: int
    after: int
    exact: bool
    def __init__(self, buckets: _Optional[_Iterable[_Union[ScheduledCount, _Mapping[str, object]]]] = ..., before: _Optional[int] = ..., after: _Optional[int] = ..., exact: bool = ...) -> None: ...

class ScheduledCount(_message.Message):
    __slots__ = ("start_ms", "messages", "bytes")
    START_MS_FIELD_NUMBER: _ClassVar[int]
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    start_ms: int
    messages: int
    bytes: int
    def __init__(self, start_ms: _Optional[int] = ..., messages: _Optional[int] = ..., bytes: _Optional[int] = ...) -> None: ...

class CancelScheduledRequest(_message.Message):
    __slots__ = ("topic", "selector", "dry_run", "request_id", "page_size", "page_token")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    SELECTOR_FIELD_NUMBER: _ClassVar[int]
    DRY_RUN_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    topic: str
    selector: Selector
    dry_run: bool
    request_id: str
    page_size: int
    page_token: str
    def __init__(self, topic: _Optional[str] = ..., selector: _Optional[_Union[Selector, _Mapping[str, object]]] = ..., dry_run: bool = ..., request_id: _Optional[str] = ..., page_size: _Optional[int] = ..., page_token: _Optional[str] = ...) -> None: ...

class CancelScheduledResponse(_message.Message):
    __slots__ = ("outcomes", "matched", "next_page_token")
    OUTCOMES_FIELD_NUMBER: _ClassVar[int]
    MATCHED_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    outcomes: _containers.RepeatedCompositeFieldContainer[ChangeOutcome]
    matched: int
    next_page_token: str
    def __init__(self, outcomes: _Optional[_Iterable[_Union[ChangeOutcome, _Mapping[str, object]]]] = ..., matched: _Optional[int] = ..., next_page_token: _Optional[str] = ...) -> None: ...

class RescheduleRequest(_message.Message):
    __slots__ = ("topic", "selector", "deliver_at_ms", "deliver_after_ms", "shift_ms", "dry_run", "request_id", "page_size", "page_token")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    SELECTOR_FIELD_NUMBER: _ClassVar[int]
    DELIVER_AT_MS_FIELD_NUMBER: _ClassVar[int]
    DELIVER_AFTER_MS_FIELD_NUMBER: _ClassVar[int]
    SHIFT_MS_FIELD_NUMBER: _ClassVar[int]
    DRY_RUN_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    topic: str
    selector: Selector
    deliver_at_ms: int
    deliver_after_ms: int
    shift_ms: int
    dry_run: bool
    request_id: str
    page_size: int
    page_token: str
    def __init__(self, topic: _Optional[str] = ..., selector: _Optional[_Union[Selector, _Mapping[str, object]]] = ..., deliver_at_ms: _Optional[int] = ..., deliver_after_ms: _Optional[int] = ..., shift_ms: _Optional[int] = ..., dry_run: bool = ..., request_id: _Optional[str] = ..., page_size: _Optional[int] = ..., page_token: _Optional[str] = ...) -> None: ...

class RescheduleResponse(_message.Message):
    __slots__ = ("outcomes", "matched", "next_page_token")
    OUTCOMES_FIELD_NUMBER: _ClassVar[int]
    MATCHED_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    outcomes: _containers.RepeatedCompositeFieldContainer[ChangeOutcome]
    matched: int
    next_page_token: str
    def __init__(self, outcomes: _Optional[_Iterable[_Union[ChangeOutcome, _Mapping[str, object]]]] = ..., matched: _Optional[int] = ..., next_page_token: _Optional[str] = ...) -> None: ...

class ChangeOutcome(_message.Message):
    __slots__ = ("id", "schedule_key", "result", "deliver_at_ms", "delivered_to")
    ID_FIELD_NUMBER: _ClassVar[int]
    SCHEDULE_KEY_FIELD_NUMBER: _ClassVar[int]
    RESULT_FIELD_NUMBER: _ClassVar[int]
    DELIVER_AT_MS_FIELD_NUMBER: _ClassVar[int]
    DELIVERED_TO_FIELD_NUMBER: _ClassVar[int]
    id: _message_pb2.MessageId
    schedule_key: str
    result: ChangeResult
    deliver_at_ms: int
    delivered_to: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, id: _Optional[_Union[_message_pb2.MessageId, _Mapping[str, object]]] = ..., schedule_key: _Optional[str] = ..., result: _Optional[_Union[ChangeResult, str]] = ..., deliver_at_ms: _Optional[int] = ..., delivered_to: _Optional[_Iterable[str]] = ...) -> None: ...
