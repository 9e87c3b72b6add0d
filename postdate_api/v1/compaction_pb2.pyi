from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class CompactionRefusal(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    COMPACTION_REFUSAL_UNSPECIFIED: _ClassVar[CompactionRefusal]
    COMPACTION_REFUSAL_GONE: _ClassVar[CompactionRefusal]
    COMPACTION_REFUSAL_REPLACED: _ClassVar[CompactionRefusal]
    COMPACTION_REFUSAL_OWED: _ClassVar[CompactionRefusal]
    COMPACTION_REFUSAL_MOVED: _ClassVar[CompactionRefusal]
    COMPACTION_REFUSAL_DAMAGED: _ClassVar[CompactionRefusal]
COMPACTION_REFUSAL_UNSPECIFIED: CompactionRefusal
COMPACTION_REFUSAL_GONE: CompactionRefusal
COMPACTION_REFUSAL_REPLACED: CompactionRefusal
COMPACTION_REFUSAL_OWED: CompactionRefusal
COMPACTION_REFUSAL_MOVED: CompactionRefusal
COMPACTION_REFUSAL_DAMAGED: CompactionRefusal

class BeginCompactionRequest(_message.Message):
    __slots__ = ("topic", "ledger_ids", "bucket_ids", "lease_ms", "dry_run")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    LEDGER_IDS_FIELD_NUMBER: _ClassVar[int]
    BUCKET_IDS_FIELD_NUMBER: _ClassVar[int]
    LEASE_MS_FIELD_NUMBER: _ClassVar[int]
    DRY_RUN_FIELD_NUMBER: _ClassVar[int]
    topic: str
    ledger_ids: _containers.RepeatedScalarFieldContainer[int]
    bucket_ids: _containers.RepeatedScalarFieldContainer[int]
    lease_ms: int
    dry_run: bool
    def __init__(self, topic: _Optional[str] = ..., ledger_ids: _Optional[_Iterable[int]] = ..., bucket_ids: _Optional[_Iterable[int]] = ..., lease_ms: _Optional[int] = ..., dry_run: bool = ...) -> None: ...

class BeginCompactionResponse(_message.Message):
    __slots__ = ("compaction", "ledgers", "buckets", "data_dir")
    COMPACTION_FIELD_NUMBER: _ClassVar[int]
    LEDGERS_FIELD_NUMBER: _ClassVar[int]
    BUCKETS_FIELD_NUMBER: _ClassVar[int]
    DATA_DIR_FIELD_NUMBER: _ClassVar[int]
    compaction: Compaction
    ledgers: _containers.RepeatedCompositeFieldContainer[LedgerCandidate]
    buckets: _containers.RepeatedCompositeFieldContainer[BucketCandidate]
    data_dir: str
    def __init__(self, compaction: _Optional[_Union[Compaction, _Mapping[str, object]]] = ..., ledgers: _Optional[_Iterable[_Union[LedgerCandidate, _Mapping[str, object]]]] = ..., buckets: _Optional[_Iterable[_Union[BucketCandidate, _Mapping[str, object]]]] = ..., data_dir: _Optional[str] = ...) -> None: ...

class Compaction(_message.Message):
    __slots__ = ("compaction_id", "epoch", "topic", "ledger_ids", "bucket_ids", "folder", "expires_at_ms")
    COMPACTION_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    LEDGER_IDS_FIELD_NUMBER: _ClassVar[int]
    BUCKET_IDS_FIELD_NUMBER: _ClassVar[int]
    FOLDER_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_AT_MS_FIELD_NUMBER: _ClassVar[int]
    compaction_id: str
    epoch: int
    topic: str
    ledger_ids: _containers.RepeatedScalarFieldContainer[int]
    bucket_ids: _containers.RepeatedScalarFieldContainer[int]
    folder: str
    expires_at_ms: int
    def __init__(self, compaction_id: _Optional[str] = ..., epoch: _Optional[int] = ..., topic: _Optional[str] = ..., ledger_ids: _Optional[_Iterable[int]] = ..., bucket_ids: _Optional[_Iterable[int]] = ..., folder: _Optional[str] = ..., expires_at_ms: _Optional[int] = ...) -> None: ...

class LedgerCandidate(_message.Message):
    __slots__ = ("ledger_id", "generation", "entry_count", "present_count", "settled_count", "disk_bytes")
    LEDGER_ID_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    ENTRY_COUNT_FIELD_NUMBER: _ClassVar[int]
    PRESENT_COUNT_FIELD_NUMBER: _ClassVar[int]
    SETTLED_COUNT_FIELD_NUMBER: _ClassVar[int]
    DISK_BYTES_FIELD_NUMBER: _ClassVar[int]
    ledger_id: int
    generation: int
    entry_count: int
    present_count: int
    settled_count: int
    disk_bytes: int
    def __init__(self, ledger_id: _Optional[int] = ..., generation: _Optional[int] = ..., entry_count: _Optional[int] = ..., present_count: _Optional[int] = ..., settled_count: _Optional[int] = ..., disk_bytes: _Optional[int] = ...) -> None: ...

class BucketCandidate(_message.Message):
    __slots__ = ("bucket_id", "entry_count", "waiting_count", "disk_bytes")
    BUCKET_ID_FIELD_NUMBER: _ClassVar[int]
    ENTRY_COUNT_FIELD_NUMBER: _ClassVar[int]
    WAITING_COUNT_FIELD_NUMBER: _ClassVar[int]
    DISK_BYTES_FIELD_NUMBER: _ClassVar[int]
    bucket_id: int
    entry_count: int
    waiting_count: int
    disk_bytes: int
    def __init__(self, bucket_id: _Optional[int] = ..., entry_count: _Optional[int] = ..., waiting_count: _Optional[int] = ..., disk_bytes: _Optional[int] = ...) -> None: ...

class CommitCompactionRequest(_message.Message):
    __slots__ = ("compaction_id", "epoch", "ledgers", "has_bucket")
    COMPACTION_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    LEDGERS_FIELD_NUMBER: _ClassVar[int]
    HAS_BUCKET_FIELD_NUMBER: _ClassVar[int]
    compaction_id: str
    epoch: int
    ledgers: _containers.RepeatedCompositeFieldContainer[LedgerOutput]
    has_bucket: bool
    def __init__(self, compaction_id: _Optional[str] = ..., epoch: _Optional[int] = ..., ledgers: _Optional[_Iterable[_Union[LedgerOutput, _Mapping[str, object]]]] = ..., has_bucket: bool = ...) -> None: ...

class LedgerOutput(_message.Message):
    __slots__ = ("ledger_id", "data_bytes", "present_count", "present_bytes")
    LEDGER_ID_FIELD_NUMBER: _ClassVar[int]
    DATA_BYTES_FIELD_NUMBER: _ClassVar[int]
    PRESENT_COUNT_FIELD_NUMBER: _ClassVar[int]
    PRESENT_BYTES_FIELD_NUMBER: _ClassVar[int]
    ledger_id: int
    data_bytes: int
    present_count: int
    present_bytes: int
    def __init__(self, ledger_id: _Optional[int] = ..., data_bytes: _Optional[int] = ..., present_count: _Optional[int] = ..., present_bytes: _Optional[int] = ...) -> None: ...

class CommitCompactionResponse(_message.Message):
    __slots__ = ("ledger_ids", "refused", "bucket_swapped", "is_repeat")
    LEDGER_IDS_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    BUCKET_SWAPPED_FIELD_NUMBER: _ClassVar[int]
    IS_REPEAT_FIELD_NUMBER: _ClassVar[int]
    ledger_ids: _containers.RepeatedScalarFieldContainer[int]
    refused: _containers.RepeatedCompositeFieldContainer[RefusedOutput]
    bucket_swapped: bool
    is_repeat: bool
    def __init__(self, ledger_ids: _Optional[_Iterable[int]] = ..., refused: _Optional[_Iterable[_Union[RefusedOutput, _Mapping[str, object]]]] = ..., bucket_swapped: bool = ..., is_repeat: bool = ...) -> None: ...

class RefusedOutput(_message.Message):
    __slots__ = ("ledger_id", "refusal")
    LEDGER_ID_FIELD_NUMBER: _ClassVar[int]
    REFUSAL_FIELD_NUMBER: _ClassVar[int]
    ledger_id: int
    refusal: CompactionRefusal
    def __init__(self, ledger_id: _Optional[int] = ..., refusal: _Optional[_Union[CompactionRefusal, str]] = ...) -> None: ...

class AbortCompactionRequest(_message.Message):
    __slots__ = ("compaction_id", "epoch")
    COMPACTION_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    compaction_id: str
    epoch: int
    def __init__(self, compaction_id: _Optional[str] = ..., epoch: _Optional[int] = ...) -> None: ...

class AbortCompactionResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListCompactionsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListCompactionsResponse(_message.Message):
    __slots__ = ("compactions",)
    COMPACTIONS_FIELD_NUMBER: _ClassVar[int]
    compactions: _containers.RepeatedCompositeFieldContainer[Compaction]
    def __init__(self, compactions: _Optional[_Iterable[_Union[Compaction, _Mapping[str, object]]]] = ...) -> None: ...
