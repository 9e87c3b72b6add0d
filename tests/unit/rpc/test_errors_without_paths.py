"""No error that a client gets names a file or folder of the broker, whatever its disk says."""

from __future__ import annotations

import asyncio
import errno
from typing import Any

import pytest

from broker.errors import Corrupt, MissingFile, StorageFailed, Unavailable
from broker.rpc.status import to_status
from broker.testing.fault_plan import Fault
from broker.testing.sim_clock import SimClock
from broker.testing.sim_loop import SimLoop, run_sim
from tests.depth import at_depth, sampled
from tests.unit.rpc.call_world import CASES, METHODS, Refused, make_world

DATA_DIR = "secret-place"
KINDS = ("open", "read", "list_dir", "make_dir", "rename", "remove*", "link", "create", "write", "sync*")


def answers(name: str, kind: str) -> list[Any]:
    """The statuses that a method ends with, twice, once the disk fails; what its tasks end with is not looked at."""
    found: list[Any] = []

    async def scenario(loop: SimLoop, clock: SimClock) -> None:
        world = await make_world(clock, data_dir=DATA_DIR)
        requests = [each.SerializeToString() for each in await CASES[name].make(world)]
        await asyncio.sleep(60)
        world.node.broker._open_files.close()  # what is read is opened again
        world.node.vfs.faults.add(Fault(kind, f"{DATA_DIR}/*", error=errno.EIO, onward=True))
        for _ in range(2):
            try:
                async with asyncio.timeout(60):
                    await world.call(name, requests)
            except Refused as refused:
                found.append(refused.status)
            except TimeoutError:
                break
        found.append(world.node.broker.not_ready_because)
        world.node.vfs.faults.clear()
        world.node.abandon()
        loop.unhandled.clear()

    run_sim(scenario, seed=1)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", METHODS)
def test_no_status_names_a_file_of_the_broker(name: str) -> None:
    for kind in sampled(KINDS, at_depth(change=10, deep=1), list(METHODS).index(name)):
        for each in answers(name, kind):
            assert DATA_DIR not in str(each), kind


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("AdminService.DeleteBackup", "rename"),
        ("AdminService.CreateBackup", "make_dir"),
        ("AdminService.ListBackups", "list_dir"),
        ("AdminService.Pause", "write"),
        ("CompactionService.BeginCompaction", "create"),
    ],
)
def test_disk_is_met_here(name: str, kind: str) -> None:
    """Or the check above would look at nothing."""
    assert any(each and not isinstance(each, str) for each in answers(name, kind))


ERRORS = [
    Corrupt("A frame is damaged", path=f"{DATA_DIR}/1.data", offset=7),
    MissingFile("A file is missing", path=f"{DATA_DIR}/1.data"),
    StorageFailed(f"The journal could not be written: {DATA_DIR}/j"),
    Unavailable(f"a ledger could not be read ({DATA_DIR}/1.*)", path=f"{DATA_DIR}/1.*"),
]


@pytest.mark.parametrize("error", ERRORS, ids=[type(each).__name__ for each in ERRORS])
def test_what_names_a_file_is_for_the_log(error: Any, caplog: pytest.LogCaptureFixture) -> None:
    error.__cause__ = OSError(errno.EMFILE, "Too many open files", f"{DATA_DIR}/1.data")
    status = to_status(error)
    assert DATA_DIR not in str(status) and DATA_DIR not in error.told
    assert any(DATA_DIR in str(vars(each).get("fields")) for each in caplog.records)
