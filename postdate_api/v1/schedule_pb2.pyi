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

class BulkChangeState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    BULK_CHANGE_STATE_UNSPECIFIED: _ClassVar[BulkChangeState]
    BULK_CHANGE_STATE_QUEUED: _ClassVar[BulkChangeState]
    BULK_CHANGE_STATE_RUNNING: _ClassVar[BulkChangeState]
    BULK_CHANGE_STATE_DONE: _ClassVar[BulkChangeState]
    BULK_CHANGE_STATE_CANCELLED: _ClassVar[BulkChangeState]
    BULK_CHANGE_STATE_FAILED: _ClassVar[BulkChangeState]

class RecurringOverdue(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    RECURRING_OVERDUE_UNSPECIFIED: _ClassVar[RecurringOverdue]
    RECURRING_OVERDUE_ALL: _ClassVar[RecurringOverdue]
    RECURRING_OVERDUE_ONE: _ClassVar[RecurringOverdue]
    RECURRING_OVERDUE_NONE: _ClassVar[RecurringOverdue]
CHANGE_RESULT_UNSPECIFIED: ChangeResult
CHANGE_RESULT_DONE: ChangeResult
CHANGE_RESULT_ALREADY_DELIVERED: ChangeResult
CHANGE_RESULT_NOT_FOUND: ChangeResult
CHANGE_RESULT_ALREADY_CANCELLED: ChangeResult
SCHEDULED_STATE_UNSPECIFIED: ScheduledState
SCHEDULED_STATE_WAITING: ScheduledState
SCHEDULED_STATE_DUE: ScheduledState
SCHEDULED_STATE_RETURNED: ScheduledState
BULK_CHANGE_STATE_UNSPECIFIED: BulkChangeState
BULK_CHANGE_STATE_QUEUED: BulkChangeState
BULK_CHANGE_STATE_RUNNING: BulkChangeState
BULK_CHANGE_STATE_DONE: BulkChangeState
BULK_CHANGE_STATE_CANCELLED: BulkChangeState
BULK_CHANGE_STATE_FAILED: BulkChangeState
RECURRING_OVERDUE_UNSPECIFIED: RecurringOverdue
RECURRING_OVERDUE_ALL: RecurringOverdue
RECURRING_OVERDUE_ONE: RecurringOverdue
RECURRING_OVERDUE_NONE: RecurringOverdue

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
    __slots__ = ("entries", "schedule_keys")
    ENTRIES_FIELD_NUMBER: _ClassVar[int]
    SCHEDULE_KEYS_FIELD_NUMBER: _ClassVar[int]
    entries: _containers.RepeatedCompositeFieldContainer[_message_pb2.EntrySet]
    schedule_keys: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, entries: _Optional[_Iterable[_Union[_message_pb2.EntrySet, _Mapping[str, object]]]] = ..., schedule_keys: _Optional[_Iterable[str]] = ...) -> None: ...

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
    __slots__ = ("topic", "selector", "dry_run", "request_id")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    SELECTOR_FIELD_NUMBER: _ClassVar[int]
    DRY_RUN_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    topic: str
    selector: Selector
    dry_run: bool
    request_id: str
    def __init__(self, topic: _Optional[str] = ..., selector: _Optional[_Union[Selector, _Mapping[str, object]]] = ..., dry_run: bool = ..., request_id: _Optional[str] = ...) -> None: ...

class CancelScheduledResponse(_message.Message):
    __slots__ = ("outcomes", "matched")
    OUTCOMES_FIELD_NUMBER: _ClassVar[int]
    MATCHED_FIELD_NUMBER: _ClassVar[int]
    outcomes: _containers.RepeatedCompositeFieldContainer[ChangeOutcome]
    matched: int
    def __init__(self, outcomes: _Optional[_Iterable[_Union[ChangeOutcome, _Mapping[str, object]]]] = ..., matched: _Optional[int] = ...) -> None: ...

class RescheduleRequest(_message.Message):
    __slots__ = ("topic", "selector", "deliver_at_ms", "deliver_after_ms", "shift_ms", "dry_run", "request_id")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    SELECTOR_FIELD_NUMBER: _ClassVar[int]
    DELIVER_AT_MS_FIELD_NUMBER: _ClassVar[int]
    DELIVER_AFTER_MS_FIELD_NUMBER: _ClassVar[int]
    SHIFT_MS_FIELD_NUMBER: _ClassVar[int]
    DRY_RUN_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    topic: str
    selector: Selector
    deliver_at_ms: int
    deliver_after_ms: int
    shift_ms: int
    dry_run: bool
    request_id: str
    def __init__(self, topic: _Optional[str] = ..., selector: _Optional[_Union[Selector, _Mapping[str, object]]] = ..., deliver_at_ms: _Optional[int] = ..., deliver_after_ms: _Optional[int] = ..., shift_ms: _Optional[int] = ..., dry_run: bool = ..., request_id: _Optional[str] = ...) -> None: ...

class RescheduleResponse(_message.Message):
    __slots__ = ("outcomes", "matched")
    OUTCOMES_FIELD_NUMBER: _ClassVar[int]
    MATCHED_FIELD_NUMBER: _ClassVar[int]
    outcomes: _containers.RepeatedCompositeFieldContainer[ChangeOutcome]
    matched: int
    def __init__(self, outcomes: _Optional[_Iterable[_Union[ChangeOutcome, _Mapping[str, object]]]] = ..., matched: _Optional[int] = ...) -> None: ...

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

class BulkChange(_message.Message):
    __slots__ = ("id", "filter", "cancel", "deliver_at_ms", "shift_ms", "dry_run", "state", "total_messages", "examined_messages", "matched_messages", "done_messages", "begin_time_ms", "end_time_ms", "principal", "failure_reason", "failure")
    ID_FIELD_NUMBER: _ClassVar[int]
    FILTER_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    DELIVER_AT_MS_FIELD_NUMBER: _ClassVar[int]
    SHIFT_MS_FIELD_NUMBER: _ClassVar[int]
    DRY_RUN_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    TOTAL_MESSAGES_FIELD_NUMBER: _ClassVar[int]
    EXAMINED_MESSAGES_FIELD_NUMBER: _ClassVar[int]
    MATCHED_MESSAGES_FIELD_NUMBER: _ClassVar[int]
    DONE_MESSAGES_FIELD_NUMBER: _ClassVar[int]
    BEGIN_TIME_MS_FIELD_NUMBER: _ClassVar[int]
    END_TIME_MS_FIELD_NUMBER: _ClassVar[int]
    PRINCIPAL_FIELD_NUMBER: _ClassVar[int]
    FAILURE_REASON_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    id: int
    filter: ScheduleFilter
    cancel: bool
    deliver_at_ms: int
    shift_ms: int
    dry_run: bool
    state: BulkChangeState
    total_messages: int
    examined_messages: int
    matched_messages: int
    done_messages: int
    begin_time_ms: int
    end_time_ms: int
    principal: str
    failure_reason: str
    failure: str
    def __init__(self, id: _Optional[int] = ..., filter: _Optional[_Union[ScheduleFilter, _Mapping[str, object]]] = ..., cancel: bool = ..., deliver_at_ms: _Optional[int] = ..., shift_ms: _Optional[int] = ..., dry_run: bool = ..., state: _Optional[_Union[BulkChangeState, str]] = ..., total_messages: _Optional[int] = ..., examined_messages: _Optional[int] = ..., matched_messages: _Optional[int] = ..., done_messages: _Optional[int] = ..., begin_time_ms: _Optional[int] = ..., end_time_ms: _Optional[int] = ..., principal: _Optional[str] = ..., failure_reason: _Optional[str] = ..., failure: _Optional[str] = ...) -> None: ...

class StartBulkChangeRequest(_message.Message):
    __slots__ = ("topic", "filter", "cancel", "deliver_at_ms", "deliver_after_ms", "shift_ms", "dry_run", "request_id")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    FILTER_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    DELIVER_AT_MS_FIELD_NUMBER: _ClassVar[int]
    DELIVER_AFTER_MS_FIELD_NUMBER: _ClassVar[int]
    SHIFT_MS_FIELD_NUMBER: _ClassVar[int]
    DRY_RUN_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    topic: str
    filter: ScheduleFilter
    cancel: bool
    deliver_at_ms: int
    deliver_after_ms: int
    shift_ms: int
    dry_run: bool
    request_id: str
    def __init__(self, topic: _Optional[str] = ..., filter: _Optional[_Union[ScheduleFilter, _Mapping[str, object]]] = ..., cancel: bool = ..., deliver_at_ms: _Optional[int] = ..., deliver_after_ms: _Optional[int] = ..., shift_ms: _Optional[int] = ..., dry_run: bool = ..., request_id: _Optional[str] = ...) -> None: ...

class StartBulkChangeResponse(_message.Message):
    __slots__ = ("bulk_change",)
    BULK_CHANGE_FIELD_NUMBER: _ClassVar[int]
    bulk_change: BulkChange
    def __init__(self, bulk_change: _Optional[_Union[BulkChange, _Mapping[str, object]]] = ...) -> None: ...

class GetBulkChangeRequest(_message.Message):
    __slots__ = ("topic", "id")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    topic: str
    id: int
    def __init__(self, topic: _Optional[str] = ..., id: _Optional[int] = ...) -> None: ...

class GetBulkChangeResponse(_message.Message):
    __slots__ = ("bulk_change",)
    BULK_CHANGE_FIELD_NUMBER: _ClassVar[int]
    bulk_change: BulkChange
    def __init__(self, bulk_change: _Optional[_Union[BulkChange, _Mapping[str, object]]] = ...) -> None: ...

class ListBulkChangesRequest(_message.Message):
    __slots__ = ("topic",)
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    topic: str
    def __init__(self, topic: _Optional[str] = ...) -> None: ...

class ListBulkChangesResponse(_message.Message):
    __slots__ = ("bulk_changes",)
    BULK_CHANGES_FIELD_NUMBER: _ClassVar[int]
    bulk_changes: _containers.RepeatedCompositeFieldContainer[BulkChange]
    def __init__(self, bulk_changes: _Optional[_Iterable[_Union[BulkChange, _Mapping[str, object]]]] = ...) -> None: ...

class CancelBulkChangeRequest(_message.Message):
    __slots__ = ("topic", "id")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    topic: str
    id: int
    def __init__(self, topic: _Optional[str] = ..., id: _Optional[int] = ...) -> None: ...

class CancelBulkChangeResponse(_message.Message):
    __slots__ = ("bulk_change",)
    BULK_CHANGE_FIELD_NUMBER: _ClassVar[int]
    bulk_change: BulkChange
    def __init__(self, bulk_change: _Optional[_Union[BulkChange, _Mapping[str, object]]] = ...) -> None: ...

class RecurringSchedule(_message.Message):
    __slots__ = ("name", "cron", "interval_ms", "times", "time_zone", "start_ms", "end_ms", "jitter_ms", "overdue_action", "paused", "message")
    NAME_FIELD_NUMBER: _ClassVar[int]
    CRON_FIELD_NUMBER: _ClassVar[int]
    INTERVAL_MS_FIELD_NUMBER: _ClassVar[int]
    TIMES_FIELD_NUMBER: _ClassVar[int]
    TIME_ZONE_FIELD_NUMBER: _ClassVar[int]
    START_MS_FIELD_NUMBER: _ClassVar[int]
    END_MS_FIELD_NUMBER: _ClassVar[int]
    JITTER_MS_FIELD_NUMBER: _ClassVar[int]
    OVERDUE_ACTION_FIELD_NUMBER: _ClassVar[int]
    PAUSED_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    name: str
    cron: str
    interval_ms: int
    times: RecurringTimes
    time_zone: str
    start_ms: int
    end_ms: int
    jitter_ms: int
    overdue_action: RecurringOverdue
    paused: bool
    message: _message_pb2.Message
    def __init__(self, name: _Optional[str] = ..., cron: _Optional[str] = ..., interval_ms: _Optional[int] = ..., times: _Optional[_Union[RecurringTimes, _Mapping[str, object]]] = ..., time_zone: _Optional[str] = ..., start_ms: _Optional[int] = ..., end_ms: _Optional[int] = ..., jitter_ms: _Optional[int] = ..., overdue_action: _Optional[_Union[RecurringOverdue, str]] = ..., paused: bool = ..., message: _Optional[_Union[_message_pb2.Message, _Mapping[str, object]]] = ...) -> None: ...

class RecurringTimes(_message.Message):
    __slots__ = ("times_ms",)
    TIMES_MS_FIELD_NUMBER: _ClassVar[int]
    times_ms: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, times_ms: _Optional[_Iterable[int]] = ...) -> None: ...

class RecurringState(_message.Message):
    __slots__ = ("schedule", "next_time_ms", "next_deliver_at_ms", "next_id", "through_ms")
    SCHEDULE_FIELD_NUMBER: _ClassVar[int]
    NEXT_TIME_MS_FIELD_NUMBER: _ClassVar[int]
    NEXT_DELIVER_AT_MS_FIELD_NUMBER: _ClassVar[int]
    NEXT_ID_FIELD_NUMBER: _ClassVar[int]
    THROUGH_MS_FIELD_NUMBER: _ClassVar[int]
    schedule: RecurringSchedule
    next_time_ms: int
    next_deliver_at_ms: int
    next_id: _message_pb2.MessageId
    through_ms: int
    def __init__(self, schedule: _Optional[_Union[RecurringSchedule, _Mapping[str, object]]] = ..., next_time_ms: _Optional[int] = ..., next_deliver_at_ms: _Optional[int] = ..., next_id: _Optional[_Union[_message_pb2.MessageId, _Mapping[str, object]]] = ..., through_ms: _Optional[int] = ...) -> None: ...

class PutRecurringRequest(_message.Message):
    __slots__ = ("topic", "schedule")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    SCHEDULE_FIELD_NUMBER: _ClassVar[int]
    topic: str
    schedule: RecurringSchedule
    def __init__(self, topic: _Optional[str] = ..., schedule: _Optional[_Union[RecurringSchedule, _Mapping[str, object]]] = ...) -> None: ...

class PutRecurringResponse(_message.Message):
    __slots__ = ("state", "created")
    STATE_FIELD_NUMBER: _ClassVar[int]
    CREATED_FIELD_NUMBER: _ClassVar[int]
    state: RecurringState
    created: bool
    def __init__(self, state: _Optional[_Union[RecurringState, _Mapping[str, object]]] = ..., created: bool = ...) -> None: ...

class GetRecurringRequest(_message.Message):
    __slots__ = ("topic", "name")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    topic: str
    name: str
    def __init__(self, topic: _Optional[str] = ..., name: _Optional[str] = ...) -> None: ...

class GetRecurringResponse(_message.Message):
    __slots__ = ("state",)
    STATE_FIELD_NUMBER: _ClassVar[int]
    state: RecurringState
    def __init__(self, state: _Optional[_Union[RecurringState, _Mapping[str, object]]] = ...) -> None: ...

class ListRecurringRequest(_message.Message):
    __slots__ = ("topic", "name_prefix", "page_size", "page_token")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    NAME_PREFIX_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    topic: str
    name_prefix: str
    page_size: int
    page_token: str
    def __init__(self, topic: _Optional[str] = ..., name_prefix: _Optional[str] = ..., page_size: _Optional[int] = ..., page_token: _Optional[str] = ...) -> None: ...

class ListRecurringResponse(_message.Message):
    __slots__ = ("states", "next_page_token")
    STATES_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    states: _containers.RepeatedCompositeFieldContainer[RecurringState]
    next_page_token: str
    def __init__(self, states: _Optional[_Iterable[_Union[RecurringState, _Mapping[str, object]]]] = ..., next_page_token: _Optional[str] = ...) -> None: ...

class DeleteRecurringRequest(_message.Message):
    __slots__ = ("topic", "name")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    topic: str
    name: str
    def __init__(self, topic: _Optional[str] = ..., name: _Optional[str] = ...) -> None: ...

class DeleteRecurringResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class PauseRecurringRequest(_message.Message):
    __slots__ = ("topic", "name", "paused")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    PAUSED_FIELD_NUMBER: _ClassVar[int]
    topic: str
    name: str
    paused: bool
    def __init__(self, topic: _Optional[str] = ..., name: _Optional[str] = ..., paused: bool = ...) -> None: ...

class PauseRecurringResponse(_message.Message):
    __slots__ = ("state",)
    STATE_FIELD_NUMBER: _ClassVar[int]
    state: RecurringState
    def __init__(self, state: _Optional[_Union[RecurringState, _Mapping[str, object]]] = ...) -> None: ...

class TriggerRecurringRequest(_message.Message):
    __slots__ = ("topic", "name", "request_id")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    topic: str
    name: str
    request_id: str
    def __init__(self, topic: _Optional[str] = ..., name: _Optional[str] = ..., request_id: _Optional[str] = ...) -> None: ...

class TriggerRecurringResponse(_message.Message):
    __slots__ = ("id", "time_ms")
    ID_FIELD_NUMBER: _ClassVar[int]
    TIME_MS_FIELD_NUMBER: _ClassVar[int]
    id: _message_pb2.MessageId
    time_ms: int
    def __init__(self, id: _Optional[_Union[_message_pb2.MessageId, _Mapping[str, object]]] = ..., time_ms: _Optional[int] = ...) -> None: ...

class BackfillRecurringRequest(_message.Message):
    __slots__ = ("topic", "name", "start_ms", "end_ms", "dry_run", "request_id")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    START_MS_FIELD_NUMBER: _ClassVar[int]
    END_MS_FIELD_NUMBER: _ClassVar[int]
    DRY_RUN_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    topic: str
    name: str
    start_ms: int
    end_ms: int
    dry_run: bool
    request_id: str
    def __init__(self, topic: _Optional[str] = ..., name: _Optional[str] = ..., start_ms: _Optional[int] = ..., end_ms: _Optional[int] = ..., dry_run: bool = ..., request_id: _Optional[str] = ...) -> None: ...

class BackfillRecurringResponse(_message.Message):
    __slots__ = ("times_ms", "next_start_ms")
    TIMES_MS_FIELD_NUMBER: _ClassVar[int]
    NEXT_START_MS_FIELD_NUMBER: _ClassVar[int]
    times_ms: _containers.RepeatedScalarFieldContainer[int]
    next_start_ms: int
    def __init__(self, times_ms: _Optional[_Iterable[int]] = ..., next_start_ms: _Optional[int] = ...) -> None: ...

class PreviewRecurringRequest(_message.Message):
    __slots__ = ("topic", "name", "schedule", "after_ms", "count")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    SCHEDULE_FIELD_NUMBER: _ClassVar[int]
    AFTER_MS_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    topic: str
    name: str
    schedule: RecurringSchedule
    after_ms: int
    count: int
    def __init__(self, topic: _Optional[str] = ..., name: _Optional[str] = ..., schedule: _Optional[_Union[RecurringSchedule, _Mapping[str, object]]] = ..., after_ms: _Optional[int] = ..., count: _Optional[int] = ...) -> None: ...

class PreviewRecurringResponse(_message.Message):
    __slots__ = ("occurrences",)
    OCCURRENCES_FIELD_NUMBER: _ClassVar[int]
    occurrences: _containers.RepeatedCompositeFieldContainer[RecurringOccurrence]
    def __init__(self, occurrences: _Optional[_Iterable[_Union[RecurringOccurrence, _Mapping[str, object]]]] = ...) -> None: ...

class RecurringOccurrence(_message.Message):
    __slots__ = ("time_ms", "deliver_at_ms", "wall_time")
    TIME_MS_FIELD_NUMBER: _ClassVar[int]
    DELIVER_AT_MS_FIELD_NUMBER: _ClassVar[int]
    WALL_TIME_FIELD_NUMBER: _ClassVar[int]
    time_ms: int
    deliver_at_ms: int
    wall_time: str
    def __init__(self, time_ms: _Optional[int] = ..., deliver_at_ms: _Optional[int] = ..., wall_time: _Optional[str] = ...) -> None: ...
