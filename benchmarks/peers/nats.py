"""NATS JetStream: message schedules, each on a subject of its own, and a consumer of what they emit."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from datetime import UTC, datetime
from itertools import count as numbers_from
from typing import Any

from benchmarks.errors import BenchmarkFailed
from benchmarks.peers.peer import Note, Peer
from benchmarks.peers.programs import BUILD, library, program, said_version

_MODULE = "github.com/nats-io/nats-server/v2@v2.15.2"
_BIN = BUILD / "bin"
_SCHEDULES_SINCE = (2, 12)
_STREAM, _DUE, _CONSUMER = "bench", "due", "consumer"
_TAKE = 1_000
_INSTALL_SECONDS_MAX = 600


class Nats(Peer):
    """A server of one node that syncs each write."""

    title = "NATS JetStream"
    answer = "fsync of the stream's file returned (`sync_interval: always`)"
    setup = (
        "one replica, file storage, `sync_interval: always`; message schedules (`Nats-Schedule: @at`), each message "
        "on a subject of its own; nats-py, publishes of a batch not awaited one by one; a pull consumer with "
        "`AckPolicy.ALL`, whose last acknowledgement of a fetch is confirmed"
    )
    libraries = ("nats-py",)

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._connection: Any = None
        self._stream: Any = None
        # A schedule replaces the one before it on the same subject. Also after a restart no subject comes again.
        run = os.urandom(6).hex()
        self._subjects = (f"later.{run}.{number}" for number in numbers_from())

    @classmethod
    def install(cls) -> None:
        """Build the server where there is Go and none that has schedules yet."""
        if _program() or not shutil.which("go"):
            return
        done = subprocess.run(
            ["go", "install", _MODULE],
            env={**os.environ, "GOBIN": str(_BIN)},
            capture_output=True,
            text=True,
            check=False,
            timeout=_INSTALL_SECONDS_MAX,
        )
        if done.returncode:
            raise BenchmarkFailed(f"{_MODULE}: {done.stderr.strip().splitlines()[-1:]}")

    @classmethod
    def missing(cls) -> str:
        return (
            ""
            if _program()
            else f"nats-server {'.'.join(map(str, _SCHEDULES_SINCE))} or newer, which has schedules,"
        )

    @classmethod
    def version(cls) -> str:
        return said_version(_program(), "--version")

    def command(self) -> list[str]:
        return [_program(), "-c", str(self.folder / "nats.conf")]

    def prepare_folder(self) -> None:
        super().prepare_folder()
        (self.folder / "nats.conf").write_text(
            f'listen: "127.0.0.1:{self.ports[0]}"\n'
            f'jetstream {{ store_dir: "{self.folder / "data"}", sync_interval: always }}\n'
        )

    async def connect(self) -> None:
        connection = await library("nats").connect(
            f"nats://127.0.0.1:{self.ports[0]}", allow_reconnect=False, connect_timeout=2
        )
        stream = connection.jetstream(timeout=60, publish_async_max_pending=10_000)
        try:
            await stream.account_info()
        except BaseException:
            await connection.close()
            raise
        self._connection, self._stream = connection, stream

    async def create(self) -> None:
        api = library("nats.js.api")
        subjects = ["later.>", _DUE]
        await self._stream.add_stream(
            api.StreamConfig(name=_STREAM, subjects=subjects, allow_msg_schedules=True)
        )
        await self._stream.add_consumer(
            _STREAM,
            api.ConsumerConfig(
                durable_name=_CONSUMER,
                filter_subject=_DUE,
                ack_policy=api.AckPolicy.ALL,
                ack_wait=60,
                max_ack_pending=-1,
            ),
        )

    async def produce(self, payload: bytes, due_ms: int) -> None:
        await self._stream.publish(next(self._subjects), payload, headers=_headers(due_ms))

    async def produce_batch(self, payloads: Sequence[bytes], due_ms: Sequence[int]) -> None:
        await self.produce_prepared(await self.prepare(payloads, due_ms))

    async def prepare(self, payloads: Sequence[bytes], due_ms: Sequence[int]) -> Any:
        """Make the headers; the client writes its frames by itself."""
        return [(payload, _headers(due)) for payload, due in zip(payloads, due_ms, strict=True)]

    async def produce_prepared(self, prepared: Any) -> None:
        answers = [
            await self._stream.publish_async(next(self._subjects), payload, headers=headers)
            for payload, headers in prepared
        ]
        await asyncio.gather(*answers)

    async def consume(self, count: int, note: Note) -> None:
        subscription = await self._stream.pull_subscribe_bind(_CONSUMER, _STREAM)
        while count > 0:
            messages = await subscription.fetch(min(count, _TAKE), timeout=60)
            note([message.data for message in messages])
            await messages[-1].ack_sync(timeout=60)
            count -= len(messages)

    async def close(self) -> None:
        if self._connection is not None:
            await self._connection.close()


def _headers(due_ms: int) -> dict[str, str]:
    at = datetime.fromtimestamp(due_ms / 1000, UTC).isoformat(timespec="milliseconds")
    return {"Nats-Schedule": f"@at {at.removesuffix('+00:00')}Z", "Nats-Schedule-Target": _DUE}


def _program() -> str:
    """The server that we built, or the one of this machine if it has schedules; empty without one."""
    path = program("nats-server", str(_BIN))
    return path if path and has_schedules(said_version(path, "--version")) else ""


def has_schedules(version: str) -> bool:
    return tuple(map(int, re.findall(r"\d+", version))) >= _SCHEDULES_SINCE
