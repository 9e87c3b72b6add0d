from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class BulkDefinition(_message.Message):
    __slots__ = ("start_ms", "end_ms", "key_prefix", "kind", "new_ms", "dry_run", "request_id", "principal", "begin_ms", "total")
    START_MS_FIELD_NUMBER: _ClassVar[int]
    END_MS_FIELD_NUMBER: _ClassVar[int]
    KEY_PREFIX_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    NEW_MS_FIELD_NUMBER: _ClassVar[int]
    DRY_RUN_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    PRINCIPAL_FIELD_NUMBER: _ClassVar[int]
    BEGIN_MS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    start_ms: int
    end_ms: int
    key_prefix: str
    kind: int
    new_ms: int
    dry_run: bool
    request_id: str
    principal: str
    begin_ms: int
    total: int
    def __init__(self, start_ms: _Optional[int] = ..., end_ms: _Optional[int] = ..., key_prefix: _Optional[str] = ..., kind: _Optional[int] = ..., new_ms: _Optional[int] = ..., dry_run: bool = ..., request_id: _Optional[str] = ..., principal: _Optional[str] = ..., begin_ms: _Optional[int] = ..., total: _Optional[int] = ...) -> None: ...

class BulkProgress(_message.Message):
    __slots__ = ("at_ms", "at_ledger_id", "at_entry_id", "examined", "matched", "done")
    AT_MS_FIELD_NUMBER: _ClassVar[int]
    AT_LEDGER_ID_FIELD_NUMBER: _ClassVar[int]
    AT_ENTRY_ID_FIELD_NUMBER: _ClassVar[int]
    EXAMINED_FIELD_NUMBER: _ClassVar[int]
    MATCHED_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    at_ms: int
    at_ledger_id: int
    at_entry_id: int
    examined: int
    matched: int
    done: int
    def __init__(self, at_ms: _Optional[int] = ..., at_ledger_id: _Optional[int] = ..., at_entry_id: _Optional[int] = ..., examined: _Optional[int] = ..., matched: _Optional[int] = ..., done: _Optional[int] = ...) -> None: ...

class BulkStep(_message.Message):
    __slots__ = ("topic_id", "bulk_id", "definition", "progress", "end", "end_ms", "failure_reason", "failure", "forgotten_ids")
    TOPIC_ID_FIELD_NUMBER: _ClassVar[int]
    BULK_ID_FIELD_NUMBER: _ClassVar[int]
    DEFINITION_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    END_MS_FIELD_NUMBER: _ClassVar[int]
    FAILURE_REASON_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    FORGOTTEN_IDS_FIELD_NUMBER: _ClassVar[int]
    topic_id: int
    bulk_id: int
    definition: BulkDefinition
    progress: BulkProgress
    end: int
    end_ms: int
    failure_reason: str
    failure: str
    forgotten_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, topic_id: _Optional[int] = ..., bulk_id: _Optional[int] = ..., definition: _Optional[_Union[BulkDefinition, _Mapping]] = ..., progress: _Optional[_Union[BulkProgress, _Mapping]] = ..., end: _Optional[int] = ..., end_ms: _Optional[int] = ..., failure_reason: _Optional[str] = ..., failure: _Optional[str] = ..., forgotten_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class BulkEntry(_message.Message):
    __slots__ = ("bulk_id", "definition", "progress", "first_lsn", "end", "end_ms", "failure_reason", "failure")
    BULK_ID_FIELD_NUMBER: _ClassVar[int]
    DEFINITION_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    FIRST_LSN_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    END_MS_FIELD_NUMBER: _ClassVar[int]
    FAILURE_REASON_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    bulk_id: int
    definition: BulkDefinition
    progress: BulkProgress
    first_lsn: int
    end: int
    end_ms: int
    failure_reason: str
    failure: str
    def __init__(self, bulk_id: _Optional[int] = ..., definition: _Optional[_Union[BulkDefinition, _Mapping]] = ..., progress: _Optional[_Union[BulkProgress, _Mapping]] = ..., first_lsn: _Optional[int] = ..., end: _Optional[int] = ..., end_ms: _Optional[int] = ..., failure_reason: _Optional[str] = ..., failure: _Optional[str] = ...) -> None: ...

class BulkFile(_message.Message):
    __slots__ = ("topic_id", "last_id", "changes")
    TOPIC_ID_FIELD_NUMBER: _ClassVar[int]
    LAST_ID_FIELD_NUMBER: _ClassVar[int]
    CHANGES_FIELD_NUMBER: _ClassVar[int]
    topic_id: int
    last_id: int
    changes: _containers.RepeatedCompositeFieldContainer[BulkEntry]
    def __init__(self, topic_id: _Optional[int] = ..., last_id: _Optional[int] = ..., changes: _Optional[_Iterable[_Union[BulkEntry, _Mapping]]] = ...) -> None: ...
