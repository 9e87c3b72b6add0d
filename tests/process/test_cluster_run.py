"""Three nodes whose owner is killed, frozen, cut off and robbed of its disk in turn: no promise to a client is broken."""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

import pytest

from tests.depth import DAY
from tests.process.cluster_run import PROCESS_KINDS, Run
from tests.process.namespaces import need_namespaces


@pytest.mark.deep
@pytest.mark.parametrize(("site", "shards"), [("file", 1), ("s3", 1), ("namespaces", 1), ("file", 8)])
async def test_no_promise_is_broken_whatever_becomes_of_the_owner(tmp_path: Path, site: str, shards: int):
    if site != "file" and shutil.which("versitygw") is None:
        pytest.skip("versitygw is not installed (see tests/s3_server.py)")
    if site == "namespaces":
        need_namespaces()
    options = argparse.Namespace(
        minutes=10, every=30, rate=200, site=site, seed=DAY, shards=shards, nodes=3, faults=None
    )
    run = Run(options, tmp_path)
    assert await run.go()
    assert sum(run.faults.values()) >= 10
    taking = sum(
        count for kind, count in run.faults.items() if kind in (*run.site.takes_owner, *PROCESS_KINDS)
    )
    assert run.epochs >= taking + shards, "some faults took no owner away"
