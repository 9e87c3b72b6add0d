"""Access control: every method of every service has a rule, and the rules hold, also for streams that are open."""

from __future__ import annotations

import hashlib
import time
from collections.abc import AsyncIterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import grpc
import jwt
import pytest
import pytest_asyncio
from cryptography.hazmat.primitives.asymmetric import ec
from google.protobuf import descriptor_pool, message_factory
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

import postdate
from broker.rpc.access_rules import RULES, Rule, TopicScope
from broker.server import Server
from postdate_api.v1 import admin_pb2
from tests.certificates import Authority
from tests.configs import broker_config
from tests.wire.access_files import AUDIENCE, ISSUER, Files, bearer
from tests.wire.conftest import Refusal, Serve, Wire, on_shared, refused, within
from tools.access_table import METHODS, request_of

UNAUTHENTICATED = grpc.StatusCode.UNAUTHENTICATED
PERMISSION_DENIED = grpc.StatusCode.PERMISSION_DENIED
PUBLIC = ["/grpc.health.v1.Health/Check"]
GUARDED = sorted(set(METHODS) - set(PUBLIC))


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(tmp_path)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def guarded(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[tuple[Wire, Files]]:
    """One broker with access control, for requests that leave no trace."""
    files = Files(tmp_path_factory.mktemp("access"))
    config = broker_config(
        data_dir=str(files.folder / "data"),
        grpc_address="127.0.0.1:0",
        http_address="127.0.0.1:0",
        drain_grace_ms=0,
        disk_reserve_bytes=0,
        **files.settings,
    )
    server = Server(config)
    await server.start()
    wire = Wire(server)
    yield wire, files
    await wire.disconnect()
    await within(wire.stop())


async def call(wire: Wire, path: str, metadata: Any = (), request: Any = None) -> Any:
    """Call any method with one request; the first answer."""
    for _ in range(2):
        try:
            return await _call(wire, path, metadata, request)
        except grpc.aio.AioRpcError as error:
            # One time in thousands, gRPC's client says this of a message that the end of the call has overtaken.
            if error.details() != "Internal error from Core":
                raise
    return await _call(wire, path, metadata, request)


async def _call(wire: Wire, path: str, metadata: Any, request: Any) -> Any:
    method = METHODS[path]
    request = request_of(method) if request is None else request
    pool: Any = descriptor_pool.Default()
    assert pool.FindMethodByName(path[1:].replace("/", "."))
    answer = message_factory.GetMessageClass(method.output_type)
    kinds = {
        (False, False): wire.channel.unary_unary,
        (False, True): wire.channel.unary_stream,
        (True, True): wire.channel.stream_stream,
    }
    multi = kinds[method.client_streaming, method.server_streaming](
        path, type(request).SerializeToString, answer.FromString
    )
    if not method.server_streaming:
        return await within(multi(request, metadata=metadata))
    if not method.client_streaming:
        stream = multi(request, metadata=metadata)
    else:
        stream = multi(metadata=metadata)
        await within(stream.write(request))
    try:
        first = await within(stream.read())
        if getattr(first, "error", None) is not None and first.HasField("error"):  # a produce stream goes on
            raise Answered(Refusal.of(first.error))
        return first
    finally:
        stream.cancel()


class Answered(Exception):
    """A refusal within an answer."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.reason)
        self.refusal = refusal


async def refusal_of(wire: Wire, path: str, metadata: Any = (), request: Any = None) -> Refusal:
    try:
        return await refused(call(wire, path, metadata, request))
    except Answered as answered:
        return answered.refusal


# -- every method ------------------------------------------------------------------------------------------------------


def test_every_method_of_every_service_has_a_rule():
    assert set(METHODS) <= set(RULES), "a method has no rule, and is open to nobody"
    later = {"/grpc.health.v1.Health/List"}  # of later versions of the library
    assert set(RULES) - set(METHODS) <= later, "a rule has no method"
    assert [path for path, rule in RULES.items() if rule.is_public] == PUBLIC
    for path, rule in RULES.items():
        assert rule.is_public or rule.always or rule.of, f"{path} asks for nothing"


@on_shared
async def test_table_knows_every_service_that_is_served(guarded: tuple[Wire, Files]):
    wire, _ = guarded
    served = {name.split("/")[1] for name in METHODS}
    call_ = wire.channel.stream_stream(
        "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
        reflection_pb2.ServerReflectionRequest.SerializeToString,
        reflection_pb2.ServerReflectionResponse.FromString,
    )(metadata=bearer("admin-secret"))
    await within(call_.write(reflection_pb2.ServerReflectionRequest(list_services="")))
    listed = (await within(call_.read())).list_services_response.service
    call_.cancel()
    assert {each.name for each in listed} == served


@on_shared
@pytest.mark.parametrize("path", GUARDED)
async def test_without_credentials_every_method_is_refused(guarded: tuple[Wire, Files], path: str):
    wire, _ = guarded
    refusal = await refusal_of(wire, path)
    assert (refusal.code, refusal.reason) == (UNAUTHENTICATED, "CREDENTIALS_MISSING")


@on_shared
@pytest.mark.parametrize("path", GUARDED)
async def test_principal_without_rights_is_denied_every_method(guarded: tuple[Wire, Files], path: str):
    wire, _ = guarded
    refusal = await refusal_of(wire, path, bearer("nobody-secret"))
    assert (refusal.code, refusal.reason) == (PERMISSION_DENIED, "PERMISSION_DENIED")
    assert refusal.metadata["principal"] == "token:nobody"
    assert not wire.broker.registry.by_name.keys() & {"orders"}


@on_shared
@pytest.mark.parametrize("path", PUBLIC)
async def test_health_answers_probes_that_have_no_credentials(guarded: tuple[Wire, Files], path: str):
    wire, _ = guarded
    assert (await call(wire, path)).status == health_pb2.HealthCheckResponse.SERVING


@on_shared
async def test_method_without_a_rule_is_open_to_nobody(
    guarded: tuple[Wire, Files], monkeypatch: pytest.MonkeyPatch
):
    wire, _ = guarded
    path = "/postdate.v1.AdminService/GetServerInfo"
    interceptor = wire.server._port.interceptors[0]
    monkeypatch.delitem(interceptor._guarded, path, raising=False)
    monkeypatch.setattr("broker.rpc.access.RULES", {**RULES, path: None})
    assert (await refusal_of(wire, path, bearer("admin-secret"))).code is PERMISSION_DENIED
    monkeypatch.delitem(interceptor._guarded, path, raising=False)


@on_shared
async def test_answer_for_which_nobody_asked_is_not_given(
    guarded: tuple[Wire, Files], monkeypatch: pytest.MonkeyPatch
):
    wire, _ = guarded
    monkeypatch.setattr("broker.rpc.calls.check_request", lambda request: None)
    refusal = await refusal_of(
        wire, "/postdate.v1.AdminService/CountScheduled".replace("Admin", "Schedule"), ()
    )
    assert refusal.code is UNAUTHENTICATED
    created = wire.admin.CreateTopic(admin_pb2.CreateTopicRequest(name="x"), metadata=bearer("admin-secret"))
    assert (await refused(created)).code is grpc.StatusCode.INTERNAL


# -- who somebody is ---------------------------------------------------------------------------------------------------


def hs256(files: Files) -> str:
    """The public key taken for a secret: the classic confusion."""
    text = (files.folder / "keys.json").read_text()
    return jwt.encode(
        {"sub": "shop-1", "iss": ISSUER, "aud": AUDIENCE, "exp": time.time() + 60},
        text * 2,
        algorithm="HS256",
    )


def other_key() -> ec.EllipticCurvePrivateKey:
    return ec.generate_private_key(ec.SECP256R1())


SHOWN: list[tuple[str, Any, str]] = [
    ("garbage", lambda files: bearer("garbage"), "CREDENTIALS_INVALID"),
    ("three parts of garbage", lambda files: bearer("a.b.c"), "CREDENTIALS_INVALID"),
    ("empty", lambda files: (("authorization", "Bearer "),), "CREDENTIALS_INVALID"),
    ("another scheme", lambda files: (("authorization", "Basic admin-secret"),), "CREDENTIALS_INVALID"),
    ("no scheme", lambda files: (("authorization", "admin-secret"),), "CREDENTIALS_INVALID"),
    ("twice", lambda files: bearer("admin-secret") * 2, "CREDENTIALS_INVALID"),
    ("a bad one first", lambda files: bearer("bad-secret") + bearer("admin-secret"), "CREDENTIALS_INVALID"),
    ("the hash", lambda files: bearer(hashlib.sha256(b"admin-secret").hexdigest()), "CREDENTIALS_INVALID"),
    ("another header", lambda files: (("x-authorization", "Bearer admin-secret"),), "CREDENTIALS_MISSING"),
    ("jwt: alg none", lambda files: bearer(files.jwt(key="", algorithm="none")), "CREDENTIALS_INVALID"),
    ("jwt: symmetric", lambda files: bearer(hs256(files)), "CREDENTIALS_INVALID"),
    ("jwt: another key", lambda files: bearer(files.jwt(key=other_key())), "CREDENTIALS_INVALID"),
    ("jwt: another issuer", lambda files: bearer(files.jwt(iss="https://evil")), "CREDENTIALS_INVALID"),
    ("jwt: another audience", lambda files: bearer(files.jwt(aud="other")), "CREDENTIALS_INVALID"),
    ("jwt: no audience", lambda files: bearer(files.jwt(aud=None)), "CREDENTIALS_INVALID"),
    ("jwt: no subject", lambda files: bearer(files.jwt(sub=None)), "CREDENTIALS_INVALID"),
    ("jwt: never expires", lambda files: bearer(files.jwt(exp=None)), "CREDENTIALS_INVALID"),
    ("jwt: not yet", lambda files: bearer(files.jwt(nbf=time.time() + 60)), "CREDENTIALS_INVALID"),
    ("jwt: expired", lambda files: bearer(files.jwt(exp=time.time() - 1)), "CREDENTIALS_EXPIRED"),
]


@on_shared
@pytest.mark.parametrize(("show", "reason"), [each[1:] for each in SHOWN], ids=[each[0] for each in SHOWN])
async def test_what_proves_nothing_is_refused(
    guarded: tuple[Wire, Files], show: Any, reason: str, caplog: pytest.LogCaptureFixture
):
    wire, files = guarded
    metadata = show(files)
    refusal = await refusal_of(wire, "/postdate.v1.AdminService/GetServerInfo", metadata)
    assert (refusal.code, refusal.reason) == (UNAUTHENTICATED, reason)
    for _, value in metadata:
        token = value.rpartition(" ")[2]
        shown = [str(vars(record)) for record in caplog.records]
        assert not token or not any(token in each for each in shown), "a token is in the log"
        assert not token or token not in refusal.message


@on_shared
async def test_token_of_every_kind_opens_the_door(guarded: tuple[Wire, Files]):
    wire, files = guarded
    for metadata in (
        bearer("shop-secret"),
        (("authorization", "bearer shop-secret"),),
        bearer(files.jwt()),
        bearer(files.jwt(nbf=time.time() - 5, aud=["other", AUDIENCE])),
    ):
        await within(wire.admin.GetServerInfo(admin_pb2.GetServerInfoRequest(), metadata=metadata))


async def test_certificate_is_a_principal(serve: Serve, files: Files, tmp_path: Path):
    authority = Authority(tmp_path)
    pair = authority.issue("server", is_local=True)
    wire = await serve(
        **files.settings,
        tls_cert_file=pair.cert_file,
        tls_key_file=pair.key_file,
        tls_client_ca_file=authority.ca_file,
    )

    def client(token: str | None = None, **names: Any) -> postdate.Client:
        own = authority.issue("client", **names)
        tls = postdate.Tls(ca_file=authority.ca_file, cert_file=own.cert_file, key_file=own.key_file)
        return postdate.connect(wire.server.grpc_address, tls=tls, token=token, retry_for=timedelta(0))

    async with client(uris=("spiffe://example.org/billing",)) as billing:
        assert list((await within(billing.receive("orders", "billing"))).messages) == []
        with pytest.raises(postdate.PermissionDenied) as denied:
            await within(billing.topics.create("orders"))
        assert denied.value.metadata["principal"] == "cert:spiffe://example.org/billing"
    # A common name is free text: it does not pass for a URI, nor for a token's principal.
    async with client(common_name="spiffe://example.org/billing") as impostor:
        with pytest.raises(postdate.Unauthenticated):
            await within(impostor.receive("orders", "billing"))
    async with client(common_name="token:admin") as impostor:
        with pytest.raises(postdate.PermissionDenied) as denied:
            await within(impostor.stats())
        assert denied.value.metadata["principal"] == "cert:token:admin"
    # A token that is shown decides, a bad one too.
    async with client("admin-secret", common_name="x") as admin:
        await within(admin.topics.create("t"))
    async with client("bad", uris=("spiffe://example.org/billing",)) as neither:
        with pytest.raises(postdate.Unauthenticated):
            await within(neither.receive("orders", "billing"))


# -- what somebody may -------------------------------------------------------------------------------------------------


def as_(wire: Wire, token: str) -> postdate.Client:
    return postdate.connect(wire.server.grpc_address, token=token, retry_for=timedelta(0))


async def test_rights_hold_per_topic_and_subscription(serve: Serve, files: Files):
    wire = await serve(**files.settings)
    async with as_(wire, "shop-secret") as shop, as_(wire, "billing-secret") as billing:
        async with (
            billing.subscribe("orders", "billing") as subscription,
            shop.producer("orders") as producer,
        ):
            await within(producer.send(b"1"))
            message = await within(anext(aiter(subscription)))
            await within(message.ack())
        async with shop.producer("orders-eu") as producer:
            await within(producer.send(b"1"))
        for topic in ("orders2", "other", "xorders-eu"):
            async with shop.producer(topic) as producer:
                with pytest.raises(postdate.PermissionDenied):
                    await within(producer.send(b"1"))
        with pytest.raises(postdate.PermissionDenied):  # another's subscription of the same topic
            await within(billing.receive("orders", "audit"))
        with pytest.raises(postdate.PermissionDenied):
            await within(billing.schedule.cancel("orders", schedule_key="k"))
        assert sorted(wire.broker.registry.by_name) == ["orders", "orders-eu"]


async def test_denial_does_not_tell_what_exists(serve: Serve, files: Files):
    wire = await serve(**files.settings, auto_create_topics=False)
    async with as_(wire, "admin-secret") as admin, as_(wire, "billing-secret") as billing:
        await within(admin.topics.create("there"))
        said = []
        for topic in ("there", "nothere"):
            with pytest.raises(postdate.PermissionDenied) as denied:
                await within(billing.topics.get(topic))
            said.append(denied.value.message.replace(topic, "T"))
        assert said[0] == said[1]


@on_shared
async def test_huge_name_is_refused_at_once_and_not_shown(guarded: tuple[Wire, Files]):
    wire, _ = guarded
    name = "orders-" + "x" * 5_000_000
    asked = wire.admin.GetTopic(admin_pb2.GetTopicRequest(name=name), metadata=bearer("shop-secret"))
    refusal = await refused(asked)
    assert refusal.code is PERMISSION_DENIED
    assert len(refusal.message) < 300
    asked = wire.admin.GetTopic(admin_pb2.GetTopicRequest(name=name), metadata=bearer("admin-secret"))
    assert (await refused(asked)).reason == "INVALID_NAME"


async def names(listed: AsyncIterator[Any]) -> list[str]:
    return [each.name async for each in listed]


async def test_lists_show_what_the_caller_may_see(serve: Serve, files: Files):
    wire = await serve(**files.settings)
    async with as_(wire, "admin-secret") as admin, as_(wire, "shop-secret") as shop:
        for topic in ("orders", "orders-eu", "secret"):
            await within(admin.topics.create(topic))
        assert await within(names(admin.topics.list())) == ["orders", "orders-eu", "secret"]
        assert await within(names(shop.topics.list())) == ["orders", "orders-eu"]
        assert [each.topic for each in await within(shop.stats())] == ["orders", "orders-eu"]
        with pytest.raises(postdate.PermissionDenied):
            await within(shop.stats("orders", "secret"))


async def test_subscriptions_that_no_grant_is_for_are_in_no_list(serve: Serve, files: Files):
    wire = await serve(**files.settings)
    async with as_(wire, "admin-secret") as admin, as_(wire, "billing-secret") as billing:
        for name in ("audit", "billing"):
            await within(admin.subscriptions.create("orders", name))
        assert await within(names(billing.subscriptions.list("orders"))) == ["billing"]
        assert [each.name for each in (await within(billing.stats("orders")))[0].subscriptions] == ["billing"]
    async with as_(wire, "shop-secret") as shop:  # who produces may see the topic, and not who consumes
        (counts,) = await within(shop.stats("orders"))
        assert (counts.topic, list(counts.subscriptions)) == ("orders", [])
    async with as_(wire, "admin-secret") as admin:
        shown = (await within(admin.stats("orders")))[0].subscriptions
        assert [each.name for each in shown] == ["audit", "billing"]


async def test_dead_letter_topic_is_no_way_into_other_topics(serve: Serve, files: Files):
    files.access('[[grant]]\nprincipals = ["token:shop"]\ntopics = ["orders"]\nrights = ["manage"]\n')
    wire = await serve(**files.settings)
    async with as_(wire, "shop-secret") as shop:
        with pytest.raises(postdate.PermissionDenied):
            await within(
                shop.subscriptions.create(
                    "orders", "s", policy=postdate.SubscriptionPolicy(dead_letter_topic="payroll")
                )
            )
        await within(shop.subscriptions.create("orders", "s"))


def test_every_rule_says_what_it_is_about():
    """Rules about the broker as a whole are few, and named here."""
    whole = {path.rpartition("/")[2] for path, rule in RULES.items() if _asks_for(rule, TopicScope.ALL)}
    assert whole == {"CreateBackup", "ListBackups", "DeleteBackup", "MoveShard"}


def _asks_for(rule: Rule, topic: TopicScope) -> bool:
    return any(ask.topic is topic for ask in rule.always)
