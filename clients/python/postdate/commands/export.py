"""`postdate export`: pending messages as JSON lines."""

from __future__ import annotations

import sys
import uuid
from datetime import UTC, datetime

import click

from postdate.commands.completion import TOPIC
from postdate.commands.message_lines import end_line, header_line, message_line
from postdate.commands.output import progress_bar
from postdate.commands.schedule import FROM, PREFIX, UNTIL
from postdate.commands.settings import Command, Settings, run
from postdate.commands.values import counted

_LINES = 1000  # written together


@click.command("export", cls=Command, short_help="Write pending messages as JSON lines.")
@click.argument("topic", type=TOPIC)
@FROM
@UNTIL
@PREFIX
@click.pass_obj
def export(settings: Settings, topic: str, start: datetime | None, end: datetime | None, prefix: str) -> None:
    """Write the pending messages of TOPIC to stdout, as JSON lines that `postdate import` reads.

    The messages stay in TOPIC. Messages that become due during the export are delivered and not exported; messages that
    are moved during it may be missed or exported twice. To avoid both, export only what is due later: --from 10m.
    """
    run(_export(settings, topic, start, end, prefix))


async def _export(
    settings: Settings, topic: str, start: datetime | None, end: datetime | None, prefix: str
) -> None:
    async with settings.client() as client:
        info = await client.server_info()
        counts = await client.schedule.count(topic, start=start, end=end)
        found = client.schedule.list(topic, start=start, end=end, key_prefix=prefix, payloads=True)
        written = 0
        with progress_bar(settings) as progress:
            # How many have a prefix is not known beforehand.
            bar = progress.add_task("exported", total=None if prefix else counts.messages)
            lines = [header_line(uuid.uuid4().hex, topic, info.broker_id, datetime.now(UTC))]
            async for message in found:
                try:
                    lines.append(message_line(message))
                except ValueError as error:
                    raise click.ClickException(
                        f"{error}; --until a time before it exports the others"
                    ) from None
                written += 1
                if len(lines) == _LINES:
                    sys.stdout.write("".join(lines))
                    lines.clear()
                    progress.update(bar, completed=written)
            lines.append(end_line(written))
            sys.stdout.write("".join(lines))
            sys.stdout.flush()
            progress.update(bar, completed=written)
    click.echo(f"exported {counted(written, 'message')} of {topic}", err=True)
