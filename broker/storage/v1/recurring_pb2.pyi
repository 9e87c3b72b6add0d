from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class RecurringDefinition(_message.Message):
    __slots__ = ("cron", "interval_ms", "times_ms", "zone", "message", "start_ms", "end_ms", "jitter_ms", "overdue", "paused")
    CRON_FIELD_NUMBER: _ClassVar[int]
    INTERVAL_MS_FIELD_NUMBER: _ClassVar[int]
    TIMES_MS_FIELD_NUMBER: _ClassVar[int]
    ZONE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    START_MS_FIELD_NUMBER: _ClassVar[int]
    END_MS_FIELD_NUMBER: _ClassVar[int]
    JITTER_MS_FIELD_NUMBER: _ClassVar[int]
    OVERDUE_FIELD_NUMBER: _ClassVar[int]
    PAUSED_FIELD_NUMBER: _ClassVar[int]
    cron: str
    interval_ms: int
    times_ms: _containers.RepeatedScalarFieldContainer[int]
    zone: str
    message: bytes
    start_ms: int
    end_ms: int
    jitter_ms: int
    overdue: int
    paused: bool
    def __init__(self, cron: _Optional[str] = ..., interval_ms: _Optional[int] = ..., times_ms: _Optional[_Iterable[int]] = ..., zone: _Optional[str] = ..., message: _Optional[bytes] = ..., start_ms: _Optional[int] = ..., end_ms: _Optional[int] = ..., jitter_ms: _Optional[int] = ..., overdue: _Optional[int] = ..., paused: bool = ...) -> None: ...

class RecurringStep(_message.Message):
    __slots__ = ("name", "definition", "deleted", "after_ms", "ahead_ms", "deliver_at_ms", "place")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DEFINITION_FIELD_NUMBER: _ClassVar[int]
    DELETED_FIELD_NUMBER: _ClassVar[int]
    AFTER_MS_FIELD_NUMBER: _ClassVar[int]
    AHEAD_MS_FIELD_NUMBER: _ClassVar[int]
    DELIVER_AT_MS_FIELD_NUMBER: _ClassVar[int]
    PLACE_FIELD_NUMBER: _ClassVar[int]
    name: str
    definition: RecurringDefinition
    deleted: bool
    after_ms: int
    ahead_ms: int
    deliver_at_ms: int
    place: int
    def __init__(self, name: _Optional[str] = ..., definition: _Optional[_Union[RecurringDefinition, _Mapping]] = ..., deleted: bool = ..., after_ms: _Optional[int] = ..., ahead_ms: _Optional[int] = ..., deliver_at_ms: _Optional[int] = ..., place: _Optional[int] = ...) -> None: ...

class RecurringSteps(_message.Message):
    __slots__ = ("topic_id", "steps")
    TOPIC_ID_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    topic_id: int
    steps: _containers.RepeatedCompositeFieldContainer[RecurringStep]
    def __init__(self, topic_id: _Optional[int] = ..., steps: _Optional[_Iterable[_Union[RecurringStep, _Mapping]]] = ...) -> None: ...

class RecurringEntry(_message.Message):
    __slots__ = ("name", "definition", "after_ms", "ahead_ms", "deliver_at_ms", "ledger_id", "entry_id")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DEFINITION_FIELD_NUMBER: _ClassVar[int]
    AFTER_MS_FIELD_NUMBER: _ClassVar[int]
    AHEAD_MS_FIELD_NUMBER: _ClassVar[int]
    DELIVER_AT_MS_FIELD_NUMBER: _ClassVar[int]
    LEDGER_ID_FIELD_NUMBER: _ClassVar[int]
    ENTRY_ID_FIELD_NUMBER: _ClassVar[int]
    name: str
    definition: RecurringDefinition
    after_ms: int
    ahead_ms: int
    deliver_at_ms: int
    ledger_id: int
    entry_id: int
    def __init__(self, name: _Optional[str] = ..., definition: _Optional[_Union[RecurringDefinition, _Mapping]] = ..., after_ms: _Optional[int] = ..., ahead_ms: _Optional[int] = ..., deliver_at_ms: _Optional[int] = ..., ledger_id: _Optional[int] = ..., entry_id: _Optional[int] = ...) -> None: ...

class RecurringFile(_message.Message):
    __slots__ = ("topic_id", "schedules")
    TOPIC_ID_FIELD_NUMBER: _ClassVar[int]
    SCHEDULES_FIELD_NUMBER: _ClassVar[int]
    topic_id: int
    schedules: _containers.RepeatedCompositeFieldContainer[RecurringEntry]
    def __init__(self, topic_id: _Optional[int] = ..., schedules: _Optional[_Iterable[_Union[RecurringEntry, _Mapping]]] = ...) -> None: ...
