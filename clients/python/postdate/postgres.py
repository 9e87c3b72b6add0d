"""Outbox and inbox in PostgreSQL: messages that are sent if a transaction commits, effects that take place once.

    with connection.transaction():
        connection.execute("UPDATE orders SET state = 'placed' WHERE id = %s", (order_id,))
        connection.execute(*postgres.outgoing("reminders", payload, deliver_after=timedelta(days=3)))

A relay (`postdate outbox relay`, or `OutboxRelay`) sends what was committed. Rows leave the table once the broker has
stored their messages.

`outgoing` and `first_time` return a statement and its parameters, for whatever executes `%s`: a connection or cursor of
psycopg, synchronous or not, or a cursor of Django. `SCHEMA` makes the tables, in the first schema of `search_path`.

Needs psycopg: pip install 'postdate[postgres]'.
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
from collections import defaultdict
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, LiteralString, NamedTuple, Protocol

from postdate import _trace
from postdate._backoff import Backoff
from postdate._encode import encode_messages
from postdate.errors import (
    AlreadyExists,
    FailedPrecondition,
    InvalidRequest,
    LimitReached,
    NotFound,
    PartlyStored,
    PermissionDenied,
    PostdateError,
    Unsupported,
)
from postdate.model import MessageId, OutgoingMessage

try:
    import psycopg
    from psycopg.rows import class_row
except ImportError as _missing:
    raise ImportError(
        f"postdate.postgres needs psycopg ({_missing}): pip install 'postdate[postgres]'"
    ) from _missing

if TYPE_CHECKING:
    from postdate.client import Client
    from postdate.producer import Producer

__all__ = ["SCHEMA", "OutboxRelay", "RelayCounts", "Statement", "first_time", "outgoing"]

_log = logging.getLogger(__name__)

SCHEMA = """\
-- Messages that were not sent yet. A row with an error was refused by the broker: it stays, and is not sent again
-- until its error is set to NULL.
CREATE TABLE IF NOT EXISTS postdate_outbox (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    topic text NOT NULL,
    payload bytea NOT NULL,
    key text NOT NULL DEFAULT '',
    properties jsonb NOT NULL DEFAULT '{}' CHECK (jsonb_typeof(properties) = 'object'),
    schedule_key text NOT NULL DEFAULT '',
    deliver_at timestamptz,
    ttl interval,
    added_at timestamptz NOT NULL DEFAULT now(),
    sequence_id bigint,
    error text
);
-- Also for tables that were made before there was one.
ALTER TABLE postdate_outbox ADD COLUMN IF NOT EXISTS traceparent text NOT NULL DEFAULT '';
CREATE INDEX IF NOT EXISTS postdate_outbox_numbered ON postdate_outbox (sequence_id) WHERE sequence_id IS NOT NULL;
CREATE INDEX IF NOT EXISTS postdate_outbox_refused ON postdate_outbox (id) WHERE error IS NOT NULL;
CREATE SEQUENCE IF NOT EXISTS postdate_outbox_sequence;
-- The name under which the broker knows the outbox: another one for each database.
CREATE TABLE IF NOT EXISTS postdate_outbox_producer (
    single boolean PRIMARY KEY DEFAULT true CHECK (single),
    name text NOT NULL
);
INSERT INTO postdate_outbox_producer (name) VALUES ('outbox-' || gen_random_uuid()) ON CONFLICT DO NOTHING;
-- Messages whose effect has taken place.
CREATE TABLE IF NOT EXISTS postdate_inbox (
    subscription text NOT NULL,
    message text NOT NULL,
    seen_at timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (subscription, message)
);
CREATE INDEX IF NOT EXISTS postdate_inbox_seen ON postdate_inbox (seen_at);
"""
"""Statements that make the tables, and change nothing where they are as they should be."""


class Statement(NamedTuple):
    """A statement and its parameters: `connection.execute(*statement)`."""

    query: LiteralString
    parameters: tuple[Any, ...]


def outgoing(
    topic: str,
    payload: bytes,
    *,
    key: str = "",
    properties: dict[str, str] | None = None,
    deliver_at: datetime | None = None,
    deliver_after: timedelta | None = None,
    schedule_key: str = "",
    ttl: timedelta | None = None,
) -> Statement:
    """Return the statement that puts a message into the outbox, in the transaction that executes it.

    The arguments are those of `Producer.send`; `deliver_after` counts from the beginning of the transaction. With
    `postdate.otel` the message is linked to the span in which this is called.
    """
    message = OutgoingMessage(payload, key, properties, deliver_at, deliver_after, schedule_key, ttl)
    encode_messages(
        [message], None, ""
    )  # which says what cannot be sent, while the caller can still do something
    if deliver_after is not None and deliver_after > datetime.max.replace(tzinfo=UTC) - datetime.now(UTC):
        raise ValueError("deliver_after ends after the year 9999")
    return Statement(
        "INSERT INTO postdate_outbox (topic, payload, key, properties, schedule_key, traceparent, ttl, deliver_at)"
        " VALUES (%s, %s, %s, %s::jsonb, %s, %s, %s, coalesce(%s::timestamptz, now() + %s::interval))",
        (
            topic,
            payload,
            key,
            json.dumps(properties or {}),
            schedule_key,
            _trace.current_traceparent(),
            ttl,
            deliver_at,
            deliver_after,
        ),
    )


class InboxMessage(Protocol):
    """A message that a subscription received: a `postdate.Message`, or one of `postdate.sync`."""

    @property
    def id(self) -> MessageId: ...
    @property
    def topic(self) -> str: ...
    @property
    def subscription(self) -> str: ...
    @property
    def publish_time(self) -> datetime: ...


def first_time(message: InboxMessage) -> Statement:
    """Return the statement that notes a message as handled; it changes a row the first time, and none later.

    In one transaction with the effect of the message:

        cursor.execute(*postgres.first_time(message))
        if cursor.rowcount:
            ...  # the effect

    Another transaction with the same message waits for this one to end. Rows may be deleted once their messages
    cannot come again: DELETE FROM postdate_inbox WHERE seen_at < now() - interval '30 days'.
    """
    # A message's id alone may be another message's after the broker was restored to an earlier time.
    name = f"{message.id} {message.publish_time.isoformat()}"
    return Statement(
        "INSERT INTO postdate_inbox (subscription, message) VALUES (%s, %s) ON CONFLICT DO NOTHING",
        (f"{message.topic}/{message.subscription}", name),
    )


_LOCK = 0x706F_7374_6461_7465  # "postdate"
_BATCH = 1_000
_HELD_TOPICS_MAX = 1_000
# Times as numbers: PostgreSQL has some that Python has not, and one such row must not stop the others.
_COLUMNS = (
    "o.id, o.topic, o.payload, o.key, o.properties, o.schedule_key, o.traceparent, o.sequence_id,"
    " extract(epoch FROM o.deliver_at)::float8 AS deliver_at_s, extract(epoch FROM o.ttl)::float8 AS ttl_s"
)
_NUMBERED = f"""
SELECT {_COLUMNS} FROM postdate_outbox o
WHERE sequence_id IS NOT NULL AND error IS NULL AND topic <> ALL(%s) ORDER BY sequence_id LIMIT %s
"""
_NUMBER = f"""
WITH numbered AS (
    SELECT id, nextval('postdate_outbox_sequence') AS sequence_id
    FROM (
        SELECT id FROM postdate_outbox
        WHERE sequence_id IS NULL AND error IS NULL AND topic <> ALL(%s) ORDER BY id LIMIT %s
    ) AS next
)
UPDATE postdate_outbox o SET sequence_id = numbered.sequence_id FROM numbered WHERE o.id = numbered.id
RETURNING {_COLUMNS}
"""
# Microseconds: no number is given twice, even if the database was restored to an earlier state.
_BEGIN = """
SELECT setval('postdate_outbox_sequence', greatest(
    nextval('postdate_outbox_sequence'), (extract(epoch FROM clock_timestamp()) * 1000000)::bigint))
"""
_FINAL = (InvalidRequest, AlreadyExists, NotFound, FailedPrecondition, PermissionDenied, Unsupported)
"""Refusals that a repeat would meet again."""


@dataclass(frozen=True, slots=True)
class _OutboxRow:
    """A message of the outbox, with its sequence id."""

    id: int
    topic: str
    payload: bytes
    key: str
    properties: dict[str, str]
    schedule_key: str
    traceparent: str
    sequence_id: int
    deliver_at_s: float | None
    ttl_s: float | None

    def message(self) -> OutgoingMessage:
        """Raises ValueError for times that no message can have."""
        try:
            deliver_at = None if self.deliver_at_s is None else datetime.fromtimestamp(self.deliver_at_s, UTC)
        except (OverflowError, ValueError):
            raise ValueError("deliver_at is not between the years 1 and 9999") from None
        try:
            ttl = None if self.ttl_s is None else timedelta(seconds=self.ttl_s)
        except OverflowError:
            raise ValueError("ttl is too long") from None
        return OutgoingMessage(
            self.payload,
            key=self.key,
            properties=self.properties,
            deliver_at=deliver_at,
            schedule_key=self.schedule_key,
            ttl=ttl,
            traceparent=self.traceparent,
            sequence_id=self.sequence_id,
        )


@dataclass(slots=True)
class RelayCounts:
    """Messages since the relay was made: stored by the broker, and refused by it."""

    sent: int = 0
    refused: int = 0


class OutboxRelay:
    """Sends the messages of an outbox to a broker, in the order in which they were put there.

    Rows get rising sequence ids before they are sent, in a transaction of their own; so what is sent again after a
    crash of the relay, the broker or the database is known as a repeat and stored once, within the topic's
    `dedup_window`. If a message was sent and not removed for longer than that, it may be stored twice, which a
    warning says; none is ever lost.

    A topic that takes no more for now, such as by a quota, holds up no other: its rows wait until it is tried again.

    Of several relays of one database one works, and the others wait until its connection has ended.
    """

    def __init__(
        self, client: Client, conninfo: str = "", *, poll: timedelta = timedelta(milliseconds=100)
    ) -> None:
        """`conninfo`: as libpq takes it; the variables of the environment count too. `poll`: how often an empty outbox
        is looked at."""
        self.counts: RelayCounts = RelayCounts()
        self._client = client
        self._conninfo = conninfo
        self._poll_seconds = poll.total_seconds()

    async def run(self) -> None:
        """Relay until cancelled. Failures of the database and of the broker are waited out."""
        backoff = Backoff(random.Random())
        while True:
            try:
                connection = await psycopg.AsyncConnection.connect(self._conninfo, autocommit=True)
                async with connection, AsyncExitStack() as producers:
                    await self._relay(_Outbox(connection, self._client, producers, self.counts), backoff)
            except psycopg.OperationalError as error:
                _log.warning("The outbox's database cannot be reached; trying again: %s", error)
            except PostdateError as error:
                _log.warning("The outbox's messages could not be sent; trying again: %s", error)
            await asyncio.sleep(backoff.next_s())

    async def _relay(self, outbox: _Outbox, backoff: Backoff) -> None:
        await outbox.begin()
        while True:
            rows = await outbox.next_rows()
            if not rows:
                await asyncio.sleep(self._poll_seconds)
                continue
            await outbox.send(rows)
            backoff.succeeded()


@dataclass(slots=True)
class _FullTopic:
    """A topic that takes no more for now."""

    backoff: Backoff
    until: float = 0.0  # of the loop's clock


class _Outbox:
    """The outbox of a connection that holds its lock.

    Rows with numbers are sent before new ones get some: those of a relay before this one, and those of a topic that
    is tried again. So each topic gets its messages in the order of their numbers.
    """

    def __init__(
        self,
        connection: psycopg.AsyncConnection[Any],
        client: Client,
        producers: AsyncExitStack,
        counts: RelayCounts,
    ) -> None:
        self._connection = connection
        self._client = client
        self._stack = producers
        self._counts = counts
        self._producers: dict[str, Producer] = {}
        self._name = ""
        self._held: dict[str, _FullTopic] = {}
        self._has_numbered = True  # some rows may have numbers, and their topics are not held

    async def begin(self) -> None:
        """Wait until no other relay works, and go on with numbers that were never given."""
        cursor = await self._connection.execute("SELECT pg_try_advisory_lock(%s)", (_LOCK,))
        if await cursor.fetchone() == (False,):
            _log.info("Another relay sends the messages of this outbox; waiting until it ends")
            await self._connection.execute("SELECT pg_advisory_lock(%s)", (_LOCK,))
        _log.info("Sending the messages of the outbox")
        cursor = await self._connection.execute("SELECT name FROM postdate_outbox_producer")
        row = await cursor.fetchone()
        assert row is not None, "the schema makes it"
        self._name = row[0]
        await self._connection.execute(_BEGIN)

    async def next_rows(self) -> list[_OutboxRow]:
        """Return rows to be sent now, in the order of their numbers."""
        now = asyncio.get_running_loop().time()
        held = [topic for topic, each in self._held.items() if each.until > now]
        if self._has_numbered or len(held) < len(self._held):
            rows = await self._rows(_NUMBERED, held, _BATCH)
            if rows:
                return rows
            self._has_numbered = False
            self._held = {topic: self._held[topic] for topic in held}  # the others have nothing to send
        return sorted(await self._rows(_NUMBER, held, _BATCH), key=lambda row: row.sequence_id)

    async def _rows(self, query: LiteralString, *parameters: Any) -> list[_OutboxRow]:
        async with self._connection.cursor(row_factory=class_row(_OutboxRow)) as cursor:
            await cursor.execute(query, parameters)
            return await cursor.fetchall()

    async def send(self, rows: Sequence[_OutboxRow]) -> None:
        """Send rows, and remove those whose messages are stored."""
        by_topic: dict[str, list[_OutboxRow]] = defaultdict(list)
        for row in rows:
            by_topic[row.topic].append(row)
        # All topics: what one of them cannot take holds up none of the others' rows.
        failures = await asyncio.gather(
            *(self._send_or_hold(topic, of_topic) for topic, of_topic in by_topic.items()),
            return_exceptions=True,
        )
        for failure in failures:
            if failure is not None:
                raise failure

    async def _send_or_hold(self, topic: str, rows: list[_OutboxRow]) -> None:
        try:
            await self._send_topic(topic, rows)
        except LimitReached as error:
            if topic not in self._held:
                if len(self._held) == _HELD_TOPICS_MAX:
                    raise  # all wait
                _log.warning("Topic %s takes no more of the outbox's messages for now: %s", topic, error)
                self._held[topic] = _FullTopic(Backoff(random.Random()))
            held = self._held[topic]
            held.until = asyncio.get_running_loop().time() + held.backoff.next_s(error.retry_after)
        else:
            if self._held.pop(topic, None) is not None:
                self._has_numbered = True  # those beyond the first list
                _log.warning("Topic %s takes the outbox's messages again", topic)

    async def _send_topic(self, topic: str, rows: list[_OutboxRow]) -> None:
        try:
            await (await self._producer(topic)).send_many([row.message() for row in rows])
        except (TypeError, ValueError, PostdateError) as failure:
            error = failure.__cause__ if isinstance(failure, PartlyStored) else failure
            if isinstance(error, PostdateError) and error.reason == "SEQUENCE_TOO_OLD":
                await self._number_anew(topic, rows)
            elif not isinstance(failure, (TypeError, ValueError, PartlyStored, LimitReached, *_FINAL)):
                raise
            elif len(rows) > 1:
                # One of them is refused, or there is room for some; the others are repeats if they were stored. Where
                # there is none, the first half ends with the refusal of one row, and the second one is not sent.
                half = len(rows) // 2
                await self._send_topic(topic, rows[:half])
                await self._send_topic(topic, rows[half:])
            elif isinstance(failure, LimitReached):
                raise
            else:
                await self._set_aside(rows[0], failure)
            return
        await self._execute("DELETE FROM postdate_outbox WHERE id = ANY(%s)", [row.id for row in rows])
        self._counts.sent += len(rows)

    async def _producer(self, topic: str) -> Producer:
        if topic not in self._producers:
            producer = self._client.producer(topic, producer_name=self._name)
            self._producers[topic] = await self._stack.enter_async_context(producer)
        return self._producers[topic]

    async def _number_anew(self, topic: str, rows: list[_OutboxRow]) -> None:
        _log.warning(
            "Topic %s no longer knows whether %d messages of the outbox are stored; they are sent again, and may be"
            " stored twice",
            topic,
            len(rows),
        )
        await self._execute(
            "UPDATE postdate_outbox SET sequence_id = NULL WHERE id = ANY(%s)", [row.id for row in rows]
        )

    async def _set_aside(self, row: _OutboxRow, error: Exception) -> None:
        _log.error(
            "Message %d of the outbox, to topic %s, is refused and set aside: %s", row.id, row.topic, error
        )
        await self._execute(
            "UPDATE postdate_outbox SET error = %s, sequence_id = NULL WHERE id = %s", str(error), row.id
        )
        self._counts.refused += 1

    async def _execute(self, query: LiteralString, *parameters: Any) -> None:
        await self._connection.execute(query, parameters)
