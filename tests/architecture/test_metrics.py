"""Every metric has the project's prefix and a help text that is a sentence, which docs/operations.md has too."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from broker.observe.metric_help import HELP, PREFIX
from broker.observe.metrics import BrokerCollector, BrokerCounters, BrokerSnapshot, ClusterSnapshot

ROOT = Path(__file__).resolve().parents[2]
KINDS = {
    kind + family
    for kind in ("Counter", "Gauge", "Histogram", "Summary", "Info")
    for family in ("", "MetricFamily")
}


def test_metrics_are_named_and_explained():
    wrong = []
    for path in sorted((ROOT / "broker").rglob("*.py")):
        tree = ast.parse(path.read_text())
        if not any(
            isinstance(node, ast.ImportFrom) and is_prometheus(node.module) for node in ast.walk(tree)
        ):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in KINDS:
                name, help_text = [*map(constant, node.args), None, None][:2]
                # What is computed cannot be judged here; the scrape test sees it.
                if (name and not name.startswith("postdate_")) or (help_text and not help_text.endswith(".")):
                    wrong.append(f"{path.relative_to(ROOT)}:{node.lineno} {name}")
    assert not wrong


def test_every_metric_is_in_the_document_with_its_kind_and_its_help_and_no_other():
    page = (ROOT / "docs/operations.md").read_text()
    rows = re.findall(r"^\| `(postdate_\w+)` \| (\w+) \| (.*) \|$", page, re.MULTILINE)
    nothing = BrokerSnapshot(
        BrokerCounters(),
        (),
        (),
        topics_count=0,
        subscriptions_count=0,
        cluster=ClusterSnapshot(False, 0, 0, 0, 0, 0, 0, 0, 0),
    )
    shown = {
        (family.name + ("_total" if family.type == "counter" else ""), family.type, family.documentation)
        for family in BrokerCollector(lambda: nothing, version="0").collect()
        if family.name.startswith(PREFIX)
    }
    assert len(rows) == len({name for name, _, _ in rows}), "a metric has two rows"
    assert {(name, kind, without_markup(meaning)) for name, kind, meaning in rows} == shown


def test_every_help_text_is_a_sentence_of_a_metric():
    nothing = BrokerSnapshot(
        BrokerCounters(),
        (),
        (),
        topics_count=0,
        subscriptions_count=0,
        cluster=ClusterSnapshot(False, 0, 0, 0, 0, 0, 0, 0, 0),
    )
    families = BrokerCollector(lambda: nothing, version="0").collect()
    assert {family.name.removeprefix(PREFIX) for family in families if family.name.startswith(PREFIX)} == set(
        HELP
    )
    assert [text for text in HELP.values() if not text.endswith(".") or "  " in text] == []


def without_markup(meaning: str) -> str:
    """Return the help text of a meaning: no marks of code, no links in parentheses."""
    return re.sub(r" \(\[[^]]*\]\([^)]*\)\)", "", meaning).replace("`", "")


def is_prometheus(module: str | None) -> bool:
    return module is not None and module.split(".")[0] == "prometheus_client"


def constant(node: ast.expr) -> str | None:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None
