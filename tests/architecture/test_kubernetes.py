"""The Helm chart with one broker: complete, closed, and of one mind."""

from __future__ import annotations

from importlib.metadata import version

import pytest
import yaml

from broker.config import SETTINGS, BrokerConfig
from broker.observe.span_settings import wants_spans
from broker.shards.supervisor import process_stop_seconds
from tests.chart import CHART, KUBERNETES, component, rendered, run_helm

OBJECTS = rendered()
the = OBJECTS.the
BROKER_LABELS = component("broker")
SET = the("StatefulSet")["spec"]
POD = SET["template"]["spec"]
(BROKER,) = POD["containers"]
KINDS_OF_CHARTS = ((), ("cluster.store=s3://bucket/prefix",), ("jobs.enabled=false",))


@pytest.mark.parametrize("values", [*KINDS_OF_CHARTS, ("prometheusOperator.enabled=true",)])
def test_chart_passes_helms_lint(values: tuple[str, ...]):
    done = run_helm("lint", "--strict", str(CHART), *(part for value in values for part in ("--set", value)))
    assert done.returncode == 0, done.stdout + done.stderr


def test_chart_has_the_version_of_the_package():
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["kubeVersion"] == f">={KUBERNETES}.0-0"
    assert chart["version"] == chart["appVersion"] == version("postdate")
    assert BROKER["image"] == "postdate:" + version("postdate")


@pytest.mark.parametrize(
    "value",
    [
        "setings.shards=4",
        "cluster.nodes=1",
        "cluster.store=bucket",
        "settings.Shards=4",
        "jobs.enabled=7",
        "spans.endpoint=collector:4318",
    ],
)
def test_wrong_values_are_refused_by_name(value: str):
    done = run_helm("template", "postdate", str(CHART), "--set", value)
    assert done.returncode != 0
    name = value.split("=", maxsplit=1)[0].removesuffix(".shards").split(".")[-1]
    assert name in done.stderr.split("schema(s)")[1]


def test_settings_become_variables_as_they_were_written(tmp_path):
    values = tmp_path / "values.yaml"
    values.write_text("settings: {max_pending_messages: 1000000000, max_delivery_rate: 0.5, shards: 4}")
    done = run_helm(
        "template", "postdate", str(CHART), "--values", str(values), "--show-only", "templates/configmap.yaml"
    )
    data = yaml.safe_load(done.stdout)["data"]
    assert data["POSTDATE_MAX_PENDING_MESSAGES"] == "1000000000"
    assert (data["POSTDATE_MAX_DELIVERY_RATE"], data["POSTDATE_SHARDS"]) == ("0.5", "4")
    assert data["POSTDATE_LOG_FORMAT"] == "json"


def test_spans_have_their_variables_and_a_way_out(tmp_path):
    values = tmp_path / "values.yaml"
    endpoint = "http://otel-collector.observability:4000"
    values.write_text(
        f"spans: {{endpoint: '{endpoint}', port: 4000, variables: {{OTEL_TRACES_SAMPLER: always_off}}}}"
    )
    done = run_helm("template", "postdate", str(CHART), "--values", str(values))
    objects = {each["kind"]: each for each in yaml.safe_load_all(done.stdout) if each}
    variables = {"OTEL_EXPORTER_OTLP_ENDPOINT": endpoint, "OTEL_TRACES_SAMPLER": "always_off"}
    assert variables.items() <= objects["ConfigMap"]["data"].items()
    assert wants_spans(objects["ConfigMap"]["data"])
    (rule,) = objects["NetworkPolicy"]["spec"]["egress"]
    assert [each["port"] for each in rule["ports"]] == [53, 53, 4000]
    cluster = rendered("cluster.store=s3://b/p", f"spans.endpoint={endpoint}")
    among_nodes, others = cluster.the("NetworkPolicy")["spec"]["egress"]
    assert [each["port"] for each in among_nodes["ports"]] == ["grpc"]
    assert [each["port"] for each in others["ports"]] == [53, 53, 443, 4318]
    assert not any(name.startswith("OTEL_") for name in the("ConfigMap")["data"])


def test_a_changed_setting_restarts_the_broker():
    def mark(*values: str) -> str:
        pod = rendered(*values).the("StatefulSet")["spec"]["template"]
        return str(pod["metadata"]["annotations"]["postdate.dev/settings"])

    assert mark() == mark("storage.size=1Gi") != mark("settings.shards=4")


def test_files_of_a_secret_are_mounted_for_the_brokers_group_alone():
    pod = rendered("secretFiles=postdate-tls").the("StatefulSet")["spec"]["template"]["spec"]
    (volume,) = [each for each in pod["volumes"] if each["name"] == "secret-files"]
    assert volume["secret"] == {"secretName": "postdate-tls", "defaultMode": 0o440}
    (mount,) = [each for each in pod["containers"][0]["volumeMounts"] if each["name"] == "secret-files"]
    assert (mount["mountPath"], mount["readOnly"]) == ("/etc/postdate", True)


def test_prometheus_operator_gets_the_rules_and_the_job_that_they_ask_for():
    objects = rendered("prometheusOperator.enabled=true")
    folder = CHART.parent / "prometheus/rules"
    groups = [
        group for path in sorted(folder.glob("*.yml")) for group in yaml.safe_load(path.read_text())["groups"]
    ]
    assert objects.the("PrometheusRule")["spec"]["groups"] == groups
    monitor = objects.the("ServiceMonitor")["spec"]
    selected = [
        each
        for each in objects
        if each["kind"] == "Service"
        and monitor["selector"]["matchLabels"].items() <= each["metadata"]["labels"].items()
    ]
    (service,) = selected
    assert service["metadata"]["labels"][monitor["jobLabel"]] == "postdate"
    (endpoint,) = monitor["endpoints"]
    assert endpoint["port"] in {port["name"] for port in service["spec"]["ports"]}


@pytest.mark.parametrize("values", KINDS_OF_CHARTS)
def test_objects_have_unique_names_and_say_what_they_belong_to(values: tuple[str, ...]):
    objects = rendered(*values)
    names = [(each["kind"], each["metadata"]["name"]) for each in objects]
    assert len(names) == len(set(names))
    for each in objects:
        labels = each["metadata"]["labels"]
        assert component(labels["app.kubernetes.io/component"]).items() <= labels.items()


def test_objects_of_two_releases_do_not_meet():
    done = run_helm("template", "other", str(CHART))
    other = list(yaml.safe_load_all(done.stdout))
    assert not {each["metadata"]["name"] for each in other} & {each["metadata"]["name"] for each in OBJECTS}
    assert "postdate-headless" not in done.stdout


def test_there_is_one_broker():
    assert SET["replicas"] == 1
    assert SET["serviceName"] == the("Service", "postdate-headless")["metadata"]["name"]
    assert SET["selector"]["matchLabels"] == BROKER_LABELS == SET["template"]["metadata"]["labels"]


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
        assert spec["selector"] == BROKER_LABELS
        assert {port["targetPort"] for port in spec["ports"]} <= names


def test_the_network_is_shut_but_for_what_is_named():
    spec = the("NetworkPolicy")["spec"]
    assert the("PodDisruptionBudget")["spec"]["selector"]["matchLabels"] == BROKER_LABELS
    (covered,) = spec["podSelector"]["matchExpressions"]
    assert BROKER_LABELS[covered["key"]] in covered["values"]
    assert (spec["policyTypes"], spec["egress"]) == (["Ingress", "Egress"], [])
    assert all(rule["from"] and rule["ports"] for rule in spec["ingress"])
    (own,) = [
        source["podSelector"]["matchLabels"]
        for source in spec["ingress"][0]["from"]
        if "app.kubernetes.io/name" in source["podSelector"]["matchLabels"]
    ]
    assert all(own.items() <= pod["metadata"]["labels"].items() for pod in OBJECTS.pods())
    assert not [each for each in rendered("networkPolicy.enabled=false") if each["kind"] == "NetworkPolicy"]


@pytest.mark.parametrize("values", [(), ("jobs.enabled=false",)])
def test_claims_that_are_mounted_exist(values: tuple[str, ...]):
    objects = rendered(*values)
    for pod in (made["spec"] for made in objects.pods()):
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        for container in [*pod.get("initContainers", []), *pod["containers"]]:
            assert {mount["name"] for mount in container["volumeMounts"]} <= volumes.keys()
        for volume in volumes.values():
            if "persistentVolumeClaim" in volume:
                objects.the("PersistentVolumeClaim", volume["persistentVolumeClaim"]["claimName"])


def test_messages_outlive_the_release():
    kept = the("PersistentVolumeClaim", "postdate-data")["metadata"]["annotations"]
    assert kept == {"helm.sh/resource-policy": "keep"}


def test_settings_are_known():
    settings = the("ConfigMap")
    assert BROKER["envFrom"] == [{"configMapRef": {"name": settings["metadata"]["name"]}}]
    assert settings["data"].keys() <= {setting.variable for setting in SETTINGS} | {
        "POSTDATE_ALLOW_PLAINTEXT"
    }
