"""The pages: which there are, and what each request goes through before and after one is made.

    Host -> who asks -> (POST: origin, form) -> a right -> a page, or a change and a redirect

Each page names the call of the API that tells the same: whoever may make that call sees the page, and of what it lists
all that the call would show. A change is such a call, made for who asks. Pages get values and templates make HTML of
them, in a thread: the loop delivers meanwhile. What the broker refuses is a page that says why; a change that it
refuses is told on the page that the form was on.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from urllib.parse import unquote, urlencode

from aiohttp import web

from broker.errors import (
    InvalidRequest,
    LimitReached,
    NotFound,
    PermissionDenied,
    PostdateError,
    Refused,
    Unauthenticated,
    Unavailable,
)
from broker.folder.broker import Broker
from broker.model import ENTRY_ID_MAX, LEDGER_ID_MAX, Position
from broker.observe.logs import CountedNotice, get_logger
from broker.runtime.ownership import AlwaysOwner, Ownership, ownership_lost
from broker.runtime.supervise import YieldBudget
from broker.subscriptions.subscription import Subscription
from broker.topics.topic import Topic
from broker.web.due_counts import DueCountCache
from broker.web.guard import (
    FORM_COOKIE,
    FORM_HEADER,
    SESSION_COOKIE,
    SESSION_SECONDS,
    SHARD_HEADER,
    TOLD_COOKIE,
    TOLD_HEADER,
    Flash,
    Guard,
    Hosts,
    host_name,
    is_own_form,
    is_same_origin,
)
from broker.web.refusals import CallRefusal, PageRefusal
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
    (Unauthenticated, 401),
    (PermissionDenied, 403),
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


_FORM = "application/x-www-form-urlencoded"
_SEE_OTHER = 303
_TOKEN_CHARACTERS_MAX = 8_000
"""More than fits into a header."""
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
    address: str
    """Of who asks."""
    cookie: str
    """Value that forms and what is told are bound to: that of the session, or one of the browser's own."""
    is_new: bool
    """The browser does not have the cookie yet."""
    csrf: str
    """The token of its forms."""
    told: Flash | None
    """Words of a page about the change that led to it."""
    params: Mapping[str, str] = field(default_factory=dict)  # of the path
    call_name: str = ""
    """The call that tells what the page shows, or that is the change."""
    principal: str = ""
    """Name of who has logged in; empty where there are no access rules."""
    authorization: str = ""
    """Token that they showed, as calls have it."""
    form: Mapping[str, str] = field(default_factory=dict)  # of a POST, after it passed the guard
    shows_state: bool = True
    """The page tells of the broker's state, which it does only while that is owned."""
    shard: str = ""
    """Number of this shard, for what a front has passed on."""
    is_told: bool = False
    """The page tells what was to be told."""

    def scope(self, topic: str) -> dict[str, str]:
        """Return what names a topic in an address; without one, all topics of this shard."""
        return {"topic": topic} if topic else {"shard": self.shard} if self.shard else {}

    @property
    def broker(self) -> Broker:
        return self.site.broker

    @property
    def query(self) -> Mapping[str, str]:
        return self.request.query

    # -- rights ----------------------------------------------------------------------------------------------

    def may(self, call: str, topic: str = "", subscription: str = "") -> bool:
        """Return whether who asks may make a call; without a topic, whether of any."""
        return self.site.calls.allows(self.principal, call, topic, subscription)

    def check(self, topic: str = "", subscription: str = "") -> None:
        """Check that who asks may see the page of a topic: PermissionDenied."""
        if self.call_name:
            self.site.calls.check(self.principal, self.address, self.call_name, topic, subscription)

    @property
    def sees_all(self) -> bool:
        """Return whether who asks may see what is about the whole broker."""
        return self.site.calls.sees_all(self.principal)

    def topic(self, name: str = "") -> Topic:
        """Return a topic, or the one that the path names. Raises PermissionDenied."""
        if name:
            self.check(name)
        return self.broker.registry.topic(name or self.params["topic"])

    async def topics(self, call: str = "") -> list[Topic]:
        """Return those topics about which who asks may make a call, or that of the page."""
        topics = list(self.broker.registry.topics.values())
        if not self.site.calls.has_rules:
            return topics
        budget = YieldBudget(self.broker.clock)
        seen = []
        for topic in topics:
            if self.may(call or self.call_name, topic.name):
                seen.append(topic)
            await budget.spent()
        return seen

    def subscriptions(self, topic: Topic) -> list[Subscription]:
        """Return those subscriptions of a topic that who asks may see."""
        subscriptions = list(topic.subscriptions.values())
        if not self.site.calls.has_rules:
            return subscriptions
        return [each for each in subscriptions if self.may("GetSubscription", topic.name, each.name)]

    async def call(self, name: str, /, **fields: object) -> dict[str, Any]:
        """Make a call for who asks. Raises CallRefusal, or PermissionDenied."""
        answer = await self.site.calls.call(name, fields, self.authorization, self.address)
        if answer.status != 200:
            raise CallRefusal(answer.status, answer.fields)
        return answer.fields

    # -- answers ---------------------------------------------------------------------------------------------

    async def page(self, template: str, *, status: int = 200, **values: object) -> web.Response:
        """A page with what all of them show besides."""
        told = self.told if self.shows_state and self.site.ownership.holds() else None
        self.is_told = told is not None
        text = await self.site.renderer.render(
            template,
            values
            | {
                "path": self.request.path,
                "here": self.request.path_qs,
                "may": self.may,
                "sees_all": self.sees_all,
                "principal": self.principal,
                "csrf": self.csrf,
                "flash": told,
                "menu": self.site.menu_of(self),
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

    def done(self, kind: str, text: str, to: str) -> web.Response:
        """The answer to a change: what came of it is told on the page it goes to."""
        response = see_other(to)
        closed = self.site.guard.close_flash(self.cookie, Flash(kind, text))
        set_cookie(self.request, response, TOLD_COOKIE, closed, 60)
        return response


Handler = Callable[[Visit], Awaitable[web.Response]]


@dataclass(frozen=True, slots=True)
class PageRoute:
    """A page, or a change."""

    method: str
    path: re.Pattern[str]
    handler: Handler
    template: str
    """The path as it was declared, with its variable parts in braces."""
    call: str
    """The call of the API that tells the same, or is the change: who may make it sees the page."""
    shows_state: bool
    """See `Visit`."""


def route(method: str, path: str, handler: Handler, call: str, *, shows_state: bool = True) -> PageRoute:
    """`path` has its variable parts in braces: none of them holds a slash."""
    pattern = re.sub(r"\\\{([a-z]+)\\\}", r"(?P<\1>[^/]+)", re.escape(path))
    return PageRoute(method, re.compile(pattern), handler, path, call, shows_state)


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
        self.calls = source.calls
        self.guard = Guard(listen_host, source.clock, allows_plaintext=config.allow_plaintext)
        self.hosts = Hosts(config.http_hosts, listen_host)
        self.due_counts = DueCountCache(source.clock)
        self._refused_forms = CountedNotice(source.clock)
        self._late_logins = CountedNotice(source.clock)
        self._menu = (_MENU if broker is not None or source.shards is not None else ()) + (
            _CLUSTER_MENU if self.cluster is not None else ()
        )
        self.renderer = Renderer()
        self._static = load_static()
        self._routes = [
            *routes,
            route("GET", "/login", _show_login, ""),
            route("POST", "/login", _log_in, ""),
            route("POST", "/logout", _log_out, ""),
        ]
        self._calls_of_pages = {route.template: route.call for route in self._routes if route.method == "GET"}

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

    @property
    def home(self) -> str:
        """The first page."""
        return self._menu[0][0]

    def menu_of(self, visit: Visit) -> list[tuple[str, str]]:
        """Return the pages that somebody may see."""
        shown = [(path, name) for path, name in self._menu if visit.may(self._calls_of_pages[path])]
        return shown or [self._menu[0]]

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
        visit = self._begin(request)
        if not self.hosts.knows(request.headers.get("Host", ""), own_sockname(request)):
            return await self._refuse_host(visit)
        if request.path.startswith("/static/"):
            return self._serve_static(request)
        if self._is_standby and not self._has_page(request.path):
            assert self.cluster is not None
            message = point_to_owner(self.cluster.views())
            return await visit.page("elsewhere.html", status=503, message=message)
        response = await self._turned_away(visit)
        if response is None:
            response = await self._made(visit)
        # A redirect tells nothing by itself; what it leads to is looked at in its turn. No `await` after this look.
        if (
            response.status != _SEE_OTHER
            and visit.shows_state
            and (lost := ownership_lost(self.ownership)) is not None
        ):
            response = await visit.page("error.html", status=503, message=lost.told, code=503)
        if response.content_type == "text/html":
            if visit.is_new:
                set_cookie(request, response, FORM_COOKIE, visit.cookie, SESSION_SECONDS)
            if visit.is_told:
                response.del_cookie(TOLD_COOKIE, path="/")
        return response

    @property
    def _is_standby(self) -> bool:
        return self._broker is None and self._shards is None and self.cluster is not None

    def _begin(self, request: web.Request) -> Visit:
        """Return a request with what its cookies say, or a front of who has sent it."""
        address = request.remote or ""
        if self.config.http_socket:  # which this user alone can open
            headers = request.headers
            number = headers.get(SHARD_HEADER, "")
            kind, _, text = headers.get(TOLD_HEADER, "").partition(" ")
            return Visit(
                self,
                request,
                address,
                cookie="",
                is_new=False,
                csrf=headers.get(FORM_HEADER, ""),
                told=Flash(kind, unquote(text)) if kind else None,
                authorization=headers.get("Authorization", ""),
                shard=number if _SHARD.fullmatch(number) else "",
            )
        guard, cookies = self.guard, request.cookies
        session_id = cookies.get(SESSION_COOKIE, "")
        session = guard.session(session_id) if self.calls.has_rules and session_id else None
        known = session_id if session is not None else cookies.get(FORM_COOKIE, "")
        cookie = known or secrets.token_urlsafe(24)
        return Visit(
            self,
            request,
            address,
            cookie=cookie,
            is_new=not known,
            csrf=guard.form_token(cookie),
            told=guard.open_flash(cookie, cookies.get(TOLD_COOKIE, "")),
            principal=session.principal if session is not None else "",
            authorization=session.authorization if session is not None else "",
        )

    async def _turned_away(self, visit: Visit) -> web.Response | None:
        """Return what is answered to somebody who sees no page; None: they may go on."""
        request, guard = visit.request, self.guard
        is_passed_on = bool(self.config.http_socket)
        if not self.calls.has_rules:
            if is_passed_on or guard.is_open_to(request.headers.get("Host", ""), request.headers):
                return None
            return await self._locked(visit)
        if not is_passed_on and not guard.is_offered:
            return await self._locked(visit)
        if visit.authorization:
            try:
                principal = self.calls.identify(visit.authorization, visit.address)
            except Unauthenticated as error:
                if is_passed_on:
                    return await self._refused(visit, error)
            else:
                if is_passed_on or principal == visit.principal:
                    visit.principal = principal
                    return None
            guard.log_out(visit.cookie)
            visit.principal = visit.authorization = ""
        if request.path == "/login" and not is_passed_on:
            return None
        if request.method == "POST" or is_passed_on:
            message = "Nothing was changed: log in, and do it again."
            return await visit.page("error.html", status=401, message=message, code=401)
        return see_other("/login?" + urlencode({"next": request.path_qs}))

    async def _locked(self, visit: Visit) -> web.Response:
        return await visit.page(
            "locked.html",
            status=403,
            is_offered=self.guard.is_offered,
            has_rules=self.calls.has_rules,
        )

    async def _made(self, visit: Visit) -> web.Response:
        try:
            return await self._dispatch(visit)
        except (PostdateError, PageRefusal) as error:
            return await self._refused(visit, error)

    async def _refused(self, visit: Visit, error: PostdateError | PageRefusal) -> web.Response:
        if "back" in visit.form:
            return visit.done("failed", _told(error), local_path(visit.form["back"]))
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
                visit.call_name = route.call
                if method == "POST":
                    refusal = await self._check_form(visit)
                    if refusal is not None:
                        return refusal
                visit.check(visit.params.get("topic", ""), visit.params.get("name", ""))
                return await route.handler(visit)
        if is_there:
            return await visit.page(
                "error.html", status=405, message="This page takes no such request.", code=405
            )
        return await visit.page("error.html", status=404, message="There is no such page.", code=404)

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
        except web.HTTPRequestEntityTooLarge:
            largest = request.client_max_size >> 10
            message = f"A form may have {largest} KiB as it is sent: nothing was changed. Go back for what was typed."
            raise PageRefusal(message, 413) from None
        form = {name: value for name, value in sent.items() if isinstance(value, str)}
        if visit.is_new or not is_own_form(form.get("csrf", ""), visit.csrf):
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
    if visit.principal or not visit.site.calls.has_rules:
        return see_other(visit.site.home)
    return await visit.page(
        "login.html",
        next=local_path(visit.query.get("next", visit.site.home)),
        refused=visit.query.get("refused", ""),
    )


async def _log_in(visit: Visit) -> web.Response:
    site, address = visit.site, visit.address
    if not site.calls.has_rules:
        return see_other(site.home)
    to = local_path(visit.form.get("next", site.home))
    token = visit.form.get("token", "").strip()
    principal, authorization = "", f"Bearer {token}"
    wait = site.guard.retry_after_seconds(address)
    if not wait:
        try:
            if not (len(token) <= _TOKEN_CHARACTERS_MAX and token.isascii() and token.isprintable()):
                raise Unauthenticated("The token is not valid", reason="CREDENTIALS_INVALID")
            principal = site.calls.identify(authorization, address)
        except Unauthenticated:  # which of them it is, is not told
            site.guard.note_failure(address)
    if not principal:
        site.log_failed_login(address, too_many=bool(wait))
        response = see_other("/login?" + urlencode({"refused": wait or "token", "next": to}))
        if wait:
            response.headers["Retry-After"] = str(wait)
        return response
    site.audit.note("LogIn", "done", principal=principal, peer=f"http:{address}")
    response = see_other(to)
    session_id = site.guard.log_in(principal, authorization, address)
    set_cookie(visit.request, response, SESSION_COOKIE, session_id, SESSION_SECONDS)
    response.del_cookie(FORM_COOKIE, path="/")
    return response


async def _log_out(visit: Visit) -> web.Response:
    visit.site.guard.log_out(visit.cookie)
    response = see_other(visit.site.home)
    response.del_cookie(SESSION_COOKIE, path="/")
    return response


def set_cookie(request: web.Request, response: web.Response, name: str, value: str, seconds: int) -> None:
    """Have the browser send this to us alone, and show it to no script."""
    is_https = request.secure or request.headers.get("X-Forwarded-Proto", "") == "https"
    response.set_cookie(
        name, value, max_age=seconds, path="/", httponly=True, samesite="Strict", secure=is_https
    )


# -- small things that pages share ---------------------------------------------------------------------------


def entry_set(position: Position) -> dict[str, object]:
    """Return one message as calls name it."""
    return {"ledger_id": position.ledger_id, "entry_ids": [position.entry_id]}


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
