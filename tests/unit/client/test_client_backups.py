"""Backups as plain values."""

from __future__ import annotations

from datetime import timedelta

import pytest

import postdate
from tests.unit.client.fake_server import FakeBroker
from tests.unit.client.fake_values import status


async def test_backups_are_made_listed_over_pages_and_deleted(
    broker: FakeBroker, client: postdate.Client
) -> None:
    made = [
        await client.backups.create("nightly"),
        await client.backups.create(),
        await client.backups.create(),
    ]
    first = made[0]
    assert (first.label, first.path, first.broker_id) == ("nightly", f"/b/{first.name}", "id")
    assert (first.lsn, first.topics, first.files, first.bytes, first.copied_bytes) == (7, 2, 9, 1000, 300)
    assert first.create_time.year == 2023
    assert first.duration == timedelta(seconds=1.5)
    assert [each async for each in client.backups.list()] == made
    assert len({request.request_id for request in broker.unary}) == 3
    await client.backups.delete(first.name)
    assert [each async for each in client.backups.list()] == made[1:]
    with pytest.raises(postdate.NotFound) as caught:
        await client.backups.delete(first.name)
    assert caught.value.reason == "BACKUP_NOT_FOUND"


async def test_a_running_backup_is_a_failed_precondition(broker: FakeBroker, client: postdate.Client) -> None:
    broker.knobs.unary_errors.append(status("FAILED_PRECONDITION", "BACKUP_RUNNING", "one at a time"))
    with pytest.raises(postdate.FailedPrecondition) as caught:
        await client.backups.create()
    assert caught.value.reason == "BACKUP_RUNNING"
