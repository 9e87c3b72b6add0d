"""Page tokens of the schedule: any bytes are a place of this very list, or refused."""

from __future__ import annotations

import base64

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from broker.errors import InvalidRequest
from broker.model import ENTRY_ID_MAX, LEDGER_ID_MAX, TIME_MS_MAX
from broker.rpc.schedule_tokens import decode_place, encode_place, fingerprint
from broker.topics.schedule_values import DueRange

KEYS = st.tuples(
    st.integers(0, TIME_MS_MAX + 1), st.integers(0, LEDGER_ID_MAX), st.integers(0, ENTRY_ID_MAX + 1)
)
PRINT = fingerprint("t", DueRange(), "")


@given(KEYS)
def test_tokens_say_where_to_go_on(key: tuple[int, int, int]):
    assert decode_place(encode_place(PRINT, key), PRINT) == key
    with pytest.raises(InvalidRequest):
        decode_place(encode_place(PRINT, key), fingerprint("t", DueRange(), "a"))


def test_no_token_is_the_first_page():
    assert decode_place("", PRINT) is None


@pytest.mark.parametrize(
    "place",
    [
        f"{TIME_MS_MAX + 2}.0.0",
        f"0.{LEDGER_ID_MAX + 1}.0",
        f"0.0.{ENTRY_ID_MAX + 2}",
        "0.0.0.1",
        "0.0",
        "-1.0.0",
        "0.0.0\n",
        "٣.0.0",
    ],
)
def test_places_that_cannot_be_are_refused(place: str):
    token = base64.urlsafe_b64encode(f"{PRINT}.{place}".encode()).decode()
    with pytest.raises(InvalidRequest, match="page_token"):
        decode_place(token, PRINT)


@given(st.one_of(st.text(), st.binary().map(lambda raw: base64.urlsafe_b64encode(raw).decode())))
def test_garbage_is_refused(token: str):
    assume(token)
    with pytest.raises(InvalidRequest) as caught:
        decode_place(token, PRINT)
    assert caught.value.reason == "INVALID_PAGE_TOKEN"
