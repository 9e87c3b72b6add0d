"""Metrics: plain integers that the core increments, copied and rendered only when somebody scrapes.

A counter on the way of a message is an attribute of a slotted object, for `+= 1` costs a fiftieth of a call
into a metrics library. The names of the attributes are the names of the metrics: `produced_messages` is
`postdate_produced_messages_total`. A new metric is an attribute of one of the classes below, its name in the table of
its kind (or, if it is no plain number, a family in `_broker_parts`), its text in `metric_help`, and its row in
docs/operations.md; tests miss each of them that is forgotten.

Rendering is done in slices of about a millisecond, and the loop runs between them: a scrape of 40,000
samples takes a quarter of a second, and no delivery may wait for it. Values of one series belong to one
moment; those of different series may be some milliseconds apart.
"""

from __future__ import annotations

import asyncio
import platform
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, fields
from itertools import islice
from operator import attrgetter

from prometheus_client import generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, Metric
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

from broker.observe.horizons import due_within_parts
from broker.observe.lateness import DurationHistogram, HistogramStats, LatenessHistogram
from broker.observe.metric_help import counter, gauge, histogram
from broker.observe.spans import counts_of_spans

OTHER = "_other"
"""The label of all series beyond the limit, summed. No topic has this name: names begin otherwise."""

REFUSAL_REASONS_MAX = 100
AUTH_FAILURES = ("missing", "invalid", "expired", "denied")
"""Reasons why a caller was turned away, as `auth_failures` has them."""

COMPACTION_RESULTS = ("committed", "refused", "aborted", "expired")
"""Ends of a lease: all put in place; some of it refused; given back; neither before its time was over."""

_SLICE_SAMPLES = 100
_SLICE_ROWS = 50


@dataclass(slots=True, eq=False)
class TopicCounters:
    """Counters of a topic since the broker started."""

    produced_messages: int = 0
    produced_bytes: int = 0
    produced_batches: int = 0
    cancelled_messages: int = 0
    moved_messages: int = 0
    duplicate_batches: int = 0
    refused_batches: int = 0


@dataclass(slots=True, eq=False)
class SubscriptionCounters:
    """Counters of a subscription since the broker started."""

    delivered_messages: int = 0
    delivered_bytes: int = 0
    acked_messages: int = 0
    nacked_messages: int = 0
    redelivered_messages: int = 0
    expired_messages: int = 0
    dead_lettered_messages: int = 0
    requeued_messages: int = 0
    purged_messages: int = 0
    damaged_messages: int = 0
    unreadable_messages: int = 0
    lease_expired_messages: int = 0
    early_deliveries: int = 0
    dropped_settled_messages: int = 0
    dropped_moved_messages: int = 0
    dropped_early_messages: int = 0
    lateness: LatenessHistogram = field(default_factory=LatenessHistogram)
    paced_lateness: LatenessHistogram = field(default_factory=LatenessHistogram)

    def clear(self) -> None:
        """Begin anew."""
        anew = SubscriptionCounters()
        for field_ in fields(self):
            setattr(self, field_.name, getattr(anew, field_.name))

    def note_settled(self, how: str, count: int) -> None:
        """Count messages that were settled: acked, expired, dead_lettered, requeued, purged or damaged."""
        name = f"{how}_messages"
        setattr(self, name, getattr(self, name) + count)


@dataclass(slots=True, eq=False)
class BrokerCounters:
    """Counters of the broker since it started."""

    journal_records: int = 0
    journal_bytes: int = 0
    checkpoints: int = 0
    checkpoint_failures: int = 0
    file_retries: int = 0
    removed_ledgers: int = 0
    compacted_ledgers: int = 0
    reclaimed_bytes: int = 0
    index_rebuilds: int = 0
    schedule_key_lookups: int = 0
    schedule_key_rebuilds: int = 0
    recurring_stored: int = 0
    recurring_missed: int = 0
    bulk_changes_begun: int = 0
    bulk_changes_ended: int = 0
    bulk_changes_failed: int = 0
    backups: int = 0
    backup_failures: int = 0
    backup_last_ms: int = 0
    backup_last_seconds: float = 0.0
    backup_last_bytes: int = 0
    clock_steps: int = 0
    recovery_seconds: float = 0.0
    journal_sync: DurationHistogram = field(default_factory=DurationHistogram)
    checkpoint: DurationHistogram = field(default_factory=DurationHistogram)
    loop_lag: DurationHistogram = field(default_factory=DurationHistogram)
    bucket_seal: DurationHistogram = field(default_factory=DurationHistogram)
    bucket_merge: DurationHistogram = field(default_factory=DurationHistogram)
    bucket_load: DurationHistogram = field(default_factory=DurationHistogram)
    refusals: dict[str, int] = field(default_factory=dict)
    index_operations: dict[tuple[str, str], int] = field(default_factory=dict)
    compactions: dict[str, int] = field(default_factory=lambda: dict.fromkeys(COMPACTION_RESULTS, 0))
    auth_failures: dict[str, int] = field(default_factory=lambda: dict.fromkeys(AUTH_FAILURES, 0))
    security_reloads: dict[tuple[str, str], int] = field(default_factory=dict)
    limit_refusals: dict[tuple[str, str], int] = field(default_factory=dict)
    """By the names of the limits in force, and key in the file."""
    limit_totals: dict[tuple[str, str], tuple[int, int]] = field(default_factory=dict)
    """Use of the totals that limits bound, and the most allowed; by name of the limit and key in the file."""
    tls_expires_at_seconds: int = 0

    def note_security_reload(self, what: str, outcome: str) -> None:
        """Count a change of certificates, keys, tokens or rights: ok, or failed, and then the old ones stay."""
        key = (what, outcome)
        self.security_reloads[key] = self.security_reloads.get(key, 0) + 1

    def note_rebuild(self) -> None:
        """Count an index that was built again from its ledgers."""
        self.index_rebuilds += 1

    def note_index(self, operation: str, seconds: float, *, failed: bool) -> None:
        """Count a seal, merge or load of a bucket, or a read of the ledgers that failed."""
        key = (operation, "failed" if failed else "ok")
        self.index_operations[key] = self.index_operations.get(key, 0) + 1
        histograms = {"seal": self.bucket_seal, "merge": self.bucket_merge, "load": self.bucket_load}
        if operation in histograms:
            histograms[operation].observe(seconds)

    def note_compaction(self, result: str) -> None:
        """Count the end of a compaction's lease; `result` is one of COMPACTION_RESULTS."""
        self.compactions[result] += 1

    def refuse(self, reason: str) -> None:
        """Count a request that was answered with an error, by its `PostdateError.reason`."""
        # Reasons are constants of the code, but a label that could grow for ever must not depend on that.
        if reason not in self.refusals and len(self.refusals) >= REFUSAL_REASONS_MAX:
            reason = "OTHER"
        self.refusals[reason] = self.refusals.get(reason, 0) + 1


@dataclass(frozen=True, slots=True)
class TopicSnapshot:
    """A topic at the moment of a scrape. The counters are the live ones; they are copied when it is read."""

    topic: str
    counters: TopicCounters
    scheduled: int
    next_due_ms: int | None
    storage_bytes: int = 0
    index_bytes: int = 0
    index_buckets: int = 0
    index_loaded: int = 0
    snapshot_bytes: int = 0
    key_runs: int = 0
    key_bytes: int = 0
    settled_keys: int = 0


@dataclass(frozen=True, slots=True)
class SubscriptionSnapshot:
    """A subscription at the moment of a scrape, as `TopicSnapshot`."""

    topic: str
    subscription: str
    counters: SubscriptionCounters
    scheduled: int
    ready: int
    leased: int
    consumers: int
    dead_letters: int = 0
    oldest_ready_age_ms: int = 0
    paused: bool = False
    paced: bool = False


@dataclass(frozen=True, slots=True)
class ClusterSnapshot:
    """A node of a cluster at the moment of a scrape."""

    is_owner: bool
    epoch: int
    lease_seconds_left: float
    standby_lag_records: int
    standby_lag_seconds: float
    base_age_seconds: float
    take_overs: int
    log_bytes: int
    clock_skew_seconds: float


@dataclass(frozen=True, slots=True)
class BrokerSnapshot:
    """Everything a scrape shows.

    `topics` and `subscriptions` are read once, in slices, with the loop running between them: pass tuples, or
    generators over a copied list where there are too many to make at once. The same order each time keeps the
    same ones within the limit.
    """

    counters: BrokerCounters
    topics: Iterable[TopicSnapshot]
    subscriptions: Iterable[SubscriptionSnapshot]
    topics_count: int
    subscriptions_count: int
    journal_pending_bytes: int = 0
    ready: bool = True
    disk_free_bytes: int = 0
    disk_reserve_bytes: int = 0
    dedup_memory_bytes: int = 0
    due_within: Iterable[tuple[str, int]] = ()  # a name of HORIZONS, and the count of one topic
    cluster: ClusterSnapshot | None = None


# Names of attributes, which are those of the metrics without prefix.
TOPIC_COUNTERS: tuple[str, ...] = (
    "produced_messages",
    "produced_bytes",
    "produced_batches",
    "cancelled_messages",
    "moved_messages",
    "duplicate_batches",
    "refused_batches",
)
SUBSCRIPTION_COUNTERS: tuple[str, ...] = (
    "delivered_messages",
    "delivered_bytes",
    "acked_messages",
    "nacked_messages",
    "redelivered_messages",
    "expired_messages",
    "dead_lettered_messages",
    "requeued_messages",
    "purged_messages",
    "damaged_messages",
    "unreadable_messages",
    "lease_expired_messages",
    "early_deliveries",
)
DROPPED_REASONS: tuple[tuple[str, str], ...] = (
    ("dropped_settled_messages", "settled"),
    ("dropped_moved_messages", "moved"),
    ("dropped_early_messages", "early"),
)
"""Attributes of SubscriptionCounters, and the value of the label `reason`."""
TOPIC_GAUGES: tuple[str, ...] = (
    "scheduled_messages",
    "storage_bytes",
    "index_memory_bytes",
    "index_buckets",
    "index_loaded_entries",
    "index_snapshot_bytes",
    "schedule_key_runs",
    "schedule_key_bytes",
    "settled_schedule_keys",
)
SUBSCRIPTION_GAUGES: tuple[str, ...] = (
    "subscription_scheduled_messages",
    "ready_messages",
    "leased_messages",
    "consumers",
    "dead_letter_messages",
    "subscription_paused",
    "subscription_paced",
)
BROKER_COUNTERS: tuple[str, ...] = (
    "journal_records",
    "journal_bytes",
    "checkpoints",
    "checkpoint_failures",
    "file_retries",
    "removed_ledgers",
    "compacted_ledgers",
    "reclaimed_bytes",
    "index_rebuilds",
    "backups",
    "backup_failures",
    "schedule_key_lookups",
    "clock_steps",
    "schedule_key_rebuilds",
    "recurring_stored",
    "recurring_missed",
    "bulk_changes_begun",
    "bulk_changes_ended",
    "bulk_changes_failed",
)
BROKER_HISTOGRAMS: tuple[tuple[str, str], ...] = (
    ("journal_sync", "journal_sync_seconds"),
    ("checkpoint", "checkpoint_duration_seconds"),
    ("loop_lag", "loop_lag_seconds"),
    ("bucket_seal", "index_seal_seconds"),
    ("bucket_merge", "index_merge_seconds"),
    ("bucket_load", "index_load_seconds"),
)
"""Attribute of BrokerCounters, and its metric."""

_topic_counts = attrgetter(*TOPIC_COUNTERS)
_subscription_counts = attrgetter(*SUBSCRIPTION_COUNTERS, *(name for name, _ in DROPPED_REASONS))
_no_lateness = LatenessHistogram().stats()


@dataclass(slots=True)
class _Row:
    """The values of one series of each family; copied, so that they belong together."""

    labels: tuple[str, ...]
    counts: tuple[int, ...]
    gauges: tuple[int, ...]
    next_due_ms: int | None = None
    oldest_ready_age_ms: int = 0
    lateness: HistogramStats = _no_lateness
    paced_lateness: HistogramStats = _no_lateness

    def add(self, other: _Row) -> None:
        self.counts = tuple(map(sum, zip(self.counts, other.counts, strict=True)))
        self.gauges = tuple(map(sum, zip(self.gauges, other.gauges, strict=True)))
        if other.next_due_ms is not None:
            own = other.next_due_ms if self.next_due_ms is None else self.next_due_ms
            self.next_due_ms = min(own, other.next_due_ms)
        self.oldest_ready_age_ms = max(self.oldest_ready_age_ms, other.oldest_ready_age_ms)
        if other.lateness is not _no_lateness:
            self.lateness = self.lateness.plus(other.lateness)
        if other.paced_lateness is not _no_lateness:
            self.paced_lateness = self.paced_lateness.plus(other.paced_lateness)


class BrokerCollector(Collector):
    """Turns snapshots into the metrics `postdate_*`.

    At most `series_max` topics and as many subscriptions have series of their own, the first of the snapshot;
    the others are summed under `OTHER`. A sum falls when something is deleted; Prometheus takes that for a
    restart.
    """

    def __init__(
        self, snapshot: Callable[[], BrokerSnapshot], *, version: str, series_max: int = 1_000
    ) -> None:
        self._snapshot = snapshot
        self._version = version
        self._series_max = series_max
        self._process = ProcessCollector(registry=None)

    def collect(self) -> Iterator[Metric]:
        """All families at once, for a registry. A broker's own scrapes use `render`."""
        family: Metric | None = None
        for part in self._parts():
            if part is None:
                continue
            if family is not None and family.name == part.name:
                family.samples.extend(part.samples)
                continue
            if family is not None:
                yield family
            family = part
        if family is not None:
            yield family

    async def render(self) -> bytes:
        """The text of /metrics; lets the loop run about every millisecond."""
        texts: list[bytes] = []
        name = ""
        for part in self._parts():
            if part is not None:
                text = generate_latest(_Single(part))
                # A family's later parts come without its two lines of help and type.
                texts.append(text if part.name != name else text.split(b"\n", 2)[2])
                name = part.name
            await asyncio.sleep(0)
        return b"".join(texts)

    def _parts(self) -> Iterator[Metric | None]:
        """Families in parts of at most about `_SLICE_SAMPLES` samples; None is a mere pause."""
        snapshot = self._snapshot()
        yield from self._broker_parts(snapshot)
        yield from self._process.collect()
        yield from due_within_parts(snapshot.due_within)
        topics: list[_Row] = []
        yield from self._gather(map(_topic_row, snapshot.topics), (OTHER,), topics)
        yield from _count_parts(TOPIC_COUNTERS, ("topic",), topics)
        yield from _gauge_parts(TOPIC_GAUGES, ("topic",), topics)
        yield from _next_due_parts(topics)
        subscriptions: list[_Row] = []
        yield from self._gather(map(_subscription_row, snapshot.subscriptions), (OTHER, OTHER), subscriptions)
        labels = ("topic", "subscription")
        yield from _count_parts(SUBSCRIPTION_COUNTERS, labels, subscriptions)
        yield from _gauge_parts(SUBSCRIPTION_GAUGES, labels, subscriptions)
        yield from _age_parts(labels, subscriptions)
        yield from _dropped_parts(labels, subscriptions)
        yield from _lateness_parts("delivery_lateness_seconds", labels, subscriptions, attrgetter("lateness"))
        yield from _lateness_parts(
            "paced_delivery_lateness_seconds", labels, subscriptions, attrgetter("paced_lateness")
        )

    def _gather(
        self, rows: Iterator[_Row], other_labels: tuple[str, ...], into: list[_Row]
    ) -> Iterator[None]:
        """Copy the rows, at most `series_max` of them and their rest summed; yields to pause."""
        other: _Row | None = None
        while step := list(islice(rows, _SLICE_ROWS)):
            for row in step:
                if len(into) < self._series_max:
                    into.append(row)
                elif other is None:
                    other = row
                    other.labels = other_labels
                else:
                    other.add(row)
            yield None
        if other is not None:
            into.append(other)

    def _broker_parts(self, snapshot: BrokerSnapshot) -> Iterator[Metric]:
        counters = snapshot.counters
        build = gauge("build_info", ("version", "python_version"))
        build.add_metric((self._version, platform.python_version()), 1)
        yield build
        for name in BROKER_COUNTERS:
            yield counter(name, value=getattr(counters, name))
        yield _labelled("refused_requests", ("reason",), _single(sorted(counters.refusals.items())))
        yield _labelled(
            "index_operations", ("operation", "result"), sorted(counters.index_operations.items())
        )
        yield _labelled("compactions", ("result",), _single(counters.compactions.items()))
        yield _labelled("auth_failures", ("reason",), _single(counters.auth_failures.items()))
        yield _labelled("spans", ("result",), _single(counts_of_spans()))
        yield _labelled("limit_refusals", ("limit", "key"), sorted(counters.limit_refusals.items()))
        yield from _limit_totals(sorted(counters.limit_totals.items()))
        yield _labelled("security_reloads", ("what", "result"), sorted(counters.security_reloads.items()))
        for name, value in (
            ("ready", int(snapshot.ready)),
            ("recovery_seconds", counters.recovery_seconds),
            ("tls_certificate_expiry_timestamp_seconds", counters.tls_expires_at_seconds),
            ("backup_last_success_timestamp_seconds", counters.backup_last_ms / 1000),
            ("backup_last_duration_seconds", counters.backup_last_seconds),
            ("backup_last_bytes", counters.backup_last_bytes),
            ("journal_pending_bytes", snapshot.journal_pending_bytes),
            ("disk_free_bytes", snapshot.disk_free_bytes),
            ("disk_reserve_bytes", snapshot.disk_reserve_bytes),
            ("dedup_memory_bytes", snapshot.dedup_memory_bytes),
            ("topics", snapshot.topics_count),
            ("subscriptions", snapshot.subscriptions_count),
        ):
            yield gauge(name, value=value)
        for attribute, name in BROKER_HISTOGRAMS:
            stats = getattr(counters, attribute).stats()
            family = histogram(name)
            family.add_metric((), stats.cumulative(), stats.sum_seconds)
            yield family
        if snapshot.cluster is not None:
            yield from _cluster_parts(snapshot.cluster)


def _limit_totals(totals: Iterable[tuple[tuple[str, str], tuple[int, int]]]) -> Iterator[Metric]:
    used, allowed = gauge("limit_used", ("limit", "key")), gauge("limit_allowed", ("limit", "key"))
    for labels, (count, most) in totals:
        used.add_metric(labels, count)
        allowed.add_metric(labels, most)
    yield used
    yield allowed


def _cluster_parts(snapshot: ClusterSnapshot) -> Iterator[Metric]:
    role = gauge("role", ("role",))
    for name, holds in (("owner", snapshot.is_owner), ("standby", not snapshot.is_owner)):
        role.add_metric((name,), int(holds))
    yield role
    yield counter("take_overs", value=snapshot.take_overs)
    for name, value in (
        ("epoch", snapshot.epoch),
        ("lease_seconds_left", snapshot.lease_seconds_left),
        ("standby_lag_records", snapshot.standby_lag_records),
        ("standby_lag_seconds", snapshot.standby_lag_seconds),
        ("base_age_seconds", snapshot.base_age_seconds),
        ("log_bytes", snapshot.log_bytes),
        ("clock_skew_seconds", snapshot.clock_skew_seconds),
    ):
        yield gauge(name, value=value)


@dataclass(frozen=True, slots=True)
class _Single:
    """One family in the place of a registry."""

    family: Metric

    def collect(self) -> Iterable[Metric]:
        return (self.family,)


def _labelled(
    name: str, labels: tuple[str, ...], counts: Iterable[tuple[tuple[str, ...], int]]
) -> CounterMetricFamily:
    family = counter(name, labels)
    for values, count in counts:
        family.add_metric(values, count)
    return family


def _single(counts: Iterable[tuple[str, int]]) -> Iterator[tuple[tuple[str], int]]:
    """Counts by the value of one label."""
    return (((value,), count) for value, count in counts)


def _topic_row(topic: TopicSnapshot) -> _Row:
    return _Row(
        (topic.topic,),
        _topic_counts(topic.counters),
        (
            topic.scheduled,
            topic.storage_bytes,
            topic.index_bytes,
            topic.index_buckets,
            topic.index_loaded,
            topic.snapshot_bytes,
            topic.key_runs,
            topic.key_bytes,
            topic.settled_keys,
        ),
        topic.next_due_ms,
    )


def _subscription_row(subscription: SubscriptionSnapshot) -> _Row:
    counters = subscription.counters
    stats, paced_stats = counters.lateness.stats(), counters.paced_lateness.stats()
    return _Row(
        (subscription.topic, subscription.subscription),
        _subscription_counts(counters),
        (
            subscription.scheduled,
            subscription.ready,
            subscription.leased,
            subscription.consumers,
            subscription.dead_letters,
            int(subscription.paused),
            int(subscription.paced),
        ),
        oldest_ready_age_ms=subscription.oldest_ready_age_ms,
        lateness=stats if stats.count else _no_lateness,
        paced_lateness=paced_stats if paced_stats.count else _no_lateness,
    )


def _count_parts(names: tuple[str, ...], labels: tuple[str, ...], rows: list[_Row]) -> Iterator[Metric]:
    for index, name in enumerate(names):
        for some in _sliced(rows, 1):
            family = counter(name, labels)
            for row in some:
                family.add_metric(row.labels, row.counts[index])
            yield family


def _gauge_parts(names: tuple[str, ...], labels: tuple[str, ...], rows: list[_Row]) -> Iterator[Metric]:
    for index, name in enumerate(names):
        for some in _sliced(rows, 1):
            family = gauge(name, labels)
            for row in some:
                family.add_metric(row.labels, row.gauges[index])
            yield family


def _next_due_parts(rows: list[_Row]) -> Iterator[Metric]:
    for some in _sliced(rows, 1):
        family = gauge("next_due_timestamp_seconds", ("topic",))
        for row in some:
            if row.next_due_ms is not None:
                family.add_metric(row.labels, row.next_due_ms / 1000)
        yield family


def _age_parts(labels: tuple[str, ...], rows: list[_Row]) -> Iterator[Metric]:
    for some in _sliced(rows, 1):
        family = gauge("oldest_ready_age_seconds", labels)
        for row in some:
            family.add_metric(row.labels, row.oldest_ready_age_ms / 1000)
        yield family


def _dropped_parts(labels: tuple[str, ...], rows: list[_Row]) -> Iterator[Metric]:
    first = len(SUBSCRIPTION_COUNTERS)
    for some in _sliced(rows, len(DROPPED_REASONS)):
        family = counter("last_look_dropped_messages", (*labels, "reason"))
        for row in some:
            for index, (_, reason) in enumerate(DROPPED_REASONS):
                family.add_metric((*row.labels, reason), row.counts[first + index])
        yield family


def _lateness_parts(
    name: str, labels: tuple[str, ...], rows: list[_Row], lateness_of: Callable[[_Row], HistogramStats]
) -> Iterator[Metric]:
    for some in _sliced(rows, len(_no_lateness.counts) + 2):
        family = histogram(name, labels)
        for row in some:
            # Most subscriptions of a large broker are idle: their twenty empty lines are left out.
            if (lateness := lateness_of(row)) is not _no_lateness:
                family.add_metric(row.labels, lateness.cumulative(), lateness.sum_seconds)
        yield family


def _sliced(rows: list[_Row], samples_per_row: int) -> Iterator[list[_Row]]:
    """Rows for one part each; a family without rows still has one, with its help."""
    step = max(1, _SLICE_SAMPLES // samples_per_row)
    for start in range(0, max(1, len(rows)), step):
        yield rows[start : start + step]
