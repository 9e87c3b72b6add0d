"""Settings: four sources in order, units, ranges, and refusals that name the culprit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import FrozenInstanceError, fields, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.config import SETTINGS, BrokerConfig, check_name, is_loopback, load_config, parse_nodes
from broker.errors import InvalidRequest
from broker.policy import OVERDUE_EXPIRE, TRACKER_BUCKET
from broker.rpc.status import FAILURE_BYTES_MAX
from broker.settings import MIB, ConfigError, SettingKind, split_address
from broker.topics.policies import default_subscription_policy, default_topic_policy
from tools.configuration import render_reference

ROOT = Path(__file__).resolve().parents[2]


def load(
    flags: Mapping[str, str] | None = None, environ: Mapping[str, str] | None = None, path: str | None = None
) -> BrokerConfig:
    return load_config(flags or {}, environ or {}, path)


def toml(tmp_path: Path, text: str) -> str:
    path = tmp_path / "postdate.toml"
    path.write_text(text)
    return str(path)


def refusal(
    flags: Mapping[str, str] | None = None, environ: Mapping[str, str] | None = None, path: str | None = None
) -> str:
    with pytest.raises(ConfigError) as caught:
        load(flags, environ, path)
    return str(caught.value)


def test_defaults_are_the_documented_ones_and_hold_together() -> None:
    config = load()
    assert config == BrokerConfig()
    assert (config.data_dir, config.grpc_address, config.http_address) == (
        "./data",
        "127.0.0.1:7650",
        "127.0.0.1:7680",
    )
    assert (config.payload_bytes_max, config.request_bytes_max) == (MIB, 16 * MIB)
    assert config.frame_bytes_max == 3.5 * MIB


def test_each_source_overrides_the_one_below(tmp_path: Path) -> None:
    path = toml(tmp_path, 'retention_ms = 1\nlease_ms = "1s"\ninitial_backoff_ms = "1s"')
    environ = {"POSTDATE_LEASE_MS": "2s", "POSTDATE_INITIAL_BACKOFF_MS": "2s"}
    config = load({"initial_backoff_ms": "3s"}, environ, path)
    assert (config.retention_ms, config.lease_ms, config.initial_backoff_ms) == (1, 2_000, 3_000)


def test_a_setting_is_in_the_group_whose_first_and_last_it_stands_between() -> None:
    groups = {setting.name: setting.group for setting in SETTINGS}
    ends = [groups["data_dir"], groups["log_level"], groups["payload_bytes_max"], groups["jwt_audience"]]
    assert ends == ["Broker", "Broker", "Limits", "Security"]
    assert groups["backup_dir"] == "Storage" and groups["lease_ms_max"] == "Delivery"


def test_every_setting_can_be_given_by_every_source(tmp_path: Path) -> None:
    for setting in SETTINGS:
        given_value = (
            str(setting.default).lower() if setting.spec.kind is SettingKind.SWITCH else str(setting.default)
        )
        assert load({setting.flag.removeprefix("--"): given_value}) == BrokerConfig()
        assert load({}, {setting.variable: given_value}) == BrokerConfig()
        assert load(path=toml(tmp_path, f'{setting.name} = "{given_value}"')) == BrokerConfig()


@pytest.mark.parametrize(
    ("name", "given_value", "expected"),
    [
        ("payload_bytes_max", "1MiB", 1 << 20),
        ("payload_bytes_max", "1.5 MiB", 3 << 19),
        ("payload_bytes_max", "1MB", 1_000_000),
        ("payload_bytes_max", "700", 700),
        ("lease_ms", "500ms", 500),
        ("lease_ms", "30s", 30_000),
        ("lease_ms", "1.5s", 1_500),
        ("lease_ms", "15m", 900_000),
        ("lease_ms", "12h", 43_200_000),
        ("lease_ms", "250", 250),
        ("topics_max", "1_000", 1_000),
        ("auto_create_topics", "off", False),
        ("auto_create_topics", "TRUE", True),
        ("grpc_address", "[::1]:0", "[::1]:0"),
    ],
)
def test_units_and_words_are_understood(name: str, given_value: str, expected: object) -> None:
    assert getattr(load({name: given_value}), name) == expected


def test_toml_takes_native_values(tmp_path: Path) -> None:
    config = load(path=toml(tmp_path, "auto_create_topics = false\nlease_ms = 250"))
    assert (config.auto_create_topics, config.lease_ms) == (False, 250)


@pytest.mark.parametrize(
    ("name", "given_value"),
    [
        ("payload_bytes_max", "0"),
        ("payload_bytes_max", "17MiB"),
        ("payload_bytes_max", "-1"),
        ("payload_bytes_max", "1M"),
        ("payload_bytes_max", "0.3B"),
        pytest.param("payload_bytes_max", "9" * 5_000, id="huge size"),
        ("payload_bytes_max", ""),
        ("lease_ms", "0"),
        ("lease_ms", "0.5ms"),
        ("lease_ms", "30 seconds"),
        ("checkpoint_interval_ms", "0"),
        ("topics_max", "1e3"),
        pytest.param("topics_max", "9" * 4_000, id="huge count"),
        ("auto_create_topics", "maybe"),
        ("auto_create_topics", ""),
        ("log_level", "loud"),
        ("overdue_action", "keep"),
        ("data_dir", ""),
        ("grpc_address", "7650"),
        ("grpc_address", "localhost:65536"),
        ("grpc_address", "::1:7650"),
        ("grpc_address", "[::z]:7650"),
        ("grpc_address", ":7650"),
    ],
)
def test_a_bad_value_is_refused_by_the_name_of_its_setting(name: str, given_value: str) -> None:
    message = refusal({name: given_value})
    assert name in message
    assert len(message) < 300
    assert f"POSTDATE_{name.upper()}" in refusal({}, {f"POSTDATE_{name.upper()}": given_value})


@pytest.mark.parametrize(
    "text", ["lease_ms = true", "lease_ms = 1.5", "lease_ms = [1]", "auto_create_topics = 1"]
)
def test_toml_of_the_wrong_type_is_refused(tmp_path: Path, text: str) -> None:
    assert text.split(maxsplit=1)[0] in refusal(path=toml(tmp_path, text))


@pytest.mark.parametrize("value", ["true", "1", "[1]", '"maybe"', "{a = 1}"])
def test_what_is_no_choice_is_told_the_choices(tmp_path: Path, value: str) -> None:
    message = refusal(path=toml(tmp_path, f"reflection = {value}"))
    assert message.startswith("reflection in ")
    assert "must be auto or on or off, not " in message


def test_unknown_names_are_refused_and_the_near_one_is_suggested(tmp_path: Path) -> None:
    assert refusal(path=toml(tmp_path, "lease_msec = 1")).endswith("Did you mean lease_ms?")
    message = refusal({}, {"POSTDATE_DATADIR": "/x"})
    assert "POSTDATE_DATADIR" in message
    assert "POSTDATE_DATA_DIR" in message
    assert "--data-dir?" in refusal({"data-dri": "/x"})
    assert "storage" in refusal(path=toml(tmp_path, "[storage]\ndata_dir = 'x'"))
    assert "POSTDATE_data_dir" in refusal({}, {"POSTDATE_data_dir": "/x"})


def test_variables_of_the_client_and_of_others_are_left_alone() -> None:
    environ = {"POSTDATE_ADDRESS": "h:1", "POSTDATE_OUTPUT": "json", "PATH": "/bin", "POSTDATED": "1"}
    assert load({}, environ) == BrokerConfig()
    assert load({}, {"POSTDATE_TOKEN": "x", "POSTDATE_TLS_CA": "ca.pem"}) == BrokerConfig()


def test_an_unreadable_file_is_named(tmp_path: Path) -> None:
    absent = str(tmp_path / "absent.toml")
    assert absent in refusal(path=absent)
    assert "is not TOML" in refusal(path=toml(tmp_path, "lease_ms ="))
    assert "is not TOML" in refusal(path=toml(tmp_path, "lease_ms = " + "9" * 5_000))


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ({"lease_ms_max": "1s"}, "lease_ms_max"),
        ({"max_backoff_ms": "1ms"}, "max_backoff_ms"),
    ],
)
def test_settings_that_cannot_hold_together_are_refused(flags: dict[str, str], named: str) -> None:
    assert refusal(flags).startswith(named)


@pytest.mark.parametrize("payload_bytes_max", [1, MIB, 16 * MIB])
def test_what_the_parts_may_hold_fits_together_for_every_payload(payload_bytes_max: int) -> None:
    config, policy = BrokerConfig(payload_bytes_max=payload_bytes_max), default_topic_policy(BrokerConfig())
    tuning = config.tuning
    assert config.message_bytes_max <= min(config.request_bytes_max, config.frame_bytes_max)
    assert tuning.ack_entries_max * FAILURE_BYTES_MAX <= config.frame_bytes_max
    assert tuning.read_batch_entries <= tuning.ack_entries_max
    assert policy.ledger_max_bytes is not None and policy.ledger_max_entries is not None
    for holder in (tuning.journal_segment_bytes, tuning.journal_pending_bytes_max, policy.ledger_max_bytes):
        assert config.request_bytes_max <= holder
    assert tuning.batch_messages_max <= policy.ledger_max_entries


def test_each_policy_inherits_its_setting_or_has_a_default_of_its_own() -> None:
    config = BrokerConfig(max_delay_ms=5, overdue_action="expire", lease_ms=7)
    topic, subscription = default_topic_policy(config), default_subscription_policy(config)
    assert (topic.max_delay_ms, topic.overdue_action, subscription.lease_ms) == (5, OVERDUE_EXPIRE, 7)
    assert (topic.tracker, topic.tick_ms, subscription.backoff_multiplier) == (TRACKER_BUCKET, 1_000, 2)
    unset = [each.name for each in fields(topic) if getattr(topic, each.name) is None]
    unset += [each.name for each in fields(subscription) if getattr(subscription, each.name) is None]
    assert unset == ["dead_letter_topic"]


def test_a_config_built_in_code_is_checked_too() -> None:
    with pytest.raises(ConfigError, match="lease_ms_max must be from 1ms to 7d, but is 0"):
        BrokerConfig(lease_ms_max=0)
    with pytest.raises(ConfigError, match="lease_ms"):
        replace(BrokerConfig(), lease_ms="1")  # type: ignore[arg-type]
    with pytest.raises(FrozenInstanceError):
        BrokerConfig().lease_ms = 1  # type: ignore[misc]


@pytest.mark.parametrize(
    ("reflection", "host", "expected"),
    [
        ("auto", "127.0.0.1", True),
        ("auto", "127.9.9.9", True),
        ("auto", "localhost", True),
        ("auto", "[::1]", True),
        ("auto", "0.0.0.0", False),
        ("auto", "broker.example", False),
        ("on", "0.0.0.0", True),
        ("off", "127.0.0.1", False),
    ],
)
def test_reflection_is_on_by_itself_for_loopback_only(reflection: str, host: str, expected: bool) -> None:
    config = BrokerConfig(reflection=reflection, grpc_address=f"{host}:7650")
    assert config.reflection_enabled is expected


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"grpc_address": "0.0.0.0:7650"}, "set tls_cert_file and tls_key_file, bind to 127.0.0.1"),
        ({"grpc_address": "broker.example:7650"}, "POSTDATE_ALLOW_PLAINTEXT=true"),
        ({"tls_cert_file": "c"}, "tls_cert_file requires tls_key_file"),
        ({"tls_key_file": "k"}, "tls_key_file requires tls_cert_file"),
        ({"tls_client_ca_file": "a"}, "tls_client_ca_file requires tls_cert_file"),
        ({"access_file": "a"}, "requires a way to authenticate clients"),
        ({"tokens_file": "t"}, "tokens_file requires access_file"),
        ({"access_file": "a", "jwt_keys_file": "j", "jwt_issuer": "i"}, "requires jwt_audience"),
        ({"access_file": "a", "jwt_keys_file": "j", "jwt_audience": "i"}, "requires jwt_issuer"),
        ({"access_file": "a", "tokens_file": "t", "jwt_issuer": "i"}, "requires jwt_keys_file"),
    ],
)
def test_security_that_cannot_hold_is_refused(given: dict[str, str], told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(given)
    assert told in str(caught.value)


def test_plaintext_beyond_this_machine_takes_tls_or_a_switch() -> None:
    load({"grpc_address": "0.0.0.0:7650", "allow_plaintext": "true"})
    load({"grpc_address": "0.0.0.0:7650", "tls_cert_file": "c", "tls_key_file": "k"})


@pytest.mark.parametrize(
    ("overrides", "environ"), [({"admin_token": "x" * 20}, {}), ({}, {"POSTDATE_ADMIN_TOKEN": "x" * 20})]
)
def test_the_token_of_pages_that_is_gone_is_refused_with_what_took_its_place(
    overrides: dict[str, str], environ: dict[str, str]
) -> None:
    with pytest.raises(ConfigError, match="the pages take the tokens of tokens_file") as told:
        load_config(overrides, environ)
    assert "xxx" not in str(told.value)


def test_addresses_come_apart() -> None:
    assert split_address("[::1]:7650") == ("::1", 7650)
    assert split_address("localhost:0") == ("localhost", 0)
    assert is_loopback("::1")
    assert not is_loopback("::")


@pytest.mark.parametrize("name", ["a", "A9", "orders.v1_x~y-z", "a" * 255, "0..1"])
def test_plain_names_are_accepted(name: str) -> None:
    check_name("topic", name, "topic")


@pytest.mark.parametrize(
    "name", ["", ".", "..", "a/b", "../x", "-a", "_a", "a b", "a\n", "a\0", "é", "a" * 256, "\u0661"]
)
def test_other_names_are_refused_with_their_field(name: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        check_name("topic", name, "messages[3].topic")
    assert caught.value.field == "messages[3].topic"
    assert caught.value.reason == "INVALID_NAME"
    assert caught.value.message.isprintable()
    assert len(caught.value.message) < 250


@given(st.text(max_size=40))
def test_any_text_for_any_setting_is_a_value_or_a_config_error(text: str) -> None:
    for setting in SETTINGS:
        try:
            load({setting.name: text})
        except ConfigError as error:
            assert setting.name in str(error)  # noqa: PT017


def test_every_setting_says_what_it_means_in_a_sentence() -> None:
    assert [setting.name for setting in SETTINGS] == [
        field.name for field in fields(BrokerConfig) if "spec" in field.metadata
    ]
    assert sum(setting.group != "Cluster" for setting in SETTINGS) <= 50
    assert sum(setting.group == "Cluster" for setting in SETTINGS) <= 5, "nobody else has to read these"
    for setting in SETTINGS:
        assert setting.spec.help.endswith("."), setting.name


def test_the_documentation_is_what_the_code_says() -> None:
    document = (ROOT / "docs/configuration.md").read_text()
    assert document == render_reference(), "run: python -m tools.configuration > docs/configuration.md"


def test_nodes_of_a_cluster_are_parsed_in_order() -> None:
    nodes = parse_nodes("b=10.0.0.2:7650, a=[::1]:7650,")
    assert list(nodes.items()) == [("b", "10.0.0.2:7650"), ("a", "[::1]:7650")]
    assert parse_nodes("") == {}


@pytest.mark.parametrize(
    "nodes",
    ["a", "a=", "a=host", "a~b=h:1", "=h:1", "a b=h:1", "a=h:1,a=h:2", "a=h:1,b=h:1", f"{'x' * 33}=h:1"],
)
def test_nodes_that_cannot_be_told_apart_or_reached_are_refused(nodes: str) -> None:
    with pytest.raises(ConfigError, match="cluster_nodes"):
        load({"cluster_nodes": nodes})


def test_a_cluster_needs_its_nodes_and_this_one_among_them() -> None:
    with pytest.raises(ConfigError, match="requires cluster_nodes"):
        load({"cluster_store": "file:///x"})
    with pytest.raises(ConfigError, match="node is c"):
        load({"cluster_store": "file:///x", "cluster_nodes": "a=h:1,b=h:2", "node": "c"})
    assert load({"cluster_store": "file:///x", "cluster_nodes": "a=h:1", "node": "a"}).node == "a"
