"""Clients that do not read what they are sent, not even a status: their calls are ended with the connection.

Who is to be ended, and when, `unread_room.py` says. gRPC has no other way to end such a call.

The connection of a front has the calls of many clients. So a front gives each call that it passes on a tag, and asks
once a second on every such connection, by a health probe, which of its calls to end; it has their clients' connections.

Invariants:
  UNREAD-1  A connection whose calls have tags is closed only if a call that was named on it is not over after
      `FRONT_SECONDS`. Anybody can send tags. They name calls of the connection on which they came, are told on that
      one alone, and put its end off by so much, while what the call holds stays counted.
  UNREAD-2  A connection is looked for, closed and told once, however many of its calls are to end.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import islice
from typing import Any

import grpc

from broker.errors import LimitReached
from broker.observe.logs import get_logger
from broker.rpc.call_metadata import DIRECT, metadata_value
from broker.rpc.status import Context
from broker.runtime.connections import Peer, cut_connections, peer_of

log = get_logger(__name__)

FRONT_SECONDS = 10.0
"""Time for a front to end a call that was named."""
ASK_SECONDS = 1.0
"""Between questions of a front."""
_ANSWER_SECONDS = 2.0
_AGAIN_SECONDS = 1.0
"""Time after which a connection may be closed again: until then gRPC has ended its calls."""
_UNREAD = "postdate-unread"
"""Key of the metadata of an answer to a health probe that names calls to end."""
_HEALTH = "/grpc.health.v1.Health/Check"
_TAG = re.compile(r"f[0-9]{1,15}")
_TOLD_MAX = 200
"""Tags in one answer: metadata are bounded too."""

_named: dict[str, dict[str, None]] = {}  # tags by gRPC's name of the peer; the oldest first
_closing: set[Peer] = set()


def tag_of(number: int) -> str:
    """Return the tag of a front's call."""
    return f"f{number}"


def when_over(context: Context, do: Callable[[], None]) -> None:
    """Do something once a call is over: its client has read the answer, or never will."""
    over: Any = lambda _: do()  # noqa: E731 - the type of its argument is gRPC's own
    context.add_done_callback(over)


def end_client(context: Context) -> None:
    """End a call that is not over, because its client does not read."""
    held = ExitStack()
    held.enter_context(ending_client(context))
    when_over(context, held.close)


@contextmanager
def ending_client(context: Context) -> Iterator[None]:
    """End a call because its client does not read; meanwhile it is waited for."""
    peer, tag = context.peer(), metadata_value(context, DIRECT)
    if not _TAG.fullmatch(tag):
        _close(peer)
        yield
        return
    timer = asyncio.get_running_loop().call_later(FRONT_SECONDS, _close, peer)
    _named.setdefault(peer, {})[tag] = None
    try:
        yield
    finally:
        timer.cancel()
        tags = _named.get(peer, {})
        tags.pop(tag, None)
        if not tags:
            _named.pop(peer, None)


def tell_unread(context: Context) -> None:
    """Name to a front, in the answer to its probe, the calls of the same connection that it is to end."""
    if tags := _named.get(context.peer()):
        context.set_trailing_metadata(((_UNREAD, " ".join(islice(tags, _TOLD_MAX))),))


async def ask_unread(channel: grpc.aio.Channel) -> list[str]:
    """Return the tags of calls on a connection that the other side wants ended; none if it does not answer."""
    try:
        call: Any = channel.unary_unary(_HEALTH, None, None)(b"", timeout=_ANSWER_SECONDS)
    except grpc.aio.UsageError:  # it was closed meanwhile
        return []
    try:
        trailing: Any = await call.trailing_metadata() or ()
    finally:
        call.cancel()
    return [
        tag for key, value in trailing if key == _UNREAD and isinstance(value, str) for tag in value.split()
    ]


def not_read() -> LimitReached:
    """Return why such a call ends."""
    return LimitReached(
        "The client does not read its messages or answers, and the broker needs the memory for others",
        reason="ANSWERS_NOT_READ",
    )


def _close(name: str) -> None:
    """Close a connection, unless it is one of a socket, whose other side is trusted and always the front."""
    peer = peer_of(name)
    if peer is None or peer in _closing:
        return
    _closing.add(peer)
    loop = asyncio.get_running_loop()

    def close_again() -> None:
        _closing.discard(peer)
        _close(name)

    def note_closed(done: asyncio.Future[set[Peer]]) -> None:
        if (error := done.exception()) is not None:  # no descriptor was left to look with
            log.warning(
                "The connection of a client that does not read cannot be closed yet", peer=name, error=error
            )
            loop.call_later(_AGAIN_SECONDS, close_again)
            return
        loop.call_later(_AGAIN_SECONDS, _closing.discard, peer)
        if done.result():
            log.warning("Closed the connection of a client that does not read responses", peer=name)

    loop.run_in_executor(None, cut_connections, {peer}).add_done_callback(note_closed)
