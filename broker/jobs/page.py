"""The report as one page: nothing is loaded from elsewhere, nothing runs, and it reads on a phone and in the dark."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from broker.delayed.check.findings import time_text
from broker.jobs.charts import Bar, bar_chart, group_days, group_evenly, stacked_bar
from broker.jobs.page_style import STYLE
from broker.jobs.work import Line

_FINDINGS_SHOWN = 200
_TOPICS_SHOWN = 100
_SIZES_SHOWN = 12

_HEADLINES = {
    "clean": "Everything agrees",
    "warnings": "Nothing is wrong; some things are worth knowing",
    "findings": "Something is wrong",
    "incomplete": "Not everything could be checked",
}


def render_page(report: Line) -> str:
    """HTML of a report. Pure."""
    outcome = report["outcome"]
    body = [
        f'<header class="{outcome}"><p class="badge">{escape(outcome)}</p>'
        f"<h1>{_HEADLINES[outcome]}</h1><p>{_sentence(report)}</p></header>",
        _tiles(report),
        _findings(report),
        _due(report),
        _live(report),
        _sizes(report),
        _topics(report),
        _facts(report),
    ]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        '<meta name="color-scheme" content="light dark">'
        f"<title>Audit: {escape(outcome)}</title><style>{STYLE}</style></head>"
        f"<body><main>{''.join(body)}</main></body></html>\n"
    )


def _sentence(report: Line) -> str:
    totals = report["totals"]
    entries, rows = (_number(totals.get(name, 0)) for name in ("index_entries", "messages"))
    checked = f"{entries} index entries against {rows} rows"
    if report["level"] == "deep":
        checked += f" and {_number(totals.get('rows_compared', 0))} of these against stored messages"
    return (
        f"{checked}, as stored at {escape(_time(report['stored_at']))}. "
        f"The check took {report['seconds']:.1f} s on {escape(report['engine'])}, "
        f"after {report['start_up_seconds']:.1f} s of start-up."
    )


def _tiles(report: Line) -> str:
    totals = report["totals"]
    tiles = [
        ("pending", totals.get("pending", 0)),
        ("live", totals.get("live", 0)),
        ("messages stored", totals.get("messages", 0)),
        ("topics", totals["topics"]),
        ("ledgers", totals.get("ledgers", 0)),
        ("findings", report["finding_count"]),
    ]
    cells = "".join(f"<div><b>{_number(value)}</b><span>{name}</span></div>" for name, value in tiles)
    return f'<section class="tiles">{cells}</section>'


def _findings(report: Line) -> str:
    if not report["finding_count"]:
        return "<section><h2>Findings</h2><p>None.</p></section>"
    kinds = "".join(
        f"<tr><td><code>{kind}</code></td><td>{_number(counts['findings'])}</td>"
        f"<td>{_number(counts['entries'])}</td></tr>"
        for kind, counts in report["kinds"].items()
    )
    rows = "".join(_finding(line) for line in report["findings"][:_FINDINGS_SHOWN])
    hidden = report["finding_count"] - min(len(report["findings"]), _FINDINGS_SHOWN)
    file = report.get("findings_file") or "report.json"
    more = f"<p>{_number(hidden)} more are in {escape(file)}.</p>" if hidden > 0 else ""
    return (
        "<section><h2>Findings</h2>"
        f'<div class="wide"><table><tr><th>kind</th><th>findings</th><th>entries</th></tr>{kinds}</table></div>'
        f'<ul class="list">{rows}</ul>{more}</section>'
    )


def _finding(line: Line) -> str:
    places = [
        f"{name} {line[key]}"
        for name, key in (("bucket", "bucket_id"), ("segment", "segment"), ("ledger", "ledger_id"))
        if line[key] is not None
    ]
    where = ", ".join(filter(None, [f"topic {line['topic']}" if line["topic"] else "", *places]))
    suspects = ", ".join(
        f"entry {suspect['entry_id']}"
        + (f" (due {time_text(suspect['expected_ms'])})" if suspect["expected_ms"] else "")
        for suspect in line["suspects"]
    )
    details = f"<small>{escape(suspects)}</small>" if suspects else ""
    path = f"<small>{escape(line['path'])}</small>" if line["path"] else ""
    return (
        f'<li class="{line["severity"]}"><code>{line["kind"]}</code> <b>{escape(where)}</b> '
        f"{escape(line['what'])} <i>({_number(line['count'])})</i>{details}{path}</li>"
    )


def _due(report: Line) -> str:
    spans = group_days(report["pending_by_day"])
    if not spans:
        return "<section><h2>Pending by due day</h2><p>Nothing is pending.</p></section>"
    bars = []
    for span in spans:
        days = f"{span.first}" if span.first == span.last else f"{span.first} to {span.last}"
        bars.append(Bar(days, span.messages, f"{days}: {_number(span.messages)}"))
    top = max(bar.value for bar in bars)
    length = (spans[0].last - spans[0].first).days + 1
    bar_length = "a day" if length == 1 else f"{length} days"
    later = (
        f" {_number(report['pending_later'])} more are due after the year 9999."
        if report["pending_later"]
        else ""
    )
    chart = bar_chart(
        bars,
        top=top,
        axis=(str(spans[0].first), str(spans[-1].last)),
        css="due",
        name="Pending messages by due day",
    )
    return (
        f"<section><h2>Pending by due day</h2><p>A bar is {bar_length} (UTC); the highest has "
        f"{_number(int(top))} messages.{later}</p>{chart}</section>"
    )


def _live(report: Line) -> str:
    ledgers = [line for line in report["ledgers"] if line["messages"]]
    if not ledgers:
        return ""
    bars = []
    for first, end in group_evenly(len(ledgers)):
        some = ledgers[first:end]
        messages, live = (sum(line[name] for line in some) for name in ("messages", "live"))
        names = f"{some[0]['topic']} {some[0]['ledger_id']}"
        if len(some) > 1:
            names += f" to {some[-1]['topic']} {some[-1]['ledger_id']}"
        bars.append(
            Bar(names, live / messages, f"{names}: {100 * live / messages:.1f} % of {_number(messages)}")
        )
    chart = bar_chart(
        bars, top=1.0, axis=(bars[0].label, bars[-1].label), css="live", name="Live ratio by ledger"
    )
    some_of = report["totals"]["ledgers"]
    shown = (
        ""
        if some_of == len(ledgers)
        else f" The {len(ledgers)} with the most to free, of {_number(some_of)}."
    )
    span = "a ledger" if len(ledgers) == len(bars) else "several ledgers"
    return (
        f"<section><h2>Live ratio by ledger</h2><p>A bar is {span}; full height is 100 %. Low bars are what "
        f"compaction can free.{shown}</p>{chart}</section>"
    )


def _sizes(report: Line) -> str:
    topics = sorted(report["topics"], key=lambda line: -(line["ledger_bytes"] + line["bucket_bytes"]))
    if not topics:
        return ""
    top = topics[0]["ledger_bytes"] + topics[0]["bucket_bytes"]
    rows = []
    for line in topics[:_SIZES_SHOWN]:
        parts = [("ledger", line["ledger_bytes"]), ("bucket", line["bucket_bytes"])]
        text = f"{_bytes(line['ledger_bytes'])} ledgers, {_bytes(line['bucket_bytes'])} index"
        bar = stacked_bar(parts, top, f"{line['topic']}: {text}")
        rows.append(f"<p><b>{escape(line['topic'])}</b> {text}</p>{bar}")
    return f"<section><h2>Sizes</h2>{''.join(rows)}</section>"


_COLUMNS = (
    ("topic", "topic"),
    ("ledgers", "ledgers"),
    ("messages", "messages"),
    ("live", "live"),
    ("pending", "pending"),
    ("buckets", "buckets"),
    ("index_entries", "index entries"),
    ("index_stale", "stale"),
    ("findings", "findings"),
)


def _topics(report: Line) -> str:
    head = "".join(f"<th>{title}</th>" for _, title in _COLUMNS)
    rows = "".join(
        "<tr>" + "".join(f"<td>{_cell(line[name])}</td>" for name, _ in _COLUMNS) + "</tr>"
        for line in report["topics"][:_TOPICS_SHOWN]
    )
    hidden = len(report["topics"]) - _TOPICS_SHOWN
    more = f"<p>{_number(hidden)} more are in report.json.</p>" if hidden > 0 else ""
    table = f'<div class="wide"><table><tr>{head}</tr>{rows}</table></div>'
    return f"<section><h2>Topics</h2>{table}{more}</section>"


def _facts(report: Line) -> str:
    journal = report["journal"]
    above = f"{_number(journal['records'])} records with {_number(journal['messages'])} messages"
    facts = [
        ("folder", f"{report['folder']} ({report['folder_kind']})"),
        ("level", report["level"] + (f", sample {report['sample']:.0%}" if report["sample"] < 1 else "")),
        ("started", _time(report["started_at"])),
        ("run", report["run_id"]),
        ("broker", report["broker_id"] or "unknown"),
        ("journal above the manifests", above if journal["checked"] else "not followed"),
        ("version", report["version"]),
    ]
    rows = "".join(f"<dt>{name}</dt><dd>{escape(str(value))}</dd>" for name, value in facts)
    return f"<section><h2>This run</h2><dl>{rows}</dl></section>"


def _cell(value: object) -> str:
    return _number(value) if isinstance(value, int) else escape(str(value))


def _number(value: int) -> str:
    return f"{value:,}"


def _bytes(value: float) -> str:
    units: Sequence[str] = ("B", "kB", "MB", "GB", "TB")
    place = 0
    while value >= 1000 and place < len(units) - 1:
        value, place = value / 1000, place + 1
    return f"{value:.0f} {units[place]}" if place == 0 else f"{value:.1f} {units[place]}"


def _time(iso: str | None) -> str:
    return "an unknown time" if iso is None else iso[:19].replace("T", " ") + " UTC"
