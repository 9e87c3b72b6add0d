from google.protobuf import field_mask_pb2 as _field_mask_pb2
from postdate.v1 import consumer_pb2 as _consumer_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Tracker(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TRACKER_UNSPECIFIED: _ClassVar[Tracker]
    TRACKER_BUCKET: _ClassVar[Tracker]
    TRACKER_MEMORY: _ClassVar[Tracker]
TRACKER_UNSPECIFIED: Tracker
TRACKER_BUCKET: Tracker
TRACKER_MEMORY: Tracker

class TopicPolicy(_message.Message):
    __slots__ = ("tracker", "tick_ms", "max_delay_ms", "default_ttl_ms", "ledger_max_age_ms", "ledger_max_bytes", "ledger_max_entries", "buckets")
    TRACKER_FIELD_NUMBER: _ClassVar[int]
    TICK_MS_FIELD_NUMBER: _ClassVar[int]
    MAX_DELAY_MS_FIELD_NUMBER: _ClassVar[int]
    DEFAULT_TTL_MS_FIELD_NUMBER: _ClassVar[int]
    LEDGER_MAX_AGE_MS_FIELD_NUMBER: _ClassVar[int]
    LEDGER_MAX_BYTES_FIELD_NUMBER: _ClassVar[int]
    LEDGER_MAX_ENTRIES_FIELD_NUMBER: _ClassVar[int]
    BUCKETS_FIELD_NUMBER: _ClassVar[int]
    tracker: Tracker
    tick_ms: int
    max_delay_ms: int
    default_ttl_ms: int
    ledger_max_age_ms: int
    ledger_max_bytes: int
    ledger_max_entries: int
    buckets: BucketPolicy
    def __init__(self, tracker: _Optional[_Union[Tracker, str]] = ..., tick_ms: _Optional[int] = ..., max_delay_ms: _Optional[int] = ..., default_ttl_ms: _Optional[int] = ..., ledger_max_age_ms: _Optional[int] = ..., ledger_max_bytes: _Optional[int] = ..., ledger_max_entries: _Optional[int] = ..., buckets: _Optional[_Union[BucketPolicy, _Mapping]] = ...) -> None: ...

class BucketPolicy(_message.Message):
    __slots__ = ("max_buckets", "min_index_count", "seal_after_ms", "ledgers_per_bucket", "segment_time_step_ms", "max_segment_entries")
    MAX_BUCKETS_FIELD_NUMBER: _ClassVar[int]
    MIN_INDEX_COUNT_FIELD_NUMBER: _ClassVar[int]
    SEAL_AFTER_MS_FIELD_NUMBER: _ClassVar[int]
    LEDGERS_PER_BUCKET_FIELD_NUMBER: _ClassVar[int]
    SEGMENT_TIME_STEP_MS_FIELD_NUMBER: _ClassVar[int]
    MAX_SEGMENT_ENTRIES_FIELD_NUMBER: _ClassVar[int]
    max_buckets: int
    min_index_count: int
    seal_after_ms: int
    ledgers_per_bucket: int
    segment_time_step_ms: int
    max_segment_entries: int
    def __init__(self, max_buckets: _Optional[int] = ..., min_index_count: _Optional[int] = ..., seal_after_ms: _Optional[int] = ..., ledgers_per_bucket: _Optional[int] = ..., segment_time_step_ms: _Optional[int] = ..., max_segment_entries: _Optional[int] = ...) -> None: ...

class SubscriptionPolicy(_message.Message):
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

class Topic(_message.Message):
    __slots__ = ("name", "policy", "effective_policy", "create_time_ms")
    NAME_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    EFFECTIVE_POLICY_FIELD_NUMBER: _ClassVar[int]
    CREATE_TIME_MS_FIELD_NUMBER: _ClassVar[int]
    name: str
    policy: TopicPolicy
    effective_policy: TopicPolicy
    create_time_ms: int
    def __init__(self, name: _Optional[str] = ..., policy: _Optional[_Union[TopicPolicy, _Mapping]] = ..., effective_policy: _Optional[_Union[TopicPolicy, _Mapping]] = ..., create_time_ms: _Optional[int] = ...) -> None: ...

class Subscription(_message.Message):
    __slots__ = ("topic", "name", "type", "policy", "effective_policy", "create_time_ms")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    TYPE_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    EFFECTIVE_POLICY_FIELD_NUMBER: _ClassVar[int]
    CREATE_TIME_MS_FIELD_NUMBER: _ClassVar[int]
    topic: str
    name: str
    type: _consumer_pb2.SubscriptionType
    policy: SubscriptionPolicy
    effective_policy: SubscriptionPolicy
    create_time_ms: int
    def __init__(self, topic: _Optional[str] = ..., name: _Optional[str] = ..., type: _Optional[_Union[_consumer_pb2.SubscriptionType, str]] = ..., policy: _Optional[_Union[SubscriptionPolicy, _Mapping]] = ..., effective_policy: _Optional[_Union[SubscriptionPolicy, _Mapping]] = ..., create_time_ms: _Optional[int] = ...) -> None: ...

class CreateTopicRequest(_message.Message):
    __slots__ = ("name", "policy", "request_id")
    NAME_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    name: str
    policy: TopicPolicy
    request_id: str
    def __init__(self, name: _Optional[str] = ..., policy: _Optional[_Union[TopicPolicy, _Mapping]] = ..., request_id: _Optional[str] = ...) -> None: ...

class CreateTopicResponse(_message.Message):
    __slots__ = ("topic",)
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    topic: Topic
    def __init__(self, topic: _Optional[_Union[Topic, _Mapping]] = ...) -> None: ...

class GetTopicRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class GetTopicResponse(_message.Message):
    __slots__ = ("topic",)
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    topic: Topic
    def __init__(self, topic: _Optional[_Union[Topic, _Mapping]] = ...) -> None: ...

class UpdateTopicRequest(_message.Message):
    __slots__ = ("name", "policy", "update_mask", "request_id")
    NAME_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    UPDATE_MASK_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    name: str
    policy: TopicPolicy
    update_mask: _field_mask_pb2.FieldMask
    request_id: str
    def __init__(self, name: _Optional[str] = ..., policy: _Optional[_Union[TopicPolicy, _Mapping]] = ..., update_mask: _Optional[_Union[_field_mask_pb2.FieldMask, _Mapping]] = ..., request_id: _Optional[str] = ...) -> None: ...

class UpdateTopicResponse(_message.Message):
    __slots__ = ("topic",)
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    topic: Topic
    def __init__(self, topic: _Optional[_Union[Topic, _Mapping]] = ...) -> None: ...

class DeleteTopicRequest(_message.Message):
    __slots__ = ("name", "request_id")
    NAME_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    name: str
    request_id: str
    def __init__(self, name: _Optional[str] = ..., request_id: _Optional[str] = ...) -> None: ...

class DeleteTopicResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListTopicsRequest(_message.Message):
    __slots__ = ("page_size", "page_token")
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    page_size: int
    page_token: str
    def __init__(self, page_size: _Optional[int] = ..., page_token: _Optional[str] = ...) -> None: ...

class ListTopicsResponse(_message.Message):
    __slots__ = ("topics", "next_page_token")
    TOPICS_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    topics: _containers.RepeatedCompositeFieldContainer[Topic]
    next_page_token: str
    def __init__(self, topics: _Optional[_Iterable[_Union[Topic, _Mapping]]] = ..., next_page_token: _Optional[str] = ...) -> None: ...

class CreateSubscriptionRequest(_message.Message):
    __slots__ = ("topic", "name", "type", "initial_position", "policy", "request_id")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    TYPE_FIELD_NUMBER: _ClassVar[int]
    INITIAL_POSITION_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    topic: str
    name: str
    type: _consumer_pb2.SubscriptionType
    initial_position: _consumer_pb2.InitialPosition
    policy: SubscriptionPolicy
    request_id: str
    def __init__(self, topic: _Optional[str] = ..., name: _Optional[str] = ..., type: _Optional[_Union[_consumer_pb2.SubscriptionType, str]] = ..., initial_position: _Optional[_Union[_consumer_pb2.InitialPosition, str]] = ..., policy: _Optional[_Union[SubscriptionPolicy, _Mapping]] = ..., request_id: _Optional[str] = ...) -> None: ...

class CreateSubscriptionResponse(_message.Message):
    __slots__ = ("subscription",)
    SUBSCRIPTION_FIELD_NUMBER: _ClassVar[int]
    subscription: Subscription
    def __init__(self, subscription: _Optional[_Union[Subscription, _Mapping]] = ...) -> None: ...

class GetSubscriptionRequest(_message.Message):
    __slots__ = ("topic", "name")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    topic: str
    name: str
    def __init__(self, topic: _Optional[str] = ..., name: _Optional[str] = ...) -> None: ...

class GetSubscriptionResponse(_message.Message):
    __slots__ = ("subscription",)
    SUBSCRIPTION_FIELD_NUMBER: _ClassVar[int]
    subscription: Subscription
    def __init__(self, subscription: _Optional[_Union[Subscription, _Mapping]] = ...) -> None: ...

class DeleteSubscriptionRequest(_message.Message):
    __slots__ = ("topic", "name", "request_id")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    topic: str
    name: str
    request_id: str
    def __init__(self, topic: _Optional[str] = ..., name: _Optional[str] = ..., request_id: _Optional[str] = ...) -> None: ...

class DeleteSubscriptionResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListSubscriptionsRequest(_message.Message):
    __slots__ = ("topic", "page_size", "page_token")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    topic: str
    page_size: int
    page_token: str
    def __init__(self, topic: _Optional[str] = ..., page_size: _Optional[int] = ..., page_token: _Optional[str] = ...) -> None: ...

class ListSubscriptionsResponse(_message.Message):
    __slots__ = ("subscriptions", "next_page_token")
    SUBSCRIPTIONS_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    subscriptions: _containers.RepeatedCompositeFieldContainer[Subscription]
    next_page_token: str
    def __init__(self, subscriptions: _Optional[_Iterable[_Union[Subscription, _Mapping]]] = ..., next_page_token: _Optional[str] = ...) -> None: ...

class GetStatsRequest(_message.Message):
    __slots__ = ("topics",)
    TOPICS_FIELD_NUMBER: _ClassVar[int]
    topics: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, topics: _Optional[_Iterable[str]] = ...) -> None: ...

class GetStatsResponse(_message.Message):
    __slots__ = ("topics",)
    TOPICS_FIELD_NUMBER: _ClassVar[int]
    topics: _containers.RepeatedCompositeFieldContainer[TopicStats]
    def __init__(self, topics: _Optional[_Iterable[_Union[TopicStats, _Mapping]]] = ...) -> None: ...

class TopicStats(_message.Message):
    __slots__ = ("topic", "scheduled_messages", "scheduled_bytes", "next_due_time_ms", "last_due_time_ms", "ledgers", "storage_bytes", "index", "subscriptions")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    SCHEDULED_MESSAGES_FIELD_NUMBER: _ClassVar[int]
    SCHEDULED_BYTES_FIELD_NUMBER: _ClassVar[int]
    NEXT_DUE_TIME_MS_FIELD_NUMBER: _ClassVar[int]
    LAST_DUE_TIME_MS_FIELD_NUMBER: _ClassVar[int]
    LEDGERS_FIELD_NUMBER: _ClassVar[int]
    STORAGE_BYTES_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    SUBSCRIPTIONS_FIELD_NUMBER: _ClassVar[int]
    topic: str
    scheduled_messages: int
    scheduled_bytes: int
    next_due_time_ms: int
    last_due_time_ms: int
    ledgers: int
    storage_bytes: int
    index: IndexStats
    subscriptions: _containers.RepeatedCompositeFieldContainer[SubscriptionStats]
    def __init__(self, topic: _Optional[str] = ..., scheduled_messages: _Optional[int] = ..., scheduled_bytes: _Optional[int] = ..., next_due_time_ms: _Optional[int] = ..., last_due_time_ms: _Optional[int] = ..., ledgers: _Optional[int] = ..., storage_bytes: _Optional[int] = ..., index: _Optional[_Union[IndexStats, _Mapping]] = ..., subscriptions: _Optional[_Iterable[_Union[SubscriptionStats, _Mapping]]] = ...) -> None: ...

class IndexStats(_message.Message):
    __slots__ = ("buckets", "loaded_entries", "memory_bytes", "disk_bytes", "rebuilds")
    BUCKETS_FIELD_NUMBER: _ClassVar[int]
    LOADED_ENTRIES_FIELD_NUMBER: _ClassVar[int]
    MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    DISK_BYTES_FIELD_NUMBER: _ClassVar[int]
    REBUILDS_FIELD_NUMBER: _ClassVar[int]
    buckets: int
    loaded_entries: int
    memory_bytes: int
    disk_bytes: int
    rebuilds: int
    def __init__(self, buckets: _Optional[int] = ..., loaded_entries: _Optional[int] = ..., memory_bytes: _Optional[int] = ..., disk_bytes: _Optional[int] = ..., rebuilds: _Optional[int] = ...) -> None: ...

class SubscriptionStats(_message.Message):
    __slots__ = ("name", "type", "ready_messages", "leased_messages", "scheduled_messages", "dead_letter_messages", "oldest_ready_age_ms", "consumers", "paused")
    NAME_FIELD_NUMBER: _ClassVar[int]
    TYPE_FIELD_NUMBER: _ClassVar[int]
    READY_MESSAGES_FIELD_NUMBER: _ClassVar[int]
    LEASED_MESSAGES_FIELD_NUMBER: _ClassVar[int]
    SCHEDULED_MESSAGES_FIELD_NUMBER: _ClassVar[int]
    DEAD_LETTER_MESSAGES_FIELD_NUMBER: _ClassVar[int]
    OLDEST_READY_AGE_MS_FIELD_NUMBER: _ClassVar[int]
    CONSUMERS_FIELD_NUMBER: _ClassVar[int]
    PAUSED_FIELD_NUMBER: _ClassVar[int]
    name: str
    type: _consumer_pb2.SubscriptionType
    ready_messages: int
    leased_messages: int
    scheduled_messages: int
    dead_letter_messages: int
    oldest_ready_age_ms: int
    consumers: int
    paused: bool
    def __init__(self, name: _Optional[str] = ..., type: _Optional[_Union[_consumer_pb2.SubscriptionType, str]] = ..., ready_messages: _Optional[int] = ..., leased_messages: _Optional[int] = ..., scheduled_messages: _Optional[int] = ..., dead_letter_messages: _Optional[int] = ..., oldest_ready_age_ms: _Optional[int] = ..., consumers: _Optional[int] = ..., paused: bool = ...) -> None: ...

class VerifyTopicRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class VerifyTopicResponse(_message.Message):
    __slots__ = ("buckets", "ledgers", "entries", "pending", "stale", "settled", "finding_count", "findings")
    BUCKETS_FIELD_NUMBER: _ClassVar[int]
    LEDGERS_FIELD_NUMBER: _ClassVar[int]
    ENTRIES_FIELD_NUMBER: _ClassVar[int]
    PENDING_FIELD_NUMBER: _ClassVar[int]
    STALE_FIELD_NUMBER: _ClassVar[int]
    SETTLED_FIELD_NUMBER: _ClassVar[int]
    FINDING_COUNT_FIELD_NUMBER: _ClassVar[int]
    FINDINGS_FIELD_NUMBER: _ClassVar[int]
    buckets: int
    ledgers: int
    entries: int
    pending: int
    stale: int
    settled: int
    finding_count: int
    findings: _containers.RepeatedCompositeFieldContainer[IndexFinding]
    def __init__(self, buckets: _Optional[int] = ..., ledgers: _Optional[int] = ..., entries: _Optional[int] = ..., pending: _Optional[int] = ..., stale: _Optional[int] = ..., settled: _Optional[int] = ..., finding_count: _Optional[int] = ..., findings: _Optional[_Iterable[_Union[IndexFinding, _Mapping]]] = ...) -> None: ...

class IndexFinding(_message.Message):
    __slots__ = ("kind", "text", "count")
    KIND_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    kind: str
    text: str
    count: int
    def __init__(self, kind: _Optional[str] = ..., text: _Optional[str] = ..., count: _Optional[int] = ...) -> None: ...

class GetServerInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetServerInfoResponse(_message.Message):
    __slots__ = ("version", "broker_id", "start_time_ms", "broker_time_ms", "limits")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    BROKER_ID_FIELD_NUMBER: _ClassVar[int]
    START_TIME_MS_FIELD_NUMBER: _ClassVar[int]
    BROKER_TIME_MS_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    version: str
    broker_id: str
    start_time_ms: int
    broker_time_ms: int
    limits: ServerLimits
    def __init__(self, version: _Optional[str] = ..., broker_id: _Optional[str] = ..., start_time_ms: _Optional[int] = ..., broker_time_ms: _Optional[int] = ..., limits: _Optional[_Union[ServerLimits, _Mapping]] = ...) -> None: ...

class ServerLimits(_message.Message):
    __slots__ = ("payload_bytes_max", "key_bytes_max", "schedule_key_bytes_max", "properties_count_max", "properties_bytes_max", "batch_messages_max", "ack_entries_max")
    PAYLOAD_BYTES_MAX_FIELD_NUMBER: _ClassVar[int]
    KEY_BYTES_MAX_FIELD_NUMBER: _ClassVar[int]
    SCHEDULE_KEY_BYTES_MAX_FIELD_NUMBER: _ClassVar[int]
    PROPERTIES_COUNT_MAX_FIELD_NUMBER: _ClassVar[int]
    PROPERTIES_BYTES_MAX_FIELD_NUMBER: _ClassVar[int]
    BATCH_MESSAGES_MAX_FIELD_NUMBER: _ClassVar[int]
    ACK_ENTRIES_MAX_FIELD_NUMBER: _ClassVar[int]
    payload_bytes_max: int
    key_bytes_max: int
    schedule_key_bytes_max: int
    properties_count_max: int
    properties_bytes_max: int
    batch_messages_max: int
    ack_entries_max: int
    def __init__(self, payload_bytes_max: _Optional[int] = ..., key_bytes_max: _Optional[int] = ..., schedule_key_bytes_max: _Optional[int] = ..., properties_count_max: _Optional[int] = ..., properties_bytes_max: _Optional[int] = ..., batch_messages_max: _Optional[int] = ..., ack_entries_max: _Optional[int] = ...) -> None: ...
