from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class CompactionInputs(_message.Message):
    __slots__ = ("compaction_id", "topic_id", "epoch", "amended_lsn", "frontier", "ledgers", "bucket_ids", "new_bucket_id", "segment_time_step_ms", "max_segment_entries", "amendments", "gone_ledger_ids")
    COMPACTION_ID_FIELD_NUMBER: _ClassVar[int]
    TOPIC_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    AMENDED_LSN_FIELD_NUMBER: _ClassVar[int]
    FRONTIER_FIELD_NUMBER: _ClassVar[int]
    LEDGERS_FIELD_NUMBER: _ClassVar[int]
    BUCKET_IDS_FIELD_NUMBER: _ClassVar[int]
    NEW_BUCKET_ID_FIELD_NUMBER: _ClassVar[int]
    SEGMENT_TIME_STEP_MS_FIELD_NUMBER: _ClassVar[int]
    MAX_SEGMENT_ENTRIES_FIELD_NUMBER: _ClassVar[int]
    AMENDMENTS_FIELD_NUMBER: _ClassVar[int]
    GONE_LEDGER_IDS_FIELD_NUMBER: _ClassVar[int]
    compaction_id: str
    topic_id: int
    epoch: int
    amended_lsn: int
    frontier: IndexFrontier
    ledgers: _containers.RepeatedCompositeFieldContainer[InputLedger]
    bucket_ids: _containers.RepeatedScalarFieldContainer[int]
    new_bucket_id: int
    segment_time_step_ms: int
    max_segment_entries: int
    amendments: _containers.RepeatedScalarFieldContainer[bytes]
    gone_ledger_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, compaction_id: _Optional[str] = ..., topic_id: _Optional[int] = ..., epoch: _Optional[int] = ..., amended_lsn: _Optional[int] = ..., frontier: _Optional[_Union[IndexFrontier, _Mapping]] = ..., ledgers: _Optional[_Iterable[_Union[InputLedger, _Mapping]]] = ..., bucket_ids: _Optional[_Iterable[int]] = ..., new_bucket_id: _Optional[int] = ..., segment_time_step_ms: _Optional[int] = ..., max_segment_entries: _Optional[int] = ..., amendments: _Optional[_Iterable[bytes]] = ..., gone_ledger_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class IndexFrontier(_message.Message):
    __slots__ = ("deliver_at_ms", "ledger_id", "entry_id")
    DELIVER_AT_MS_FIELD_NUMBER: _ClassVar[int]
    LEDGER_ID_FIELD_NUMBER: _ClassVar[int]
    ENTRY_ID_FIELD_NUMBER: _ClassVar[int]
    deliver_at_ms: int
    ledger_id: int
    entry_id: int
    def __init__(self, deliver_at_ms: _Optional[int] = ..., ledger_id: _Optional[int] = ..., entry_id: _Optional[int] = ...) -> None: ...

class InputLedger(_message.Message):
    __slots__ = ("ledger_id", "generation", "entry_count", "data_bytes", "present_count", "present_bytes", "new_generation", "settled", "amendments", "packed_bytes")
    LEDGER_ID_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    ENTRY_COUNT_FIELD_NUMBER: _ClassVar[int]
    DATA_BYTES_FIELD_NUMBER: _ClassVar[int]
    PRESENT_COUNT_FIELD_NUMBER: _ClassVar[int]
    PRESENT_BYTES_FIELD_NUMBER: _ClassVar[int]
    NEW_GENERATION_FIELD_NUMBER: _ClassVar[int]
    SETTLED_FIELD_NUMBER: _ClassVar[int]
    AMENDMENTS_FIELD_NUMBER: _ClassVar[int]
    PACKED_BYTES_FIELD_NUMBER: _ClassVar[int]
    ledger_id: int
    generation: int
    entry_count: int
    data_bytes: int
    present_count: int
    present_bytes: int
    new_generation: int
    settled: bytes
    amendments: bytes
    packed_bytes: int
    def __init__(self, ledger_id: _Optional[int] = ..., generation: _Optional[int] = ..., entry_count: _Optional[int] = ..., data_bytes: _Optional[int] = ..., present_count: _Optional[int] = ..., present_bytes: _Optional[int] = ..., new_generation: _Optional[int] = ..., settled: _Optional[bytes] = ..., amendments: _Optional[bytes] = ..., packed_bytes: _Optional[int] = ...) -> None: ...
