"""Writes the Grafana dashboards in deploy/grafana/dashboards; a test compares them with what this would write.

python -m tools.dashboards

What they show is in `tools/dashboard_panels.py`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tools.dashboard_panels import BROKER, MESSAGES, Panel, Row

FOLDER = Path(__file__).resolve().parents[1] / "deploy/grafana/dashboards"

_DATA_SOURCE = {"type": "prometheus", "uid": "${datasource}"}
_COLUMNS = 24
_HEIGHTS = {"stat": 4, "timeseries": 8, "bargauge": 8}


def dashboard(uid: str, title: str, rows: Sequence[Row]) -> dict[str, Any]:
    """A dashboard as Grafana stores it."""
    panels: list[dict[str, Any]] = []
    y = 0
    for name, row in rows:
        panels.append(_row(len(panels) + 1, name, y))
        x, y, height = 0, y + 1, 0
        for panel in row:
            # Panels flow like words: a line ends where the next one does not fit, or is of another height.
            if x + panel.width > _COLUMNS or height not in (0, _HEIGHTS[panel.kind]):
                x, y, height = 0, y + height, 0
            height = _HEIGHTS[panel.kind]
            place = {"h": height, "w": panel.width, "x": x, "y": y}
            panels.append(_panel(len(panels) + 1, panel, place))
            x += panel.width
        y += height
    return {
        "uid": uid,
        "title": title,
        "tags": ["postdate"],
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "30s",
        "time": {"from": "now-6h", "to": "now"},
        "timezone": "browser",
        "templating": {"list": _variables()},
        "links": [
            {
                "title": "Postdate",
                "type": "dashboards",
                "tags": ["postdate"],
                "asDropdown": False,
                "keepTime": True,
            }
        ],
        "annotations": {"list": []},
        "panels": panels,
    }


def _variables() -> list[dict[str, Any]]:
    of_query = {"type": "query", "datasource": _DATA_SOURCE, "refresh": 2, "multi": True, "includeAll": True}
    everything = {"selected": True, "text": ["All"], "value": ["$__all"]}
    return [
        {
            "name": "datasource",
            "label": "Data source",
            "type": "datasource",
            "query": "prometheus",
            "refresh": 1,
        },
        {
            **of_query,
            "name": "instance",
            "label": "Broker",
            "query": "label_values(postdate_build_info, instance)",
            "current": everything,
        },
        {
            **of_query,
            "name": "topic",
            "label": "Topic",
            "query": 'label_values(postdate_scheduled_messages{instance=~"$instance"}, topic)',
            "current": everything,
        },
    ]


def _row(number: int, title: str, y: int) -> dict[str, Any]:
    place = {"h": 1, "w": _COLUMNS, "x": 0, "y": y}
    return {"id": number, "type": "row", "title": title, "collapsed": False, "gridPos": place, "panels": []}


def _panel(number: int, panel: Panel, place: dict[str, int]) -> dict[str, Any]:
    steps: list[dict[str, Any]] = [{"color": "green", "value": None}]
    if panel.alarm is not None:
        steps.append({"color": "red", "value": panel.alarm})
    defaults: dict[str, Any] = {"unit": panel.unit, "thresholds": {"mode": "absolute", "steps": steps}}
    options: dict[str, Any] = {"reduceOptions": {"calcs": ["lastNotNull"], "values": False}}
    if panel.kind == "timeseries":
        defaults["min"] = 0
        defaults["custom"] = {"fillOpacity": 10, "showPoints": "never"}
        options = {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}}
    elif panel.kind == "stat":
        options["colorMode"] = "value" if panel.alarm is not None else "none"
    else:
        options["orientation"] = "horizontal"
    return {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.meaning,
        "gridPos": place,
        "datasource": _DATA_SOURCE,
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": options,
        "targets": [
            {
                "refId": chr(ord("A") + index),
                "datasource": _DATA_SOURCE,
                "expr": expression,
                "legendFormat": legend,
                "instant": panel.instant,
                "range": not panel.instant,
            }
            for index, (legend, expression) in enumerate(panel.queries)
        ],
    }


def dashboards() -> dict[str, str]:
    """File name to text."""
    made = {
        "postdate-messages.json": dashboard("postdate-messages", "Postdate: messages", MESSAGES),
        "postdate-broker.json": dashboard("postdate-broker", "Postdate: broker", BROKER),
    }
    return {name: json.dumps(each, indent=1) + "\n" for name, each in made.items()}


def main() -> None:
    for name, text in dashboards().items():
        (FOLDER / name).write_text(text)


if __name__ == "__main__":
    main()
