"""The file `alive`: what was written is read, and anything else is Corrupt."""

from __future__ import annotations

import random

import numpy as np
import pytest

from broker.errors import Corrupt
from broker.model import TIME_MS_MAX
from broker.storage.alive import (
    ABSENCES_MAX,
    Absence,
    Alive,
    decode_alive,
    encode_alive,
    read_alive,
    remove_alive,
    within,
    write_alive,
)
from broker.storage.dump import dump_file
from broker.testing.mem_vfs import CrashPolicy, MemVfs

ALIVE = Alive(1_790_000_000_000, (Absence(5, 9), Absence(9, TIME_MS_MAX)))
PATH = "data/alive"


@pytest.mark.parametrize("alive", [ALIVE, Alive(0), Alive(1, (Absence(0, 1),) * ABSENCES_MAX)])
def test_what_was_written_is_read(alive):
    assert decode_alive(encode_alive(alive), PATH) == alive


def test_any_other_bytes_are_corrupt():
    rng = random.Random(1)
    whole = encode_alive(ALIVE)
    for length in range(len(whole)):
        with pytest.raises(Corrupt):
            decode_alive(whole[:length], PATH)
    for _ in range(500):
        damaged = bytearray(whole)
        damaged[rng.randrange(len(whole))] ^= 1 << rng.randrange(8)
        with pytest.raises(Corrupt):
            decode_alive(bytes(damaged), PATH)
    for alive in (Alive(-1), Alive(TIME_MS_MAX + 1), Alive(1, (Absence(-1, 2),))):
        with pytest.raises(Corrupt, match="range"):
            decode_alive(encode_alive(alive), PATH)


def test_an_absence_ends_with_its_last_millisecond():
    times = np.array([0, 5, 6, 9, 10, 99, 100, 101])
    found = within(times, (Absence(5, 9), Absence(99, 100)))
    assert times[found].tolist() == [6, 9, 100]


def test_a_durable_file_survives_a_power_cut_and_any_file_the_end_of_the_process():
    vfs = MemVfs()
    vfs.make_dir("data")
    vfs.sync_dir(".")
    assert read_alive(vfs, PATH) is None
    write_alive(vfs, PATH, ALIVE, durable=True)
    later = Alive(ALIVE.alive_ms + 1)
    write_alive(vfs, PATH, later, durable=False)
    assert read_alive(vfs, PATH) == later
    assert read_alive(vfs.crashed(vfs.op_count, CrashPolicy.LOSE_UNSYNCED), PATH) == ALIVE
    remove_alive(vfs, PATH)
    remove_alive(vfs, PATH)
    assert read_alive(vfs, PATH) is None


def test_what_a_crash_left_aside_is_replaced():
    vfs = MemVfs()
    vfs.make_dir("data")
    vfs.open(PATH + ".new", create=True).close()
    write_alive(vfs, PATH, ALIVE, durable=False)
    assert read_alive(vfs, PATH) == ALIVE


def test_the_dump_tool_prints_it():
    vfs = MemVfs()
    vfs.make_dir("data")
    write_alive(vfs, PATH, Alive(7, (Absence(1, 2),)), durable=True)
    assert list(dump_file(vfs, PATH)) == [{"line": "alive", "alive_ms": 7, "absences": [[1, 2]]}]
