"""The Kubernetes manifests: complete, closed, and of one mind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from broker.config import SETTINGS, BrokerConfig
from broker.shards.supervisor import process_stop_seconds

FOLDER = Path(__file__).resolve().parents[2] / "deploy/kubernetes"
KUSTOMIZATION = yaml.safe_load((FOLDER / "kustomization.yaml").read_text())
OBJECTS: list[dict[str, Any]] = [
    each
    for path in sorted(FOLDER.glob("*.yaml"))
    if path.name != "kustomization.yaml"
    for each in yaml.safe_load_all(path.read_text())
]
NAME = {"app.kubernetes.io/name": "postdate"}


def the(kind: str, name: str = "postdate") -> dict[str, Any]:
    (found,) = [each for each in OBJECTS if (each["kind"], each["metadata"]["name"]) == (kind, name)]
    return found


SET = the("StatefulSet")["spec"]
POD = SET["template"]["spec"]
(BROKER,) = POD["containers"]


def test_kustomization_names_every_file():
    files = {path.name for path in FOLDER.glob("*.yaml")} - {"kustomization.yaml"}
    assert set(KUSTOMIZATION["resources"]) == files


def test_objects_have_unique_names_and_say_what_they_belong_to():
    names = [(each["kind"], each["metadata"]["name"]) for each in OBJECTS]
    assert len(names) == len(set(names))
    assert all("app.kubernetes.io/name" in each["metadata"]["labels"] for each in OBJECTS)


def test_there_is_one_broker():
    assert SET["replicas"] == 1
    assert SET["serviceName"] == the("Service", "postdate-headless")["metadata"]["name"]
    assert SET["selector"]["matchLabels"] == NAME == SET["template"]["metadata"]["labels"]


def test_the_broker_has_no_privileges():
    assert POD["securityContext"]["runAsNonRoot"] is True
    assert POD["securityContext"]["runAsUser"] == 10001
    assert POD["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert BROKER["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert POD["automountServiceAccountToken"] is False
    assert the("ServiceAccount", POD["serviceAccountName"])["automountServiceAccountToken"] is False
    assert not POD.keys() & {"hostNetwork", "hostPID", "hostIPC"}


def test_the_broker_has_limits_and_time_to_stop():
    assert "memory" in BROKER["resources"]["limits"]
    # Also of a broker with several shards, one of which is frozen.
    assert POD["terminationGracePeriodSeconds"] > process_stop_seconds(BrokerConfig())


def test_variables_that_kubernetes_invents_stay_away():
    """A service named postdate gives its neighbours POSTDATE_PORT and others, which the broker refuses."""
    assert POD["enableServiceLinks"] is False


def test_probes_ask_ports_and_paths_that_there_are():
    ports = {port["name"]: port["containerPort"] for port in BROKER["ports"]}
    assert ports == {"grpc": 7650, "http": 7680}
    paths = {
        probe: (BROKER[probe]["httpGet"]["path"], BROKER[probe]["httpGet"]["port"])
        for probe in ("startupProbe", "readinessProbe", "livenessProbe")
    }
    assert paths == {
        "startupProbe": ("/readyz", "http"),
        "readinessProbe": ("/readyz", "http"),
        "livenessProbe": ("/livez", "http"),
    }
    startup = BROKER["startupProbe"]
    assert startup["periodSeconds"] * startup["failureThreshold"] >= 600  # a recovery is not killed


def test_services_lead_to_the_brokers_ports():
    names = {port["name"] for port in BROKER["ports"]}
    for name in ("postdate", "postdate-headless"):
        spec = the("Service", name)["spec"]
        assert spec["selector"] == NAME
        assert {port["targetPort"] for port in spec["ports"]} <= names


def test_the_network_is_shut_but_for_what_is_named():
    spec = the("NetworkPolicy")["spec"]
    assert (
        spec["podSelector"]["matchLabels"]
        == NAME
        == the("PodDisruptionBudget")["spec"]["selector"]["matchLabels"]
    )
    assert (spec["policyTypes"], spec["egress"]) == (["Ingress", "Egress"], [])
    assert all(rule["from"] and rule["ports"] for rule in spec["ingress"])
    jobs = [
        name
        for rule in spec["ingress"]
        for source in rule["from"]
        for expression in source.get("podSelector", {}).get("matchExpressions", [])
        for name in expression["values"]
    ]
    made = [
        each["spec"]["jobTemplate"]["spec"]["template"]["metadata"]["labels"]["app.kubernetes.io/name"]
        for each in OBJECTS
        if each["kind"] == "CronJob"
    ]
    assert set(made) <= set(jobs)


def test_claims_that_are_mounted_exist():
    pods = [POD] + [
        each["spec"]["jobTemplate"]["spec"]["template"]["spec"]
        for each in OBJECTS
        if each["kind"] == "CronJob"
    ]
    for pod in pods:
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        for container in [*pod.get("initContainers", []), *pod["containers"]]:
            assert {mount["name"] for mount in container["volumeMounts"]} <= volumes.keys()
        for volume in volumes.values():
            if "persistentVolumeClaim" in volume:
                the("PersistentVolumeClaim", volume["persistentVolumeClaim"]["claimName"])


def test_settings_are_known():
    (generated,) = KUSTOMIZATION["configMapGenerator"]
    assert BROKER["envFrom"] == [{"configMapRef": {"name": generated["name"]}}]
    known = {setting.variable for setting in SETTINGS} | {"POSTDATE_ALLOW_PLAINTEXT"}
    assert {line.split("=")[0] for line in generated["literals"]} <= known
