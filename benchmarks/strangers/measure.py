"""Beside a flood: how long a call of somebody with rights takes, and what memory the broker takes."""

from __future__ import annotations

import asyncio
import hashlib
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import grpc
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from grpc_health.v1 import health_pb2

from benchmarks.strangers.floods import TOKEN_WITHOUT_RIGHT
from postdate_api.v1 import message_pb2, producer_pb2

HEADER = (
    "| flood | access control | connections | calls | sent (MiB) | Produce p50, max (ms) | failed | probe max (ms) | "
    "memory peak, after (MiB) |\n| --- | --- | --- | --- | --- | --- | --- | --- | --- |"
)
CERTIFICATE = "broker.pem"
_TOKEN = "a-token-of-the-benchmark"
_CALL_SECONDS_MAX = 10.0
_REST_SECONDS = 8.0


@dataclass(frozen=True, slots=True)
class Figures:
    """Figures from the flood's begin to some seconds after its end."""

    connections: int
    calls: int
    sent_bytes: int
    produce_ms: Sequence[float]
    failed: int
    probe_ms: Sequence[float]
    peak_bytes: int  # beyond what it had before
    after_bytes: int

    def row(self, name: str, *, guarded: bool) -> str:
        produce, probe = self.produce_ms or [float("nan")], self.probe_ms or [float("nan")]
        return (
            f"| {name} | {'on' if guarded else 'off'} | {self.connections} | {self.calls} "
            f"| {self.sent_bytes >> 20} "
            f"| {statistics.median(produce):.0f}, {max(produce):.0f} | {self.failed} of {len(produce) + self.failed} "
            f"| {max(probe):.0f} | {self.peak_bytes >> 20}, {self.after_bytes >> 20} |"
        )


def access_flags(folder: Path) -> tuple[str, ...]:
    """Access control that knows one principal who may do all, and one who may do nothing here."""
    rights = '["produce", "consume", "schedule", "manage", "compact"]'
    access, tokens = folder / "access.toml", folder / "tokens.toml"
    access.write_text(
        f'[[grant]]\nprincipals = ["token:it"]\ntopics = ["*"]\nrights = {rights}\n'
        '[[grant]]\nprincipals = ["token:other"]\ntopics = ["others"]\nrights = ["produce"]\n'
    )
    tokens.write_text(
        "".join(
            f'[[token]]\nprincipal = "{name}"\nsha256 = "{hashlib.sha256(token.encode()).hexdigest()}"\n'
            for name, token in (("it", _TOKEN), ("other", TOKEN_WITHOUT_RIGHT))
        )
    )
    return ("--access-file", str(access), "--tokens-file", str(tokens))


def tls_flags(folder: Path) -> tuple[str, ...]:
    """A certificate for this machine, which vouches for itself."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "broker")])
    now = datetime.now(UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ip_address("127.0.0.1"))]), critical=False)
        .sign(key, hashes.SHA256())
    )
    cert_file, key_file = folder / CERTIFICATE, folder / "broker.key"
    cert_file.write_bytes(certificate.public_bytes(Encoding.PEM))
    key_file.touch(mode=0o600)
    key_file.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    return ("--tls-cert-file", str(cert_file), "--tls-key-file", str(key_file))


def resident_bytes(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon"))


async def measure(
    command: Sequence[str],
    grpc_address: str,
    http_address: str,
    pid: int,
    name: str,
    *,
    seconds: float,
    scale: float = 1.0,
    least: tuple[int, int, int] = (0, 0, 0),
    certificate: Path | None = None,
) -> Figures:
    """Run one flood in a process of its own (`command` and its task) and look on, over TLS with a `certificate`."""
    async with _channel(grpc_address, certificate) as channel:
        caller = _Caller(channel)
        await caller.produce()
        before = resident_bytes(pid)
        task = {
            "name": name,
            "grpc_address": grpc_address,
            "http_address": http_address,
            "seconds": seconds,
            "scale": scale,
            "least": least,
        }
        child = await asyncio.create_subprocess_exec(
            *command, json.dumps(task), stdout=asyncio.subprocess.PIPE
        )
        try:
            flooding = asyncio.ensure_future(child.communicate())
            peak = before
            while not flooding.done():
                await caller.produce()
                await caller.probe()
                peak = max(peak, resident_bytes(pid))
                await asyncio.wait({flooding}, timeout=0.02)
            said, _ = await flooding
        finally:
            if child.returncode is None:
                child.kill()
                await child.wait()
        rest = time.monotonic() + _REST_SECONDS * min(scale, 1.0)
        while time.monotonic() < rest and resident_bytes(pid) > before:  # noqa: ASYNC110 - of another process
            await asyncio.sleep(0.2)
        did = json.loads(said)
        return Figures(
            did["connections"],
            did["calls"],
            did["sent_bytes"],
            caller.produce_ms,
            caller.failed,
            caller.probe_ms,
            peak - before,
            max(0, resident_bytes(pid) - before),
        )


def _channel(address: str, certificate: Path | None) -> grpc.aio.Channel:
    options = [("grpc.use_local_subchannel_pool", 1)]
    if certificate is None:
        return grpc.aio.insecure_channel(address, options=options)
    credentials = grpc.ssl_channel_credentials(certificate.read_bytes())
    return grpc.aio.secure_channel(address, credentials, options=options)


class _Caller:
    """Somebody with rights, on a connection that stood before the flood."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._produce = channel.unary_unary("/postdate.v1.ProducerService/Produce", None, None)
        self._check = channel.unary_unary("/grpc.health.v1.Health/Check", None, None)
        self.produce_ms: list[float] = []
        self.probe_ms: list[float] = []
        self.failed = 0

    async def produce(self) -> None:
        messages = [message_pb2.Message(payload=b"x")]
        request = producer_pb2.ProduceRequest(topic="t", messages=messages).SerializeToString()
        await self._timed(self._produce, request, self.produce_ms)

    async def probe(self) -> None:
        await self._timed(self._check, health_pb2.HealthCheckRequest().SerializeToString(), self.probe_ms)

    async def _timed(self, call: Any, request: bytes, took_ms: list[float]) -> None:
        begin = time.perf_counter()
        try:
            await call(request, metadata=(("authorization", f"Bearer {_TOKEN}"),), timeout=_CALL_SECONDS_MAX)
        except grpc.aio.AioRpcError:
            self.failed += 1
        else:
            took_ms.append((time.perf_counter() - begin) * 1000)
