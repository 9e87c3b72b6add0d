"""`make bench-peers`: Postdate and what people would take instead, under the same work, side by side.

The parts, from the outside in:
  __main__   the command: which peers there are, runs, JSON, the page
  rows       the rows and their arithmetic
  runs       one measurement: probe, server, client, probe; thrown away and taken again when it was disturbed
  page       the tables in docs/benchmarks-peers.md
  client     what runs in a client's process
  work       the work itself, the same for all peers
  peer       what a peer has to do; one module for each peer is beside it, and `PEERS` names them
  programs   the programs and libraries of peers
"""

from __future__ import annotations

import importlib

from benchmarks.peers.peer import Peer

PEERS = {
    "postdate": "benchmarks.peers.postdate:Postdate",
    "redis": "benchmarks.peers.redis:Redis",
    "postgresql": "benchmarks.peers.postgresql:PostgreSQL",
    "beanstalkd": "benchmarks.peers.beanstalkd:Beanstalkd",
    "nats": "benchmarks.peers.nats:Nats",
    "rabbitmq": "benchmarks.peers.rabbitmq:RabbitMQ",
    "pulsar": "benchmarks.peers.pulsar:Pulsar",
    "pulsar-strict": "benchmarks.peers.pulsar:PulsarStrict",
    "pulsar-buckets": "benchmarks.peers.pulsar:PulsarBuckets",
}


def peer_class(name: str) -> type[Peer]:
    module, _, attribute = PEERS[name].partition(":")
    found: type[Peer] = getattr(importlib.import_module(module), attribute)
    return found
