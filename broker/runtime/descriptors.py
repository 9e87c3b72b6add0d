"""File descriptors: how many there are, and that connections leave enough of them for files.

Whoever connects takes a descriptor before anybody knows who it is. Connections are therefore bounded by what is left
once every file that the broker may have open is counted; a limit of the system that is too low for the settings lowers
the settings, with a warning for each.
"""

from __future__ import annotations

import resource
from dataclasses import replace

from broker.config import BrokerConfig
from broker.settings import ConfigError

DESCRIPTORS_MIN = 256
"""With fewer the broker does not start."""
_OF_A_LEDGER = 3
_SPARE = 128
"""For the journal, indexes, manifests, backups, the loop, and libraries."""
_USEFUL_MAX = 1 << 20
"""The limit where the system has none."""
_HTTP_SHARE = 8
"""One of so many connections may be an HTTP one, where there are too few for all."""


def raise_descriptor_limit() -> int:
    """Let this process open as many files as it is allowed to; returns how many that is."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _USEFUL_MAX if hard == resource.RLIM_INFINITY else min(hard, _USEFUL_MAX)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return wanted if soft == resource.RLIM_INFINITY else soft
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    except (OSError, ValueError):  # some systems allow less than they say
        return soft
    return wanted


def fit_descriptors(config: BrokerConfig, limit: int) -> tuple[BrokerConfig, list[str]]:
    """The settings with which files and connections fit into so many descriptors, and what was lowered for that.

    Raises ConfigError where nothing useful fits.
    """
    if limit < DESCRIPTORS_MIN:
        raise ConfigError(
            f"The limit of open files is {limit}, but the broker needs at least {DESCRIPTORS_MIN}: raise it (ulimit "
            "-n, LimitNOFILE)"
        )
    files = min(_OF_A_LEDGER * config.tuning.open_ledgers_max + _SPARE, limit // 2)
    open_ledgers = min(config.tuning.open_ledgers_max, (files - _SPARE) // _OF_A_LEDGER)
    connections = limit - files
    http, grpc = config.tuning.http_connections_max, config.connections_max
    if http + grpc > connections:
        http = min(http, connections // _HTTP_SHARE)
        grpc = min(grpc, connections - http)
    tuning = replace(config.tuning, open_ledgers_max=max(open_ledgers, 1), http_connections_max=http)
    fitted = replace(config, connections_max=grpc, tuning=tuning)
    lowered = [
        f"{name} is {value} instead of {configured}"
        for name, value, configured in (
            ("connections_max", grpc, config.connections_max),
            ("http_connections_max", http, config.tuning.http_connections_max),
            ("open_ledgers_max", tuning.open_ledgers_max, config.tuning.open_ledgers_max),
        )
        if value != configured
    ]
    return fitted, lowered
