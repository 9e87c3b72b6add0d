"""Logging in to the pages of a broker with access rules, in a real browser."""

from __future__ import annotations

import pytest

from tests.browser.conftest import Shop, Window

pytestmark = pytest.mark.packaging

SETTINGS = {"SHARDS": "2", "SHARD_PORTS": "false"}
GRANTS = """
[[grant]]
principals = ["token:admin"]
topics = ["*"]
rights = ["produce", "consume", "schedule", "manage"]

[[grant]]
principals = ["token:shop"]
topics = ["orders"]
rights = ["consume"]
"""
TOKENS = {"shop": "the token of the shop"}


def test_who_logs_in_sees_and_changes_what_their_rights_allow(window: Window, shop: Shop):
    page = window.page
    window.go("/topics/orders")
    assert page.url.endswith("/login?next=/topics/orders") or "%2Ftopics%2Forders" in page.url
    page.get_by_label("Token").fill("not the token at all")
    page.click("button:has-text('Log in')")
    assert "not accepted" in window.flash
    window.log_in(TOKENS["shop"])
    assert page.inner_text(".who") == "token:shop"
    window.go("/topics")
    assert page.locator("tbody tr").count() == 1
    window.go("/topics/orders")
    assert page.locator("button:has-text('Pause')").count() == 0
    assert page.locator("text=Settings…").count() == 0
    assert window.go("/topics/jobs").status == 403
    assert "token:shop may not see topic" in window.heading
    page.click("text=Log out")
    page.wait_for_selector("#token")


def test_an_admin_pauses_a_subscription_on_a_phone(window: Window, shop: Shop):
    page = window.page
    page.set_viewport_size({"width": 390, "height": 844})
    window.log_in()
    window.go("/topics/orders")
    page.click("button:has-text('Pause')")
    assert window.flash == "Paused: billing."
    assert shop.do(lambda client: client.subscriptions.get("orders", "billing")).paused
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert not window.complaints


def test_what_is_shown_goes_with_the_login(window: Window):
    page = window.page
    page.clock.install()
    window.log_in()
    window.go("/")
    page.context.clear_cookies()  # as after eight hours, or where the token was withdrawn
    page.clock.fast_forward(5_500)
    page.wait_for_selector("#token")
    assert not page.locator(".tiles").count()
