from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class BrokerManifest(_message.Message):
    __slots__ = ("broker_id", "checkpoint_lsn", "topics", "next_topic_id", "next_ledger_id", "last_alive_ms")
    BROKER_ID_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_LSN_FIELD_NUMBER: _ClassVar[int]
    TOPICS_FIELD_NUMBER: _ClassVar[int]
    NEXT_TOPIC_ID_FIELD_NUMBER: _ClassVar[int]
    NEXT_LEDGER_ID_FIELD_NUMBER: _ClassVar[int]
    LAST_ALIVE_MS_FIELD_NUMBER: _ClassVar[int]
    broker_id: str
    checkpoint_lsn: int
    topics: _containers.RepeatedCompositeFieldContainer[TopicEntry]
    next_topic_id: int
    next_ledger_id: int
    last_alive_ms: int
    def __init__(self, broker_id: _Optional[str] = ..., checkpoint_lsn: _Optional[int] = ..., topics: _Optional[_Iterable[_Union[TopicEntry, _Mapping]]] = ..., next_topic_id: _Optional[int] = ..., next_ledger_id: _Optional[int] = ..., last_alive_ms: _Optional[int] = ...) -> None: ...

class TopicEntry(_message.Message):
    __slots__ = ("topic_id", "name")
    TOPIC_ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    topic_id: int
    name: str
    def __init__(self, topic_id: _Optional[int] = ..., name: _Optional[str] = ...) -> None: ...

class TopicManifest(_message.Message):
    __slots__ = ("topic_id", "name", "create_time_ms", "policy", "applied_lsn", "ledgers", "subscriptions", "next_subscription_id", "indexed_through", "index_lsn", "frontier_ms", "bucket_ids", "next_bucket_id")
    TOPIC_ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    CREATE_TIME_MS_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    APPLIED_LSN_FIELD_NUMBER: _ClassVar[int]
    LEDGERS_FIELD_NUMBER: _ClassVar[int]
    SUBSCRIPTIONS_FIELD_NUMBER: _ClassVar[int]
    NEXT_SUBSCRIPTION_ID_FIELD_NUMBER: _ClassVar[int]
    INDEXED_THROUGH_FIELD_NUMBER: _ClassVar[int]
    INDEX_LSN_FIELD_NUMBER: _ClassVar[int]
    FRONTIER_MS_FIELD_NUMBER: _ClassVar[int]
    BUCKET_IDS_FIELD_NUMBER: _ClassVar[int]
    NEXT_BUCKET_ID_FIELD_NUMBER: _ClassVar[int]
    topic_id: int
    name: str
    create_time_ms: int
    policy: TopicPolicyRecord
    applied_lsn: int
    ledgers: _containers.RepeatedCompositeFieldContainer[LedgerEntry]
    subscriptions: _containers.RepeatedCompositeFieldContainer[SubscriptionEntry]
    next_subscription_id: int
    indexed_through: PositionRecord
    index_lsn: int
    frontier_ms: int
    bucket_ids: _containers.RepeatedScalarFieldContainer[int]
    next_bucket_id: int
    def __init__(self, topic_id: _Optional[int] = ..., name: _Optional[str] = ..., create_time_ms: _Optional[int] = ..., policy: _Optional[_Union[TopicPolicyRecord, _Mapping]] = ..., applied_lsn: _Optional[int] = ..., ledgers: _Optional[_Iterable[_Union[LedgerEntry, _Mapping]]] = ..., subscriptions: _Optional[_Iterable[_Union[SubscriptionEntry, _Mapping]]] = ..., next_subscription_id: _Optional[int] = ..., indexed_through: _Optional[_Union[PositionRecord, _Mapping]] = ..., index_lsn: _Optional[int] = ..., frontier_ms: _Optional[int] = ..., bucket_ids: _Optional[_Iterable[int]] = ..., next_bucket_id: _Optional[int] = ...) -> None: ...

class PositionRecord(_message.Message):
    __slots__ = ("ledger_id", "entry_id")
    LEDGER_ID_FIELD_NUMBER: _ClassVar[int]
    ENTRY_ID_FIELD_NUMBER: _ClassVar[int]
    ledger_id: int
    entry_id: int
    def __init__(self, ledger_id: _Optional[int] = ..., entry_id: _Optional[int] = ...) -> None: ...

class LedgerEntry(_message.Message):
    __slots__ = ("ledger_id", "generation", "entry_count", "data_bytes", "sealed", "times_crcs", "rows_crcs", "first_publish_ms", "amendments_file")
    LEDGER_ID_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    ENTRY_COUNT_FIELD_NUMBER: _ClassVar[int]
    DATA_BYTES_FIELD_NUMBER: _ClassVar[int]
    SEALED_FIELD_NUMBER: _ClassVar[int]
    TIMES_CRCS_FIELD_NUMBER: _ClassVar[int]
    ROWS_CRCS_FIELD_NUMBER: _ClassVar[int]
    FIRST_PUBLISH_MS_FIELD_NUMBER: _ClassVar[int]
    AMENDMENTS_FILE_FIELD_NUMBER: _ClassVar[int]
    ledger_id: int
    generation: int
    entry_count: int
    data_bytes: int
    sealed: bool
    times_crcs: _containers.RepeatedScalarFieldContainer[int]
    rows_crcs: _containers.RepeatedScalarFieldContainer[int]
    first_publish_ms: int
    amendments_file: str
    def __init__(self, ledger_id: _Optional[int] = ..., generation: _Optional[int] = ..., entry_count: _Optional[int] = ..., data_bytes: _Optional[int] = ..., sealed: bool = ..., times_crcs: _Optional[_Iterable[int]] = ..., rows_crcs: _Optional[_Iterable[int]] = ..., first_publish_ms: _Optional[int] = ..., amendments_file: _Optional[str] = ...) -> None: ...

class SubscriptionEntry(_message.Message):
    __slots__ = ("subscription_id", "name", "type", "create_time_ms", "start", "policy", "cursor_file", "mark")
    SUBSCRIPTION_ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    TYPE_FIELD_NUMBER: _ClassVar[int]
    CREATE_TIME_MS_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    CURSOR_FILE_FIELD_NUMBER: _ClassVar[int]
    MARK_FIELD_NUMBER: _ClassVar[int]
    subscription_id: int
    name: str
    type: int
    create_time_ms: int
    start: PositionRecord
    policy: SubscriptionPolicyRecord
    cursor_file: str
    mark: PositionRecord
    def __init__(self, subscription_id: _Optional[int] = ..., name: _Optional[str] = ..., type: _Optional[int] = ..., create_time_ms: _Optional[int] = ..., start: _Optional[_Union[PositionRecord, _Mapping]] = ..., policy: _Optional[_Union[SubscriptionPolicyRecord, _Mapping]] = ..., cursor_file: _Optional[str] = ..., mark: _Optional[_Union[PositionRecord, _Mapping]] = ...) -> None: ...

class TopicPolicyRecord(_message.Message):
    __slots__ = ("tracker", "tick_ms", "max_delay_ms", "default_ttl_ms", "ledger_max_age_ms", "ledger_max_bytes", "ledger_max_entries", "min_index_count", "ledgers_per_bucket", "seal_after_ms", "max_buckets", "segment_time_step_ms", "max_segment_entries")
    TRACKER_FIELD_NUMBER: _ClassVar[int]
    TICK_MS_FIELD_NUMBER: _ClassVar[int]
    MAX_DELAY_MS_FIELD_NUMBER: _ClassVar[int]
    DEFAULT_TTL_MS_FIELD_NUMBER: _ClassVar[int]
    LEDGER_MAX_AGE_MS_FIELD_NUMBER: _ClassVar[int]
    LEDGER_MAX_BYTES_FIELD_NUMBER: _ClassVar[int]
    LEDGER_MAX_ENTRIES_FIELD_NUMBER: _ClassVar[int]
    MIN_INDEX_COUNT_FIELD_NUMBER: _ClassVar[int]
    LEDGERS_PER_BUCKET_FIELD_NUMBER: _ClassVar[int]
    SEAL_AFTER_MS_FIELD_NUMBER: _ClassVar[int]
    MAX_BUCKETS_FIELD_NUMBER: _ClassVar[int]
    SEGMENT_TIME_STEP_MS_FIELD_NUMBER: _ClassVar[int]
    MAX_SEGMENT_ENTRIES_FIELD_NUMBER: _ClassVar[int]
    tracker: int
    tick_ms: int
    max_delay_ms: int
    default_ttl_ms: int
    ledger_max_age_ms: int
    ledger_max_bytes: int
    ledger_max_entries: int
    min_index_count: int
    ledgers_per_bucket: int
    seal_after_ms: int
    max_buckets: int
    segment_time_step_ms: int
    max_segment_entries: int
    def __init__(self, tracker: _Optional[int] = ..., tick_ms: _Optional[int] = ..., max_delay_ms: _Optional[int] = ..., default_ttl_ms: _Optional[int] = ..., ledger_max_age_ms: _Optional[int] = ..., ledger_max_bytes: _Optional[int] = ..., ledger_max_entries: _Optional[int] = ..., min_index_count: _Optional[int] = ..., ledgers_per_bucket: _Optional[int] = ..., seal_after_ms: _Optional[int] = ..., max_buckets: _Optional[int] = ..., segment_time_step_ms: _Optional[int] = ..., max_segment_entries: _Optional[int] = ...) -> None: ...

class SubscriptionPolicyRecord(_message.Message):
    __slots__ = ("lease_ms", "initial_backoff_ms", "max_backoff_ms", "backoff_multiplier", "honor_delay")
    LEASE_MS_FIELD_NUMBER: _ClassVar[int]
    INITIAL_BACKOFF_MS_FIELD_NUMBER: _ClassVar[int]
    MAX_BACKOFF_MS_FIELD_NUMBER: _ClassVar[int]
    BACKOFF_MULTIPLIER_FIELD_NUMBER: _ClassVar[int]
    HONOR_DELAY_FIELD_NUMBER: _ClassVar[int]
    lease_ms: int
    initial_backoff_ms: int
    max_backoff_ms: int
    backoff_multiplier: float
    honor_delay: bool
    def __init__(self, lease_ms: _Optional[int] = ..., initial_backoff_ms: _Optional[int] = ..., max_backoff_ms: _Optional[int] = ..., backoff_multiplier: _Optional[float] = ..., honor_delay: bool = ...) -> None: ...

class CursorFile(_message.Message):
    __slots__ = ("topic_id", "subscription_id", "settled", "attempts", "waiting")
    TOPIC_ID_FIELD_NUMBER: _ClassVar[int]
    SUBSCRIPTION_ID_FIELD_NUMBER: _ClassVar[int]
    SETTLED_FIELD_NUMBER: _ClassVar[int]
    ATTEMPTS_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    topic_id: int
    subscription_id: int
    settled: _containers.RepeatedCompositeFieldContainer[LedgerBitmap]
    attempts: _containers.RepeatedCompositeFieldContainer[AttemptBits]
    waiting: _containers.RepeatedCompositeFieldContainer[WaitingEntries]
    def __init__(self, topic_id: _Optional[int] = ..., subscription_id: _Optional[int] = ..., settled: _Optional[_Iterable[_Union[LedgerBitmap, _Mapping]]] = ..., attempts: _Optional[_Iterable[_Union[AttemptBits, _Mapping]]] = ..., waiting: _Optional[_Iterable[_Union[WaitingEntries, _Mapping]]] = ...) -> None: ...

class LedgerBitmap(_message.Message):
    __slots__ = ("ledger_id", "bitmap")
    LEDGER_ID_FIELD_NUMBER: _ClassVar[int]
    BITMAP_FIELD_NUMBER: _ClassVar[int]
    ledger_id: int
    bitmap: bytes
    def __init__(self, ledger_id: _Optional[int] = ..., bitmap: _Optional[bytes] = ...) -> None: ...

class AttemptBits(_message.Message):
    __slots__ = ("ledger_id", "bit", "bitmap")
    LEDGER_ID_FIELD_NUMBER: _ClassVar[int]
    BIT_FIELD_NUMBER: _ClassVar[int]
    BITMAP_FIELD_NUMBER: _ClassVar[int]
    ledger_id: int
    bit: int
    bitmap: bytes
    def __init__(self, ledger_id: _Optional[int] = ..., bit: _Optional[int] = ..., bitmap: _Optional[bytes] = ...) -> None: ...

class WaitingEntries(_message.Message):
    __slots__ = ("not_before_ms", "ledger_id", "bitmap")
    NOT_BEFORE_MS_FIELD_NUMBER: _ClassVar[int]
    LEDGER_ID_FIELD_NUMBER: _ClassVar[int]
    BITMAP_FIELD_NUMBER: _ClassVar[int]
    not_before_ms: int
    ledger_id: int
    bitmap: bytes
    def __init__(self, not_before_ms: _Optional[int] = ..., ledger_id: _Optional[int] = ..., bitmap: _Optional[bytes] = ...) -> None: ...

class TopicPolicyChanged(_message.Message):
    __slots__ = ("topic_id", "policy")
    TOPIC_ID_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    topic_id: int
    policy: TopicPolicyRecord
    def __init__(self, topic_id: _Optional[int] = ..., policy: _Optional[_Union[TopicPolicyRecord, _Mapping]] = ...) -> None: ...

class TopicCreated(_message.Message):
    __slots__ = ("topic_id", "name", "create_time_ms", "policy")
    TOPIC_ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    CREATE_TIME_MS_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    topic_id: int
    name: str
    create_time_ms: int
    policy: TopicPolicyRecord
    def __init__(self, topic_id: _Optional[int] = ..., name: _Optional[str] = ..., create_time_ms: _Optional[int] = ..., policy: _Optional[_Union[TopicPolicyRecord, _Mapping]] = ...) -> None: ...

class TopicDeleted(_message.Message):
    __slots__ = ("topic_id",)
    TOPIC_ID_FIELD_NUMBER: _ClassVar[int]
    topic_id: int
    def __init__(self, topic_id: _Optional[int] = ...) -> None: ...

class SubscriptionCreated(_message.Message):
    __slots__ = ("topic_id", "subscription")
    TOPIC_ID_FIELD_NUMBER: _ClassVar[int]
    SUBSCRIPTION_FIELD_NUMBER: _ClassVar[int]
    topic_id: int
    subscription: SubscriptionEntry
    def __init__(self, topic_id: _Optional[int] = ..., subscription: _Optional[_Union[SubscriptionEntry, _Mapping]] = ...) -> None: ...

class SubscriptionDeleted(_message.Message):
    __slots__ = ("topic_id", "subscription_id")
    TOPIC_ID_FIELD_NUMBER: _ClassVar[int]
    SUBSCRIPTION_ID_FIELD_NUMBER: _ClassVar[int]
    topic_id: int
    subscription_id: int
    def __init__(self, topic_id: _Optional[int] = ..., subscription_id: _Optional[int] = ...) -> None: ...
