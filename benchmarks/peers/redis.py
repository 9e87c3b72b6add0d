"""Redis: a sorted set by due time, another of what is out, and two scripts."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

from benchmarks.peers.peer import Note, Peer
from benchmarks.peers.programs import library, program, said_version

_LEASE_MS = 60_000
_TAKE = 1_000
_POLL_SECONDS = 0.005

# KEYS: waiting, number. ARGV: due time, payload, and so on. A number before the payload keeps equal payloads apart.
_STORE = """
local count = #ARGV / 2
local number = redis.call('INCRBY', KEYS[2], count) - count
for i = 1, count do ARGV[2 * i] = struct.pack('>L', number + i) .. ARGV[2 * i] end
redis.call('ZADD', KEYS[1], unpack(ARGV))
return count
"""
# KEYS: waiting, out. ARGV: now, end of the lease, how many at most.
_TAKE_DUE = """
local due = redis.call('ZRANGE', KEYS[1], '-inf', ARGV[1], 'BYSCORE', 'LIMIT', 0, ARGV[3])
if #due == 0 then return due end
local leased = {}
for i = 1, #due do leased[2 * i - 1] = ARGV[2]; leased[2 * i] = due[i] end
redis.call('ZREM', KEYS[1], unpack(due))
redis.call('ZADD', KEYS[2], unpack(leased))
return due
"""
_WAITING, _OUT, _NUMBER = "waiting", "out", "number"


class Redis(Peer):
    """A server with an append-only file that is synced before each answer."""

    title = "Redis"
    answer = "fsync of the append-only file returned (`appendfsync always`)"
    setup = (
        "`appendfsync always`, no snapshots by time; redis-py with hiredis; a sorted set and two Lua scripts "
        "(store; take with a lease); an acknowledgement goes in one pipeline with the next take; "
        f"what is due is asked for every {_POLL_SECONDS * 1000:.0f} ms"
    )
    libraries = ("redis", "hiredis")

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._client: Any = None
        self._store: Any = None
        self._connections: list[Any] = []

    @classmethod
    def missing(cls) -> str:
        return "" if program("redis-server") else "redis-server"

    @classmethod
    def version(cls) -> str:
        return said_version("redis-server", "--version")

    def command(self) -> list[str]:
        return [
            *(program("redis-server"), "--port", str(self.ports[0]), "--bind", "127.0.0.1"),
            *("--dir", str(self.folder / "data"), "--daemonize", "no", "--save", ""),
            *("--appendonly", "yes", "--appendfsync", "always"),
        ]

    async def connect(self) -> None:
        redis = library("redis.asyncio")
        client = redis.Redis(host="127.0.0.1", port=self.ports[0], protocol=2)
        try:
            await client.ping()
            self._store = await client.script_load(_STORE)
        except BaseException:
            await client.aclose()
            raise
        self._client = client

    async def produce(self, payload: bytes, due_ms: int) -> None:
        await self._client.evalsha(self._store, 2, _WAITING, _NUMBER, due_ms, payload)

    async def produce_batch(self, payloads: Sequence[bytes], due_ms: Sequence[int]) -> None:
        pairs = [each for pair in zip(due_ms, payloads, strict=True) for each in pair]
        await self._client.evalsha(self._store, 2, _WAITING, _NUMBER, *pairs)

    async def prepare(self, payloads: Sequence[bytes], due_ms: Sequence[int]) -> Any:
        pairs = [each for pair in zip(due_ms, payloads, strict=True) for each in pair]
        connection = await self._client.connection_pool.get_connection()
        try:
            return b"".join(
                connection.pack_commands([("EVALSHA", self._store, 2, _WAITING, _NUMBER, *pairs)])
            )
        finally:
            await self._client.connection_pool.release(connection)

    async def produce_prepared(self, prepared: Any) -> None:
        pool = self._client.connection_pool
        connection = await pool.get_connection()
        try:
            await connection.send_packed_command(prepared)
            await connection.read_response()
        finally:
            await pool.release(connection)

    async def consume(self, count: int, note: Note) -> None:
        take = await self._client.script_load(_TAKE_DUE)
        taken: list[bytes] = []
        while count > 0 or taken:
            pipeline = self._client.pipeline(transaction=False)
            if taken:
                pipeline.zrem(_OUT, *taken)
            if count > 0:
                now = int(time.time() * 1000)
                pipeline.evalsha(take, 2, _WAITING, _OUT, now, now + _LEASE_MS, min(count, _TAKE))
            answers = await pipeline.execute()
            taken = answers[-1] if count > 0 else []
            count -= len(taken)
            if taken:
                note([member[8:] for member in taken])
            elif count > 0:
                await asyncio.sleep(_POLL_SECONDS)

    async def close(self) -> None:
        if self._client is not None:
            await self._client.aclose()
