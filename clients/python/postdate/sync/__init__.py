"""Postdate without async: the names of `postdate`, with calls that block.

with postdate.sync.connect("localhost:7650") as client:
    with client.producer("orders") as producer:
        producer.send(b"...", deliver_after=timedelta(minutes=15))
    with client.subscribe("orders", "billing") as subscription:
        for message in subscription:
            with message.processing():
                ...

Any thread may use a client and all that is made from it. Open clients do not survive a fork: connect
in the children, as each worker of gunicorn or Celery does by its hook.

Made by tools/generate_sync.py, as the modules beside it.
"""

from postdate.admin import (
    IndexFinding,
    ServerInfo,
    ServerLimits,
    SubscriptionDescription,
    TopicCheck,
    TopicDescription,
)
from postdate.backups import Backup
from postdate.client import DEFAULT_ADDRESS
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
from postdate.partitions import PartitionReceipt, partition_of, partition_topics
from postdate.policies import (
    BucketPolicy,
    DelayedDelivery,
    OverdueAction,
    SubscriptionPolicy,
    TopicPolicy,
    Tracker,
)
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
from postdate.sync.client import Client, connect
from postdate.sync.message import Message
from postdate.sync.partitions import PartitionedProducer, PartitionedSubscription
from postdate.sync.producer import Producer
from postdate.sync.pull import Received
from postdate.sync.subscription import Subscription

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
