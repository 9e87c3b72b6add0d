"""Access control over time: streams that are open, files that change, and the commands that show tokens."""

from __future__ import annotations

import asyncio
import hashlib
import time
from pathlib import Path
from typing import Any

import grpc
import pytest
from click.testing import CliRunner, Result
from grpc_health.v1 import health_pb2

import postdate
from broker import cli
from broker.rpc.access_identity import parse_tokens
from postdate_api.v1 import admin_pb2, consumer_pb2
from tests.certificates import Authority
from tests.moving import moves
from tests.wire.access_files import ACCESS, Files, bearer
from tests.wire.conftest import Refusal, Serve, batch, eventually, refused, within

UNAUTHENTICATED = grpc.StatusCode.UNAUTHENTICATED
PERMISSION_DENIED = grpc.StatusCode.PERMISSION_DENIED


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(tmp_path)


# -- streams that are open ---------------------------------------------------------------------------------------------


async def test_right_that_is_withdrawn_ends_the_stream(serve: Serve, files: Files):
    wire = await serve(**files.settings)
    stream = wire.stream_as(bearer("billing-secret"))
    await stream.open("orders", "billing")
    files.access(ACCESS.replace('"token:billing", ', ""))
    refusal = await stream.refusal()
    assert (refusal.code, refusal.reason) == (PERMISSION_DENIED, "PERMISSION_DENIED")
    await eventually(lambda: not wire.broker.registry.topic("orders").subscription("billing").consumers)


async def test_token_that_is_withdrawn_ends_the_stream(serve: Serve, files: Files):
    wire = await serve(**files.settings)
    stream = wire.stream_as(bearer("billing-secret"))
    await stream.open("orders", "billing")
    files.tokens(billing="another-secret")
    refusal = await stream.refusal()
    assert (refusal.code, refusal.reason) == (UNAUTHENTICATED, "CREDENTIALS_INVALID")


async def test_token_that_is_somebody_elses_now_ends_the_stream(serve: Serve, files: Files):
    wire = await serve(**files.settings)
    stream = wire.stream_as(bearer("billing-secret"))
    await stream.open("orders", "billing")
    files.tokens(admin="billing-secret")  # who may do all that, and is not who opened it
    refusal = await stream.refusal()
    assert (refusal.code, refusal.reason) == (UNAUTHENTICATED, "CREDENTIALS_INVALID")


@pytest.mark.parametrize("what", ["right", "token"])
async def test_receive_that_waits_ends_when_it_may_not_go_on(serve: Serve, files: Files, what: str):
    wire = await serve(**files.settings)
    request = admin_pb2.CreateSubscriptionRequest(topic="orders", name="billing")
    await within(wire.admin.CreateSubscription(request, metadata=bearer("admin-secret")))
    topic = wire.broker.registry.topic("orders")
    subscription = topic.subscription("billing")
    call = wire.consumer.Receive(
        consumer_pb2.ReceiveRequest(topic="orders", subscription="billing", wait_ms=60_000),
        metadata=bearer("billing-secret"),
    )
    await eventually(lambda: bool(subscription.consumers))
    if what == "right":
        files.access(ACCESS.replace('"token:billing", ', ""))
    else:
        files.tokens(shop="shop-secret", billing="another-secret")
    refusal = await refused(call)
    assert refusal.reason == ("PERMISSION_DENIED" if what == "right" else "CREDENTIALS_INVALID")
    assert not subscription.consumers
    await within(wire.producer.Produce(batch("orders", b"x"), metadata=bearer("shop-secret")))
    await eventually(lambda: topic.subscription_counts(subscription).ready == 1)  # for whoever may have it


async def test_change_that_takes_nothing_away_ends_no_stream(serve: Serve, files: Files):
    wire = await serve(**files.settings)
    stream = wire.stream_as(bearer("billing-secret"))
    await stream.open("orders", "billing")
    files.access(ACCESS.replace('"token:shop", ', ""))
    await eventually(lambda: wire.broker.counters.security_reloads.get(("access", "ok"), 0) > 0)
    await stream.stays_quiet()


async def test_token_that_expires_ends_streams_and_what_was_taken_is_answered(serve: Serve, files: Files):
    wire = await serve(**files.settings)
    produce = wire.producer.ProduceStream(metadata=bearer(files.jwt(exp=time.time() + 2)))
    await within(produce.write(batch("orders", b"1", request_id=1)))
    assert (await within(produce.read())).request_id == 1
    health = wire.channel.unary_stream(
        "/grpc.health.v1.Health/Watch",
        health_pb2.HealthCheckRequest.SerializeToString,
        health_pb2.HealthCheckResponse.FromString,
    )(health_pb2.HealthCheckRequest(), metadata=bearer(files.jwt(exp=time.time() + 2)))
    await within(health.read())
    assert (await refused(_read_on(produce))).reason == "CREDENTIALS_EXPIRED"
    assert (await refused(_read_on(health))).reason == "CREDENTIALS_EXPIRED"


async def _read_on(call_: Any) -> None:
    while (await call_.read()) is not grpc.aio.EOF:  # type: ignore[attr-defined]
        pass


async def test_sdk_goes_on_with_a_new_token_and_loses_nothing(serve: Serve, files: Files):
    files.access(
        ACCESS + '[[grant]]\nprincipals = ["jwt:*"]\ntopics = ["*"]\nrights = ["produce", "consume"]\n'
    )
    wire = await serve(**files.settings)
    asked: list[str] = []

    def token() -> str:
        asked.append(files.jwt(exp=int(time.time()) + 2))
        return asked[-1]

    got: list[bytes] = []
    sent: list[bytes] = []
    # With a name: a batch that is being written as its stream ends has no answer, and goes again.
    async with (
        postdate.connect(wire.server.grpc_address, token=token) as client,
        client.subscribe("orders", "billing") as subscription,
        client.producer("orders", producer_name="p") as producer,
    ):

        async def consume() -> None:
            async for message in subscription:
                got.append(message.payload)
                await message.ack()

        consuming = asyncio.ensure_future(consume())
        while len(asked) < 4:  # both streams were opened again
            sent.append(b"%d" % len(sent))
            await within(producer.send(sent[-1]))
            await asyncio.sleep(0.01)
        await eventually(lambda: set(got) == set(sent))
        consuming.cancel()
    assert wire.broker.counters.auth_failures["expired"] >= 2


async def test_denied_request_on_a_produce_stream_is_answered_and_the_stream_goes_on(
    serve: Serve, files: Files
):
    wire = await serve(**files.settings)
    call_ = wire.producer.ProduceStream(metadata=bearer("shop-secret"))
    for topic, reason in (("orders", ""), ("payroll", "PERMISSION_DENIED"), ("orders", "")):
        await within(call_.write(batch(topic, b"x", request_id=7)))
        answer = await within(call_.read())
        assert answer.request_id == 7
        assert (Refusal.of(answer.error).reason if answer.HasField("error") else "") == reason
    assert list(wire.broker.registry.by_name) == ["orders"]
    files.access(ACCESS.replace('"token:shop", ', ""))
    await eventually(lambda: wire.broker.counters.security_reloads.get(("access", "ok"), 0) > 0)
    # Whoever may produce to no topic at all has no use for the stream, either.
    assert (await refused(call_.read())).reason == "PERMISSION_DENIED"


async def test_right_that_is_withdrawn_for_a_topic_ends_batches_of_an_open_produce_stream(
    serve: Serve, files: Files
):
    wire = await serve(**files.settings)
    call_ = wire.producer.ProduceStream(metadata=bearer("shop-secret"))
    for _ in range(2):
        await within(call_.write(batch("orders", b"x")))
        assert not (await within(call_.read())).HasField("error")
    files.access(ACCESS.replace('["orders", "orders-*"]', '["others"]'))
    await eventually(lambda: wire.broker.counters.security_reloads.get(("access", "ok"), 0) > 0)
    for topic, reason in (("orders", "PERMISSION_DENIED"), ("others", "")):
        await within(call_.write(batch(topic, b"x")))
        answer = await within(call_.read())
        assert (Refusal.of(answer.error).reason if answer.HasField("error") else "") == reason
    files.access("")  # no grants at all
    assert (await refused(_read_on(call_))).reason == "PERMISSION_DENIED"


# -- files -------------------------------------------------------------------------------------------------------------


async def test_broken_rules_change_nothing_and_are_logged_and_counted(
    serve: Serve, files: Files, caplog: pytest.LogCaptureFixture
):
    wire = await serve(**files.settings)
    stream = wire.stream_as(bearer("billing-secret"))
    await stream.open("orders", "billing")
    files.access("[[grant]]\nprincipals = 3\n")
    await eventually(lambda: wire.broker.counters.security_reloads.get(("access", "failed"), 0) > 0)
    assert "Changed security files cannot be used; the previous ones stay in force" in caplog.messages
    await stream.stays_quiet()
    await within(wire.admin.GetServerInfo(admin_pb2.GetServerInfoRequest(), metadata=bearer("shop-secret")))
    files.access(ACCESS)
    await eventually(lambda: wire.broker.counters.security_reloads.get(("access", "ok"), 0) > 0)


async def test_failures_are_counted_and_logged_with_limits(
    serve: Serve, files: Files, caplog: pytest.LogCaptureFixture
):
    wire = await serve(**files.settings)
    with moves(wire.broker, "postdate_auth_failures"):
        for _ in range(30):
            await refused(
                wire.admin.GetServerInfo(admin_pb2.GetServerInfoRequest(), metadata=bearer("wrong-secret"))
            )
    await refused(
        wire.admin.GetServerInfo(admin_pb2.GetServerInfoRequest(), metadata=bearer("nobody-secret"))
    )
    text = (await wire.server._http._render_metrics()).decode()
    assert 'postdate_auth_failures_total{reason="invalid"} 30.0' in text
    assert 'postdate_auth_failures_total{reason="denied"} 1.0' in text
    told = [record for record in caplog.records if record.message == "A caller was refused"]
    assert 1 <= len(told) <= 10
    fields: dict[str, object] = vars(told[0])["fields"]
    assert str(fields["peer"]).startswith("ipv4:127.0.0.1:")
    assert "wrong-secret" not in caplog.text + str([vars(record) for record in caplog.records])


# -- commands ----------------------------------------------------------------------------------------------------------


async def test_broker_commands_speak_tls_and_show_a_token(serve: Serve, files: Files, tmp_path: Path):
    authority = Authority(tmp_path)
    pair = authority.issue("server", is_local=True)
    wire = await serve(**files.settings, tls_cert_file=pair.cert_file, tls_key_file=pair.key_file)
    (tmp_path / "admin.token").write_text("admin-secret\n")

    async def command(*arguments: str, **environ: str) -> Result:
        given = ["--address", wire.server.grpc_address, *arguments[2:]]
        return await asyncio.to_thread(CliRunner(env=environ).invoke, cli.main, [*arguments[:2], *given])

    tls, token = ("--tls-ca", authority.ca_file), ("--token-file", str(tmp_path / "admin.token"))
    made = await command("backup", "create", *tls, *token)
    assert made.exit_code == 0, made.output
    made = await command("backup", "list", POSTDATE_TLS_CA=authority.ca_file, POSTDATE_TOKEN="admin-secret")
    assert made.exit_code == 0, made.output
    refused_ = await command("backup", "create", *tls)
    assert refused_.exit_code == 1
    assert "requires authentication" in refused_.output
    half = await command("backup", "create", "--tls-cert", pair.cert_file)
    assert half.exit_code == 2
    assert "--tls-key" in half.output


def test_token_is_made_with_its_hash(tmp_path: Path):
    made = CliRunner().invoke(cli.main, ["token", "create", "shop"])
    token = made.stdout.strip()
    assert len(token) == 43
    [known] = parse_tokens(made.stderr)
    assert known.principal == "shop"
    assert known.sha256 == hashlib.sha256(token.encode()).digest()
    assert token not in made.stderr
    wrong = CliRunner().invoke(cli.main, ["token", "create", "a*"])
    assert wrong.exit_code == 2
