"""Fixtures for pytest: `from postdate.testing.fixtures import fake_broker` in a conftest.py."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import postdate.sync.testing
from postdate.testing import FakeBroker, start_inside

__all__ = ["fake_broker", "sync_fake_broker"]


@pytest.fixture
def fake_broker() -> Iterator[FakeBroker]:
    """A `postdate.testing.FakeBroker` of the test's own, for tests with asyncio, whichever plugin runs them."""
    inside = start_inside()
    try:
        yield FakeBroker(inside)
    finally:
        inside.stop()


@pytest.fixture
def sync_fake_broker() -> Iterator[postdate.sync.testing.FakeBroker]:
    """A `postdate.sync.testing.FakeBroker` of the test's own."""
    with postdate.sync.testing.broker() as fake:
        yield fake
