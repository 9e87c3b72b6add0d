"""The nightly jobs in deploy/: they parse, have no privileges, and call the commands as these are."""

from __future__ import annotations

import configparser
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from broker.cli import main
from tests.chart import rendered

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
JOBS = ("audit", "compact")
CRONJOBS: dict[str, Any] = {job: rendered().the("CronJob", f"postdate-{job}") for job in JOBS}
PODS = {job: each["spec"]["jobTemplate"]["spec"]["template"]["spec"] for job, each in CRONJOBS.items()}


def unit_of(name: str) -> configparser.ConfigParser:
    parser = configparser.ConfigParser(strict=False, interpolation=None)
    parser.optionxform = str  # type: ignore[assignment,method-assign]  # keys keep their capitals
    parser.read_string((DEPLOY / "systemd" / name).read_text())
    return parser


def command_lines(job: str) -> dict[str, str]:
    """Return the command line of each of the two, with the environment's options filled in."""
    text = (DEPLOY / f"systemd/postdate-{job}.service").read_text()
    options = re.search(rf'POSTDATE_{job.upper()}_OPTIONS=([^"]*)"', text)
    assert options is not None
    text = text.replace(f"$$POSTDATE_{job.upper()}_OPTIONS", options[1])
    lines = {"systemd": text, "kubernetes": PODS[job]["containers"][0]["args"][0]}
    found = {}
    for name, content in lines.items():
        (found[name],) = re.findall(
            rf"(postdate-broker {job} .*?)(?: \|\| |\n\|\| |'$|$)",
            content.replace("\n|| ", " || "),
            re.MULTILINE,
        )
    return found


@pytest.mark.parametrize("job", JOBS)
def test_one_run_at_a_time_and_none_for_ever(job: str):
    spec = CRONJOBS[job]["spec"]
    assert spec["concurrencyPolicy"] == "Forbid"
    assert spec["jobTemplate"]["spec"]["activeDeadlineSeconds"] > 0
    assert spec["jobTemplate"]["spec"]["backoffLimit"] == 0


@pytest.mark.parametrize("job", JOBS)
def test_containers_have_no_privileges(job: str):
    pod = PODS[job]
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["automountServiceAccountToken"] is False
    for container in [*pod.get("initContainers", []), *pod["containers"]]:
        context = container["securityContext"]
        assert context["allowPrivilegeEscalation"] is False
        assert context["readOnlyRootFilesystem"] is True
        assert context["capabilities"] == {"drop": ["ALL"]}
        assert "memory" in container["resources"]["limits"]
        mounted = {mount["name"] for mount in container["volumeMounts"]}
        assert mounted <= {each["name"] for each in pod["volumes"]}


def test_compaction_alone_may_write_to_the_brokers_data():
    for job, pod in PODS.items():
        (mount,) = (each for each in pod["containers"][0]["volumeMounts"] if each["name"] == "data")
        assert mount.get("readOnly", False) == (job == "audit")


def test_compaction_runs_where_the_volume_is_and_says_where_it_lies():
    (term,) = PODS["compact"]["affinity"]["podAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert term["topologyKey"] == "kubernetes.io/hostname"
    container = PODS["compact"]["containers"][0]
    (mount,) = (each for each in container["volumeMounts"] if each["name"] == "data")
    assert f"--data-dir {mount['mountPath']}" in command_lines("compact")["kubernetes"]


def test_compaction_comes_after_the_audit():
    minutes = {}
    for job in JOBS:
        minute, hour = CRONJOBS[job]["spec"]["schedule"].split()[:2]
        minutes[job] = int(hour) * 60 + int(minute)
        at = unit_of(f"postdate-{job}.timer")["Timer"]["OnCalendar"].split()[1].split(":")
        assert int(at[0]) * 60 + int(at[1]) == minutes[job]
    assert minutes["compact"] >= minutes["audit"] + 60


@pytest.mark.parametrize("place", ["systemd", "kubernetes"])
@pytest.mark.parametrize("job", JOBS)
def test_options_are_those_of_the_command(job: str, place: str):
    known = {option for parameter in main.commands[job].params for option in parameter.opts}
    given = {word for word in shlex.split(command_lines(job)[place]) if word.startswith("--")}
    assert given
    assert given <= known


def test_compaction_is_applied_and_needs_no_spark_on_the_brokers_machine():
    for line in command_lines("compact").values():
        assert "--apply" in line
        assert "--engine inline" in line


@pytest.mark.parametrize("job", JOBS)
def test_units_parse_and_agree(job: str):
    service = unit_of(f"postdate-{job}.service")["Service"]
    assert (service["Type"], service["NoNewPrivileges"]) == ("oneshot", "yes")
    assert service["SuccessExitStatus"].split() == {"audit": ["1"], "compact": ["1", "4"]}[job]
    assert service["ProtectSystem"] == "strict"
    assert unit_of(f"postdate-{job}.timer")["Timer"]["Persistent"] == "true"


def test_without_a_backup_there_is_nothing_to_audit():
    assert "&&" in unit_of("postdate-audit.service")["Service"]["ExecStart"]
