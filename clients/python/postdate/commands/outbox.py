"""`postdate outbox`: send what a PostgreSQL database has in its outbox."""

from __future__ import annotations

import asyncio
import logging
import signal
from typing import TYPE_CHECKING

import click

from postdate.commands.output import emit_one
from postdate.commands.settings import Command, CommandFailed, CommandGroup, Settings, run

if TYPE_CHECKING:
    from postdate.postgres import RelayCounts


@click.group(cls=CommandGroup, short_help="Send the messages of a PostgreSQL outbox.")
def outbox() -> None:
    """Send messages that transactions put into the outbox of a PostgreSQL database."""


@outbox.command("schema", cls=Command)
def schema() -> None:
    """Print the SQL statements that create the tables of outbox and inbox."""
    _need_psycopg()
    from postdate.postgres import SCHEMA  # noqa: PLC0415 - an extra: nothing else needs it

    click.echo(SCHEMA, nl=False)


@outbox.command("relay", cls=Command)
@click.option(
    "--database",
    metavar="CONNINFO",
    default="",
    help="Connection string or postgresql:// URL.  [default: PGHOST, PGDATABASE and the other variables of libpq]",
)
@click.pass_obj
def relay(settings: Settings, database: str) -> None:
    """Send the messages of the outbox until interrupted.

    Failed connections are retried. If several relays of one database run, one of them works and the others wait. A
    relay may be killed at any time.
    """
    _need_psycopg()
    import psycopg  # noqa: PLC0415

    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    logging.getLogger("postdate").addHandler(handler)
    logging.getLogger("postdate.postgres").setLevel(
        logging.INFO
    )  # that it works, and that it waits for another
    try:
        counts = run(_relay(settings, database))
    except (psycopg.errors.UndefinedTable, psycopg.errors.UndefinedColumn) as error:
        lacks = error.diag.message_primary
        why = (
            f"the database has no outbox, or one of an older version ({lacks}): postdate outbox schema | psql"
        )
        raise CommandFailed(why) from None
    except psycopg.Error as error:
        raise CommandFailed(f"the database: {error}") from None
    finally:
        logging.getLogger("postdate").removeHandler(handler)
    emit_one(settings, {"sent": counts.sent, "refused": counts.refused})


async def _relay(settings: Settings, database: str) -> RelayCounts:
    from postdate.postgres import OutboxRelay  # noqa: PLC0415

    async with settings.client() as client:
        relay = OutboxRelay(client, database)
        working = asyncio.create_task(relay.run())
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, working.cancel)
        await asyncio.wait([working])
        if not working.cancelled():
            working.result()
        return relay.counts


def _need_psycopg() -> None:
    try:
        import psycopg  # noqa: F401, PLC0415
    except ImportError:
        raise CommandFailed("this needs psycopg: pip install 'postdate[cli,postgres]'") from None
