"""One message, produced from a form."""

from __future__ import annotations

import base64
import binascii
from typing import Any

from aiohttp import web

from broker.model import Position
from broker.settings import parse_duration_ms
from broker.web.forms import FormField, PageForm, lines_of, typed
from broker.web.manage import page_pair, topic_link
from broker.web.refusals import CallRefusal, PageRefusal
from broker.web.scheduled import message_link
from broker.web.search import parse_time_ms
from broker.web.site import Visit

_HOW = (("text", "text, as UTF-8"), ("base64", "base64, of any bytes"))
_PAYLOAD_HINT = "A form has room for some 60 KiB: send what is larger with a client or the command-line tool."
_WHEN = (("now", "at once"), ("after", "after a delay"), ("at", "at a time"))


async def _publish_form(visit: Visit) -> PageForm:
    topic = visit.params["topic"]
    return PageForm(
        "Produce a message",
        "Produce it",
        topic_link(topic),
        [
            FormField("payload", "Payload", "textarea", hint=_PAYLOAD_HINT),
            FormField("how", "Payload is", "select", choices=_HOW, value="text"),
            FormField("key", "Key", hint="Groups messages of a KEY_SHARED subscription."),
            FormField("properties", "Properties", "textarea", hint="One a line, as name=value."),
            FormField("when", "Due", "select", choices=_WHEN, value="now"),
            FormField("deliver_after_ms", "Delay", hint="Such as 90s, 15m, 2h or 3d."),
            FormField("deliver_at_ms", "Time (UTC)", "datetime-local"),
            FormField("schedule_key", "Schedule key", hint="Its own name while it is pending."),
        ],
        crumbs=[("/topics", "Topics"), (topic_link(topic), topic)],
    )


async def _publish(visit: Visit) -> web.Response:
    topic = visit.params["topic"]
    message = {
        "payload": _payload(visit),
        "key": typed(visit, "key"),
        "properties": dict(_property(line) for line in lines_of(visit.form.get("properties", ""))),
        "schedule_key": typed(visit, "schedule_key"),
        **_time(visit),
    }
    answer = await visit.call("Produce", topic=topic, messages=[message])
    (ids,) = answer["ids"]
    position = Position(int(ids["ledger_id"]), int(ids["first_entry_id"]))
    to = message_link(topic, position) if visit.may("GetScheduled", topic) else topic_link(topic)
    return visit.done("done", f"Produced: {position.ledger_id}:{position.entry_id}.", to)


def _payload(visit: Visit) -> str:
    """Return the payload as calls have it."""
    # Forms send every end of a line as two characters.
    text = visit.form.get("payload", "").replace("\r\n", "\n")
    if visit.form.get("how") != "base64":
        return base64.b64encode(text.encode("utf-8", "surrogatepass")).decode()
    try:
        return base64.b64encode(base64.b64decode("".join(text.split()), validate=True)).decode()
    except (binascii.Error, ValueError):
        raise CallRefusal(400, {"detail": "This is not base64.", "field": "payload"}) from None


def _property(line: str) -> tuple[str, str]:
    name, equals, value = line.partition("=")
    if not equals or not name.strip():
        detail = f"{line[:60]!r} is not of the form name=value."
        raise CallRefusal(400, {"detail": detail, "field": "properties"})
    return name.strip(), value


def _time(visit: Visit) -> dict[str, Any]:
    match visit.form.get("when"):
        case "after":
            text = typed(visit, "deliver_after_ms")
            try:
                return {"deliver_after_ms": parse_duration_ms(text)}
            except ValueError:
                detail = f"{text[:60]!r} is not a duration: write 90s, 15m, 2h or 3d."
                raise CallRefusal(400, {"detail": detail, "field": "deliver_after_ms"}) from None
        case "at":
            try:
                time_ms = parse_time_ms(typed(visit, "deliver_at_ms"))
            except PageRefusal as refusal:
                raise CallRefusal(400, {"detail": refusal.message, "field": "deliver_at_ms"}) from None
            if not time_ms:
                raise CallRefusal(400, {"detail": "Say at which time.", "field": "deliver_at_ms"})
            return {"deliver_at_ms": time_ms}
        case _:
            return {}


show_publish, publish = page_pair(_publish_form, _publish)
