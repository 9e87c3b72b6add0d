"""Questions of a node before it takes part: its own name, and its store for the cluster.

It is little, so that a node with several shards soon starts the processes of all.
"""

from __future__ import annotations

import asyncio
import signal
import socket
from contextlib import suppress

from broker.cluster.creation import Cluster, read_cluster
from broker.cluster.object_group_log import LOG_ATTEMPT
from broker.cluster.object_store import StoreFailed, StoreRefused
from broker.cluster.stores import open_store
from broker.config import BrokerConfig, parse_nodes
from broker.observe.logs import get_logger
from broker.runtime.notify import ServiceNotifier
from broker.settings import ConfigError

log = get_logger(__name__)

_STORE_PAUSE_SECONDS = 1.0


def node_name(config: BrokerConfig) -> str:
    """Return the name of this node; raises ConfigError if the cluster has none of it."""
    name, nodes = config.node or socket.gethostname(), parse_nodes(config.cluster_nodes)
    if name not in nodes:
        raise ConfigError(
            f"This node is {name!r}, but cluster_nodes contains only {', '.join(nodes)}: set node"
        )
    return name


async def wait_cluster(config: BrokerConfig, notifier: ServiceNotifier) -> Cluster | None:
    """Return the cluster of a node, once its store answers; None if this process is to stop.

    Raises ConfigError, NotFound or Corrupt.
    """
    node_name(config)
    store, stop = open_store(config.cluster_store, LOG_ATTEMPT), asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    loop.add_signal_handler(signal.SIGHUP, lambda: None)  # what there is to read is read afterwards
    notifier.tell("STATUS=Waiting for the object store")
    try:
        while not stop.is_set():
            try:
                cluster = await read_cluster(store)
            except StoreRefused:
                raise
            except StoreFailed as error:
                await wait_store(store.url, error, stop)
            else:
                return None if stop.is_set() else cluster
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(
                number
            )  # what is loaded next would not hear it; nothing is to be undone
    return None


async def wait_store(url: str, error: Exception, stop: asyncio.Event) -> None:
    """Say that a store failed, and wait for a little, or until this process is to stop."""
    log.warning("The object store cannot be used yet", url=url, error=str(error))
    with suppress(TimeoutError):
        await asyncio.wait_for(stop.wait(), _STORE_PAUSE_SECONDS)
