"""The API over HTTP: `POST /v1/<call>` with a request as JSON, which goes through the gRPC port.

Host -> is it offered -> JSON by its type -> the body, up to a size -> the call -> its answer
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from aiohttp import web

from broker.config import BrokerConfig, is_loopback
from broker.settings import KIB, split_address
from broker.web.source import Calls, HttpAnswer

CALL_PATH = "/v1/{call}"
OTHER_PATHS = "/v1/{path:.*}"
DESCRIPTION_PATH = "/v1/openapi.json"

_LARGE_BYTES = 64 * KIB
_LARGE_MAX = 16
"""Requests and answers above that size which are held at once; others wait."""


class _Refusal(Exception):
    """A request that does not become a call."""

    def __init__(self, status: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.reason = reason
        self.message = message


class HttpApi:
    """See the module's description."""

    def __init__(self, calls: Calls, config: BrokerConfig, is_foreign: Callable[[web.Request], bool]) -> None:
        self._calls = calls
        self._is_foreign = is_foreign
        self._off_because = _off_because(config)
        # A third more in base64, and the fields beside the payload.
        self._body_bytes_max = config.request_bytes_max * 4 // 3 + _LARGE_BYTES
        self._large = asyncio.Semaphore(_LARGE_MAX)

    async def answer(self, request: web.Request) -> web.StreamResponse:
        """Answer `POST /v1/<call>`."""
        try:
            self._check(request)
            return await self._answer(request)
        except _Refusal as refusal:
            return await self._refuse(refusal)

    async def answer_others(self, request: web.Request) -> web.Response:
        """Answer what is no `POST /v1/<call>`: whoever calls reads no page."""
        try:
            self._check_host(request)
        except _Refusal as refusal:
            return await self._refuse(refusal)
        if request.method == "POST":
            return _response(await self._calls.call(request.match_info["path"], b""))
        return await self._refuse(_Refusal(405, "NOT_POST", "Calls are made with POST"))

    async def describe(self, request: web.Request) -> web.Response:
        """Answer with the OpenAPI document of all calls."""
        try:
            self._check_host(request)
        except _Refusal as refusal:
            return await self._refuse(refusal)
        return web.Response(body=await self._calls.description(), content_type="application/json")

    async def _refuse(self, refusal: _Refusal) -> web.Response:
        return _response(await self._calls.refusal(refusal.status, refusal.reason, refusal.message))

    def _check_host(self, request: web.Request) -> None:
        if self._is_foreign(request):
            why = "This broker is not known by that host name: see the setting http_hosts"
            raise _Refusal(421, "HOST_UNKNOWN", why)

    def _check(self, request: web.Request) -> None:
        self._check_host(request)
        if self._off_because:
            raise _Refusal(403, "HTTP_API_OFF", self._off_because)
        # No page of another origin can send this type without asking first, which is not answered.
        if request.content_type != "application/json":
            raise _Refusal(415, "NOT_JSON", "Send the request as JSON, with Content-Type: application/json")

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        answer = await self._call(request)
        if len(answer.body) <= _LARGE_BYTES:
            return _response(answer)
        async with self._large:
            # Sent here, so that its place is taken until the client has read most of it.
            response = web.StreamResponse(status=answer.status, headers=answer.headers)
            response.content_length = len(answer.body)
            await response.prepare(request)
            await response.write(answer.body)
            await response.write_eof()
            return response

    async def _call(self, request: web.Request) -> HttpAnswer:
        length = request.content_length
        if length is not None and length <= _LARGE_BYTES:
            body = await self._body(request)
        else:
            async with self._large:
                body = await self._body(request)
                if len(body) > _LARGE_BYTES:
                    return await self._make(request, body)
        # One whose length was not said is small after all: it may wait for long, and takes no other's place.
        return await self._make(request, body)

    async def _make(self, request: web.Request, body: bytes) -> HttpAnswer:
        headers = request.headers
        return await self._calls.call(
            request.match_info["call"],
            body,
            headers.get("Authorization", ""),
            headers.get("traceparent", ""),
        )

    async def _body(self, request: web.Request) -> bytes:
        body = bytearray()
        async for chunk in request.content.iter_any():
            body += chunk
            if len(body) > self._body_bytes_max:
                why = f"The request is larger than {self._body_bytes_max} bytes"
                raise _Refusal(413, "REQUEST_TOO_LARGE", why)
        return bytes(body)


def _response(answer: HttpAnswer) -> web.Response:
    return web.Response(status=answer.status, headers=answer.headers, body=answer.body)


def _off_because(config: BrokerConfig) -> str:
    """Return why no calls are taken over HTTP; empty if they are."""
    if config.tls_cert_file:
        return "The gRPC port has TLS, and the HTTP port has none: the API is offered over gRPC only"
    if not (config.allow_plaintext or is_loopback(split_address(config.http_address)[0])):
        return "Other machines can reach http_address: set allow_plaintext to offer the API there"
    return ""
