"""A test of a program that uses Postdate: three days pass within it, on the real broker.

pip install 'postdate[broker]' pytest      # in a checkout: '.[broker]'
pytest examples/test_with_fake_broker.py
"""

from collections.abc import Iterator
from datetime import timedelta

import pytest

import postdate.sync
import postdate.sync.testing

# -- the program -------------------------------------------------------------------------------------------------------


class Shop:
    """Cancels orders that are not paid within three days."""

    def __init__(self, client: postdate.sync.Client) -> None:
        self._client = client
        self.cancelled: list[str] = []

    def order(self, number: str) -> None:
        with self._client.producer("unpaid") as producer:
            producer.send(number.encode(), deliver_after=timedelta(days=3), schedule_key=f"order-{number}")

    def pay(self, number: str) -> None:
        self._client.schedule.cancel("unpaid", schedule_key=f"order-{number}")

    def cancel_overdue(self, subscription: postdate.sync.Subscription) -> None:
        for message in subscription.receive_many(timeout=timedelta(0)):
            with message.processing():
                self.cancelled.append(message.payload.decode())


# -- its tests ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def fake() -> Iterator[postdate.sync.testing.FakeBroker]:
    with postdate.sync.testing.broker() as fake:
        yield fake


def test_order_that_is_not_paid_is_cancelled_after_three_days(fake: postdate.sync.testing.FakeBroker) -> None:
    with fake.client() as client, client.subscribe("unpaid", "shop") as subscription:
        shop = Shop(client)
        shop.order("17")
        shop.order("18")
        fake.advance(timedelta(days=2))
        shop.pay("18")
        shop.cancel_overdue(subscription)
        assert shop.cancelled == []
        fake.advance(timedelta(days=1))
        shop.cancel_overdue(subscription)
        assert shop.cancelled == ["17"]


def test_worker_that_fails_gets_it_again(fake: postdate.sync.testing.FakeBroker) -> None:
    with fake.client() as client, client.subscribe("unpaid", "shop") as subscription:
        Shop(client).order("17")
        fake.advance(timedelta(days=3))
        with pytest.raises(ConnectionError), next(subscription).processing():
            raise ConnectionError("the database is away")
        fake.advance(timedelta(minutes=5))
        (again,) = subscription.receive_many(timeout=timedelta(0))
        assert again.attempt == 2
