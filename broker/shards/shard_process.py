"""The process of one shard, run by `postdate-broker serve-shard`: a broker as any other, on sockets of its own.

It ends with its supervisor, whatever that died of (`beginning.py`): the kernel kills it, so that no process is left
which holds a folder and which nobody can reach.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace

from broker.config import BrokerConfig
from broker.folder.backup import backup_folder
from broker.folder.shard_folders import refuse_lost_shard, shard_folder
from broker.runtime.notify import ServiceNotifier
from broker.runtime.vfs import LocalVfs
from broker.server import Server
from broker.settings import ConfigError, split_address
from broker.topic_shards import TopicShard

_SOCKET_PATH_BYTES_MAX = 107
"""Of `sockaddr_un`, with a zero byte behind it."""


def sockets_folder(config: BrokerConfig) -> str:
    return f"{config.data_dir.rstrip('/')}/run"


def grpc_socket(config: BrokerConfig, number: int) -> str:
    """Return the path of the socket of a shard's gRPC API."""
    return f"{sockets_folder(config)}/{number}.grpc"


def http_socket(config: BrokerConfig, number: int) -> str:
    """Return the path of the socket of a shard's pages, metrics and health."""
    return f"{sockets_folder(config)}/{number}.http"


def check_sockets(config: BrokerConfig, shards: int) -> None:
    """Raise ConfigError where the path of a socket would be too long for the system."""
    longest = len(os.fsencode(grpc_socket(config, shards - 1)))
    if longest > _SOCKET_PATH_BYTES_MAX:
        raise ConfigError(
            f"data_dir: the socket paths of the shards would have {longest} bytes, and the maximum is "
            f"{_SOCKET_PATH_BYTES_MAX}: choose a shorter path, or start with a relative one"
        )


def shard_config(config: BrokerConfig, number: int) -> BrokerConfig:
    """Return the settings of a shard's process. Encryption and the limits of connections hold for its port."""
    host, port = split_address(config.grpc_address)
    first_port = port + 1 if config.shard_ports and port else 0
    return replace(
        config,
        data_dir=shard_folder(config.data_dir, number),
        backup_dir=shard_folder(backup_folder(config), number),
        grpc_socket=grpc_socket(config, number),
        http_socket=http_socket(config, number),
        shard_address=_join(host, first_port + number if first_port else 0) if config.shard_ports else "",
        topic_shard=TopicShard(number, config.shards, first_port),
    )


def _join(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


async def serve_shard(config: BrokerConfig, read_config: Callable[[], BrokerConfig], number: int) -> int:
    """Serve one shard until a signal or a failure; returns the exit status.

    Raises Corrupt if it has lost what it held.
    """
    refuse_lost_shard(LocalVfs(), config.data_dir, number)
    return await Server(
        shard_config(config, number),
        notifier=ServiceNotifier({}),
        read_config=lambda: shard_config(read_config(), number),
    ).run()
