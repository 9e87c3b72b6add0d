"""The table of rights in docs/security.md: as it is in the code, and as real calls are answered, cell by cell."""

from __future__ import annotations

import itertools
import re
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
import pytest_asyncio

from broker.rpc.access_rules import RULES, Right
from broker.server import Server
from tests.configs import broker_config
from tests.wire.access_files import Files, bearer
from tests.wire.conftest import Wire, on_shared, within
from tests.wire.test_access import Answered, call
from tools.access_table import DOCUMENT, METHODS, SCOPES, grant_of, replaced, request_of, row_name

HOLDERS = {
    f"{right.value}-{scope.replace(' ', '-')}": (right, scope, grant)
    for right, scope in itertools.product(Right, SCOPES)
    if (grant := grant_of(right, scope, f"token:{right.value}-{scope.replace(' ', '-')}")) is not None
}
"""One principal for each grant that there can be: one right, in one scope."""
EVERYWHERE = """[[grant]]
principals = ["token:everywhere"]
topics = ["*"]
rights = ["consume", "manage"]
subscriptions = ["billing"]
"""
_ROW = re.compile(r"\| ([\w.]+\.\w+) \|(.*)\|")


def documented() -> dict[str, dict[Right, str]]:
    """Return the document's table: by method, the least scope of each right."""
    rows = _ROW.findall(DOCUMENT.read_text(encoding="utf-8"))
    return {
        method: dict(zip(Right, (cell.strip() for cell in cells.split("|")), strict=True))
        for method, cells in rows
    }


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def guarded(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Wire]:
    files = Files(tmp_path_factory.mktemp("table"))
    files.access("\n".join([EVERYWHERE, *(grant for _, _, grant in HOLDERS.values())]))
    files.tokens(**{name: f"{name}-secret" for name in ("everywhere", *HOLDERS)})
    server = Server(
        broker_config(
            data_dir=str(files.folder / "data"),
            grpc_address="127.0.0.1:0",
            http_address="127.0.0.1:0",
            drain_grace_ms=0,
            disk_reserve_bytes=0,
            **files.settings,
        )
    )
    await server.start()
    wire = Wire(server)
    yield wire
    await wire.disconnect()
    await within(wire.stop())


async def is_denied(wire: Wire, path: str, holder: str, request: Any) -> bool:
    try:
        await call(wire, path, bearer(f"{holder}-secret"), request)
    except grpc.aio.AioRpcError as error:
        return error.code() is grpc.StatusCode.PERMISSION_DENIED
    except Answered as answered:
        return answered.refusal.code is grpc.StatusCode.PERMISSION_DENIED
    return False


def test_document_has_the_table_of_the_code() -> None:
    document = DOCUMENT.read_text(encoding="utf-8")
    assert document == replaced(document), "run: python -m tools.access_table"
    assert len(documented()) == len(METHODS)


@on_shared
@pytest.mark.parametrize("path", METHODS)
async def test_real_calls_are_answered_as_the_table_says(guarded: Wire, path: str) -> None:
    cells = documented()[row_name(path)]
    scopes = list(SCOPES)
    for name, (right, scope, _) in HOLDERS.items():
        cell = cells[right]
        is_allowed = cell == "everybody" or (bool(cell) and scopes.index(scope) >= scopes.index(cell))
        assert await is_denied(guarded, path, name, request_of(METHODS[path])) == (not is_allowed), name


@on_shared
@pytest.mark.parametrize("path", METHODS)
async def test_subscriptions_of_every_topic_are_no_topics(guarded: Wire, path: str) -> None:
    """Nor all of them: backups are denied."""
    cells = documented()[row_name(path)]
    is_allowed = {cells[Right.CONSUME], cells[Right.MANAGE]} & {"subscription", "everybody"}
    denied = await is_denied(guarded, path, "everywhere", request_of(METHODS[path]))
    assert denied == (not is_allowed)


@on_shared
@pytest.mark.parametrize("path", [path for path in METHODS if RULES[path].of is not None])
async def test_grants_reach_no_other_topic_and_no_other_subscription(guarded: Wire, path: str) -> None:
    method = METHODS[path]
    own, others = request_of(method), request_of(method, topic="payroll")
    audit = request_of(method, subscription="audit")
    for name, (_, scope, _) in HOLDERS.items():
        if scope != "all topics" and others != own:
            assert await is_denied(guarded, path, name, others), name
        if scope == "subscription" and audit != own:
            assert await is_denied(guarded, path, name, audit), name
