"""Admission to the pages: hosts, origins, sessions, and the number of guesses."""

from __future__ import annotations

import pytest

from broker.web.guard import SESSION_SECONDS, Flash, Guard, Hosts, host_name, is_own_form, is_same_origin
from broker.web.site import local_path, parse_position

TOKEN = "a-token-of-some-length"


class StepClock:
    """Both clocks, moved by hand."""

    def __init__(self) -> None:
        self.seconds = 1_000.0

    def now_ms(self) -> int:
        return int(self.seconds * 1_000)

    def monotonic_ns(self) -> int:
        return int(self.seconds * 10**9)


def guard_of(clock: StepClock | None = None, *, listen: str = "127.0.0.1", token: str = TOKEN) -> Guard:
    return Guard(token, listen, clock or StepClock())


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
def test_reading_is_open_on_this_machine_only(listen, host, headers, may):
    guard = guard_of(listen=listen)
    assert guard.may_read(host, headers, None) is may
    session_id = guard.log_in(TOKEN, "a")
    assert session_id is not None
    assert guard.may_read(host, headers, guard.session(session_id))
    closed = Guard(TOKEN, listen, StepClock(), is_open=False)
    assert not closed.may_read(host, headers, None)


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


def test_only_the_token_opens_a_session_and_it_ends():
    clock = StepClock()
    guard = guard_of(clock)
    assert guard.log_in(TOKEN + " ", "a") is None and guard.log_in("", "a") is None
    session_id = guard.log_in(TOKEN, "a")
    assert session_id is not None
    assert guard.session(session_id) is not None and guard.session(session_id + "x") is None
    clock.seconds += SESSION_SECONDS
    assert guard.session(session_id) is None


def test_logging_out_ends_a_session():
    guard = guard_of()
    session_id = guard.log_in(TOKEN, "a")
    assert session_id is not None
    guard.log_out(session_id)
    assert guard.session(session_id) is None


def test_without_a_token_nothing_opens():
    guard = guard_of(token="")
    assert not guard.can_log_in
    assert guard.log_in("", "a") is None


def test_guessing_has_to_wait_from_one_address_and_from_many():
    clock = StepClock()
    guard = guard_of(clock)
    for _ in range(5):
        assert guard.retry_after_seconds("a") == 0
        guard.log_in("wrong", "a")
    assert guard.retry_after_seconds("a") == 60
    assert guard.retry_after_seconds("b") == 0
    clock.seconds += 60
    assert guard.retry_after_seconds("a") == 0
    for i in range(30):
        guard.log_in("wrong", f"address {i}")
    assert guard.retry_after_seconds("somebody else") == 60


def test_failures_of_many_addresses_take_bounded_memory():
    guard = guard_of()
    for i in range(3_000):
        guard.log_in("wrong", str(i))
    assert len(guard._failures) <= 1_000


def test_sessions_take_bounded_memory_and_the_oldest_goes():
    guard = guard_of()
    first, *_, last = (guard.log_in(TOKEN, "a") for _ in range(1_001))
    assert first is not None and last is not None
    assert guard.session(first) is None and guard.session(last) is not None


def test_a_flash_is_told_once():
    guard = guard_of()
    session_id = guard.log_in(TOKEN, "a")
    assert session_id is not None
    session = guard.session(session_id)
    assert session is not None
    for i in range(12):
        session.tell(Flash("done", str(i)))
    assert [each.text for each in session.take_flashes()] == [str(i) for i in range(2, 12)]
    assert session.take_flashes() == []


def test_form_tokens_are_bound_to_their_browser():
    guard = guard_of()
    assert is_own_form(guard.login_form_token("nonce"), guard.login_form_token("nonce"))
    assert not is_own_form(guard.login_form_token("nonce"), guard.login_form_token("other"))
    assert not is_own_form("ü", guard.login_form_token("nonce"))


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
