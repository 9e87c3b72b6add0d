"""The rest of a node that lost its shard."""

from __future__ import annotations

from broker.node.rest_after_loss import FIRST_MS, LONGEST_MS, Rest
from broker.runtime.vfs import replace_file
from broker.testing.mem_vfs import MemVfs
from broker.testing.sim_clock import SimClock


class StillTime:
    def now_us(self) -> int:
        return 0


def make() -> tuple[Rest, SimClock, MemVfs]:
    vfs, clock = MemVfs(), SimClock(StillTime())
    vfs.make_dir("shards")
    return Rest(vfs, "shards/0.rest", clock), clock, vfs


def test_who_never_lost_does_not_rest() -> None:
    assert make()[0].left_ms() == 0


def test_a_rest_ends_and_the_next_one_is_twice_as_long_up_to_ten_minutes() -> None:
    rest, clock, _ = make()
    rest.begin()
    assert rest.left_ms() == FIRST_MS
    clock.step(FIRST_MS - 1)
    assert rest.left_ms() == 1
    clock.step(1)
    assert rest.left_ms() == 0
    for length_ms in (2 * FIRST_MS, 4 * FIRST_MS, 8 * FIRST_MS, 16 * FIRST_MS, LONGEST_MS, LONGEST_MS):
        rest.begin()
        assert rest.left_ms() == length_ms
        clock.step(length_ms - 1)


def test_after_a_long_peace_a_rest_is_short_again() -> None:
    rest, clock, _ = make()
    rest.begin()
    rest.begin()
    clock.step(LONGEST_MS)
    rest.begin()
    assert rest.left_ms() == FIRST_MS


def test_a_clock_that_was_set_back_makes_no_rest_longer() -> None:
    rest, clock, _ = make()
    rest.begin()
    clock.step(-86_400_000)
    assert rest.left_ms() == FIRST_MS


def test_a_damaged_note_is_none() -> None:
    rest, _, vfs = make()
    for content in (b"", b"{}", b"null", b"\xff", b'{"rest_ms": "x", "lost_ms": 1}'):
        replace_file(vfs, "shards/0.rest", [content])
        assert rest.left_ms() == 0
