"""Admission to the pages: hosts, origins, sessions, and the number of guesses."""

from __future__ import annotations

import pytest

from broker.web.guard import (
    IDLE_SECONDS,
    SESSION_SECONDS,
    Flash,
    Guard,
    Hosts,
    host_name,
    is_own_form,
    is_same_origin,
)
from broker.web.site import local_path, parse_position


class StepClock:
    """Both clocks, moved by hand."""

    def __init__(self) -> None:
        self.seconds = 1_000.0

    def now_ms(self) -> int:
        return int(self.seconds * 1_000)

    def monotonic_ns(self) -> int:
        return int(self.seconds * 10**9)


def guard_of(
    clock: StepClock | None = None, *, listen: str = "127.0.0.1", allows_plaintext: bool = False
) -> Guard:
    return Guard(listen, clock or StepClock(), allows_plaintext=allows_plaintext)


def log_in(guard: Guard, principal: str = "token:ada") -> str:
    return guard.log_in(principal, "Bearer secret", "a")


@pytest.mark.parametrize(
    ("header", "own_ip", "known"),
    [
        ("127.0.0.1:7680", "127.0.0.1", True),
        ("localhost:7680", "127.0.0.1", True),
        ("[::1]:7680", "::1", True),
        ("LOCALHOST", "127.0.0.1", True),
        ("postdate.example", "127.0.0.1", True),
        ("Postdate.Example:443", "10.0.0.5", True),
        ("10.0.0.5:7680", "10.0.0.5", True),
        ("10.0.0.5:7680", "::ffff:10.0.0.5", True),
        ("10.0.0.6:7680", "10.0.0.5", False),
        ("evil.example:7680", "127.0.0.1", False),
        ("localhost.evil.example", "127.0.0.1", False),
        ("127.0.0.1.evil.example", "127.0.0.1", False),
        ("postdate.example.evil.example", "127.0.0.1", False),
        ("", "127.0.0.1", False),
        ("[::1", "", True),
        (":7680", "", False),
    ],
)
def test_hosts(header, own_ip, known):
    hosts = Hosts("postdate.example, other.example", "127.0.0.1")
    assert hosts.knows(header, (own_ip, 7680) if own_ip else None) is known


@pytest.mark.parametrize(
    ("listen", "host", "headers", "may"),
    [
        ("127.0.0.1", "localhost:7680", {}, True),
        ("::1", "[::1]:7680", {}, True),
        ("0.0.0.0", "localhost:7680", {}, False),
        ("10.0.0.5", "10.0.0.5:7680", {}, False),
        ("127.0.0.1", "postdate.example", {}, False),
        ("127.0.0.1", "localhost", {"X-Forwarded-For": "203.0.113.9"}, False),
        ("127.0.0.1", "localhost", {"Forwarded": "for=203.0.113.9"}, False),
    ],
)
def test_without_rules_pages_are_open_on_this_machine_only(listen, host, headers, may):
    assert guard_of(listen=listen).is_open_to(host, headers) is may


@pytest.mark.parametrize(
    ("listen", "host", "headers", "may"),
    [
        ("0.0.0.0", "localhost:7680", {}, True),
        ("10.0.0.5", "10.0.0.5:7680", {}, True),
        ("127.0.0.1", "localhost", {}, True),
        ("127.0.0.1", "postdate.example", {}, False),
        ("0.0.0.0", "localhost", {"X-Forwarded-For": "203.0.113.9"}, False),
    ],
)
def test_in_a_trusted_network_pages_are_open_beyond_it_but_to_no_proxy(listen, host, headers, may):
    assert guard_of(listen=listen, allows_plaintext=True).is_open_to(host, headers) is may


def test_pages_and_tokens_go_in_the_clear_only_where_that_is_allowed():
    assert guard_of(listen="::1").is_offered
    assert not guard_of(listen="10.0.0.5").is_offered
    assert guard_of(listen="10.0.0.5", allows_plaintext=True).is_offered


@pytest.mark.parametrize(
    ("headers", "same"),
    [
        (
            {"Origin": "http://localhost:7680", "Host": "localhost:7680", "Sec-Fetch-Site": "same-origin"},
            True,
        ),
        ({"Origin": "https://postdate.example", "Host": "postdate.example"}, True),
        ({"Sec-Fetch-Site": "same-origin", "Host": "localhost:7680"}, True),
        ({"Host": "localhost:7680"}, False),
        ({"Origin": "null", "Host": "localhost:7680"}, False),
        ({"Origin": "http://localhost:9999", "Host": "localhost:7680"}, False),
        ({"Origin": "http://evil.example", "Host": "localhost:7680", "Sec-Fetch-Site": "cross-site"}, False),
        ({"Origin": "http://localhost:7680", "Host": "localhost:7680", "Sec-Fetch-Site": "same-site"}, False),
        ({"Sec-Fetch-Site": "none", "Host": "localhost:7680"}, False),
    ],
)
def test_forms_come_from_our_own_pages(headers, same):
    assert is_same_origin(headers) is same


def test_a_session_ends_by_its_time_and_when_it_is_not_used():
    clock = StepClock()
    guard = guard_of(clock)
    session_id = log_in(guard)
    session = guard.session(session_id)
    assert session is not None and guard.session(session_id + "x") is None
    assert (session.principal, session.authorization) == ("token:ada", "Bearer secret")
    for _ in range(SESSION_SECONDS // IDLE_SECONDS):
        clock.seconds += IDLE_SECONDS - 1
        assert guard.session(session_id) is not None
    clock.seconds += SESSION_SECONDS // IDLE_SECONDS
    assert guard.session(session_id) is None
    session_id = log_in(guard)
    clock.seconds += IDLE_SECONDS
    assert guard.session(session_id) is None


def test_logging_out_ends_a_session():
    guard = guard_of()
    session_id = log_in(guard)
    guard.log_out(session_id)
    assert guard.session(session_id) is None


def test_guessing_has_to_wait_from_one_address_and_from_many():
    clock = StepClock()
    guard = guard_of(clock)
    for _ in range(5):
        assert guard.retry_after_seconds("a") == 0
        guard.note_failure("a")
    assert guard.retry_after_seconds("a") == 60
    assert guard.retry_after_seconds("b") == 0
    clock.seconds += 60
    assert guard.retry_after_seconds("a") == 0
    for i in range(30):
        guard.note_failure(f"address {i}")
    assert guard.retry_after_seconds("somebody else") == 60


def test_failures_of_many_addresses_take_bounded_memory():
    guard = guard_of()
    for i in range(3_000):
        guard.note_failure(str(i))
    assert len(guard._failures) <= 1_000


def test_sessions_take_bounded_memory_and_nobody_ends_those_of_others():
    guard = guard_of()
    other = log_in(guard, "token:eve")
    first, *_, last = (log_in(guard) for _ in range(21))
    assert guard.session(first) is None and guard.session(last) is not None
    assert guard.session(other) is not None
    for number in range(1_000):
        log_in(guard, f"token:{number}")
    assert len(guard._sessions) == 1_000
    assert guard.session(other) is None


def test_what_is_told_is_told_to_one_browser_and_was_said_here():
    guard = guard_of()
    for text in ("Paused: billing.", "é\u202e", "x" * 9_000, "é" * 9_000, "\ud800"):
        closed = guard.close_flash("cookie", Flash("done", text))
        assert len(closed) < 3_000 and closed.isascii() and ";" not in closed
        opened = guard.open_flash("cookie", closed)
        assert opened is not None and opened.kind == "done"
        assert text.startswith(opened.text) or text == "\ud800"
        assert guard.open_flash("other", closed) is None
        assert guard.open_flash("cookie", closed.replace("done", "failed")) is None
        assert guard_of().open_flash("cookie", closed) is None
    for given in ("", "..", "done", "done.x", "done.x.y", "\ud800.\udcff.x"):
        assert guard.open_flash("cookie", given) is None


def test_form_tokens_are_bound_to_their_browser():
    guard = guard_of()
    assert is_own_form(guard.form_token("nonce"), guard.form_token("nonce"))
    assert not is_own_form(guard.form_token("nonce"), guard.form_token("other"))
    assert not is_own_form("ü", guard.form_token("nonce"))


def test_host_names():
    assert [host_name(each) for each in ("A:1", "[::1]:2", "a", "")] == ["a", "::1", "a", ""]


@pytest.mark.parametrize(
    "path", ["//evil.example", "/\\evil.example", "http://evil.example", "javascript:1", "", "/a\r\nb"]
)
def test_redirects_stay_here(path):
    assert local_path(path) == "/"


def test_local_paths_are_kept():
    assert local_path("/scheduled?topic=a&from=1") == "/scheduled?topic=a&from=1"


def test_ids():
    assert parse_position(" 7:1234 ") == (7, 1234)
    assert (
        parse_position("7") is None and parse_position("٧:1") is None and parse_position("7:1234:1") is None
    )
