"""`postdate check`: one line for a monitor, and 0 or 6."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

import click

import postdate
from postdate.commands.completion import TOPIC
from postdate.commands.output import emit_one, plain
from postdate.commands.settings import EXIT_CHECK_FAILED, Command, Settings, describe, run
from postdate.commands.values import DURATION, counted, show_duration

_COUNT = click.IntRange(0)


@dataclass(frozen=True)
class CheckLimits:
    """The most, or the least, that is still good; None: no limit."""

    max_lateness: timedelta | None = None
    max_ready_age: timedelta | None = None
    max_ready: int | None = None
    min_consumers: int | None = None
    max_dead_letters: int | None = None


@dataclass(frozen=True)
class CheckedValue:
    """A number of a topic or subscription, and its limit."""

    subject: str
    check: str
    value: timedelta | int
    limit: timedelta | int
    is_minimum: bool = False
    note: str = ""

    @property
    def is_good(self) -> bool:
        return self.value >= self.limit if self.is_minimum else self.value <= self.limit  # type: ignore[operator]

    @property
    def text(self) -> str:
        bound = "at least" if self.is_minimum else "at most"
        value = f"{self.check.replace('_', ' ')} {_show(self.value)}"
        return f"{self.subject}: {value}, {bound} {_show(self.limit)}{self.note}"

    @property
    def performance(self) -> str:
        """As Nagios reads it: 'label'=value;warn;crit."""
        unit = "s" if isinstance(self.value, timedelta) else ""
        critical = f"{_number(self.limit)}:" if self.is_minimum else f"{_number(self.limit)}"
        return f"'{self.subject} {self.check}'={_number(self.value)}{unit};;{critical}"

    @property
    def record(self) -> dict[str, Any]:
        topic, _, subscription = self.subject.partition("/")
        suffix = "_ms" if isinstance(self.value, timedelta) else ""
        return {
            "topic": topic,
            "subscription": subscription or None,
            "check": f"{self.check}{suffix}",
            "value": _plain(self.value),
            "limit": _plain(self.limit),
            "ok": self.is_good,
        }


@dataclass
class Verdict:
    """Result of a check; `problem` says why there was nothing to hold against limits."""

    problem: str = ""
    version: str = ""
    topics: int = 0
    subscriptions: int = 0
    findings: list[CheckedValue] = field(default_factory=list)

    @property
    def failures(self) -> list[CheckedValue]:
        return [each for each in self.findings if not each.is_good]

    @property
    def is_good(self) -> bool:
        return not self.problem and not self.failures

    def line(self) -> str:
        if self.problem:
            return f"POSTDATE CRITICAL - {self.problem}"
        if self.failures:
            text = f"POSTDATE CRITICAL - {'; '.join(each.text for each in self.failures)}"
        else:
            seen = f"{counted(self.topics, 'topic')}, {counted(self.subscriptions, 'subscription')}"
            text = f"POSTDATE OK - version {self.version}, {seen}"
        performance = " ".join(each.performance for each in self.findings)
        return f"{text} | {performance}" if performance else text

    def record(self) -> dict[str, Any]:
        return {
            "ok": self.is_good,
            "problem": self.problem or None,
            "version": self.version or None,
            "topics": self.topics,
            "subscriptions": self.subscriptions,
            "findings": [each.record for each in self.findings],
        }


@click.command("check", cls=Command, short_help="Check a broker for a monitor: one line, exit code 0 or 6.")
@click.argument("names", type=TOPIC, nargs=-1, metavar="[TOPIC[/SUBSCRIPTION]]...")
@click.option(
    "--max-lateness",
    type=DURATION,
    help="Topics: fail if a due message waits longer than this to be handed to its subscriptions.",
)
@click.option(
    "--max-ready-age",
    type=DURATION,
    help="Subscriptions: fail if the oldest ready message is older than this.",
)
@click.option("--max-ready", type=_COUNT, help="Subscriptions: fail if more messages are ready.")
@click.option("--min-consumers", type=_COUNT, help="Subscriptions: fail if fewer consumers are connected.")
@click.option(
    "--max-dead-letters",
    type=_COUNT,
    help="Subscriptions: fail if there are more dead letters.",
)
@click.pass_context
def check(ctx: click.Context, /, names: tuple[str, ...], **limits: Any) -> None:
    """Check that the broker serves and that counts are within limits; prints one line, exit code 0 or 6.

    Checks all topics and subscriptions, or those named. Without limits the check passes if the broker answers and
    these exist. If the broker cannot be reached, the exit code is 6 too.
    """
    for name in names:
        if name.endswith("/"):  # a script's variable was empty: the topic alone would pass for it
            raise click.UsageError(f"{name!r} names no subscription: write TOPIC or TOPIC/SUBSCRIPTION")
    settings = ctx.ensure_object(Settings)
    verdict = run(_check(settings, names, CheckLimits(**limits)))
    if settings.output == "table":
        click.echo(plain(verdict.line()))
    else:
        emit_one(settings, verdict.record())
    ctx.exit(0 if verdict.is_good else EXIT_CHECK_FAILED)


async def _check(settings: Settings, names: tuple[str, ...], limits: CheckLimits) -> Verdict:
    try:
        async with settings.client() as client:
            info = await client.server_info()
            stats = await client.stats(*dict.fromkeys(name.partition("/")[0] for name in names))
    except postdate.PostdateError as error:
        return Verdict(describe(error))
    return judge(info, stats, names, limits)


def judge(
    info: postdate.ServerInfo,
    stats: tuple[postdate.TopicStats, ...],
    names: tuple[str, ...],
    limits: CheckLimits,
) -> Verdict:
    """Hold counts against limits. Pure."""
    verdict = Verdict(version=info.version)
    for topic in stats:
        wanted = {rest for name, _, rest in (each.partition("/") for each in names) if name == topic.topic}
        known = {each.name for each in topic.subscriptions}
        if missing := sorted(wanted - known - {""}):
            verdict.problem = f"there is no subscription {missing[0]} of {topic.topic}"
            return verdict
        chosen = [each for each in topic.subscriptions if not wanted or "" in wanted or each.name in wanted]
        if "" in wanted and not chosen and limits.min_consumers:
            verdict.problem = f"{topic.topic} has no subscription, so nobody consumes it"
            return verdict
        verdict.topics += 1
        verdict.subscriptions += len(chosen)
        verdict.findings += _of_topic(topic, info.broker_time, limits)
        for each in chosen:
            verdict.findings += _of_subscription(f"{topic.topic}/{each.name}", each, limits)
    return verdict


def _of_topic(topic: postdate.TopicStats, now: datetime, limits: CheckLimits) -> Iterator[CheckedValue]:
    if limits.max_lateness is not None:
        late = timedelta(0)
        if topic.next_due_time is not None:
            late = max(late, now - topic.next_due_time)
        yield CheckedValue(topic.topic, "lateness", late, limits.max_lateness)


def _of_subscription(
    name: str, stats: postdate.SubscriptionStats, limits: CheckLimits
) -> Iterator[CheckedValue]:
    note = " (paused)" if stats.paused else " (paced)" if stats.paced else ""
    if limits.max_ready_age is not None:
        yield CheckedValue(name, "ready_age", stats.oldest_ready_age, limits.max_ready_age, note=note)
    if limits.max_ready is not None:
        yield CheckedValue(name, "ready", stats.ready_messages, limits.max_ready, note=note)
    if limits.min_consumers is not None:
        yield CheckedValue(
            name, "consumers", stats.consumers, limits.min_consumers, is_minimum=True, note=note
        )
    if limits.max_dead_letters is not None:
        yield CheckedValue(name, "dead_letters", stats.dead_letter_messages, limits.max_dead_letters)


def _show(value: timedelta | int) -> str:
    return show_duration(value) if isinstance(value, timedelta) else f"{value:,}"


def _number(value: timedelta | int) -> str:
    return f"{value.total_seconds():g}" if isinstance(value, timedelta) else str(value)


def _plain(value: timedelta | int) -> int:
    return round(value / timedelta(milliseconds=1)) if isinstance(value, timedelta) else value
