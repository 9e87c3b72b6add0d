"""The nightly jobs in deploy/: they parse, have no privileges, and call the commands as these are."""

from __future__ import annotations

import configparser
import re
import shlex
from pathlib import Path

import pytest
import yaml

from broker.cli import main

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
CRONJOB = yaml.safe_load((DEPLOY / "kubernetes/audit-cronjob.yaml").read_text())
POD = CRONJOB["spec"]["jobTemplate"]["spec"]["template"]["spec"]
SERVICE = (DEPLOY / "systemd/postdate-audit.service").read_text()
AUDIT_LINES = re.findall(
    r"(postdate-broker audit .*?)(?: \|\| |'$)",
    SERVICE + POD["containers"][0]["args"][0],
    re.MULTILINE | re.DOTALL,
)


def test_there_are_two_commands():
    assert len(AUDIT_LINES) == 2


def test_one_run_at_a_time_and_none_for_ever():
    spec = CRONJOB["spec"]
    assert spec["concurrencyPolicy"] == "Forbid"
    assert spec["jobTemplate"]["spec"]["activeDeadlineSeconds"] > 0
    assert spec["jobTemplate"]["spec"]["backoffLimit"] == 0


@pytest.mark.parametrize(
    "container", [*POD["initContainers"], *POD["containers"]], ids=lambda each: each["name"]
)
def test_containers_have_no_privileges(container):
    context = container["securityContext"]
    assert context["allowPrivilegeEscalation"] is False
    assert context["readOnlyRootFilesystem"] is True
    assert context["capabilities"] == {"drop": ["ALL"]}
    assert "memory" in container["resources"]["limits"]
    assert {mount["name"] for mount in container["volumeMounts"]} <= {each["name"] for each in POD["volumes"]}


def test_the_brokers_data_is_mounted_for_reading_only():
    (mount,) = (each for each in POD["containers"][0]["volumeMounts"] if each["name"] == "data")
    assert mount["readOnly"] is True
    assert POD["securityContext"]["runAsNonRoot"] is True


@pytest.mark.parametrize("line", AUDIT_LINES, ids=["systemd", "kubernetes"])
def test_options_are_those_of_the_command(line):
    command = main.commands["audit"]
    known = {option for parameter in command.params for option in parameter.opts}
    given = {word for word in shlex.split(line) if word.startswith("--")}
    assert given
    assert given <= known


def test_units_parse_and_agree():
    units = {}
    for name in ("postdate-audit.service", "postdate-audit.timer"):
        parser = configparser.ConfigParser(strict=False, interpolation=None)
        parser.optionxform = str  # type: ignore[assignment,method-assign]  # keys keep their capitals
        parser.read_string((DEPLOY / "systemd" / name).read_text())
        units[name] = parser
    service = units["postdate-audit.service"]["Service"]
    assert (service["Type"], service["SuccessExitStatus"], service["NoNewPrivileges"]) == (
        "oneshot",
        "1",
        "yes",
    )
    assert "&&" in service["ExecStart"]  # without a backup there is nothing to audit
    assert units["postdate-audit.timer"]["Timer"]["Persistent"] == "true"
