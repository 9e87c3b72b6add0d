"""An object store in a process of its own, as slow as one of the same region.

`python -m benchmarks.slow_store FOLDER PORT [MEDIAN_MS,P99_MS]`. It speaks as much of S3 as the broker's library asks
for, over a folder. The times of creates are drawn from a lognormal distribution with that median and 99th percentile;
what the folder takes itself, a few milliseconds, comes on top.
"""

from __future__ import annotations

import asyncio
import math
import random
import sys
import time
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from functools import partial
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, TypeVar
from urllib.parse import parse_qs, unquote, urlsplit
from xml.etree import ElementTree
from xml.sax.saxutils import escape

from broker.cluster.file_store import FileStore
from broker.cluster.object_store import ObjectInfo
from broker.runtime.steps import InThisThread

T = TypeVar("T")

BUCKET = "benchmarks"
_Z99 = 2.326
"""The 99th percentile of the standard normal distribution."""


def put_pauses(put_ms: str) -> Callable[[], float]:
    """Return what draws the seconds of a create, from a median and a 99th percentile."""
    if not put_ms:
        return lambda: 0.0
    median_ms, p99_ms = map(float, put_ms.split(","))
    sigma = math.log(p99_ms / median_ms) / _Z99
    return lambda: random.lognormvariate(math.log(median_ms), sigma) / 1e3


class _Requests(BaseHTTPRequestHandler):
    """The requests of one connection."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    store: FileStore
    pause_seconds: Callable[[], float]

    def do_PUT(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        assert self.headers["If-None-Match"] == "*", "the broker overwrites nothing"
        time.sleep(self.pause_seconds())
        try:
            self._run(lambda: self.store.create(self._name(), body))
        except FileExistsError:
            self._answer(HTTPStatus.PRECONDITION_FAILED)
        else:
            self._answer(HTTPStatus.OK)

    def do_GET(self) -> None:
        if not self._name():
            self._list()
            return
        try:
            info = self._run(lambda: self.store.info(self._name()))
        except FileNotFoundError:
            self._answer(HTTPStatus.NOT_FOUND)
            return
        asked = self.headers["Range"]
        if asked is None:
            body = self._run(lambda: self.store.read(self._name()))
            self._answer(HTTPStatus.OK, body, info)
            return
        first, last = map(int, asked.removeprefix("bytes=").split("-"))
        if first >= info.bytes:
            self._answer(HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE)
            return
        body = self._run(lambda: self.store.read_range(self._name(), first, last + 1 - first))
        self._answer(
            HTTPStatus.PARTIAL_CONTENT, body, info, f"bytes {first}-{first + len(body) - 1}/{info.bytes}"
        )

    def do_HEAD(self) -> None:
        try:
            info = self._run(lambda: self.store.info(self._name()))
        except FileNotFoundError:
            self._answer(HTTPStatus.NOT_FOUND)
        else:
            self._answer(HTTPStatus.OK, b"", info, length=info.bytes)

    def do_POST(self) -> None:
        """Remove the objects that a document names, which is how the library removes even one."""
        asked = ElementTree.fromstring(self.rfile.read(int(self.headers["Content-Length"])))
        keys = [each.text or "" for each in asked.iter() if each.tag.endswith("Key")]
        for key in keys:
            self._run(partial(self.store.remove, key))
        removed = "".join(f"<Deleted><Key>{escape(key)}</Key></Deleted>" for key in keys)
        self._answer(HTTPStatus.OK, f"<DeleteResult>{removed}</DeleteResult>".encode())

    def _list(self) -> None:
        asked = {name: values[0] for name, values in parse_qs(urlsplit(self.path).query).items()}
        found = self._run(
            lambda: _infos(self.store, asked.get("prefix", "").rstrip("/"), asked.get("start-after", ""))
        )
        contents = "".join(
            f"<Contents><Key>{escape(info.name)}</Key><LastModified>{_iso(info.modified_ms)}</LastModified>"
            f"<Size>{info.bytes}</Size></Contents>"
            for info in found
        )
        self._answer(
            HTTPStatus.OK,
            f"<ListBucketResult><IsTruncated>false</IsTruncated>{contents}</ListBucketResult>".encode(),
        )

    def _name(self) -> str:
        return unquote(urlsplit(self.path).path).removeprefix(f"/{BUCKET}").strip("/")

    def _run(self, begin: Callable[[], Awaitable[T]]) -> T:
        async def run() -> T:
            return await begin()

        return asyncio.run(run())

    def _answer(
        self,
        status: HTTPStatus,
        body: bytes = b"",
        info: ObjectInfo | None = None,
        content_range: str = "",
        *,
        length: int | None = None,
    ) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body) if length is None else length))
        self.send_header("ETag", '"once"')  # no object has a second content
        if info is not None:
            at = datetime.fromtimestamp(info.modified_ms / 1e3, UTC)
            self.send_header("Last-Modified", f"{at:%a, %d %b %Y %H:%M:%S GMT}")
        if content_range:
            self.send_header("Content-Range", content_range)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        pass


async def _infos(store: FileStore, folder: str, after: str) -> list[ObjectInfo]:
    return [info async for info in store.objects(folder, after=after)]


def _iso(time_ms: int) -> str:
    return f"{datetime.fromtimestamp(time_ms / 1e3, UTC):%Y-%m-%dT%H:%M:%S.000Z}"


def make_server(folder: str, port: int, put_ms: str = "") -> ThreadingHTTPServer:
    """Return a server that listens; with port 0 on one that is free."""

    class Requests(_Requests):
        store = FileStore(folder, executor=InThisThread())
        pause_seconds = staticmethod(put_pauses(put_ms))

    server = ThreadingHTTPServer(("127.0.0.1", port), Requests)
    server.daemon_threads = True
    return server


if __name__ == "__main__":
    make_server(sys.argv[1], int(sys.argv[2]), *sys.argv[3:]).serve_forever()
