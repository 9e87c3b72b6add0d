"""The floods: each bounded in connections, calls and time, against a broker on this machine."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from itertools import count
from operator import ge

from benchmarks.http2 import (
    CONTINUATION,
    DATA,
    END_HEADERS,
    HEADERS,
    PING,
    PREFACE,
    PRIORITY,
    RST_STREAM,
    SETTINGS,
    WINDOW_UPDATE,
    Raw,
    call,
    frame,
    literal,
    message,
    prefixed,
)
from postdate_api.v1 import consumer_pb2, message_pb2, producer_pb2

TOKEN_WITHOUT_RIGHT = "a-token-without-the-right"
"""Of somebody who may produce, but to another topic than the floods name."""

PRODUCE = call("/postdate.v1.ProducerService/Produce")
STREAM = call("/postdate.v1.ProducerService/ProduceStream")
CHECK = call("/grpc.health.v1.Health/Check")
SUBSCRIBE = call("/postdate.v1.ConsumerService/Subscribe")
_AUTHORIZED = [("authorization", f"Bearer {TOKEN_WITHOUT_RIGHT}")]
WITHOUT_RIGHT = call("/postdate.v1.ProducerService/Produce", _AUTHORIZED)
STREAM_WITHOUT_RIGHT = call("/postdate.v1.ProducerService/ProduceStream", _AUTHORIZED)
CALLS_OF_CONNECTION = 250
_BODY_BYTES = 15 << 20
_BODY = prefixed(bytes(_BODY_BYTES - 16_384), of_bytes=_BODY_BYTES)
"""The most of a message."""
_LARGE = prefixed(
    producer_pb2.ProduceRequest(
        topic="t", messages=[message_pb2.Message(payload=bytes(2 << 20))]
    ).SerializeToString()
)
"""A whole message, beyond the limit of a payload too."""
_SECONDS_MAX = 40.0
_GONE = (ConnectionError, TimeoutError, asyncio.IncompleteReadError, OSError)


@dataclass
class Flood:
    """One flood under way."""

    grpc_address: str
    http_address: str
    seconds: float
    scale: float  # 1: in full
    connections: int = 0
    calls: int = 0
    least: tuple[int, int, int] = (0, 0, 0)
    """Connections, calls and bytes that make it a flood: with fewer it goes on for longer."""
    raws: list[Raw] = field(default_factory=list)
    stack: AsyncExitStack = field(default_factory=AsyncExitStack)

    def sized(self, count: int) -> int:
        return max(1, round(count * self.scale))

    @property
    def sent_bytes(self) -> int:
        return sum(raw.sent_bytes for raw in self.raws)

    async def connect(
        self, *, http: bool = False, greet: bool = True, reads: bool = False, tls: bool = False
    ) -> Raw | None:
        """One more connection, of somebody who reads or does not; None if the broker takes no more."""
        host, _, port = (self.http_address if http else self.grpc_address).rpartition(":")
        context = _tls() if tls else None
        try:
            raw = Raw(*await asyncio.open_connection(host, int(port), ssl=context), is_honest=reads)
            self.stack.callback(raw.writer.close)
            self.raws.append(raw)
            if greet and not http:
                await raw.greet()
        except _GONE:
            return None
        self.connections += 1
        if reads:
            self.stack.callback(asyncio.ensure_future(raw.live()).cancel)
        return raw

    async def many(self, count: int, work: Callable[[Raw], Awaitable[None]], **how: bool) -> None:
        """So many connections that do some work, and go on until they are cut."""

        async def one() -> None:
            if (raw := await self.connect(**how)) is not None:
                with suppress(*_GONE):
                    await work(raw)

        await asyncio.gather(*(one() for _ in range(self.sized(count))))

    async def again(self, count: int, work: Callable[[Raw], Awaitable[None]], **how: bool) -> None:
        """As `many`, and on a new connection whenever one is closed."""

        async def repeat(first: Raw) -> None:
            raw: Raw | None = first
            while raw is not None:
                with suppress(*_GONE):
                    await work(raw)
                raw.writer.close()
                raw = await self.connect(**how)

        await self.many(count, repeat, **how)

    async def begin(self, raw: Raw, headers: bytes, number: int) -> None:
        """A call that has sent its headers and no message."""
        await raw.send(frame(HEADERS, END_HEADERS, number, headers))
        self.calls += 1

    async def squat(self, raw: Raw, headers: bytes) -> None:
        for number in range(1, 2 * CALLS_OF_CONNECTION, 2):
            await self.begin(raw, headers, number)

    async def upload(self, raw: Raw, headers: bytes, count: int, data: bytes) -> None:
        """Calls that send some data each, as far as windows allow."""
        uploads = []
        for number in range(1, 2 * count, 2):
            await self.begin(raw, headers, number)
            uploads.append(asyncio.ensure_future(raw.upload(number, data)))
        try:
            await asyncio.gather(*uploads)
        finally:
            for upload in uploads:
                upload.cancel()

    @property
    def is_enough(self) -> bool:
        return all(map(ge, (self.connections, self.calls, self.sent_bytes), self.least))

    async def run(self, name: str) -> None:
        async with self.stack:
            with suppress(TimeoutError):
                async with asyncio.timeout(_SECONDS_MAX), asyncio.TaskGroup() as tasks:
                    flooding = tasks.create_task(FLOODS[name](self))
                    await asyncio.sleep(self.seconds)  # what is open stays open
                    while not self.is_enough:  # noqa: ASYNC110 - a busy machine does less
                        await asyncio.sleep(0.05)
                    flooding.cancel()


def _tls() -> ssl.SSLContext:
    """Make a context that takes any certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    return context


async def _nothing(_: Raw) -> None:
    return


async def idle_grpc(flood: Flood) -> None:
    await flood.many(1_500, _nothing, greet=False)


async def idle_http(flood: Flood) -> None:
    await flood.many(1_500, _nothing, http=True)


async def half_handshakes(flood: Flood) -> None:
    await flood.many(1_000, lambda raw: raw.send(PREFACE[:20]), greet=False)


async def half_tls_handshakes(flood: Flood) -> None:
    """Handshakes of which the first message comes byte by byte, and such that end after it."""
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    with suppress(ssl.SSLWantReadError):
        _tls().wrap_bio(incoming, outgoing).do_handshake()
    hello = outgoing.read()

    async def work(raw: Raw) -> None:
        if flood.connections % 2:
            await raw.send(hello)
            await raw.until_closed()
        for at in range(len(hello)):
            await raw.send(hello[at : at + 1])
            await asyncio.sleep(0.2)

    await flood.again(1_000, work, greet=False)


async def tls_handshakes(flood: Flood) -> None:
    """Handshakes of connections that are closed and opened again."""
    await flood.again(50, _nothing, greet=False, tls=True)


async def greeted(flood: Flood) -> None:
    await flood.many(1_000, _nothing)


async def squatted_calls(flood: Flood) -> None:
    await flood.many(21, lambda raw: flood.squat(raw, PRODUCE))


async def squatted_streams(flood: Flood) -> None:
    await flood.many(21, lambda raw: flood.squat(raw, STREAM))


async def squatted_probes(flood: Flood) -> None:
    await flood.many(21, lambda raw: flood.squat(raw, CHECK))


async def half_sent_bodies(flood: Flood) -> None:
    await flood.many(12, lambda raw: flood.upload(raw, PRODUCE, 10, _BODY), reads=True)


async def half_sent_later(flood: Flood) -> None:
    """Streams that begin well, and send the next message halfway; on a new connection if that is closed."""
    first = prefixed(
        producer_pb2.ProduceRequest(topic="others", messages=[message_pb2.Message()]).SerializeToString()
    )

    async def work(raw: Raw) -> None:
        again: Raw | None = raw
        while again is not None:
            with suppress(*_GONE):
                await flood.upload(again, STREAM_WITHOUT_RIGHT, 10, first + _BODY)
                return
            again = await flood.connect(reads=True)

    await flood.many(12, work, reads=True)


async def windows(flood: Flood) -> None:
    """As many calls as there may be, and of the message of each what gRPC takes before anybody asks for it."""

    await flood.many(40, lambda raw: flood.upload(raw, STREAM, CALLS_OF_CONNECTION, _BODY), reads=True)


async def streams_of_messages(flood: Flood) -> None:
    """Streams of large messages that are complete, and refused one by one."""

    async def go_on(raw: Raw, number: int) -> None:
        await flood.begin(raw, STREAM_WITHOUT_RIGHT, number)
        while await raw.upload(number, _LARGE):
            pass

    async def work(raw: Raw) -> None:
        await asyncio.gather(*(go_on(raw, number) for number in range(1, 21, 2)))

    await flood.many(12, work, reads=True)


async def slow_bytes(flood: Flood) -> None:
    async def work(raw: Raw) -> None:
        for number in range(1, 21, 2):
            await flood.begin(raw, PRODUCE, number)
        for part in range(10_000):
            for number in range(1, 21, 2):
                first = message(number, b"", of_bytes=_BODY_BYTES)
                await raw.send(first if part == 0 else frame(0, 0, number, b"x"))
            await asyncio.sleep(0.05)

    await flood.many(50, work)


async def resets(flood: Flood) -> None:
    async def work(raw: Raw) -> None:
        for number in range(1, 20_000, 2):
            reset = frame(RST_STREAM, stream=number, body=(8).to_bytes(4, "big"))
            await raw.send(frame(HEADERS, END_HEADERS, number, PRODUCE), reset)
            flood.calls += 1

    await flood.many(4, work)


async def pings(flood: Flood) -> None:
    async def work(raw: Raw) -> None:
        for _ in range(1_000):
            await raw.send(*(frame(PING, body=bytes(8)) for _ in range(100)))

    for _ in range(flood.sized(50)):
        await flood.many(4, work)


async def headers_without_end(flood: Flood) -> None:
    """Calls whose headers go on, frame by frame."""
    more = frame(CONTINUATION, 0, 1, b"".join(literal(b"a%d" % i, b"b" * 16) for i in range(40)))

    async def work(raw: Raw) -> None:
        await raw.send(frame(HEADERS, 0, 1, PRODUCE))
        flood.calls += 1
        while True:
            await raw.send(*[more] * 20)

    await flood.again(8, work, reads=True)


async def large_headers(flood: Flood) -> None:
    """Calls with as many headers as are allowed, which change the table that both sides keep with each field."""
    resize = b"\x20\x3f\xe1\x1f"  # to nothing, and back to 4,096 bytes
    fields = b"".join(b"\x40" + literal(b"n%d" % i, b"v" * 100)[1:] for i in range(100))

    async def work(raw: Raw) -> None:
        for number in range(1, 2 * CALLS_OF_CONNECTION, 2):
            headers = resize + PRODUCE + fields
            await flood.begin(raw, headers, number)

    await flood.many(40, work, reads=True)


async def settings(flood: Flood) -> None:
    """Settings that change the windows of many calls each time, and whose confirmations are not read."""
    changes = [frame(SETTINGS, body=b"\0\x04" + size.to_bytes(4, "big")) for size in (0, (1 << 31) - 1)]

    async def work(raw: Raw) -> None:
        await flood.squat(raw, STREAM)
        while True:
            await raw.send(*changes * 50)

    await flood.again(8, work)


async def empty_frames(flood: Flood) -> None:
    """Frames that carry nothing."""
    frames = (
        frame(DATA, stream=1),
        frame(PRIORITY, stream=1, body=bytes(5)),
        frame(0xFA, stream=1),  # of a kind that nobody knows
        frame(WINDOW_UPDATE, body=(1).to_bytes(4, "big")),
    )

    async def work(raw: Raw) -> None:
        await flood.begin(raw, STREAM, 1)
        while True:
            await raw.send(*frames * 250)

    await flood.again(8, work, reads=True)


async def oversize(flood: Flood) -> None:
    begun = prefixed(bytes(32_768), of_bytes=64 << 20)
    await flood.many(8, lambda raw: flood.upload(raw, PRODUCE, 50, begun), reads=True)


async def whole_calls(flood: Flood) -> None:
    """Requests that are complete, and refused: who sends them has no rights, or nothing to say."""

    async def work(raw: Raw) -> None:
        for number in range(1, 10_000, 2):
            request = message(number, b"", ends=True)
            await raw.send(frame(HEADERS, END_HEADERS, number, PRODUCE), request)
            flood.calls += 1
            if number % 100 == 1:
                await asyncio.sleep(0.01)  # so that answers come in between

    await flood.many(4, work, reads=True)


async def without_right(flood: Flood) -> None:
    """Large requests that are complete, of somebody who has no right on their topic; nor would they fit the limits."""

    async def work(raw: Raw) -> None:
        numbers = count(1, 2)

        async def calls() -> None:
            while True:
                number = next(numbers)
                await flood.begin(raw, WITHOUT_RIGHT, number)
                await raw.upload(number, _LARGE, ends=True)

        await asyncio.gather(*(calls() for _ in range(10)))

    await flood.many(12, work, reads=True)


async def unread_acks(flood: Flood) -> None:
    """Consumers that acknowledge what is not there, which makes long answers, and give no window to read them."""
    ledgers = [message_pb2.EntrySet(ledger_id=1 + number, entry_ids=[1]) for number in range(2_000)]
    ids = message_pb2.EntrySet(ledger_id=1 << 40, entry_ids=range(10_000))
    acks = b"".join(
        prefixed(
            consumer_pb2.SubscribeRequest(
                ack=consumer_pb2.Ack(request_id=1, entries=entries)
            ).SerializeToString()
        )
        for entries in (ledgers, [ids])
    )

    async def work(raw: Raw) -> None:
        name = f"s{flood.connections}"
        opening = consumer_pb2.SubscribeRequest(open=consumer_pb2.Open(topic="t", subscription=name))
        reading = asyncio.ensure_future(raw.live())
        flood.stack.callback(reading.cancel)
        data = prefixed(opening.SerializeToString()) + acks
        await flood.upload(raw, SUBSCRIBE, CALLS_OF_CONNECTION, data)

    await flood.many(8, work)


async def half_forms(flood: Flood) -> None:
    async def work(raw: Raw) -> None:
        while True:
            await raw.send(
                b"POST /login HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/x-www-form-urlencoded\r\n"
                b"Content-Length: 60000\r\n\r\ntoken=" + bytes(30_000)
            )
            flood.calls += 1
            await raw.until_closed()
            if (again := await flood.connect(http=True)) is None:
                return
            raw = again

    await flood.many(500, work, http=True)


async def slow_http(flood: Flood) -> None:
    async def work(raw: Raw) -> None:
        await raw.send(b"GET /metrics HTTP/1.1\r\nHost: 127.0.0.1\r\n")
        while True:
            await asyncio.sleep(0.5)
            await raw.send(b"X-A: b\r\n")

    await flood.many(500, work, http=True)


FLOODS: dict[str, Callable[[Flood], Coroutine[None, None, None]]] = {
    "idle connections, gRPC": idle_grpc,
    "idle connections, HTTP": idle_http,
    "half handshakes": half_handshakes,
    "half TLS handshakes": half_tls_handshakes,
    "TLS handshakes": tls_handshakes,
    "handshakes and no call": greeted,
    "calls without a message": squatted_calls,
    "streams without a message": squatted_streams,
    "probes without a message": squatted_probes,
    "half-sent messages of 15 MiB": half_sent_bodies,
    "half-sent later messages of 15 MiB": half_sent_later,
    "a window of each message": windows,
    "streams of large messages": streams_of_messages,
    "messages byte by byte": slow_bytes,
    "calls reset at once": resets,
    "pings": pings,
    "headers without end": headers_without_end,
    "large headers": large_headers,
    "settings": settings,
    "empty frames": empty_frames,
    "oversize messages": oversize,
    "whole calls": whole_calls,
    "large calls without a right": without_right,
    "acks whose answers are not read": unread_acks,
    "half-sent HTTP forms": half_forms,
    "slow HTTP headers": slow_http,
}
OVER_TLS = {"half TLS handshakes", "TLS handshakes"}
"""Floods of a broker with a certificate."""
