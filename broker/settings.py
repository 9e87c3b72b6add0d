"""Schema of settings and policies: kinds of values, their ranges, how they are read and shown.

A setting is a field of `BrokerConfig`, declared with `setting`; a policy is a field of `TopicPolicy` or
`SubscriptionPolicy`, declared with `policy`. A setting that policies inherit is declared once, as the policy, and taken
over with `inherited`. Parsing, range checks, flags, variables and docs are made from these declarations.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from decimal import Decimal, InvalidOperation
from enum import Enum
from typing import Any

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30
SECOND_MS = 1_000
MINUTE_MS = 60 * SECOND_MS
HOUR_MS = 60 * MINUTE_MS
DAY_MS = 24 * HOUR_MS

DURATION_MS_MAX = 1 << 53

ENV_PREFIX = "POSTDATE_"

_SIZE_UNITS = {
    "B": 1,
    "KiB": KIB,
    "MiB": MIB,
    "GiB": GIB,
    "kB": 1_000,
    "MB": 1_000_000,
    "GB": 1_000_000_000,
}
_DURATION_UNITS = {"ms": 1, "s": SECOND_MS, "m": MINUTE_MS, "h": HOUR_MS, "d": DAY_MS}
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._~-]{0,254}", re.ASCII)
_QUANTITY = re.compile(r"([0-9]{1,20}(?:\.[0-9]{1,20})?)\s*([A-Za-z]*)", re.ASCII)


class ConfigError(Exception):
    """The broker cannot start with these settings; the message names the setting and where it came from."""


class SettingKind(Enum):
    """The form in which the value of a setting is written."""

    SIZE = "bytes"
    DURATION = "ms"
    COUNT = "count"
    FACTOR = "factor"
    SWITCH = "true, false"
    CHOICE = "choice"
    TEXT = "text"
    NAME = "name"
    ADDRESS = "host:port"


Value = str | int | float | bool


@dataclass(frozen=True, slots=True)
class Spec:
    """Kind, help text and range of a setting or policy."""

    kind: SettingKind
    help: str
    low: float = 0
    high: float = 0
    choices: tuple[str, ...] = ()

    def number(self, choice: str) -> int:
        """Return the number that stands for a choice in policies; 0 is unspecified."""
        return self.choices.index(choice) + 1

    def is_in_range(self, value: Value) -> bool:
        """Return whether a policy may have this value; choices are given by number."""
        match self.kind:
            case SettingKind.NAME:
                return isinstance(value, str) and is_name(value)
            case SettingKind.SWITCH:
                return value in (False, True)
            case SettingKind.CHOICE:
                return not isinstance(value, str) and 0 <= value <= len(self.choices)
        return not isinstance(value, str) and self.low <= value <= self.high  # false for NaN


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting, as flags, documentation and error messages need it."""

    name: str
    group: str
    spec: Spec
    default: Value

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        return ENV_PREFIX + self.name.upper()


def size(low: int, high: int, help: str) -> Spec:
    return Spec(SettingKind.SIZE, help, low, high)


def duration(low: int, high: int, help: str) -> Spec:
    return Spec(SettingKind.DURATION, help, low, high)


def count(low: int, high: int, help: str) -> Spec:
    return Spec(SettingKind.COUNT, help, low, high)


def factor(low: float, high: float, help: str) -> Spec:
    return Spec(SettingKind.FACTOR, help, low, high)


def switch(help: str) -> Spec:
    return Spec(SettingKind.SWITCH, help)


def choice(help: str, *choices: str) -> Spec:
    return Spec(SettingKind.CHOICE, help, choices=choices)


def text(help: str) -> Spec:
    return Spec(SettingKind.TEXT, help)


def address(help: str) -> Spec:
    return Spec(SettingKind.ADDRESS, help)


def name(help: str) -> Spec:
    return Spec(SettingKind.NAME, help)


def setting(default: Value, spec: Spec) -> Any:
    """Declare a field of `BrokerConfig`."""
    return field(default=default, metadata={"spec": spec})


def policy(default: Value | None, spec: Spec) -> Any:
    """Declare a field of a policy: None inherits, in the end the default of the broker."""
    return field(default=None, metadata={"spec": spec, "default": default})


def inherited(kind: type[Any], name: str) -> Any:
    """Declare a field as a policy declares it: the setting that policies inherit, or a part of a policy."""
    declared = kind.__dataclass_fields__[name].metadata
    return setting(declared["default"], declared["spec"])


def is_name(value: str) -> bool:
    """Return whether a topic or a subscription may have this name."""
    return _NAME.fullmatch(value) is not None


UNIX = "unix:"
"""Beginning of the address of a socket that is a file."""


def split_address(value: str) -> tuple[str, int]:
    """`host:port` or `[v6]:port`, taken apart; ValueError says what is wrong."""
    host, colon, port = value.rpartition(":")
    if not colon or not port.isascii() or not port.isdigit() or int(port) > 65_535:
        raise ValueError("expected HOST:PORT with a port from 0 to 65535")
    if host.startswith("[") and host.endswith("]"):
        return str(ipaddress.IPv6Address(host[1:-1])), int(port)
    if not host or ":" in host or not host.isprintable() or " " in host or "/" in host:
        raise ValueError("expected HOST:PORT, with an IPv6 address in [brackets]")
    return host, int(port)


def parse_setting(setting: Setting, raw: object, source: str) -> Value:
    try:
        value = _PARSERS[setting.spec.kind](raw)
        if isinstance(value, int) and abs(value) >> 64:
            raise ValueError("the number is too large")  # and would be too long to print
    except ValueError as error:
        raise ConfigError(f"{source}: {setting.name} cannot be {_shorten(raw)}: {error}") from error
    try:
        check_range(setting, value)
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from error
    return value


def check_range(setting: Setting, value: Value) -> None:
    spec = setting.spec
    match spec.kind:
        case SettingKind.SIZE | SettingKind.DURATION | SettingKind.COUNT | SettingKind.FACTOR:
            allowed = (int, float) if spec.kind is SettingKind.FACTOR else (int,)
            if isinstance(value, bool) or not isinstance(value, allowed):
                raise ConfigError(
                    f"{setting.name} must be a number ({spec.kind.value}), not {_shorten(value)}"
                )
            if not spec.low <= value <= spec.high:
                low, high = show(spec.kind, spec.low), show(spec.kind, spec.high)
                raise ConfigError(
                    f"{setting.name} must be from {low} to {high}, but is {show(spec.kind, value)}"
                )
        case SettingKind.SWITCH:
            if not isinstance(value, bool):
                raise ConfigError(f"{setting.name} must be true or false, not {_shorten(value)}")
        case SettingKind.CHOICE:
            if value not in spec.choices:
                shown = show(spec.kind, value) if isinstance(value, bool) else _shorten(value)
                raise ConfigError(f"{setting.name} must be {' or '.join(spec.choices)}, not {shown}")
        case SettingKind.TEXT | SettingKind.NAME:
            # Empty turns off what is off by default.
            if not isinstance(value, str) or (setting.default and not value) or "\0" in value:
                raise ConfigError(f"{setting.name} must not be empty or contain a zero byte")
        case SettingKind.ADDRESS:
            try:
                split_address(str(value))
            except ValueError as error:
                raise ConfigError(f"{setting.name} cannot be {_shorten(value)}: {error}") from error


def parse_duration_ms(raw: str) -> int:
    """A duration as settings are written, like 90s or 2h; ValueError says what is wrong."""
    return int(_PARSERS[SettingKind.DURATION](raw))


def _parse_quantity(units: Mapping[str, int], example: str) -> Callable[[object], int]:
    def parse(raw: object) -> int:
        if isinstance(raw, int) and not isinstance(raw, bool):
            return raw
        match = _QUANTITY.fullmatch(raw.strip()) if isinstance(raw, str) else None
        if match is None or (match[2] and match[2] not in units):
            raise ValueError(
                f"expected a whole number or one with a unit ({', '.join(units)}), like {example}"
            )
        amount = Decimal(match[1]) * units.get(match[2], 1)
        if amount != amount.to_integral_value():
            raise ValueError(f"it is not a whole number of {next(iter(units))}")
        return int(amount)

    return parse


def _parse_count(raw: object) -> int:
    if isinstance(raw, int) and not isinstance(raw, bool):
        return raw
    if isinstance(raw, str) and re.fullmatch(r"-?[0-9]+(_[0-9]+)*", raw.strip(), re.ASCII):
        return int(raw)
    raise ValueError("expected a whole number")


def _parse_factor(raw: object) -> float:
    try:
        if isinstance(raw, bool) or not isinstance(raw, str | int | float):
            raise ValueError("expected a number")
        return float(Decimal(raw))
    except (InvalidOperation, OverflowError) as error:
        raise ValueError("expected a number") from error


def _parse_switch(raw: object) -> bool:
    if isinstance(raw, bool):
        return raw
    match raw.strip().lower() if isinstance(raw, str) else raw:
        case "true" | "yes" | "on" | "1":
            return True
        case "false" | "no" | "off" | "0":
            return False
    raise ValueError("expected true or false")


def _parse_choice(raw: object) -> Value:
    # What is no text is none of the choices: refused where they are known and can be named.
    return raw if isinstance(raw, str | bool) else str(raw)


def _parse_text(raw: object) -> str:
    if not isinstance(raw, str):
        raise ValueError("expected text")
    return raw


_PARSERS: dict[SettingKind, Callable[[object], Value]] = {
    SettingKind.SIZE: _parse_quantity(_SIZE_UNITS, "64MiB"),
    SettingKind.DURATION: _parse_quantity(_DURATION_UNITS, "30s"),
    SettingKind.COUNT: _parse_count,
    SettingKind.FACTOR: _parse_factor,
    SettingKind.SWITCH: _parse_switch,
    SettingKind.CHOICE: _parse_choice,
    SettingKind.TEXT: _parse_text,
    SettingKind.NAME: _parse_text,
    SettingKind.ADDRESS: _parse_text,
}


def _shorten(raw: object) -> str:
    shown = ascii(raw)
    return shown if len(shown) <= 80 else shown[:77] + "..."


def show(kind: SettingKind, value: Value) -> str:
    """A value as a person would write it: the greatest unit that divides it, and that reads back the same."""
    units = {SettingKind.SIZE: ("GiB", "MiB", "KiB"), SettingKind.DURATION: ("d", "h", "m", "s")}.get(
        kind, ()
    )
    scale = _SIZE_UNITS if kind is SettingKind.SIZE else _DURATION_UNITS
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float) and kind in (SettingKind.SIZE, SettingKind.DURATION, SettingKind.COUNT):
        for unit in units:
            if value and value % scale[unit] == 0:
                return f"{int(value) // scale[unit]}{unit}"
        return f"{int(value)}{'ms' if kind is SettingKind.DURATION and value else ''}"
    return str(value)
