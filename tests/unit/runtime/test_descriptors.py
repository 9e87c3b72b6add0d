"""Descriptors: connections leave room for files, whatever the limit is, and what does not fit is said."""

from __future__ import annotations

import resource

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.config import BrokerConfig
from broker.runtime.descriptors import DESCRIPTORS_MIN, fit_descriptors, raise_descriptor_limit
from broker.settings import ConfigError
from tests.configs import broker_config


def test_the_limit_is_raised_to_what_the_system_allows():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 1024), hard))
    try:
        got = raise_descriptor_limit()
        assert got == resource.getrlimit(resource.RLIMIT_NOFILE)[0] >= min(hard, 1 << 20)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_nothing_is_lowered_where_all_fits():
    config = BrokerConfig()
    assert fit_descriptors(config, 65_536) == (config, [])


def test_what_does_not_fit_is_lowered_and_named():
    fitted, lowered = fit_descriptors(BrokerConfig(), 1024)
    assert (fitted.connections_max, fitted.tuning.http_connections_max, fitted.tuning.open_ledgers_max) == (
        448,
        64,
        128,
    )
    assert lowered == [
        "connections_max is 448 instead of 10000",
        "http_connections_max is 64 instead of 256",
        "open_ledgers_max is 128 instead of 256",
    ]


def test_too_few_are_refused():
    with pytest.raises(ConfigError, match="ulimit -n"):
        fit_descriptors(BrokerConfig(), DESCRIPTORS_MIN - 1)


@given(
    limit=st.integers(DESCRIPTORS_MIN, 1 << 20),
    ledgers=st.integers(1, 100_000),
    grpc=st.integers(1, 1_000_000),
    http=st.integers(1, 100_000),
)
def test_files_and_connections_always_fit(limit: int, ledgers: int, grpc: int, http: int):
    config = broker_config(open_ledgers_max=ledgers, connections_max=grpc, http_connections_max=http)
    fitted, lowered = fit_descriptors(config, limit)
    files = 3 * fitted.tuning.open_ledgers_max
    assert files + fitted.connections_max + fitted.tuning.http_connections_max + 64 <= limit
    assert bool(lowered) == (fitted != config)
    # Each has something, and what fits is not lowered.
    assert fitted.connections_max >= min(grpc, limit // 4) and fitted.tuning.http_connections_max >= min(
        http, limit // 32
    )
