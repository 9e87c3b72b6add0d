"""The commands `cluster create` and `cluster check-store`, and `cluster status` of a store."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

import click

from broker.cluster.base_store import ATTEMPT
from broker.cluster.check_store import CUT_NAMES, NAMES, StoreCheck, check_store
from broker.cluster.creation import create_cluster, read_cluster
from broker.cluster.object_store import ObjectStore
from broker.cluster.store_status import read_state, render_state
from broker.cluster.stores import open_store
from broker.errors import AlreadyExists, PostdateError
from broker.runtime.clock import SystemClock
from broker.settings import ConfigError

T = TypeVar("T")

PASSED, UNOWNED, FAILED = 0, 1, 2


def check_store_command(urls: Sequence[str]) -> int:
    """Check a store through the endpoints of its URLs; returns the exit code."""
    return _run(lambda: _check_and_tell([open_store(url) for url in urls]))


def create_command(url: str, *, shards: int, owner_lease_ms: int, if_missing: bool) -> int:
    """Check a store and make a cluster in it; returns the exit code."""
    return _run(lambda: _create(open_store(url), shards, owner_lease_ms, if_missing=if_missing))


def store_status_command(url: str) -> int:
    """Show what a store tells of a cluster; returns the exit code."""
    return _run(lambda: _tell_state(open_store(url, ATTEMPT)))


async def _tell_state(store: ObjectStore) -> int:
    clock = SystemClock()
    cluster, shards = await read_state(store, clock)
    now_ms = clock.now_ms()
    for line in render_state(cluster, shards, now_ms):
        click.echo(line)
    return PASSED if all(shard.is_owned(cluster.owner_lease_ms, now_ms) for shard in shards) else UNOWNED


async def _create(store: ObjectStore, shards: int, owner_lease_ms: int, *, if_missing: bool) -> int:
    if if_missing:
        try:
            cluster = await read_cluster(store)
        except PostdateError:
            pass
        else:
            click.echo(f"{store.url} holds cluster {cluster.id} with {cluster.shards} shards already")
            return PASSED
    if await _check_and_tell([store]) != PASSED:
        return FAILED
    try:
        cluster = await create_cluster(store, shards, owner_lease_ms)
    except AlreadyExists:
        if not if_missing:
            raise
        cluster = await read_cluster(store)
    click.echo(f"{store.url} holds cluster {cluster.id} with {cluster.shards} shards")
    return PASSED


async def _check_and_tell(stores: Sequence[ObjectStore]) -> int:
    with click.progressbar(length=NAMES + CUT_NAMES, label="Checking the store", file=sys.stderr) as bar:
        check = await check_store(stores, note=lambda done: bar.update(done - bar.pos))
    _tell(check, stores)
    return PASSED if check.passed else FAILED


def _tell(check: StoreCheck, stores: Sequence[ObjectStore]) -> None:
    click.echo(
        f"{check.names} names, {check.creates} creates, {check.cut} of them interrupted and repeated, "
        f"{check.unanswered} without an answer, through {len(stores)} endpoint{'s' if len(stores) > 1 else ''}"
    )
    click.echo(f"time of a create: median {check.create_ms(0.5):.1f} ms, maximum {check.create_ms(1):.1f} ms")
    for problem in check.problems:
        click.echo(f"problem: {problem}")
    if check.passed:
        click.echo("passed: each name was created by exactly one client")
    else:
        click.echo("failed: a cluster in this store would lose acknowledged messages; do not use it")


def _run(work: Callable[[], Coroutine[Any, Any, int]]) -> int:
    try:
        return asyncio.run(work())
    except (ConfigError, PostdateError) as error:
        raise click.ClickException(str(error)) from error
    except OSError as error:
        raise click.ClickException(f"The store cannot be used: {error}") from error
