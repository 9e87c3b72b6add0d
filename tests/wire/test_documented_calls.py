"""The grpcurl lines of the documents are requests that the broker understands."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import pytest
from google.protobuf import descriptor_pool, json_format, message_factory
from google.protobuf.field_mask_pb2 import FieldMask

from tests.wire.conftest import Message, Refusal, Wire, now_ms, on_shared, within

ROOT = Path(__file__).parents[2]
LINE = re.compile(r"grpcurl -plaintext -d '(\{.*\})' (?:\\\n +)?localhost:7650 ([\w.]+)/(\w+)")
# grpcurl takes a field mask as the message that it is; its JSON is a string.
MASK = re.compile(r'"update_mask":\{"paths":\["(\w+)"\]\}')
PAGES = ("README.md", "docs/scheduling.md", "docs/other-languages.md")
SERVICES = ("ProducerService", "ConsumerService", "ScheduleService", "AdminService")
ARITHMETIC = re.compile(r"'\$\(\(NOW \+ (\d+)\)\)'")
TOKEN = '"page_token":"..."'


class Shown(NamedTuple):
    """A line of a document."""

    service: str
    method: str
    body: str


def shown() -> list[Shown]:
    texts = ((ROOT / name).read_text() for name in PAGES)
    found = [match.groups() for text in texts for match in LINE.finditer(text)]
    assert len(found) >= 40
    return [
        Shown(service, method, plain_mask(body))
        for body, service, method in found
        if TOKEN not in body  # which stands for one that came before
    ]


def plain_mask(body: str) -> str:
    return MASK.sub(
        lambda each: f'"update_mask":"{json_format.MessageToJson(FieldMask(paths=[each[1]]))[1:-1]}"', body
    )


def test_every_call_has_a_line():
    page = (ROOT / "docs/other-languages.md").read_text()
    found = set(re.findall(r"localhost:7650 postdate\.v1\.(\w+/\w+)", page))
    pool = descriptor_pool.Default()
    methods = (pool.FindServiceByName(f"postdate.v1.{service}").methods for service in SERVICES)
    assert found == {f"{each.containing_service.name}/{each.name}" for group in methods for each in group}


@pytest.mark.parametrize("line", shown(), ids=lambda line: f"{line.method} {line.body}")
@on_shared
async def test_a_documented_line_is_a_request(shared: Wire, line: Shown):
    # One is due, so that a line that receives need not wait for it.
    await within(shared.produce("orders", b"x", Message(payload=b"x", deliver_after_ms=3_600_000)))
    pool = descriptor_pool.Default()
    method = pool.FindServiceByName(line.service).FindMethodByName(line.method)
    kinds = [message_factory.GetMessageClass(each) for each in (method.input_type, method.output_type)]
    body = ARITHMETIC.sub(lambda each: str(now_ms() + int(each[1])), line.body)
    request: Any = json_format.Parse(body, kinds[0]())
    call = shared.channel.unary_unary(f"/{line.service}/{line.method}", None, None)
    try:
        kinds[1].FromString(await within(call(request.SerializeToString())))
    except grpc.aio.AioRpcError as caught:
        error = Refusal.of_error(caught)
        # What it names need not be there; that is not what this is about.
        if error.code not in {grpc.StatusCode.NOT_FOUND, grpc.StatusCode.ALREADY_EXISTS}:
            raise
