"""Three nodes whose owner is killed, frozen and cut off in turn, for minutes: the clients' history shows no broken promise."""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

import pytest

from tests.depth import DAY
from tests.process.cluster_run import Run


@pytest.mark.deep
@pytest.mark.parametrize("store", ["file", "s3"])
async def test_no_promise_is_broken_whatever_becomes_of_the_owner(tmp_path: Path, store: str):
    if store == "s3" and shutil.which("versitygw") is None:
        pytest.skip("versitygw is not installed (see tests/s3_server.py)")
    options = argparse.Namespace(minutes=10, every=30, rate=200, store=store, seed=DAY)
    run = Run(options, tmp_path)
    assert await run.go()
    assert sum(run.faults.values()) >= 15
    assert run.epoch > sum(run.faults.values()), "some faults took no owner away"
