"""The commands about clusters, as they are typed."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from broker.cli import main
from broker.cluster.check_store import check_store
from broker.cluster.creation import read_cluster
from broker.cluster.stores import open_store


@pytest.fixture(autouse=True)
def small_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A check of few names: that it finds what is wrong is tested elsewhere."""

    async def few(stores, **given):
        return await check_store(stores, names=2, clients=8, cut_names=1, **given)

    monkeypatch.setattr("broker.cluster.command.check_store", few)


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["cluster", *arguments])


@pytest.mark.slow
def test_a_store_that_will_do_passes(tmp_path: Path) -> None:
    done = run("check-store", f"file://{tmp_path}", f"file://{tmp_path}")
    assert done.exit_code == 0, done.output
    assert (
        "through 2 endpoints" in done.output and "passed: each name was created by exactly one" in done.output
    )
    assert not list(tmp_path.rglob("*-*"))


def test_a_store_that_will_not_do_fails(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    done = run("check-store", f"file://{tmp_path}/a", f"file://{tmp_path}/b")
    assert (
        done.exit_code == 2
        and "failed: a cluster in this store would lose acknowledged messages" in done.output
    )
    assert "problem: " in done.output


@pytest.mark.slow
def test_a_cluster_is_created_once(tmp_path: Path) -> None:
    url = f"file://{tmp_path}"
    done = run("create", url, "--shards", "3", "--owner-lease-ms", "2000")
    assert done.exit_code == 0, done.output
    cluster = asyncio.run(read_cluster(open_store(url)))
    assert (cluster.shards, cluster.owner_lease_ms) == (3, 2000)
    assert f"{url} holds cluster {cluster.id} with 3 shards" in done.output
    again = run("create", url)
    assert again.exit_code == 1 and "already contains a cluster" in again.output
    again = run("create", url, "--if-missing")
    assert again.exit_code == 0 and f"{cluster.id} with 3 shards already" in again.output


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("file:///no/such/folder", "The store cannot be used: Folder /no/such/folder does not exist"),
        ("ftp://host", "ftp://host: the URL of an object store must begin with s3://"),
    ],
)
@pytest.mark.parametrize("name", ["check-store", "create"])
def test_what_cannot_be_used_is_told(name: str, url: str, problem: str) -> None:
    done = run(name, url)
    assert done.exit_code == 1 and problem in done.output and "Traceback" not in done.output
