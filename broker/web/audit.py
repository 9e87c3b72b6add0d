"""The report of the last audit: its summary, and the report's own page in a sandbox."""

from __future__ import annotations

import asyncio
import json
from datetime import datetime
from pathlib import Path
from typing import Any

from aiohttp import web

from broker.web.refusals import PageRefusal
from broker.web.site import Visit

SANDBOX = "sandbox; default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; frame-ancestors 'none'"
"""The report is a page of another program's: it styles itself, and may do nothing else."""

_BYTES_MAX = 32 << 20
_FINDINGS_SHOWN = 50
_SHOWN = (
    "outcome",
    "stored_at",
    "started_at",
    "level",
    "engine",
    "seconds",
    "folder",
    "totals",
    "finding_count",
)


async def show_audit(visit: Visit) -> web.Response:
    """GET /audit"""
    folder = visit.site.config.audit_report_dir
    if not folder:
        return await visit.page("audit.html", report=None, folder="", problem="")
    report, problem = await asyncio.to_thread(_read_report, Path(folder))
    return await visit.page("audit.html", report=report, folder=folder, problem=problem)


async def show_report(visit: Visit) -> web.Response:
    """GET /audit/report.html"""
    folder = visit.site.config.audit_report_dir
    page = await asyncio.to_thread(_read_file, Path(folder) / "report.html") if folder else None
    if page is None:
        raise PageRefusal("There is no report yet.", 404)
    headers = {"Content-Security-Policy": SANDBOX}
    return web.Response(body=page, content_type="text/html", charset="utf-8", headers=headers)


def _read_report(folder: Path) -> tuple[dict[str, Any] | None, str]:
    """Return what the page shows of the report, or why it shows none."""
    content = _read_file(folder / "report.json")
    if content is None:
        return None, "There is no report in the folder yet."
    try:
        report = json.loads(content)
        if report["schema"] != "postdate.audit" or report["schema_version"] != 1:
            return None, "The report is of another version than this broker knows."
        names = (
            "outcome",
            "stored_at",
            "level",
            "engine",
            "seconds",
            "folder",
            "totals",
            "finding_count",
            "started_at",
        )
        shown = {name: report[name] for name in names}
        shown["stored_ms"], shown["started_ms"] = (
            _time_ms(report["stored_at"]),
            _time_ms(report["started_at"]),
        )
        shown["findings"] = report["findings"][:_FINDINGS_SHOWN]
        shown["topics"] = sorted(report["topics"], key=lambda topic: -topic["pending"])[:_FINDINGS_SHOWN]
    except (ValueError, KeyError, TypeError):
        return None, "The report cannot be read: it is damaged, or no report."
    return shown, ""


def _time_ms(text: str | None) -> int:
    return int(datetime.fromisoformat(text).timestamp() * 1000) if text else 0


def _read_file(path: Path) -> bytes | None:
    try:
        if path.stat().st_size > _BYTES_MAX:
            return None
        return path.read_bytes()
    except OSError:
        return None
