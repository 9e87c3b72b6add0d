"""The Helm chart of deploy/helm as Helm renders it."""

from __future__ import annotations

import functools
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

from tests.programs import need_program

CHART = Path(__file__).resolve().parents[1] / "deploy/helm"
KUBERNETES = "1.27"
"""The oldest version that the chart is for."""


@functools.cache
def helm() -> str:
    """Return the path of Helm, which is a package of the developers' environment."""
    beside = Path(sys.executable).with_name("helm")
    return str(beside) if beside.exists() else need_program("helm")


def run_helm(command: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    line = [helm(), command, "--kube-version", KUBERNETES, *arguments]
    return subprocess.run(line, capture_output=True, text=True, check=False, timeout=60)


@functools.cache
def rendered(*values: str, upgrade: bool = False) -> Objects:
    """Return the objects of a release named postdate, with values such as `cluster.store=s3://bucket`."""
    options = ["--is-upgrade"] if upgrade else []
    for value in values:
        options += ["--set", value]
    done = run_helm("template", "postdate", str(CHART), *options)
    assert done.returncode == 0, done.stderr
    return Objects(list(yaml.safe_load_all(done.stdout)))


class Objects(list[dict[str, Any]]):
    """Objects of Kubernetes."""

    def the(self, kind: str, name: str = "postdate") -> dict[str, Any]:
        (found,) = [each for each in self if (each["kind"], each["metadata"]["name"]) == (kind, name)]
        return found

    def pods(self) -> list[dict[str, Any]]:
        """Return the pods that the objects make: labels in `metadata`, the rest in `spec`."""
        templates = {
            "StatefulSet": lambda spec: spec["template"],
            "Job": lambda spec: spec["template"],
            "CronJob": lambda spec: spec["jobTemplate"]["spec"]["template"],
        }
        return [templates[each["kind"]](each["spec"]) for each in self if each["kind"] in templates]


def component(name: str) -> dict[str, str]:
    """Return the labels that select the pods of a component."""
    return {
        "app.kubernetes.io/name": "postdate",
        "app.kubernetes.io/instance": "postdate",
        "app.kubernetes.io/component": name,
    }
