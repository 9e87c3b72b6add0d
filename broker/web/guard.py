"""The guard of the pages: who asks, and whether a form is one of ours. No I/O.

    every page    the Host is ours: a foreign name that was made to point here (DNS rebinding) gets nothing
    with rules    who has logged in with a token, judged anew at each request; where others can reach the port, only if
                  that is allowed without encryption
    without       everybody who can reach the port, unless a proxy has passed it on
    every change  a form of ours (its token is bound to a cookie), and a browser that says the form is of this origin

What somebody may see or change is for the access rules to say. Sessions are in memory: a restart of the broker logs
everybody out. With several shards they are those of the front, which passes on the token of who has logged in.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import ipaddress
import secrets
from collections import OrderedDict, deque
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

from broker.config import is_loopback
from broker.runtime.clock import Clock

SESSION_SECONDS = 8 * 3_600
IDLE_SECONDS = 3_600
"""So long after the last request a session ends before its time."""
SESSION_COOKIE = "postdate_session"
FORM_COOKIE = "postdate_form"
TOLD_COOKIE = "postdate_told"
SHARD_HEADER = "Postdate-Shard"
"""On what a front passes on: the number of the shard."""
FORM_HEADER = "Postdate-Form"
"""Beside it: the token of the visitor's forms."""
TOLD_HEADER = "Postdate-Told"
"""Beside it: what the page is to tell of a change."""

_SESSIONS_MAX = 1_000
_SESSIONS_OF_ONE_MAX = 20
"""Of one principal: whoever logs in again and again logs out nobody else."""
_TOLD_BYTES_MAX = 1_500
_FAILURE_SECONDS = 60
_FAILURES_MAX = 5
"""Wrong tokens within a minute from one address, after which it has to wait."""
_FAILURES_OF_ALL_MAX = 30
_ADDRESSES_MAX = 1_000
_FORWARDING_HEADERS = ("Forwarded", "X-Forwarded-For", "X-Forwarded-Host", "X-Forwarded-Proto", "X-Real-IP")


@dataclass(frozen=True, slots=True)
class Flash:
    """Words of the next page about the change that led to it."""

    kind: str  # done, nothing or failed
    text: str


@dataclass(slots=True)
class LoginSession:
    """Somebody who has logged in."""

    principal: str
    authorization: str
    """Token that they showed, as calls have it."""
    ends_ns: int
    used_ns: int


class Hosts:
    """The names that this broker is asked by."""

    def __init__(self, http_hosts: str, listen_host: str) -> None:
        self._names = {name.strip().lower() for name in http_hosts.split(",") if name.strip()}
        self._names.add(listen_host.lower())

    def knows(self, host_header: str, sockname: object) -> bool:
        """Tell whether a request is meant for us.

        That is: for loopback, the address it came to (the name of its socket), or a name that was configured.
        """
        host = host_name(host_header)
        own_ip = str(sockname[0]) if isinstance(sockname, tuple) else ""
        return host in self._names or is_loopback(host) or (bool(own_ip) and _same_ip(host, own_ip))


class Guard:
    """See the module's description."""

    def __init__(self, listen_host: str, clock: Clock, *, allows_plaintext: bool) -> None:
        """`allows_plaintext`: also where other machines can reach the port."""
        self._is_local = is_loopback(listen_host)
        self.is_offered = self._is_local or allows_plaintext
        """Pages are shown at all, and tokens taken."""
        self._clock = clock
        self._sessions: OrderedDict[bytes, LoginSession] = OrderedDict()
        self._failures: OrderedDict[str, deque[int]] = OrderedDict()
        self._failures_of_all: deque[int] = deque()
        self._form_key = secrets.token_bytes(32)

    def is_open_to(self, host_header: str, headers: Mapping[str, str]) -> bool:
        """Return whether pages are shown to somebody who does not log in, where there are no access rules."""
        # What a proxy passes on comes from this machine as well, and is meant for another name or says so.
        is_passed_on = any(name in headers for name in _FORWARDING_HEADERS)
        is_direct = not self._is_local or is_loopback(host_name(host_header))
        return self.is_offered and is_direct and not is_passed_on

    # -- logging in ------------------------------------------------------------------------------------------

    def retry_after_seconds(self, address: str) -> int:
        """Return how long this address has to wait before it may try another token; 0: it may now."""
        now_ns = self._clock.monotonic_ns()
        waits = [0]
        own = self._failures.get(address, deque())
        for failures, most in ((own, _FAILURES_MAX), (self._failures_of_all, _FAILURES_OF_ALL_MAX)):
            while failures and now_ns - failures[0] >= _FAILURE_SECONDS * 10**9:
                failures.popleft()
            if len(failures) >= most:
                waits.append(_FAILURE_SECONDS - (now_ns - failures[0]) // 10**9)
        return max(waits)

    def note_failure(self, address: str) -> None:
        """Count a token that was none. Call only while `retry_after_seconds` is 0."""
        now_ns = self._clock.monotonic_ns()
        self._failures.setdefault(address, deque()).append(now_ns)
        self._failures.move_to_end(address)
        self._failures_of_all.append(now_ns)
        while len(self._failures) > _ADDRESSES_MAX:
            self._failures.popitem(last=False)

    def log_in(self, principal: str, authorization: str, address: str) -> str:
        """Return the id of a new session."""
        self._failures.pop(address, None)
        session_id = secrets.token_urlsafe(32)
        now_ns = self._clock.monotonic_ns()
        ends_ns = now_ns + SESSION_SECONDS * 10**9
        own = [key for key, each in self._sessions.items() if each.principal == principal]
        for key in own[: max(0, len(own) - _SESSIONS_OF_ONE_MAX + 1)]:
            del self._sessions[key]
        self._sessions[_digest(session_id)] = LoginSession(principal, authorization, ends_ns, now_ns)
        while len(self._sessions) > _SESSIONS_MAX:
            self._sessions.popitem(last=False)
        return session_id

    def session(self, session_id: str) -> LoginSession | None:
        """The session of that id, if it has not ended; it was used now."""
        key = _digest(session_id)
        session = self._sessions.get(key)
        if session is None:
            return None
        now_ns = self._clock.monotonic_ns()
        if now_ns >= session.ends_ns or now_ns - session.used_ns >= IDLE_SECONDS * 10**9:
            del self._sessions[key]
            return None
        session.used_ns = now_ns
        return session

    def log_out(self, session_id: str) -> None:
        self._sessions.pop(_digest(session_id), None)

    # -- forms -----------------------------------------------------------------------------------------------

    def form_token(self, cookie: str) -> str:
        """Return what forms hold for a browser with this cookie: that of its session, or one for forms alone."""
        return self._checksum("form", cookie)

    def close_flash(self, cookie: str, flash: Flash) -> str:
        """Return what the next page is to tell a browser with this cookie, as a cookie."""
        text = base64.urlsafe_b64encode(_bytes_of(flash.text)[:_TOLD_BYTES_MAX]).decode()
        return f"{flash.kind}.{text}.{self._checksum('told', cookie, flash.kind, text)}"

    def open_flash(self, cookie: str, closed: str) -> Flash | None:
        """Return what `close_flash` has closed for that browser; None for what nobody here has."""
        kind, _, rest = closed.partition(".")
        text, _, checksum = rest.partition(".")
        if not hmac.compare_digest(_bytes_of(checksum), self._checksum("told", cookie, kind, text).encode()):
            return None
        return Flash(kind, base64.urlsafe_b64decode(text).decode("utf-8", "ignore"))

    def _checksum(self, *parts: str) -> str:
        return hmac.new(self._form_key, _bytes_of("\0".join(parts)), hashlib.sha256).hexdigest()


def is_own_form(given: str, expected: str) -> bool:
    """Return whether a form holds the token that was put into it."""
    return hmac.compare_digest(_bytes_of(given), expected.encode())


def is_same_origin(headers: Mapping[str, str]) -> bool:
    """Return whether a browser says that a form was sent from one of our pages. Whoever says nothing is no browser.

    The scheme is not compared: behind a proxy it is not ours.
    """
    site, origin = headers.get("Sec-Fetch-Site"), headers.get("Origin")
    if site is None and origin is None:
        return False
    if site is not None and site != "same-origin":
        return False
    try:
        return origin is None or urlsplit(origin).netloc.lower() == headers.get("Host", "").lower()
    except ValueError:  # what is no address
        return False


def host_name(host_header: str) -> str:
    """The host of a Host header, without its port."""
    host = host_header.strip().lower()
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0]


def _same_ip(host: str, own_ip: str) -> bool:
    try:
        own = ipaddress.ip_address(own_ip.partition("%")[0])
        if isinstance(own, ipaddress.IPv6Address) and own.ipv4_mapped is not None:
            own = own.ipv4_mapped
        return ipaddress.ip_address(host) == own
    except ValueError:
        return False


def _digest(secret: str) -> bytes:
    # Of equal length whatever was given, so that comparing takes the same time; and no id lies about in memory.
    return hashlib.sha256(_bytes_of(secret)).digest()


def _bytes_of(given: str) -> bytes:
    # Headers are read with surrogates in place of bytes that are no UTF-8: they are wrong, and no error of ours.
    return given.encode("utf-8", "surrogatepass")
