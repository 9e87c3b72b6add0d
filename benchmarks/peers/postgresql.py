"""PostgreSQL: a table, an index by due time, and consumers that skip what others have locked."""

from __future__ import annotations

import asyncio
import io
import os
import shutil
import struct
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.peers.peer import Note, Peer
from benchmarks.peers.programs import BUILD, library, program, said_version, unprivileged

_TAKE = 1_000
_CONSUMERS = 2
_CONNECTIONS_MAX = 8
_POLL_SECONDS = 0.005
_CREATE = """
CREATE TABLE message (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    due_ms bigint NOT NULL,
    payload bytea NOT NULL
);
CREATE INDEX message_due ON message (due_ms)
"""
_STORE_ONE = "INSERT INTO message (due_ms, payload) VALUES ($1, $2)"
_STORE = "INSERT INTO message (due_ms, payload) SELECT * FROM unnest($1::bigint[], $2::bytea[])"
_TAKE_DUE = """
DELETE FROM message WHERE id = ANY (ARRAY(
    SELECT id FROM message WHERE due_ms <= $1 ORDER BY due_ms LIMIT $2 FOR UPDATE SKIP LOCKED
)) RETURNING payload
"""
_COPY_HEADER = b"PGCOPY\n\xff\r\n\0" + struct.pack(">ii", 0, 0)
_COPY_END = struct.pack(">h", -1)


class PostgreSQL(Peer):
    """A server that has a quarter of the memory, as its documentation advises, and no replicas."""

    title = "PostgreSQL"
    answer = "the commit's WAL is flushed (`synchronous_commit = on`)"
    setup = (
        "`shared_buffers` a quarter of the memory (4 GiB at most), `wal_level = minimal`, `max_wal_size = 8GB`, "
        "`checkpoint_timeout = 15min`; asyncpg; `INSERT ... unnest`, and binary COPY for prepared batches; "
        f"{_CONSUMERS} consumers `DELETE ... FOR UPDATE SKIP LOCKED`, whose commit is the acknowledgement; "
        f"what is due is asked for every {_POLL_SECONDS * 1000:.0f} ms"
    )
    libraries = ("asyncpg",)

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._pool: Any = None

    @classmethod
    def missing(cls) -> str:
        return "" if _program("postgres") else "postgresql"

    @classmethod
    def version(cls) -> str:
        return said_version(_program("postgres"), "--version")

    def command(self) -> list[str]:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        settings = {
            "listen_addresses": "127.0.0.1",
            "port": self.ports[0],
            "unix_socket_directories": "",
            "shared_buffers": f"{min(memory // 4, 4 << 30) >> 20}MB",
            "wal_level": "minimal",
            "max_wal_senders": 0,
            "max_wal_size": "8GB",
            "checkpoint_timeout": "15min",
            "wal_buffers": "16MB",
        }
        flags = [flag for name, value in settings.items() for flag in ("-c", f"{name}={value}")]
        return [_program("postgres"), "-D", str(self.folder / "data"), *flags]

    def prepare_folder(self) -> None:
        """Copy an empty cluster, which is made once."""
        self.folder.mkdir(parents=True)
        user = self.spawn_options()
        empty = BUILD / "postgresql-empty"
        if not (empty / ".made").exists():
            shutil.rmtree(empty, ignore_errors=True)
            empty.mkdir(parents=True)
            _give(empty, user)
            command = [_program("initdb"), "--pgdata", str(empty / "data"), "--auth", "trust"]
            command += ["--username", "postgres", "--encoding", "UTF8", "--no-locale"]
            subprocess.run(command, check=True, capture_output=True, cwd=empty, **user)
            (empty / ".made").touch()
        shutil.copytree(empty / "data", self.folder / "data")
        for path in (self.folder, *self.folder.rglob("*")):
            _give(path, user)

    def spawn_options(self) -> dict[str, Any]:
        return unprivileged("postgres")

    async def connect(self) -> None:
        asyncpg = library("asyncpg")
        self._pool = await asyncpg.create_pool(
            host="127.0.0.1",
            port=self.ports[0],
            user="postgres",
            database="postgres",
            min_size=1,
            max_size=_CONNECTIONS_MAX,
        )

    async def create(self) -> None:
        await self._pool.execute(_CREATE)

    async def produce(self, payload: bytes, due_ms: int) -> None:
        await self._pool.execute(_STORE_ONE, due_ms, payload)

    async def produce_batch(self, payloads: Sequence[bytes], due_ms: Sequence[int]) -> None:
        await self._pool.execute(_STORE, due_ms, payloads)

    async def prepare(self, payloads: Sequence[bytes], due_ms: Sequence[int]) -> bytes:
        rows = (
            struct.pack(">hiqi", 2, 8, due, len(payload)) + payload
            for payload, due in zip(payloads, due_ms, strict=True)
        )
        return _COPY_HEADER + b"".join(rows) + _COPY_END

    async def produce_prepared(self, prepared: bytes) -> None:
        await self._pool.copy_to_table(
            "message", columns=("due_ms", "payload"), source=io.BytesIO(prepared), format="binary"
        )

    async def consume(self, count: int, note: Note) -> None:
        left = count

        async def work() -> None:
            nonlocal left
            async with self._pool.acquire() as connection:
                statement = await connection.prepare(_TAKE_DUE)
                while left > 0:
                    rows = await statement.fetch(int(time.time() * 1000), _TAKE)
                    left -= len(rows)
                    if rows:
                        note([row[0] for row in rows])
                    else:
                        await asyncio.sleep(_POLL_SECONDS)

        async with asyncio.TaskGroup() as tasks:
            for _ in range(_CONSUMERS):
                tasks.create_task(work())

    async def close(self) -> None:
        if self._pool is not None:
            await self._pool.close()


def _program(name: str) -> str:
    return program(name, *map(str, sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)))


def _give(path: Path, user: dict[str, Any]) -> None:
    if user:
        os.chown(path, user["user"], user["group"])
