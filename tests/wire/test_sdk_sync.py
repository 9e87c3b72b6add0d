"""`postdate.sync` against a real broker: every kind of call, threads, interruption, forks."""

from __future__ import annotations

import importlib
import inspect
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta
from pathlib import Path

import pytest

import postdate.sync
import postdate.sync.testing
import postdate.testing
from postdate.sync._portal import portal

ROOT = Path(__file__).parents[2]
EARLIEST = postdate.sync.InitialPosition.EARLIEST
NOW = timedelta(0)
DAY = timedelta(days=1)
LIMIT = timedelta(seconds=10)


@pytest.fixture(scope="module")
def fake() -> Iterator[postdate.sync.testing.FakeBroker]:
    with postdate.sync.testing.broker() as fake:
        yield fake


@pytest.fixture
def client(fake) -> Iterator[postdate.sync.Client]:
    with fake.client() as client:
        yield client


@pytest.fixture
def topic(request) -> str:
    return request.node.name.partition("[")[0]


def send(client: postdate.sync.Client, topic: str, count: int, **options) -> None:
    with client.producer(topic) as producer:
        producer.send_many([postdate.OutgoingMessage(b"%d" % number, **options) for number in range(count)])


def test_sample_of_the_contract(fake, client, topic):
    with client.producer(topic) as producer:
        receipt = producer.send(b"close order 17", deliver_after=DAY, schedule_key="order-17")
        producer.send(b"never", deliver_after=DAY, schedule_key="order-18")
    assert client.schedule.cancel(topic, schedule_key="order-18").done
    assert [each.id for each in client.schedule.list(topic)] == [receipt.id]
    with client.subscribe(topic, "billing", initial_position=EARLIEST) as subscription:
        fake.advance(DAY)
        for message in subscription:
            with message.processing() as same:
                assert same is message
                assert (message.payload, message.id, message.topic) == (b"close order 17", receipt.id, topic)
            break
    (stats,) = client.stats(topic)
    assert stats.subscriptions[0].ready_messages == 0


def test_block_that_raises_nacks(client, topic):
    send(client, topic, 1)
    with client.subscribe(topic, "s", initial_position=EARLIEST) as subscription:
        message = next(subscription)
        with pytest.raises(KeyError, match="no such"), message.processing():
            raise KeyError("no such")
        (again,) = subscription.receive_many(timeout=LIMIT)
        assert again.attempt == 2
        again.nack(dead_letter=True, reason="enough")
    (letter,) = client.dead_letters.list(topic, "s", payloads=True)
    assert (letter.reason, letter.payload) == ("enough", b"0")
    assert client.dead_letters.requeue(topic, "s", all=True).count == 1


def test_admin_and_errors(client, topic):
    assert client.topics.create(topic).name == topic
    with pytest.raises(postdate.sync.AlreadyExists):
        client.topics.create(topic)
    assert client.topics.update(topic, default_ttl=DAY).policy.default_ttl == DAY
    client.subscriptions.create(topic, "s")
    assert [each.name for each in client.subscriptions.list(topic)] == ["s"]
    assert client.server_info().version
    with pytest.raises(ValueError, match="time zone"):
        client.subscriptions.seek(topic, "s", datetime(2026, 1, 1))
    client.topics.delete(topic)


def test_pulling(client, topic):
    client.topics.create(topic)
    client.subscriptions.create(topic, "s")
    send(client, topic, 3)
    received = client.receive(topic, "s", max_messages=10, wait=LIMIT)
    assert [message.payload for message in received] == [b"0", b"1", b"2"]
    assert len(received) == 3
    received.ack()


def test_many_threads_share_a_client(client, topic):
    with (
        client.subscribe(topic, "s", limit=200) as subscription,
        client.producer(topic) as producer,
        ThreadPoolExecutor(8) as pool,
    ):
        receipts = list(pool.map(lambda number: producer.send(b"%d" % number), range(200)))

        def work() -> int:
            count = 0
            for message in subscription:
                message.ack()
                count += 1
            return count

        assert sum(each.result() for each in [pool.submit(work) for _ in range(4)]) == 200
    assert len({receipt.id for receipt in receipts}) == 200


def test_run_calls_handlers_in_threads(client, topic):
    send(client, topic, 30)
    seen: set[bytes] = set()
    threads: set[str] = set()
    together = threading.Barrier(3)

    def handle(message: postdate.sync.Message) -> None:
        threads.add(threading.current_thread().name)
        together.wait(10)
        seen.add(message.payload)
        if message.payload == b"7" and message.attempt == 1:
            seen.remove(b"7")
            raise SystemExit("not from a thread")

    with client.subscribe(topic, "s", initial_position=EARLIEST, limit=30) as subscription:
        subscription.run(handle, concurrency=3)
    assert len(seen) == 29
    assert len(threads) == 3
    assert all(name.startswith("postdate-handler") for name in threads)
    with client.subscribe(topic, "s", limit=1) as subscription:
        assert [message.payload for message in subscription] == [b"7"]


def test_async_handler_is_no_success(client, topic, caplog):
    send(client, topic, 1)

    async def handle(message: postdate.sync.Message) -> None: ...

    with client.subscribe(topic, "s", initial_position=EARLIEST, limit=1) as subscription:
        subscription.run(handle)
    assert "postdate.sync takes plain ones" in caplog.text
    with client.subscribe(topic, "s", limit=1) as subscription:
        assert [message.attempt for message in subscription] == [2]


def test_use_before_the_block_is_an_error(client, topic):
    for use in (
        lambda: next(client.subscribe(topic, "s")),
        lambda: client.subscribe(topic, "s").receive_many(),
        lambda: client.producer(topic).send(b"x"),
        lambda: postdate.sync.connect().server_info(),
    ):
        with pytest.raises(RuntimeError, match="is used before `with"):
            use()


def test_closing_from_another_thread_ends_the_iteration(client, topic):
    send(client, topic, 1)
    subscription = client.subscribe(topic, "s", initial_position=EARLIEST)
    with subscription:
        for message in subscription:
            message.ack()
            threading.Timer(0.02, subscription.close).start()


def test_stop_from_another_thread_ends_run(client, topic):
    send(client, topic, 1)
    with client.subscribe(topic, "s", initial_position=EARLIEST) as subscription:
        subscription.run(lambda message: threading.Thread(target=subscription.stop).start())
    assert client.stats(topic)[0].subscriptions[0].ready_messages == 0


async def test_works_within_a_running_loop(client, topic):
    send(client, topic, 1)
    with client.subscribe(topic, "s", initial_position=EARLIEST, limit=1) as subscription:
        assert [message.payload for message in subscription] == [b"0"]


def test_call_on_its_own_loop_is_refused(client):
    async def stray() -> None:
        client.server_info()

    with pytest.raises(RuntimeError, match="on its own event loop"):
        portal().run(stray())


def test_interruption_cancels_what_was_asked_for(client, topic):
    client.topics.create(topic)
    with client.subscribe(topic, "s") as subscription:
        threading.Timer(0.05, signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            next(subscription)
        send(client, topic, 1)
        assert next(subscription).payload == b"0"  # nobody else took it


def test_sigterm_lets_handlers_finish(client, topic):
    send(client, topic, 10)
    ended: list[bytes] = []
    both = threading.Barrier(2)

    def handle(message: postdate.sync.Message) -> None:
        if both.wait(10) == 0:
            os.kill(os.getpid(), signal.SIGTERM)
        while not subscription._inner.inbox.stop_asked:  # a signal takes a moment to arrive
            time.sleep(0.001)
        ended.append(message.payload)

    with client.subscribe(topic, "s", initial_position=EARLIEST) as subscription:
        subscription.run(handle, concurrency=2)
    assert len(ended) == 2
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


PROGRAM = """
    import os, sys, threading
    import postdate.sync
    client = postdate.sync.connect(sys.argv[1])
    client.__enter__()
    client.server_info()
"""


def run_program(address: str, body: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(PROGRAM) + textwrap.dedent(body), address],
        capture_output=True,
        text=True,
        timeout=30,
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'clients/python'}"},
        check=False,
    )


def test_program_ends_with_everything_open(fake):
    done = run_program(
        fake.address,
        """
        subscription = client.subscribe("open", "s")
        subscription.__enter__()
        threading.Thread(target=lambda: next(subscription), daemon=True).start()
        print("end")
        """,
    )
    assert (done.returncode, done.stdout) == (0, "end\n")
    assert "Traceback" not in done.stderr


def test_client_from_before_a_fork_says_so(fake):
    done = run_program(
        fake.address,
        """
        child = os.fork()
        if child == 0:
            for use in (client.server_info, postdate.sync.connect(sys.argv[1]).open):
                try:
                    use()
                except RuntimeError as error:
                    print(error, flush=True)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        client.server_info()
        sys.exit(status)
        """,
    )
    assert done.returncode == 0, done.stderr
    told = done.stdout.splitlines()
    assert "before the process forked" in told[0] and "connect in the children" in told[1]


def test_new_client_in_a_child_works_if_none_was_open_at_the_fork(fake):
    """A server that loads the program first and forks then, and has asked for something in between."""
    done = run_program(
        fake.address,
        """
        client.close()
        for _ in range(2):
            child = os.fork()
            if child == 0:
                again = postdate.sync.connect(sys.argv[1])
                again.open()
                with again.producer("forked") as producer:
                    producer.send(b"from the child")
                again.close()
                print("sent", flush=True)
                os._exit(0)
            _, status = os.waitpid(child, 0)
            assert status == 0
        client.open()
        with client.subscribe("forked", "s", initial_position=postdate.InitialPosition.EARLIEST, limit=2) as subscription:
            print(*(message.payload for message in subscription))
        client.close()
        """,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == ["sent", "sent", "b'from the child' b'from the child'"]


def test_fork_waits_until_grpc_has_ended(fake, tmp_path):
    """Or the child could inherit a lock that nobody gives back; gRPC's threads end some milliseconds after a close."""
    (tmp_path / "comm").write_text("event_engine\n")
    done = run_program(
        fake.address,
        f"""
        from pathlib import Path
        from postdate import _rpc
        _rpc.threads_of_process = lambda: [Path({str(tmp_path)!r})]
        client.close()
        thread = Path({str(tmp_path / "comm")!r})
        ended = thread.with_name("ended")
        ended.write_text("ended")
        threading.Timer(0.2, ended.replace, [thread]).start()
        child = os.fork()
        if child == 0:
            os._exit(0)
        print(thread.read_text())
        os.waitpid(child, 0)
        """,
    )
    assert (done.returncode, done.stderr, done.stdout) == (0, "", "ended\n")


def test_subscription_without_a_block(client, topic):
    subscription = client.subscribe(topic, "s")
    subscription.open()
    assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL, "SIGTERM would wear its messages out"
    with pytest.raises(RuntimeError, match="opened once"):
        subscription.open()
    with client.producer(topic) as producer:
        producer.send(b"x")
    message = next(subscription)
    message.ack()
    subscription.close()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert list(subscription) == []
    (stats,) = client.stats(topic)
    assert (stats.subscriptions[0].consumers, stats.subscriptions[0].ready_messages) == (0, 0)


def test_client_and_producer_without_a_block(fake, topic):
    client = fake.client()
    for _ in range(2):  # what was closed is opened again
        client.open()
        client.open()
        producer = client.producer(topic)
        producer.open()
        producer.send(b"x")
        with pytest.raises(RuntimeError, match="opened once"):
            producer.open()
        producer.close()
        with pytest.raises(postdate.sync.Closed):
            producer.send(b"x")
        client.close()
        client.close()
        with pytest.raises(postdate.sync.Closed):
            client.server_info()


def test_every_public_name_is_there():
    assert postdate.sync.__all__ == postdate.__all__
    assert set(dir(postdate.sync)) >= set(postdate.__all__)


CLASSES = {
    "admin": ("Topics", "Subscriptions"),
    "backups": ("Backups",),
    "client": ("Client",),
    "dead_letters": ("DeadLetters",),
    "message": ("Message",),
    "partitions": ("PartitionedProducer", "PartitionedSubscription"),
    "producer": ("Producer",),
    "pull": ("Received",),
    "schedule": ("Schedule",),
    "subscription": ("Subscription",),
    "testing": ("FakeBroker",),
}
# What the classes offer to each other: see `Holder`, `Peer` and `Source`; the rest is for `postdate.testing` and partitions.
INTERNAL = {
    *vars(postdate.message.Holder),
    *vars(postdate._link.Peer),
    *vars(postdate._runner.Source),
    "address",
    "begin",
    "finish",
    "kept",
    "note_asked",
    "prepare",
    "submit",
    "take_ready",
}
FOR_HOLDERS = {"deliveries", "held_until", "holder", "is_settled", "place"}


@pytest.mark.parametrize(
    ("module", "name"), [(module, name) for module, names in CLASSES.items() for name in names]
)
def test_every_public_method_is_there_with_its_parameters(module: str, name: str):
    kind = getattr(importlib.import_module(f"postdate.{module}"), name)
    twin = getattr(importlib.import_module(f"postdate.sync.{module}"), name)
    internal = INTERNAL if name != "Message" else FOR_HOLDERS
    for method in [each for each in vars(kind) if not each.startswith("_") and each not in internal]:
        ours, theirs = inspect.getattr_static(twin, method), inspect.getattr_static(kind, method)
        if not inspect.isfunction(theirs):
            assert isinstance(ours, property)
            continue
        assert not inspect.iscoroutinefunction(ours)
        parameters = [inspect.signature(each).parameters.values() for each in (ours, theirs)]
        assert [(each.name, each.kind, each.default) for each in parameters[0]] == [
            (each.name, each.kind, each.default) for each in parameters[1]
        ]


def test_connect_takes_the_same():
    ours, theirs = inspect.signature(postdate.sync.connect), inspect.signature(postdate.connect)
    assert ours.parameters == theirs.parameters
