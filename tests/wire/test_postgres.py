"""Outbox and inbox of `postdate.postgres`, with a real PostgreSQL and a real broker."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from itertools import count

import psycopg
import pytest
from opentelemetry.sdk.trace import TracerProvider

import postdate
import postdate.otel
import postdate.sync
from postdate import cli, postgres
from tests.depth import at_depth, sampled
from tests.postgres_server import PostgresServer, new_database, postgres_server
from tests.process.fork_server import ForkServer
from tests.wire.conftest import Wire, within

EARLIEST = postdate.InitialPosition.EARLIEST
POLL = timedelta(milliseconds=10)
names = count()


@pytest.fixture(scope="module")
def server() -> Iterator[PostgresServer]:
    with postgres_server() as server:
        yield server


@pytest.fixture
def conninfo(server: PostgresServer) -> str:
    conninfo = new_database(server, f"outbox{next(names)}")
    with psycopg.connect(conninfo) as connection:
        connection.execute(postgres.SCHEMA)
    return conninfo


@pytest.fixture
async def client(wire: Wire) -> AsyncIterator[postdate.Client]:
    async with postdate.connect(wire.server.grpc_address, retry_for=timedelta(seconds=5)) as connected:
        yield connected


def put(conninfo: str, *payloads: bytes, topic: str = "orders", **fields: object) -> None:
    with psycopg.connect(conninfo) as connection:
        for payload in payloads:
            connection.execute(*postgres.outgoing(topic, payload, **fields))  # type: ignore[arg-type]


def rows(conninfo: str, columns: str) -> list[tuple[object, ...]]:
    with psycopg.connect(conninfo) as connection:
        return connection.execute(f"SELECT {columns} FROM postdate_outbox ORDER BY id").fetchall()  # type: ignore[arg-type]


async def until(conninfo: str, condition: str) -> None:
    """Return once a condition holds, which may name the outbox."""
    async with await psycopg.AsyncConnection.connect(conninfo, autocommit=True) as connection:
        async with asyncio.timeout(20):
            while not (await (await connection.execute(f"SELECT {condition}")).fetchone())[0]:  # type: ignore[arg-type, index]
                await asyncio.sleep(0.01)


EMPTY = "NOT EXISTS (SELECT FROM postdate_outbox)"


@asynccontextmanager
async def relaying(client: postdate.Client, conninfo: str) -> AsyncIterator[postgres.OutboxRelay]:
    relay = postgres.OutboxRelay(client, conninfo, poll=POLL)
    running = asyncio.create_task(relay.run())
    try:
        yield relay
    finally:
        running.cancel()
        await asyncio.wait([running])
        assert running.cancelled(), running.exception()


async def relay_all(client: postdate.Client, conninfo: str, condition: str = EMPTY) -> None:
    async with relaying(client, conninfo):
        await until(conninfo, condition)


async def payloads_of(client: postdate.Client, topic: str, *, end: bytes = b"end") -> list[bytes]:
    """Return what a new subscription receives until a message that is sent now."""
    async with client.producer(topic) as producer:
        await producer.send(end)
    found: list[bytes] = []
    async with client.subscribe(topic, f"s{next(names)}", initial_position=EARLIEST) as subscription:
        while not found or found[-1] != end:
            for message in await within(subscription.receive_many(100)):
                found.append(message.payload)
                message.ack_nowait()
    return found[:-1]


async def test_what_was_committed_is_sent_in_order_and_what_was_rolled_back_is_not(client, conninfo):
    put(conninfo, b"1", b"2")
    with psycopg.connect(conninfo) as connection:
        connection.execute(*postgres.outgoing("orders", b"never"))
        connection.rollback()
    put(conninfo, *(b"%d" % number for number in range(3, 2_503)))
    await relay_all(client, conninfo)
    assert await payloads_of(client, "orders") == [b"%d" % number for number in range(1, 2_503)]


async def test_a_message_arrives_with_all_its_fields(client, conninfo):
    due = datetime.now(UTC) + timedelta(hours=1)
    put(
        conninfo,
        b"p",
        key="k",
        properties={"a": "ö"},
        deliver_at=due,
        schedule_key="s",
        ttl=timedelta(days=2),
    )
    put(conninfo, b"q", deliver_after=timedelta(days=3))
    await relay_all(client, conninfo)
    first, second = [each async for each in client.schedule.list("orders")]
    assert (first.key, first.properties, first.schedule_key) == ("k", {"a": "ö"}, "s")
    assert abs(first.deliver_at - due) < timedelta(milliseconds=1)
    assert abs(second.deliver_at - datetime.now(UTC) - timedelta(days=3)) < timedelta(minutes=1)


async def test_a_message_is_linked_to_the_span_in_which_it_was_put_there(client, conninfo):
    provider = TracerProvider()
    postdate.otel.instrument(provider)
    try:
        with provider.get_tracer("test").start_as_current_span("place order") as placing:
            put(conninfo, b"1", deliver_after=timedelta(days=1))
        put(conninfo, b"2", deliver_after=timedelta(days=2))
    finally:
        postdate.otel.uninstrument()
    await relay_all(client, conninfo)
    first, second = [each async for each in client.schedule.list("orders")]
    context = placing.get_span_context()
    assert first.traceparent.startswith(f"00-{context.trace_id:032x}-{context.span_id:016x}-")
    assert second.traceparent == ""


async def test_an_outbox_from_before_there_was_a_traceparent_is_brought_up_to_date(client, conninfo):
    with psycopg.connect(conninfo) as connection:
        connection.execute("ALTER TABLE postdate_outbox DROP COLUMN traceparent")
        connection.execute("INSERT INTO postdate_outbox (topic, payload) VALUES ('orders', 'old')")
        connection.execute(postgres.SCHEMA)
    put(conninfo, b"new")
    await relay_all(client, conninfo)
    assert await payloads_of(client, "orders") == [b"old", b"new"]


def test_what_makes_no_sense_is_refused_before_it_is_stored():
    now = datetime.now(UTC)
    with pytest.raises(TypeError, match="bytes"):
        postgres.outgoing("orders", "text")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="not both"):
        postgres.outgoing("orders", b"", deliver_at=now, deliver_after=timedelta(1))
    with pytest.raises(ValueError, match="time zone"):
        postgres.outgoing("orders", b"", deliver_at=now.replace(tzinfo=None))
    with pytest.raises(TypeError, match="deliver_after must be a timedelta"):
        postgres.outgoing("orders", b"", deliver_after=5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="deliver_after is negative"):
        postgres.outgoing("orders", b"", deliver_after=timedelta(-1))
    with pytest.raises(ValueError, match="9999"):
        postgres.outgoing("orders", b"", deliver_after=timedelta(days=4_000_000))
    with pytest.raises(ValueError, match="ttl is negative"):
        postgres.outgoing("orders", b"", ttl=timedelta(-1))
    with pytest.raises(TypeError, match="properties"):
        postgres.outgoing("orders", b"", properties={"a": 1})  # type: ignore[dict-item]


async def test_a_refused_message_is_set_aside_with_the_reason_and_holds_up_no_other(client, conninfo):
    big = bytes(1 << 20) + b"."
    put(conninfo, b"1", big, b"2")
    put(conninfo, b"not a topic", topic="a/b c")
    put(conninfo, b"3")
    with psycopg.connect(conninfo) as connection:
        connection.execute(
            "INSERT INTO postdate_outbox (topic, payload, properties) VALUES ('orders', 'x', '{\"a\": 1}')"
        )
    await relay_all(client, conninfo, "(SELECT bool_and(error IS NOT NULL) FROM postdate_outbox)")
    assert await payloads_of(client, "orders") == [b"1", b"2", b"3"]
    refused = rows(conninfo, "payload, error")
    assert [payload for payload, _ in refused] == [big, b"not a topic", b"x"]
    assert "payload" in str(refused[0][1]) and "a/b c" in str(refused[1][1])
    with psycopg.connect(conninfo) as connection:
        connection.execute(
            "UPDATE postdate_outbox SET error = NULL, payload = 'short' WHERE length(payload) > 1000"
        )
    await relay_all(client, conninfo, "(SELECT count(*) = 2 FROM postdate_outbox)")
    assert b"short" in await payloads_of(client, "orders", end=b"end 2")


@pytest.mark.parametrize(
    ("column", "value", "error"),
    [
        ("deliver_at", "'infinity'", "deliver_at is not between"),
        ("deliver_at", "'-infinity'", "deliver_at is not between"),
        ("deliver_at", "'12978-07-14 22:04:21+00'", "deliver_at is not between"),
        ("ttl", "'100000000 years'", "ttl is too long"),
        ("payload", "repeat('p', 17000000)::bytea", "larger than max"),
    ],
)
async def test_what_no_broker_takes_is_set_aside_and_holds_up_no_other(
    client, conninfo, column, value, error
):
    put(conninfo, b"1")
    with psycopg.connect(conninfo) as connection:
        connection.execute(
            f"INSERT INTO postdate_outbox (topic, payload) VALUES ('orders', 'odd');"
            f" UPDATE postdate_outbox SET {column} = {value} WHERE payload = 'odd'"  # type: ignore[arg-type]
        )
    put(conninfo, b"2")
    await relay_all(client, conninfo, "(SELECT bool_and(error IS NOT NULL) FROM postdate_outbox)")
    assert await payloads_of(client, "orders") == [b"1", b"2"]
    ((found,),) = rows(conninfo, "error")
    assert error in str(found)


async def test_a_topic_without_room_holds_up_no_other_and_goes_on_in_order_once_it_has_some(
    client, conninfo, caplog
):
    await client.topics.create("full", postdate.TopicPolicy(max_pending_messages=4))
    await client.subscriptions.create("full", "s", initial_position=EARLIEST)
    expected = [b"%d" % number for number in range(1_200)]
    put(conninfo, *expected, topic="full")
    put(conninfo, b"1", b"2", topic="free")
    # More than one list of the full topic, and all of them before those of the free one.
    async with relaying(client, conninfo):
        await until(conninfo, "NOT EXISTS (SELECT FROM postdate_outbox WHERE topic = 'free')")
        put(conninfo, b"3", topic="free")
        await until(conninfo, "NOT EXISTS (SELECT FROM postdate_outbox WHERE topic = 'free')")
        assert caplog.text.count("Topic full takes no more") == 1
        await client.topics.update("full", max_pending_messages=0)
        await until(conninfo, EMPTY)
    found: list[bytes] = []
    async with client.subscribe("full", "s") as subscription:
        while len(found) < len(expected):
            for message in await within(subscription.receive_many(1_000)):
                found.append(message.payload)
                message.ack_nowait()
    assert found == expected


async def test_as_many_as_a_topic_has_room_for_are_sent_though_it_is_never_empty(client, conninfo):
    await client.topics.create("narrow", postdate.TopicPolicy(max_pending_messages=4))
    await client.subscriptions.create("narrow", "s", initial_position=EARLIEST)
    async with client.producer("narrow") as producer:
        await producer.send(b"0")  # with which a list of four is too long
    put(conninfo, b"1", b"2", b"3", b"4", topic="narrow")
    async with relaying(client, conninfo), client.subscribe("narrow", "s") as subscription:
        await until(conninfo, "(SELECT count(*) = 1 FROM postdate_outbox)")
        assert rows(conninfo, "payload, error") == [(b"4", None)]
        arriving = aiter(subscription)
        found = [await within(anext(arriving)) for _ in range(4)]
        await found[0].ack()
        found.append(await within(anext(arriving)))
        assert [message.payload for message in found] == [b"0", b"1", b"2", b"3", b"4"]
        await until(conninfo, EMPTY)


STORED = 12
"""The step at which the first list is stored and is still in the outbox."""


async def test_each_message_is_stored_once_wherever_its_relay_is_killed(
    client, conninfo, wire, fork_server: ForkServer
):
    """Kills a process at each of its steps: before and after each statement and each list that it sends."""

    async def relay_until_killed(step: int) -> int:
        program = "from tests.wire.outbox_relay import run; run()"
        command = ("-c", program, conninfo, wire.server.grpc_address, str(step))
        process = await fork_server.fork(command, os.environ)
        return await asyncio.wait_for(process.wait(), 60)

    expected: list[bytes] = []
    for step in (STORED, *sampled(range(14), at_depth(change=6, deep=1))):
        payloads = [b"%d/%d" % (step, number) for number in range(3)]
        put(conninfo, *payloads)
        expected += payloads
        assert await relay_until_killed(step) == -signal.SIGKILL
    put(conninfo, b"last")
    assert await relay_until_killed(-1) == 0
    assert await payloads_of(client, "orders") == [*expected, b"last"]


async def test_what_the_topic_no_longer_remembers_is_sent_again_with_a_warning_and_not_lost(
    client, conninfo, caplog
):
    await client.topics.create("orders", postdate.TopicPolicy(dedup_entries=2))
    put(conninfo, *(b"%d" % number for number in range(5)))
    with psycopg.connect(conninfo) as connection:
        connection.execute("CREATE RULE keep AS ON DELETE TO postdate_outbox DO INSTEAD NOTHING")
    async with relaying(client, conninfo) as relay:
        while not relay.counts.sent:
            await asyncio.sleep(0.01)
    with psycopg.connect(conninfo) as connection:
        connection.execute("DROP RULE keep ON postdate_outbox")
    await relay_all(client, conninfo)
    assert await payloads_of(client, "orders") == [b"%d" % number for number in range(5)] * 2
    assert "may be stored twice" in caplog.text


async def test_a_second_relay_waits_until_the_first_one_has_lost_its_connection(client, conninfo):
    async with relaying(client, conninfo) as first, relaying(client, conninfo) as second:
        put(conninfo, b"1")
        await until(conninfo, EMPTY)
        works, waits = (first, second) if first.counts.sent else (second, first)
        await until(
            conninfo,
            "EXISTS (SELECT FROM pg_locks WHERE locktype = 'advisory' AND NOT granted)",
        )
        with psycopg.connect(conninfo, autocommit=True) as connection:
            connection.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_locks WHERE locktype = 'advisory' AND granted"
            )
        await until(
            conninfo,
            "EXISTS (SELECT FROM pg_locks WHERE locktype = 'advisory' AND granted)",
        )
        put(conninfo, b"2")
        await until(conninfo, EMPTY)
        assert (works.counts.sent, waits.counts.sent) == (1, 1)
    assert await payloads_of(client, "orders") == [b"1", b"2"]


async def test_a_crash_of_the_database_is_waited_out(client, conninfo, server):
    async with relaying(client, conninfo):
        put(conninfo, b"1")
        await until(conninfo, EMPTY)
        server.stop()
        server.start()
        put(conninfo, b"2")
        await until(conninfo, EMPTY)
    assert await payloads_of(client, "orders") == [b"1", b"2"]


async def test_numbers_go_on_above_those_that_a_restored_database_has_forgotten(client, conninfo):
    put(conninfo, b"1")
    await relay_all(client, conninfo)
    with psycopg.connect(conninfo) as connection:
        connection.execute("SELECT setval('postdate_outbox_sequence', 1, false)")
    put(conninfo, b"2", b"3")
    await relay_all(client, conninfo)
    assert await payloads_of(client, "orders") == [b"1", b"2", b"3"]


async def test_a_database_without_the_tables_ends_the_relay(client, server):
    with pytest.raises(psycopg.errors.UndefinedTable):
        await within(postgres.OutboxRelay(client, server.conninfo()).run())


async def test_an_effect_takes_place_once_though_its_message_comes_again(client, conninfo):
    async with client.producer("orders") as producer:
        await producer.send(b"1")
    effects = 0
    attempts = []
    async with client.subscribe("orders", "billing", initial_position=EARLIEST) as subscription:
        while len(attempts) < 3:
            message = await within(anext(aiter(subscription)))
            attempts.append(message.attempt)
            with psycopg.connect(conninfo) as connection:
                is_first = connection.execute(*postgres.first_time(message)).rowcount
                if message.attempt == 1:
                    connection.rollback()  # the handler failed after it
                effects += is_first * (message.attempt > 1)
            await message.nack(timedelta(milliseconds=1))
    assert attempts == [1, 2, 3]
    assert effects == 1


async def test_a_message_that_is_received_without_async_has_its_effect_once(client, conninfo, wire):
    async with client.producer("orders") as producer:
        await producer.send(b"1")

    def changed_rows() -> list[int]:
        with postdate.sync.connect(wire.server.grpc_address) as plain:
            received = plain.receive(
                "orders", "billing", wait=timedelta(seconds=5), initial_position=EARLIEST
            )
            with psycopg.connect(conninfo) as connection:
                twice = [*received, *received]
                return [connection.execute(*postgres.first_time(message)).rowcount for message in twice]

    assert await within(asyncio.to_thread(changed_rows)) == [1, 0]


def test_the_command_prints_the_statements(capsys):
    assert cli.run(["outbox", "schema"]) == 0
    assert capsys.readouterr().out == postgres.SCHEMA


async def test_the_command_relays_until_it_is_told_to_end(client, conninfo, wire):
    put(conninfo, b"1", b"2")
    command = (sys.executable, "-m", "postdate", "--address", wire.server.grpc_address, "--output", "json")
    process = await asyncio.create_subprocess_exec(
        *command, "outbox", "relay", "--database", conninfo, stdout=asyncio.subprocess.PIPE
    )
    await until(conninfo, EMPTY)
    process.terminate()
    said, _ = await within(process.communicate())
    assert (process.returncode, json.loads(said)) == (0, {"sent": 2, "refused": 0})


def test_the_command_names_what_the_database_lacks(server, capsys):
    psycopg.connect(server.conninfo()).close()  # a server that is gone is waited for without end
    assert cli.run(["--address", "127.0.0.1:1", "outbox", "relay", "--database", server.conninfo()]) == 1
    assert "postdate outbox schema | psql" in capsys.readouterr().err


def test_the_command_says_that_an_outbox_is_of_an_older_version(conninfo, capsys):
    with psycopg.connect(conninfo) as connection:
        connection.execute("ALTER TABLE postdate_outbox DROP COLUMN traceparent")
    assert cli.run(["--address", "127.0.0.1:1", "outbox", "relay", "--database", conninfo]) == 1
    said = capsys.readouterr().err
    assert "of an older version" in said and "postdate outbox schema | psql" in said
