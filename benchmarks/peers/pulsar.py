"""Apache Pulsar, a broker and a bookie in one process: its two trackers of delayed messages."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import tempfile
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from benchmarks.client.control import check
from benchmarks.errors import BenchmarkFailed
from benchmarks.peers.peer import Note, Peer
from benchmarks.peers.programs import BUILD, library, program, said_version

_VERSION = "4.0.6"
_ARTIFACT = f"org.apache.pulsar:pulsar-server-distribution:{_VERSION}:tar.gz:bin"
_HOME = BUILD / f"apache-pulsar-{_VERSION}"
_INSTALL_SECONDS_MAX = 900
_COLLECT_SECONDS_MAX = 60

_TOPIC, _SUBSCRIPTION = "persistent://public/default/bench", "bench"
_PENDING_MAX = 10_000
_RECEIVE_MS_MAX = 600_000
"""The tracker in memory is filled anew after a restart, before anything is delivered."""
_STRICT = {"isDelayedDeliveryDeliverAtTimeStrict": "true", "delayedDeliveryTickTimeMillis": "10"}
_USE = (
    "pulsar-client: `send_async`, a shared subscription whose consumer is connected from the start, as the tracker "
    "is filled for it. Pulsar puts no two messages with a delivery time in one batch"
)


class Pulsar(Peer):
    """The standalone server, with the one setting that makes its answers durable."""

    title = "Pulsar"
    answer = (
        "fsync of the bookie's journal returned (`journalSyncData=true`); acknowledgements are not confirmed"
    )
    setup = (
        "standalone, as shipped (memory too) but for `journalSyncData`: tracker in memory, which looks each second "
        f"and may be up to a second early; {_USE}"
    )
    libraries = ("pulsar-client",)
    ports_count = 3
    settings: ClassVar[dict[str, str]] = {}
    """Of standalone.conf, beside its ports and `journalSyncData`."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._client: Any = None
        self._producer: Any = None
        self._consumer: Any = None

    # The server.

    @classmethod
    def install(cls) -> None:
        """Unpack the server's distribution where there is Maven to bring it."""
        if _HOME.exists() or not program("mvn") or cls.missing():
            return
        with tempfile.TemporaryDirectory(dir=BUILD) as folder:
            command = ["mvn", "--quiet", "--batch-mode", "dependency:copy", f"-Dartifact={_ARTIFACT}"]
            done = subprocess.run(
                [*command, f"-DoutputDirectory={folder}"],
                capture_output=True,
                text=True,
                check=False,
                cwd=folder,
                timeout=_INSTALL_SECONDS_MAX,
            )
            if done.returncode:
                raise BenchmarkFailed(f"{_ARTIFACT}: {(done.stdout + done.stderr).strip().splitlines()[:1]}")
            archive = next(Path(folder).glob("*.tar.gz"))
            subprocess.run(["tar", "-xzf", str(archive), "-C", folder], check=True, capture_output=True)
            (Path(folder) / _HOME.name).rename(_HOME)

    @classmethod
    def missing(cls) -> str:
        """Name what is not there: a JDK, whose tools count what is alive in the heap, or what brings the server."""
        if not program("java") or not program("jcmd"):
            return "a JDK (java, jcmd)"
        return "" if _HOME.exists() or program("mvn") else "mvn, which brings the server,"

    @classmethod
    def version(cls) -> str:
        return f"{_VERSION}, Java {said_version('java', '-version')}"

    def command(self) -> list[str]:
        data = self.folder / "data"
        return [
            *(str(_HOME / "bin" / "pulsar"), "standalone", "--no-functions-worker", "--no-stream-storage"),
            *("--advertised-address", "127.0.0.1", "--bookkeeper-port", str(self.ports[2])),
            *("--metadata-dir", str(data / "metadata"), "--bookkeeper-dir", str(data / "bookkeeper")),
        ]

    def environment(self) -> dict[str, str]:
        return {
            **{name: value for name, value in os.environ.items() if not name.startswith("PULSAR_")},
            "PULSAR_STANDALONE_CONF": str(self.folder / "standalone.conf"),
            "PULSAR_LOG_DIR": str(self.folder / "log"),
            "PULSAR_LOG_LEVEL": "warn",
            "PULSAR_GC_LOG": " ",  # none
            # Killed, it leaves the libraries behind that it unpacks.
            "JDK_JAVA_OPTIONS": f'"-Djava.io.tmpdir={self.folder / "tmp"}"',
        }

    def prepare_folder(self) -> None:
        super().prepare_folder()
        (self.folder / "tmp").mkdir()
        settings = {
            "bindAddress": "127.0.0.1",
            "brokerServicePort": str(self.ports[0]),
            "webServicePort": str(self.ports[1]),
            "journalSyncData": "true",
            **self.settings,
        }
        text = (_HOME / "conf" / "standalone.conf").read_text()
        (self.folder / "standalone.conf").write_text(configured(text, settings))

    def stop(self) -> None:
        """End it at once: what it would put in order is removed."""
        self.kill()
        super().stop()

    def memory(self) -> int:
        """Bytes of objects that are alive: the process has taken all of its heap at the start."""
        assert self._process is not None
        command = ["jcmd", str(self._process.pid), "GC.class_histogram"]
        done = subprocess.run(
            command, capture_output=True, text=True, check=True, timeout=_COLLECT_SECONDS_MAX
        )
        return alive_bytes(done.stdout)

    # The client.

    async def connect(self) -> None:
        url = f"http://127.0.0.1:{self.ports[1]}/admin/v2/namespaces/public/default"
        answer = await asyncio.to_thread(urllib.request.urlopen, url, timeout=5)
        answer.close()  # it serves; before, the client would try for long
        pulsar = library("pulsar")
        # The console logger writes to stdout, on which the client's process answers.
        logger = pulsar.FileLogger(pulsar.LoggerLevel.Error, "/dev/stderr")
        client = pulsar.Client(f"pulsar://127.0.0.1:{self.ports[0]}", logger=logger)
        try:
            self._producer = await asyncio.to_thread(
                client.create_producer, _TOPIC, max_pending_messages=_PENDING_MAX
            )
            self._consumer = await asyncio.to_thread(
                client.subscribe, _TOPIC, _SUBSCRIPTION, consumer_type=pulsar.ConsumerType.Shared
            )
        except BaseException:
            client.close()
            raise
        self._client = client

    async def create(self) -> None:
        """Nothing: who connects creates the topic and the subscription."""

    async def produce(self, payload: bytes, due_ms: int) -> None:
        await self.produce_batch([payload], [due_ms])

    async def produce_batch(self, payloads: Sequence[bytes], due_ms: Sequence[int]) -> None:
        loop = asyncio.get_running_loop()
        answered: asyncio.Future[None] = loop.create_future()
        left, refused = len(payloads), []
        stored = library("pulsar").Result.Ok

        def callback(result: Any, _: Any) -> None:
            nonlocal left
            if result != stored:
                refused.append(result)
            left -= 1  # all are called in the client's one thread
            if left == 0:
                loop.call_soon_threadsafe(answered.set_result, None)

        for payload, due in zip(payloads, due_ms, strict=True):
            self._producer.send_async(payload, callback, deliver_at=due)
        await answered
        check(not refused, f"messages were refused: {refused[:1]}")

    async def consume(self, count: int, note: Note) -> None:
        """Take so many different messages in a thread, as this client waits in the call: some may come again."""
        loop = asyncio.get_running_loop()

        def work(say: Callable[..., Any]) -> None:
            seen: set[bytes] = set()
            while len(seen) < count:
                message = self._consumer.receive(_RECEIVE_MS_MAX)
                payload = message.data()
                seen.add(payload)
                say(note, [payload])
                self._consumer.acknowledge(message)
            self._consumer.close()  # sends the acknowledgements that it holds

        await asyncio.to_thread(work, loop.call_soon_threadsafe)

    async def close(self) -> None:
        if self._client is not None:
            await asyncio.to_thread(self._client.close)


class PulsarStrict(Pulsar):
    """The same, never early. What a producer is answered does not hang on it."""

    title = "Pulsar, strict"
    setup = "as Pulsar, but `isDelayedDeliveryDeliverAtTimeStrict=true`, `delayedDeliveryTickTimeMillis=10`"
    settings: ClassVar[dict[str, str]] = _STRICT
    not_measured: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(("prepared-*", "bursts-*", "single-*"), "as Pulsar"),
        "herd-1kb": "not measured",
    }


class PulsarBuckets(Pulsar):
    """The same, with an index of delayed messages that is stored. It holds no payloads: one size is enough."""

    title = "Pulsar, buckets"
    setup = (
        "as Pulsar, strict, with the bucket tracker, and `managedLedgerMinLedgerRolloverTimeMinutes=0`: a bucket is "
        "stored when a ledger is full"
    )
    settings: ClassVar[dict[str, str]] = {
        **_STRICT,
        "delayedDeliveryTrackerFactoryClassName": (
            "org.apache.pulsar.broker.delayed.BucketDelayedDeliveryTrackerFactory"
        ),
        "managedLedgerMinLedgerRolloverTimeMinutes": "0",
    }
    not_measured: ClassVar[Mapping[str, str]] = {"*-1kb": "not measured"}


def configured(text: str, settings: dict[str, str]) -> str:
    """A file of properties with other values; each of them is in it before."""
    for name, value in settings.items():
        text, found = re.subn(rf"(?m)^{re.escape(name)}=.*$", f"{name}={value}", text)
        if found != 1:
            raise BenchmarkFailed(f"{name} is {found} times in the configuration of Pulsar {_VERSION}")
    return text


def alive_bytes(histogram: str) -> int:
    """The sum of what jcmd lists, which is alive after a collection."""
    found = re.search(r"(?m)^Total +\d+ +(\d+)$", histogram)
    if found is None:
        raise BenchmarkFailed(f"jcmd gives no sum: {histogram.strip()[-200:]}")
    return int(found.group(1))
