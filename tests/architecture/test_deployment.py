"""The Compose file and the images: valid, closed, pinned, and of one mind.

`compose-spec.json` is the schema of the Compose Specification (Apache-2.0), as compose-go 2.16.2 ships it.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import jsonschema
import pytest
import yaml
from click.testing import CliRunner

from broker.config import SETTINGS, BrokerConfig
from broker.shards.supervisor import process_stop_seconds
from postdate.cli import cli as postdate_command
from tests.programs import need_program
from tools.replay_dockerfile import BASE_IMAGE, parse

ROOT = Path(__file__).resolve().parents[2]
COMPOSE = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
SERVICES = COMPOSE["services"]
BROKER = SERVICES["broker"]
DOCKERFILE = (ROOT / "deploy/Dockerfile").read_text()
STAGES = parse(DOCKERFILE)
OWN_IMAGES = ("postdate:latest", "postdate-jobs:latest")
NIGHTLY = ROOT / "deploy/batch/nightly.sh"

NODES = [name for name in SERVICES if name.startswith("node-")]
each_service = pytest.mark.parametrize("name", SERVICES)


def steps(keyword: str, *stages: str) -> list[str]:
    """Return the steps of a keyword in the named stages, or in all."""
    return [
        step.text
        for stage in STAGES.values()
        if not stages or stage.name in stages
        for step in stage.steps
        if step.keyword == keyword
    ]


# -- Compose -------------------------------------------------------------------------------------------------


def test_compose_file_is_valid():
    schema = json.loads(Path(__file__).with_name("compose-spec.json").read_text())
    jsonschema.validate(COMPOSE, schema, cls=jsonschema.Draft202012Validator)


def test_the_broker_alone_is_the_default():
    assert [name for name, service in SERVICES.items() if "profiles" not in service] == ["broker"]
    profiles = {profile for service in SERVICES.values() for profile in service.get("profiles", [])}
    assert profiles == {"observability", "demo", "batch", "cluster"}


def test_ports_are_published_on_loopback_only():
    ports = [port for service in SERVICES.values() for port in service.get("ports", [])]
    assert ports
    assert all(port.startswith("127.0.0.1:") for port in ports)
    assert len({port.split(":")[1] for port in ports}) == len(ports)


@each_service
def test_services_have_no_privileges(name):
    service = SERVICES[name]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert "no-new-privileges:true" in service["security_opt"]
    assert not service.keys() & {"privileged", "cap_add", "network_mode", "pid"}
    # Our own images say who they run as.
    user = "10001:10001" if service["image"] in OWN_IMAGES else service["user"]
    assert user.split(":")[0] not in ("0", "root")


@each_service
def test_services_have_limits_and_time_to_stop(name):
    service = SERVICES[name]
    assert service.keys() >= {"mem_limit", "cpus", "pids_limit", "stop_grace_period", "logging", "restart"}
    assert "healthcheck" in service or name in ("nightly", "spark-worker")


def test_the_broker_has_time_to_stop_also_with_several_shards():
    """One of them may be frozen, and is killed at the end of that time."""
    given = int(SERVICES["broker"]["stop_grace_period"].removesuffix("s"))
    assert given > process_stop_seconds(BrokerConfig())


@each_service
def test_images_are_pinned(name):
    service = SERVICES[name]
    if service["image"] in OWN_IMAGES:
        assert (
            service["build"]["target"]
            == {"postdate:latest": "broker", "postdate-jobs:latest": "jobs"}[service["image"]]
        )
    else:
        assert re.search(r":v?\d+\.\d+\.\d+$", service["image"])


def test_volumes_are_declared_and_files_that_are_mounted_exist():
    mounted = {volume.split(":")[0] for service in SERVICES.values() for volume in service.get("volumes", [])}
    named = {source for source in mounted if not source.startswith(".")}
    assert named == COMPOSE["volumes"].keys()
    for source in mounted - named:
        assert (ROOT / source).exists(), source


def test_what_a_service_waits_for_is_in_its_profile_and_has_a_health_check():
    for service in SERVICES.values():
        for other, condition in service.get("depends_on", {}).items():
            assert set(service["profiles"]) <= set(SERVICES[other].get("profiles", service["profiles"]))
            if condition["condition"] == "service_healthy":
                assert "test" in SERVICES[other]["healthcheck"]


def test_who_cannot_reach_the_broker_has_no_business_on_its_network():
    """Whoever reaches a Spark master can run code on its workers, so only the nightly job shares their network."""
    shared = {name for name, service in SERVICES.items() if "batch" in service.get("networks", [])}
    assert shared == {"nightly", "spark-master", "spark-worker"}
    assert COMPOSE["networks"]["batch"]["internal"] is True


def test_settings_of_the_broker_are_known():
    known = {setting.variable for setting in SETTINGS} | {"POSTDATE_ALLOW_PLAINTEXT"}
    assert BROKER["environment"].keys() <= known
    for name in NODES:
        assert {key for key in SERVICES[name]["environment"] if key.startswith("POSTDATE_")} <= known
    assert dict(pair.split("=") for pair in steps("ENV", "broker")[0].split()).keys() <= known


def test_nodes_of_the_cluster_differ_in_name_ports_and_volume_alone():
    listed = dict(
        part.split("=") for part in SERVICES["node-a"]["environment"]["POSTDATE_CLUSTER_NODES"].split(",")
    )
    assert listed == {name.removeprefix("node-"): f"{name}:7650" for name in NODES}
    own = {"environment", "ports", "volumes"}
    for name in NODES:
        service = SERVICES[name]
        assert service["environment"]["POSTDATE_NODE"] == name.removeprefix("node-")
        assert service["volumes"] == [f"{name}:/data", "store:/store"]
        assert service["restart"] == "always"
        same = {key: value for key, value in service.items() if key not in own}
        assert same == {key: value for key, value in SERVICES["node-a"].items() if key not in own}
    assert (
        SERVICES["cluster-create"]["command"][-2]
        == SERVICES["node-a"]["environment"]["POSTDATE_CLUSTER_STORE"]
    )


def test_folders_that_are_mounted_into_our_images_belong_to_their_user():
    (made,) = [step for step in steps("RUN", "runtime") if "install --directory" in step]
    targets = {
        volume.split(":")[1]
        for service in SERVICES.values()
        if service["image"] in OWN_IMAGES
        for volume in service.get("volumes", [])
    }
    assert targets <= set(made.split())


@pytest.mark.parametrize("name", ["demo-producer", "demo-billing", "demo-mail"])
def test_demo_calls_the_command_as_it_is(name):
    service = SERVICES[name]
    arguments = service["command"]
    if name == "demo-producer":
        (script,) = arguments
        arguments = script.split("| postdate ")[1].split()
    done = CliRunner().invoke(postdate_command, [*arguments, "--help"])
    assert done.exit_code == 0, done.output
    bad = CliRunner().invoke(postdate_command, [*arguments, "--no-such-option"])
    assert "--no-such-option" in bad.output, "an option before it is unknown"


# -- images --------------------------------------------------------------------------------------------------


def test_dockerfile_passes_hadolint():
    program = shutil.which("hadolint") or str(Path(sys.executable).with_name("hadolint"))
    if not Path(program).exists():
        program = need_program("hadolint")
    done = subprocess.run([program, ROOT / "deploy/Dockerfile"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_the_broker_is_built_when_no_target_is_named():
    assert list(STAGES)[-1] == "broker"
    assert all(BASE_IMAGE.fullmatch(stage.base) or stage.base in STAGES for stage in STAGES.values())


def test_only_the_jobs_have_java():
    assert [stage.name for stage in STAGES.values() if "jre" in str(stage.steps)] == ["jobs"]
    assert [stage.name for stage in STAGES.values() if "requirements-jobs" in str(stage.steps)] == [
        "build-jobs"
    ]


def test_image_and_compose_file_agree():
    ports = " ".join(port.rsplit(":", 1)[1] for port in BROKER["ports"])
    assert steps("EXPOSE", "broker") == [ports]
    assert steps("VOLUME", "broker") == [
        volume.split(":")[1] for volume in BROKER["volumes"] if not volume.endswith(":ro")
    ]
    assert BROKER["healthcheck"]["test"][-1] in DOCKERFILE
    assert steps("USER", "broker") == steps("USER", "jobs") == ["10001:10001"]


def test_image_installs_only_what_is_pinned():
    installs = re.findall(r"pip install (.+)$", DOCKERFILE, re.MULTILINE)
    assert installs
    assert all("--require-hashes" in line or "--no-index" in line for line in installs)


def test_build_context_has_what_the_image_copies():
    """`.dockerignore` shuts out everything it does not name, so a forgotten line would break the build."""
    kept = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    copies = [
        [word for word in line.split() if not word.startswith("--")][:-1]
        for line in steps("COPY")
        if "--from=" not in line
    ]
    assert {source for line in copies for source in line} == kept


@pytest.mark.parametrize("stage", ["build", "build-jobs"])
def test_an_image_has_every_package_of_the_wheel(stage: str):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    folders = project["tool"]["setuptools"]["package-dir"].values()
    copied = {word for line in steps("COPY", stage) for word in line.split()[:-1]}
    assert set(folders) <= copied


# -- the night's work ----------------------------------------------------------------------------------------


def night(
    tmp_path: Path, *, backup: int = 0, audit: int = 0, compact: int = 0, **environ: str
) -> tuple[int, list[str]]:
    """Run nightly.sh with a command that only says how it was called; the exit status, and the calls."""
    fake = tmp_path / "postdate-broker"
    fake.write_text(
        f'#!/bin/sh\necho "$*" >> {tmp_path}/calls\ncase $1 in\n'
        f"backup) echo /data/backups/b; exit {backup};;\naudit) exit {audit};;\ncompact) exit {compact};;\nesac\n"
    )
    fake.chmod(0o755)
    done = subprocess.run(
        ["/bin/sh", NIGHTLY, "now"],
        env={"PATH": f"{tmp_path}:/usr/bin:/bin", **environ},
        capture_output=True,
        check=False,
    )
    return done.returncode, (tmp_path / "calls").read_text().splitlines()


def test_a_night_is_backup_audit_and_compaction(tmp_path):
    status, calls = night(tmp_path, audit=1, SPARK_MASTER="spark://m:7077", PUSHGATEWAY="http://p:9091")
    assert status == 0
    assert calls == [
        "backup create nightly",
        "audit /data/backups/b --master spark://m:7077 --level standard --report /reports --pushgateway http://p:9091",
        "compact --data-dir /data --master spark://m:7077 --apply",
    ]


@pytest.mark.parametrize(
    ("ended", "status", "commands"),
    [
        ({"backup": 1}, 3, ["backup"]),
        ({"audit": 2}, 2, ["backup", "audit"]),
        ({"audit": 3}, 3, ["backup", "audit"]),
        ({"compact": 1}, 1, ["backup", "audit", "compact"]),
    ],
    ids=["no backup", "findings", "incomplete", "refused"],
)
def test_nothing_is_rewritten_after_what_failed(tmp_path, ended, status, commands):
    found, calls = night(tmp_path, **ended)
    assert (found, [call.split()[0] for call in calls]) == (status, commands)
