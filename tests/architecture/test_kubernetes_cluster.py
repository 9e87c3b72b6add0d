"""The Helm chart with the nodes of a cluster: complete, closed, and of one mind with that of one broker."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from broker.cli import main
from broker.config import SETTINGS, BrokerConfig, parse_nodes
from broker.rpc.cluster import FOLLOWED_WITHIN_MS
from broker.shards.node_supervisor import stop_seconds_max
from broker.shards.supervisor import process_stop_seconds
from tests.chart import component, rendered

ROOT = Path(__file__).resolve().parents[2]
STORE = "cluster.store=s3://bucket/prefix"
OBJECTS = rendered(STORE)
the = OBJECTS.the
ONE_BROKER: dict[str, Any] = rendered().the("StatefulSet")["spec"]
NODES = component("broker")
OWNER_LEASE_MS_MAX = 15_000
"""The longest lease for which the time to stop is meant; the default is 4 s."""


SET = the("StatefulSet")["spec"]
POD = SET["template"]["spec"]
(NODE,) = POD["containers"]
JOB_POD = the("Job", "postdate-create")["spec"]["template"]["spec"]
(CREATE,) = JOB_POD["containers"]
SETTINGS_MAP = the("ConfigMap")
GIVEN = SETTINGS_MAP["data"]


def test_nodes_are_the_pods_by_the_names_that_the_headless_service_gives_them():
    service, port = the("Service", SET["serviceName"]), NODE["ports"][0]["containerPort"]
    assert service["spec"]["clusterIP"] == "None" and service["spec"]["publishNotReadyAddresses"] is True
    pods = [f"{the('StatefulSet')['metadata']['name']}-{number}" for number in range(SET["replicas"])]
    assert parse_nodes(GIVEN["POSTDATE_CLUSTER_NODES"]) == {
        pod: f"{pod}.{SET['serviceName']}:{port}" for pod in pods
    }
    (node,) = [variable for variable in NODE["env"] if variable["name"] == "POSTDATE_NODE"]
    assert node["valueFrom"] == {"fieldRef": {"fieldPath": "metadata.name"}}
    assert SET["selector"]["matchLabels"] == NODES == SET["template"]["metadata"]["labels"]


def test_settings_are_known_and_credentials_come_from_a_secret():
    known = {setting.variable for setting in SETTINGS} | {"POSTDATE_ALLOW_PLAINTEXT"}
    assert GIVEN.keys() | {variable["name"] for variable in NODE["env"]} <= known
    sources = [
        {"configMapRef": {"name": SETTINGS_MAP["metadata"]["name"]}},
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
    assert not [made for made in rendered(STORE, upgrade=True) if made["kind"] == "Job"]


def test_machines_and_zones_lose_one_node_at_a_time():
    apart = POD["affinity"]["podAntiAffinity"]
    (machine,) = apart["requiredDuringSchedulingIgnoredDuringExecution"]
    (zone,) = apart["preferredDuringSchedulingIgnoredDuringExecution"]
    terms = {term["topologyKey"]: term["labelSelector"] for term in (machine, zone["podAffinityTerm"])}
    assert terms == {
        "kubernetes.io/hostname": {"matchLabels": NODES},
        "topology.kubernetes.io/zone": {"matchLabels": NODES},
    }
    budget = the("PodDisruptionBudget")["spec"]
    assert (budget["maxUnavailable"], budget["selector"]["matchLabels"]) == (1, NODES)


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
    spec = rendered(STORE, "cluster.storePort=9000").the("NetworkPolicy")["spec"]
    assert spec["policyTypes"] == ["Ingress", "Egress"]
    (covered,) = spec["podSelector"]["matchExpressions"]
    assert covered["values"] == ["broker", "create"]
    assert all(rule["from"] and rule["ports"] for rule in spec["ingress"])
    assert spec["egress"][0]["to"] == [{"podSelector": {"matchLabels": NODES}}]
    assert {port["port"] for rule in spec["egress"] for port in rule["ports"]} == {"grpc", 53, 9000}


def test_nodes_are_as_many_as_asked_for():
    objects = rendered(STORE, "cluster.nodes=5")
    assert objects.the("StatefulSet")["spec"]["replicas"] == 5
    assert len(parse_nodes(objects.the("ConfigMap")["data"]["POSTDATE_CLUSTER_NODES"])) == 5


def test_backups_are_no_matter_of_a_cluster():
    assert not [made for made in OBJECTS if made["kind"] in ("CronJob", "PersistentVolumeClaim")]
