"""A real S3-compatible server for the tests that need one: versitygw, over a folder.

go install github.com/versity/versitygw/cmd/versitygw@v1.8.0
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

PROGRAM = "versitygw"
BUCKET = "postdate"
CREDENTIALS = {"AWS_ACCESS_KEY_ID": "postdate-tests", "AWS_SECRET_ACCESS_KEY": "not-a-secret-of-anybody"}


def need_server() -> str:
    """Return the path of the server's program; without it the test is skipped."""
    path = shutil.which(PROGRAM)
    if path is None:
        pytest.skip(f"{PROGRAM} is not installed (see tests/s3_server.py)")
    return path


def store_url(port: int, prefix: str = "") -> str:
    return f"s3://{BUCKET}/{prefix}?endpoint=http://127.0.0.1:{port}"


@contextlib.asynccontextmanager
async def s3_server(program: str, folder: Path, *options: str) -> AsyncIterator[int]:
    """A server with an empty bucket, and its port. Whoever opens a store of it needs CREDENTIALS in the environment.

    With the option `--nometa` it does not keep the condition of a create.
    """
    (folder / BUCKET).mkdir(parents=True)
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    environment = {
        **os.environ,
        "ROOT_ACCESS_KEY": CREDENTIALS["AWS_ACCESS_KEY_ID"],
        "ROOT_SECRET_KEY": CREDENTIALS["AWS_SECRET_ACCESS_KEY"],
    }
    process = await asyncio.create_subprocess_exec(
        program, "--port", f"127.0.0.1:{port}", "--quiet", "--keep-alive", "posix", *options, str(folder),
        env=environment, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL,
    )  # fmt: skip
    try:
        await _listening(process, port)
        yield port
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def _listening(process: asyncio.subprocess.Process, port: int) -> None:
    async with asyncio.timeout(60):
        while True:
            assert process.returncode is None, "the server has ended"
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", port)
            except OSError:
                await asyncio.sleep(0.05)
            else:
                writer.close()
                return
