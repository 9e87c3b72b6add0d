"""Alerts, dashboards and runbook agree with each other and with the metrics that there are."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from broker.jobs.metrics import write_textfile
from broker.observe.metrics import BrokerCollector, BrokerCounters, BrokerSnapshot, ClusterSnapshot
from tests.programs import need_program
from tools.dashboards import FOLDER, dashboards

ROOT = Path(__file__).resolve().parents[2]
PROMETHEUS = ROOT / "deploy/prometheus"
RULE_FILES = sorted((PROMETHEUS / "rules").glob("*.yml"))
UNIT_TESTS = sorted((PROMETHEUS / "tests").glob("*.yml"))
GROUPS = [group for path in RULE_FILES for group in yaml.safe_load(path.read_text())["groups"]]
RULES = [rule for group in GROUPS for rule in group["rules"]]
ALERTS = [rule for rule in RULES if "alert" in rule]
RECORDED = {rule["record"] for rule in RULES if "record" in rule}
RUNBOOK = (ROOT / "docs/runbook.md").read_text()
RUNBOOK_URL = "https://postdate.dev/runbook/#"
DASHBOARDS = [json.loads(path.read_text()) for path in sorted(FOLDER.glob("*.json"))]


def panels(dashboard: dict[str, Any]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = dashboard["panels"]
    return [panel for panel in found if panel["type"] != "row"]


def queries() -> Iterator[tuple[str, str]]:
    """Yield the place of each query, and the query with Grafana's variables filled in."""
    for dashboard in DASHBOARDS:
        for panel in panels(dashboard):
            for target in panel["targets"]:
                filled = target["expr"]
                for variable, value in (
                    ("$__rate_interval", "1m"),
                    ("$__range", "6h"),
                    ("$topic", ".+"),
                    ("$instance", ".+"),
                ):
                    filled = filled.replace(variable, value)
                yield f"{dashboard['uid']}: {panel['title']}", filled


def promtool(*arguments: str | Path) -> str:
    program = need_program("promtool", "prometheus")
    done = subprocess.run([program, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


# -- Prometheus ----------------------------------------------------------------------------------------------


def test_configuration_and_rules_pass_promtool():
    promtool("check", "config", PROMETHEUS / "prometheus.yml")
    promtool("check", "rules", *RULE_FILES)


@pytest.mark.packaging
@pytest.mark.parametrize("path", UNIT_TESTS, ids=lambda path: path.stem)
def test_rules_do_what_their_unit_tests_say(path):
    promtool("test", "rules", path)


def test_every_alert_is_seen_to_fire():
    text = "".join(path.read_text() for path in UNIT_TESTS)
    assert {rule["alert"] for rule in ALERTS} == set(re.findall(r'alertname="(\w+)"', text))


@pytest.mark.parametrize("rule", ALERTS, ids=lambda rule: rule["alert"])
def test_alerts_say_how_bad_it_is_and_what_to_do(rule):
    assert rule["labels"] == {"severity": rule["labels"]["severity"]}
    assert rule["labels"]["severity"] in ("critical", "warning")
    annotations = rule["annotations"]
    assert annotations.keys() == {"summary", "description", "runbook_url"}
    assert annotations["runbook_url"] == RUNBOOK_URL + rule["alert"].lower()


def test_runbook_has_one_section_for_each_alert():
    sections = re.split(r"^## ", RUNBOOK, flags=re.MULTILINE)[1:]
    assert [section.splitlines()[0] for section in sections] == [rule["alert"] for rule in ALERTS]
    for section in sections:
        bold = re.findall(r"^- \*\*(\w+)\*\*", section, re.MULTILINE)
        assert bold == ["Users", "Confirm", "Do", "Escalate"], section.splitlines()[0]
    anchors = {rule["alert"].lower() for rule in ALERTS}
    assert set(re.findall(r"\]\(#(\w+)\)", RUNBOOK)) <= anchors


# -- Grafana -------------------------------------------------------------------------------------------------


def test_dashboards_are_what_the_tool_writes():
    written = {path.name: path.read_text() for path in FOLDER.glob("*")}
    assert written == dashboards(), "run: python -m tools.dashboards"


@pytest.mark.parametrize("dashboard", DASHBOARDS, ids=lambda each: each["uid"])
def test_dashboards_are_sound(dashboard):
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(ids) == len(set(ids))
    assert {variable["name"] for variable in dashboard["templating"]["list"]} == {
        "datasource",
        "instance",
        "topic",
    }
    taken: set[tuple[int, int]] = set()
    for panel in dashboard["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert place["x"] + place["w"] <= 24 and not cells & taken, panel["title"]
        taken |= cells
    for panel in panels(dashboard):
        assert panel["description"].endswith("."), panel["title"]
        assert panel["fieldConfig"]["defaults"]["unit"], panel["title"]
        for part in (panel, *panel["targets"]):
            assert part["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        references = [target["refId"] for target in panel["targets"]]
        assert len(references) == len(set(references)) and references


def test_titles_and_ids_of_dashboards_are_unique():
    for key in ("uid", "title"):
        assert len({each[key] for each in DASHBOARDS}) == len(DASHBOARDS)


def test_provisioning_finds_the_dashboards():
    (provider,) = yaml.safe_load((ROOT / "deploy/grafana/provisioning/dashboards/postdate.yml").read_text())[
        "providers"
    ]
    compose = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
    mounts = dict(volume.split(":")[:2] for volume in compose["services"]["grafana"]["volumes"])
    assert mounts["./deploy/grafana/dashboards"] == provider["options"]["path"]
    assert mounts["./deploy/grafana/provisioning"] == "/etc/grafana/provisioning"


def test_every_query_of_the_dashboards_parses(tmp_path):
    rules = [{"record": f"query:{number}", "expr": query} for number, (_, query) in enumerate(queries())]
    path = tmp_path / "queries.yml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "queries", "rules": rules}]}))
    promtool("check", "rules", path)


# -- metrics -------------------------------------------------------------------------------------------------


def metric_names(tmp_path: Path) -> set[str]:
    node = ClusterSnapshot(False, 0, 0, 0, 0, 0, 0, 0, 0)
    nothing = BrokerSnapshot(BrokerCounters(), (), (), topics_count=0, subscriptions_count=0, cluster=node)
    names = {"up"}
    for family in BrokerCollector(lambda: nothing, version="0").collect():
        match family.type:
            case "counter":
                names.add(f"{family.name}_total")
            case "histogram":
                names |= {f"{family.name}_{end}" for end in ("bucket", "count", "sum")}
            case _:
                names.add(family.name)
    report = {
        "started_at": "2026-01-01T00:00:00+00:00",
        "start_up_seconds": 1,
        "seconds": 1,
        "exit_code": 0,
        "totals": {},
        "kinds": {"missing_file": {"findings": 1}},
    }
    write_textfile(str(tmp_path / "audit.prom"), report)
    return names | set(re.findall(r"^# HELP (\w+)", (tmp_path / "audit.prom").read_text(), re.MULTILINE))


def test_every_metric_that_is_asked_for_exists(tmp_path):
    known = metric_names(tmp_path) | RECORDED
    asked = [(rule.get("alert") or rule["record"], rule["expr"]) for rule in RULES]
    unknown = [
        (where, name)
        for where, query in [*asked, *queries()]
        # Of what is quoted nothing is a metric.
        for name in re.findall(
            r"(?:\w+:)*(?:postdate|process)_\w+(?::\w+)*|\bup\b", re.sub(r'"[^"]*"', "", query)
        )
        if name not in known
    ]
    assert not unknown


def test_every_recorded_series_is_used():
    asked = [rule["expr"] for rule in RULES] + [query for _, query in queries()]
    assert all(any(name in query for query in asked) for name in RECORDED)
