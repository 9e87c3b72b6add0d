"""The guard of the pages: who may see them, and who may change things on them. No I/O.

    every page    the Host is ours: a foreign name that was made to point here (DNS rebinding) gets nothing
    reading       open on loopback; elsewhere, for what came through a proxy, or where the broker has access control,
                  to who has logged in
    every change  a session, a form of ours (its CSRF token), and a browser that says the form is of this origin

Sessions are in memory: a restart of the broker logs everybody out. With several shards they are those of the front,
which judges every request and vouches to the shard for who has logged in: by a seal that is made with `admin_token`.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import secrets
from collections import OrderedDict, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from broker.config import is_loopback
from broker.runtime.clock import Clock

SESSION_SECONDS = 8 * 3_600
SESSION_COOKIE = "postdate_session"
FORM_COOKIE = "postdate_login"
SHARD_HEADER = "Postdate-Shard"
"""On what a front passes on: the number of the shard."""
LOGIN_HEADER = "Postdate-Login"
"""Beside it: the seal of a front for who has logged in."""
NOTED_HEADER = "Postdate-Noted"
"""On a shard's answer to its front: the change is in the shard's audit trail."""

_SESSIONS_MAX = 1_000
_FLASHES_MAX = 10
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

    csrf: str
    ends_ns: int
    flashes: list[Flash] = field(default_factory=list)

    def tell(self, flash: Flash) -> None:
        self.flashes = [*self.flashes, flash][-_FLASHES_MAX:]

    def take_flashes(self) -> list[Flash]:
        flashes, self.flashes = self.flashes, []
        return flashes


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


class FrontSeal:
    """The word of a front that a request is of a session there, as `csrf address checksum`."""

    def __init__(self, admin_token: str) -> None:
        self._key = hmac.new(admin_token.encode(), b"front of shards", hashlib.sha256).digest()

    def close(self, csrf: str, address: str) -> str:
        said = f"{csrf} {address or '-'}"
        return f"{said} {self._checksum(said)}"

    def open(self, sealed: str) -> tuple[str, str] | None:
        """Return the token of the session's forms, and who asks; None if no front of this token has said so."""
        said, _, checksum = sealed.rpartition(" ")
        if not hmac.compare_digest(_bytes_of(checksum), self._checksum(said).encode()):
            return None
        csrf, _, address = said.partition(" ")
        return csrf, address

    def _checksum(self, said: str) -> str:
        return hmac.new(self._key, _bytes_of(said), hashlib.sha256).hexdigest()


class Guard:
    """See the module's description."""

    def __init__(self, admin_token: str, listen_host: str, clock: Clock, *, is_open: bool = True) -> None:
        """`is_open`: whoever is on this machine may read."""
        self._token = _digest(admin_token) if admin_token else b""
        self._seal = FrontSeal(admin_token)
        self._passed_on: OrderedDict[str, LoginSession] = (
            OrderedDict()
        )  # sessions of the front, by their csrf
        self._is_open = is_open and is_loopback(listen_host)
        self._clock = clock
        self._sessions: OrderedDict[bytes, LoginSession] = OrderedDict()
        self._failures: OrderedDict[str, deque[int]] = OrderedDict()
        self._failures_of_all: deque[int] = deque()
        self._form_key = secrets.token_bytes(32)

    @property
    def can_log_in(self) -> bool:
        """Return whether there is a token to log in with."""
        return bool(self._token)

    # -- what a request says of itself -----------------------------------------------------------------------

    def may_read(self, host_header: str, headers: Mapping[str, str], session: LoginSession | None) -> bool:
        """Return whether pages are shown: to who has logged in, and to anybody on this machine while they are open."""
        if session is not None:
            return True
        # What a proxy passes on comes from this machine as well, and is meant for another name or says so.
        is_passed_on = any(name in headers for name in _FORWARDING_HEADERS)
        return self._is_open and not is_passed_on and is_loopback(host_name(host_header))

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

    def log_in(self, token: str, address: str) -> str | None:
        """The id of a new session if the token is right. Call only while `retry_after_seconds` is 0."""
        if not self._token or not hmac.compare_digest(_digest(token), self._token):
            now_ns = self._clock.monotonic_ns()
            self._failures.setdefault(address, deque()).append(now_ns)
            self._failures.move_to_end(address)
            self._failures_of_all.append(now_ns)
            while len(self._failures) > _ADDRESSES_MAX:
                self._failures.popitem(last=False)
            return None
        self._failures.pop(address, None)
        session_id = secrets.token_urlsafe(32)
        ends_ns = self._clock.monotonic_ns() + SESSION_SECONDS * 10**9
        self._sessions[_digest(session_id)] = LoginSession(secrets.token_urlsafe(32), ends_ns)
        while len(self._sessions) > _SESSIONS_MAX:
            self._sessions.popitem(last=False)
        return session_id

    def session(self, session_id: str) -> LoginSession | None:
        """The session of that id, if it has not ended."""
        key = _digest(session_id)
        session = self._sessions.get(key)
        if session is not None and self._clock.monotonic_ns() >= session.ends_ns:
            del self._sessions[key]
            return None
        return session

    def log_out(self, session_id: str) -> None:
        self._sessions.pop(_digest(session_id), None)

    # -- between a front and its shards ----------------------------------------------------------------------

    def vouch(self, session: LoginSession, address: str) -> str:
        """Return what a front says to a shard of who has logged in."""
        return self._seal.close(session.csrf, address)

    def vouched(self, sealed: str) -> tuple[LoginSession, str] | None:
        """Return the session that a front vouches for, and the address of who asks; None if no front did."""
        said = self._seal.open(sealed) if self._token else None
        if said is None:
            return None
        csrf, address = said
        # Kept for what is told of a change on the next page; whether it lasts is for the front to say.
        session = self._passed_on.setdefault(csrf, LoginSession(csrf, 0))
        self._passed_on.move_to_end(csrf)
        while len(self._passed_on) > _SESSIONS_MAX:
            self._passed_on.popitem(last=False)
        return session, address

    # -- forms -----------------------------------------------------------------------------------------------

    def login_form_token(self, nonce: str) -> str:
        """Return what the login form holds for a browser with this cookie: there is no session yet to bind it to."""
        return hmac.new(self._form_key, _bytes_of(nonce), hashlib.sha256).hexdigest()


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
