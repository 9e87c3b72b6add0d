"""Writes docs/cli-reference.md from the commands: `python -m tools.cli_reference > docs/cli-reference.md`."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

import click

from postdate.cli import cli
from postdate.commands.settings import shared_options

_PREFACE = """\
# Command reference

<!-- Written by `python -m tools.cli_reference > docs/cli-reference.md`; a test compares the two. -->

All commands of `postdate`, as `--help` prints them. [cli.md](cli.md) is the introduction, with contexts, output
formats and exit codes. The commands of `postdate-broker` are described elsewhere: `serve` in
[configuration.md](configuration.md), `backup`, `restore` and `verify` in [backup.md](backup.md), `audit` and
`compact` in [pipeline.md](pipeline.md), `reshard` in [shards.md](shards.md), `cluster` in
[clusters.md](clusters.md), `token` in [security.md](security.md).

## Options of every command

These options may be given before or after the command. An option takes precedence over its environment variable.
"""


def render_reference() -> str:
    """The text of docs/cli-reference.md."""
    lines = [_PREFACE, *_options(shared_options())]
    for path, command in _commands(cli, "postdate"):
        with click.Context(command, info_name=path) as ctx:
            pieces = " ".join(command.collect_usage_pieces(ctx)).removeprefix("[OPTIONS]").strip()
            lines += [f"\n## {path}\n", f"```\n{path} [OPTIONS] {pieces}".rstrip() + "\n```\n"]
            lines += [_filled(part) + "\n" for part in (command.help or "").split("\n\n")]
            lines += _options(command.params)
    return "\n".join(lines).rstrip() + "\n"


def _commands(group: click.Group, path: str) -> Iterator[tuple[str, click.Command]]:
    for name, command in group.commands.items():
        if isinstance(command, click.Group):
            yield from _commands(command, f"{path} {name}")
        else:
            # `import TOPIC FILE` is how one writes `import file`.
            yield f"{path} {name}".replace("import file", "import"), command


def _filled(text: str) -> str:
    return textwrap.fill(" ".join(text.split()), 118, break_on_hyphens=False, break_long_words=False)


def _options(params: list[click.Parameter] | list[click.Option]) -> list[str]:
    shown = [each for each in params if isinstance(each, click.Option) and not each.hidden]
    if not shown:
        return []
    rows = ["| option | meaning |", "| --- | --- |"]
    for option in shown:
        with click.Context(click.Command("postdate")) as ctx:
            found = option.get_help_record(ctx)
        if found is None:
            continue
        names, text = (part.replace("|", "\\|") for part in found)
        if isinstance(option.envvar, str) and option.envvar not in text:
            text += f" [env var: {option.envvar}]"
        rows.append(f"| `{names}` | {' '.join(text.split())} |")
    return rows


if __name__ == "__main__":
    print(render_reference(), end="")
