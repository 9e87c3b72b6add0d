from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable
from typing import ClassVar as _ClassVar, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor

class BucketMetadata(_message.Message):
    __slots__ = ("topic_id", "bucket_id", "start_ledger_id", "start_entry_id", "end_ledger_id", "end_entry_id", "count", "checksum", "segment_first_ms", "segment_last_ms", "segment_first_ordinal", "segment_last_ordinal", "segment_count", "segment_bytes", "segment_crc", "ledger_id", "ledger_first", "ledger_end", "bitmap_bytes", "bitmap_crc")
    TOPIC_ID_FIELD_NUMBER: _ClassVar[int]
    BUCKET_ID_FIELD_NUMBER: _ClassVar[int]
    START_LEDGER_ID_FIELD_NUMBER: _ClassVar[int]
    START_ENTRY_ID_FIELD_NUMBER: _ClassVar[int]
    END_LEDGER_ID_FIELD_NUMBER: _ClassVar[int]
    END_ENTRY_ID_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    SEGMENT_FIRST_MS_FIELD_NUMBER: _ClassVar[int]
    SEGMENT_LAST_MS_FIELD_NUMBER: _ClassVar[int]
    SEGMENT_FIRST_ORDINAL_FIELD_NUMBER: _ClassVar[int]
    SEGMENT_LAST_ORDINAL_FIELD_NUMBER: _ClassVar[int]
    SEGMENT_COUNT_FIELD_NUMBER: _ClassVar[int]
    SEGMENT_BYTES_FIELD_NUMBER: _ClassVar[int]
    SEGMENT_CRC_FIELD_NUMBER: _ClassVar[int]
    LEDGER_ID_FIELD_NUMBER: _ClassVar[int]
    LEDGER_FIRST_FIELD_NUMBER: _ClassVar[int]
    LEDGER_END_FIELD_NUMBER: _ClassVar[int]
    BITMAP_BYTES_FIELD_NUMBER: _ClassVar[int]
    BITMAP_CRC_FIELD_NUMBER: _ClassVar[int]
    topic_id: int
    bucket_id: int
    start_ledger_id: int
    start_entry_id: int
    end_ledger_id: int
    end_entry_id: int
    count: int
    checksum: int
    segment_first_ms: _containers.RepeatedScalarFieldContainer[int]
    segment_last_ms: _containers.RepeatedScalarFieldContainer[int]
    segment_first_ordinal: _containers.RepeatedScalarFieldContainer[int]
    segment_last_ordinal: _containers.RepeatedScalarFieldContainer[int]
    segment_count: _containers.RepeatedScalarFieldContainer[int]
    segment_bytes: _containers.RepeatedScalarFieldContainer[int]
    segment_crc: _containers.RepeatedScalarFieldContainer[int]
    ledger_id: _containers.RepeatedScalarFieldContainer[int]
    ledger_first: _containers.RepeatedScalarFieldContainer[int]
    ledger_end: _containers.RepeatedScalarFieldContainer[int]
    bitmap_bytes: _containers.RepeatedScalarFieldContainer[int]
    bitmap_crc: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, topic_id: _Optional[int] = ..., bucket_id: _Optional[int] = ..., start_ledger_id: _Optional[int] = ..., start_entry_id: _Optional[int] = ..., end_ledger_id: _Optional[int] = ..., end_entry_id: _Optional[int] = ..., count: _Optional[int] = ..., checksum: _Optional[int] = ..., segment_first_ms: _Optional[_Iterable[int]] = ..., segment_last_ms: _Optional[_Iterable[int]] = ..., segment_first_ordinal: _Optional[_Iterable[int]] = ..., segment_last_ordinal: _Optional[_Iterable[int]] = ..., segment_count: _Optional[_Iterable[int]] = ..., segment_bytes: _Optional[_Iterable[int]] = ..., segment_crc: _Optional[_Iterable[int]] = ..., ledger_id: _Optional[_Iterable[int]] = ..., ledger_first: _Optional[_Iterable[int]] = ..., ledger_end: _Optional[_Iterable[int]] = ..., bitmap_bytes: _Optional[_Iterable[int]] = ..., bitmap_crc: _Optional[_Iterable[int]] = ...) -> None: ...
