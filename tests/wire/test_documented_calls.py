"""The grpcurl lines of the documents are requests that the broker understands."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import pytest
from google.protobuf import descriptor_pool, json_format, message_factory

from tests.wire.conftest import Message, Refusal, Wire, now_ms, on_shared, within

ROOT = Path(__file__).parents[2]
LINE = re.compile(r"grpcurl -plaintext -d '(\{.*\})' (?:\\\n +)?localhost:7650 ([\w.]+)/(\w+)")
TOKEN = '"page_token":"..."'


class Shown(NamedTuple):
    """A line of a document."""

    service: str
    method: str
    body: str


def shown() -> list[Shown]:
    texts = ((ROOT / name).read_text() for name in ("README.md", "docs/scheduling.md"))
    found = [match.groups() for text in texts for match in LINE.finditer(text)]
    assert len(found) >= 19
    arithmetic = re.compile(r"'\$\(\(NOW \+ (\d+)\)\)'")
    return [
        Shown(service, method, arithmetic.sub(lambda each: str(now_ms() + int(each[1])), body))
        for body, service, method in found
        if TOKEN not in body  # which stands for one that came before
    ]


@pytest.mark.parametrize("line", shown(), ids=lambda line: f"{line.method} {line.body}")
@on_shared
async def test_a_documented_line_is_a_request(shared: Wire, line: Shown):
    await within(shared.produce("orders", Message(payload=b"x", deliver_after_ms=3_600_000)))
    pool = descriptor_pool.Default()
    method = pool.FindServiceByName(line.service).FindMethodByName(line.method)
    kinds = [message_factory.GetMessageClass(each) for each in (method.input_type, method.output_type)]
    request: Any = json_format.Parse(line.body, kinds[0]())
    call = shared.channel.unary_unary(f"/{line.service}/{line.method}", None, None)
    try:
        kinds[1].FromString(await within(call(request.SerializeToString())))
    except grpc.aio.AioRpcError as caught:
        error = Refusal.of_error(caught)
        # What it names need not be there; that is not what this is about.
        if error.code not in {grpc.StatusCode.NOT_FOUND, grpc.StatusCode.ALREADY_EXISTS}:
            raise
