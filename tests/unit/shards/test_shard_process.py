"""Settings of a shard's process, and what may not be set beside shards."""

from __future__ import annotations

import subprocess
import sys

import pytest

from broker.config import load_config
from broker.settings import ConfigError
from broker.shards.child import child_environ
from broker.shards.shard_process import check_sockets, shard_config
from broker.topic_shards import TopicShard
from tests.configs import broker_config

RIGHTS = {"access_file": "a", "tokens_file": "t"}
CERTIFICATES = {"tls_cert_file": "c", "tls_key_file": "k", "tls_client_ca_file": "ca"}


def test_a_shard_has_its_folder_its_sockets_and_its_topics() -> None:
    config = broker_config(data_dir="d/", shards=3, backup_dir="/b/", lease_ms=77, **RIGHTS, **CERTIFICATES)
    shard = shard_config(config, 2)
    assert (shard.data_dir, shard.backup_dir) == ("d/shard-0002", "/b/shard-0002")
    assert (shard.grpc_socket, shard.http_socket) == ("d/run/2.grpc", "d/run/2.http")
    assert (shard.shard_address, shard.topic_shard) == ("127.0.0.1:7653", TopicShard(2, 3, 7651))
    assert shard.lease_ms == 77
    assert shard.access_file == "a", "the shard judges tokens again"
    assert (shard.tls_cert_file, shard.tls_client_ca_file) == ("c", "ca"), "its port is as that of the front"
    assert not shard.reflection_enabled
    assert shard_config(broker_config(shards=2), 0).backup_dir == "./data/backups/shard-0000"


def test_ports_of_shards_follow_that_of_the_front() -> None:
    free = shard_config(broker_config(shards=2, grpc_address="[::1]:0"), 1)
    assert (free.shard_address, free.topic_shard) == ("[::1]:0", TopicShard(1, 2))
    without = shard_config(broker_config(shards=2, shard_ports=False), 1)
    assert (without.shard_address, without.topic_shard) == ("", TopicShard(1, 2))


def test_paths_that_no_socket_can_have_are_refused_before_anything_is_made() -> None:
    check_sockets(broker_config(data_dir="d" * 95), 10)
    with pytest.raises(ConfigError, match="108 bytes"):
        check_sockets(broker_config(data_dir="d" * 96), 11)


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"shards": "2", "cluster_store": "file:///s", "cluster_nodes": "a=h:1"}, "cluster_store"),
        ({"shards": "2", **RIGHTS, **CERTIFICATES}, "tls_client_ca_file"),
        ({"shards": "0"}, "shards"),
        ({"shards": "65"}, "shards"),
        ({"shards": "2", "grpc_address": "127.0.0.1:65534"}, "the highest port is 65535"),
    ],
)
def test_what_does_not_work_with_shards_yet_is_refused(values: dict[str, str], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        load_config(values, {})


def test_tokens_and_encryption_work_with_shards() -> None:
    assert load_config({"shards": "2", **RIGHTS}, {}).shards == 2
    assert load_config({"shards": "2", **CERTIFICATES}, {}).shards == 2


def test_the_last_ports_are_taken_or_not_needed() -> None:
    assert load_config({"shards": "2", "grpc_address": "127.0.0.1:65533"}, {}).shards == 2
    last = {"shards": "2", "grpc_address": "127.0.0.1:65535", "shard_ports": "false"}
    assert load_config(last, {}).shards == 2


def test_systemd_is_told_by_the_supervisor_alone() -> None:
    given = {"NOTIFY_SOCKET": "/n", "WATCHDOG_USEC": "1", "WATCHDOG_PID": "2", "POSTDATE_LEASE_MS": "5"}
    assert child_environ(given) == {"POSTDATE_LEASE_MS": "5"}


@pytest.mark.slow
def test_a_process_whose_supervisor_ended_before_it_began_serves_nothing() -> None:
    """Not a signal of the kernel, which is for a supervisor that ends later."""
    program = (
        "from broker.errors import Fenced\n"
        "from broker.shards.shard_process import end_with\n"
        "try:\n    end_with(supervisor_pid=0)\n"
        "except Fenced as error:\n    print(error.reason)\n"
    )
    ended = subprocess.run((sys.executable, "-c", program), capture_output=True, text=True, check=True)
    assert ended.stdout.split() == ["NO_SUPERVISOR"]
