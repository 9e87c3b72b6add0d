"""Bytes that no browser sends: whatever a line, a header or a form holds, a page refuses it, and not with an internal error."""

from __future__ import annotations

import asyncio
from pathlib import Path
from urllib.parse import quote

import pytest

from broker.web.guard import FORM_COOKIE, SESSION_COOKIE
from tests.unit.web.conftest import MakePages, Pages, access_files

FORM = "application/x-www-form-urlencoded"
SECONDS = 20.0


async def status_of(pages: Pages, line: bytes, headers: dict[str, bytes], body: bytes = b"") -> int:
    """Send a request as it stands; return the status of its answer."""
    host, _, port = pages.server.address.rpartition(":")
    given = {"Host": pages.server.address.encode(), "Connection": b"close", **headers}
    if body:
        given["Content-Length"] = b"%d" % len(body)
    head = b"".join(name.encode() + b": " + value + b"\r\n" for name, value in given.items())
    async with asyncio.timeout(SECONDS):
        reader, writer = await asyncio.open_connection(host, int(port))
        try:
            writer.write(line + b" HTTP/1.1\r\n" + head + b"\r\n" + body)
            return int((await reader.read(65_536)).split()[1])
        finally:
            writer.close()


def of_browser(pages: Pages, *, charset: str = "") -> dict[str, bytes]:
    """The headers of a form that was sent from one of the pages."""
    kind = f"{FORM}; charset={charset}" if charset else FORM
    origin = f"http://{pages.server.address}"
    return {"Origin": origin.encode(), "Sec-Fetch-Site": b"same-origin", "Content-Type": kind.encode()}


@pytest.mark.parametrize(
    ("charset", "csrf"),
    [
        ("utf-7", b"+2AA-"),  # a surrogate without its other half
        ("unicode_escape", b"\\ud800"),
        ("utf-8", b"\xff"),
        ("", b"\xff"),
        ("", b"%ED%A0%80"),
        ("rot13", b"x"),
        ("none-such", b"x"),
        ("\xff", b"x"),
    ],
)
async def test_a_form_whose_text_is_no_text_is_refused(
    make_pages: MakePages, tmp_path: Path, charset: str, csrf: bytes
) -> None:
    pages = await make_pages(**access_files(tmp_path))
    await pages.get("/login")
    nonce = next(each.value for each in pages.session.cookie_jar if each.key == FORM_COOKIE)
    headers = of_browser(pages, charset=charset) | {"Cookie": f"{FORM_COOKIE}={nonce}".encode()}
    assert await status_of(pages, b"POST /login", headers, b"token=x&csrf=" + csrf) == 403
    await pages.log_in()
    (session,) = [each.value for each in pages.session.cookie_jar if each.key == SESSION_COOKIE]
    headers["Cookie"] = f"{SESSION_COOKIE}={session}".encode()
    for path in (b"/logout", b"/topics/orders/messages/1:3"):
        assert await status_of(pages, b"POST " + path, headers, b"csrf=" + csrf) == 403


@pytest.mark.parametrize(
    ("header", "value"),
    [
        ("Cookie", f"{FORM_COOKIE}=".encode() + b"\xff"),
        ("Cookie", f"{SESSION_COOKIE}=".encode() + b"\xff"),
        ("Origin", b"http://["),
        ("Origin", b"\xff"),
        ("Sec-Fetch-Site", b"\xff"),
        ("Content-Type", b"\xff"),
    ],
)
async def test_a_form_with_a_header_that_is_none_is_refused(
    make_pages: MakePages, header: str, value: bytes
) -> None:
    pages = await make_pages()
    headers = of_browser(pages) | {header: value}
    assert await status_of(pages, b"POST /login", headers, b"csrf=x") == 403


@pytest.mark.parametrize("header", ["Host", "X-Forwarded-Proto", "X-Forwarded-For", "Cookie", "Accept"])
async def test_a_page_that_is_asked_for_with_no_text_in_a_header_is_answered(
    make_pages: MakePages, header: str
) -> None:
    pages = await make_pages()
    assert await status_of(pages, b"GET /login", {header: b"\xff\xed\xa0\x80"}) < 500
    assert await status_of(pages, b"GET /metrics", {header: b"\xff\xed\xa0\x80"}) < 500


@pytest.mark.parametrize(
    "text", [b"\xff", b"%ff", b"\xed\xa0\x80", quote("\ud800", errors="surrogatepass").encode()]
)
async def test_an_address_that_is_no_text_is_answered(make_pages: MakePages, text: bytes) -> None:
    pages = await make_pages()
    for path in (
        b"/%b",
        b"/topics/%b",
        b"/topics/%b/messages/1:1",
        b"/scheduled?topic=%b",
        b"/login?next=/%b",
    ):
        assert await status_of(pages, b"GET " + path % text, {}) < 500, path
