"""Cost of the edge for one message: `python -m benchmarks.edges`.

A unary Produce of one message of 100 bytes, awaited, over gRPC and over HTTP; with an access file, with limits in it
that are far from full, and with spans. One broker for each, all on one core, and calls in turns, so that what the
machine does hits all of them.
"""

from __future__ import annotations

import asyncio
import base64
import http.client
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from benchmarks.client import raw
from benchmarks.processes import HERE, Broker, cpu_seconds, environment, own_setup
from postdate_api.v1 import message_pb2, producer_pb2

TURNS = 6
CALLS = 250
_HOUR_MS = 3_600_000
_GRANT = """
[[grant]]
principals = ["token:one"]
topics = ["*"]
rights = ["produce", "consume", "schedule", "manage"]
"""
_LIMITS = """
[[limit]]
name = "each"
principals = ["token:*"]
messages_per_second = 1000000
bytes_per_second = "10GiB"

[[limit]]
name = "all"
topics = ["b*"]
messages_per_second = 1000000
pending_messages = 1000000000
pending_bytes = "1000GiB"
topics_max = 1000
"""
_SPANS = {
    "spans: none sampled": {"OTEL_TRACES_SAMPLER": "always_off"},
    "spans: one in ten": {"OTEL_TRACES_SAMPLER": "traceidratio", "OTEL_TRACES_SAMPLER_ARG": "0.1"},
    "spans: all": {"OTEL_TRACES_SAMPLER": "always_on"},
}

Send = Callable[[], Awaitable[None]]


class _Way:
    """One way to send, and what its calls took."""

    def __init__(self, name: str, broker: Broker, send: Send) -> None:
        self.name = name
        self.took_us: list[float] = []
        self.turns_us: list[float] = []
        self.cpu_us = 0.0
        self._broker = broker
        self._send = send

    async def turn(self, calls: int) -> None:
        before, took = cpu_seconds(self._broker.pid), []
        for _ in range(calls):
            begin = time.perf_counter()
            await self._send()
            took.append((time.perf_counter() - begin) * 1e6)
        self.cpu_us += (cpu_seconds(self._broker.pid) - before) * 1e6
        self.took_us += took
        self.turns_us.append(statistics.median(took))


def main() -> None:
    with own_setup("edges") as setup, ExitStack() as stack:
        token = _access_files(setup.folder)
        os.sched_setaffinity(0, {setup.client_core})
        receiver = stack.enter_context(ThreadingHTTPServer(("127.0.0.1", 0), _Receiver))
        threading.Thread(target=receiver.serve_forever, daemon=True).start()
        stack.callback(receiver.shutdown)
        brokers = {"plain": stack.enter_context(Broker(setup, "plain"))}
        for name in ("access", "limits"):
            flags = (f"--access-file={setup.folder}/{name}.toml", f"--tokens-file={setup.folder}/tokens.toml")
            brokers[name] = stack.enter_context(Broker(replace(setup, broker_flags=flags), name))
        url = f"http://127.0.0.1:{receiver.server_port}"
        for number, (name, env) in enumerate(_SPANS.items()):
            asked = {"OTEL_EXPORTER_OTLP_ENDPOINT": url, **env}
            brokers[name] = stack.enter_context(Broker(setup, f"spans-{number}", env=asked))
        asyncio.run(_measure(brokers, token))


async def _measure(brokers: dict[str, Broker], token: str) -> None:
    ways = []
    for name, broker in brokers.items():
        metadata = (("authorization", f"Bearer {token}"),) if name in ("access", "limits") else ()
        ways.append(_Way(name, broker, await _by_grpc(broker, metadata)))
    ways.append(_Way("plain, over HTTP", brokers["plain"], _by_http(brokers["plain"])))
    for way in ways:
        await way.turn(100)
        way.took_us.clear()
        way.turns_us.clear()
        way.cpu_us = 0.0
    for _ in range(TURNS):
        for way in ways:
            await way.turn(CALLS)
    first = {way.name: way for way in ways}["plain"]
    print(f"{'':24}   p50 us   of plain   least and most of a turn   broker's CPU us a call")
    for way in ways:
        ratios = [one / other for one, other in zip(way.turns_us, first.turns_us, strict=True)]
        print(
            f"{way.name:24} {statistics.median(way.took_us):8.0f} {statistics.median(ratios):10.2f}"
            f" {min(ratios):13.2f} {max(ratios):6.2f} {way.cpu_us / (TURNS * CALLS):21.0f}"
        )


async def _by_grpc(broker: Broker, metadata: tuple[tuple[str, str], ...]) -> Send:
    unary = raw.produce_unary(raw.connect(broker.address))
    message = message_pb2.Message(payload=bytes(100), deliver_after_ms=_HOUR_MS)
    request = producer_pb2.ProduceRequest(topic=raw.TOPIC, messages=[message]).SerializeToString()

    async def send() -> None:
        await unary(request, metadata=metadata)

    return send


def _by_http(broker: Broker) -> Send:
    connection = http.client.HTTPConnection(broker.http_address)
    message = {"payload": base64.b64encode(bytes(100)).decode(), "deliver_after_ms": str(_HOUR_MS)}
    body = json.dumps({"topic": raw.TOPIC, "messages": [message]})

    async def send() -> None:
        connection.request("POST", "/v1/produce", body, {"content-type": "application/json"})
        answer = connection.getresponse()
        text = answer.read()
        if answer.status != 200:
            raise RuntimeError(f"{answer.status}: {text!r}")

    return send


def _access_files(folder: Path) -> str:
    """Write the files of access control, without limits and with them; returns a token."""
    command = [sys.executable, "-m", "broker.cli", "token", "create", "one"]
    made = subprocess.run(
        command, env=environment(HERE), cwd=HERE, capture_output=True, text=True, check=True
    )
    (folder / "tokens.toml").write_text(made.stderr)
    (folder / "access.toml").write_text(_GRANT)
    (folder / "limits.toml").write_text(_GRANT + _LIMITS)
    return made.stdout.strip()


class _Receiver(BaseHTTPRequestHandler):
    """Takes spans and keeps none."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


if __name__ == "__main__":
    main()
