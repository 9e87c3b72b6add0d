"""The process of one shard of a cluster, run by `postdate-broker serve-shard`: a node on sockets of its own.

It asks other nodes with the certificate of its node, and has a supervisor as a shard of one machine has
(`shard_process.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from broker.config import BrokerConfig
from broker.node.node import Node, wait_cluster
from broker.runtime.notify import ServiceNotifier
from broker.shards.shard_process import end_with, grpc_socket, http_socket


async def serve_member(
    config: BrokerConfig, read_config: Callable[[], BrokerConfig], number: int, supervisor_pid: int
) -> int:
    """Take part in one shard until a signal, a failure or the end of the supervisor; returns the exit status."""
    end_with(supervisor_pid)
    notifier = ServiceNotifier({})
    if (cluster := await wait_cluster(config, notifier)) is None:
        return 0
    node = Node(
        member_sockets(config, number),
        cluster,
        shard=number,
        notifier=notifier,
        read_config=lambda: member_sockets(read_config(), number),
    )
    return await node.run()


def member_sockets(config: BrokerConfig, number: int) -> BrokerConfig:
    """Return the settings of a node for the process of one shard."""
    return replace(config, grpc_socket=grpc_socket(config, number), http_socket=http_socket(config, number))
