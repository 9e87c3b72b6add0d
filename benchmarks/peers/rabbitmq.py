"""RabbitMQ: quorum queues that messages wait in for a power of two of seconds, and one that they end in."""

from __future__ import annotations

import asyncio
import math
import os
import re
import struct
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.client.control import check
from benchmarks.peers.peer import Note, Peer
from benchmarks.peers.programs import library, program

DUE = "due"
"""The exchange and the queue that every message ends in."""
_RADICES = (2,) * 9 + (16,)
"""Values of each digit of a delay in seconds: fifteen queues for the last one, one for each power of two above."""
SECONDS_MAX = math.prod(_RADICES) - 1
_PREFETCH = 2_000
_ACK_EVERY = 100
_CHANNEL = 1
_FRAME_BYTES_MAX = 131_072
_FRAME_HEAD = struct.Struct(">BHI")
_ACK = struct.pack(">HH", 60, 80)
"""Class and method of a publisher's confirm."""
_ACK_FIELDS = struct.Struct(">QB")
_SCRIPTS = "/usr/lib/rabbitmq/bin"
_START = 'epmd -address 127.0.0.1 -port "$ERL_EPMD_PORT" & exec "$0"'
_ADVANCED = "[{rabbit, [{dead_letter_worker_consumer_prefetch, 1000}]}].\n"


class RabbitMQ(Peer):
    """A server of one node; all queues are quorum queues."""

    title = "RabbitMQ"
    answer = "publisher confirm of a quorum queue: its log was synced; acknowledgements are not confirmed"
    setup = (
        "one node, no plugins, `+sbwt none`, `dead_letter_worker_consumer_prefetch` 1,000; it has no delay of a "
        "message, so that queues with a TTL and a dead letter exchange (`at-least-once`) stand for the digits of a "
        "delay in whole seconds, rounded up: one each for 1 to 15 s, one for each power of two above, and a message "
        "passes through one after the other; aio-pika, a batch not awaited one by one; prepared batches are written "
        f"to a socket in one go; `basic.qos` {_PREFETCH:,}, an acknowledgement for {_ACK_EVERY} messages"
    )
    libraries = ("aio-pika",)
    ports_count = 3

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._connection: Any = None
        self._channel: Any = None
        self._publisher: Publisher | None = None

    @classmethod
    def missing(cls) -> str:
        return "" if _program() else "rabbitmq-server"

    @classmethod
    def version(cls) -> str:
        """Return what its folder is called by: asking it would start a port mapper that stays."""
        found = re.search(r"rabbitmq_server-([\d.]+)", str(Path(_program()).resolve()))
        return found.group(1) if found else "unknown"

    def command(self) -> list[str]:
        """Start it with a port mapper of its own, which would outlive it otherwise."""
        return ["sh", "-c", _START, _program()]

    def environment(self) -> dict[str, str]:
        port, mapper_port, peers_port = map(str, self.ports)
        data = str(self.folder / "data")
        return {
            **{name: value for name, value in os.environ.items() if not name.startswith("RABBITMQ_")},
            "HOME": str(self.folder),  # of the cookie
            "ERL_EPMD_PORT": mapper_port,
            "RABBITMQ_NODENAME": "bench@localhost",
            "RABBITMQ_NODE_IP_ADDRESS": "127.0.0.1",
            "RABBITMQ_NODE_PORT": port,
            "RABBITMQ_DIST_PORT": peers_port,
            "RABBITMQ_CONF_ENV_FILE": str(self.folder / "none"),
            "RABBITMQ_CONFIG_FILE": str(self.folder / "none"),
            "RABBITMQ_ADVANCED_CONFIG_FILE": str(self.folder / "advanced.config"),
            "RABBITMQ_ENABLED_PLUGINS_FILE": str(self.folder / "plugins"),
            "RABBITMQ_MNESIA_BASE": data,
            "RABBITMQ_LOG_BASE": data,
            "RABBITMQ_LOGS": "-",
            "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": "+sbwt none +sbwtdcpu none +sbwtdio none",
        }

    def prepare_folder(self) -> None:
        super().prepare_folder()
        (self.folder / "advanced.config").write_text(_ADVANCED)
        (self.folder / "plugins").write_text("[].\n")

    def stop(self) -> None:
        """End it at once, with its port mapper: what it would put in order is removed."""
        self.kill()
        super().stop()

    async def connect(self) -> None:
        self._connection = await library("aio_pika").connect(host="127.0.0.1", port=self.ports[0])
        self._channel = await self._connection.channel(publisher_confirms=True)

    async def create(self) -> None:
        pika = library("aio_pika")
        following = await self._channel.declare_exchange(DUE, pika.ExchangeType.FANOUT, durable=True)
        due = await self._channel.declare_queue(DUE, durable=True, arguments={"x-queue-type": "quorum"})
        await due.bind(following)
        for level in reversed(LEVELS):
            exchange = await self._channel.declare_exchange(
                level.exchange, pika.ExchangeType.TOPIC, durable=True
            )
            await following.bind(exchange, level.pattern(0))
            for digit in range(1, level.radix):
                seconds = digit * level.seconds
                queue = await self._channel.declare_queue(
                    f"later-{seconds}",
                    durable=True,
                    arguments={
                        "x-queue-type": "quorum",
                        "x-message-ttl": seconds * 1000,
                        "x-dead-letter-exchange": following.name,
                        "x-dead-letter-strategy": "at-least-once",
                        "x-overflow": "reject-publish",
                    },
                )
                await queue.bind(exchange, level.pattern(digit))
            following = exchange

    async def produce(self, payload: bytes, due_ms: int) -> None:
        await self._publish(payload, *route(seconds_until(due_ms)))

    async def produce_batch(self, payloads: Sequence[bytes], due_ms: Sequence[int]) -> None:
        pairs = zip(payloads, due_ms, strict=True)
        await asyncio.gather(*(self._publish(each, *route(seconds_until(due))) for each, due in pairs))

    async def prepare(self, payloads: Sequence[bytes], due_ms: Sequence[int]) -> Any:
        """Delays count from the moment of storing; those of a batch are at least right when it is prepared."""
        if self._publisher is None:
            self._publisher = await Publisher.open(self.ports[0])
        pairs = zip(payloads, due_ms, strict=True)
        frames = b"".join(_frames(payload, *route(seconds_until(due))) for payload, due in pairs)
        return len(payloads), frames

    async def produce_prepared(self, prepared: Any) -> None:
        assert self._publisher is not None
        await self._publisher.publish(*prepared)

    async def consume(self, count: int, note: Note) -> None:
        done = asyncio.Event()
        left = count

        async def take(message: Any) -> None:
            nonlocal left
            note([message.body])
            left -= 1
            if left % _ACK_EVERY == 0:
                await message.ack(multiple=True)
            if left == 0:
                done.set()

        channel = await self._connection.channel()
        await channel.set_qos(prefetch_count=_PREFETCH)
        queue = await channel.get_queue(DUE)
        await queue.consume(take)
        await done.wait()
        await channel.get_queue(DUE)  # answered after the acknowledgements before it were taken
        await channel.close()

    async def close(self) -> None:
        if self._publisher is not None:
            self._publisher.close()
        if self._connection is not None:
            await self._connection.close()

    async def _publish(self, payload: bytes, exchange: str, key: str) -> None:
        pika = library("aio_pika")
        message = pika.Message(payload, delivery_mode=pika.DeliveryMode.PERSISTENT)
        answer = await self._channel.channel.basic_publish(
            message.body, exchange=exchange, routing_key=key, properties=message.properties, mandatory=True
        )
        check(type(answer).__name__ == "Ack", f"a message was refused: {answer!r}")


class Publisher:
    """A connection that writes frames made beforehand, and counts their confirms."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        self._sent = 0
        self._confirmed = 0
        self._batch_of: dict[int, _Batch] = {}
        self._reading = asyncio.create_task(self._read(reader))

    @classmethod
    async def open(cls, port: int) -> Publisher:
        commands, marshal = library("pamqp.commands"), library("pamqp.frame").marshal
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"AMQP\0\0\x09\x01")
        for channel, answers in (
            (0, [commands.Connection.StartOk({}, "PLAIN", "\0guest\0guest", "en_US")]),
            (0, [commands.Connection.TuneOk(_CHANNEL, _FRAME_BYTES_MAX, 0), commands.Connection.Open()]),
            (_CHANNEL, [commands.Channel.Open()]),
            (_CHANNEL, [commands.Confirm.Select()]),
        ):
            await _read_frame(reader)
            writer.writelines(marshal(each, channel) for each in answers)
        await _read_frame(reader)
        return cls(reader, writer)

    async def publish(self, count: int, frames: bytes) -> None:
        """Write the frames of so many messages; return when all are confirmed."""
        batch = _Batch(count, asyncio.get_running_loop().create_future())
        self._batch_of.update(dict.fromkeys(range(self._sent + 1, self._sent + count + 1), batch))
        self._sent += count
        self._writer.write(frames)
        await batch.confirmed

    def close(self) -> None:
        self._reading.cancel()
        self._writer.close()

    async def _read(self, reader: asyncio.StreamReader) -> None:
        try:
            while True:
                payload = await _read_frame(reader)
                check(payload.startswith(_ACK), f"not a confirm: {payload[:100]!r}")
                tag, multiple = _ACK_FIELDS.unpack_from(payload, len(_ACK))
                self._confirm(range(self._confirmed + 1, tag + 1) if multiple & 1 else (tag,))
                self._confirmed = max(self._confirmed, tag) if multiple & 1 else self._confirmed
        except Exception as error:
            for batch in {id(each): each for each in self._batch_of.values()}.values():
                batch.confirmed.set_exception(error)

    def _confirm(self, tags: Iterable[int]) -> None:
        for tag in tags:
            if batch := self._batch_of.pop(tag, None):
                batch.left -= 1
                if not batch.left:
                    batch.confirmed.set_result(None)


@dataclass(slots=True, eq=False)
class _Batch:
    left: int
    confirmed: asyncio.Future[None]


async def _read_frame(reader: asyncio.StreamReader) -> bytes:
    """The payload of the next frame."""
    _, _, size = _FRAME_HEAD.unpack(await reader.readexactly(_FRAME_HEAD.size))
    payload: bytes = (await reader.readexactly(size + 1))[:-1]
    return payload


def _frames(payload: bytes, exchange: str, key: str) -> bytes:
    commands, marshal = library("pamqp.commands"), library("pamqp.frame").marshal
    header = library("pamqp.header").ContentHeader(
        0, len(payload), commands.Basic.Properties(delivery_mode=2)
    )
    publish = commands.Basic.Publish(exchange=exchange, routing_key=key)
    body = library("pamqp.body").ContentBody(payload)
    return b"".join(marshal(each, _CHANNEL) for each in (publish, header, body))


@dataclass(frozen=True, slots=True)
class Level:
    """A digit of delays: an exchange, and a queue for each value that is not zero."""

    number: int
    radix: int
    seconds: int
    """The weight of a one in this digit."""

    @property
    def exchange(self) -> str:
        return f"later-level-{self.number}"

    def pattern(self, digit: int) -> str:
        """Return the binding of the exchange for a value; zero goes on to the next exchange."""
        return "*." * self.number + f"{digit}.#"


LEVELS = [Level(at, radix, math.prod(_RADICES[at + 1 :])) for at, radix in enumerate(_RADICES)]
"""The digits of a delay, the highest first."""


def route(seconds: int) -> tuple[str, str]:
    """The exchange of the first digit of a delay that is not zero, and the routing key, which are all digits."""
    check(0 <= seconds <= SECONDS_MAX, f"there are no queues for {seconds} s")
    digits = [seconds // level.seconds % level.radix for level in LEVELS]
    exchange = next((level.exchange for level, digit in zip(LEVELS, digits, strict=True) if digit), DUE)
    return exchange, ".".join(map(str, digits))


def seconds_until(due_ms: int) -> int:
    """Whole seconds until a due time, never too few."""
    return max(0, math.ceil(due_ms / 1000 - time.time()))


def _program() -> str:
    return program("rabbitmq-server", _SCRIPTS)
