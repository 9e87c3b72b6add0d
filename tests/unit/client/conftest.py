"""A fake broker and a client of it."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from datetime import timedelta

import pytest

import postdate
from tests.unit.client.fake_server import FakeBroker


@pytest.fixture
async def broker() -> AsyncIterator[FakeBroker]:
    fake = FakeBroker()
    await fake.start()
    yield fake
    await fake.stop()


@pytest.fixture
async def client(broker: FakeBroker) -> AsyncIterator[postdate.Client]:
    address = f"127.0.0.1:{broker.port}"
    retry_for = timedelta(seconds=5)
    async with postdate.connect(address, retry_for=retry_for, rng=random.Random(1)) as connected:
        yield connected
