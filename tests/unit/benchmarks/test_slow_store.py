"""The store of the benchmarks of a cluster keeps the promises of an object store, through the broker's own client."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.slow_store import BUCKET, make_server
from broker.cluster.object_store import ObjectStore
from broker.cluster.stores import open_store
from tests.s3_server import CREDENTIALS


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectStore]:
    pytest.importorskip("obstore")
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    with make_server(str(tmp_path), 0) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield open_store(f"s3://{BUCKET}/?endpoint=http://127.0.0.1:{server.server_port}")
        server.shutdown()
        thread.join()


async def test_objects_are_created_once_read_listed_and_removed(store: ObjectStore) -> None:
    for number in range(3):
        await store.create(f"log/{number}", b"group %d" % number)
    with pytest.raises(FileExistsError):
        await store.create("log/1", b"another")
    assert await store.read("log/1") == b"group 1"
    assert await store.read_range("log/1", 2, 3) == b"oup"
    assert await store.read_range("log/1", 500, 3) == b"", "nothing behind the end"
    assert (await store.info("log/2")).bytes == 7
    assert [info.name async for info in store.objects("log", after="log/0")] == ["log/1", "log/2"]
    await store.remove("log/1")
    with pytest.raises(FileNotFoundError):
        await store.read("log/1")
