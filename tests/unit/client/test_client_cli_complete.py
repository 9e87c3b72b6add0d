"""The command line as a whole: every call of the API has a command, every command its formats, and the shell its help."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
import pytest

from broker.cli import main as broker_cli
from postdate.cli import cli
from postdate_api.v1 import admin_pb2, compaction_pb2, consumer_pb2, producer_pb2, schedule_pb2
from tests.unit.client.fake_server import FakeBroker
from tools.cli_reference import render_reference

Run = Callable[..., Any]

COMMANDS = {
    "AdminService/CreateTopic": "postdate topic create",
    "AdminService/GetTopic": "postdate topic get",
    "AdminService/UpdateTopic": "postdate topic update",
    "AdminService/DeleteTopic": "postdate topic delete",
    "AdminService/ListTopics": "postdate topic list",
    "AdminService/CreateSubscription": "postdate subscription create",
    "AdminService/GetSubscription": "postdate subscription get",
    "AdminService/UpdateSubscription": "postdate subscription update",
    "AdminService/DeleteSubscription": "postdate subscription delete",
    "AdminService/ListSubscriptions": "postdate subscription list",
    "AdminService/Seek": "postdate subscription seek",
    "AdminService/SkipAll": "postdate subscription skip-all",
    "AdminService/Pause": "postdate subscription pause",
    "AdminService/Resume": "postdate subscription resume",
    "AdminService/ListDeadLetters": "postdate dlq list",
    "AdminService/RequeueDeadLetters": "postdate dlq requeue",
    "AdminService/PurgeDeadLetters": "postdate dlq purge",
    "AdminService/GetStats": "postdate stats",
    "AdminService/VerifyTopic": "postdate topic verify",
    "AdminService/CreateBackup": "postdate-broker backup create",
    "AdminService/ListBackups": "postdate-broker backup list",
    "AdminService/DeleteBackup": "postdate-broker backup delete",
    "AdminService/GetServerInfo": "postdate info",
    "AdminService/GetCluster": "postdate-broker cluster status",
    "AdminService/MoveShard": "postdate-broker cluster move",
    "CompactionService/BeginCompaction": "postdate-broker compact",
    "CompactionService/CommitCompaction": "postdate-broker compact",
    "CompactionService/AbortCompaction": "postdate-broker compact",
    "CompactionService/ListCompactions": "postdate-broker compact",
    "ConsumerService/Subscribe": "postdate consume",
    "ConsumerService/Receive": "postdate consume",
    "ConsumerService/Acknowledge": "postdate consume",
    "ConsumerService/Nack": "postdate consume",
    "ConsumerService/ExtendLease": "postdate consume",
    "ConsumerService/ListOwed": "postdate subscription owed",
    "ProducerService/Produce": "postdate produce",
    "ProducerService/ProduceStream": "postdate produce",
    "ScheduleService/GetScheduled": "postdate schedule get",
    "ScheduleService/ListScheduled": "postdate schedule list",
    "ScheduleService/CountScheduled": "postdate schedule histogram",
    "ScheduleService/CancelScheduled": "postdate schedule cancel",
    "ScheduleService/Reschedule": "postdate schedule move",
    "ScheduleService/StartBulkChange": "postdate schedule cancel",
    "ScheduleService/GetBulkChange": "postdate schedule bulk-change",
    "ScheduleService/ListBulkChanges": "postdate schedule bulk-changes",
    "ScheduleService/CancelBulkChange": "postdate schedule bulk-change",
    "ScheduleService/PutRecurring": "postdate recurring put",
    "ScheduleService/GetRecurring": "postdate recurring get",
    "ScheduleService/ListRecurring": "postdate recurring list",
    "ScheduleService/DeleteRecurring": "postdate recurring delete",
    "ScheduleService/PauseRecurring": "postdate recurring pause",
    "ScheduleService/TriggerRecurring": "postdate recurring trigger",
    "ScheduleService/BackfillRecurring": "postdate recurring backfill",
    "ScheduleService/PreviewRecurring": "postdate recurring preview",
}
"""Commands by call, by hand. One that is not here has no command, and the test fails."""

SILENT = {"completion", "export", "topic delete", "context remove", "recurring export"} | {
    f"{kind} {verb}" for kind in ("subscription", "recurring") for verb in ("delete", "pause", "resume")
}
"""Commands that print no results, or have one form for them: a script, JSON lines."""


def leaves(group: click.Group, prefix: str = "") -> Iterator[tuple[str, click.Command]]:
    for name, command in sorted(group.commands.items()):
        if isinstance(command, click.Group):
            yield from leaves(command, f"{prefix}{name} ")
        else:
            yield f"{prefix}{name}", command


def test_every_call_has_a_command() -> None:
    modules = (admin_pb2, compaction_pb2, consumer_pb2, producer_pb2, schedule_pb2)
    calls = {
        f"{service.name}/{method.name}"
        for module in modules
        for service in module.DESCRIPTOR.services_by_name.values()
        for method in service.methods
    }
    assert calls == COMMANDS.keys()
    known = {f"postdate {name}" for name, _ in leaves(cli)}
    known |= {f"postdate-broker {name}" for name, _ in leaves(broker_cli)}
    assert set(COMMANDS.values()) <= known


@pytest.mark.parametrize(("name", "command"), [pytest.param(*each, id=each[0]) for each in leaves(cli)])
def test_every_command_takes_the_shared_options_and_says_what_it_does(
    name: str, command: click.Command
) -> None:
    options = {option for param in command.params for option in param.opts}
    assert {"--address", "--context", "--output", "--progress", "--retry-for"} <= options
    assert command.help and command.help.split("\n")[0].endswith((".", ":"))
    for param in command.params:
        if isinstance(param, click.Option) and not param.hidden:
            assert param.help or param.name in {"kind", "start"}, f"{name} {param.opts[0]}"


@pytest.mark.slow
@pytest.mark.parametrize("output", ["json", "jsonl"])
@pytest.mark.parametrize(
    "arguments",
    [
        "topic create new",
        "topic get t",
        "topic update t --tick 2s",
        "topic list",
        "topic verify t",
        "subscription create t new",
        "subscription get t s",
        "subscription update t s --lease 9s",
        "subscription list t",
        "subscription seek t s earliest",
        "subscription skip-all t s",
        "stats",
        "info",
        "produce t --payload x",
        "consume t s --count 1",
        "schedule list t",
        "schedule get t 7:0",
        "schedule histogram t",
        "schedule cancel t 7:0 --dry-run",
        "schedule move t 7:0 --in 1h --dry-run",
        "schedule send-now t 7:0 --dry-run",
        "schedule cancel t --all --dry-run",
        "schedule bulk-changes t",
        "schedule bulk-change t 1",
        "dlq list t s",
        "dlq purge t s --all --yes",
        "dlq requeue t s --all --yes",
        "context add c --address h:1",
        "context list",
        "context show",
        "bench produce --messages 5",
        "bench deliver --messages 5",
        "bench latency --rate 10 --duration 100ms --delay 20ms",
    ],
)
async def test_every_command_that_prints_has_its_json(
    broker: FakeBroker, postdate: Run, arguments: str, output: str
) -> None:
    await postdate("produce", "t", "--payload", "due")
    await postdate("consume", "t", "s", "--idle", "0", "--no-ack", "--from", "earliest")
    done = await postdate(*arguments.split(), "--output", output)
    assert "Traceback" not in done.err
    assert done.code in {0, 1, 3}, done.err
    if done.code == 0:
        assert (
            done.json is not None if output == "json" else all(isinstance(each, dict) for each in done.lines)
        )


def test_the_reference_is_current() -> None:
    document = (Path(__file__).parents[3] / "docs" / "cli-reference.md").read_text()
    assert document == render_reference(), "run: python -m tools.cli_reference > docs/cli-reference.md"


# -- the shell -------------------------------------------------------------------------------------------------


async def completed(postdate: Run, monkeypatch: pytest.MonkeyPatch, line: str) -> list[str]:
    """Return what bash would offer for a line, of which the last word is being typed."""
    monkeypatch.setenv("COMP_WORDS", line)
    monkeypatch.setenv("COMP_CWORD", str(len(line.split(" ")) - 1))
    monkeypatch.setenv("_POSTDATE_COMPLETE", "bash_complete")
    done = await postdate()
    return [row.partition(",")[2] for row in done.out.splitlines() if row]


@pytest.mark.slow
async def test_names_are_completed_from_the_broker(
    broker: FakeBroker, postdate: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    await postdate("topic", "create", "orders")
    await postdate("topic", "create", "others")
    await postdate("subscription", "create", "orders", "billing")
    await postdate("context", "add", "dev", "--address", "h:1")
    for line, offers in (
        ("postdate topic get o", ["orders", "others"]),
        ("postdate topic delete orders o", ["others"]),
        ("postdate subscription seek orders ", ["billing"]),
        ("postdate consume nope ", []),
        ("postdate topic get o --output j", ["json", "jsonl"]),
        ("postdate context use ", ["dev"]),
        ("postdate topic ver", ["verify"]),
        ("postdate import o", ["orders", "others"]),
        ("postdate import r", ["redis"]),
        ("postdate --address 127.0.0.1:1 topic get ", []),
    ):
        assert await completed(postdate, monkeypatch, line) == offers, line


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
async def test_completion_scripts_are_scripts(postdate: Run, shell: str) -> None:
    done = await postdate("completion", shell)
    assert done.code == 0
    assert f"postdate completion {shell}" in done.out
    assert "_POSTDATE_COMPLETE" in done.out
    if shell == "zsh":
        assert done.out.startswith("#compdef postdate\n")
    if (program := shutil.which(shell)) is not None:
        check = await asyncio.create_subprocess_exec(program, "-n", stdin=asyncio.subprocess.PIPE)
        await check.communicate(done.out.encode())
        assert check.returncode == 0
