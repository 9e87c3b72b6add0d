"""The event loop of a process that serves gRPC.

A thread of gRPC hands each event to the loop: it queues the event and writes a byte to a socket. In one round of the
loop gRPC handles all queued events and reads one byte. After some 280 unread bytes the thread's write blocks, until a
quarter is left. From then on one event a round is handled: beside work that makes rounds of 60 ms, every call waits for
seconds. So this loop reads the bytes of all queued events.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVarTuple

import uvloop

if TYPE_CHECKING:
    from _typeshed import FileDescriptorLike

_Ts = TypeVarTuple("_Ts")
_BYTES_MAX = 4_096


class GrpcLoop(uvloop.Loop):
    """See the module's description."""

    def add_reader(self, fd: FileDescriptorLike, callback: Callable[[*_Ts], Any], *args: *_Ts) -> None:
        if _is_grpc_handler(callback) and isinstance(fd, socket.socket):
            super().add_reader(fd, _handle_all, fd, callback, *args)
        else:
            super().add_reader(fd, callback, *args)


def _is_grpc_handler(callback: Any) -> bool:
    handler = callback.func if isinstance(callback, partial) else callback
    return getattr(handler, "__qualname__", "") == "PollerCompletionQueue._handle_events"


def _handle_all(waking: socket.socket, handle: Callable[..., Any], *args: Any) -> None:
    # Before the events are handled: the byte of one that is queued after that must stay. And one byte is for gRPC.
    surplus = len(waking.recv(_BYTES_MAX, socket.MSG_PEEK)) - 1
    if surplus > 0:
        waking.recv(surplus)
    handle(*args)
