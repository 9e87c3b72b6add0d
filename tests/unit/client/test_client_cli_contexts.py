"""`postdate context`, and which broker a command means."""

from __future__ import annotations

import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from postdate.commands.config_file import config_path
from tests.unit.client.fake_server import FakeBroker

Run = Callable[..., Any]
NOWHERE = "127.0.0.1:1"


async def test_a_context_is_kept_used_shown_and_removed(
    broker: FakeBroker, postdate: Run, monkeypatch: Any
) -> None:
    monkeypatch.delenv("POSTDATE_ADDRESS")
    address = f"127.0.0.1:{broker.port}"
    added = await postdate("context", "add", "dev", "--address", address, "-o", "json")
    assert (added.code, added.json["address"], added.json["current"]) == (0, address, False)
    assert (await postdate("context", "use", "dev")).code == 0
    assert (await postdate("context", "show", "-o", "json")).json["address"] == address
    assert [row["name"] for row in (await postdate("context", "list", "-o", "jsonl")).lines] == ["dev"]
    assert (await postdate("topic", "list")).code == 0
    assert stat.S_IMODE(config_path().stat().st_mode) == 0o600
    assert (await postdate("context", "remove", "dev")).code == 0
    assert (await postdate("context", "list", "-o", "json")).json == []
    assert (await postdate("context", "show", "-o", "json")).json["context"] is None


async def test_a_context_is_replaced_only_if_it_is_meant(postdate: Run) -> None:
    assert (await postdate("context", "add", "a", "--address", NOWHERE)).code == 0
    again = await postdate("context", "add", "a", "--address", "h:2")
    assert (again.code, "--force" in again.err) == (1, True)
    assert (await postdate("context", "add", "a", "--address", "h:2", "--force")).code == 0
    assert (await postdate("context", "show", "a", "-o", "json")).json["address"] == "h:2"


@pytest.mark.parametrize(
    ("environment", "options", "connects_to"),
    [
        ({}, [], "current:1"),
        ({"POSTDATE_CONTEXT": "other"}, [], "other:1"),
        ({"POSTDATE_ADDRESS": "env:1"}, [], "env:1"),
        ({"POSTDATE_ADDRESS": "env:1", "POSTDATE_CONTEXT": "other"}, [], "env:1"),
        ({"POSTDATE_ADDRESS": "env:1"}, ["--context", "other"], "other:1"),
        ({"POSTDATE_CONTEXT": "current"}, ["--context", "other"], "other:1"),
        ({}, ["--context", "other", "--address", "option:1"], "option:1"),
        ({}, ["--address", "option:1"], "option:1"),
    ],
)
async def test_which_broker_is_meant(
    postdate: Run, monkeypatch: Any, environment: dict[str, str], options: list[str], connects_to: str
) -> None:
    await postdate("context", "add", "current", "--address", "current:1", "--use")
    await postdate("context", "add", "other", "--address", "other:1")
    monkeypatch.delenv("POSTDATE_ADDRESS")
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    before = await postdate(*options, "context", "show", "-o", "json")
    behind = await postdate("context", "show", "-o", "json", *options)
    assert (before.json["address"], behind.json["address"]) == (connects_to, connects_to)


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["context", "add", "a"], 2, "--address HOST:PORT"),
        (["context", "add", "-x", "--address", NOWHERE], 2, "No such option"),
        (["context", "add", "a/b", "--address", NOWHERE], 2, "a name consists of letters"),
        (["context", "use", "nope"], 3, "no context nope"),
        (["context", "show", "nope"], 3, "no context nope"),
        (["context", "remove", "nope"], 3, "no context nope"),
        (["topic", "list", "--context", "nope"], 3, "no context nope"),
    ],
)
async def test_what_makes_no_sense_is_said(postdate: Run, arguments: list[str], code: int, says: str) -> None:
    done = await postdate(*arguments)
    assert (done.code, says in done.err) == (code, True), done.err


@pytest.mark.parametrize(
    "text", ["current = [", "contexts = 3", '[contexts]\na = "h:1"', '[contexts.a]\ntoken = "s"']
)
async def test_a_file_that_is_no_file_of_contexts_is_named(
    postdate: Run, monkeypatch: Any, tmp_path: Path, text: str
) -> None:
    monkeypatch.delenv("POSTDATE_ADDRESS")
    config_path().parent.mkdir(parents=True)
    config_path().write_text(text)
    done = await postdate("topic", "list")
    assert done.code == 1
    assert str(config_path()) in done.err


async def test_names_that_need_quotes_survive(postdate: Run) -> None:
    await postdate("context", "add", "a.b", "--address", 'h"\\\x7f:1')
    assert (await postdate("context", "show", "a.b", "-o", "json")).json["address"] == 'h"\\\x7f:1'


async def test_files_are_kept_by_name_and_not_lent_to_another_broker(
    postdate: Run, monkeypatch: Any, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "token").write_text("secret")
    files = ("--tls-ca", "ca.pem", "--token-file", "token", "--tls")
    await postdate("context", "add", "prod", "--address", "prod:1", *files, "--use")
    kept = config_path().read_text()
    assert "secret" not in kept
    monkeypatch.delenv("POSTDATE_ADDRESS")

    async def shown(*options: str) -> tuple[Any, ...]:
        found = (await postdate("context", "show", "-o", "json", *options)).json
        return found["address"], found["tls_ca"], found["token_file"], found["tls"]

    token, ca = str(tmp_path / "token"), str(tmp_path / "ca.pem")
    assert await shown() == ("prod:1", ca, token, True)
    assert await shown("--tls-ca", "other.pem") == ("prod:1", "other.pem", token, True)
    assert await shown("--address", "other:1") == ("other:1", None, None, False)
    assert await shown("--address", "other:1", "--context", "prod") == ("other:1", ca, token, True)
    monkeypatch.setenv("POSTDATE_TOKEN", "another")
    assert await shown() == ("prod:1", ca, None, True)
    assert await shown("--context", "prod") == ("prod:1", ca, token, True)
    monkeypatch.setenv("POSTDATE_ADDRESS", "env:1")
    assert await shown() == ("env:1", None, None, False)


async def test_a_file_that_cannot_be_read_is_named(postdate: Run) -> None:
    told = await postdate("--token-file", "nowhere", "info")
    assert (told.code, told.err) == (1, "postdate: --token-file: the file nowhere does not exist\n")


@pytest.mark.parametrize("option", ["--tls-ca", "--tls-cert", "--tls-key", "--token-file"])
async def test_a_file_of_a_context_that_is_not_there_is_named_with_the_context(
    postdate: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, option: str
) -> None:
    gone, there = tmp_path / "gone", tmp_path / "there"
    there.touch()
    other = {"--tls-cert": "--tls-key", "--tls-key": "--tls-cert"}.get(option, "--tls-ca")
    files = {other: str(there), option: str(gone)}
    name = option.removeprefix("--").replace("-", "_")
    given = ("--tls", *(each for pair in files.items() for each in pair))
    added = await postdate("context", "add", "prod", "--address", NOWHERE, *given)
    assert (added.code, added.err) == (0, f"postdate: warning: {name}: the file {gone} does not exist\n")
    told = await postdate("--context", "prod", "info")
    assert (told.code, told.err) == (
        1,
        f"postdate: {name} of context prod: the file {gone} does not exist\n",
    )
    monkeypatch.setenv(f"POSTDATE_{name.upper()}", "lost")
    told = await postdate("--address", NOWHERE, "info")
    assert told.err == f"postdate: POSTDATE_{name.upper()}: the file lost does not exist\n"
