"""`postdate-broker audit`: what its options mean, what it prints, and how it ends."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass

import click

from broker.errors import Fenced, PostdateError
from broker.jobs.audit import PAGE, AuditRequest, AuditRunning, run_audit
from broker.jobs.engines import choose_engine
from broker.jobs.java import JavaMissing
from broker.jobs.metrics import push, write_textfile
from broker.jobs.progress import Progress
from broker.jobs.report import ALREADY_RUNNING, INCOMPLETE, encode_report
from broker.jobs.spark_session import SparkMissing
from broker.jobs.values import Level, TopicFinding
from broker.jobs.work import Line
from broker.settings import ConfigError

_PRINTED = 50


@dataclass(frozen=True, slots=True)
class AuditOptions:
    """As given on the command line."""

    folder: str
    engine: str
    master: str
    level: str
    sample: str
    topics: tuple[str, ...]
    report_dir: str | None
    textfile: str | None
    pushgateway: str | None
    output: str


def audit_command(options: AuditOptions) -> int:
    """Run it; returns the exit code."""
    try:
        sample = parse_sample(options.sample)
    except ValueError as error:
        return _fail(str(error), os.EX_USAGE)
    request = AuditRequest(options.folder, Level(options.level), options.topics, sample, options.report_dir)
    progress = Progress("audit")
    try:
        report = run_audit(request, choose_engine(options.engine, options.master), progress.tell)
    except ConfigError as error:
        return _fail(str(error), os.EX_USAGE)
    except (Fenced, AuditRunning) as error:
        return _fail(str(error), ALREADY_RUNNING)
    except (PostdateError, OSError, SparkMissing, JavaMissing) as error:
        return _fail(str(error), INCOMPLETE)
    finally:
        progress.end()
    if options.output == "json":
        sys.stdout.buffer.write(encode_report(report))
    else:
        _print(report, options)
    return _publish(report, options)


def parse_sample(text: str) -> float:
    """A part of everything: `5%`, or `0.05`. Raises ValueError."""
    try:
        part = float(text[:-1]) / 100 if text.endswith("%") else float(text)
    except ValueError:
        part = 0.0
    if not 0 < part <= 1:
        raise ValueError(f"--sample {text}: give a percentage above 0 and up to 100, such as 5%")
    return part


def _print(report: Line, options: AuditOptions) -> None:
    for line in report["findings"][:_PRINTED]:
        click.echo(f"{line['severity']}: {TopicFinding.from_line(line)}")
    if (hidden := report["finding_count"] - min(len(report["findings"]), _PRINTED)) > 0:
        click.echo(f"... and {hidden} more findings")
    for number in report["unused_shards"]:
        click.echo(f"shard {number}: nothing was ever stored here")
    totals = report["totals"]
    click.echo(
        f"{report['outcome']}: {totals['topics']} topics, {totals.get('ledgers', 0)} ledgers with "
        f"{totals.get('messages', 0)} messages, {totals.get('pending', 0)} pending, "
        f"{totals.get('index_entries', 0)} index entries, {report['finding_count']} findings; "
        f"{report['seconds']:.1f} s on {report['engine']} after {report['start_up_seconds']:.1f} s of start-up"
    )
    if options.report_dir:
        click.echo(f"report: {options.report_dir.rstrip('/')}/{PAGE}", err=True)


def _publish(report: Line, options: AuditOptions) -> int:
    """Metrics. That they could not be delivered is said, and makes a clean run an incomplete one."""
    code = int(report["exit_code"])
    if options.report_dir and report["findings_file"] is None:
        click.echo("findings.parquet was left out: pyarrow is not installed (pip install pyarrow)", err=True)
    try:
        if options.textfile:
            write_textfile(options.textfile, report)
        if options.pushgateway:
            push(options.pushgateway, report)
    except OSError as error:
        click.echo(f"the metrics could not be delivered: {error}", err=True)
        return code or INCOMPLETE
    return code


def _fail(message: str, code: int) -> int:
    click.echo(f"audit: {message}", err=True)
    return code
