"""The process of one shard, run by `postdate-broker serve-shard`: a broker as any other, on sockets of its own.

It ends with its supervisor, whatever that died of: the kernel kills it, so that no process is left which holds a folder
and which nobody can reach.
"""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Callable
from dataclasses import replace

from broker.config import BrokerConfig
from broker.errors import Fenced
from broker.folder.backup import backup_folder
from broker.folder.shard_folders import refuse_lost_shard, shard_folder
from broker.runtime.notify import ServiceNotifier
from broker.runtime.vfs import LocalVfs
from broker.server import Server
from broker.settings import ConfigError, split_address
from broker.topic_shards import TopicShard

_PR_SET_PDEATHSIG = 1
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


async def serve_shard(
    config: BrokerConfig, read_config: Callable[[], BrokerConfig], number: int, supervisor_pid: int
) -> int:
    """Serve one shard until a signal, a failure or the end of the supervisor; returns the exit status.

    Raises Corrupt if it has lost what it held.
    """
    end_with(supervisor_pid)
    refuse_lost_shard(LocalVfs(), config.data_dir, number)
    return await Server(
        shard_config(config, number),
        notifier=ServiceNotifier({}),
        read_config=lambda: shard_config(read_config(), number),
    ).run()


def end_with(supervisor_pid: int) -> None:
    """Have the kernel kill this process once its supervisor has ended, and send it no signals of a terminal before."""
    # Those are for the supervisor, which drains all shards. A group is enough: Linux shares out processors by sessions
    # (sched_autogroup), and a shard with a session of its own would be woken later, for less each time.
    os.setpgid(0, 0)
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != supervisor_pid:  # it ended before that
        raise Fenced("The supervisor of this shard has ended", reason="NO_SUPERVISOR")
