"""The limit of delays of messages that go out again."""

from __future__ import annotations

import pytest

from broker.errors import InvalidRequest
from broker.rpc.delays import DELAY_MS_MAX, check_delay_ms


@pytest.mark.parametrize("delay_ms", [0, 1, DELAY_MS_MAX])
def test_a_delay_within_the_limit_passes(delay_ms: int):
    check_delay_ms(delay_ms, "redeliver_after_ms", "nack.")


@pytest.mark.parametrize("delay_ms", [-1, DELAY_MS_MAX + 1])
def test_any_other_is_refused_with_its_place(delay_ms: int):
    with pytest.raises(
        InvalidRequest, match=rf"redeliver_after_ms .* {DELAY_MS_MAX}, not {delay_ms}$"
    ) as refused:
        check_delay_ms(delay_ms, "redeliver_after_ms", "nack.")
    assert (refused.value.field, refused.value.reason) == (
        "nack.redeliver_after_ms",
        "INVALID_REDELIVER_AFTER_MS",
    )


def test_the_limit_is_a_leap_year():
    assert DELAY_MS_MAX == 31_622_400_000
