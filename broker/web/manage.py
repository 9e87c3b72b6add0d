"""Topics and subscriptions: create, set, seek and delete them. What is shown and done are calls for who asks."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import quote

from aiohttp import web

from broker.policy import SubscriptionPolicy, TopicPolicy
from broker.subscriptions.types import SubscriptionType
from broker.web.forms import FormField, PageForm, changed_settings, policy_fields, show_form, typed
from broker.web.refusals import PageRefusal
from broker.web.search import parse_time_ms
from broker.web.site import Handler, Visit

_TYPES = tuple(each.name for each in SubscriptionType)
_NAME_HINT = "A-Z a-z 0-9 . _ ~ -, a letter or digit first."


def page_pair(
    make: Callable[[Visit], Awaitable[PageForm]], do: Callable[[Visit], Awaitable[web.Response]]
) -> tuple[Handler, Handler]:
    """Return what shows a form, and what takes it: where that is refused, the form says so, with what was typed."""

    async def show(visit: Visit) -> web.Response:
        return await show_form(visit, await make(visit))

    async def take(visit: Visit) -> web.Response:
        try:
            return await do(visit)
        except PageRefusal as refusal:
            return await show_form(visit, await make(visit), refusal)

    return show, take


def topic_link(topic: str) -> str:
    return f"/topics/{quote(topic)}"


def _crumbs(topic: str) -> list[tuple[str, str]]:
    return [("/topics", "Topics"), *([(topic_link(topic), topic)] if topic else [])]


# -- topics --------------------------------------------------------------------------------------------------


async def _new_topic_form(visit: Visit) -> PageForm:
    return PageForm(
        "Create a topic",
        "Create the topic",
        "/topics",
        [FormField("name", "Name", value=visit.query.get("name", ""), hint=_NAME_HINT, is_required=True)],
        policy_fields(TopicPolicy, {}, {}),
        _crumbs(""),
    )


async def _create_topic(visit: Visit) -> web.Response:
    name = typed(visit, "name")
    policy, _ = changed_settings(visit, TopicPolicy, {})
    await visit.call("CreateTopic", name=name, policy=policy)
    return visit.done("done", f"Created: {name}.", topic_link(name))


async def _topic(visit: Visit) -> dict[str, Any]:
    answer: dict[str, Any] = (await visit.call("GetTopic", name=visit.params["topic"]))["topic"]
    return answer


async def _topic_form(visit: Visit) -> PageForm:
    topic = await _topic(visit)
    name = topic["name"]
    settings = policy_fields(TopicPolicy, topic.get("policy") or {}, topic["effective_policy"])
    return PageForm(f"Settings of {name}", "Save", topic_link(name), [], settings, _crumbs(name))


async def _update_topic(visit: Visit) -> web.Response:
    topic = await _topic(visit)
    name = topic["name"]
    policy, mask = changed_settings(visit, TopicPolicy, topic.get("policy") or {})
    if not mask:
        return visit.done("nothing", "Nothing was changed.", topic_link(name))
    await visit.call("UpdateTopic", name=name, policy=policy, update_mask=",".join(map(_camel, mask)))
    return visit.done("done", f"Saved: {', '.join(mask)}.", topic_link(name))


async def _delete_topic_form(visit: Visit) -> PageForm:
    name = visit.params["topic"]
    return PageForm(
        f"Delete {name}",
        "Delete it for good",
        topic_link(name),
        [_confirmation("topic")],
        crumbs=_crumbs(name),
        intro="Its messages, pending ones too, and its subscriptions go with it. This cannot be undone.",
        is_danger=True,
    )


async def _delete_topic(visit: Visit) -> web.Response:
    name = visit.params["topic"]
    _check_confirmed(visit, name)
    await visit.call("DeleteTopic", name=name)
    return visit.done("done", f"Deleted: {name}.", "/topics")


def _confirmation(kind: str) -> FormField:
    return FormField("confirm", f"Name of the {kind}", hint="Type it to confirm.", is_required=True)


def _check_confirmed(visit: Visit, name: str) -> None:
    if typed(visit, "confirm") != name:
        raise PageRefusal(f"Type {name} to confirm: nothing was deleted.")


def _camel(name: str) -> str:
    """Return a field's name as masks have it in JSON."""
    first, *others = name.split("_")
    return first + "".join(other.capitalize() for other in others)


# -- subscriptions -------------------------------------------------------------------------------------------


async def _new_subscription_form(visit: Visit) -> PageForm:
    topic = visit.params["topic"]
    return PageForm(
        "Create a subscription",
        "Create the subscription",
        topic_link(topic),
        [
            FormField("name", "Name", hint=_NAME_HINT, is_required=True),
            FormField("type", "Type", "select", choices=[(each, each) for each in _TYPES], value=_TYPES[0]),
            FormField(
                "begin",
                "Begins with",
                "select",
                value="LATEST",
                choices=[
                    ("LATEST", "the next message"),
                    ("EARLIEST", "the oldest message that is still there"),
                ],
                hint="A topic's first subscription gets what waits for it in any case.",
            ),
        ],
        policy_fields(SubscriptionPolicy, {}, {}),
        _crumbs(topic),
    )


async def _create_subscription(visit: Visit) -> web.Response:
    topic, name = visit.params["topic"], typed(visit, "name")
    policy, _ = changed_settings(visit, SubscriptionPolicy, {})
    await visit.call(
        "CreateSubscription",
        topic=topic,
        name=name,
        type=f"SUBSCRIPTION_TYPE_{_chosen(visit, 'type', _TYPES)}",
        initial_position=f"INITIAL_POSITION_{_chosen(visit, 'begin', ('LATEST', 'EARLIEST'))}",
        policy=policy,
    )
    return visit.done("done", f"Created: {name}.", topic_link(topic))


async def _subscription(visit: Visit) -> dict[str, Any]:
    topic, name = visit.params["topic"], visit.params["name"]
    answer: dict[str, Any] = (await visit.call("GetSubscription", topic=topic, name=name))["subscription"]
    return answer


async def _subscription_form(visit: Visit) -> PageForm:
    topic, given = visit.params["topic"], await _subscription(visit)
    settings = policy_fields(SubscriptionPolicy, given.get("policy") or {}, given["effective_policy"])
    title = f"Settings of {given['name']}"
    return PageForm(title, "Save", topic_link(topic), [], settings, _crumbs(topic))


async def _update_subscription(visit: Visit) -> web.Response:
    topic, given = visit.params["topic"], await _subscription(visit)
    policy, mask = changed_settings(visit, SubscriptionPolicy, given.get("policy") or {})
    if not mask:
        return visit.done("nothing", "Nothing was changed.", topic_link(topic))
    await visit.call(
        "UpdateSubscription",
        topic=topic,
        name=given["name"],
        policy=policy,
        update_mask=",".join(map(_camel, mask)),
    )
    return visit.done("done", f"Saved for {given['name']}: {', '.join(mask)}.", topic_link(topic))


async def _delete_subscription_form(visit: Visit) -> PageForm:
    topic, name = visit.params["topic"], visit.params["name"]
    return PageForm(
        f"Delete {name}",
        "Delete it for good",
        topic_link(topic),
        [_confirmation("subscription")],
        crumbs=_crumbs(topic),
        intro="Its consumers are disconnected, and what it is owed is not delivered. Other subscriptions keep what "
        "they are owed. This cannot be undone.",
        is_danger=True,
    )


async def _delete_subscription(visit: Visit) -> web.Response:
    topic, name = visit.params["topic"], visit.params["name"]
    _check_confirmed(visit, name)
    await visit.call("DeleteSubscription", topic=topic, name=name)
    return visit.done("done", f"Deleted: {name}.", topic_link(topic))


_SEEKS = (
    ("time", "the first message produced at or after a time"),
    ("EARLIEST", "the oldest message that is still there"),
    ("LATEST", "the next message that is stored"),
)


async def _seek_form(visit: Visit) -> PageForm:
    topic, name = visit.params["topic"], visit.params["name"]
    return PageForm(
        f"Move {name}",
        "Move it",
        topic_link(topic),
        [
            FormField("to", "To", "select", choices=_SEEKS, value="time"),
            FormField("time", "Time (UTC)", "datetime-local"),
        ],
        crumbs=_crumbs(topic),
        intro="Everything from there on is owed again, settled or not; nothing before it is. Its consumers' streams "
        "end and begin anew. Other subscriptions keep what they are owed.",
        is_danger=True,
    )


async def _seek(visit: Visit) -> web.Response:
    topic, name = visit.params["topic"], visit.params["name"]
    to = _chosen(visit, "to", [value for value, _ in _SEEKS])
    target: dict[str, Any] = {"initial_position": f"INITIAL_POSITION_{to}"}
    if to == "time":
        time_ms = parse_time_ms(typed(visit, "time"))
        if not time_ms:
            raise PageRefusal("Say to which time.")
        target = {"publish_time_ms": time_ms}
    at = (await visit.call("Seek", topic=topic, subscription=name, **target))["position"]
    place = f"{at['ledger_id']}:{at['entry_id']}"
    return visit.done("done", f"Moved: {name} begins at {place} now.", topic_link(topic))


def _chosen(visit: Visit, name: str, choices: tuple[str, ...] | list[str]) -> str:
    value = typed(visit, name)
    if value not in choices:
        raise PageRefusal(f"Choose one of {', '.join(choices)}.")
    return value


show_new_topic, create_topic = page_pair(_new_topic_form, _create_topic)
show_topic_settings, update_topic = page_pair(_topic_form, _update_topic)
show_delete_topic, delete_topic = page_pair(_delete_topic_form, _delete_topic)
show_new_subscription, create_subscription = page_pair(_new_subscription_form, _create_subscription)
show_subscription_settings, update_subscription = page_pair(_subscription_form, _update_subscription)
show_delete_subscription, delete_subscription = page_pair(_delete_subscription_form, _delete_subscription)
show_seek, seek = page_pair(_seek_form, _seek)
