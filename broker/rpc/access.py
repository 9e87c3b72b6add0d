"""Access control: who calls, and whether they may.

The interceptor finds out who calls before any service sees the call, and asks for what a method needs whatever is in
its requests. What hangs on a request is asked by whoever decodes it, through `Caller`: `calls.unary`, the producer
service for each batch, and the consumer service for the first frame of a stream. A method without a rule is denied;
a unary answer for which nobody asked is a bug and is not given.

A stream, or a call that waits, ends when what it showed has expired or was withdrawn, or when it may not do any more
what it was allowed: `AccessControl.recheck` looks at all of them every few seconds.

Without an access file there is no interceptor and no `Caller`, and nothing is asked.
"""

from __future__ import annotations

import asyncio
import os
import stat
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import grpc

from broker.config import BrokerConfig
from broker.errors import PermissionDenied, PostdateError, Unauthenticated
from broker.folder.broker import Broker
from broker.observe.logs import get_logger
from broker.rpc.access_grants import Grants, parse_grants
from broker.rpc.access_identity import (
    Authenticator,
    Shown,
    parse_tokens,
)
from broker.rpc.access_limits import AccessLimits, parse_limits
from broker.rpc.access_rules import RULES, Ask, Rule
from broker.rpc.caller import CALLER, Caller
from broker.rpc.calls import CallHost, refuse
from broker.rpc.limiter import Limiter
from broker.rpc.status import Context
from broker.rpc.watched_file import Watched, read_text
from broker.settings import ConfigError

log = get_logger(__name__)

_END_SECONDS = 5.0
"""Seconds that a stream that must end may take to answer what it has begun."""
_CHECKED_AT_ONCE = 20
"""A signature takes a fraction of a millisecond, and deliveries wait meanwhile."""
_LOGGED_MAX = 10
_LOGGED_MS = 10_000
_REASONS = {
    "CREDENTIALS_MISSING": "missing",
    "CREDENTIALS_INVALID": "invalid",
    "CREDENTIALS_EXPIRED": "expired",
    "PERMISSION_DENIED": "denied",
}

Behavior = Callable[[Any, Context], Any]


@dataclass(frozen=True, slots=True)
class AccessFile:
    """One reading of it."""

    grants: Grants
    limits: AccessLimits


class AccessControl:
    """The files in force, and the streams that were let in by them."""

    def __init__(self, config: BrokerConfig, host: CallHost, broker: Broker | None) -> None:
        """Raises ConfigError where a file cannot be used. Without a broker only headers of calls are judged."""
        counters = host.counters
        self.host = host
        self.broker = broker
        self._uses_certificates = bool(config.tls_client_ca_file)
        self._file: Watched[AccessFile] = Watched(
            "access", [config.access_file], lambda: _read_access(config), counters
        )
        self.limiter = Limiter(self._file.value.limits, host.clock, counters)
        self._authenticator: Watched[Authenticator] = Watched(
            "credentials",
            [config.tokens_file, config.jwt_keys_file],
            lambda: _read_authenticator(config),
            counters,
        )
        self._live: set[Caller] = set()
        self._logged = 0
        self._logged_since_ms = 0

    @property
    def watched(self) -> Sequence[Watched[Any]]:
        """Return what must be refreshed now and then."""
        return self._file, self._authenticator

    @property
    def grants(self) -> Grants:
        return self._file.value.grants

    def allow(self, principal: str, ask: Ask) -> bool:
        return self._file.value.grants.allow(principal, ask)

    def identify(self, authorization: str, peer: str) -> str:
        """Return whose token it is that somebody shows, as the value of `authorization`. Raises Unauthenticated."""
        try:
            shown = Shown((authorization,))
            return self._authenticator.value.identify(shown, self.host.clock.now_ms()).principal
        except Unauthenticated as error:
            self._note(error, "", peer)
            raise

    def admit(self, rule: Rule | None, context: Context, *, is_long: bool) -> Caller:
        """Return who makes this call, once that is known and the method is open to them. Raises what they are told."""
        shown = self._shown(context)
        peer = context.peer()
        try:
            identity = self._authenticator.value.identify(shown, self.host.clock.now_ms())
        except Unauthenticated as error:
            self._note(error, "", peer)
            raise
        if rule is None:
            raise PermissionDenied("Access to this method is denied to all principals")
        caller = Caller(self, identity.principal, rule, peer, shown, is_long=is_long)
        # Before anything of the call is read: whoever has no right that it could need takes no place.
        caller.check_always()
        return caller

    def enter(self, caller: Caller) -> None:
        """A stream, or a call that waits, begins."""
        self._live.add(caller)

    def leave(self, caller: Caller) -> None:
        """It has ended."""
        self._live.discard(caller)

    async def recheck(self) -> None:
        """Count by the limits of the file, and end the streams of those who would not be let in any more."""
        self.limiter.adopt(self._file.value.limits)
        for number, caller in enumerate(tuple(self._live), 1):
            try:
                self._recheck(caller)
            except PostdateError as error:
                caller.end(error)
            if number % _CHECKED_AT_ONCE == 0:
                await asyncio.sleep(0)

    def note_denied(self, caller: Caller, error: PermissionDenied) -> None:
        self._note(error, caller.principal, caller.peer)

    def _recheck(self, caller: Caller) -> None:
        try:
            identity = self._authenticator.value.identify(caller.shown, self.host.clock.now_ms())
            if identity.principal != caller.principal:
                raise Unauthenticated(
                    "The token now belongs to another principal", reason="CREDENTIALS_INVALID"
                )
        except Unauthenticated as error:
            self._note(error, caller.principal, caller.peer)
            raise
        caller.check_held()

    def _shown(self, context: Context) -> Shown:
        metadata: Any = context.invocation_metadata() or ()
        authorizations = tuple(value for key, value in metadata if key == "authorization")
        certificate: bytes | None = None
        if self._uses_certificates and not authorizations:
            certificate = next(iter(context.auth_context().get("x509_pem_cert", ())), None)
        return Shown(authorizations, certificate)

    def _note(self, error: PostdateError, principal: str, peer: str) -> None:
        """Count it, and log it unless there is a flood. What was shown is not logged."""
        reason = _REASONS[error.reason]
        self.host.counters.auth_failures[reason] += 1
        now_ms = self.host.clock.monotonic_ns() // 1_000_000
        if now_ms - self._logged_since_ms >= _LOGGED_MS:
            if self._logged > _LOGGED_MAX:
                log.warning("Further refused callers are not logged", count=self._logged - _LOGGED_MAX)
            self._logged, self._logged_since_ms = 0, now_ms
        self._logged += 1
        if self._logged <= _LOGGED_MAX:
            log.warning(
                "A caller was refused", reason=reason, why=error.message, principal=principal, peer=peer
            )


class AccessInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """Stands before every method of every service, health and reflection included."""

    def __init__(self, control: AccessControl) -> None:
        self._control = control
        self._guarded: dict[str, Any] = {}

    async def intercept_service(self, continuation: Any, details: Any) -> Any:
        method = details.method
        if (guarded := self._guarded.get(method)) is None:
            handler = await continuation(details)
            if handler is None:  # no such method: gRPC says so, and there is nothing to guard
                return None
            guarded = self._guarded[method] = self._guard(method, handler)
        return guarded

    def _guard(self, method: str, handler: Any) -> Any:
        rule = RULES.get(method)
        if rule is None:
            log.error("A method has no access rule and is denied to all callers", method=method)
        elif rule.is_public:
            return handler
        how = {
            "request_deserializer": handler.request_deserializer,
            "response_serializer": handler.response_serializer,
        }
        # The reception, which stands behind this, makes streams of all: so nothing was read yet.
        if handler.stream_unary is not None:
            return grpc.stream_unary_rpc_method_handler(self._guard_unary(rule, handler.stream_unary), **how)
        assert handler.stream_stream is not None, f"{method} is of a kind that no service here has"
        return grpc.stream_stream_rpc_method_handler(self._guard_stream(rule, handler.stream_stream), **how)

    def _guard_unary(self, rule: Rule | None, behavior: Behavior) -> Behavior:
        control = self._control
        waits = rule is not None and rule.waits

        async def guarded(request: Any, context: Context) -> Any:
            try:
                caller = control.admit(rule, context, is_long=waits)
            except PostdateError as error:
                await refuse(control.host, context, error)
                raise
            CALLER.set(caller)  # the call is a task of its own
            if waits:
                work = asyncio.ensure_future(behavior(request, context))
                await self._until_ended(caller, work)
                if work.cancelled() and caller.ended is not None and caller.must_end:
                    await refuse(control.host, context, caller.ended.result())
                response = work.result()
            else:
                response = await behavior(request, context)
            if not caller.is_checked:
                await refuse(control.host, context, AssertionError("nobody asked for a right"))
            return response

        return guarded

    def _guard_stream(self, rule: Rule | None, behavior: Behavior) -> Behavior:
        control = self._control

        async def guarded(request: Any, context: Context) -> None:
            try:
                caller = control.admit(rule, context, is_long=True)
            except PostdateError as error:
                await refuse(control.host, context, error)
                raise
            CALLER.set(caller)
            work = asyncio.ensure_future(behavior(request, context))
            await self._until_ended(caller, work)
            assert caller.ended is not None
            if not caller.must_end:
                await work
                return
            if not work.cancelled():
                work.exception()  # the stream is over: what became of it is not told any more
            await refuse(control.host, context, caller.ended.result())

        return guarded

    async def _until_ended(self, caller: Caller, work: asyncio.Future[Any]) -> None:
        """Return once the work is done, or had to end and was cancelled."""
        assert caller.ended is not None
        self._control.enter(caller)
        try:
            await asyncio.wait((work, caller.ended), return_when=asyncio.FIRST_COMPLETED)
            if not work.done() and caller.when_ended is not None:
                await asyncio.wait({work}, timeout=_END_SECONDS)
        finally:
            self._control.leave(caller)
            if not work.done():
                work.cancel()
                await asyncio.wait({work})


def _read_access(config: BrokerConfig) -> AccessFile:
    file: AccessFile = _parsed(
        "access_file", config.access_file, lambda text: AccessFile(parse_grants(text), parse_limits(text))
    )
    return file


def _read_authenticator(config: BrokerConfig) -> Authenticator:
    tokens = _parsed("tokens_file", config.tokens_file, parse_tokens) if config.tokens_file else ()
    if config.tokens_file and os.stat(config.tokens_file).st_mode & stat.S_IROTH:
        log.warning("tokens_file is readable by all users of this machine", path=config.tokens_file)
    if not config.jwt_keys_file:
        return Authenticator(tokens)
    from broker.rpc.json_web_tokens import JwtRules, parse_algorithms, parse_jwt_keys  # noqa: PLC0415 - slow to load

    rules = JwtRules(
        _parsed("jwt_keys_file", config.jwt_keys_file, parse_jwt_keys),
        parse_algorithms(config.jwt_algorithms),
        config.jwt_issuer,
        config.jwt_audience,
        config.tuning.jwt_leeway_ms,
    )
    return Authenticator(tokens, rules)


def _parsed(setting: str, path: str, parse: Callable[[str], Any]) -> Any:
    text = read_text(setting, path)
    try:
        return parse(text)
    except ConfigError as error:
        raise ConfigError(f"{setting}: {path} cannot be used: {error}") from error
