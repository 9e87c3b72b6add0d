"""The access file as an object that answers who may do what.

    [[grant]]
    principals = ["token:billing", "cert:spiffe://example.org/shop/*"]
    topics = ["orders", "orders-*"]
    rights = ["consume"]
    subscriptions = ["billing"]      # optional: only these subscriptions of the topics

In patterns `*` stands for any characters, and nothing else is special. What no grant allows is denied.
The limits of the same file are in `access_limits`.
"""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from broker.rpc.access_rules import SUBSCRIPTION_RIGHTS, Ask, Right, SubscriptionScope, TopicScope
from broker.settings import ConfigError

_FIELDS = {"principals", "topics", "rights", "subscriptions"}
_KINDS = ("token:", "jwt:", "cert:")
_RIGHTS = {right.value: right for right in Right}
_CACHED_PRINCIPALS = 10_000
_NAME_CHARACTERS_MAX = 255


@dataclass(frozen=True, slots=True)
class Grant:
    """One `[[grant]]`."""

    principals: re.Pattern[str]
    topics: re.Pattern[str]
    is_for_all_topics: bool
    rights: frozenset[Right]
    subscriptions: re.Pattern[str] | None

    def allows(self, ask: Ask) -> bool:
        """Return whether this grant is enough for it, its principal aside."""
        if self.rights.isdisjoint(ask.rights):
            return False
        if ask.topic is TopicScope.ANY:
            return True
        if ask.topic is TopicScope.ALL:
            return self.is_for_all_topics and self.subscriptions is None
        assert isinstance(ask.topic, str)
        if not self.is_for_all_topics and not matches(self.topics, ask.topic):
            return False
        if self.subscriptions is None or ask.subscription is SubscriptionScope.ANY:
            return True
        # What is about the topic itself would reach every other subscription of it too.
        return ask.subscription is not None and matches(self.subscriptions, ask.subscription)


class Grants:
    """All grants of one reading of the file; immutable."""

    def __init__(self, grants: tuple[Grant, ...]) -> None:
        self._grants = grants
        self._of = lru_cache(_CACHED_PRINCIPALS)(self._find)

    def allow(self, principal: str, ask: Ask) -> bool:
        return any(grant.allows(ask) for grant in self._of(principal))

    def _find(self, principal: str) -> tuple[Grant, ...]:
        return tuple(grant for grant in self._grants if grant.principals.fullmatch(principal))


def parse_grants(text: str) -> Grants:
    """Raises ConfigError that says which grant is wrong, and how."""
    tables = read_tables(text, "grant", "limit")["grant"]
    return Grants(tuple(_grant(f"grant {number}", fields) for number, fields in enumerate(tables, 1)))


def read_tables(text: str, *names: str) -> dict[str, list[dict[str, Any]]]:
    """The `[[name]]` tables of a TOML file that has nothing else, by name; ConfigError."""
    try:
        tables = tomllib.loads(text)
    except ValueError as error:
        raise ConfigError(f"it is not TOML: {error}") from error
    if unknown := sorted(tables.keys() - set(names)):
        expected = " and ".join(f"[[{name}]]" for name in names)
        raise ConfigError(f"unknown table or key {unknown[0]!r}; expected only {expected}")
    found = {name: tables.get(name, []) for name in names}
    for name, entries in found.items():
        if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
            raise ConfigError(f"{name} must be written [[{name}]]")
    return found


def _grant(where: str, fields: dict[str, Any]) -> Grant:
    if unknown := sorted(fields.keys() - _FIELDS):
        raise ConfigError(f"{where}: unknown key {unknown[0]!r}")
    principals, topics, rights = (
        texts_of(where, fields, name) for name in ("principals", "topics", "rights")
    )
    subscriptions = texts_of(where, fields, "subscriptions") if "subscriptions" in fields else None
    check_principals(where, principals)
    for right in rights:
        if right not in _RIGHTS:
            raise ConfigError(f"{where}: unknown right {right!r}; the rights are {', '.join(_RIGHTS)}")
        if subscriptions is not None and _RIGHTS[right] not in SUBSCRIPTION_RIGHTS:
            raise ConfigError(
                f"{where}: right {right!r} cannot be limited to subscriptions; put it in a grant without subscriptions"
            )
    return Grant(
        pattern_of(principals),
        pattern_of(topics),
        "*" in topics,
        frozenset(_RIGHTS[right] for right in rights),
        pattern_of(subscriptions) if subscriptions is not None else None,
    )


def check_principals(where: str, principals: list[str]) -> None:
    """Raise ConfigError where a pattern can match no principal."""
    for principal in principals:
        if not principal.startswith(_KINDS) and principal != "*":
            raise ConfigError(
                f"{where}: invalid principal {principal!r}: it must begin with {', '.join(_KINDS)}, or be * for all "
                "authenticated principals"
            )


def texts_of(where: str, fields: dict[str, Any], name: str) -> list[str]:
    """The texts of a key that has some; ConfigError."""
    texts = fields.get(name)
    if not isinstance(texts, list) or not texts or not all(isinstance(text, str) and text for text in texts):
        raise ConfigError(f'{where}: {name} must be a list of strings such as {name} = ["*"]')
    return texts


def matches(pattern: re.Pattern[str], name: str) -> bool:
    """Return whether a name fits a pattern."""
    # Names are asked about before they are checked, and a pattern with many * takes long on a huge one.
    return len(name) <= _NAME_CHARACTERS_MAX and pattern.fullmatch(name) is not None


def pattern_of(globs: list[str]) -> re.Pattern[str]:
    """Pattern that matches one of these, of which `*` is any characters."""
    return re.compile("|".join(".*".join(map(re.escape, glob.split("*"))) for glob in globs), re.DOTALL)
