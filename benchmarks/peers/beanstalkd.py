"""beanstalkd: jobs with delays in whole seconds, synced one by one."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.client.control import check
from benchmarks.peers.peer import Note, Peer
from benchmarks.peers.programs import library, program, said_version


class Beanstalkd(Peer):
    """A server that syncs its log after each job."""

    title = "beanstalkd"
    answer = "fsync of the log returned (`-f0`), once for each job"
    setup = (
        "`-f0`; greenstalk, which waits for each answer before the next job; prepared batches are written to a "
        "socket in one go; delays are whole seconds, rounded up"
    )
    libraries = ("greenstalk",)
    in_flight = 1

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._client: Any = None
        self._reader: Any = None
        self._writer: Any = None

    @classmethod
    def missing(cls) -> str:
        return "" if program("beanstalkd") else "beanstalkd"

    @classmethod
    def version(cls) -> str:
        return said_version(program("beanstalkd"), "-v")

    def command(self) -> list[str]:
        data = str(self.folder / "data")
        return [program("beanstalkd"), "-b", data, "-f0", "-l", "127.0.0.1", "-p", str(self.ports[0])]

    async def connect(self) -> None:
        self._client = self._open()

    async def produce(self, payload: bytes, due_ms: int) -> None:
        self._client.put(payload, delay=_delay(due_ms))

    async def produce_batch(self, payloads: Sequence[bytes], due_ms: Sequence[int]) -> None:
        for payload, due in zip(payloads, due_ms, strict=True):
            self._client.put(payload, delay=_delay(due))

    async def prepare(self, payloads: Sequence[bytes], due_ms: Sequence[int]) -> Any:
        """Delays count from the moment of storing; those of a batch are at least right when it is prepared."""
        return len(payloads), b"".join(
            b"put 65536 %d 60 %d\r\n%b\r\n" % (_delay(due), len(payload), payload)
            for payload, due in zip(payloads, due_ms, strict=True)
        )

    async def produce_prepared(self, prepared: Any) -> None:
        count, commands = prepared
        if self._writer is None:
            self._reader, self._writer = await asyncio.open_connection("127.0.0.1", self.ports[0])
        self._writer.write(commands)
        for _ in range(count):
            answer = await self._reader.readline()
            check(answer.startswith(b"INSERTED "), f"a job was refused: {answer!r}")

    async def consume(self, count: int, note: Note) -> None:
        """Take jobs in a thread, as this client waits in the call."""
        loop = asyncio.get_running_loop()

        def work(say: Callable[..., Any]) -> None:
            with self._open() as client:
                for _ in range(count):
                    job = client.reserve()
                    say(note, [job.body])
                    client.delete(job)

        await asyncio.to_thread(work, loop.call_soon_threadsafe)

    async def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
        if self._client is not None:
            self._client.close()

    def _open(self) -> Any:
        return library("greenstalk").Client(("127.0.0.1", self.ports[0]), encoding=None)


def _delay(due_ms: int) -> int:
    """Whole seconds until a due time, never too few."""
    return max(0, -int(-(due_ms / 1000 - time.time()) // 1))
