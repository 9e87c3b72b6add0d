from google.protobuf import field_mask_pb2 as _field_mask_pb2
from postdate_api.v1 import consumer_pb2 as _consumer_pb2
from postdate_api.v1 import message_pb2 as _message_pb2
from postdate_api.v1 import schedule_pb2 as _schedule_pb2
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

class DelayedDelivery(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    DELAYED_DELIVERY_UNSPECIFIED: _ClassVar[DelayedDelivery]
    DELAYED_DELIVERY_ENABLED: _ClassVar[DelayedDelivery]
    DELAYED_DELIVERY_DISABLED: _ClassVar[DelayedDelivery]

class OverdueAction(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    OVERDUE_ACTION_UNSPECIFIED: _ClassVar[OverdueAction]
    OVERDUE_ACTION_DELIVER: _ClassVar[OverdueAction]
    OVERDUE_ACTION_EXPIRE: _ClassVar[OverdueAction]
    OVERDUE_ACTION_DEAD_LETTER: _ClassVar[OverdueAction]
TRACKER_UNSPECIFIED: Tracker
TRACKER_BUCKET: Tracker
TRACKER_MEMORY: Tracker
DELAYED_DELIVERY_UNSPECIFIED: DelayedDelivery
DELAYED_DELIVERY_ENABLED: DelayedDelivery
DELAYED_DELIVERY_DISABLED: DelayedDelivery
OVERDUE_ACTION_UNSPECIFIED: OverdueAction
OVERDUE_ACTION_DELIVER: OverdueAction
OVERDUE_ACTION_EXPIRE: OverdueAction
OVERDUE_ACTION_DEAD_LETTER: OverdueAction

class TopicPolicy(_message.Message):
    __slots__ = ("tracker", "tick_ms", "max_delay_ms", "default_ttl_ms", "ledger_max_age_ms", "ledger_max_bytes", "ledger_max_entries", "buckets", "delayed_delivery", "retention_ms", "retention_bytes", "max_pending_messages", "max_pending_bytes", "max_produce_rate", "overdue_action", "dedup_window_ms", "dedup_entries")
    TRACKER_FIELD_NUMBER: _ClassVar[int]
    TICK_MS_FIELD_NUMBER: _ClassVar[int]
    MAX_DELAY_MS_FIELD_NUMBER: _ClassVar[int]
    DEFAULT_TTL_MS_FIELD_NUMBER: _ClassVar[int]
    LEDGER_MAX_AGE_MS_FIELD_NUMBER: _ClassVar[int]
    LEDGER_MAX_BYTES_FIELD_NUMBER: _ClassVar[int]
    LEDGER_MAX_ENTRIES_FIELD_NUMBER: _ClassVar[int]
    BUCKETS_FIELD_NUMBER: _ClassVar[int]
    DELAYED_DELIVERY_FIELD_NUMBER: _ClassVar[int]
    RETENTION_MS_FIELD_NUMBER: _ClassVar[int]
    RETENTION_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_PENDING_MESSAGES_FIELD_NUMBER: _ClassVar[int]
    MAX_PENDING_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_PRODUCE_RATE_FIELD_NUMBER: _ClassVar[int]
    OVERDUE_ACTION_FIELD_NUMBER: _ClassVar[int]
    DEDUP_WINDOW_MS_FIELD_NUMBER: _ClassVar[int]
    DEDUP_ENTRIES_FIELD_NUMBER: _ClassVar[int]
    tracker: Tracker
    tick_ms: int
    max_delay_ms: int
    default_ttl_ms: int
    ledger_max_age_ms: int
    ledger_max_bytes: int
    ledger_max_entries: int
    buckets: BucketPolicy
    delayed_delivery: DelayedDelivery
    retention_ms: int
    retention_bytes: int
    max_pending_messages: int
    max_pending_bytes: int
    max_produce_rate: int
    overdue_action: OverdueAction
    dedup_window_ms: int
    dedup_entries: int
    def __init__(self, tracker: _Optional[_Union[Tracker, str]] = ..., tick_ms: _Optional[int] = ..., max_delay_ms: _Optional[int] = ..., default_ttl_ms: _Optional[int] = ..., ledger_max_age_ms: _Optional[int] = ..., ledger_max_bytes: _Optional[int] = ..., ledger_max_entries: _Optional[int] = ..., buckets: _Optional[_Union[BucketPolicy, _Mapping[str, object]]] = ..., delayed_delivery: _Optional[_Union[DelayedDelivery, str]] = ..., retention_ms: _Optional[int] = ..., retention_bytes: _Optional[int] = ..., max_pending_messages: _Optional[int] = ..., max_pending_bytes: _Optional[int] = ..., max_produce_rate: _Optional[int] = ..., overdue_action: _Optional[_Union[OverdueAction, str]] = ..., dedup_window_ms: _Optional[int] = ..., dedup_entries: _Optional[int] = ...) -> None: ...

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
    def __init__(self, name: _Optional[str] = ..., policy: _Optional[_Union[TopicPolicy, _Mapping[str, object]]] = ..., effective_policy: _Optional[_Union[TopicPolicy, _Mapping[str, object]]] = ..., create_time_ms: _Optional[int] = ...) -> None: ...

class Subscription(_message.Message):
    __slots__ = ("topic", "name", "type", "policy", "effective_policy", "create_time_ms", "paused")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    TYPE_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    EFFECTIVE_POLICY_FIELD_NUMBER: _ClassVar[int]
    CREATE_TIME_MS_FIELD_NUMBER: _ClassVar[int]
    PAUSED_FIELD_NUMBER: _ClassVar[int]
    topic: str
    name: str
    type: _consumer_pb2.SubscriptionType
    policy: SubscriptionPolicy
    effective_policy: SubscriptionPolicy
    create_time_ms: int
    paused: bool
    def __init__(self, topic: _Optional[str] = ..., name: _Optional[str] = ..., type: _Optional[_Union[_consumer_pb2.SubscriptionType, str]] = ..., policy: _Optional[_Union[SubscriptionPolicy, _Mapping[str, object]]] = ..., effective_policy: _Optional[_Union[SubscriptionPolicy, _Mapping[str, object]]] = ..., create_time_ms: _Optional[int] = ..., paused: bool = ...) -> None: ...

class CreateTopicRequest(_message.Message):
    __slots__ = ("name", "policy", "request_id")
    NAME_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    name: str
    policy: TopicPolicy
    request_id: str
    def __init__(self, name: _Optional[str] = ..., policy: _Optional[_Union[TopicPolicy, _Mapping[str, object]]] = ..., request_id: _Optional[str] = ...) -> None: ...

class CreateTopicResponse(_message.Message):
    __slots__ = ("topic",)
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    topic: Topic
    def __init__(self, topic: _Optional[_Union[Topic, _Mapping[str, object]]] = ...) -> None: ...

class GetTopicRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class GetTopicResponse(_message.Message):
    __slots__ = ("topic",)
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    topic: Topic
    def __init__(self, topic: _Optional[_Union[Topic, _Mapping[str, object]]] = ...) -> None: ...

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
    def __init__(self, name: _Optional[str] = ..., policy: _Optional[_Union[TopicPolicy, _Mapping[str, object]]] = ..., update_mask: _Optional[_Union[_field_mask_pb2.FieldMask, _Mapping[str, object]]] = ..., request_id: _Optional[str] = ...) -> None: ...

class UpdateTopicResponse(_message.Message):
    __slots__ = ("topic",)
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    topic: Topic
    def __init__(self, topic: _Optional[_Union[Topic, _Mapping[str, object]]] = ...) -> None: ...

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
    def __init__(self, topics: _Optional[_Iterable[_Union[Topic, _Mapping[str, object]]]] = ..., next_page_token: _Optional[str] = ...) -> None: ...

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
    def __init__(self, topic: _Optional[str] = ..., name: _Optional[str] = ..., type: _Optional[_Union[_consumer_pb2.SubscriptionType, str]] = ..., initial_position: _Optional[_Union[_consumer_pb2.InitialPosition, str]] = ..., policy: _Optional[_Union[SubscriptionPolicy, _Mapping[str, object]]] = ..., request_id: _Optional[str] = ...) -> None: ...

class CreateSubscriptionResponse(_message.Message):
    __slots__ = ("subscription",)
    SUBSCRIPTION_FIELD_NUMBER: _ClassVar[int]
    subscription: Subscription
    def __init__(self, subscription: _Optional[_Union[Subscription, _Mapping[str, object]]] = ...) -> None: ...

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
    def __init__(self, subscription: _Optional[_Union[Subscription, _Mapping[str, object]]] = ...) -> None: ...

class UpdateSubscriptionRequest(_message.Message):
    __slots__ = ("topic", "name", "policy", "update_mask", "request_id")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    UPDATE_MASK_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    topic: str
    name: str
    policy: SubscriptionPolicy
    update_mask: _field_mask_pb2.FieldMask
    request_id: str
    def __init__(self, topic: _Optional[str] = ..., name: _Optional[str] = ..., policy: _Optional[_Union[SubscriptionPolicy, _Mapping[str, object]]] = ..., update_mask: _Optional[_Union[_field_mask_pb2.FieldMask, _Mapping[str, object]]] = ..., request_id: _Optional[str] = ...) -> None: ...

class UpdateSubscriptionResponse(_message.Message):
    __slots__ = ("subscription",)
    SUBSCRIPTION_FIELD_NUMBER: _ClassVar[int]
    subscription: Subscription
    def __init__(self, subscription: _Optional[_Union[Subscription, _Mapping[str, object]]] = ...) -> None: ...

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
    def __init__(self, subscriptions: _Optional[_Iterable[_Union[Subscription, _Mapping[str, object]]]] = ..., next_page_token: _Optional[str] = ...) -> None: ...

class SeekRequest(_message.Message):
    __slots__ = ("topic", "subscription", "id", "publish_time_ms", "initial_position", "request_id")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    SUBSCRIPTION_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    PUBLISH_TIME_MS_FIELD_NUMBER: _ClassVar[int]
    INITIAL_POSITION_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    topic: str
    subscription: str
    id: _message_pb2.MessageId
    publish_time_ms: int
    initial_position: _consumer_pb2.InitialPosition
    request_id: str
    def __init__(self, topic: _Optional[str] = ..., subscription: _Optional[str] = ..., id: _Optional[_Union[_message_pb2.MessageId, _Mapping[str, object]]] = ..., publish_time_ms: _Optional[int] = ..., initial_position: _Optional[_Union[_consumer_pb2.InitialPosition, str]] = ..., request_id: _Optional[str] = ...) -> None: ...

class SeekResponse(_message.Message):
    __slots__ = ("position",)
    POSITION_FIELD_NUMBER: _ClassVar[int]
    position: _message_pb2.MessageId
    def __init__(self, position: _Optional[_Union[_message_pb2.MessageId, _Mapping[str, object]]] = ...) -> None: ...

class SkipAllRequest(_message.Message):
    __slots__ = ("topic", "subscription", "request_id")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    SUBSCRIPTION_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    topic: str
    subscription: str
    request_id: str
    def __init__(self, topic: _Optional[str] = ..., subscription: _Optional[str] = ..., request_id: _Optional[str] = ...) -> None: ...

class SkipAllResponse(_message.Message):
    __slots__ = ("skipped_messages",)
    SKIPPED_MESSAGES_FIELD_NUMBER: _ClassVar[int]
    skipped_messages: int
    def __init__(self, skipped_messages: _Optional[int] = ...) -> None: ...

class PauseRequest(_message.Message):
    __slots__ = ("topic", "subscription", "request_id")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    SUBSCRIPTION_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    topic: str
    subscription: str
    request_id: str
    def __init__(self, topic: _Optional[str] = ..., subscription: _Optional[str] = ..., request_id: _Optional[str] = ...) -> None: ...

class PauseResponse(_message.Message):
    __slots__ = ("subscription",)
    SUBSCRIPTION_FIELD_NUMBER: _ClassVar[int]
    subscription: Subscription
    def __init__(self, subscription: _Optional[_Union[Subscription, _Mapping[str, object]]] = ...) -> None: ...

class ResumeRequest(_message.Message):
    __slots__ = ("topic", "subscription", "request_id")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    SUBSCRIPTION_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    topic: str
    subscription: str
    request_id: str
    def __init__(self, topic: _Optional[str] = ..., subscription: _Optional[str] = ..., request_id: _Optional[str] = ...) -> None: ...

class ResumeResponse(_message.Message):
    __slots__ = ("subscription",)
    SUBSCRIPTION_FIELD_NUMBER: _ClassVar[int]
    subscription: Subscription
    def __init__(self, subscription: _Optional[_Union[Subscription, _Mapping[str, object]]] = ...) -> None: ...

class ListDeadLettersRequest(_message.Message):
    __slots__ = ("topic", "subscription", "view", "page_size", "page_token", "reason", "dead_letter_time")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    SUBSCRIPTION_FIELD_NUMBER: _ClassVar[int]
    VIEW_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    DEAD_LETTER_TIME_FIELD_NUMBER: _ClassVar[int]
    topic: str
    subscription: str
    view: _message_pb2.MessageView
    page_size: int
    page_token: str
    reason: str
    dead_letter_time: _schedule_pb2.TimeRange
    def __init__(self, topic: _Optional[str] = ..., subscription: _Optional[str] = ..., view: _Optional[_Union[_message_pb2.MessageView, str]] = ..., page_size: _Optional[int] = ..., page_token: _Optional[str] = ..., reason: _Optional[str] = ..., dead_letter_time: _Optional[_Union[_schedule_pb2.TimeRange, _Mapping[str, object]]] = ...) -> None: ...

class ListDeadLettersResponse(_message.Message):
    __slots__ = ("dead_letters", "next_page_token")
    DEAD_LETTERS_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    dead_letters: _containers.RepeatedCompositeFieldContainer[DeadLetter]
    next_page_token: str
    def __init__(self, dead_letters: _Optional[_Iterable[_Union[DeadLetter, _Mapping[str, object]]]] = ..., next_page_token: _Optional[str] = ...) -> None: ...

class DeadLetter(_message.Message):
    __slots__ = ("id", "dead_letter_topic", "original_id", "delivery_attempts", "reason", "dead_letter_time_ms", "payload_bytes", "message", "last_reason")
    ID_FIELD_NUMBER: _ClassVar[int]
    DEAD_LETTER_TOPIC_FIELD_NUMBER: _ClassVar[int]
    ORIGINAL_ID_FIELD_NUMBER: _ClassVar[int]
    DELIVERY_ATTEMPTS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    DEAD_LETTER_TIME_MS_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_BYTES_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    LAST_REASON_FIELD_NUMBER: _ClassVar[int]
    id: _message_pb2.MessageId
    dead_letter_topic: str
    original_id: _message_pb2.MessageId
    delivery_attempts: int
    reason: str
    dead_letter_time_ms: int
    payload_bytes: int
    message: _message_pb2.Message
    last_reason: str
    def __init__(self, id: _Optional[_Union[_message_pb2.MessageId, _Mapping[str, object]]] = ..., dead_letter_topic: _Optional[str] = ..., original_id: _Optional[_Union[_message_pb2.MessageId, _Mapping[str, object]]] = ..., delivery_attempts: _Optional[int] = ..., reason: _Optional[str] = ..., dead_letter_time_ms: _Optional[int] = ..., payload_bytes: _Optional[int] = ..., message: _Optional[_Union[_message_pb2.Message, _Mapping[str, object]]] = ..., last_reason: _Optional[str] = ...) -> None: ...

class RequeueDeadLettersRequest(_message.Message):
    __slots__ = ("topic", "subscription", "entries", "all", "deliver_after_ms", "request_id")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    SUBSCRIPTION_FIELD_NUMBER: _ClassVar[int]
    ENTRIES_FIELD_NUMBER: _ClassVar[int]
    ALL_FIELD_NUMBER: _ClassVar[int]
    DELIVER_AFTER_MS_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    topic: str
    subscription: str
    entries: _containers.RepeatedCompositeFieldContainer[_message_pb2.EntrySet]
    all: bool
    deliver_after_ms: int
    request_id: str
    def __init__(self, topic: _Optional[str] = ..., subscription: _Optional[str] = ..., entries: _Optional[_Iterable[_Union[_message_pb2.EntrySet, _Mapping[str, object]]]] = ..., all: bool = ..., deliver_after_ms: _Optional[int] = ..., request_id: _Optional[str] = ...) -> None: ...

class RequeueDeadLettersResponse(_message.Message):
    __slots__ = ("requeued_messages", "failures")
    REQUEUED_MESSAGES_FIELD_NUMBER: _ClassVar[int]
    FAILURES_FIELD_NUMBER: _ClassVar[int]
    requeued_messages: int
    failures: _containers.RepeatedCompositeFieldContainer[_consumer_pb2.EntryFailure]
    def __init__(self, requeued_messages: _Optional[int] = ..., failures: _Optional[_Iterable[_Union[_consumer_pb2.EntryFailure, _Mapping[str, object]]]] = ...) -> None: ...

class PurgeDeadLettersRequest(_message.Message):
    __slots__ = ("topic", "subscription", "entries", "all", "request_id")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    SUBSCRIPTION_FIELD_NUMBER: _ClassVar[int]
    ENTRIES_FIELD_NUMBER: _ClassVar[int]
    ALL_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    topic: str
    subscription: str
    entries: _containers.RepeatedCompositeFieldContainer[_message_pb2.EntrySet]
    all: bool
    request_id: str
    def __init__(self, topic: _Optional[str] = ..., subscription: _Optional[str] = ..., entries: _Optional[_Iterable[_Union[_message_pb2.EntrySet, _Mapping[str, object]]]] = ..., all: bool = ..., request_id: _Optional[str] = ...) -> None: ...

class PurgeDeadLettersResponse(_message.Message):
    __slots__ = ("purged_messages", "failures")
    PURGED_MESSAGES_FIELD_NUMBER: _ClassVar[int]
    FAILURES_FIELD_NUMBER: _ClassVar[int]
    purged_messages: int
    failures: _containers.RepeatedCompositeFieldContainer[_consumer_pb2.EntryFailure]
    def __init__(self, purged_messages: _Optional[int] = ..., failures: _Optional[_Iterable[_Union[_consumer_pb2.EntryFailure, _Mapping[str, object]]]] = ...) -> None: ...

class GetStatsRequest(_message.Message):
    __slots__ = ("topics", "page_size", "page_token")
    TOPICS_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    topics: _containers.RepeatedScalarFieldContainer[str]
    page_size: int
    page_token: str
    def __init__(self, topics: _Optional[_Iterable[str]] = ..., page_size: _Optional[int] = ..., page_token: _Optional[str] = ...) -> None: ...

class GetStatsResponse(_message.Message):
    __slots__ = ("topics", "next_page_token")
    TOPICS_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    topics: _containers.RepeatedCompositeFieldContainer[TopicStats]
    next_page_token: str
    def __init__(self, topics: _Optional[_Iterable[_Union[TopicStats, _Mapping[str, object]]]] = ..., next_page_token: _Optional[str] = ...) -> None: ...

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
    def __init__(self, topic: _Optional[str] = ..., scheduled_messages: _Optional[int] = ..., scheduled_bytes: _Optional[int] = ..., next_due_time_ms: _Optional[int] = ..., last_due_time_ms: _Optional[int] = ..., ledgers: _Optional[int] = ..., storage_bytes: _Optional[int] = ..., index: _Optional[_Union[IndexStats, _Mapping[str, object]]] = ..., subscriptions: _Optional[_Iterable[_Union[SubscriptionStats, _Mapping[str, object]]]] = ...) -> None: ...

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
    __slots__ = ("name", "type", "ready_messages", "leased_messages", "scheduled_messages", "dead_letter_messages", "oldest_ready_age_ms", "consumers", "paused", "paced", "paced_until_ms")
    NAME_FIELD_NUMBER: _ClassVar[int]
    TYPE_FIELD_NUMBER: _ClassVar[int]
    READY_MESSAGES_FIELD_NUMBER: _ClassVar[int]
    LEASED_MESSAGES_FIELD_NUMBER: _ClassVar[int]
    SCHEDULED_MESSAGES_FIELD_NUMBER: _ClassVar[int]
    DEAD_LETTER_MESSAGES_FIELD_NUMBER: _ClassVar[int]
    OLDEST_READY_AGE_MS_FIELD_NUMBER: _ClassVar[int]
    CONSUMERS_FIELD_NUMBER: _ClassVar[int]
    PAUSED_FIELD_NUMBER: _ClassVar[int]
    PACED_FIELD_NUMBER: _ClassVar[int]
    PACED_UNTIL_MS_FIELD_NUMBER: _ClassVar[int]
    name: str
    type: _consumer_pb2.SubscriptionType
    ready_messages: int
    leased_messages: int
    scheduled_messages: int
    dead_letter_messages: int
    oldest_ready_age_ms: int
    consumers: int
    paused: bool
    paced: bool
    paced_until_ms: int
    def __init__(self, name: _Optional[str] = ..., type: _Optional[_Union[_consumer_pb2.SubscriptionType, str]] = ..., ready_messages: _Optional[int] = ..., leased_messages: _Optional[int] = ..., scheduled_messages: _Optional[int] = ..., dead_letter_messages: _Optional[int] = ..., oldest_ready_age_ms: _Optional[int] = ..., consumers: _Optional[int] = ..., paused: bool = ..., paced: bool = ..., paced_until_ms: _Optional[int] = ...) -> None: ...

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
    def __init__(self, buckets: _Optional[int] = ..., ledgers: _Optional[int] = ..., entries: _Optional[int] = ..., pending: _Optional[int] = ..., stale: _Optional[int] = ..., settled: _Optional[int] = ..., finding_count: _Optional[int] = ..., findings: _Optional[_Iterable[_Union[IndexFinding, _Mapping[str, object]]]] = ...) -> None: ...

class IndexFinding(_message.Message):
    __slots__ = ("kind", "text", "count")
    KIND_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    kind: str
    text: str
    count: int
    def __init__(self, kind: _Optional[str] = ..., text: _Optional[str] = ..., count: _Optional[int] = ...) -> None: ...

class CreateBackupRequest(_message.Message):
    __slots__ = ("label", "request_id")
    LABEL_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    label: str
    request_id: str
    def __init__(self, label: _Optional[str] = ..., request_id: _Optional[str] = ...) -> None: ...

class CreateBackupResponse(_message.Message):
    __slots__ = ("backup",)
    BACKUP_FIELD_NUMBER: _ClassVar[int]
    backup: Backup
    def __init__(self, backup: _Optional[_Union[Backup, _Mapping[str, object]]] = ...) -> None: ...

class Backup(_message.Message):
    __slots__ = ("name", "label", "path", "broker_id", "create_time_ms", "lsn", "topics", "files", "bytes", "copied_bytes", "duration_ms")
    NAME_FIELD_NUMBER: _ClassVar[int]
    LABEL_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    BROKER_ID_FIELD_NUMBER: _ClassVar[int]
    CREATE_TIME_MS_FIELD_NUMBER: _ClassVar[int]
    LSN_FIELD_NUMBER: _ClassVar[int]
    TOPICS_FIELD_NUMBER: _ClassVar[int]
    FILES_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    COPIED_BYTES_FIELD_NUMBER: _ClassVar[int]
    DURATION_MS_FIELD_NUMBER: _ClassVar[int]
    name: str
    label: str
    path: str
    broker_id: str
    create_time_ms: int
    lsn: int
    topics: int
    files: int
    bytes: int
    copied_bytes: int
    duration_ms: int
    def __init__(self, name: _Optional[str] = ..., label: _Optional[str] = ..., path: _Optional[str] = ..., broker_id: _Optional[str] = ..., create_time_ms: _Optional[int] = ..., lsn: _Optional[int] = ..., topics: _Optional[int] = ..., files: _Optional[int] = ..., bytes: _Optional[int] = ..., copied_bytes: _Optional[int] = ..., duration_ms: _Optional[int] = ...) -> None: ...

class ListBackupsRequest(_message.Message):
    __slots__ = ("page_size", "page_token")
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    page_size: int
    page_token: str
    def __init__(self, page_size: _Optional[int] = ..., page_token: _Optional[str] = ...) -> None: ...

class ListBackupsResponse(_message.Message):
    __slots__ = ("backups", "next_page_token")
    BACKUPS_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    backups: _containers.RepeatedCompositeFieldContainer[Backup]
    next_page_token: str
    def __init__(self, backups: _Optional[_Iterable[_Union[Backup, _Mapping[str, object]]]] = ..., next_page_token: _Optional[str] = ...) -> None: ...

class DeleteBackupRequest(_message.Message):
    __slots__ = ("name", "request_id")
    NAME_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    name: str
    request_id: str
    def __init__(self, name: _Optional[str] = ..., request_id: _Optional[str] = ...) -> None: ...

class DeleteBackupResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

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
    def __init__(self, version: _Optional[str] = ..., broker_id: _Optional[str] = ..., start_time_ms: _Optional[int] = ..., broker_time_ms: _Optional[int] = ..., limits: _Optional[_Union[ServerLimits, _Mapping[str, object]]] = ...) -> None: ...

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

class GetClusterRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetClusterResponse(_message.Message):
    __slots__ = ("cluster_id", "shards", "nodes", "node")
    CLUSTER_ID_FIELD_NUMBER: _ClassVar[int]
    SHARDS_FIELD_NUMBER: _ClassVar[int]
    NODES_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    cluster_id: str
    shards: _containers.RepeatedCompositeFieldContainer[ClusterShard]
    nodes: _containers.RepeatedCompositeFieldContainer[ClusterNode]
    node: str
    def __init__(self, cluster_id: _Optional[str] = ..., shards: _Optional[_Iterable[_Union[ClusterShard, _Mapping[str, object]]]] = ..., nodes: _Optional[_Iterable[_Union[ClusterNode, _Mapping[str, object]]]] = ..., node: _Optional[str] = ...) -> None: ...

class MoveShardRequest(_message.Message):
    __slots__ = ("to", "shard")
    TO_FIELD_NUMBER: _ClassVar[int]
    SHARD_FIELD_NUMBER: _ClassVar[int]
    to: str
    shard: int
    def __init__(self, to: _Optional[str] = ..., shard: _Optional[int] = ...) -> None: ...

class MoveShardResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ClusterShard(_message.Message):
    __slots__ = ("number", "epoch", "owner", "owner_address", "standbys", "applied_lsn", "applied_time_ms", "base_lsn", "base_time_ms", "progress")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    OWNER_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    STANDBYS_FIELD_NUMBER: _ClassVar[int]
    APPLIED_LSN_FIELD_NUMBER: _ClassVar[int]
    APPLIED_TIME_MS_FIELD_NUMBER: _ClassVar[int]
    BASE_LSN_FIELD_NUMBER: _ClassVar[int]
    BASE_TIME_MS_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    number: int
    epoch: int
    owner: str
    owner_address: str
    standbys: _containers.RepeatedScalarFieldContainer[str]
    applied_lsn: int
    applied_time_ms: int
    base_lsn: int
    base_time_ms: int
    progress: _containers.RepeatedCompositeFieldContainer[ShardProgress]
    def __init__(self, number: _Optional[int] = ..., epoch: _Optional[int] = ..., owner: _Optional[str] = ..., owner_address: _Optional[str] = ..., standbys: _Optional[_Iterable[str]] = ..., applied_lsn: _Optional[int] = ..., applied_time_ms: _Optional[int] = ..., base_lsn: _Optional[int] = ..., base_time_ms: _Optional[int] = ..., progress: _Optional[_Iterable[_Union[ShardProgress, _Mapping[str, object]]]] = ...) -> None: ...

class ShardProgress(_message.Message):
    __slots__ = ("node", "applied_lsn", "behind_records", "behind_ms")
    NODE_FIELD_NUMBER: _ClassVar[int]
    APPLIED_LSN_FIELD_NUMBER: _ClassVar[int]
    BEHIND_RECORDS_FIELD_NUMBER: _ClassVar[int]
    BEHIND_MS_FIELD_NUMBER: _ClassVar[int]
    node: str
    applied_lsn: int
    behind_records: int
    behind_ms: int
    def __init__(self, node: _Optional[str] = ..., applied_lsn: _Optional[int] = ..., behind_records: _Optional[int] = ..., behind_ms: _Optional[int] = ...) -> None: ...

class ClusterNode(_message.Message):
    __slots__ = ("name", "address", "pages_address")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    PAGES_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    name: str
    address: str
    pages_address: str
    def __init__(self, name: _Optional[str] = ..., address: _Optional[str] = ..., pages_address: _Optional[str] = ...) -> None: ...
