"""postdate-broker: serve a data directory, or look at one without a server."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
import uuid
from collections.abc import Callable, Coroutine
from dataclasses import asdict
from functools import partial, wraps
from typing import TYPE_CHECKING, Any, TypeVar

import click

from broker.config import SETTINGS, BrokerConfig, load_config
from broker.errors import Corrupt, Fenced, PostdateError
from broker.observe.logs import configure_logging
from broker.runtime.vfs import LocalVfs
from broker.settings import ConfigError, SettingKind

if TYPE_CHECKING:
    from postdate.backups import Backup, Backups
    from postdate.commands.settings import Settings

T = TypeVar("T")


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(package_name="postdate")
def main() -> None:
    """Postdate: a durable broker for messages that must not be delivered before their time."""


def _with_settings(command: Callable[..., Any]) -> Callable[..., Any]:
    for setting in reversed(SETTINGS):
        if setting.spec.kind is SettingKind.SECRET:
            continue  # every user of the machine can read command lines
        default = setting.default if setting.default != "" else "not set"
        text = f"{setting.spec.help} [{setting.variable}; default {default}]"
        command = click.option(setting.flag, setting.name, help=text, metavar=setting.spec.kind.value)(
            command
        )
    return command


@main.command()
@click.option("--config", "config_path", help="TOML file of settings.", metavar="file")
@_with_settings
def serve(config_path: str | None, **flags: str | None) -> None:
    """Run the broker until SIGTERM or SIGINT; SIGHUP reloads the settings that can change at run time."""
    given = {name: value for name, value in flags.items() if value is not None}
    read_config = partial(load_config, given, os.environ, config_path)
    try:
        config = read_config()
        configure_logging(config.log_format, config.log_level)
        status = _run(config, read_config)
    except (ConfigError, Fenced, Corrupt) as error:
        raise click.ClickException(str(error)) from error
    except OSError as error:
        raise click.ClickException(f"The broker cannot use its files: {error}") from error
    sys.exit(status)


def _run(config: BrokerConfig, read_config: Callable[[], BrokerConfig]) -> int:
    # gRPC's own messages about a port that is taken come on top of ours; whoever wants them sets the variable.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    import uvloop  # noqa: PLC0415 - only a serving broker needs it, and gRPC's server beside it

    from broker.runtime.notify import ServiceNotifier  # noqa: PLC0415
    from broker.server import Server  # noqa: PLC0415

    async def serve_until_stopped() -> int:
        notifier = ServiceNotifier(os.environ)
        return await Server(config, notifier=notifier, read_config=read_config).run()

    # Before any thread begins, for all of them: a file or network thread that wakes must not push the event loop off
    # its core, which costs two context switches for each read, write and sync. On a free core nothing changes.
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    return uvloop.run(serve_until_stopped())


@main.command()
@click.argument("path")
def dump(path: str) -> None:
    """Print any file of a data directory as JSON lines; a damaged one ends in a line "error" and exit code 1."""
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
    """Check every file of a stopped broker's data directory: manifests, journal, ledgers, cursors.

    Exit code 0: all is well; 2: there are problems; 1: the check could not be made.
    """
    from broker.jobs.verify import verify_data_dir  # noqa: PLC0415

    try:
        report = verify_data_dir(LocalVfs(), data_dir)
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
    """Prove that the delayed index of FOLDER, a backup or a stopped broker's data, is what the log says.

    \b
    Exit code 0: clean; 1: warnings only; 2: something is wrong; 3: not everything could be checked;
    4: a broker or another run is at work there; 64: wrong options. Progress goes to standard error.
    """
    from broker.jobs.command import AuditOptions, audit_command  # noqa: PLC0415 - only this command needs it

    sys.exit(audit_command(AuditOptions(**options)))


_CONNECTION = {
    "address": ("HOST:PORT", "Address of the gRPC API of the broker."),
    "tls": ("", "TLS with the CA certificates of the system."),
    "tls_ca": ("FILE", "TLS with this CA bundle for the server certificate."),
    "tls_cert": ("FILE", "Client certificate; requires --tls-key."),
    "tls_key": ("FILE", "Private key of --tls-cert."),
    "tls_server_name": ("NAME", "Name in the server certificate, if it is not the host of the address."),
    "token_file": ("FILE", "File of the bearer token; or set POSTDATE_TOKEN."),
    "allow_plaintext_token": ("", "Permission to send the token without TLS."),
}
"""Options that say how to reach a running broker: those of the `postdate` command, with the same variables."""


def _with_connection(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command the options of `_CONNECTION`; it takes them as one argument, `connection`."""

    @wraps(command)
    def run(**given: Any) -> Any:
        from postdate.commands.settings import CommandFailed, Settings  # noqa: PLC0415 - brings gRPC

        connection = Settings(**{name: given.pop(name) for name in _CONNECTION}, uses_contexts=False)
        try:
            return command(connection=connection, **given)
        except CommandFailed as error:
            raise click.UsageError(error.message) from error

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
    "--offline", metavar="FOLDER", help="Data directory of a stopped broker, instead of a running one."
)
@click.option("--data-dir", metavar="DIR", help="Path of the broker's data directory on this machine.")
@click.option("--apply", is_flag=True, help="Execution of the plan; without it, nothing is changed.")
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
    """Free the disk of what was delivered: rewrite ledgers of which little is live, merge small buckets.

    \b
    Exit code 0: done, or nothing to do; 1: something was refused or failed, the rest was done; 3: nothing could be
    done; 4: a broker uses the folder, or another compaction is under way.
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
    """Make, list and delete backups, through a running broker and on its machine."""


@backup.command("create")
@_with_connection
@click.argument("label", default="")
def create_backup(connection: Settings, label: str) -> None:
    """Make a backup and print its folder; LABEL becomes a part of its name."""
    made = _with_backups(connection, lambda backups: backups.create(label))
    click.echo(
        f"{made.files} files, {made.bytes} bytes, {made.copied_bytes} of them copied, in {made.duration}",
        err=True,
    )
    click.echo(made.path)


@backup.command("list")
@_with_connection
@click.option("--output", type=click.Choice(["text", "json"]), default="text", show_default=True)
@click.option(
    "--limit", type=click.IntRange(1), help="Maximum number of backups listed, oldest first.  [default: all]"
)
def list_backups(connection: Settings, output: str, limit: int | None) -> None:
    """List backups, the oldest first."""

    async def listed(backups: Backups) -> list[Backup]:
        return [each async for each in backups.list(limit=limit)]

    found = _with_backups(connection, listed)
    if output == "json":
        click.echo(json.dumps([asdict(each) for each in found], default=str))
        return
    for each in found:
        click.echo(f"{each.name}  {each.topics} topics  {each.bytes} bytes  {each.path}")


@backup.command("delete")
@_with_connection
@click.argument("name")
def delete_backup(connection: Settings, name: str) -> None:
    """Delete the backup NAME."""
    _with_backups(connection, lambda backups: backups.delete(name))


def _with_backups(connection: Settings, call: Callable[[Backups], Coroutine[Any, Any, T]]) -> T:
    import postdate  # noqa: PLC0415

    async def work() -> T:
        async with connection.client() as client:
            return await call(client.backups)

    try:
        return asyncio.run(work())
    except postdate.PostdateError as error:
        raise click.ClickException(str(error)) from error


@main.command()
@click.argument("backup_folder", metavar="BACKUP")
@click.option(
    "--data-dir", required=True, metavar="FOLDER", help="Where to: a folder that is empty or not there."
)
def restore(backup_folder: str, data_dir: str) -> None:
    """Make a data directory from the folder of a backup. The backup stays as it is; no broker need run.

    What was acknowledged after the backup was made is delivered again, and what was produced after it is not there.
    """
    from broker.folder.restore import Restore  # noqa: PLC0415

    try:
        work = Restore(LocalVfs(), backup_folder, data_dir, str(uuid.uuid4()), 0)
        with click.progressbar(length=max(work.backup.bytes, 1), label="Restoring", file=sys.stderr) as bar:
            for _ in work.steps():
                bar.update(work.restored_bytes - bar.pos)
    except PostdateError as error:
        raise click.ClickException(error.message) from error
    except OSError as error:
        raise click.ClickException(f"The backup cannot be restored: {error}") from error
    click.echo(
        f"{data_dir} holds {work.backup.topics} topics as of lsn {work.backup.lsn}: start a broker on it"
    )


@main.group()
def cluster() -> None:
    """Make a cluster in an object store, and check that a store will do. Experimental: see docs/clusters.md."""


@cluster.command("check-store")
@click.argument("urls", metavar="URL...", nargs=-1, required=True)
def check_store(urls: tuple[str, ...]) -> None:
    """Check that the create-if-absent of an object store is atomic. More than one URL: endpoints of one store.

    \b
    postdate-broker cluster check-store 's3://bucket/prefix?endpoint=http://store:9000'

    It creates some 13,000 small objects below probe/, many clients for each name, cuts connections, and removes them.
    Exit code 0: passed; 2: the store failed; 1: it could not be used.
    """
    from broker.cluster.command import check_store_command  # noqa: PLC0415

    sys.exit(check_store_command(urls))


@cluster.command("create")
@click.argument("url")
@click.option(
    "--shards", type=click.IntRange(1, 4096), default=1, show_default=True, help="Number of shards, for life."
)
@click.option(
    "--owner-lease-ms",
    type=click.IntRange(1_000, 60_000),
    default=4_000,
    show_default=True,
    help="Time without a sign of life after which a shard's owner is replaced.",
)
@click.option("--if-missing", is_flag=True, help="Success if there is a cluster already.")
def create_cluster(url: str, shards: int, owner_lease_ms: int, if_missing: bool) -> None:
    """Check the object store at URL, and make a cluster there.

    Exit code 0: done; 2: the store failed the check; 1: it could not be made.
    """
    from broker.cluster.command import create_command  # noqa: PLC0415

    sys.exit(create_command(url, shards=shards, owner_lease_ms=owner_lease_ms, if_missing=if_missing))


@main.group()
def token() -> None:
    """Make static tokens for a broker's tokens_file."""


@token.command("create")
@click.argument("principal")
def create_token(principal: str) -> None:
    """Make a token for PRINCIPAL: the token goes to standard output, its lines for tokens_file to standard error.

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
