"""Bases in a real S3-compatible server behind a proxy that cuts connections."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from broker.cluster import patient_store
from broker.cluster.base_store import BaseCut, BaseStore
from broker.cluster.stores import open_store
from broker.runtime.clock import SystemClock
from broker.runtime.steps import InThisThread
from broker.storage.layout import Layout
from broker.testing.mem_vfs import MemVfs
from tests.cutting_proxy import Cut, CuttingProxy
from tests.s3_server import CREDENTIALS, need_server, s3_server, store_url
from tests.unit.cluster.test_base_store import CHUNK, a_folder, files_of

ROUNDS = 200


# The library removes objects by POST.
@pytest.mark.slow
@pytest.mark.parametrize("method", ["PUT", "GET", "HEAD", "POST"])
async def test_what_is_cut_is_repeated_and_stored_once(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("obstore")
    monkeypatch.setattr(patient_store, "FIRST_PAUSE_SECONDS", 0.001)
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    proxy = CuttingProxy(method)
    proxy.cuts.extend(itertools.islice(itertools.cycle([Cut.BEFORE, None, Cut.IN, None, Cut.AFTER]), ROUNDS))
    async with s3_server(need_server(), tmp_path) as server_port, proxy.before(server_port) as port:
        bases = BaseStore(open_store(store_url(port, "p")), SystemClock(), InThisThread(), chunk_bytes=CHUNK)
        folder = a_folder()
        base = await bases.upload(folder, Layout("data"), BaseCut("t", "", "one", 5, 100, 1))
        manifest = await bases.read_manifest(base.name)
        target = MemVfs()
        target.make_dir("to")
        await bases.download(target, manifest, manifest.files.keys(), "to")
        assert files_of(target, "to") == files_of(folder, "data")
        assert proxy.cut_count > 0
        server = open_store(store_url(server_port, "p"))
        chunks = [info.name.rpartition("/")[2][:64] async for info in server.objects("chunks")]
        assert len(chunks) == len(set(chunks)) == len(manifest.chunk_names())
        assert not [info async for info in server.objects("probe")]
