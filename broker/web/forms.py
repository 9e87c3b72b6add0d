"""Forms: the fields of one, what was typed into them, and the settings of topics and subscriptions as fields.

Settings come from their declarations in `broker/policy.py`: a new one is in the forms with no more said. One that is
left empty inherits.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from aiohttp import web

from broker.policy import POLICY_SPECS, PolicyKind
from broker.settings import ConfigError, Setting, SettingKind, Spec, Value, parse_setting, show
from broker.web.refusals import CallRefusal, PageRefusal
from broker.web.site import Visit

BUCKET_FIELDS = (
    "max_buckets",
    "min_index_count",
    "seal_after_ms",
    "ledgers_per_bucket",
    "segment_time_step_ms",
    "max_segment_entries",
)
"""Settings of a topic that calls hold in `buckets`."""
_SHOWN = "shown_"
"""Begins the names of hidden fields with what a form showed: what is as it was shown is not changed."""


@dataclass(slots=True)
class FormField:
    """A field of a form."""

    name: str
    label: str
    kind: str = "text"
    """text, textarea, select, datetime-local, or hidden."""
    value: str = ""
    hint: str = ""
    placeholder: str = ""
    choices: Sequence[tuple[str, str]] = ()
    """Of a select: value and words."""
    is_required: bool = False
    error: str = ""


@dataclass(frozen=True, slots=True)
class PageForm:
    """A form that has a page of its own."""

    title: str
    submit: str
    back: str
    """Link to go to if nothing is to be done."""
    fields: Sequence[FormField]
    settings: Sequence[FormField] = ()
    """Further ones, each of which may stay empty."""
    crumbs: Sequence[tuple[str, str]] = ()
    """Links and names of what it is about."""
    intro: str = ""
    is_danger: bool = False


async def show_form(visit: Visit, form: PageForm, refusal: PageRefusal | None = None) -> web.Response:
    """The page of a form, with what was typed where that was refused."""
    problem = ""
    if refusal is not None:
        problem = refusal.message
        for each in (*form.fields, *form.settings):
            each.value = visit.form.get(each.name, each.value)
            if isinstance(refusal, CallRefusal) and refusal.field.rpartition(".")[2] == each.name:
                each.error, problem = refusal.message, f"Nothing was changed: see {each.label} below."
    status = 200 if refusal is None else refusal.status
    return await visit.page("form.html", status=status, form=form, problem=problem)


def typed(visit: Visit, name: str) -> str:
    """Return what was typed into a field of one line."""
    return visit.form.get(name, "").strip()


# -- settings ------------------------------------------------------------------------------------------------


def policy_fields(kind: PolicyKind, own: Mapping[str, Any], in_force: Mapping[str, Any]) -> list[FormField]:
    """Return the settings of a topic or subscription as fields, by what is set there and what is in force."""
    own, in_force = _flat(own), _flat(in_force)
    made: list[FormField] = []
    for name in (field.name for field in fields(kind)):
        spec = POLICY_SPECS[name]
        inherited = _shown(spec, in_force.get(name))
        value = _shown(spec, own.get(name))
        field = FormField(name, name, value=value, hint=spec.help)
        if spec.choices or spec.kind is SettingKind.SWITCH:
            field.kind = "select"
            choices = spec.choices or ("true", "false")
            is_inherited = f"inherited: {inherited}" if inherited and not value else "inherited"
            field.choices = [("", is_inherited), *((each, each) for each in choices)]
        elif inherited and not value:
            field.placeholder = f"inherited: {inherited}"
        made += [field, FormField(_SHOWN + name, "", "hidden", value)]
    return made


def changed_settings(
    visit: Visit, kind: PolicyKind, own: Mapping[str, Any]
) -> tuple[dict[str, Any], list[str]]:
    """Return a policy with the settings of a form that are others than it showed, and what of it is to be changed.

    `own`: what is set now, for what is changed as a whole. Raises CallRefusal for what is no value.
    """
    form, names = visit.form, [field.name for field in fields(kind)]
    changed = [name for name in names if form.get(name, "").strip() != form.get(_SHOWN + name, "")]
    values = {name: _parsed(name, form.get(name, "")) for name in changed}
    mask = [name for name in changed if name not in BUCKET_FIELDS]
    buckets = dict(own.get("buckets") or {})
    if len(mask) < len(changed):
        mask.append("buckets")
        buckets |= {name: value for name, value in values.items() if name in BUCKET_FIELDS}
    policy = {
        name: value for name, value in values.items() if value is not None and name not in BUCKET_FIELDS
    }
    set_there = {name: value for name, value in buckets.items() if value is not None}
    return policy | ({"buckets": set_there} if set_there else {}), mask


def _flat(policy: Mapping[str, Any]) -> dict[str, Any]:
    return {**policy, **(policy.get("buckets") or {})}


def _shown(spec: Spec, value: Any) -> str:
    """Return a value of a call's answer as a form has it: numbers of 64 bits are texts there, and choices names."""
    if value is None:
        return ""
    if spec.choices:
        return next((each for each in spec.choices if str(value).endswith(f"_{each.upper()}")), "")
    if spec.kind is SettingKind.NAME:
        return str(value)
    if spec.kind is SettingKind.FACTOR:
        return f"{value:g}"
    return show(spec.kind, value if isinstance(value, bool) else int(value))


def _parsed(name: str, text: str) -> Value | None:
    """Return a value as calls have it; None: it is inherited."""
    text, spec = text.strip(), POLICY_SPECS[name]
    if not text:
        return None
    try:
        value = parse_setting(Setting(name, "", spec, ""), text, "")
    except ConfigError as error:
        raise CallRefusal(400, {"detail": str(error).removeprefix(": "), "field": name}) from error
    return spec.number(value) if spec.choices and isinstance(value, str) else value


def lines_of(text: str) -> Iterable[str]:
    """Return the lines of a field that are not empty."""
    return (line for line in text.splitlines() if line.strip())
