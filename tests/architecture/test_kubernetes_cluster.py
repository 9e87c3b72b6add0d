"""The Kubernetes manifests of a cluster of three nodes: complete, closed, and of one mind with those of one broker."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from broker.cli import main
from broker.config import SETTINGS, BrokerConfig, parse_nodes
from broker.rpc.cluster import FOLLOWED_WITHIN_MS
from broker.shards.node_supervisor import stop_seconds_max
from broker.shards.supervisor import process_stop_seconds

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "deploy/kubernetes/cluster"
KUSTOMIZATION = yaml.safe_load((FOLDER / "kustomization.yaml").read_text())
OBJECTS: list[dict[str, Any]] = [
    made
    for path in sorted(FOLDER.glob("*.yaml"))
    if path.name != "kustomization.yaml"
    for made in yaml.safe_load_all(path.read_text())
]
ONE_BROKER: dict[str, Any] = yaml.safe_load((FOLDER.parent / "statefulset.yaml").read_text())["spec"]
NAME = {"app.kubernetes.io/name": "postdate"}
OWNER_LEASE_MS_MAX = 15_000
"""The longest lease for which the time to stop is meant; the default is 4 s."""


def the(kind: str, name: str = "postdate") -> dict[str, Any]:
    (made,) = [made for made in OBJECTS if (made["kind"], made["metadata"]["name"]) == (kind, name)]
    return made


SET = the("StatefulSet")["spec"]
POD = SET["template"]["spec"]
(NODE,) = POD["containers"]
JOB_POD = the("Job", "postdate-create")["spec"]["template"]["spec"]
(CREATE,) = JOB_POD["containers"]
(GENERATED,) = KUSTOMIZATION["configMapGenerator"]
GIVEN = dict(line.split("=", 1) for line in GENERATED["literals"])


def test_kustomization_names_every_file():
    files = {path.name for path in FOLDER.glob("*.yaml")} - {"kustomization.yaml"}
    assert set(KUSTOMIZATION["resources"]) == files


def test_objects_have_unique_names_and_say_what_they_belong_to():
    names = [(made["kind"], made["metadata"]["name"]) for made in OBJECTS]
    assert len(names) == len(set(names))
    assert all("app.kubernetes.io/name" in made["metadata"]["labels"] for made in OBJECTS)


def test_nodes_are_the_pods_by_the_names_that_the_headless_service_gives_them():
    service, port = the("Service", SET["serviceName"]), NODE["ports"][0]["containerPort"]
    assert service["spec"]["clusterIP"] == "None" and service["spec"]["publishNotReadyAddresses"] is True
    pods = [f"{the('StatefulSet')['metadata']['name']}-{number}" for number in range(SET["replicas"])]
    assert parse_nodes(GIVEN["POSTDATE_CLUSTER_NODES"]) == {
        pod: f"{pod}.{SET['serviceName']}:{port}" for pod in pods
    }
    (node,) = [variable for variable in NODE["env"] if variable["name"] == "POSTDATE_NODE"]
    assert node["valueFrom"] == {"fieldRef": {"fieldPath": "metadata.name"}}
    assert SET["selector"]["matchLabels"] == NAME == SET["template"]["metadata"]["labels"]


def test_settings_are_known_and_credentials_come_from_a_secret():
    known = {setting.variable for setting in SETTINGS} | {"POSTDATE_ALLOW_PLAINTEXT"}
    assert GIVEN.keys() | {variable["name"] for variable in NODE["env"]} <= known
    sources = [
        {"configMapRef": {"name": GENERATED["name"]}},
        {"secretRef": {"name": "postdate-store", "optional": True}},
    ]
    assert NODE["envFrom"] == sources == CREATE["envFrom"]


def test_the_cluster_is_made_first_and_only_once():
    assert CREATE["command"] == [
        "postdate-broker",
        "cluster",
        "create",
        "$(POSTDATE_CLUSTER_STORE)",
        "--if-missing",
    ]
    assert JOB_POD["restartPolicy"] == "Never"


def test_machines_and_zones_lose_one_node_at_a_time():
    apart = POD["affinity"]["podAntiAffinity"]
    (machine,) = apart["requiredDuringSchedulingIgnoredDuringExecution"]
    (zone,) = apart["preferredDuringSchedulingIgnoredDuringExecution"]
    terms = {term["topologyKey"]: term["labelSelector"] for term in (machine, zone["podAffinityTerm"])}
    assert terms == {
        "kubernetes.io/hostname": {"matchLabels": NAME},
        "topology.kubernetes.io/zone": {"matchLabels": NAME},
    }
    budget = the("PodDisruptionBudget")["spec"]
    assert (budget["maxUnavailable"], budget["selector"]["matchLabels"]) == (1, NAME)


def test_each_node_has_a_volume_of_its_own():
    claims = [claim["metadata"]["name"] for claim in SET["volumeClaimTemplates"]]
    volumes = {volume["name"] for volume in POD["volumes"]}
    assert claims == ["data"] and "data" not in volumes
    assert {mount["name"] for mount in NODE["volumeMounts"]} == volumes | set(claims)


def test_there_is_time_for_a_hand_over():
    assert "--shards" not in CREATE["command"], "several shards take longer"
    needed_ms = BrokerConfig().drain_grace_ms + 2 * OWNER_LEASE_MS_MAX
    assert POD["terminationGracePeriodSeconds"] * 1000 >= needed_ms


def test_the_time_for_hand_overs_of_several_shards_is_told():
    create: Any = main.commands["cluster"]
    options = {option.name: option.default for option in create.commands["create"].params}
    one, two = (stop_seconds_max(BrokerConfig(), owned, options["owner_lease_ms"]) for owned in (1, 2))
    told = " ".join((ROOT / "docs/clusters.md").read_text().split())
    assert f"{one:.0f} s at most for a node that owns one shard, and {two - one:.0f} s more for each" in told
    alone = " ".join((ROOT / "docs/shards.md").read_text().split())
    assert f"{process_stop_seconds(BrokerConfig()):.0f} s with the defaults" in alone


def test_what_is_no_matter_of_clusters_is_as_for_one_broker():
    pod = ONE_BROKER["template"]["spec"]
    (broker,) = pod["containers"]
    for key in ("securityContext", "ports", "readinessProbe", "livenessProbe", "image"):
        assert NODE[key] == broker[key], key
    assert CREATE["securityContext"] == broker["securityContext"]
    for key in (
        "securityContext",
        "serviceAccountName",
        "automountServiceAccountToken",
        "enableServiceLinks",
    ):
        assert POD[key] == pod[key], key
    assert "memory" in NODE["resources"]["limits"] and "cpu" not in NODE["resources"]["limits"]
    startup, ready = NODE["startupProbe"], NODE["readinessProbe"]
    assert startup["httpGet"] == ready["httpGet"] == {"path": "/readyz", "port": "http"}
    assert ready["periodSeconds"] * 1000 <= FOLLOWED_WITHIN_MS


def test_the_network_is_shut_but_for_nodes_clients_and_the_store():
    spec = the("NetworkPolicy")["spec"]
    assert spec["policyTypes"] == ["Ingress", "Egress"]
    (covered,) = spec["podSelector"]["matchExpressions"]
    assert covered["values"] == ["postdate", "postdate-create"]
    assert all(rule["from"] and rule["ports"] for rule in spec["ingress"])
    nodes = {"podSelector": {"matchLabels": NAME}}
    assert nodes in spec["ingress"][0]["from"] and spec["egress"][0]["to"] == [nodes]
    assert {port["port"] for rule in spec["egress"] for port in rule["ports"]} == {"grpc", 53, 443}
