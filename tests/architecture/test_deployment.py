"""The Compose file is valid and keeps the broker closed; the image and the file agree.

`compose-spec.json` is the schema of the Compose Specification (Apache-2.0), as compose-go 2.16.2 ships it.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import jsonschema
import yaml

ROOT = Path(__file__).resolve().parents[2]
COMPOSE = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
BROKER = COMPOSE["services"]["broker"]
DOCKERFILE = (ROOT / "deploy/Dockerfile").read_text()


def test_compose_file_is_valid():
    schema = json.loads(Path(__file__).with_name("compose-spec.json").read_text())
    jsonschema.validate(COMPOSE, schema, cls=jsonschema.Draft202012Validator)


def test_ports_are_published_on_loopback_only():
    ports = [port for service in COMPOSE["services"].values() for port in service.get("ports", [])]
    assert ports
    assert all(port.startswith("127.0.0.1:") for port in ports)


def test_broker_has_no_privileges():
    assert BROKER["read_only"] is True
    assert BROKER["cap_drop"] == ["ALL"]
    assert "no-new-privileges:true" in BROKER["security_opt"]
    assert not BROKER.keys() & {"privileged", "cap_add", "user", "network_mode", "pid"}
    assert instructions("USER") == ["10001:10001"]


def test_volumes_are_named_and_declared():
    sources = {
        volume.split(":")[0] for service in COMPOSE["services"].values() for volume in service["volumes"]
    }
    assert sources == COMPOSE["volumes"].keys()


def test_image_and_compose_file_agree():
    ports = " ".join(port.rsplit(":", 1)[1] for port in BROKER["ports"])
    assert instructions("EXPOSE") == [ports]
    assert instructions("VOLUME") == [volume.split(":")[1] for volume in BROKER["volumes"]]
    assert BROKER["healthcheck"]["test"][-1] in DOCKERFILE


def test_image_installs_only_what_is_pinned():
    installs = re.findall(r"pip install (.+)$", DOCKERFILE, re.MULTILINE)
    assert installs
    assert all("--require-hashes" in line or "--no-index" in line for line in installs)


def test_build_context_has_what_the_image_copies():
    """`.dockerignore` shuts out everything it does not name, so a forgotten line would break the build."""
    kept = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    copies = [line for line in instructions("COPY") if not line.startswith("--from")]
    assert {source for line in copies for source in line.split()[:-1]} == kept


def instructions(keyword: str) -> list[str]:
    return re.findall(rf"^{keyword} (.+)$", DOCKERFILE, re.MULTILINE)
