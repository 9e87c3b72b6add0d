"""The jobs on Spark: on one machine, on a cluster in processes of its own, and on a standalone cluster."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from pyspark.sql.types import StructType

from broker.cli import main
from broker.cluster.base_store import BaseCut, BaseStore
from broker.cluster.stores import open_store
from broker.folder.shard_folders import shard_folder, write_shards
from broker.jobs.audit import AuditRequest, run_audit
from broker.jobs.datasource import PostdateDataSource
from broker.jobs.engine import InlineEngine
from broker.jobs.reshard import reshard_folder
from broker.jobs.rewrite import outputs_of
from broker.jobs.spark import SparkEngine
from broker.jobs.spark_session import JobSession
from broker.jobs.values import Level
from broker.jobs.work import Line
from broker.runtime.clock import SystemClock
from broker.runtime.vfs import LocalVfs
from broker.storage.layout import Layout
from broker.testing.data_folder import LSN
from broker.topic_shards import shard_of
from tests.jobs.compacting import Leased, compact_offline, contents, lease_all, run_all
from tests.jobs.conftest import QUICK_JAVA, needs_java, session_on, standalone
from tests.jobs.folders import (
    LEDGER_IDS,
    PINNED_IDS,
    ROWS,
    SETTLED,
    WRONG,
    times_of,
    write_folder,
    write_pinned_folder,
    write_wrong_folder,
)

Rows = list[dict[str, Any]]
SHARDS = 3
MASTERS = [
    pytest.param("local[2]", marks=pytest.mark.packaging),
    pytest.param("local-cluster[2,1,1024]", marks=pytest.mark.deep),
    pytest.param("standalone", marks=pytest.mark.deep),
]


@pytest.fixture(scope="module", autouse=True)
def quick_java() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAVA_TOOL_OPTIONS", QUICK_JAVA)
        yield


@pytest.fixture(scope="module", params=MASTERS)
def session(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[JobSession]:
    java_home = needs_java(tmp_path_factory.mktemp("java"))
    if request.param != "standalone":
        with session_on(request.param) as session:
            yield session
        return
    with standalone(java_home) as address, session_on(address) as session:
        yield session


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    paths = {name: tmp_path_factory.mktemp(name) / "data" for name in ("whole", "wrong")}
    write_folder(paths["whole"])
    write_wrong_folder(paths["wrong"])
    return paths


def same(report: Line) -> Line:
    """Return the part of a report that depends neither on the engine nor on the moment."""
    apart = ("run_id", "engine", "started_at", "start_up_seconds", "seconds")
    return {name: value for name, value in report.items() if name not in apart}


@pytest.mark.parametrize("level", [Level.STANDARD, Level.DEEP])
@pytest.mark.parametrize("name", ["whole", "wrong"])
def test_spark_finds_what_the_inline_engine_finds(
    session: JobSession, folders: dict[str, Path], name: str, level: Level, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("broker.jobs.plan.UNIT_WEIGHT_MAX", 700)  # so that there are several tasks
    request = AuditRequest(str(folders[name]), level)
    report = run_audit(request, SparkEngine(session.master, session))
    assert json.dumps(same(report)) == json.dumps(same(run_audit(request, InlineEngine(1))))
    assert report["engine"] == f"spark {session.master}"
    found = {(line["kind"], line["ledger_id"], line["count"]) for line in report["findings"]}
    assert found == (WRONG if name == "wrong" else set())


def in_store(folder: Path, store: Path) -> str:
    """The URL of a store that holds a folder as its only base."""
    store.mkdir()
    bases = BaseStore(open_store(f"file://{store}"), SystemClock(), chunk_bytes=5_000)
    cut = BaseCut("t", "", "audited", 0, LSN, 3)
    asyncio.run(bases.upload(LocalVfs(), Layout(str(folder)), cut))
    return f"file://{store}"


@pytest.mark.parametrize("name", ["whole", "wrong"])
def test_a_base_is_audited_where_it_lies(
    session: JobSession,
    folders: dict[str, Path],
    tmp_path: Path,
    name: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("broker.jobs.plan.UNIT_WEIGHT_MAX", 700)
    url = in_store(folders[name], tmp_path / "store")
    report = run_audit(AuditRequest(url, Level.DEEP), SparkEngine(session.master, session))
    assert (report["folder_kind"], report["folder"]) == ("base", f"{url}#{LSN:016x}-t")
    expected = run_audit(AuditRequest(str(folders[name]), Level.DEEP), InlineEngine(1))
    for line in (report, expected):
        del line["folder_kind"]
    told = json.dumps(same(expected)).replace(str(folders[name]), report["folder"])
    assert json.dumps(same(report)) == told


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four topics over three shards, and a shard in which nothing was ever stored."""
    path = tmp_path_factory.mktemp("sharded") / "data"
    write_pinned_folder(path, topics=4)
    shutil.copytree(path, path.parent / "one")
    asyncio.run(reshard_folder(LocalVfs(), str(path), SHARDS))
    shutil.rmtree(shard_folder(str(path), 0))
    write_shards(LocalVfs(), str(path), SHARDS)  # not all of them have served
    return path


def test_a_folder_of_several_shards_is_audited_on_spark_as_elsewhere(
    session: JobSession, sharded: Path, tmp_path: Path
) -> None:
    data = tmp_path / "data"
    shutil.copytree(sharded, data)
    for path in data.glob("shard-*/topics/*/ledgers/*.data"):
        content = bytearray(path.read_bytes())
        content[40] ^= 1
        path.write_bytes(content)
    request = AuditRequest(str(data), Level.DEEP)
    report = run_audit(request, SparkEngine(session.master, session))
    expected = run_audit(request, InlineEngine(1))
    assert json.dumps(same(report)) == json.dumps(same(expected))
    assert report["findings"] and report["unused_shards"] == [0]
    shards = {line["topic"]: shard_of(line["topic"], SHARDS) for line in report["topics"]}
    for finding in report["findings"]:
        assert finding["path"].startswith(shard_folder(str(data), shards[finding["topic"]]))


def test_tables_hold_what_all_shards_have(sharded: Path) -> None:
    """As they were when all topics lay in one folder."""
    for name in ("rows", "snapshots"):
        kept = [
            row
            for row in read_table(str(sharded.parent / "one"), name)
            if shard_of(row["topic"], SHARDS)  # nothing is left of the first shard
        ]
        assert rows_of(read_table(str(sharded), name)) == rows_of(kept)


def rows_of(rows: Rows) -> list[str]:
    return sorted(map(str, rows))


def read_table(path: str, name: str) -> Rows:
    """Read as Spark reads, without Spark."""
    reader = PostdateDataSource({"path": path, "table": name}).reader(StructType())
    return [row for part in reader.partitions() for batch in reader.read(part) for row in batch.to_pylist()]


def test_executors_use_the_code_that_was_sent(session: JobSession) -> None:
    if session.master == "local[2]":
        return  # tasks run where the driver's own code is

    def where(batches: Iterable[Any]) -> Iterator[Any]:
        import pyarrow as pa  # noqa: PLC0415

        import broker.jobs.units  # noqa: PLC0415

        for _ in batches:
            yield pa.RecordBatch.from_pydict({"path": [broker.jobs.units.__file__]})

    rows = session.spark.range(0, 2, 1, 2).mapInArrow(where, "path string").collect()
    assert rows
    assert all("postdate-broker.zip" in row["path"] for row in rows)


def test_a_job_that_dies_is_told_and_not_taken_for_clean(
    session: JobSession, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("broker.jobs.spark._task", lambda *_: lambda batches: iter(["no batch"]))
    report = run_audit(AuditRequest(str(folders["whole"])), SparkEngine(session.master, session))
    assert report["exit_code"] == 3
    assert {line["kind"] for line in report["findings"]} == {"not_checked"}
    assert {line["topic"] for line in report["findings"]} == {"orders", "mails", "empty"}


@pytest.mark.parametrize("is_base", [False, True])
def test_tables_hold_what_is_stored(folders: dict[str, Path], tmp_path: Path, is_base: bool) -> None:
    """Read as Spark reads them, without Spark."""
    path = in_store(folders["whole"], tmp_path / "store") if is_base else str(folders["whole"])

    check_tables(lambda name: read_table(path, name))
    with pytest.raises(ValueError, match="no table"):
        PostdateDataSource({"path": "x", "table": "payloads"}).schema()


@pytest.mark.deep
def test_spark_reads_what_is_stored(session: JobSession, folders: dict[str, Path]) -> None:
    if session.master.startswith("local-cluster"):
        return  # a standalone cluster shows more, and is tested
    check_tables(lambda name: spark_table(session, name, folders["whole"]))


def test_spark_reads_a_table(session: JobSession, folders: dict[str, Path]) -> None:
    if session.master.startswith("local-cluster"):
        return
    check_cursors(spark_table(session, "cursors", folders["whole"]))


def spark_table(session: JobSession, name: str, folder: Path) -> Rows:
    session.spark.dataSource.register(PostdateDataSource)
    found = session.spark.read.format("postdate").option("table", name).load(str(folder))
    return [row.asDict() for row in found.collect()]


def check_tables(table: Callable[[str], Rows]) -> None:
    rows = [row for row in table("rows") if row["topic"] == "orders"]
    assert len(rows) == ROWS * len(LEDGER_IDS)
    for row in rows:
        time = int(times_of(row["ledger_id"])[row["entry_id"]])
        is_cancelled = row["ledger_id"] == 2 and row["entry_id"] in (11, 12)
        is_moved = row["ledger_id"] == 2 and row["entry_id"] in (21, 22, 23)
        assert row["deliver_at_ms"] == (0 if is_cancelled else time + 3_600_000 * is_moved)
        assert (row["delayed"], row["cancelled"]) == (time != 0, is_cancelled)
        is_settled = row["entry_id"] and row["entry_id"] % SETTLED == 0
        assert row["live"] == (not is_settled and not is_cancelled)
    held = {(row["ledger_id"], row["entry_id"]): row["deliver_at_ms"] for row in table("snapshots")}
    for row in rows:
        if row["delayed"] and not row["cancelled"]:
            assert held.pop((row["ledger_id"], row["entry_id"])) == row["deliver_at_ms"]
    assert {ledger_id for ledger_id, _ in held} == {7}
    check_cursors(table("cursors"))


def check_cursors(rows: Rows) -> None:
    counts = Counter(row["subscription"] for row in rows)
    assert counts == dict.fromkeys(("billing", "audit"), len(range(SETTLED, ROWS, SETTLED)) * len(LEDGER_IDS))


# -- compaction ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def leased(tmp_path_factory: pytest.TempPathFactory) -> Leased:
    return lease_all(tmp_path_factory.mktemp("leased"))


@pytest.fixture(scope="module")
def rewritten(leased: Leased) -> dict[str, bytes]:
    """Return the files that the inline engine leaves in the folder of the lease."""
    folder = leased.copy("inline")
    results = run_all(InlineEngine(2), leased.units(folder))
    assert [each.error for each in results] == [""] * len(results)
    assert len(outputs_of(results).ledgers) == len(PINNED_IDS)
    return contents(folder)


def test_spark_writes_the_bytes_that_the_inline_engine_writes(
    session: JobSession, leased: Leased, rewritten: dict[str, bytes], tmp_path: Path
) -> None:
    folder = leased.copy(tmp_path.name)
    results = run_all(SparkEngine(session.master, session), leased.units(folder))
    assert [each.error for each in results] == [""] * len(results)
    assert [each.present_count for each in outputs_of(results).ledgers] == [
        each.present_count for each in outputs_of(run_all(InlineEngine(1), leased.units(folder))).ledgers
    ]
    assert contents(folder) == rewritten


def test_a_task_that_runs_twice_changes_nothing(
    session: JobSession, leased: Leased, rewritten: dict[str, bytes], tmp_path: Path
) -> None:
    folder = leased.copy(tmp_path.name)
    results = run_all(SparkEngine(session.master, session), leased.units(folder) * 3)
    assert {each.error for each in results} == {""}
    assert contents(folder) == rewritten


def test_topics_are_compacted_on_spark_and_the_audit_is_clean(session: JobSession, tmp_path: Path) -> None:
    write_pinned_folder(tmp_path / "data", topics=3)
    done = compact_offline(tmp_path / "data", SparkEngine(session.master, session))
    assert [each.error for each in done] == [""] * 3
    for each in done:
        assert each.committed is not None
        assert (len(each.committed.ledger_ids), each.committed.refused) == (len(PINNED_IDS), {})
        assert each.committed.bucket_swapped
    report = run_audit(AuditRequest(str(tmp_path / "data"), Level.DEEP), SparkEngine(session.master, session))
    assert (report["outcome"], report["findings"]) == ("clean", [])


@pytest.mark.packaging
def test_the_compact_command_runs_on_spark(tmp_path: Path) -> None:
    """Of a broker with several shards the engine is started for one after the other."""
    needs_java(tmp_path)
    write_pinned_folder(tmp_path / "data", topics=2)
    asyncio.run(reshard_folder(LocalVfs(), str(tmp_path / "data"), SHARDS))
    command = ["compact", "--offline", str(tmp_path / "data"), "--apply", "--master", "local[2]"]
    result = CliRunner().invoke(main, [*command, "--reclaim-mib", "0", "--live-ratio", "0.9"])
    assert result.exit_code == 0, result.output + repr(result.exception)
    assert "10 ledgers were rewritten, 0 refused; buckets of 2 topics were merged" in result.output
    assert "on spark local[2]" in result.output


# -- commands ----------------------------------------------------------------------------------------------------------


@pytest.mark.packaging
def test_the_command_runs_on_spark(tmp_path: Path) -> None:
    needs_java(tmp_path)
    write_folder(tmp_path / "data")
    command = ["audit", str(tmp_path / "data"), "--master", "local[2]", "--report", str(tmp_path / "report")]
    result = CliRunner().invoke(main, command)
    assert result.exit_code == 0, result.output + repr(result.exception)
    assert json.loads((tmp_path / "report/report.json").read_text())["engine"] == "spark local[2]"
