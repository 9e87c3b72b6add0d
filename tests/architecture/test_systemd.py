"""The broker's systemd unit: what it promises the broker keeps, and it has no privileges."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from broker.config import SETTINGS, BrokerConfig
from broker.shards.supervisor import process_stop_seconds
from tests.programs import need_program

FOLDER = Path(__file__).resolve().parents[2] / "deploy/systemd"
UNIT = FOLDER / "postdate-broker.service"
OPTIONS = re.findall(r"^(\w+)=(.*)$", UNIT.read_text(), re.MULTILINE)
FIRST = dict(reversed(OPTIONS))
EXPOSURE_MAX = 2.0


def test_the_unit_waits_to_be_told():
    assert (FIRST["Type"], FIRST["NotifyAccess"]) == ("notify", "main")
    assert FIRST["WatchdogSec"] == "60s"


def test_there_is_time_to_stop():
    # Also for a broker with several shards, one of which is frozen.
    assert int(FIRST["TimeoutStopSec"].removesuffix("s")) > process_stop_seconds(BrokerConfig())


def test_settings_are_known():
    known = {setting.variable for setting in SETTINGS}
    assert {value.split("=")[0] for key, value in OPTIONS if key == "Environment"} <= known
    assert f"POSTDATE_DATA_DIR=/var/lib/{FIRST['StateDirectory']}" in [
        value for key, value in OPTIONS if key == "Environment"
    ]


def test_user_is_made():
    assert f"u {FIRST['User']} -" in (FOLDER / "postdate.sysusers").read_text()


def test_jobs_come_after_the_broker():
    for path in FOLDER.glob("*.service"):
        if path != UNIT:
            assert f"Wants={UNIT.name}" in path.read_text(), path.name


def test_systemd_understands_the_unit(tmp_path):
    # The program need not be installed where this runs; whatever is at its place will do.
    unit = tmp_path / UNIT.name
    unit.write_text(re.sub(r"^ExecStart=\S+", "ExecStart=/bin/true", UNIT.read_text(), flags=re.MULTILINE))
    done = subprocess.run(
        [need_program("systemd-analyze", "systemd"), "verify", unit],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_the_unit_is_closed():
    command: list[str | Path] = [
        need_program("systemd-analyze", "systemd"),
        "security",
        "--offline=true",
        f"--threshold={EXPOSURE_MAX * 10:.0f}",
        "--no-pager",
        str(UNIT),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
