"""The example in Java: it builds from the protos alone, and its worker goes on over a restart of the broker."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.clients.worker import ROOT, build, check_restart, check_stop, copied, run
from tests.process.conftest import Start, start
from tests.programs import need_program

pytestmark = pytest.mark.packaging

__all__ = ["start"]  # the fixture

CLIENT = ROOT / "clients/java"
TERMINATED = 128 + 15  # of a Java that was sent SIGTERM, also when its hooks ended it in good order


@pytest.fixture(scope="module")
def command(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """Return the command that starts the example."""
    need_program("javac", "openjdk-17-jdk-headless")
    need_program("mvn", "maven")
    folder = copied("java", tmp_path_factory.mktemp("java"))
    build("mvn", "-B", "-q", "compile", folder=folder)
    return ("java", "-cp", f"{folder}/target/classes:{folder}/target/lib/*", "dev.postdate.example.Example")


async def test_a_worker_goes_on_over_a_restart_and_holds_its_leases(
    command: tuple[str, ...], start: Start, tmp_path: Path
):
    # A virtual machine that starts on a busy machine may be silent for seconds.
    await check_restart(start, tmp_path, *command, lease_ms="4s", WORK_MS="9000")


async def test_a_worker_that_is_terminated_leaves_in_good_order(
    command: tuple[str, ...], start: Start, tmp_path: Path
):
    await check_stop(start, tmp_path, *command, status=TERMINATED, WORK_MS="1000")


async def test_a_refusal_ends_it_and_names_the_reason(command: tuple[str, ...], start: Start, tmp_path: Path):
    broker = await (await start(data_dir=str(tmp_path / "data"))).serving()
    environ = {"POSTDATE_ADDRESS": broker.grpc_address, "TOPIC": "no/such"}
    told = await run(*command, status=1, environ=environ)
    assert "refused: INVALID_NAME" in told


def test_versions_are_pinned_and_no_host_is_named():
    pom = (CLIENT / "pom.xml").read_text()
    assert not re.search(r"<(repositories|pluginRepositories|distributionManagement|systemPath)>", pom)
    assert not re.search(r"<version>[^<]*(SNAPSHOT|LATEST|RELEASE|[\[(,])", pom)
    for kind in ("dependency", "plugin", "extension"):
        blocks = re.findall(rf"<{kind}>.*?</{kind}>", pom, re.DOTALL)
        assert blocks and all("<version>" in block for block in blocks), kind
