"""The way in: `postdate.connect(address)`."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from datetime import timedelta
from types import TracebackType

from postdate import pull
from postdate._inbox import share_of
from postdate._rpc import Rpc
from postdate.admin import ServerInfo, Subscriptions, Topics, get_server_info
from postdate.backups import Backups
from postdate.cluster import ClusterInfo, get_cluster, move_shard
from postdate.credentials import Credentials, Tls, Token
from postdate.dead_letters import DeadLetters
from postdate.errors import PostdateError
from postdate.model import InitialPosition, SubscriptionType
from postdate.partitions import (
    PartitionedProducer,
    PartitionedSubscription,
    partition_topics,
)
from postdate.producer import Producer
from postdate.recurring import Recurring
from postdate.schedule import Schedule
from postdate.stats import TopicStats, get_stats
from postdate.subscription import Subscription

DEFAULT_ADDRESS = "127.0.0.1:7650"


def connect(
    address: str = DEFAULT_ADDRESS,
    *,
    tls: Tls | None = None,
    token: Token | None = None,
    allow_plaintext_token: bool = False,
    retry_for: timedelta = timedelta(seconds=30),
    rng: random.Random | None = None,
) -> Client:
    """A client of the broker at `address` (`host:port`), to be used as an async context manager.

    Of a cluster, give several nodes: `"a:7650,b:7650,c:7650"`. The client finds the one that owns the shard, and
    follows it to another node. Of a broker with several shards give the one address: the client goes to the port of
    each shard by itself, where it can reach that.

    No connection is made before the first call needs one. `retry_for` is how long calls, sends and
    the first connection of a subscription keep trying while the broker is away; a subscription
    that was connected once keeps trying for as long as it is open.

    `tls` encrypts the connection. `token` goes with every call and stream as a bearer token; where it is a
    function, that is asked each time, so a token may be renewed. Without `tls` a token is sent to this machine
    only, unless `allow_plaintext_token` says that the network is trusted: ValueError otherwise.
    """
    credentials = Credentials(address, tls=tls, token=token, allow_plaintext_token=allow_plaintext_token)
    return Client(address, retry_for=retry_for, rng=rng, credentials=credentials)


class Client:
    """A connection to a broker, and to each of its shards if it has several, shared by everything made from it."""

    def __init__(
        self,
        address: str,
        *,
        retry_for: timedelta,
        rng: random.Random | None,
        credentials: Credentials | None = None,
    ) -> None:
        if retry_for < timedelta(0):
            raise ValueError("retry_for is negative")
        self.address = address
        self._retry_for = retry_for
        self._rng = rng or random.Random()
        self._credentials = credentials or Credentials(address)
        self._rpc_or_none: Rpc | None = None

    async def __aenter__(self) -> Client:
        await self.open()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    async def open(self) -> None:
        """Begin, in place of a `with` block: for a client that is kept for as long as the program runs.

        Nothing happens if it is open. After `close` it may be opened again.
        """
        if self._rpc_or_none is None or self._rpc_or_none.is_closed:
            self._rpc_or_none = Rpc(
                self.address, retry_for=self._retry_for, rng=self._rng, credentials=self._credentials
            )

    async def close(self) -> None:
        """End the connection. Close producers and subscriptions before, or they are cut off."""
        if self._rpc_or_none is not None:
            await self._rpc_or_none.close()

    @property
    def topics(self) -> Topics:
        """Create, get, update, list, verify and delete topics."""
        return Topics(self._rpc)

    @property
    def subscriptions(self) -> Subscriptions:
        """Create, get, update, seek, skip, pause, resume, list and delete subscriptions."""
        return Subscriptions(self._rpc)

    @property
    def backups(self) -> Backups:
        """Create, list and delete backups on the broker's machine."""
        return Backups(self._rpc)

    @property
    def dead_letters(self) -> DeadLetters:
        """List, requeue and purge what subscriptions gave up."""
        return DeadLetters(self._rpc)

    @property
    def schedule(self) -> Schedule:
        """See, count, cancel and move what is pending."""
        return Schedule(self._rpc)

    @property
    def recurring(self) -> Recurring:
        """Put, see, pause, delete, trigger and backfill schedules that recur."""
        return Recurring(self._rpc)

    def producer(
        self,
        topic: str,
        *,
        linger: timedelta = timedelta(milliseconds=5),
        batch_messages_max: int = 1000,
        batch_bytes_max: int = 1024 * 1024,
        in_flight_max: int = 8,
        producer_name: str | None = None,
    ) -> Producer:
        """A producer of one topic, to be used as an async context manager.

        `linger` is how long a message may wait for others while earlier batches are on their way;
        a lone message does not wait. At most `in_flight_max` batches are unanswered at a time.

        With a `producer_name`, messages are numbered, and what lost its answer is sent again without being
        stored twice. One producer at a time uses a name.
        """
        return Producer(
            self._rpc,
            topic,
            linger=linger,
            batch_messages_max=batch_messages_max,
            batch_bytes_max=batch_bytes_max,
            in_flight_max=in_flight_max,
            producer_name=producer_name,
        )

    def subscribe(
        self,
        topic: str,
        name: str,
        *,
        type: SubscriptionType | None = None,
        initial_position: InitialPosition | None = None,
        permits: int | None = None,
        lease: timedelta | None = None,
        honor_delay: bool | None = None,
        consumer_name: str = "",
        limit: int | None = None,
        on_connection: Callable[[PostdateError | None], object] | None = None,
    ) -> Subscription:
        """A consumer of a subscription, to be used as an async context manager and iterated over.

        None leaves a setting to the subscription, or to the broker where it is new: SHARED, from
        LATEST. `permits` is how many messages the broker may send ahead of what was taken; None is 1,000, and
        for `run` four times its concurrency, but with KEY_SHARED. `limit` ends the iteration after that many,
        and no more are ever asked for.

        `on_connection` is called with the error when the connection breaks, and with None when there is one again,
        in the thread of the event loop; it must not wait. Both go to the log `postdate` as warnings, too.
        """
        return Subscription(
            self._rpc,
            topic,
            name,
            kind=type,
            initial_position=initial_position,
            permits=permits,
            lease=lease,
            honor_delay=honor_delay,
            consumer_name=consumer_name,
            limit=limit,
            on_connection=on_connection,
        )

    def partitioned_producer(
        self,
        topic: str,
        *,
        partitions: int,
        linger: timedelta = timedelta(milliseconds=5),
        producer_name: str | None = None,
    ) -> PartitionedProducer:
        """A producer of a topic that is spread by key over several, such as `orders-000` to `orders-007`.

        To be used as an async context manager. `linger` and `producer_name` are as for `producer`, each partition's
        own. Producers and consumers of a topic have to agree on `partitions`.
        """
        return PartitionedProducer(
            topic,
            [
                self.producer(each, linger=linger, producer_name=producer_name)
                for each in partition_topics(topic, partitions)
            ],
        )

    def subscribe_partitioned(
        self,
        topic: str,
        name: str,
        *,
        partitions: int,
        type: SubscriptionType | None = None,
        initial_position: InitialPosition | None = None,
        permits: int | None = None,
        lease: timedelta | None = None,
        honor_delay: bool | None = None,
        consumer_name: str = "",
        limit: int | None = None,
    ) -> PartitionedSubscription:
        """A consumer of a subscription on all partitions of a topic, to be iterated over as one.

        To be used as an async context manager. Arguments are as for `subscribe`; `permits` and `limit`
        are for all partitions together, and each has one permit at least.
        """
        changed = asyncio.Event()
        subscriptions = [
            Subscription(
                self._rpc,
                each,
                name,
                kind=type,
                initial_position=initial_position,
                permits=None if permits is None else share_of(permits, partitions),
                lease=lease,
                honor_delay=honor_delay,
                consumer_name=consumer_name,
                limit=limit,  # so that none is sent more ahead than all may take
                changed=changed,
            )
            for each in partition_topics(topic, partitions)
        ]
        return PartitionedSubscription(topic, name, subscriptions, changed, limit)

    async def receive(
        self,
        topic: str,
        subscription: str,
        *,
        max_messages: int = 1,
        wait: timedelta = timedelta(0),
        lease: timedelta | None = None,
        initial_position: InitialPosition | None = None,
    ) -> pull.Received:
        """Take what is ready, or wait for it: the simple way, without a stream, SHARED only."""
        return await pull.receive(
            self._rpc,
            topic,
            subscription,
            max_messages=max_messages,
            wait=wait,
            lease=lease,
            initial_position=initial_position,
        )

    async def stats(self, *topics: str) -> tuple[TopicStats, ...]:
        """Counts of these topics, by name; of all, if none is named."""
        return await get_stats(self._rpc, topics)

    async def server_info(self) -> ServerInfo:
        """Version, start time, clock and limits of the broker."""
        return await get_server_info(self._rpc)

    async def cluster(self) -> ClusterInfo:
        """Owners of the shards of the cluster, as the node knows them that is asked."""
        return await get_cluster(self._rpc)

    async def move_shard(self, to: str, *, shard: int = 0) -> None:
        """Have the owner of a shard of the cluster hand it over to a node that follows it, by name.

        Returns when that has begun, or the node owns the shard; `cluster` tells the new owner within seconds.
        """
        await move_shard(self._rpc, to, shard)

    @property
    def _rpc(self) -> Rpc:
        if self._rpc_or_none is None:
            raise RuntimeError("the client is used before `with connect(...) as client:` or `open()`")
        return self._rpc_or_none
