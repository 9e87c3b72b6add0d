"""Real S3-compatible servers for the tests that need one, each over a folder. They build from Go modules in minutes.

go install github.com/versity/versitygw/cmd/versitygw@v1.8.0
go install github.com/minio/minio@v0.0.0-20260212201848-7aac2a2c5b7c
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest

from benchmarks.processes import free_ports

SERVERS = ("versitygw", "minio")
BUCKET = "postdate"
CREDENTIALS = {"AWS_ACCESS_KEY_ID": "postdate-tests", "AWS_SECRET_ACCESS_KEY": "not-a-secret-of-anybody"}


def need_server(name: str = "versitygw") -> str:
    """Return the path of a server's program; without it the test is skipped."""
    path = shutil.which(name)
    if path is None:
        pytest.skip(f"{name} is not installed (see tests/s3_server.py)")
    return path


def store_url(port: int, prefix: str = "", host: str = "127.0.0.1") -> str:
    return f"s3://{BUCKET}/{prefix}?endpoint=http://{host}:{port}"


@contextlib.asynccontextmanager
async def s3_server(
    program: str,
    folder: Path,
    *options: str,
    host: str = "127.0.0.1",
    port: int = 0,
    command: Sequence[str] = (),
) -> AsyncIterator[int]:
    """A server with a bucket, and its port. Whoever opens a store of it needs CREDENTIALS in the environment.

    `command` are words before its own, which have it run elsewhere. With the option `--nometa` versitygw does not keep
    the condition of a create.
    """
    (folder / BUCKET).mkdir(parents=True, exist_ok=True)
    port = port or free_ports(1)[0]
    process = await asyncio.create_subprocess_exec(
        *command, program, *_arguments(program, f"{host}:{port}", folder, options),
        env=_environment(), stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL,
    )  # fmt: skip
    try:
        await _serving(process, host, port)
        yield port
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


def _arguments(program: str, address: str, folder: Path, options: tuple[str, ...]) -> list[str]:
    if program.endswith("minio"):
        return ["server", "--quiet", "--address", address, *options, str(folder)]
    return ["--port", address, "--quiet", "--keep-alive", "posix", *options, str(folder)]


def _environment() -> dict[str, str]:
    key, secret = CREDENTIALS.values()
    return {
        **os.environ,
        "ROOT_ACCESS_KEY": key,
        "ROOT_SECRET_KEY": secret,
        "MINIO_ROOT_USER": key,
        "MINIO_ROOT_PASSWORD": secret,
        "MINIO_BROWSER": "off",
    }


async def _serving(process: asyncio.subprocess.Process, host: str, port: int) -> None:
    """Wait until the server answers a request; MinIO listens before it can."""
    async with asyncio.timeout(60):
        while True:
            assert process.returncode is None, "the server has ended"
            with contextlib.suppress(OSError):
                reader, writer = await asyncio.open_connection(host, port)
                writer.write(f"GET /{BUCKET} HTTP/1.0\r\nHost: {host}\r\n\r\n".encode())
                answer = await reader.readline()
                writer.close()
                if b" 403 " in answer:  # nobody asked with credentials
                    return
            await asyncio.sleep(0.05)
