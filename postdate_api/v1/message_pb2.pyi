from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor

class MessageView(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    MESSAGE_VIEW_UNSPECIFIED: _ClassVar[MessageView]
    MESSAGE_VIEW_BASIC: _ClassVar[MessageView]
    MESSAGE_VIEW_FULL: _ClassVar[MessageView]
MESSAGE_VIEW_UNSPECIFIED: MessageView
MESSAGE_VIEW_BASIC: MessageView
MESSAGE_VIEW_FULL: MessageView

class Message(_message.Message):
    __slots__ = ("payload", "key", "properties", "deliver_at_ms", "deliver_after_ms", "schedule_key", "ttl_ms", "sequence_id", "event_time_ms", "traceparent")
    class PropertiesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    PROPERTIES_FIELD_NUMBER: _ClassVar[int]
    DELIVER_AT_MS_FIELD_NUMBER: _ClassVar[int]
    DELIVER_AFTER_MS_FIELD_NUMBER: _ClassVar[int]
    SCHEDULE_KEY_FIELD_NUMBER: _ClassVar[int]
    TTL_MS_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    EVENT_TIME_MS_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    payload: bytes
    key: str
    properties: _containers.ScalarMap[str, str]
    deliver_at_ms: int
    deliver_after_ms: int
    schedule_key: str
    ttl_ms: int
    sequence_id: int
    event_time_ms: int
    traceparent: str
    def __init__(self, payload: _Optional[bytes] = ..., key: _Optional[str] = ..., properties: _Optional[_Mapping[str, str]] = ..., deliver_at_ms: _Optional[int] = ..., deliver_after_ms: _Optional[int] = ..., schedule_key: _Optional[str] = ..., ttl_ms: _Optional[int] = ..., sequence_id: _Optional[int] = ..., event_time_ms: _Optional[int] = ..., traceparent: _Optional[str] = ...) -> None: ...

class MessageId(_message.Message):
    __slots__ = ("ledger_id", "entry_id")
    LEDGER_ID_FIELD_NUMBER: _ClassVar[int]
    ENTRY_ID_FIELD_NUMBER: _ClassVar[int]
    ledger_id: int
    entry_id: int
    def __init__(self, ledger_id: _Optional[int] = ..., entry_id: _Optional[int] = ...) -> None: ...

class IdRange(_message.Message):
    __slots__ = ("ledger_id", "first_entry_id", "count", "duplicate")
    LEDGER_ID_FIELD_NUMBER: _ClassVar[int]
    FIRST_ENTRY_ID_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    DUPLICATE_FIELD_NUMBER: _ClassVar[int]
    ledger_id: int
    first_entry_id: int
    count: int
    duplicate: bool
    def __init__(self, ledger_id: _Optional[int] = ..., first_entry_id: _Optional[int] = ..., count: _Optional[int] = ..., duplicate: bool = ...) -> None: ...

class EntrySet(_message.Message):
    __slots__ = ("ledger_id", "entry_ids")
    LEDGER_ID_FIELD_NUMBER: _ClassVar[int]
    ENTRY_IDS_FIELD_NUMBER: _ClassVar[int]
    ledger_id: int
    entry_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, ledger_id: _Optional[int] = ..., entry_ids: _Optional[_Iterable[int]] = ...) -> None: ...
