"""The pages: which there are, and what each request goes through before and after one is made.

    Host -> session -> may it read? -> (POST: origin, form) -> a page, or a change and a redirect

Pages get values and templates make HTML of them, in a thread: the loop delivers meanwhile. What the broker refuses is
a page that says why; a change that it refuses is told on the page that the form was on.
"""

from __future__ import annotations

import asyncio
import re
import secrets
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from urllib.parse import urlencode

from aiohttp import web

from broker.config import is_loopback
from broker.errors import InvalidRequest, LimitReached, NotFound, PostdateError, Refused, Unavailable
from broker.folder.broker import Broker
from broker.model import ENTRY_ID_MAX, LEDGER_ID_MAX, Position
from broker.observe.logs import CountedNotice, get_logger
from broker.runtime.ownership import AlwaysOwner, Ownership, ownership_lost
from broker.topics.topic import Topic
from broker.web.due_counts import DueCountCache
from broker.web.guard import (
    FORM_COOKIE,
    LOGIN_HEADER,
    NOTED_HEADER,
    SESSION_COOKIE,
    SESSION_SECONDS,
    SHARD_HEADER,
    Flash,
    Guard,
    Hosts,
    LoginSession,
    host_name,
    is_own_form,
    is_same_origin,
)
from broker.web.jobs import Jobs
from broker.web.refusals import PageRefusal
from broker.web.render import Renderer, StaticFile, load_static
from broker.web.source import PageSource, ShardSource, point_to_owner

log = get_logger(__name__)

POLICY = (
    "default-src 'none'; style-src 'self'; script-src 'self'; img-src 'self'; connect-src 'self'; "
    "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Frame-Options": "DENY",
    "X-Content-Type-Options": "nosniff",
    # Not no-referrer: browsers would send forms with `Origin: null`.
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}

_STATUSES: tuple[tuple[type[PostdateError], int], ...] = (
    (NotFound, 404),
    (InvalidRequest, 400),
    (Refused, 409),
    (LimitReached, 429),
    (Unavailable, 503),
)


def _status_of(error: PostdateError) -> int:
    return next((status for kind, status in _STATUSES if isinstance(error, kind)), 500)


def _told(error: PostdateError | PageRefusal) -> str:
    if isinstance(error, PageRefusal):
        return error.message
    if error.names_files:
        log.warning("A page failed because a file is damaged or cannot be read", error=error)
    return error.told


_AUDITED = frozenset({"action", "at", "by", "from", "how", "id", "job", "matched", "name", "prefix", "until"})
"""Fields of forms and paths that the audit trail shows: what is changed, and how."""
_FORM = "application/x-www-form-urlencoded"
_SEE_OTHER = 303
_MENU = (
    ("/", "Overview"),
    ("/timeline", "Timeline"),
    ("/scheduled", "Scheduled"),
    ("/topics", "Topics"),
    ("/dead-letters", "Dead letters"),
    ("/storage", "Storage"),
    ("/audit", "Audit"),
)
_CLUSTER_MENU = (("/cluster", "Cluster"),)
_SHARD = re.compile(r"[0-9]{1,5}", re.ASCII)
_POSITION = re.compile(r"([0-9]{1,15}):([0-9]{1,10})", re.ASCII)


class Missing(NamedTuple):
    """Part that a page of several shards lacks."""

    text: str
    is_elsewhere: bool
    """It is on another node, as it should be."""
    link: str
    """Leads there; empty: the way is not known."""


@dataclass(slots=True)
class Visit:
    """One request to a page."""

    site: Site
    request: web.Request
    params: Mapping[str, str]  # of the path
    session: LoginSession | None
    form: Mapping[str, str] = field(default_factory=dict)  # of a POST, after it passed the guard
    told: tuple[str, str] = ("", "")
    """The outcome of a change, as `done` was told."""
    shows_state: bool = True
    """The page tells of the broker's state, which it does only while that is owned."""
    shard: str = ""
    """Number of this shard, for what a front has passed on."""
    address: str = ""
    """Of who asks."""
    is_noted: bool = False
    """The change is in an audit trail: in that of this process, or of the shard that it was passed on to."""

    def scope(self, topic: str) -> dict[str, str]:
        """Return what names a topic in an address; without one, all topics of this shard."""
        return {"topic": topic} if topic else {"shard": self.shard} if self.shard else {}

    @property
    def broker(self) -> Broker:
        return self.site.broker

    @property
    def query(self) -> Mapping[str, str]:
        return self.request.query

    @property
    def may_change(self) -> bool:
        return self.session is not None

    def topic(self) -> Topic:
        """The topic that the path names."""
        return self.broker.registry.topic(self.params["topic"])

    async def page(self, template: str, *, status: int = 200, **values: object) -> web.Response:
        """A page with what all of them show besides."""
        session, guard = self.session, self.site.guard
        text = await self.site.renderer.render(
            template,
            values
            | {
                "path": self.request.path,
                "here": self.request.path_qs,
                "may_change": self.may_change,
                "can_log_in": guard.can_log_in,
                "csrf": session.csrf if session else "",
                "flashes": session.take_flashes() if session and self._may_tell else [],
                "menu": self.site.menu,
                "shard": self.shard,
                "at_shard": self._at_shard,
                "missing": values.get("missing", ()),
                "version": self.site.version,
                "now_ms": self.site.clock.now_ms(),
            },
        )
        # A header that a page shows may hold bytes that are no text.
        body = text.encode(errors="replace")
        return web.Response(status=status, body=body, content_type="text/html", charset="utf-8")

    @property
    def own_home(self) -> str:
        """The first page of the process that answers."""
        return self.site.home + self._at_shard

    @property
    def _at_shard(self) -> str:
        return f"?shard={self.shard}" if self.shard else ""

    @property
    def _may_tell(self) -> bool:
        return self.shows_state and self.site.ownership.holds()

    def done(self, kind: str, text: str, to: str) -> web.Response:
        """The answer to a change: what came of it is told on the page it goes to."""
        self.told = kind, text
        if self.session is not None:
            self.session.tell(Flash(kind, text))
        return see_other(to)

    def note_change(self, action: str, result: str, **details: object) -> None:
        """Put a change into the audit trail, with what the form asked for."""
        asked = {
            f"asked_{name}": text for name, text in {**self.form, **self.params}.items() if name in _AUDITED
        }
        self.site.audit.note(
            f"pages.{action}",
            result,
            principal="admin_token",
            peer=self.address,
            topic=self.params.get("topic") or self.form.get("topic", ""),
            details=asked | details,
        )


Handler = Callable[[Visit], Awaitable[web.Response]]


@dataclass(frozen=True, slots=True)
class PageRoute:
    """A page, or a change."""

    method: str
    path: re.Pattern[str]
    handler: Handler
    template: str
    """The path as it was declared, with its variable parts in braces."""
    shows_state: bool
    """See `Visit`."""


def route(method: str, path: str, handler: Handler, *, shows_state: bool = True) -> PageRoute:
    """`path` has its variable parts in braces: none of them holds a slash."""
    pattern = re.sub(r"\\\{([a-z]+)\\\}", r"(?P<\1>[^/]+)", re.escape(path))
    return PageRoute(method, re.compile(pattern), handler, path, shows_state)


class Site:
    """See the module's description."""

    def __init__(self, source: PageSource, listen_host: str, routes: list[PageRoute]) -> None:
        config, broker = source.config, source.broker
        self._broker = broker
        self.config = config
        self.clock = source.clock
        self.version = source.version
        self.cluster = source.cluster
        self._shards = source.shards
        self.audit = source.audit
        self.guard = Guard(config.admin_token, listen_host, source.clock, is_open=not config.access_file)
        self.hosts = Hosts(config.http_hosts, listen_host)
        self.jobs = Jobs(source.clock, self._spawn)
        self.due_counts = DueCountCache(source.clock)
        self._refused_forms = CountedNotice(source.clock)
        self._late_logins = CountedNotice(source.clock)
        self.menu = (_MENU if broker is not None or source.shards is not None else ()) + (
            _CLUSTER_MENU if self.cluster is not None else ()
        )
        self.renderer = Renderer()
        self._listens_locally = is_loopback(listen_host)
        self._static = load_static()
        self._routes = [
            *routes,
            route("GET", "/login", _show_login),
            route("POST", "/login", _log_in),
            route("POST", "/logout", _log_out),
        ]

    @property
    def broker(self) -> Broker:
        """The broker whose state is shown; pages of a standby do not ask for it."""
        assert self._broker is not None
        return self._broker

    @property
    def shards(self) -> ShardSource:
        """The shards of a front."""
        assert self._shards is not None
        return self._shards

    @property
    def ownership(self) -> Ownership:
        return AlwaysOwner() if self._broker is None else self._broker.ownership

    def _spawn(self, name: str, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        return self.broker.supervisor.spawn(name, work)

    @property
    def home(self) -> str:
        """The first page."""
        return self.menu[0][0]

    async def answer(self, request: web.Request) -> web.Response:
        """The answer to a request, whatever it is."""
        try:
            response = await self._answer(request)
        except web.HTTPException as error:  # what the library refuses: a form that is too large
            response = web.Response(status=error.status, text=f"{error.reason}\n")
        for name, value in HEADERS.items():
            response.headers.setdefault(name, value)
        if response.status == 200 and request.path.startswith("/static/"):
            response.headers["Cache-Control"] = "public, max-age=31536000, immutable"
        return response

    async def _answer(self, request: web.Request) -> web.Response:
        session = self.guard.session(request.cookies.get(SESSION_COOKIE, ""))
        visit = Visit(self, request, {}, session, address=request.remote or "")
        if not self.hosts.knows(request.headers.get("Host", ""), own_sockname(request)):
            return await self._refuse_host(visit)
        if request.path.startswith("/static/"):
            return self._serve_static(request)
        if self.config.http_socket and not self._take_vouched(visit):
            message = "The front and this shard have different settings of admin_token: start the broker anew"
            return await visit.page("error.html", status=503, message=message, code=503)
        if self._is_standby and not self._has_page(request.path):
            assert self.cluster is not None
            message = point_to_owner(self.cluster.views())
            return await visit.page("elsewhere.html", status=503, message=message)
        if not self.guard.may_read(request.headers.get("Host", ""), request.headers, visit.session):
            if not self.guard.can_log_in:
                return await visit.page(
                    "locked.html",
                    status=403,
                    is_local=self._listens_locally,
                    has_rights=bool(self.config.access_file),
                )
            if request.path != "/login":
                return see_other("/login?" + urlencode({"next": request.path_qs}))
        response = await self._made(visit)
        # A redirect tells nothing by itself; what it leads to is looked at in its turn. No `await` after this look.
        if response.status == _SEE_OTHER or not visit.shows_state:
            return response
        if (lost := ownership_lost(self.ownership)) is not None:
            return await visit.page("error.html", status=503, message=lost.told, code=503)
        return response

    @property
    def _is_standby(self) -> bool:
        return self._broker is None and self._shards is None and self.cluster is not None

    def _take_vouched(self, visit: Visit) -> bool:
        """Take what a front says of a request; False if it is no front of this shard."""
        number = visit.request.headers.get(SHARD_HEADER, "")
        visit.shard = number if _SHARD.fullmatch(number) else ""
        sealed = visit.request.headers.get(LOGIN_HEADER)
        if sealed is None:
            return True
        vouched = self.guard.vouched(sealed)
        if vouched is not None:
            visit.session, visit.address = vouched
        return vouched is not None

    async def _made(self, visit: Visit) -> web.Response:
        try:
            response = await self._dispatch(visit)
        except (PostdateError, PageRefusal) as error:
            response = await self._refused(visit, error)
        if visit.is_noted and visit.shard:
            response.headers[NOTED_HEADER] = "1"
        return response

    async def _refused(self, visit: Visit, error: PostdateError | PageRefusal) -> web.Response:
        # A front has no page to tell it on: that of the form is the shard's, which keeps what it tells itself.
        if visit.request.method == "POST" and visit.session is not None and self._shards is None:
            return visit.done("failed", _told(error), local_path(visit.form.get("back", visit.own_home)))
        status = error.status if isinstance(error, PageRefusal) else _status_of(error)
        return await visit.page("error.html", status=status, message=_told(error), code=status)

    def _has_page(self, path: str) -> bool:
        return any(route.path.fullmatch(path) for route in self._routes)

    async def _dispatch(self, visit: Visit) -> web.Response:
        method = "GET" if visit.request.method == "HEAD" else visit.request.method
        is_there = False
        for route in self._routes:
            match = route.path.fullmatch(visit.request.path)
            if match is None:
                continue
            is_there = True
            if route.method == method:
                visit.params, visit.shows_state = match.groupdict(), route.shows_state
                if method == "POST":
                    refusal = await self._check_form(visit)
                    if refusal is not None:
                        return refusal
                    if visit.session is not None:
                        return await self._change(visit, route.handler)
                return await route.handler(visit)
        if is_there:
            return await visit.page(
                "error.html", status=405, message="This page takes no such request.", code=405
            )
        return await visit.page("error.html", status=404, message="There is no such page.", code=404)

    async def _change(self, visit: Visit, handler: Handler) -> web.Response:
        """A change, and its line in the audit trail."""
        result = "INTERNAL"
        try:
            response = await handler(visit)
            result = visit.told[0] or "done"
        except asyncio.CancelledError:
            result = "the caller went away"
            raise
        except PostdateError as error:
            result = error.reason
            raise
        except PageRefusal:
            result = "refused"
            raise
        finally:
            if not visit.is_noted:
                visit.is_noted = True
                visit.note_change(handler.__name__.strip("_"), result, told=visit.told[1])
        return response

    async def _check_form(self, visit: Visit) -> web.Response | None:
        """Return the refusal of a form; None if the form is ours."""
        request = visit.request
        if not is_same_origin(request.headers):
            return await self._refuse_form(visit, "It was not sent from one of these pages.")
        # Browsers send UTF-8 and name no encoding; Python has some that decode to what cannot be written again.
        if request.content_type != _FORM or request.charset not in (None, "utf-8"):
            return await self._refuse_form(visit, "It is not a form.")
        try:
            sent = await request.post()
        except UnicodeDecodeError:
            return await self._refuse_form(visit, "It is not a form.")
        form = {name: value for name, value in sent.items() if isinstance(value, str)}
        if request.path == "/login":
            nonce = request.cookies.get(FORM_COOKIE, "")
            expected = self.guard.login_form_token(nonce) if nonce else ""
        elif visit.session is None:
            return await visit.page("error.html", status=403, message="Log in to change anything.", code=403)
        else:
            expected = visit.session.csrf
        if not expected or not is_own_form(form.get("csrf", ""), expected):
            return await self._refuse_form(
                visit, "It is out of date: go back, load the page again and repeat it."
            )
        visit.form = form
        return None

    async def _refuse_form(self, visit: Visit, why: str) -> web.Response:
        if forms := self._refused_forms.note():
            log.warning("A form was refused", path=visit.request.path, why=why, forms=forms)
        return await visit.page("error.html", status=403, message=f"The form was refused. {why}", code=403)

    def log_failed_login(self, address: str, *, too_many: bool) -> None:
        """Log a login that failed: each token that was looked at, but only some of what came too soon after."""
        if attempts := self._late_logins.note() if too_many else 1:
            log.warning("A login to the pages failed", address=address, too_many=too_many, attempts=attempts)

    async def _refuse_host(self, visit: Visit) -> web.Response:
        shown = host_name(visit.request.headers.get("Host", ""))[:100]
        return await visit.page("host.html", status=421, host=shown)

    def _serve_static(self, request: web.Request) -> web.Response:
        file: StaticFile | None = self._static.get(request.path.removeprefix("/static/"))
        if file is None or request.method not in ("GET", "HEAD"):
            return web.Response(status=404, text="There is no such file.\n")
        return web.Response(body=file.body, content_type=file.content_type, charset="utf-8")


# -- logging in ----------------------------------------------------------------------------------------------


async def _show_login(visit: Visit) -> web.Response:
    if visit.session is not None:
        return see_other(visit.site.home)
    guard = visit.site.guard
    if not guard.can_log_in:
        return await visit.page("read_only.html")
    nonce = secrets.token_urlsafe(24)
    response = await visit.page(
        "login.html",
        form_token=guard.login_form_token(nonce),
        next=local_path(visit.query.get("next", visit.site.home)),
        refused=visit.query.get("refused", ""),
    )
    _set_cookie(visit.request, response, FORM_COOKIE, nonce, 3_600)
    return response


async def _log_in(visit: Visit) -> web.Response:
    guard, address = visit.site.guard, visit.request.remote or ""
    to = local_path(visit.form.get("next", visit.site.home))
    wait = guard.retry_after_seconds(address)
    session_id = None if wait else guard.log_in(visit.form.get("token", ""), address)
    if session_id is None:
        visit.site.log_failed_login(address, too_many=bool(wait))
        response = see_other("/login?" + urlencode({"refused": wait or "token", "next": to}))
        if wait:
            response.headers["Retry-After"] = str(wait)
        return response
    log.info("A login to the pages succeeded", address=address)
    response = see_other(to)
    _set_cookie(visit.request, response, SESSION_COOKIE, session_id, SESSION_SECONDS)
    response.del_cookie(FORM_COOKIE, path="/")
    return response


async def _log_out(visit: Visit) -> web.Response:
    visit.site.guard.log_out(visit.request.cookies.get(SESSION_COOKIE, ""))
    response = see_other(visit.site.home)
    response.del_cookie(SESSION_COOKIE, path="/")
    return response


def _set_cookie(request: web.Request, response: web.Response, name: str, value: str, seconds: int) -> None:
    is_https = request.secure or request.headers.get("X-Forwarded-Proto", "") == "https"
    response.set_cookie(
        name, value, max_age=seconds, path="/", httponly=True, samesite="Strict", secure=is_https
    )


# -- small things that pages share ---------------------------------------------------------------------------


def see_other(to: str) -> web.Response:
    return web.Response(status=_SEE_OTHER, headers={"Location": to})


def local_path(path: str) -> str:
    """A path of ours to go to; the first page for what leads elsewhere."""
    is_ours = path.startswith("/") and not path.startswith(("//", "/\\")) and path.isprintable()
    return path if is_ours else "/"


def parse_position(text: str) -> Position | None:
    """An id as it is shown, `ledger:entry`."""
    match = _POSITION.fullmatch(text.strip())
    if match is None or int(match[1]) > LEDGER_ID_MAX or int(match[2]) > ENTRY_ID_MAX:
        return None
    return Position(int(match[1]), int(match[2]))


def own_sockname(request: web.Request) -> object:
    """The address that a request came to."""
    return request.transport.get_extra_info("sockname") if request.transport is not None else None
