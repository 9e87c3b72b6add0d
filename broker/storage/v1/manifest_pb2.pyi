from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class BrokerManifest(_message.Message):
    __slots__ = ("broker_id", "checkpoint_lsn", "topics", "next_topic_id", "next_ledger_id", "last_alive_ms", "shard", "epoch")
    BROKER_ID_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_LSN_FIELD_NUMBER: _ClassVar[int]
    TOPICS_FIELD_NUMBER: _ClassVar[int]
    NEXT_TOPIC_ID_FIELD_NUMBER: _ClassVar[int]
    NEXT_LEDGER_ID_FIELD_NUMBER: _ClassVar[int]
    LAST_ALIVE_MS_FIELD_NUMBER: _ClassVar[int]
    SHARD_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    broker_id: str
    checkpoint_lsn: int
    topics: _containers.RepeatedCompositeFieldContainer[TopicEntry]
    next_topic_id: int
    next_ledger_id: int
    last_alive_ms: int
    shard: str
    epoch: int
    def __init__(self, broker_id: _Optional[str] = ..., checkpoint_lsn: _Optional[int] = ..., topics: _Optional[_Iterable[_Union[TopicEntry, _Mapping]]] = ..., next_topic_id: _Optional[int] = ..., next_ledger_id: _Optional[int] = ..., last_alive_ms: _Optional[int] = ..., shard: _Optional[str] = ..., epoch: _Optional[int] = ...) -> None: ...

class TopicEntry(_message.Message):
    __slots__ = ("topic_id", "name")
    TOPIC_ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    topic_id: int
    name: str
    def __init__(self, topic_id: _Optional[int] = ..., name: _Optional[str] = ...) -> None: ...

class TopicManifest(_message.Message):
    __slots__ = ("topic_id", "name", "create_time_ms", "policy", "applied_lsn", "ledgers", "subscriptions", "next_subscription_id", "indexed_through", "index_lsn", "frontier_ms", "bucket_ids", "next_bucket_id", "producers_file", "log_end", "key_run_ids", "next_key_run_id", "keys_through", "gone_ledgers", "recurring_file", "bulk_file")
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
    PRODUCERS_FILE_FIELD_NUMBER: _ClassVar[int]
    LOG_END_FIELD_NUMBER: _ClassVar[int]
    KEY_RUN_IDS_FIELD_NUMBER: _ClassVar[int]
    NEXT_KEY_RUN_ID_FIELD_NUMBER: _ClassVar[int]
    KEYS_THROUGH_FIELD_NUMBER: _ClassVar[int]
    GONE_LEDGERS_FIELD_NUMBER: _ClassVar[int]
    RECURRING_FILE_FIELD_NUMBER: _ClassVar[int]
    BULK_FILE_FIELD_NUMBER: _ClassVar[int]
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
    producers_file: str
    log_end: PositionRecord
    key_run_ids: _containers.RepeatedScalarFieldContainer[int]
    next_key_run_id: int
    keys_through: PositionRecord
    gone_ledgers: _containers.RepeatedCompositeFieldContainer[GoneLedger]
    recurring_file: str
    bulk_file: str
    def __init__(self, topic_id: _Optional[int] = ..., name: _Optional[str] = ..., create_time_ms: _Optional[int] = ..., policy: _Optional[_Union[TopicPolicyRecord, _Mapping]] = ..., applied_lsn: _Optional[int] = ..., ledgers: _Optional[_Iterable[_Union[LedgerEntry, _Mapping]]] = ..., subscriptions: _Optional[_Iterable[_Union[SubscriptionEntry, _Mapping]]] = ..., next_subscription_id: _Optional[int] = ..., indexed_through: _Optional[_Union[PositionRecord, _Mapping]] = ..., index_lsn: _Optional[int] = ..., frontier_ms: _Optional[int] = ..., bucket_ids: _Optional[_Iterable[int]] = ..., next_bucket_id: _Optional[int] = ..., producers_file: _Optional[str] = ..., log_end: _Optional[_Union[PositionRecord, _Mapping]] = ..., key_run_ids: _Optional[_Iterable[int]] = ..., next_key_run_id: _Optional[int] = ..., keys_through: _Optional[_Union[PositionRecord, _Mapping]] = ..., gone_ledgers: _Optional[_Iterable[_Union[GoneLedger, _Mapping]]] = ..., recurring_file: _Optional[str] = ..., bulk_file: _Optional[str] = ...) -> None: ...

class GoneLedger(_message.Message):
    __slots__ = ("ledger_id", "last_due_ms")
    LEDGER_ID_FIELD_NUMBER: _ClassVar[int]
    LAST_DUE_MS_FIELD_NUMBER: _ClassVar[int]
    ledger_id: int
    last_due_ms: int
    def __init__(self, ledger_id: _Optional[int] = ..., last_due_ms: _Optional[int] = ...) -> None: ...

class PositionRecord(_message.Message):
    __slots__ = ("ledger_id", "entry_id")
    LEDGER_ID_FIELD_NUMBER: _ClassVar[int]
    ENTRY_ID_FIELD_NUMBER: _ClassVar[int]
    ledger_id: int
    entry_id: int
    def __init__(self, ledger_id: _Optional[int] = ..., entry_id: _Optional[int] = ...) -> None: ...

class LedgerEntry(_message.Message):
    __slots__ = ("ledger_id", "generation", "entry_count", "data_bytes", "sealed", "times_crcs", "rows_crcs", "first_publish_ms", "amendments_file", "last_due_ms", "last_expire_ms", "last_publish_ms", "sparse", "packed_bytes")
    LEDGER_ID_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    ENTRY_COUNT_FIELD_NUMBER: _ClassVar[int]
    DATA_BYTES_FIELD_NUMBER: _ClassVar[int]
    SEALED_FIELD_NUMBER: _ClassVar[int]
    TIMES_CRCS_FIELD_NUMBER: _ClassVar[int]
    ROWS_CRCS_FIELD_NUMBER: _ClassVar[int]
    FIRST_PUBLISH_MS_FIELD_NUMBER: _ClassVar[int]
    AMENDMENTS_FILE_FIELD_NUMBER: _ClassVar[int]
    LAST_DUE_MS_FIELD_NUMBER: _ClassVar[int]
    LAST_EXPIRE_MS_FIELD_NUMBER: _ClassVar[int]
    LAST_PUBLISH_MS_FIELD_NUMBER: _ClassVar[int]
    SPARSE_FIELD_NUMBER: _ClassVar[int]
    PACKED_BYTES_FIELD_NUMBER: _ClassVar[int]
    ledger_id: int
    generation: int
    entry_count: int
    data_bytes: int
    sealed: bool
    times_crcs: _containers.RepeatedScalarFieldContainer[int]
    rows_crcs: _containers.RepeatedScalarFieldContainer[int]
    first_publish_ms: int
    amendments_file: str
    last_due_ms: int
    last_expire_ms: int
    last_publish_ms: int
    sparse: SparseRecord
    packed_bytes: int
    def __init__(self, ledger_id: _Optional[int] = ..., generation: _Optional[int] = ..., entry_count: _Optional[int] = ..., data_bytes: _Optional[int] = ..., sealed: bool = ..., times_crcs: _Optional[_Iterable[int]] = ..., rows_crcs: _Optional[_Iterable[int]] = ..., first_publish_ms: _Optional[int] = ..., amendments_file: _Optional[str] = ..., last_due_ms: _Optional[int] = ..., last_expire_ms: _Optional[int] = ..., last_publish_ms: _Optional[int] = ..., sparse: _Optional[_Union[SparseRecord, _Mapping]] = ..., packed_bytes: _Optional[int] = ...) -> None: ...

class SparseRecord(_message.Message):
    __slots__ = ("present_count", "present_bytes")
    PRESENT_COUNT_FIELD_NUMBER: _ClassVar[int]
    PRESENT_BYTES_FIELD_NUMBER: _ClassVar[int]
    present_count: int
    present_bytes: int
    def __init__(self, present_count: _Optional[int] = ..., present_bytes: _Optional[int] = ...) -> None: ...

class LedgersCompacted(_message.Message):
    __slots__ = ("topic_id", "amended_lsn", "ledgers", "files_follow")
    TOPIC_ID_FIELD_NUMBER: _ClassVar[int]
    AMENDED_LSN_FIELD_NUMBER: _ClassVar[int]
    LEDGERS_FIELD_NUMBER: _ClassVar[int]
    FILES_FOLLOW_FIELD_NUMBER: _ClassVar[int]
    topic_id: int
    amended_lsn: int
    ledgers: _containers.RepeatedCompositeFieldContainer[CompactedLedger]
    files_follow: bool
    def __init__(self, topic_id: _Optional[int] = ..., amended_lsn: _Optional[int] = ..., ledgers: _Optional[_Iterable[_Union[CompactedLedger, _Mapping]]] = ..., files_follow: bool = ...) -> None: ...

class CompactedLedger(_message.Message):
    __slots__ = ("ledger_id", "from_generation", "generation", "data_bytes", "present_bytes", "present", "last_expire_ms")
    LEDGER_ID_FIELD_NUMBER: _ClassVar[int]
    FROM_GENERATION_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    DATA_BYTES_FIELD_NUMBER: _ClassVar[int]
    PRESENT_BYTES_FIELD_NUMBER: _ClassVar[int]
    PRESENT_FIELD_NUMBER: _ClassVar[int]
    LAST_EXPIRE_MS_FIELD_NUMBER: _ClassVar[int]
    ledger_id: int
    from_generation: int
    generation: int
    data_bytes: int
    present_bytes: int
    present: bytes
    last_expire_ms: int
    def __init__(self, ledger_id: _Optional[int] = ..., from_generation: _Optional[int] = ..., generation: _Optional[int] = ..., data_bytes: _Optional[int] = ..., present_bytes: _Optional[int] = ..., present: _Optional[bytes] = ..., last_expire_ms: _Optional[int] = ...) -> None: ...

class SubscriptionEntry(_message.Message):
    __slots__ = ("subscription_id", "name", "type", "create_time_ms", "start", "policy", "cursor_file", "mark", "paused")
    SUBSCRIPTION_ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    TYPE_FIELD_NUMBER: _ClassVar[int]
    CREATE_TIME_MS_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    CURSOR_FILE_FIELD_NUMBER: _ClassVar[int]
    MARK_FIELD_NUMBER: _ClassVar[int]
    PAUSED_FIELD_NUMBER: _ClassVar[int]
    subscription_id: int
    name: str
    type: int
    create_time_ms: int
    start: PositionRecord
    policy: SubscriptionPolicyRecord
    cursor_file: str
    mark: PositionRecord
    paused: bool
    def __init__(self, subscription_id: _Optional[int] = ..., name: _Optional[str] = ..., type: _Optional[int] = ..., create_time_ms: _Optional[int] = ..., start: _Optional[_Union[PositionRecord, _Mapping]] = ..., policy: _Optional[_Union[SubscriptionPolicyRecord, _Mapping]] = ..., cursor_file: _Optional[str] = ..., mark: _Optional[_Union[PositionRecord, _Mapping]] = ..., paused: bool = ...) -> None: ...

class TopicPolicyRecord(_message.Message):
    __slots__ = ("tracker", "tick_ms", "max_delay_ms", "default_ttl_ms", "ledger_max_age_ms", "ledger_max_bytes", "ledger_max_entries", "min_index_count", "ledgers_per_bucket", "seal_after_ms", "max_buckets", "segment_time_step_ms", "max_segment_entries", "delayed_delivery", "retention_ms", "retention_bytes", "max_pending_messages", "max_pending_bytes", "max_produce_rate", "overdue_action", "dedup_window_ms", "dedup_entries")
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
    DELAYED_DELIVERY_FIELD_NUMBER: _ClassVar[int]
    RETENTION_MS_FIELD_NUMBER: _ClassVar[int]
    RETENTION_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_PENDING_MESSAGES_FIELD_NUMBER: _ClassVar[int]
    MAX_PENDING_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_PRODUCE_RATE_FIELD_NUMBER: _ClassVar[int]
    OVERDUE_ACTION_FIELD_NUMBER: _ClassVar[int]
    DEDUP_WINDOW_MS_FIELD_NUMBER: _ClassVar[int]
    DEDUP_ENTRIES_FIELD_NUMBER: _ClassVar[int]
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
    delayed_delivery: int
    retention_ms: int
    retention_bytes: int
    max_pending_messages: int
    max_pending_bytes: int
    max_produce_rate: int
    overdue_action: int
    dedup_window_ms: int
    dedup_entries: int
    def __init__(self, tracker: _Optional[int] = ..., tick_ms: _Optional[int] = ..., max_delay_ms: _Optional[int] = ..., default_ttl_ms: _Optional[int] = ..., ledger_max_age_ms: _Optional[int] = ..., ledger_max_bytes: _Optional[int] = ..., ledger_max_entries: _Optional[int] = ..., min_index_count: _Optional[int] = ..., ledgers_per_bucket: _Optional[int] = ..., seal_after_ms: _Optional[int] = ..., max_buckets: _Optional[int] = ..., segment_time_step_ms: _Optional[int] = ..., max_segment_entries: _Optional[int] = ..., delayed_delivery: _Optional[int] = ..., retention_ms: _Optional[int] = ..., retention_bytes: _Optional[int] = ..., max_pending_messages: _Optional[int] = ..., max_pending_bytes: _Optional[int] = ..., max_produce_rate: _Optional[int] = ..., overdue_action: _Optional[int] = ..., dedup_window_ms: _Optional[int] = ..., dedup_entries: _Optional[int] = ...) -> None: ...

class SubscriptionPolicyRecord(_message.Message):
    __slots__ = ("lease_ms", "initial_backoff_ms", "max_backoff_ms", "backoff_multiplier", "honor_delay", "max_delivery_attempts", "dead_letter_topic", "max_delivery_rate", "max_delivery_burst", "max_leased_messages")
    LEASE_MS_FIELD_NUMBER: _ClassVar[int]
    INITIAL_BACKOFF_MS_FIELD_NUMBER: _ClassVar[int]
    MAX_BACKOFF_MS_FIELD_NUMBER: _ClassVar[int]
    BACKOFF_MULTIPLIER_FIELD_NUMBER: _ClassVar[int]
    HONOR_DELAY_FIELD_NUMBER: _ClassVar[int]
    MAX_DELIVERY_ATTEMPTS_FIELD_NUMBER: _ClassVar[int]
    DEAD_LETTER_TOPIC_FIELD_NUMBER: _ClassVar[int]
    MAX_DELIVERY_RATE_FIELD_NUMBER: _ClassVar[int]
    MAX_DELIVERY_BURST_FIELD_NUMBER: _ClassVar[int]
    MAX_LEASED_MESSAGES_FIELD_NUMBER: _ClassVar[int]
    lease_ms: int
    initial_backoff_ms: int
    max_backoff_ms: int
    backoff_multiplier: float
    honor_delay: bool
    max_delivery_attempts: int
    dead_letter_topic: str
    max_delivery_rate: float
    max_delivery_burst: int
    max_leased_messages: int
    def __init__(self, lease_ms: _Optional[int] = ..., initial_backoff_ms: _Optional[int] = ..., max_backoff_ms: _Optional[int] = ..., backoff_multiplier: _Optional[float] = ..., honor_delay: bool = ..., max_delivery_attempts: _Optional[int] = ..., dead_letter_topic: _Optional[str] = ..., max_delivery_rate: _Optional[float] = ..., max_delivery_burst: _Optional[int] = ..., max_leased_messages: _Optional[int] = ...) -> None: ...

class CursorFile(_message.Message):
    __slots__ = ("topic_id", "subscription_id", "settled", "attempts", "waiting", "dead_letters", "reasons")
    TOPIC_ID_FIELD_NUMBER: _ClassVar[int]
    SUBSCRIPTION_ID_FIELD_NUMBER: _ClassVar[int]
    SETTLED_FIELD_NUMBER: _ClassVar[int]
    ATTEMPTS_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    DEAD_LETTERS_FIELD_NUMBER: _ClassVar[int]
    REASONS_FIELD_NUMBER: _ClassVar[int]
    topic_id: int
    subscription_id: int
    settled: _containers.RepeatedCompositeFieldContainer[LedgerBitmap]
    attempts: _containers.RepeatedCompositeFieldContainer[AttemptBits]
    waiting: _containers.RepeatedCompositeFieldContainer[WaitingTimes]
    dead_letters: _containers.RepeatedCompositeFieldContainer[LedgerBitmap]
    reasons: _containers.RepeatedCompositeFieldContainer[LastReason]
    def __init__(self, topic_id: _Optional[int] = ..., subscription_id: _Optional[int] = ..., settled: _Optional[_Iterable[_Union[LedgerBitmap, _Mapping]]] = ..., attempts: _Optional[_Iterable[_Union[AttemptBits, _Mapping]]] = ..., waiting: _Optional[_Iterable[_Union[WaitingTimes, _Mapping]]] = ..., dead_letters: _Optional[_Iterable[_Union[LedgerBitmap, _Mapping]]] = ..., reasons: _Optional[_Iterable[_Union[LastReason, _Mapping]]] = ...) -> None: ...

class LastReason(_message.Message):
    __slots__ = ("ledger_id", "entry_id", "text")
    LEDGER_ID_FIELD_NUMBER: _ClassVar[int]
    ENTRY_ID_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    ledger_id: int
    entry_id: int
    text: str
    def __init__(self, ledger_id: _Optional[int] = ..., entry_id: _Optional[int] = ..., text: _Optional[str] = ...) -> None: ...

class ProducersFile(_message.Message):
    __slots__ = ("topic_id", "producers")
    TOPIC_ID_FIELD_NUMBER: _ClassVar[int]
    PRODUCERS_FIELD_NUMBER: _ClassVar[int]
    topic_id: int
    producers: _containers.RepeatedCompositeFieldContainer[ProducerEntry]
    def __init__(self, topic_id: _Optional[int] = ..., producers: _Optional[_Iterable[_Union[ProducerEntry, _Mapping]]] = ...) -> None: ...

class ProducerEntry(_message.Message):
    __slots__ = ("name", "highest_sequence_id", "floor", "sequence_ids", "counts", "ledger_ids", "entry_ids", "publish_times_ms")
    NAME_FIELD_NUMBER: _ClassVar[int]
    HIGHEST_SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    FLOOR_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_IDS_FIELD_NUMBER: _ClassVar[int]
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    LEDGER_IDS_FIELD_NUMBER: _ClassVar[int]
    ENTRY_IDS_FIELD_NUMBER: _ClassVar[int]
    PUBLISH_TIMES_MS_FIELD_NUMBER: _ClassVar[int]
    name: str
    highest_sequence_id: int
    floor: int
    sequence_ids: bytes
    counts: bytes
    ledger_ids: bytes
    entry_ids: bytes
    publish_times_ms: bytes
    def __init__(self, name: _Optional[str] = ..., highest_sequence_id: _Optional[int] = ..., floor: _Optional[int] = ..., sequence_ids: _Optional[bytes] = ..., counts: _Optional[bytes] = ..., ledger_ids: _Optional[bytes] = ..., entry_ids: _Optional[bytes] = ..., publish_times_ms: _Optional[bytes] = ...) -> None: ...

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

class WaitingTimes(_message.Message):
    __slots__ = ("ledger_id", "bitmap", "times")
    LEDGER_ID_FIELD_NUMBER: _ClassVar[int]
    BITMAP_FIELD_NUMBER: _ClassVar[int]
    TIMES_FIELD_NUMBER: _ClassVar[int]
    ledger_id: int
    bitmap: bytes
    times: bytes
    def __init__(self, ledger_id: _Optional[int] = ..., bitmap: _Optional[bytes] = ..., times: _Optional[bytes] = ...) -> None: ...

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

class SubscriptionChanged(_message.Message):
    __slots__ = ("topic_id", "subscription_id", "policy", "paused")
    TOPIC_ID_FIELD_NUMBER: _ClassVar[int]
    SUBSCRIPTION_ID_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    PAUSED_FIELD_NUMBER: _ClassVar[int]
    topic_id: int
    subscription_id: int
    policy: SubscriptionPolicyRecord
    paused: bool
    def __init__(self, topic_id: _Optional[int] = ..., subscription_id: _Optional[int] = ..., policy: _Optional[_Union[SubscriptionPolicyRecord, _Mapping]] = ..., paused: bool = ...) -> None: ...

class Seeked(_message.Message):
    __slots__ = ("topic_id", "subscription_id", "start")
    TOPIC_ID_FIELD_NUMBER: _ClassVar[int]
    SUBSCRIPTION_ID_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    topic_id: int
    subscription_id: int
    start: PositionRecord
    def __init__(self, topic_id: _Optional[int] = ..., subscription_id: _Optional[int] = ..., start: _Optional[_Union[PositionRecord, _Mapping]] = ...) -> None: ...

class LedgersDropped(_message.Message):
    __slots__ = ("topic_id", "ledger_ids", "came_due_ms")
    TOPIC_ID_FIELD_NUMBER: _ClassVar[int]
    LEDGER_IDS_FIELD_NUMBER: _ClassVar[int]
    CAME_DUE_MS_FIELD_NUMBER: _ClassVar[int]
    topic_id: int
    ledger_ids: _containers.RepeatedScalarFieldContainer[int]
    came_due_ms: int
    def __init__(self, topic_id: _Optional[int] = ..., ledger_ids: _Optional[_Iterable[int]] = ..., came_due_ms: _Optional[int] = ...) -> None: ...
