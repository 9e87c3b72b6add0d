"""Messages to systemd from a service of Type=notify: that it is ready, that it stops, and that it is alive.

The protocol is a datagram of lines `NAME=value` to the socket that NOTIFY_SOCKET names; see sd_notify(3).
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Callable, Mapping

_log = logging.getLogger(__name__)


class ServiceNotifier:
    """Tells whoever started this process. Without NOTIFY_SOCKET in the environment nobody is told anything."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        address = environ.get("NOTIFY_SOCKET", "")
        # "@" stands for the null byte with which the names of Linux's abstract sockets begin.
        self._address = "\0" + address[1:] if address.startswith("@") else address
        self._watchdog_seconds = _watchdog_seconds(environ)

    def tell(self, *lines: str) -> None:
        """Send lines such as "READY=1". Never raises, and never waits: the broker goes on whoever listens."""
        if not self._address:
            return
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender:
                sender.setblocking(False)
                sender.sendto("\n".join(lines).encode(), self._address)
        except OSError as error:
            _log.warning("The service manager could not be notified", extra={"fields": {"error": error}})

    async def keep_alive(self, is_well: Callable[[], bool]) -> None:
        """Tell the watchdog, if there is one, twice in its time, while `is_well`; a loop that hangs tells nothing."""
        if not self._address or not self._watchdog_seconds:
            return
        while is_well():
            self.tell("WATCHDOG=1")
            await asyncio.sleep(self._watchdog_seconds / 2)


def _watchdog_seconds(environ: Mapping[str, str]) -> float:
    """Return how long the service may be silent; 0: for ever, or another process is meant."""
    length, process = environ.get("WATCHDOG_USEC", ""), environ.get("WATCHDOG_PID", "")
    if not length.isdecimal() or process not in ("", str(os.getpid())):
        return 0.0
    return int(length) / 1e6
