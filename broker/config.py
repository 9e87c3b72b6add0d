"""Settings of the broker: unit, default, range and meaning of each.

A setting has one name and four sources, from lowest to highest: its default, the TOML file, the environment
and the flags: `data_dir` is `data_dir = ...` in TOML, `POSTDATE_DATA_DIR` and `--data-dir`. What is not a
setting is refused by name: a misspelt limit that is ignored in silence is missed on the day it is needed.

To add a setting, add a field to `BrokerConfig` and run `make generated`.
"""

from __future__ import annotations

import difflib
import ipaddress
import posixpath
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import cast

from broker.errors import InvalidRequest
from broker.policy import SubscriptionPolicy, TopicPolicy
from broker.settings import (
    DAY_MS,
    ENV_PREFIX,
    GIB,
    HOUR_MS,
    KIB,
    MIB,
    MINUTE_MS,
    SECOND_MS,
    ConfigError,
    Setting,
    SettingKind,
    Value,
    address,
    check_range,
    choice,
    count,
    duration,
    inherited,
    is_name,
    parse_setting,
    setting,
    show,
    size,
    split_address,
    switch,
    text,
)
from broker.topic_shards import ALL_TOPICS, TopicShard
from broker.tuning import Tuning

CLIENT_VARIABLES = frozenset(
    {
        "POSTDATE_ADDRESS",
        "POSTDATE_CONTEXT",
        "POSTDATE_OUTPUT",
        "POSTDATE_TLS",
        "POSTDATE_TLS_CA",
        "POSTDATE_TLS_CERT",
        "POSTDATE_TLS_KEY",
        "POSTDATE_TLS_SERVER_NAME",
        "POSTDATE_TOKEN",
        "POSTDATE_TOKEN_FILE",
        "POSTDATE_ALLOW_PLAINTEXT_TOKEN",
    }
)
"""Variables of the `postdate` client command, which may share an environment with the broker."""

TRACEPARENT_BYTES_MAX = 256
"""Greatest traceparent of one message, generously: the W3C's has 55."""
PROPERTY_OVERHEAD_BYTES = 16
"""Bytes that framing adds to the name and the value of one property, at most."""
NODE_CHARACTERS_MAX = 32
_PORT_MAX = 65_535
MESSAGE_OVERHEAD_BYTES = 4 * KIB
"""Bytes that ids, times and framing add to the texts and the payload of one message, generously."""


SHARDS_MAX = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerConfig:
    """All settings, each in range; `check_consistent` checks that they fit together."""

    data_dir: str = setting("./data", text("Data directory; used by one broker at a time."))
    grpc_address: str = setting(
        "127.0.0.1:7650", address("Address of the gRPC API; port 0 picks a free port.")
    )
    http_address: str = setting(
        "127.0.0.1:7680",
        address("Address of the web pages, /metrics, /livez and /readyz; port 0 picks a free port."),
    )
    http_hosts: str = setting(
        "",
        text("Host names accepted by the web pages besides loopback and http_address, separated by commas."),
    )
    audit_report_dir: str = setting("", text("Directory of the audit report shown on the web pages."))
    reflection: str = setting(
        "auto", choice("gRPC server reflection; auto: on if grpc_address is loopback.", "auto", "on", "off")
    )
    auto_create_topics: bool = setting(True, switch("Create missing topics on Produce and Subscribe."))
    auto_create_subscriptions: bool = setting(True, switch("Create missing subscriptions on Subscribe."))
    drain_grace_ms: int = setting(
        10 * SECOND_MS,
        duration(
            0,
            10 * MINUTE_MS,
            "Time a stopping broker waits for consumers to settle the messages they hold; 0: do not wait.",
        ),
    )
    log_format: str = setting(
        "text", choice("Log format: one JSON object per line, or plain text.", "json", "text")
    )
    log_level: str = setting("info", choice("Minimum log level.", "debug", "info", "warning", "error"))

    payload_bytes_max: int = setting(
        MIB,
        size(
            1, 16 * MIB, "Maximum payload of a message; the size limits of requests and frames grow with it."
        ),
    )
    topics_max: int = setting(100_000, count(1, 10_000_000, "Maximum number of topics."))
    subscriptions_per_topic_max: int = setting(
        10_000, count(1, 1_000_000, "Maximum number of subscriptions per topic.")
    )
    consumers_per_subscription_max: int = setting(
        1_000, count(1, 1_000_000, "Maximum number of connected consumers per subscription.")
    )
    connections_max: int = setting(
        10_000,
        count(
            1,
            1_000_000,
            "Maximum number of gRPC connections; reduced at start if the limit of open files (ulimit -n) is too low.",
        ),
    )
    streams_max: int = setting(
        20_000, count(1, 1_000_000, "Maximum number of concurrent streams and long-polling calls.")
    )
    receiving_bytes_max: int = setting(
        GIB,
        size(
            KIB,
            64 * GIB,
            "Maximum memory for requests being received; further requests wait until memory is free.",
        ),
    )
    max_pending_messages: int = inherited(TopicPolicy, "max_pending_messages")
    max_pending_bytes: int = inherited(TopicPolicy, "max_pending_bytes")
    max_produce_rate: int = inherited(TopicPolicy, "max_produce_rate")

    checkpoint_interval_ms: int = setting(
        30 * SECOND_MS,
        duration(1, DAY_MS, "Maximum time between checkpoints; a longer interval makes recovery slower."),
    )
    disk_reserve_bytes: int = setting(
        256 * MIB,
        size(
            0,
            1_024 * GIB,
            "Free disk space below which Produce is refused. Acks, deliveries and dead letters may use all of it; "
            "in a cluster, rewriting ledgers may use half of it.",
        ),
    )
    compaction_lease_ms: int = setting(
        HOUR_MS,
        duration(SECOND_MS, 7 * DAY_MS, "Maximum time a compaction job may hold its input files."),
    )
    backup_dir: str = setting(
        "auto",
        text(
            "Backup directory; auto: backups in data_dir. On the same file system, unchanged files are hard-linked."
        ),
    )
    backup_keep_count: int = setting(
        7,
        count(
            0, 1_000_000, "Number of backups kept; older ones are deleted after the next backup; 0: keep all."
        ),
    )
    backup_max_age_ms: int = setting(
        0,
        duration(0, 3_660 * DAY_MS, "Age at which backups are deleted after the next backup; 0: no limit."),
    )

    max_delay_ms: int = inherited(TopicPolicy, "max_delay_ms")
    default_ttl_ms: int = inherited(TopicPolicy, "default_ttl_ms")
    overdue_action: str = inherited(TopicPolicy, "overdue_action")
    retention_ms: int = inherited(TopicPolicy, "retention_ms")
    retention_bytes: int = inherited(TopicPolicy, "retention_bytes")
    dedup_window_ms: int = inherited(TopicPolicy, "dedup_window_ms")
    dedup_memory_bytes_max: int = setting(
        128 * MIB, size(64 * KIB, GIB, "Maximum memory for the sequence ids of producers, over all topics.")
    )

    lease_ms: int = inherited(SubscriptionPolicy, "lease_ms")
    lease_ms_max: int = setting(
        12 * HOUR_MS, duration(1, 7 * DAY_MS, "Maximum lease a subscription or a consumer may ask for.")
    )
    initial_backoff_ms: int = inherited(SubscriptionPolicy, "initial_backoff_ms")
    max_backoff_ms: int = inherited(SubscriptionPolicy, "max_backoff_ms")
    max_delivery_attempts: int = inherited(SubscriptionPolicy, "max_delivery_attempts")

    allow_plaintext: bool = setting(
        False,
        switch(
            "Allow unencrypted access from other machines: gRPC without TLS, and web pages and HTTP calls."
        ),
    )
    tls_cert_file: str = setting("", text("PEM file of the server certificate and its chain; enables TLS."))
    tls_key_file: str = setting("", text("PEM file of the private key of tls_cert_file."))
    tls_client_ca_file: str = setting(
        "", text("PEM file of the CA bundle for client certificates; every client must then present one.")
    )
    access_file: str = setting("", text("TOML file of access rules; enables access control."))
    tokens_file: str = setting("", text("TOML file of principals and the hashes of their tokens."))
    jwt_keys_file: str = setting("", text("JWKS or PEM file of the public keys of JSON web tokens."))
    jwt_algorithms: str = setting(
        "ES256,RS256,EdDSA", text("Signature algorithms accepted in JSON web tokens, separated by commas.")
    )
    jwt_issuer: str = setting("", text("Issuer (iss) required in JSON web tokens."))
    jwt_audience: str = setting("", text("Audience (aud) required in JSON web tokens."))

    cluster_store: str = setting(
        "",
        text("URL of the object store of a cluster, such as s3://bucket/prefix; enables the cluster."),
    )
    cluster_nodes: str = setting(
        "", text("Names and gRPC addresses of all nodes of the cluster: a=10.0.0.1:7650,b=10.0.0.2:7650.")
    )
    node: str = setting("", text("Name of this node in cluster_nodes; if not set, the host name."))

    shards: int = setting(
        1,
        count(
            1,
            SHARDS_MAX,
            "Number of shards, outside a cluster; each is a process with its own journal. For an existing data_dir "
            "only `postdate-broker reshard` can change it.",
        ),
    )
    shard_ports: bool = setting(
        True,
        switch(
            "Also listen on a port for each shard: the port of grpc_address + 1 + the number of the shard."
        ),
    )

    tuning: Tuning = field(default_factory=Tuning)
    # No settings: what the process of a shard is told by its supervisor.
    topic_shard: TopicShard = ALL_TOPICS
    grpc_socket: str = ""
    """Path of a socket to listen on instead of grpc_address."""
    http_socket: str = ""
    """The same for http_address."""
    shard_address: str = ""
    """Address on which clients reach this shard, beside its socket. Empty: through the front alone."""

    def __post_init__(self) -> None:
        for own_setting in SETTINGS:
            check_range(own_setting, getattr(self, own_setting.name))

    @property
    def message_bytes_max(self) -> int:
        """No message within the limits takes more bytes, stored or delivered."""
        tuning = self.tuning
        return (
            self.payload_bytes_max
            + tuning.key_bytes_max
            + tuning.schedule_key_bytes_max
            + tuning.properties_bytes_max
            + tuning.properties_count_max * PROPERTY_OVERHEAD_BYTES
            + TRACEPARENT_BYTES_MAX
            + MESSAGE_OVERHEAD_BYTES
        )

    @property
    def request_bytes_max(self) -> int:
        """Greatest request frame accepted."""
        return self.tuning.request_bytes_max or max(16 * MIB, self.message_bytes_max)

    @property
    def frame_bytes_max(self) -> int:
        """Greatest frame sent. gRPC clients refuse more than 4 MiB unless told otherwise."""
        return self.tuning.frame_bytes_max or max(3_584 * KIB, self.message_bytes_max)

    @property
    def reflection_enabled(self) -> bool:
        """Return whether reflection is served, with `auto` resolved."""
        if self.grpc_socket:
            return False  # the front of the shards has it
        if self.reflection == "auto":
            return is_loopback(split_address(self.grpc_address)[0])
        return self.reflection == "on"


_GROUPS = {
    "Broker": ("data_dir", "log_level"),
    "Limits": ("payload_bytes_max", "max_produce_rate"),
    "Storage": ("checkpoint_interval_ms", "backup_max_age_ms"),
    "Schedule": ("max_delay_ms", "dedup_memory_bytes_max"),
    "Delivery": ("lease_ms", "max_delivery_attempts"),
    "Security": ("allow_plaintext", "jwt_audience"),
    "Cluster": ("cluster_store", "shard_ports"),
}
"""The first and the last setting of each group. One declared between two groups belongs to neither, and is an error."""


def _settings() -> tuple[Setting, ...]:
    declared = [field_ for field_ in fields(BrokerConfig) if "spec" in field_.metadata]
    names = [field_.name for field_ in declared]
    groups = [
        group
        for group, (first, last) in _GROUPS.items()
        for _ in range(names.index(first), names.index(last) + 1)
    ]
    ends = {name for ends in _GROUPS.values() for name in ends}
    assert len(groups) == len(names), (
        f"a setting is in no group, or in two: these have ends at {sorted(ends)}"
    )
    return tuple(
        Setting(field_.name, group, field_.metadata["spec"], cast(Value, field_.default))
        for field_, group in zip(declared, groups, strict=True)
    )


SETTINGS = _settings()
"""In the order of the fields; `cli` makes a flag of each."""


def load_config(
    argv_overrides: Mapping[str, str], environ: Mapping[str, str], config_path: str | None = None
) -> BrokerConfig:
    """Gather all sources; raise ConfigError that names the setting and its source.

    `argv_overrides` maps setting names (`data_dir` or `data-dir`) to what the command line gave for them.
    """
    values: dict[str, Value] = {}

    def take(spelling: str, spell: Callable[[Setting], str], raw: object, source: str) -> None:
        setting = _find(spelling, spell, source)
        values[setting.name] = parse_setting(setting, raw, source)

    if config_path is not None:
        for key, raw in _read_toml(config_path).items():
            take(key, lambda known: known.name, raw, f"{key} in {config_path}")
    for variable in sorted(environ):
        if variable.startswith(ENV_PREFIX) and variable not in CLIENT_VARIABLES:
            source = f"environment variable {variable}"
            take(variable, lambda known: known.variable, environ[variable], source)
    for key, text_given in argv_overrides.items():
        flag = "--" + key.replace("_", "-")
        take(flag, lambda known: known.flag, text_given, f"flag {flag}")
    config = BrokerConfig(**values)  # type: ignore[arg-type]  # each value was parsed by its field's kind
    check_consistent(config)
    return config


def check_consistent(config: BrokerConfig) -> None:
    """Refuse settings that are each in range but cannot hold together."""
    for low_name, high_name in (("lease_ms", "lease_ms_max"), ("initial_backoff_ms", "max_backoff_ms")):
        low, high = getattr(config, low_name), getattr(config, high_name)
        if low > high:
            kind = SettingKind.DURATION
            raise ConfigError(
                f"{high_name} is {show(kind, high)}, but must be at least {low_name}: {show(kind, low)}"
            )
    _check_backup_dir(config)
    _check_security(config)
    _check_cluster(config)
    _check_shards(config)


def parse_nodes(value: str) -> dict[str, str]:
    """Return the addresses of nodes by name, in the order given. Raises ConfigError."""
    nodes: dict[str, str] = {}
    for part in filter(None, (part.strip() for part in value.split(","))):
        name, _, place = part.partition("=")
        try:
            split_address(place)
        except ValueError as error:
            raise ConfigError(f"cluster_nodes: {part}: not NAME=HOST:PORT: {error}") from None
        if not is_name(name) or "~" in name or len(name) > NODE_CHARACTERS_MAX:
            raise ConfigError(
                f"cluster_nodes: {name!r} cannot name a node: use 1 to {NODE_CHARACTERS_MAX} of A-Z a-z 0-9 . _ -, a "
                "letter or digit first"
            )
        if name in nodes or place in nodes.values():
            raise ConfigError(f"cluster_nodes: {part}: duplicate name or address")
        nodes[name] = place
    return nodes


def _check_cluster(config: BrokerConfig) -> None:
    """Refuse a node that no other one could tell from its neighbours."""
    nodes = parse_nodes(config.cluster_nodes)
    if config.cluster_store and not nodes:
        raise ConfigError("cluster_store requires cluster_nodes")
    if config.cluster_store and config.node and config.node not in nodes:
        raise ConfigError(f"node is {config.node}, but cluster_nodes contains only {', '.join(nodes)}")


def _check_shards(config: BrokerConfig) -> None:
    """Refuse what several shards cannot do yet."""
    if config.shards == 1:
        return
    if config.cluster_store:
        raise ConfigError(
            "shards cannot be set together with cluster_store: `cluster create --shards` sets the number of shards "
            "of a cluster. Remove shards"
        )
    port = split_address(config.grpc_address)[1]
    if config.shard_ports and port + config.shards > _PORT_MAX:
        raise ConfigError(
            f"grpc_address: the {config.shards} shards use the ports that follow {port}, but the highest port is "
            f"{_PORT_MAX}: choose a lower port, or set shard_ports to false"
        )
    if config.access_file and config.tls_client_ca_file:
        raise ConfigError(
            "access_file and tls_client_ca_file cannot be used together with several shards, because identities of "
            "client certificates are not passed on to shards. Use tokens, without tls_client_ca_file"
        )


def _check_security(config: BrokerConfig) -> None:
    """Refuse what would leave a door open, or shut it for everybody."""
    for name, needed in (
        ("tls_cert_file", "tls_key_file"),
        ("tls_key_file", "tls_cert_file"),
        ("tls_client_ca_file", "tls_cert_file"),
        ("tokens_file", "access_file"),
        ("jwt_keys_file", "access_file"),
        ("jwt_keys_file", "jwt_issuer"),
        ("jwt_keys_file", "jwt_audience"),
        ("jwt_issuer", "jwt_keys_file"),
        ("jwt_audience", "jwt_keys_file"),
    ):
        if getattr(config, name) and not getattr(config, needed):
            raise ConfigError(f"{name} requires {needed}")
    if config.access_file and not (config.tokens_file or config.jwt_keys_file or config.tls_client_ca_file):
        raise ConfigError(
            "access_file requires a way to authenticate clients: set tokens_file, jwt_keys_file or tls_client_ca_file"
        )
    if not (
        config.tls_cert_file or config.allow_plaintext or is_loopback(split_address(config.grpc_address)[0])
    ):
        raise ConfigError(
            f"grpc_address {config.grpc_address} is not loopback and TLS is off: set tls_cert_file and tls_key_file, "
            "bind to 127.0.0.1, or, in a trusted network, set allow_plaintext (POSTDATE_ALLOW_PLAINTEXT=true)"
        )


def _check_backup_dir(config: BrokerConfig) -> None:
    """Backups among the broker's own files would be taken for what no manifest names, and removed."""
    if config.backup_dir == "auto":
        return
    data_dir, backup_dir = map(posixpath.abspath, (config.data_dir, config.backup_dir))
    own = [f"{data_dir}/{name}/" for name in ("topics", "journal", "backup.pins", "staging")]
    if backup_dir == data_dir or any(f"{backup_dir}/".startswith(folder) for folder in own):
        raise ConfigError(f"backup_dir is {config.backup_dir}, but must not be among the broker's own files")


def check_name(kind: str, value: str, field: str) -> None:
    """Raise InvalidRequest unless `value` may name a `kind`, such as "topic"; `field` is the proto's."""
    if not is_name(value):
        shown = ascii(value if len(value) <= 64 else value[:64] + "...")
        raise InvalidRequest(
            f"{shown} cannot name a {kind}: use 1 to 255 of A-Z a-z 0-9 . _ ~ -, a letter or digit first",
            field=field,
            reason="INVALID_NAME",
        )


ALL_ADDRESSES = ("0.0.0.0", "::")
"""Hosts that stand for every address of this machine."""


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach a server bound to `host`."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _find(spelling: str, spell: Callable[[Setting], str], source: str) -> Setting:
    known = {spell(setting): setting for setting in SETTINGS}
    if spelling.lower().removeprefix("postdate_").strip("-").replace("-", "_") == "admin_token":
        raise ConfigError(
            f"{source}: there is no admin_token any more: the pages take the tokens of tokens_file and jwt_keys_file, "
            "and access_file says what each may do"
        )
    if spelling not in known:
        close = difflib.get_close_matches(spelling, known, n=1)
        hint = f". Did you mean {close[0]}?" if close else ""
        raise ConfigError(f"{source}: unknown setting{hint}")
    return known[spelling]


def _read_toml(path: str) -> dict[str, object]:
    try:
        with open(path, "rb") as file:
            return tomllib.load(file)
    except OSError as error:
        raise ConfigError(f"cannot read the configuration file {path}: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"the configuration file {path} is not TOML: {error}") from error
