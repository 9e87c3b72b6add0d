"""`postdate.client` without async. Made by tools/generate_sync.py."""

from __future__ import annotations

import random
from collections.abc import Callable
from datetime import timedelta
from types import TracebackType

from postdate import client as _client
from postdate.admin import ServerInfo
from postdate.client import DEFAULT_ADDRESS
from postdate.cluster import ClusterInfo
from postdate.credentials import Tls, Token
from postdate.errors import PostdateError
from postdate.model import InitialPosition, SubscriptionType
from postdate.stats import TopicStats
from postdate.sync._portal import Portal, portal
from postdate.sync.admin import Subscriptions, Topics
from postdate.sync.backups import Backups
from postdate.sync.dead_letters import DeadLetters
from postdate.sync.partitions import PartitionedProducer, PartitionedSubscription
from postdate.sync.producer import Producer
from postdate.sync.pull import Received
from postdate.sync.recurring import Recurring
from postdate.sync.schedule import Schedule
from postdate.sync.subscription import Subscription


def connect(
    address: str = DEFAULT_ADDRESS,
    *,
    tls: Tls | None = None,
    token: Token | None = None,
    allow_plaintext_token: bool = False,
    retry_for: timedelta = timedelta(seconds=30),
    rng: random.Random | None = None,
) -> Client:
    """A client of the broker at `address` (`host:port`), to be used as a context manager.

    Of a cluster, give several nodes: `"a:7650,b:7650,c:7650"`. The client finds the one that owns the shard,
    and follows it to another node. Of a broker with several shards give the one address: the client goes to the
    port of each shard by itself, where it can reach that.

    No connection is made before the first call needs one. `retry_for` is how long calls, sends and the first
    connection of a subscription keep trying while the broker is away; a subscription that was connected once
    keeps trying for as long as it is open.

    `tls` encrypts the connection. `token` goes with every call and stream as a bearer token; where it is a
    function, that is asked each time, so a token may be renewed. Without `tls` a token is sent to this machine
    only, unless `allow_plaintext_token` says that the network is trusted: ValueError otherwise.
    """
    return Client(
        _client.connect(
            address,
            tls=tls,
            token=token,
            allow_plaintext_token=allow_plaintext_token,
            retry_for=retry_for,
            rng=rng,
        ),
        portal(),
    )


class Client:
    """A connection to a broker, and to each of its shards if it has several, shared by everything made from it."""

    def __init__(self, inner: _client.Client, portal: Portal) -> None:
        self._inner = inner
        self._portal = portal

    @property
    def address(self) -> str:
        return self._inner.address

    def __enter__(self) -> Client:
        self._portal.enter(self._inner.__aenter__())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._portal.leave(self._inner.__aexit__(kind, error, traceback))

    def open(self) -> None:
        """Begin, in place of a `with` block: for a client that is kept for as long as the program runs.

        Nothing happens if it is open. After `close` it may be opened again.
        """
        self._portal.enter(self._inner.open())

    def close(self) -> None:
        """End the connection. Close producers and subscriptions before, or they are cut off."""
        self._portal.leave(self._inner.close())

    @property
    def topics(self) -> Topics:
        """Create, get, update, list, verify and delete topics."""
        return Topics(self._inner.topics, self._portal)

    @property
    def subscriptions(self) -> Subscriptions:
        """Create, get, update, seek, skip, pause, resume, list and delete subscriptions."""
        return Subscriptions(self._inner.subscriptions, self._portal)

    @property
    def backups(self) -> Backups:
        """Create, list and delete backups on the broker's machine."""
        return Backups(self._inner.backups, self._portal)

    @property
    def dead_letters(self) -> DeadLetters:
        """List, requeue and purge what subscriptions gave up."""
        return DeadLetters(self._inner.dead_letters, self._portal)

    @property
    def schedule(self) -> Schedule:
        """See, count, cancel and move what is pending."""
        return Schedule(self._inner.schedule, self._portal)

    @property
    def recurring(self) -> Recurring:
        """Put, see, pause, delete, trigger and backfill schedules that recur."""
        return Recurring(self._inner.recurring, self._portal)

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
        """A producer of one topic, to be used as a context manager.

        `linger` is how long a message may wait for others while earlier batches are on their way;
        a lone message does not wait. At most `in_flight_max` batches are unanswered at a time.

        With a `producer_name`, messages are numbered, and what lost its answer is sent again without being
        stored twice. One producer at a time uses a name.
        """
        return Producer(
            self._inner.producer(
                topic,
                linger=linger,
                batch_messages_max=batch_messages_max,
                batch_bytes_max=batch_bytes_max,
                in_flight_max=in_flight_max,
                producer_name=producer_name,
            ),
            self._portal,
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
        """A consumer of a subscription, to be used as a context manager and iterated over.

        None leaves a setting to the subscription, or to the broker where it is new: SHARED, from
        LATEST. `permits` is how many messages the broker may send ahead of what was taken; None is 1,000, and
        for `run` four times its concurrency, but with KEY_SHARED. `limit` ends the iteration after that many,
        and no more are ever asked for.

        `on_connection` is called with the error when the connection breaks, and with None when there is one again,
        in the thread of the event loop; it must not wait. Both go to the log `postdate` as warnings, too.
        """
        return Subscription(
            self._inner.subscribe(
                topic,
                name,
                type=type,
                initial_position=initial_position,
                permits=permits,
                lease=lease,
                honor_delay=honor_delay,
                consumer_name=consumer_name,
                limit=limit,
                on_connection=on_connection,
            ),
            self._portal,
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

        To be used as a context manager. `linger` and `producer_name` are as for `producer`, each partition's
        own. Producers and consumers of a topic have to agree on `partitions`.
        """
        return PartitionedProducer(
            self._inner.partitioned_producer(
                topic, partitions=partitions, linger=linger, producer_name=producer_name
            ),
            self._portal,
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

        To be used as a context manager. Arguments are as for `subscribe`; `permits` and `limit`
        are for all partitions together, and each has one permit at least.
        """
        return PartitionedSubscription(
            self._inner.subscribe_partitioned(
                topic,
                name,
                partitions=partitions,
                type=type,
                initial_position=initial_position,
                permits=permits,
                lease=lease,
                honor_delay=honor_delay,
                consumer_name=consumer_name,
                limit=limit,
            ),
            self._portal,
        )

    def receive(
        self,
        topic: str,
        subscription: str,
        *,
        max_messages: int = 1,
        wait: timedelta = timedelta(0),
        lease: timedelta | None = None,
        initial_position: InitialPosition | None = None,
    ) -> Received:
        """Take what is ready, or wait for it: the simple way, without a stream, SHARED only."""
        return Received(
            self._portal.run(
                self._inner.receive(
                    topic,
                    subscription,
                    max_messages=max_messages,
                    wait=wait,
                    lease=lease,
                    initial_position=initial_position,
                )
            ),
            self._portal,
        )

    def stats(self, *topics: str) -> tuple[TopicStats, ...]:
        """Counts of these topics, by name; of all, if none is named."""
        return self._portal.run(self._inner.stats(*topics))

    def server_info(self) -> ServerInfo:
        """Version, start time, clock and limits of the broker."""
        return self._portal.run(self._inner.server_info())

    def cluster(self) -> ClusterInfo:
        """Owners of the shards of the cluster, as the node knows them that is asked."""
        return self._portal.run(self._inner.cluster())

    def move_shard(self, to: str, *, shard: int = 0) -> None:
        """Have the owner of a shard of the cluster hand it over to a node that follows it, by name.

        Returns when that has begun, or the node owns the shard; `cluster` tells the new owner within seconds.
        """
        self._portal.run(self._inner.move_shard(to, shard=shard))
