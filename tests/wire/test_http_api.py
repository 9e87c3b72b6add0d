"""The API over HTTP, with a real broker: each call, each kind of failure, and who may not call."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest

from broker.rpc.json_calls import CALLS
from tests.certificates import Authority
from tests.wire.access_files import Files
from tests.wire.conftest import Wire, now_ms, within


class Http:
    """Calls of the broker over HTTP."""

    def __init__(self, wire: Wire, session: aiohttp.ClientSession) -> None:
        self.wire = wire
        self.session = session
        self.url = f"http://{wire.server.http_address}/v1"

    async def send(self, name: str, body: Any, **headers: str) -> tuple[int, dict[str, Any], str]:
        """The status, what was answered, and its type."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        sent = {"Content-Type": "application/json"} | headers
        async with self.session.post(f"{self.url}/{name}", data=data, headers=sent) as response:
            return response.status, json.loads(await response.text() or "{}"), response.content_type

    async def ok(self, name: str, **fields: Any) -> dict[str, Any]:
        status, answer, kind = await within(self.send(name, fields))
        assert (status, kind) == (200, "application/json"), answer
        return answer

    async def problem(self, name: str, body: Any, **headers: str) -> dict[str, Any]:
        status, answer, kind = await within(self.send(name, body, **headers))
        assert kind == "application/problem+json"
        assert answer["status"] == status
        return answer

    async def received(self, topic: str, **fields: Any) -> list[dict[str, Any]]:
        return (await self.receive(topic, **fields))["deliveries"]

    async def receive(self, topic: str, **fields: Any) -> dict[str, Any]:
        named = {"topic": topic, "subscription": "s", "initial_position": "INITIAL_POSITION_EARLIEST"}
        return await self.ok("receive", **named | {"wait_ms": 5_000} | fields)


@pytest.fixture
async def http(wire: Wire) -> AsyncIterator[Http]:
    async with aiohttp.ClientSession() as session:
        yield Http(wire, session)


def text(payload: str) -> str:
    return base64.b64encode(payload.encode()).decode()


async def test_a_message_is_produced_received_extended_given_back_and_acknowledged(http):
    due_ms = now_ms() + 100
    sent = {"payload": text("hello"), "key": "k", "properties": {"a": "ö"}, "deliver_at_ms": due_ms}
    answer = await http.ok("produce", topic="orders", messages=[sent])
    assert len(answer["ids"]) == 1
    received = await http.receive("orders", lease_ms=60_000)
    (delivery,) = received["deliveries"]
    assert now_ms() >= due_ms
    assert {name: delivery["message"][name] for name in ("payload", "key", "properties")} == {
        "payload": text("hello"),
        "key": "k",
        "properties": {"a": "ö"},
    }
    assert delivery["deliver_at_ms"] == str(due_ms)
    entries = [{"ledger_id": delivery["id"]["ledger_id"], "entry_ids": [delivery["id"]["entry_id"]]}]
    named = {"topic": "orders", "subscription": "s", "entries": entries}
    held = {"consumer_id": received["consumer_id"]}
    assert (await http.ok("extend-lease", **named, **held, lease_ms=120_000))["failures"] == []
    assert (await http.ok("nack", **named, **held, redeliver_after_ms=1))["failures"] == []
    (again,) = await http.received("orders")
    assert (again["id"], again["delivery_attempt"]) == (delivery["id"], 2)
    assert (await http.ok("acknowledge", **named))["failures"] == []
    assert (await http.ok("acknowledge", **named))["failures"] == []
    assert await http.received("orders", wait_ms=1) == []


async def test_schedule_calls_see_move_and_cancel(http):
    later = now_ms() + 3_600_000
    messages = [{"payload": text("x"), "deliver_at_ms": later, "schedule_key": f"k{n}"} for n in range(3)]
    await http.ok("produce", topic="orders", messages=messages)
    listed = await http.ok("list-scheduled", topic="orders")
    assert [each["schedule_key"] for each in listed["scheduled"]] == ["k0", "k1", "k2"]
    one = await http.ok("get-scheduled", topic="orders", schedule_key="k1")
    assert one["scheduled"]["id"] == listed["scheduled"][1]["id"]
    selector = {"schedule_keys": ["k1"]}
    moved = await http.ok("reschedule", topic="orders", selector=selector, deliver_at_ms=later + 5)
    assert moved["outcomes"][0]["result"] == "CHANGE_RESULT_DONE"
    assert moved["outcomes"][0]["deliver_at_ms"] == str(later + 5)
    await http.ok("cancel-scheduled", topic="orders", selector={"schedule_keys": ["k2"]})
    left = await http.ok("list-scheduled", topic="orders")
    assert [each["schedule_key"] for each in left["scheduled"]] == ["k0", "k1"]


async def test_each_kind_of_failure_is_a_problem_with_status_reason_and_field(http):
    problem = await http.problem("receive", {"topic": "orders", "subscription": "s", "wait_ms": 60_001})
    assert (problem["status"], problem["code"], problem["reason"]) == (
        400,
        "INVALID_ARGUMENT",
        "INVALID_WAIT_MS",
    )
    problem = await http.problem(
        "produce", {"topic": "orders", "messages": [{"payload": text("x" * (1 << 20) + "x")}]}
    )
    assert (problem["status"], problem["field"]) == (400, "messages[0].payload")
    problem = await http.problem("list-scheduled", {"topic": "none"})
    assert (problem["status"], problem["code"], problem["reason"]) == (404, "NOT_FOUND", "TOPIC_NOT_FOUND")
    await http.ok("produce", topic="orders", messages=[{"deliver_after_ms": 60_000, "schedule_key": "k"}])
    problem = await http.problem(
        "produce", {"topic": "orders", "messages": [{"deliver_after_ms": 60_000, "schedule_key": "k"}]}
    )
    assert (problem["status"], problem["code"]) == (409, "ALREADY_EXISTS")
    assert problem["title"] == "Conflict" and problem["detail"]


async def test_what_is_to_be_tried_again_says_when(serve):
    wire = await serve(max_produce_rate=1)
    async with aiohttp.ClientSession() as session:
        http = Http(wire, session)
        body = {"topic": "orders", "messages": [{}] * 100}
        while (answer := await http.send("produce", body))[0] == 200:
            pass
        assert answer[0] == 429 and answer[1]["retry_after_ms"] > 0
        async with session.post(f"{http.url}/produce", json=body) as response:
            assert int(response.headers["Retry-After"]) >= 1


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "ProduceRequest"),
        (b"[]", "ProduceRequest"),
        (b"\xff", "ProduceRequest"),
        (b'{"topik": "t"}', "topik"),
        (b'{"topik": "t"}', "; there are topic, messages, "),
        (b'{"messages": [{"delay_ms": 5}]}', ", deliver_after_ms, schedule_key, "),
        (b'{"topic": 1}', "topic"),
        (b'{"topic": "t", "messages": [{"payload": "not base64!"}]}', "payload"),
        (
            b'{"topic": "t", "messages": [{}, {"payload": "close order 17"}]}',
            "messages[1].payload is not base64",
        ),
        (b'{"topic": "t", "messages": [{"payload": "k\xc3\xa4se"}]}', "messages[0].payload is not base64"),
        (b'{"topic": ' * 2_000, "ProduceRequest"),
        (b'{"messages": [{"deliver_at_ms": 1e30}]}', "deliver"),
    ],
)
async def test_what_is_no_request_is_refused(http, body, words):
    problem = await http.problem("produce", body)
    assert (problem["status"], problem["reason"]) == (400, "INVALID_JSON")
    assert words in problem["detail"] and "Available Fields" not in problem["detail"]


@pytest.mark.parametrize("value", ["for enum type postdate.none", "x" * 440, "x" * 465])
async def test_a_refused_value_is_told_whatever_it_says(http, value):
    """One may look like protobuf's words on it, or be so long that these are cut off."""
    problem = await http.problem("receive", {"topic": "t", "initial_position": value})
    assert (problem["status"], problem["reason"]) == (400, "INVALID_JSON")
    assert problem["detail"].endswith(
        "; there are INITIAL_POSITION_UNSPECIFIED, INITIAL_POSITION_LATEST, INITIAL_POSITION_EARLIEST"
    )
    problem = await http.problem("receive", {"topic": "t", "max_messages": value})
    assert (problem["status"], problem["reason"]) == (400, "INVALID_JSON")
    assert "there are" not in problem["detail"]


async def test_a_page_of_another_origin_cannot_call(http):
    problem = await http.problem("produce", {"topic": "t"}, **{"Content-Type": "text/plain"})
    assert (problem["status"], problem["reason"]) == (415, "NOT_JSON")
    problem = await http.problem("produce", {"topic": "t"}, Host="evil.example")
    assert (problem["status"], problem["reason"]) == (421, "HOST_UNKNOWN")
    async with http.session.options(
        f"{http.url}/produce", headers={"Origin": "http://evil.example"}
    ) as response:
        assert response.status >= 400
        assert "Access-Control-Allow-Origin" not in response.headers


async def test_a_call_that_there_is_not_names_those_that_there_are(http):
    problem = await http.problem("subscribe", {})
    assert (problem["status"], problem["reason"]) == (404, "CALL_UNKNOWN")
    assert "receive" in problem["detail"]
    problem = await http.problem("produce/orders", {})
    assert (problem["status"], problem["reason"]) == (404, "CALL_UNKNOWN")
    async with http.session.get(f"{http.url}/produce") as response:
        assert (response.status, response.headers["Allow"]) == (405, "POST")
        read = await response.text()
        assert json.loads(read)["reason"] == "NOT_POST"
        assert read.endswith("}\n")


async def test_a_request_that_is_too_large_is_refused_before_it_was_read(http):
    async def body() -> AsyncIterator[bytes]:
        for _ in range(40):
            yield bytes(1 << 20)

    headers = {"Content-Type": "application/json"}
    try:
        async with http.session.post(f"{http.url}/produce", data=body(), headers=headers) as response:
            assert (response.status, (await response.json(content_type=None))["reason"]) == (
                413,
                "REQUEST_TOO_LARGE",
            )
    except aiohttp.ClientConnectionError:
        pass  # closed while we wrote
    await http.ok("produce", topic="orders", messages=[{}])


async def test_large_requests_and_answers_are_whole(http):
    payloads = [text(f"{number:06d}" * 1_000) for number in range(100)]
    await http.ok("produce", topic="orders", messages=[{"payload": payload} for payload in payloads])
    got: list[str] = []
    while len(got) < 100:
        got += [each["message"]["payload"] for each in await http.received("orders", max_messages=100)]
    assert got == payloads


async def test_rights_are_those_of_the_token(serve, tmp_path):
    wire = await serve(**Files(tmp_path).settings, allow_plaintext=True)
    async with aiohttp.ClientSession() as session:
        http = Http(wire, session)
        body = {"topic": "orders", "messages": [{}]}
        problem = await http.problem("produce", body)
        assert (problem["status"], problem["reason"]) == (401, "CREDENTIALS_MISSING")
        shop = {"Authorization": "Bearer shop-secret"}
        status, answer, _ = await http.send("produce", body, **shop)
        assert status == 200, answer
        problem = await http.problem("produce", body | {"topic": "secret"}, **shop)
        assert (problem["status"], problem["code"]) == (403, "PERMISSION_DENIED")


async def test_long_waits_take_no_place_of_large_requests(http):
    """Those whose length is not said beforehand, such as of a program that streams its request."""
    await http.ok("produce", topic="empty", messages=[{"deliver_after_ms": 3_600_000}])
    waiting = [asyncio.create_task(wait_streamed(http)) for _ in range(20)]
    try:
        while not (await http.wire.stats("empty")).subscriptions:
            await asyncio.sleep(0.01)
        await http.ok("produce", topic="orders", messages=[{"payload": text("x" * 100_000)}])
        assert not any(task.done() for task in waiting)
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.wait(waiting)


async def wait_streamed(http: Http) -> None:
    async def body() -> AsyncIterator[bytes]:
        yield json.dumps({"topic": "empty", "subscription": "s", "wait_ms": 50_000}).encode()

    headers = {"Content-Type": "application/json"}
    async with http.session.post(f"{http.url}/receive", data=body(), headers=headers) as response:
        await response.read()


async def subscribed(http: Http) -> None:
    """Return once the topic has a subscription."""
    while not (await http.wire.stats("orders")).subscriptions:
        await asyncio.sleep(0.01)


async def test_a_client_that_leaves_while_it_waits_holds_no_message(http):
    await http.ok("produce", topic="orders", messages=[{"deliver_after_ms": 300}])
    waiting = asyncio.create_task(http.received("orders"))
    await subscribed(http)
    waiting.cancel()
    await asyncio.wait([waiting])
    (delivery,) = await http.received("orders")
    assert delivery["delivery_attempt"] == 1


async def test_the_description_names_every_call_and_field(http):
    async with http.session.get(f"{http.url}/openapi.json") as response:
        description = await response.json()
    assert set(description["paths"]) == {f"/v1/{name}" for name in CALLS}
    schemas = description["components"]["schemas"]
    for call in CALLS.values():
        for message in (call.request.DESCRIPTOR, call.answer.DESCRIPTOR):
            assert list(schemas[message.name]["properties"]) == [field.name for field in message.fields]
    assert schemas["Message"]["properties"]["properties"]["additionalProperties"] == {"type": "string"}
    referred = [
        each.partition('"')[0].rpartition("/")[2] for each in json.dumps(description).split('"$ref": "')[1:]
    ]
    assert set(referred) <= set(schemas)


async def test_where_the_grpc_port_takes_no_plaintext_there_is_no_api_over_http(serve, tmp_path):
    pair = Authority(tmp_path).issue("server", is_local=True)
    wire = await serve(tls_cert_file=pair.cert_file, tls_key_file=pair.key_file)
    async with aiohttp.ClientSession() as session:
        problem = await Http(wire, session).problem("produce", {"topic": "t"})
    assert (problem["status"], problem["reason"]) == (403, "HTTP_API_OFF")
