"""The pages of a broker that may not own its state any more show none of it (CLUSTER-10)."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.owners import HeldOwner
from tests.unit.web.conftest import MakePages, Pages
from tests.unit.web.test_pages import PATHS, filled

LOST = "The owner lease has ended"


async def owned(make_pages: MakePages) -> tuple[Pages, HeldOwner]:
    pages = await filled(make_pages)
    owner = HeldOwner()
    pages.broker.ownership = owner
    return pages, owner


@pytest.mark.slow
async def test_no_page_shows_anything_without_the_lease(make_pages: MakePages) -> None:
    pages, owner = await owned(make_pages)
    owner.is_held = False
    for path in PATHS[:-1]:  # the login leads to the first page where nobody logs in
        shown = await pages.get(path, status=503)
        assert LOST in shown and "billing" not in shown.replace(path, ""), path
    owner.regain()
    assert "orders" in await pages.get("/topics")


async def test_a_page_is_looked_at_after_it_was_made(
    make_pages: MakePages, monkeypatch: pytest.MonkeyPatch
) -> None:
    pages, owner = await owned(make_pages)
    await pages.get("/topics")
    from broker.web.render import Renderer  # noqa: PLC0415 - loaded with the first page

    render = Renderer.render

    async def render_and_lose(self: Renderer, template: str, values: Any) -> str:
        text = await render(self, template, values)
        owner.is_held = False
        return text

    monkeypatch.setattr(Renderer, "render", render_and_lose)
    assert LOST in await pages.get("/topics", status=503)


async def test_the_outcome_of_a_change_is_shown_once_the_lease_holds_again(make_pages: MakePages) -> None:
    pages, owner = await owned(make_pages)
    csrf = await pages.csrf()
    owner.is_held = False
    pause = "/topics/orders/subscriptions/billing"
    await pages.post(pause, csrf=csrf, follow=False, status=303, action="pause")
    assert "Paused: billing" not in await pages.get("/timeline", status=503)
    owner.regain()
    assert "Paused: billing" in await pages.get("/timeline")
