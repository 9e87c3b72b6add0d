"""postdate-broker: serve a data directory, or look at one without a server."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import uuid
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import asdict, replace
from datetime import datetime, timedelta
from functools import partial, wraps
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import click
from click.core import ParameterSource

from broker.cluster.stores import is_store_url
from broker.config import SETTINGS, SHARDS_MAX, BrokerConfig, load_config
from broker.errors import NotFound, PostdateError
from broker.folder.shard_folders import prepare_folder, read_shards, shard_folder
from broker.observe.logs import configure_logging
from broker.observe.span_settings import make_no_spans, traced
from broker.runtime.imports import importing
from broker.runtime.vfs import LocalVfs
from broker.settings import ConfigError, show
from broker.storage.backup_marker import is_backup_name

if TYPE_CHECKING:
    from broker.cluster.base_manifest import Base
    from broker.cluster.base_store import BaseStore
    from broker.cluster.status import NodeStatus
    from broker.folder.shard_uploads import ShardUploads
    from broker.folder.uploaded_shards import ShardedBackup
    from postdate import Client
    from postdate.backups import Backup
    from postdate.commands.settings import Settings

T = TypeVar("T")

_DAY_MS = 86_400_000


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(package_name="postdate")
def main() -> None:
    """Postdate: a durable broker for messages that must not be delivered before their time."""


def _with_settings(command: Callable[..., Any]) -> Callable[..., Any]:
    for setting in reversed(SETTINGS):
        default = show(setting.spec.kind, setting.default) or "not set"
        text = f"{setting.spec.help} [{setting.variable}; default {default}]"
        command = click.option(setting.flag, setting.name, help=text, metavar=setting.spec.kind.value)(
            command
        )
    return command


@main.command()
@click.option("--config", "config_path", help="TOML file of settings.", metavar="file")
@_with_settings
def serve(config_path: str | None, **flags: str | None) -> None:
    """Run the broker until SIGTERM or SIGINT.

    SIGHUP rereads log_level, certificates, tokens, keys and access rules; other settings take effect at the next start.
    """
    # Before gRPC is imported: it would go on with its own work in what a supervisor forks for the process of a shard,
    # which then crashes now and then before it is one.
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
    given = {name: value for name, value in flags.items() if value is not None}
    read_config = partial(load_config, given, os.environ, config_path)

    async def run(config: BrokerConfig) -> int:
        from broker.runtime.notify import ServiceNotifier  # noqa: PLC0415

        notifier = ServiceNotifier(os.environ)
        if config.shards > 1:
            from broker.shards.supervisor import ShardSupervisor, shard_command  # noqa: PLC0415

            make_no_spans()  # before it forks
            command = shard_command(config, config_path, given, os.getpid())
            return await ShardSupervisor(config, command, notifier=notifier, read_config=read_config).run()
        prepare_folder(LocalVfs(), config.data_dir, in_cluster=bool(config.cluster_store))
        if config.cluster_store:
            from broker.node.node import Node, wait_cluster  # noqa: PLC0415 - a broker alone needs none of it

            if (cluster := await wait_cluster(config, notifier)) is None:
                return 0
            if cluster.shards == 1:
                return await Node(config, cluster, notifier=notifier, read_config=read_config).run()
            from broker.shards.node_supervisor import NodeSupervisor  # noqa: PLC0415
            from broker.shards.supervisor import shard_command  # noqa: PLC0415

            make_no_spans()
            command = shard_command(config, config_path, given, os.getpid())
            node = NodeSupervisor(config, cluster, command, notifier=notifier, read_config=read_config)
            return await node.run()
        from broker.server import Server  # noqa: PLC0415

        return await Server(config, notifier=notifier, read_config=read_config).run()

    _serve(read_config, run)


@main.command("serve-shard", hidden=True)
@click.option("--number", type=int, required=True)
@click.option("--supervisor", type=int, required=True)
@click.option("--config", "config_path")
@_with_settings
def serve_shard(number: int, supervisor: int, config_path: str | None, **flags: str | None) -> None:
    """Run one shard of a broker, for the supervisor that `serve` is with more than one shard."""
    given = {name: value for name, value in flags.items() if value is not None}
    read_config = partial(load_config, given, os.environ, config_path)

    async def run(config: BrokerConfig) -> int:
        if config.cluster_store:
            from broker.shards.member_process import serve_member  # noqa: PLC0415

            return await serve_member(config, read_config, number, supervisor)
        from broker.shards import shard_process  # noqa: PLC0415

        return await shard_process.serve_shard(config, read_config, number, supervisor)

    _serve(read_config, run, shard=number)


def _serve(
    read_config: Callable[[], BrokerConfig],
    run: Callable[[BrokerConfig], Coroutine[Any, Any, int]],
    *,
    shard: int | None = None,
) -> NoReturn:
    """Run what serves, and end this process with its status. `shard`: number that each line of the log carries."""
    try:
        config = read_config()
        configure_logging(config.log_format, config.log_level, shard=shard)
        with traced(os.environ, shard=shard):
            status = _run(run(config))
    except (ConfigError, PostdateError) as error:
        raise click.ClickException(str(error)) from error
    except OSError as error:
        raise click.ClickException(f"The broker cannot use its files: {error}") from error
    sys.exit(status)


def _run(serving: Coroutine[Any, Any, int]) -> int:
    # gRPC's own messages about a port that is taken come on top of ours; whoever wants them sets the variable.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    with importing():
        import uvloop  # noqa: PLC0415 - only a serving broker needs it, and gRPC's server beside it

        import broker.server  # noqa: F401, PLC0415 - what is about to run needs it
        from broker.rpc.event_loop import GrpcLoop  # noqa: PLC0415 - with uvloop
        from broker.runtime.process_upkeep import with_upkeep  # noqa: PLC0415 - with what it looks after

    return int(uvloop.run(with_upkeep(serving), loop_factory=GrpcLoop))


@main.command()
@click.argument("path")
def dump(path: str) -> None:
    """Print a file of a data directory as JSON lines. If it is damaged, the last line is "error"; exit code 1."""
    from broker.storage.dump import dump_file  # noqa: PLC0415

    error = ""
    try:
        for line in dump_file(LocalVfs(), path):
            click.echo(json.dumps(line))
            error = line["message"] if line["line"] == "error" else ""
    except BrokenPipeError:
        raise  # whoever reads has seen enough
    except OSError as unreadable:
        raise click.ClickException(f"The file cannot be read: {unreadable}") from unreadable
    if error:
        raise click.ClickException(error)


@main.command()
@click.argument("data_dir", default="./data")
@click.option("--output", type=click.Choice(["text", "json"]), default="text", show_default=True)
def verify(data_dir: str, output: str) -> None:
    """Check every file of a stopped broker's data directory, or of a backup: manifests, journal, ledgers, cursors.

    DATA_DIR may also be the URL of a backup in an object store, as for `audit`. If the broker has several shards, all
    of them are checked, and each line of the report begins with the shard.

    Exit code 0: no problems; 2: problems found; 1: the check could not be made.
    """
    from broker.jobs.verify import verify_folder, verify_store  # noqa: PLC0415

    try:
        report = verify_store(data_dir) if is_store_url(data_dir) else verify_folder(LocalVfs(), data_dir)
    except ConfigError as error:
        raise click.UsageError(str(error)) from error
    except PostdateError as error:
        raise click.ClickException(error.message) from error
    except OSError as error:
        raise click.ClickException(f"The data directory cannot be read: {error}") from error
    if output == "json":
        click.echo(json.dumps(asdict(report)))
    else:
        for problem in report.problems:
            click.echo(f"problem: {problem}")
        for note in report.notes:
            click.echo(f"note: {note}")
        click.echo(report.summary)
    sys.exit(2 if report.problems else 0)


class _WrongOptions(click.UsageError):
    exit_code = os.EX_USAGE


class _AuditCommand(click.Command):
    """A wrong option must not end as findings do, with 2."""

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        try:
            return super().make_context(info_name, args, parent, **extra)
        except click.UsageError as error:
            raise _WrongOptions(error.message, error.ctx) from error


@main.command(cls=_AuditCommand)
@click.argument("folder")
@click.option("--engine", type=click.Choice(["spark", "inline"]), default="spark", show_default=True)
@click.option(
    "--master", help="Spark master URL, such as spark://host:7077.", default="local[*]", show_default=True
)
@click.option(
    "--level", type=click.Choice(["quick", "standard", "deep"]), default="standard", show_default=True
)
@click.option(
    "--sample",
    help="Share of the stored messages read with --level deep, such as 5%.",
    default="100%",
    show_default=True,
    metavar="PERCENT",
)
@click.option("--topic", "topics", multiple=True, help="Topic to work on; may be repeated.  [default: all]")
@click.option(
    "--report",
    "report_dir",
    metavar="DIR",
    help="Directory of report.json, findings.parquet and report.html.",
)
@click.option(
    "--textfile", metavar="FILE", help="Metrics file for the textfile collector of the node exporter."
)
@click.option("--pushgateway", metavar="URL", help="URL of a Prometheus Pushgateway for the metrics.")
@click.option("--output", type=click.Choice(["text", "json"]), default="text", show_default=True)
def audit(**options: Any) -> None:
    """Check the delayed index against the log, in a backup or in the data directory of a stopped broker.

    FOLDER may also be the URL of a backup in an object store: s3://bucket/prefix#NAME, or s3://bucket/prefix for the
    newest one. It is read in place. If the broker has several shards, one report covers all of them, and each finding
    names its shard.

    \b
    Exit code 0: clean; 1: warnings only; 2: errors found; 3: not everything could be checked;
    4: a broker or another job uses the folder; 64: wrong options. Progress is written to standard error.
    """
    from broker.jobs.command import AuditOptions, audit_command  # noqa: PLC0415 - only this command needs it

    sys.exit(audit_command(AuditOptions(**options)))


_CONNECTION = {
    "address": ("HOST:PORT", "Address of the gRPC API of the broker."),
    "tls": ("", "Use TLS and trust the CA certificates of the system."),
    "tls_ca": ("FILE", "TLS, with this CA bundle to verify the certificate of the broker."),
    "tls_cert": ("FILE", "Client certificate; requires --tls-key."),
    "tls_key": ("FILE", "Private key of --tls-cert."),
    "tls_server_name": ("NAME", "Name in the server certificate, if it is not the host of the address."),
    "token_file": ("FILE", "File of the bearer token; or set POSTDATE_TOKEN."),
    "allow_plaintext_token": ("", "Allow the token to be sent without TLS."),
}
"""Options that say how to reach a running broker: those of the `postdate` command, with the same variables."""


def _with_connection(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command the options of `_CONNECTION`; it takes them as one argument, `connection`."""

    @wraps(command)
    def run(**given: Any) -> Any:
        from postdate.commands.settings import EXIT_USAGE, CommandFailed, Settings  # noqa: PLC0415 - brings gRPC

        source_of = click.get_current_context().get_parameter_source
        by_variable = {
            name: "environment" for name in _CONNECTION if source_of(name) is ParameterSource.ENVIRONMENT
        }
        values = {name: given.pop(name) for name in _CONNECTION}
        connection = Settings(**values, given=by_variable, uses_contexts=False)
        try:
            return command(connection=connection, **given)
        except CommandFailed as error:
            kind = click.UsageError if error.code == EXIT_USAGE else click.ClickException
            raise kind(error.message) from error

    for name, (metavar, text) in reversed(_CONNECTION.items()):
        click.option(
            "--" + name.replace("_", "-"),
            name,
            metavar=metavar or None,
            is_flag=not metavar,
            default="127.0.0.1:7650" if name == "address" else None,
            show_default=name == "address",
            envvar=f"POSTDATE_{name.upper()}",
            show_envvar=True,
            help=text,
        )(run)
    return run


@main.command()
@_with_connection
@click.option(
    "--offline",
    metavar="FOLDER",
    help="Compact this data directory of a stopped broker, without a connection.",
)
@click.option(
    "--data-dir",
    metavar="DIR",
    help="Path at which this machine sees the data directory of the running broker.  [default: as the broker names it]",
)
@click.option("--apply", is_flag=True, help="Carry out the plan. Without this option nothing is changed.")
@click.option("--engine", type=click.Choice(["spark", "inline"]), default="spark", show_default=True)
@click.option(
    "--master", help="Spark master URL, such as spark://host:7077.", default="local[*]", show_default=True
)
@click.option("--topic", "topics", multiple=True, help="Topic to work on; may be repeated.  [default: all]")
@click.option(
    "--live-ratio",
    type=click.FloatRange(0, 1),
    default=0.2,
    show_default=True,
    help="Maximum share of live data in a ledger to rewrite.",
)
@click.option(
    "--reclaim-mib",
    type=click.IntRange(0),
    default=1,
    show_default=True,
    help="Minimum space freed by a ledger to rewrite, in MiB.",
)
@click.option(
    "--ledgers-max",
    type=click.IntRange(1, 10_000),
    default=1_000,
    show_default=True,
    help="Maximum number of ledgers rewritten per topic and run.",
)
@click.option(
    "--read-gib",
    type=click.IntRange(1),
    default=100,
    show_default=True,
    help="Maximum amount of data read per run, in GiB.",
)
def compact(connection: Settings, **options: Any) -> None:
    """Free disk space: rewrite ledgers that contain few live messages, and merge small buckets.

    \b
    Exit code 0: done, or nothing to do; 1: partly done, some parts were refused or failed; 3: nothing could be done;
    4: a broker uses the folder, or another compaction is under way.
    """
    # Before gRPC is imported, or it writes a warning when Spark starts its JVM.
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
    from broker.jobs.compact_command import CompactOptions, compact_command  # noqa: PLC0415
    from broker.rpc.compaction_client import RemoteDesk  # noqa: PLC0415

    sys.exit(
        compact_command(CompactOptions(connect=partial(RemoteDesk, connection.credentials()), **options))
    )


@main.group()
def backup() -> None:
    """Make, list and delete backups, on the machine of a running broker or in an object store.

    \b
    STORE is the URL of an object store: s3://bucket/prefix, gs://bucket/prefix, az://container/prefix,
    file:///folder. For servers compatible with S3: s3://bucket/prefix?endpoint=http://host:9000.
    Credentials are read from the environment variables that the tools of the provider use.
    """


@backup.command("create")
@_with_connection
@click.option(
    "--keep",
    type=click.IntRange(0),
    default=0,
    help="Maximum number of backups of this broker in STORE; older ones are deleted.  [default: all]",
)
@click.option(
    "--keep-days",
    type=click.IntRange(0),
    default=0,
    help="Maximum age of the backups of this broker in STORE; older ones are deleted.  [default: any]",
)
@click.argument("store", default="")
@click.argument("label", default="")
def create_backup(connection: Settings, store: str, label: str, keep: int, keep_days: int) -> None:
    """Make a backup and print its folder; LABEL becomes a part of its name.

    With STORE, upload the data that STORE does not contain yet, and print the URL of the backup. After the upload the
    folder on this machine is deleted; if the upload fails, it is kept. The two newest backups in STORE are always kept.

    A backup of a broker with several shards is one backup. It is listed and can be restored once the parts of all
    shards are stored.
    """
    if not is_store_url(store):
        if label or keep or keep_days:
            raise click.UsageError("STORE is missing: the URL of an object store, such as s3://bucket/prefix")
        store, label = "", store
    bases = _open_bases(store) if store else None
    if bases is not None:
        _in_store(bases.check)
    made = _with_client(connection, lambda client: client.backups.create(label))
    seconds = made.duration.total_seconds()
    click.echo(
        f"{made.files} files, {made.bytes} bytes, {made.copied_bytes} of them copied, in {seconds:.1f} s",
        err=True,
    )
    if bases is None:
        click.echo(made.path)
        return
    _upload(bases, store, made.path)
    _with_client(connection, lambda client: client.backups.delete(made.name))
    if keep or keep_days:
        uploads, max_age_ms = _open_uploads(store), keep_days * _DAY_MS
        names = _in_store(lambda: uploads.prune(made.broker_id, keep, max_age_ms))
        names += _in_store(lambda: bases.prune(made.broker_id, keep, max_age_ms))
        click.echo(f"{len(names)} older backups were deleted", err=True)


@backup.command("upload")
@click.argument("store")
@click.argument("folder")
def upload_folder(store: str, folder: str) -> None:
    """Upload FOLDER, an existing backup, and print the URL of the backup in STORE. No broker has to run."""
    _upload(_open_bases(store), store, folder)


@backup.command("list")
@_with_connection
@click.option("--output", type=click.Choice(["text", "json"]), default="text", show_default=True)
@click.option(
    "--limit", type=click.IntRange(1), help="Maximum number of backups listed, oldest first.  [default: all]"
)
@click.argument("store", default="")
def list_backups(connection: Settings, output: str, limit: int | None, store: str) -> None:
    """List backups, oldest first: those of a running broker, or all in STORE."""
    if store:
        _list_bases(store, output, limit)
        return

    async def listed(client: Client) -> list[Backup]:
        return [stored async for stored in client.backups.list(limit=limit)]

    listing = _with_client(connection, listed)
    if output == "json":
        click.echo(json.dumps([asdict(stored) for stored in listing], default=str))
        return
    for item in listing:
        click.echo(f"{item.name}  {_topics(item.topics)}  {item.bytes} bytes  {item.path}")


def _list_bases(store: str, output: str, limit: int | None) -> None:
    stored = _in_store(_open_bases(store).bases)[:limit]
    sharded = _in_store(_open_uploads(store).backups)[:limit]
    if output == "json":
        lines = [
            {**asdict(item.base), "stored_time_ms": item.modified_ms, "url": f"{store}#{item.base.name}"}
            for item in stored
        ]
        lines += [{**asdict(backup), "url": f"{store}#{backup.name}"} for backup in sharded]
        click.echo(json.dumps(lines))
        return
    for backup in sharded:
        uploaded = f"{backup.bytes} bytes, {backup.uploaded_bytes} of them uploaded"
        click.echo(
            f"{backup.name}  {_topics(backup.topics)} in {len(backup.bases)} shards  {uploaded}  {store}#{backup.name}"
        )
    for base in (item.base for item in stored):
        uploaded = f"{base.bytes} bytes, {base.uploaded_bytes} of them uploaded"
        click.echo(f"{base.name}  {_topics(base.topics)}  {uploaded}  {store}#{base.name}")


@backup.command("delete")
@_with_connection
@click.argument("name")
def delete_backup(connection: Settings, name: str) -> None:
    """Delete backup NAME; for a backup in an object store, NAME is its URL, as `backup list STORE` prints it."""
    if is_store_url(name):
        store, _, base_name = name.partition("#")
        if not base_name:
            raise click.UsageError(f"{store} is a store: name the backup, as in {store}#NAME")
        place = _open_uploads(store) if is_backup_name(base_name) else _open_bases(store)
        _in_store(lambda: place.remove(base_name))
        return
    _with_client(connection, lambda client: client.backups.delete(name))


def _topics(count: int) -> str:
    return f"{count} topic" if count == 1 else f"{count} topics"


def _with_client(connection: Settings, call: Callable[[Client], Coroutine[Any, Any, T]]) -> T:
    import postdate  # noqa: PLC0415
    from postdate.commands.settings import describe  # noqa: PLC0415 - brings gRPC

    async def work() -> T:
        async with connection.client() as client:
            return await call(client)

    try:
        return asyncio.run(work())
    except postdate.PostdateError as error:
        raise click.ClickException(describe(error)) from error


def _open_bases(store: str) -> BaseStore:
    from broker.cluster.base_store import ATTEMPT, BaseStore  # noqa: PLC0415
    from broker.cluster.stores import open_store  # noqa: PLC0415
    from broker.runtime.clock import SystemClock  # noqa: PLC0415

    if store.startswith("memory:"):  # gone with this process, and the folder of the backup with it
        raise click.UsageError("memory:// is for tests only: it stores nothing")
    try:
        return BaseStore(open_store(store, ATTEMPT), SystemClock())
    except ConfigError as error:
        raise click.UsageError(str(error)) from error


def _open_uploads(store: str) -> ShardUploads:
    from broker.cluster.base_store import ATTEMPT  # noqa: PLC0415
    from broker.cluster.stores import open_store  # noqa: PLC0415
    from broker.folder.shard_uploads import ShardUploads  # noqa: PLC0415
    from broker.runtime.clock import SystemClock  # noqa: PLC0415

    try:
        return ShardUploads(open_store(store, ATTEMPT), SystemClock())
    except ConfigError as error:
        raise click.UsageError(str(error)) from error


def _in_store(call: Callable[[], Coroutine[Any, Any, T]]) -> T:
    try:
        return asyncio.run(call())
    except PostdateError as error:
        raise click.ClickException(error.message) from error
    except OSError as error:
        raise click.ClickException(str(error)) from error


def _upload(bases: BaseStore, store: str, folder: str) -> None:
    from broker.folder.backup import read_marker  # noqa: PLC0415
    from broker.folder.bases import upload_backup  # noqa: PLC0415

    async def work() -> Base | ShardedBackup:
        vfs = LocalVfs()
        if not vfs.exists(folder):
            raise NotFound(
                f"{folder} does not exist on this machine: run this command on the broker's machine"
            )
        length = max(read_marker(vfs, folder.rstrip("/")).bytes, 1)
        with click.progressbar(length=length, label="Uploading", file=sys.stderr) as bar:
            if read_shards(vfs, folder.rstrip("/")):
                return await _open_uploads(store).upload(vfs, folder, tell=bar.update)
            return await upload_backup(bases, vfs, folder, tell=bar.update)

    stored = _in_store(work)
    click.echo(f"{stored.bytes} bytes, {stored.uploaded_bytes} of them uploaded", err=True)
    click.echo(f"{store}#{stored.name}")


@main.command()
@click.argument("backup", metavar="BACKUP")
@click.option(
    "--data-dir",
    required=True,
    metavar="FOLDER",
    help="Data directory to make: an empty folder, or one that does not exist.",
)
@click.option(
    "--to",
    "to",
    metavar="TIME",
    help="Restore a cluster to this time, such as 2026-12-24T18:00:00Z, or milliseconds since 1970.",
)
@click.option(
    "--shard", type=click.IntRange(0), default=0, show_default=True, help="Shard of the cluster, with --to."
)
def restore(backup: str, data_dir: str, to: str | None, shard: int) -> None:
    """Make a data directory from a backup. The backup is not changed, and no broker has to run.

    BACKUP is the folder of a backup, its URL in an object store, such as s3://bucket/prefix#NAME, or the URL of the
    store, such as s3://bucket/prefix, for the newest backup in it.

    With --to, BACKUP is the URL of a cluster. The newest of its bases before TIME is restored, and then its journal
    up to TIME. The result is for a broker without a cluster. Stores without a cluster contain no journal, only backups.

    A backup of several shards is restored as a whole, for the same number of shards.

    Messages acknowledged after the backup are delivered again. Messages produced after the backup are missing.
    """
    try:
        if to is not None:
            click.echo(_restore_point(backup, data_dir, _time_ms(to), shard))
            return
        held = (_restore_base if is_store_url(backup) else _restore_folder)(backup, data_dir)
    except PostdateError as error:
        raise click.ClickException(error.message) from error
    except OSError as error:
        raise click.ClickException(f"The backup cannot be restored: {error}") from error
    click.echo(f"{data_dir} contains {held}")


@main.command()
@click.argument("data_dir")
@click.option("--shards", type=click.IntRange(1, SHARDS_MAX), required=True, help="New number of shards.")
@click.option(
    "--to",
    metavar="FOLDER",
    help="Write the result to this new or empty folder and do not change DATA_DIR.  [default: DATA_DIR]",
)
def reshard(data_dir: str, shards: int, to: str | None) -> None:
    """Distribute the topics of a stopped broker's data directory over another number of shards.

    Files that never change are hard-linked; only the last ledger of each topic and small files are copied. With --to on
    another file system, all files are copied. A crash leaves the directory with the old or the new number of shards.

    With --to there are two data directories afterwards. Do not start a broker on each of them: every message would be
    delivered twice.
    """
    from broker.jobs.reshard import reshard_folder  # noqa: PLC0415

    try:
        click.echo(asyncio.run(reshard_folder(LocalVfs(), data_dir, shards, to)))
    except PostdateError as error:
        raise click.ClickException(error.message) from error
    except OSError as error:
        raise click.ClickException(f"The folder cannot be resharded: {error}") from error


def _restore_folder(folder: str, data_dir: str) -> str:
    from broker.folder.backup import read_marker  # noqa: PLC0415
    from broker.folder.restore import NewShardFolders  # noqa: PLC0415

    vfs = LocalVfs()
    shards = read_shards(vfs, folder)
    if not shards:
        topics, lsn = _restore_one(folder, data_dir)
        return f"{_topics(topics)} as of lsn {lsn}: start a broker on it"
    for number in range(shards):  # before anything is made
        read_marker(vfs, shard_folder(folder, number))
    new = NewShardFolders(vfs, data_dir, shards)
    with new.being_made():
        parts = [
            _restore_one(shard_folder(folder, number), made)[0] for number, made in enumerate(new.folders)
        ]
        new.finish()
    return f"{_topics(sum(parts))} in {shards} shards: start a broker on it with --shards {shards}"


def _restore_one(folder: str, data_dir: str) -> tuple[int, int]:
    from broker.folder.restore import Restore  # noqa: PLC0415

    work = Restore(LocalVfs(), folder, data_dir, str(uuid.uuid4()), 0)
    with _restore_bar(work.backup.bytes) as bar:
        for _ in work.steps():
            bar.update(work.restored_bytes - bar.pos)
    return work.backup.topics, work.backup.lsn


def _restore_base(url: str, data_dir: str) -> str:
    from broker.cluster.base_plan import choose_base  # noqa: PLC0415
    from broker.cluster.base_store import ATTEMPT  # noqa: PLC0415
    from broker.cluster.stores import open_store  # noqa: PLC0415
    from broker.folder.bases import restore_base  # noqa: PLC0415
    from broker.folder.point_in_time import refuse_cluster  # noqa: PLC0415

    store, _, name = url.partition("#")
    bases, uploads = _open_bases(store), _open_uploads(store)

    async def restore_shards(backup: ShardedBackup) -> None:
        ids = [str(uuid.uuid4()) for _ in backup.bases]
        with _restore_bar(backup.bytes) as bar:
            await uploads.restore(backup, LocalVfs(), data_dir, ids, tell=bar.update)

    if (backup := asyncio.run(uploads.choose(name))) is not None:
        asyncio.run(restore_shards(backup))
        shards = len(backup.bases)
        return f"{_topics(backup.topics)} in {shards} shards: start a broker on it with --shards {shards}"

    async def work() -> Base:
        stored = await bases.bases()
        if not stored:
            await refuse_cluster(open_store(store, ATTEMPT), store)
        base = choose_base(stored, name, store)
        with _restore_bar(base.bytes) as bar:
            await restore_base(bases, base, LocalVfs(), data_dir, str(uuid.uuid4()), tell=bar.update)
        return base

    base = asyncio.run(work())
    return f"{_topics(base.topics)} as of lsn {base.lsn}: start a broker on it"


def _time_ms(text: str) -> int:
    from postdate.commands.values import parse_time  # noqa: PLC0415

    if text.isdecimal():
        return int(text)
    try:
        return int(parse_time(text).timestamp() * 1000)
    except ValueError as error:
        raise click.UsageError(f"--to: {error}") from error


def _restore_point(url: str, data_dir: str, to_ms: int, shard: int) -> str:
    from broker.cluster.base_store import ATTEMPT  # noqa: PLC0415
    from broker.cluster.stores import open_store  # noqa: PLC0415
    from broker.folder.point_in_time import restore_point  # noqa: PLC0415

    if not is_store_url(url):
        raise click.UsageError(f"--to requires the URL of a cluster: {url} is a folder, not an object store")
    if "#" in url:
        raise click.UsageError("--to selects the base: omit the part after #")
    try:
        store = open_store(url, ATTEMPT)
    except ConfigError as error:
        raise click.UsageError(str(error)) from error
    work = restore_point(store, shard, to_ms, LocalVfs(), data_dir, str(uuid.uuid4()), url=url)
    return f"{data_dir} contains {asyncio.run(work)}: start a broker on it"


def _restore_bar(byte_count: int) -> Any:
    return click.progressbar(length=max(byte_count, 1), label="Restoring", file=sys.stderr)


_MOVE_SECONDS = 60.0
_MOVE_LOOK_SECONDS = 0.2


@main.group()
def cluster() -> None:
    """Create and show a cluster in an object store, and move its shards. Experimental: see docs/clusters.md."""


@cluster.command("check-store")
@click.argument("urls", metavar="URL...", nargs=-1, required=True)
def check_store(urls: tuple[str, ...]) -> None:
    """Check that an object store creates objects atomically. Several URLs name the endpoints of one store.

    \b
    postdate-broker cluster check-store 's3://bucket/prefix?endpoint=http://store:9000'

    The check sends about 13,000 create requests below probe/, with many clients for each name, breaks connections, and
    removes the objects. Exit code 0: passed; 2: failed; 1: the store could not be used.
    """
    from broker.cluster.command import check_store_command  # noqa: PLC0415

    sys.exit(check_store_command(urls))


@cluster.command("create")
@click.argument("url")
@click.option(
    "--shards",
    type=click.IntRange(1, SHARDS_MAX),
    default=1,
    show_default=True,
    help="Number of shards; it cannot be changed later.",
)
@click.option(
    "--owner-lease-ms",
    type=click.IntRange(1_000, 60_000),
    default=4_000,
    show_default=True,
    help="Time after which a standby takes over a shard whose owner has stored nothing.",
)
@click.option("--if-missing", is_flag=True, help="Succeed if the cluster exists already.")
def create_cluster(url: str, shards: int, owner_lease_ms: int, if_missing: bool) -> None:
    """Check the object store at URL, and create a cluster in it.

    Exit code 0: done; 2: the store failed the check; 1: the cluster could not be created.
    """
    from broker.cluster.command import create_command  # noqa: PLC0415

    sys.exit(create_command(url, shards=shards, owner_lease_ms=owner_lease_ms, if_missing=if_missing))


@cluster.command("status")
@click.argument("url", required=False)
@_with_connection
def cluster_status(connection: Settings, url: str | None) -> None:
    """Show the owner of each shard and the lag of its standbys. --address names one node or several: a,b,c.

    With URL, the command reads the object store of the cluster and contacts no node.

    Exit code 0: every shard has an owner, and all nodes answer; 1: otherwise.
    """
    import time  # noqa: PLC0415

    if url is not None:
        from broker.cluster.command import store_status_command  # noqa: PLC0415

        sys.exit(store_status_command(url))

    from broker.cluster.status import is_owned, render_status  # noqa: PLC0415

    cluster_id, nodes = asyncio.run(_ask_nodes(connection))
    for line in render_status(cluster_id, nodes, time.time_ns() // 1_000_000):
        click.echo(line)
    is_whole = is_owned(nodes) and not any(node.problem for node in nodes)
    sys.exit(0 if is_whole or not cluster_id else 1)


@cluster.command("move")
@_with_connection
@click.option("--shard", type=click.IntRange(0), default=0, show_default=True, help="Number of the shard.")
@click.option("--to", metavar="NODE", required=True, help="Name of the new owner.")
def move_shard(connection: Settings, shard: int, to: str) -> None:
    """Hand a shard over to one of its standbys. --address names one node or several: a,b,c.

    The process of the former owner ends with status 1 and must be restarted; it then becomes a standby.

    Exit code 0: the node owns the shard; 1: refused, or the node does not own the shard after a minute.
    """
    asyncio.run(_move_shard(connection, shard, to))
    click.echo(f"{to} owns the shard")


async def _move_shard(connection: Settings, shard: int, to: str) -> None:
    import postdate  # noqa: PLC0415

    try:
        async with connection.client() as client:
            addresses = {node.name: node.address for node in (await client.cluster()).nodes}
            before = await _ask_shard(connection, to, addresses.get(to), shard)
            await client.move_shard(to, shard=shard)
    except postdate.PostdateError as error:
        raise click.ClickException(str(error)) from error
    try:
        async with asyncio.timeout(_MOVE_SECONDS):
            while True:
                now = await _ask_shard(connection, to, addresses[to], shard)
                if now is not None and now.is_owner:
                    return
                # Where a store or disk is slow for a whole lease, whoever is first in rank comes before.
                if now is not None and before is not None and now.owner and now.epoch > before.epoch:
                    raise click.ClickException(
                        f"{now.owner} took the shard over before {to} could: repeat the command if {to} is still to "
                        "own it"
                    )
                await asyncio.sleep(_MOVE_LOOK_SECONDS)
    except TimeoutError:
        raise click.ClickException(
            f"The hand-over has begun, but {to} does not own the shard yet: check with `cluster status`"
        ) from None


async def _ask_shard(connection: Settings, name: str, address: str | None, shard: int) -> NodeStatus | None:
    """Return what a node says of one shard; None if it does not answer."""
    if address is None:
        return None
    return next((told for told in await _ask_node(connection, name, address) if told.shard == shard), None)


async def _ask_nodes(connection: Settings) -> tuple[str, list[NodeStatus]]:
    """Ask the node at the address for all nodes, and each of them for itself."""
    import postdate  # noqa: PLC0415

    try:
        async with connection.client() as client:
            asked = await client.cluster()
    except postdate.PostdateError as error:
        raise click.ClickException(str(error)) from error
    numbers = [shard.number for shard in asked.shards]
    nodes = (_ask_node(connection, node.name, node.address, numbers) for node in asked.nodes)
    return asked.cluster_id, [told for node in await asyncio.gather(*nodes) for told in node]


async def _ask_node(
    connection: Settings, name: str, address: str, numbers: Sequence[int] = ()
) -> list[NodeStatus]:
    """Return what a node says of each shard. `numbers`: of those that it says nothing of if it does not answer."""
    import postdate  # noqa: PLC0415
    from broker.cluster.status import NodeStatus  # noqa: PLC0415

    try:
        async with replace(connection, address=address, retry_for=timedelta(0)).client() as client:
            shards = (await client.cluster()).shards
    except postdate.PostdateError as error:
        problem = " ".join(error.message.split())
        return [NodeStatus(name, address, number, problem=problem) for number in numbers]
    return [
        NodeStatus(
            name,
            address,
            shard.number,
            epoch=shard.epoch,
            owner=shard.owner,
            applied_lsn=shard.applied_lsn,
            applied_time_ms=_milliseconds(shard.applied_time),
            base_lsn=shard.base_lsn,
            base_time_ms=_milliseconds(shard.base_time),
        )
        for shard in shards
    ]


def _milliseconds(time: datetime | None) -> int:
    return round(time.timestamp() * 1000) if time is not None else 0


@main.group()
def token() -> None:
    """Create static tokens for a broker's tokens_file."""


@token.command("create")
@click.argument("principal")
def create_token(principal: str) -> None:
    """Create a token for PRINCIPAL. The token is written to standard output, its lines for tokens_file to stderr.

    \b
    umask 077
    postdate-broker token create billing >billing.token 2>>tokens.toml
    """
    import hashlib  # noqa: PLC0415
    import secrets  # noqa: PLC0415

    from broker.rpc.access_identity import parse_tokens  # noqa: PLC0415

    secret = secrets.token_urlsafe(32)
    digest = hashlib.sha256(secret.encode()).hexdigest()
    lines = f'[[token]]\nprincipal = {json.dumps(principal)}\nsha256 = "{digest}"\n'
    try:
        parse_tokens(lines)
    except ConfigError as error:
        raise click.UsageError(f"{principal!r} cannot name a principal: {error}") from error
    click.echo(lines, err=True)
    click.echo(secret)


if __name__ == "__main__":
    main()
