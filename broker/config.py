"""Every setting of the broker, with its unit, default, range and meaning.

A setting has one name and four sources, from lowest to highest: its default, the TOML file, the environment
and the flags: `data_dir` is `data_dir = ...` in TOML, `POSTDATE_DATA_DIR` and `--data-dir`. What is not a
setting is refused by name: a misspelt limit that is ignored in silence is missed on the day it is needed.

To add a setting, add a field to `BrokerConfig` and run `python -m tools.configuration > docs/configuration.md`.
"""

from __future__ import annotations

import difflib
import ipaddress
import os
import posixpath
import re
import stat
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from dataclasses import field as field_with
from typing import Annotated, cast, get_type_hints

from broker.errors import InvalidRequest
from broker.model import ENTRY_ID_MAX, TIME_MS_MAX
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
    factor,
    parse_setting,
    secret,
    show,
    size,
    split_address,
    switch,
    text,
)

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
"""What framing adds to the name and the value of one property, at most."""
MESSAGE_OVERHEAD_BYTES = 4 * KIB
"""What ids, times and framing add to the texts and the payload of one message, generously."""
ENTRY_FAILURE_BYTES = 192
"""What one id that cannot be taken adds to an answer, at most."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._~-]{0,254}", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerConfig:
    """All settings. Each value is in range; whether they fit together is `check_consistent`'s question."""

    # fmt: off   (as a table: the formatter would give each setting four to six lines)
    data_dir: Annotated[str, text("Folder of everything durable. One broker at a time may use it.")] = (
        "./data"
    )
    grpc_address: Annotated[
        str, address("Where producers, consumers and admin calls arrive. Port 0 picks one.")
    ] = "127.0.0.1:7650"
    http_address: Annotated[
        str, address("Where the pages, /metrics, /livez and /readyz are served. Port 0 picks one.")
    ] = "127.0.0.1:7680"
    http_hosts: Annotated[
        str,
        text(
            "Host names the pages answer to besides loopback and the address they listen on, with commas between them.",
        ),
    ] = ""
    admin_token: Annotated[
        str, secret(16, "Lets whoever logs in with it change things on the pages; without it they only show.")
    ] = field_with(default="", repr=False)
    audit_report_dir: Annotated[str, text("Folder of the audit's report, which the pages show.")] = ""
    reflection: Annotated[
        str, choice("gRPC reflection; auto: on if grpc_address is loopback.", "auto", "on", "off")
    ] = "auto"
    auto_create_topics: Annotated[bool, switch("Produce and Subscribe create a topic that is not there.")] = (
        True
    )
    auto_create_subscriptions: Annotated[
        bool, switch("Subscribe creates a subscription that is not there.")
    ] = True
    drain_grace_ms: Annotated[
        int,
        duration(
            0,
            10 * MINUTE_MS,
            "How long a stopping broker waits for consumers that hold messages; 0: not at all.",
        ),
    ] = 10 * SECOND_MS
    clock_recheck_ms: Annotated[
        int, duration(1, MINUTE_MS, "Longest sleep of a delivery timer, so that a stepped clock is noticed.")
    ] = SECOND_MS
    log_format: Annotated[str, choice("One JSON object a line, or text for people.", "json", "text")] = "text"
    log_level: Annotated[str, choice("Least level logged.", "debug", "info", "warning", "error")] = "info"

    payload_bytes_max: Annotated[int, size(1, 64 * MIB, "Greatest payload of one message.")] = MIB
    key_bytes_max: Annotated[int, size(1, 64 * KIB, "Greatest key of one message.")] = KIB
    schedule_key_bytes_max: Annotated[int, size(1, 64 * KIB, "Greatest schedule_key of one message.")] = 512
    properties_count_max: Annotated[int, count(0, 10_000, "Most properties of one message.")] = 64
    properties_bytes_max: Annotated[int, size(0, 4 * MIB, "All property keys and values of one message.")] = (
        16 * KIB
    )
    batch_messages_max: Annotated[int, count(1, 100_000, "Most messages in one produce request.")] = 5_000
    ack_entries_max: Annotated[
        int, count(1, 1_000_000, "Most ids in one request to acknowledge, nack or extend.")
    ] = 10_000
    schedule_names_max: Annotated[
        int, count(1, 100_000, "Most messages that one request cancels or moves.")
    ] = 5_000
    request_bytes_max: Annotated[int, size(KIB, 256 * MIB, "Greatest request frame accepted.")] = 16 * MIB
    frame_bytes_max: Annotated[
        int,
        size(
            KIB, 256 * MIB, "Greatest frame sent. gRPC clients refuse more than 4MiB unless told otherwise."
        ),
    ] = 3_584 * KIB
    topics_max: Annotated[int, count(1, 10_000_000, "Most topics.")] = 100_000
    subscriptions_per_topic_max: Annotated[int, count(1, 1_000_000, "Most subscriptions of one topic.")] = (
        10_000
    )
    consumers_per_subscription_max: Annotated[
        int, count(1, 1_000_000, "Most connected consumers of one subscription.")
    ] = 1_000
    connections_max: Annotated[
        int,
        count(
            1, 1_000_000, "Most gRPC connections; fewer where the system's limit of open files is too low."
        ),
    ] = 10_000
    http_connections_max: Annotated[
        int,
        count(1, 100_000, "Most HTTP connections; beyond it the one that was silent for longest is closed."),
    ] = 256
    streams_max: Annotated[int, count(1, 1_000_000, "Most streams, and calls that wait, at once.")] = 20_000
    receiving_bytes_max: Annotated[
        int,
        size(KIB, 64 * GIB, "Greatest requests that may arrive at once; further calls wait for their turn."),
    ] = GIB
    first_message_ms: Annotated[
        int, duration(10, HOUR_MS, "How long a call or stream may take to send its first message.")
    ] = 30 * SECOND_MS

    journal_segment_bytes: Annotated[int, size(4 * KIB, 4 * GIB - 1, "Size of a journal file.")] = 64 * MIB
    journal_spare_segments_max: Annotated[int, count(0, 1_000, "Journal files kept for reuse.")] = 4
    journal_group_bytes_max: Annotated[
        int, size(1, 4 * GIB - 1, "Most that one sync writes; a single greater record still goes alone.")
    ] = 8 * MIB
    journal_pending_bytes_max: Annotated[
        int, size(1, 4 * GIB - 1, "Most that waits for a sync; beyond it producers wait.")
    ] = 32 * MIB
    checkpoint_bytes: Annotated[
        int, size(1, 64 * GIB, "Journal gathered before a checkpoint; bounds the time of a restart.")
    ] = 64 * MIB
    checkpoint_interval_ms: Annotated[
        int, duration(1, DAY_MS, "Longest time between a change and its checkpoint.")
    ] = 30 * SECOND_MS
    ledger_entries_max: Annotated[int, count(1, ENTRY_ID_MAX, "Entries after which a ledger rolls.")] = (
        1_000_000
    )
    # The offset of a row is 32 bits wide, hence the upper end.
    ledger_bytes_max: Annotated[int, size(1, 4 * GIB - 1, "Bytes after which a ledger rolls.")] = 256 * MIB
    ledger_max_age_ms: Annotated[
        int, duration(0, 3_660 * DAY_MS, "Age after which a ledger rolls; 0: never by age.")
    ] = 0
    tail_bytes_max: Annotated[
        int, size(1, 4 * GIB - 1, "Ledger bytes over all topics that are in memory and not yet written.")
    ] = 8 * MIB
    open_ledgers_max: Annotated[int, count(1, 100_000, "Most ledgers with open files.")] = 256
    disk_reserve_bytes: Annotated[
        int, size(0, 1_024 * GIB, "Produce is refused when less is free; acks and deliveries use it.")
    ] = 256 * MIB

    backup_dir: Annotated[
        str,
        text(
            "Folder of backups; auto: `backups` in data_dir. On the file system of data_dir a backup links what never "
            "changes."
        ),
    ] = "auto"
    backup_keep_count: Annotated[
        int, count(0, 1_000_000, "Backups kept; older ones are deleted after a new one is complete; 0: all.")
    ] = 7
    backup_max_age_ms: Annotated[
        int, duration(0, 3_660 * DAY_MS, "Age at which a backup is deleted then, but the newest; 0: at none.")
    ] = 0

    tracker: Annotated[
        str, choice("Index of delayed messages, unless the topic names one.", "bucket", "memory")
    ] = "bucket"
    tick_ms: Annotated[
        int,
        duration(1, HOUR_MS, "Width of a time bucket of the memory tracker. Delivery is exact all the same."),
    ] = SECOND_MS
    min_index_count: Annotated[int, count(1, 100_000_000, "Entries of the index sealed into one bucket.")] = (
        50_000
    )
    ledgers_per_bucket: Annotated[
        int, count(1, 1_000_000, "A bucket is sealed at the latest after so many ledgers.")
    ] = 50
    seal_after_ms: Annotated[
        int,
        duration(1, TIME_MS_MAX, "A bucket is sealed at the latest when its first entry has waited so long."),
    ] = 60 * SECOND_MS
    max_buckets: Annotated[
        int, count(1, 10_000, "Sealed buckets of a topic; beyond it, small ones are merged.")
    ] = 64
    segment_time_step_ms: Annotated[
        int,
        duration(1, TIME_MS_MAX, "Due time that a segment of a bucket spans, if that makes it worth a read."),
    ] = 300 * SECOND_MS
    max_segment_entries: Annotated[int, count(1, 1_000_000, "Entries of a segment of a bucket at most.")] = (
        5_000
    )
    schedule_key_cache_bytes: Annotated[
        int, size(0, 64 * GIB, "What is kept in memory of the runs of schedule keys, of all topics.")
    ] = 64 * MIB
    settled_key_retention_ms: Annotated[
        int,
        duration(
            0,
            3_660 * DAY_MS,
            "How long a schedule_key that nothing waits under says what became of its message; 0: not at all.",
        ),
    ] = DAY_MS
    settled_keys_per_topic_max: Annotated[
        int,
        count(1, 1_000_000_000, "Keys of a topic that are remembered so; the oldest are forgotten first."),
    ] = 5_000_000
    max_delay_ms: Annotated[
        int, duration(0, TIME_MS_MAX, "Longest delay accepted, unless the topic says otherwise; 0: no limit.")
    ] = 0
    default_ttl_ms: Annotated[
        int,
        duration(
            0,
            TIME_MS_MAX,
            "How long a message lives after it is due, unless it or its topic says; 0: for ever.",
        ),
    ] = 0

    delayed_delivery: Annotated[
        str, choice("Whether topics take messages with a time, unless the topic says.", "enabled", "disabled")
    ] = "enabled"
    overdue_action: Annotated[
        str,
        choice(
            "What becomes of messages whose time came while the broker was down.",
            "deliver",
            "expire",
            "dead_letter",
        ),
    ] = "deliver"
    retention_ms: Annotated[
        int,
        duration(0, TIME_MS_MAX, "How long messages are kept that every subscription has settled; 0: not."),
    ] = 0
    retention_bytes: Annotated[
        int, size(0, 1 << 60, "Bytes of them that are kept, the oldest go first; 0: retention_ms decides.")
    ] = 0
    reclaim_interval_ms: Annotated[
        int,
        duration(1, DAY_MS, "How often ledgers are looked for that can go; and how long the last one rests."),
    ] = MINUTE_MS
    compaction_lease_ms: Annotated[
        int,
        duration(
            SECOND_MS, 7 * DAY_MS, "How long a compaction job may hold its inputs; their files stay as long."
        ),
    ] = HOUR_MS
    compaction_cleanup_ms: Annotated[
        int,
        duration(
            0, 30 * DAY_MS, "When what a job left is removed after its lease has ended; at a start at once."
        ),
    ] = HOUR_MS
    max_pending_messages: Annotated[
        int, count(0, 1 << 60, "Messages that a subscription may be owed before produce is refused; 0: any.")
    ] = 0
    max_pending_bytes: Annotated[int, size(0, 1 << 60, "The same in bytes of messages; 0: any.")] = 0
    max_produce_rate: Annotated[
        int, count(0, 1_000_000_000, "Messages a topic takes in a second; 0: any.")
    ] = 0
    dedup_window_ms: Annotated[
        int, duration(0, TIME_MS_MAX, "How long sequence ids of producers are remembered; 0: not.")
    ] = 10 * MINUTE_MS
    dedup_entries: Annotated[
        int, count(1, 1_000_000, "Sequence ids remembered of each producer of a topic.")
    ] = 10_000
    producers_per_topic_max: Annotated[
        int, count(1, 1_000_000, "Producers of a topic whose sequence ids are remembered.")
    ] = 1_000
    dedup_memory_bytes_max: Annotated[
        int, size(64 * KIB, GIB, "Memory for the sequence ids that are remembered, of all topics together.")
    ] = 128 * MIB

    lease_ms: Annotated[
        int, duration(1, DAY_MS, "How long a consumer may hold a message, unless it asks otherwise.")
    ] = 30 * SECOND_MS
    lease_ms_max: Annotated[int, duration(1, 7 * DAY_MS, "Longest lease that may be asked for.")] = (
        12 * HOUR_MS
    )
    initial_backoff_ms: Annotated[
        int,
        duration(
            0, DAY_MS, "Wait before the first redelivery of a nacked message, less up to half; 0: none."
        ),
    ] = SECOND_MS
    max_backoff_ms: Annotated[
        int, duration(0, 30 * DAY_MS, "Longest wait before a redelivery, before jitter takes off up to half.")
    ] = MINUTE_MS
    backoff_multiplier: Annotated[
        float, factor(1.0, 100.0, "Each wait before a redelivery is this many times the one before.")
    ] = 2.0
    max_delivery_attempts: Annotated[
        int, count(0, 1_000_000, "Deliveries after which a message is a dead letter; 0: never.")
    ] = 0
    replay_entries_max: Annotated[
        int,
        count(1, 100_000_000, "Due positions a subscription queues; beyond it, it catches up from the log."),
    ] = 1_000_000
    read_batch_entries: Annotated[int, count(1, 100_000, "Entries one step of a dispatcher reads.")] = 2_000
    due_batch_entries: Annotated[int, count(1, 1_000_000, "Due entries taken from the index at once.")] = (
        32_768
    )
    heartbeat_ms: Annotated[int, duration(1, HOUR_MS, "Time between heartbeats on a Subscribe stream.")] = (
        10 * SECOND_MS
    )

    allow_plaintext: Annotated[
        bool, switch("gRPC may listen beyond this machine without TLS: everybody on the way reads along.")
    ] = False
    tls_cert_file: Annotated[
        str, text("PEM file of the broker's certificate and its chain; turns TLS on.")
    ] = ""
    tls_key_file: Annotated[
        str, text("PEM file of the key of tls_cert_file, for the broker's user alone.")
    ] = ""
    tls_client_ca_file: Annotated[
        str, text("PEM file of who vouches for clients: a client must have a certificate of theirs.")
    ] = ""
    access_file: Annotated[str, text("TOML file that says who may do what; turns access control on.")] = ""
    tokens_file: Annotated[str, text("TOML file of principals and the hashes of their tokens.")] = ""
    jwt_keys_file: Annotated[
        str, text("JWKS or PEM file of public keys that JSON web tokens are checked with.")
    ] = ""
    jwt_algorithms: Annotated[
        str, text("Algorithms a JSON web token may be signed with, separated by commas.")
    ] = "ES256,RS256,EdDSA"
    jwt_issuer: Annotated[str, text("The issuer (iss) that a JSON web token must name.")] = ""
    jwt_audience: Annotated[str, text("The audience (aud) that a JSON web token must name.")] = ""
    jwt_leeway_ms: Annotated[
        int, duration(0, 10 * MINUTE_MS, "How far the issuer's clock may differ from the broker's.")
    ] = 30 * SECOND_MS
    security_recheck_ms: Annotated[
        int,
        duration(
            10,
            MINUTE_MS,
            "How often the files above are looked at for changes; streams that lost their right end as soon.",
        ),
    ] = 5 * SECOND_MS
    # fmt: on

    def __post_init__(self) -> None:
        for setting in SETTINGS:
            check_range(setting, getattr(self, setting.name))

    @property
    def message_bytes_max(self) -> int:
        """No message within the limits takes more bytes, stored or delivered."""
        return (
            self.payload_bytes_max
            + self.key_bytes_max
            + self.schedule_key_bytes_max
            + self.properties_bytes_max
            + self.properties_count_max * PROPERTY_OVERHEAD_BYTES
            + TRACEPARENT_BYTES_MAX
            + MESSAGE_OVERHEAD_BYTES
        )

    @property
    def reflection_enabled(self) -> bool:
        """Whether reflection is to be served, with `auto` resolved."""
        if self.reflection == "auto":
            return is_loopback(split_address(self.grpc_address)[0])
        return self.reflection == "on"


_GROUP_STARTS = {
    "data_dir": "Broker",
    "payload_bytes_max": "Limits",
    "journal_segment_bytes": "Storage",
    "tracker": "Schedule",
    "lease_ms": "Delivery",
    "allow_plaintext": "Security",
}


def _settings() -> tuple[Setting, ...]:
    hints = get_type_hints(BrokerConfig, include_extras=True)
    settings: list[Setting] = []
    group = ""
    for field in fields(BrokerConfig):
        group = _GROUP_STARTS.get(field.name, group)
        settings.append(
            Setting(field.name, group, hints[field.name].__metadata__[0], cast(Value, field.default))
        )
    return tuple(settings)


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
            take(key, lambda setting: setting.name, raw, f"{key} in {config_path}")
        _check_secrets(config_path, values)
    for variable in sorted(environ):
        if variable.startswith(ENV_PREFIX) and variable not in CLIENT_VARIABLES:
            source = f"environment variable {variable}"
            take(variable, lambda setting: setting.variable, environ[variable], source)
    for key, text_given in argv_overrides.items():
        flag = "--" + key.replace("_", "-")
        take(flag, lambda setting: setting.flag, text_given, f"flag {flag}")
    config = BrokerConfig(**values)  # type: ignore[arg-type]  # each value was parsed by its field's kind
    check_consistent(config)
    return config


def _check_secrets(path: str, values: Mapping[str, Value]) -> None:
    """Refuse a file with a secret in it that every user of this machine can read."""
    secrets = [
        each.name for each in SETTINGS if each.spec.kind is SettingKind.SECRET and values.get(each.name)
    ]
    if secrets and os.stat(path).st_mode & stat.S_IROTH:
        raise ConfigError(
            f"{secrets[0]} in {path}: every user can read it: take that right away with chmod o-r, or set "
            f"{ENV_PREFIX}{secrets[0].upper()}"
        )


def check_consistent(config: BrokerConfig) -> None:
    """Refuse settings that are each in range but cannot hold together."""
    greatest = "the greatest message (payload, key, schedule_key, properties)"
    for low_name, low, high_name in (
        (greatest, config.message_bytes_max, "request_bytes_max"),
        (greatest, config.message_bytes_max, "frame_bytes_max"),
        (
            "the failures of ack_entries_max ids",
            config.ack_entries_max * ENTRY_FAILURE_BYTES,
            "frame_bytes_max",
        ),
        ("read_batch_entries", config.read_batch_entries, "ack_entries_max"),
        ("request_bytes_max", config.request_bytes_max, "journal_segment_bytes"),
        ("request_bytes_max", config.request_bytes_max, "journal_pending_bytes_max"),
        ("request_bytes_max", config.request_bytes_max, "ledger_bytes_max"),
        ("batch_messages_max", config.batch_messages_max, "ledger_entries_max"),
        ("lease_ms", config.lease_ms, "lease_ms_max"),
        ("initial_backoff_ms", config.initial_backoff_ms, "max_backoff_ms"),
    ):
        high = getattr(config, high_name)
        if low > high:
            kind = _find(high_name, lambda setting: setting.name, high_name).spec.kind
            raise ConfigError(
                f"{high_name} is {show(kind, high)}, but must be at least {low_name}: {show(kind, low)}"
            )
    _check_backup_dir(config)
    _check_security(config)


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
            raise ConfigError(f"{name} is set, and needs {needed} too")
    if config.access_file and not (config.tokens_file or config.jwt_keys_file or config.tls_client_ca_file):
        raise ConfigError(
            "access_file is set, but nobody could show who they are: set tokens_file, jwt_keys_file or "
            "tls_client_ca_file"
        )
    if not (
        config.tls_cert_file or config.allow_plaintext or is_loopback(split_address(config.grpc_address)[0])
    ):
        raise ConfigError(
            f"grpc_address is {config.grpc_address}, which other machines reach, and without encryption: set "
            "tls_cert_file and tls_key_file, or bind 127.0.0.1, or, where the network itself is trusted, set "
            "allow_plaintext (POSTDATE_ALLOW_PLAINTEXT=true)"
        )


def _check_backup_dir(config: BrokerConfig) -> None:
    """Backups among the broker's own files would be taken for what no manifest names, and removed."""
    if config.backup_dir == "auto":
        return
    data_dir, backup_dir = map(posixpath.abspath, (config.data_dir, config.backup_dir))
    own = [f"{data_dir}/{name}/" for name in ("topics", "journal", "backup.pins", "staging")]
    if backup_dir == data_dir or any(f"{backup_dir}/".startswith(folder) for folder in own):
        raise ConfigError(f"backup_dir is {config.backup_dir}, but must not be among the broker's own files")


def is_name(value: str) -> bool:
    """Whether this may name a topic or a subscription."""
    return _NAME.fullmatch(value) is not None


def check_name(kind: str, value: str, field: str) -> None:
    """Raise InvalidRequest unless `value` may name a `kind`, such as "topic"; `field` is the proto's."""
    if not is_name(value):
        shown = ascii(value if len(value) <= 64 else value[:64] + "...")
        raise InvalidRequest(
            f"{shown} cannot name a {kind}: use 1 to 255 of A-Z a-z 0-9 . _ ~ -, a letter or digit first",
            field=field,
            reason="INVALID_NAME",
        )


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a server bound to `host`."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _find(spelling: str, spell: Callable[[Setting], str], source: str) -> Setting:
    known = {spell(setting): setting for setting in SETTINGS}
    if spelling not in known:
        close = difflib.get_close_matches(spelling, known, n=1)
        hint = f". Did you mean {close[0]}?" if close else ""
        raise ConfigError(f"{source}: there is no such setting{hint}")
    return known[spelling]


def _read_toml(path: str) -> dict[str, object]:
    try:
        with open(path, "rb") as file:
            return tomllib.load(file)
    except OSError as error:
        raise ConfigError(f"cannot read the configuration file {path}: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"the configuration file {path} is not TOML: {error}") from error
