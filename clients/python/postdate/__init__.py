"""Postdate: send a message that arrives when its time has come.

async with postdate.connect("localhost:7650") as client:
    async with client.producer("orders") as producer:
        await producer.send(b"...", deliver_after=timedelta(minutes=15))
    async with client.subscribe("orders", "billing") as subscription:
        async for message in subscription:
            async with message.processing():
                ...
"""

from postdate import _quiet as _quiet  # before the first import of gRPC
from postdate.admin import (
    IndexFinding,
    ServerInfo,
    ServerLimits,
    SubscriptionDescription,
    TopicCheck,
    TopicDescription,
)
from postdate.backups import Backup
from postdate.client import DEFAULT_ADDRESS, Client, connect
from postdate.cluster import ClusterInfo, ClusterNode, ClusterShard
from postdate.credentials import Tls
from postdate.dead_letters import DeadLetter, DeadLetterChange
from postdate.errors import (
    AlreadyExists,
    BulkChangeFailed,
    Closed,
    DeadlineExceeded,
    Disconnected,
    FailedPrecondition,
    Internal,
    InvalidRequest,
    LeaseLost,
    LimitReached,
    NotFound,
    OutOfRange,
    PartlyChanged,
    PartlyStored,
    PermissionDenied,
    PostdateError,
    TlsFailed,
    Unauthenticated,
    Unavailable,
    Unsupported,
)
from postdate.message import Message
from postdate.model import (
    IdRange,
    InitialPosition,
    MessageId,
    OutgoingMessage,
    Receipt,
    Receipts,
    SubscriptionType,
)
from postdate.owed import OwedMessage, OwedState
from postdate.partitions import (
    PartitionedProducer,
    PartitionedSubscription,
    PartitionReceipt,
    partition_of,
    partition_topics,
)
from postdate.policies import (
    BucketPolicy,
    DelayedDelivery,
    OverdueAction,
    SubscriptionPolicy,
    TopicPolicy,
    Tracker,
)
from postdate.producer import Producer
from postdate.pull import Received
from postdate.recurring import Occurrence, RecurringOverdue, RecurringSchedule, RecurringState
from postdate.scheduled import (
    BulkChange,
    BulkChangeState,
    ChangeOutcome,
    ChangeResult,
    ReturnedMessage,
    ScheduleChange,
    ScheduledBar,
    ScheduledCounts,
    ScheduledMessage,
    ScheduledState,
)
from postdate.stats import IndexStats, SubscriptionStats, TopicStats
from postdate.subscription import Subscription

__all__ = [
    "AlreadyExists",
    "Backup",
    "BucketPolicy",
    "BulkChange",
    "BulkChangeFailed",
    "BulkChangeState",
    "ChangeOutcome",
    "ChangeResult",
    "Client",
    "Closed",
    "ClusterInfo",
    "ClusterNode",
    "ClusterShard",
    "connect",
    "DEFAULT_ADDRESS",
    "DeadLetter",
    "DeadLetterChange",
    "DeadlineExceeded",
    "DelayedDelivery",
    "Disconnected",
    "FailedPrecondition",
    "IdRange",
    "IndexFinding",
    "IndexStats",
    "InitialPosition",
    "Internal",
    "InvalidRequest",
    "LeaseLost",
    "LimitReached",
    "Message",
    "MessageId",
    "NotFound",
    "OutgoingMessage",
    "OutOfRange",
    "OverdueAction",
    "partition_of",
    "partition_topics",
    "OwedMessage",
    "OwedState",
    "PartitionedProducer",
    "PartitionedSubscription",
    "PartitionReceipt",
    "PartlyChanged",
    "PartlyStored",
    "PermissionDenied",
    "PostdateError",
    "Producer",
    "Occurrence",
    "Receipt",
    "Receipts",
    "Received",
    "ReturnedMessage",
    "RecurringOverdue",
    "RecurringSchedule",
    "RecurringState",
    "ScheduleChange",
    "ScheduledBar",
    "ScheduledCounts",
    "ScheduledMessage",
    "ScheduledState",
    "ServerInfo",
    "ServerLimits",
    "Subscription",
    "SubscriptionDescription",
    "SubscriptionPolicy",
    "SubscriptionStats",
    "SubscriptionType",
    "Tls",
    "TopicCheck",
    "TopicDescription",
    "TopicPolicy",
    "TopicStats",
    "Tracker",
    "Unauthenticated",
    "TlsFailed",
    "Unavailable",
    "Unsupported",
]
