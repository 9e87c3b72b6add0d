"""Connections that are closed because a client does not read: in virtual time, with no descriptor touched."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest

from broker.rpc import slow_readers
from broker.rpc.call_metadata import DIRECT
from broker.rpc.slow_readers import FRONT_SECONDS, end_client, ending_client, tag_of, tell_unread
from broker.runtime.connections import Peer, peer_of
from broker.testing.sim_clock import SimClock
from broker.testing.sim_loop import SimLoop, run_sim

FRONT, OTHER = "ipv4:192.0.2.1:50001", "ipv4:192.0.2.2:50002"


class Call:
    """As much of a call as is asked for."""

    def __init__(self, peer: str, direct: str = "") -> None:
        self._peer = peer
        self._direct = direct
        self.told: list[str] = []
        self._callbacks: list[Callable[[Any], None]] = []

    def peer(self) -> str:
        return self._peer

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        return ((DIRECT, self._direct),) if self._direct else ()

    def set_trailing_metadata(self, metadata: tuple[tuple[str, str], ...]) -> None:
        self.told = [tag for _, value in metadata for tag in value.split()]

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        self._callbacks.append(callback)

    def end(self) -> None:
        for callback in self._callbacks:
            callback(self)


def told_to(peer: str) -> list[str]:
    probe = Call(peer)
    tell_unread(cast(Any, probe))
    return probe.told


class Closer:
    """Closes no connection: notes which it was asked for."""

    def __init__(self) -> None:
        self.closed: list[Peer] = []
        self.failures = 0

    def __call__(self, peers: set[Peer]) -> set[Peer]:
        if self.failures:
            self.failures -= 1
            raise OSError(24, "Too many open files")
        self.closed += peers
        return peers


@pytest.fixture
def closer(monkeypatch: pytest.MonkeyPatch) -> Iterator[Closer]:
    made = Closer()
    monkeypatch.setattr(slow_readers, "cut_connections", made)
    monkeypatch.setattr(slow_readers, "_closing", set())
    yield made
    assert not slow_readers._named
    assert not slow_readers._closing


def in_sim(work: Callable[[], Any]) -> None:
    async def run(loop: SimLoop, _: SimClock) -> None:
        def at_once(_: Any, call: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:
            done = loop.create_future()
            try:
                done.set_result(call(*args))
            except OSError as error:
                done.set_exception(error)
            return done

        loop.run_in_executor = at_once  # type: ignore[method-assign, assignment]
        await work()
        await asyncio.sleep(2 * FRONT_SECONDS)

    run_sim(run, seed=1)


@pytest.mark.parametrize("direct", ["", "1", "f", "f" + "1" * 16, "f1 f2", "front"])
def test_a_connection_without_a_tag_is_closed_at_once_and_once(
    closer: Closer, caplog: pytest.LogCaptureFixture, direct: str
) -> None:
    async def work() -> None:
        calls = [Call(OTHER, direct) for _ in range(58)]
        for call in calls:
            end_client(cast(Any, call))
        await asyncio.sleep(0)
        for call in calls:
            call.end()
        assert closer.closed == [peer_of(OTHER)]
        assert told_to(OTHER) == []

    in_sim(work)
    assert closer.closed == [peer_of(OTHER)]
    assert len(caplog.records) == 1


def test_a_front_ends_the_call_and_keeps_its_connection(closer: Closer) -> None:
    async def work() -> None:
        calls = [Call(FRONT, tag_of(number)) for number in (7, 3)]
        for call in calls:
            end_client(cast(Any, call))
        assert told_to(FRONT) == ["f7", "f3"]
        assert told_to(OTHER) == []
        await asyncio.sleep(FRONT_SECONDS - 0.1)
        for call in calls:
            call.end()
        assert told_to(FRONT) == []

    in_sim(work)
    assert closer.closed == []


def test_who_only_says_that_it_is_a_front_gains_a_few_seconds(closer: Closer) -> None:
    """However many calls it names: the first that is not over in time takes the connection along, and no other one."""

    async def work() -> None:
        calls = [Call(FRONT, tag_of(number)) for number in range(300)]
        innocent = Call(OTHER, tag_of(0))  # the same tag on another connection
        for call in calls:
            end_client(cast(Any, call))
        assert len(told_to(FRONT)) == 200, "metadata are bounded"
        assert told_to(OTHER) == []
        await asyncio.sleep(FRONT_SECONDS - 0.1)
        assert closer.closed == []
        await asyncio.sleep(0.2)
        assert closer.closed == [peer_of(FRONT)]
        for call in (*calls, innocent):
            call.end()

    in_sim(work)
    assert closer.closed == [peer_of(FRONT)]


def test_a_call_that_is_waited_for_is_named_until_then(closer: Closer) -> None:
    async def work() -> None:
        with ending_client(cast(Any, Call(FRONT, tag_of(1)))):
            assert told_to(FRONT) == ["f1"]
        assert told_to(FRONT) == []

    in_sim(work)
    assert closer.closed == []


def test_a_socket_of_this_machine_is_never_closed(closer: Closer, caplog: pytest.LogCaptureFixture) -> None:
    async def work() -> None:
        calls = [Call("unix:", tag_of(number)) for number in range(2)]
        for call in calls:
            end_client(cast(Any, call))
        await asyncio.sleep(2 * FRONT_SECONDS)
        assert told_to("unix:") == ["f0", "f1"], "until the front has ended them"
        for call in calls:
            call.end()
        end_client(cast(Any, Call("unix:")))

    in_sim(work)
    assert closer.closed == []
    assert not caplog.records, "nothing is claimed to be closed"


def test_where_no_descriptor_is_left_to_look_with_it_is_tried_again(closer: Closer) -> None:
    async def work() -> None:
        closer.failures = 3
        end_client(cast(Any, Call(OTHER)))

    in_sim(work)
    assert closer.closed == [peer_of(OTHER)]
