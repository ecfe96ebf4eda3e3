"""Leases that several hold, and tokens by which they come to."""

from __future__ import annotations

import pytest

from kvstore.errors import InvalidRequest, LeaseExpired
from kvstore.messages import (
    AdoptRequest,
    EndHolderRequest,
    LeaseRequest,
    ReleaseRequest,
    RenewRequest,
    ReserveRequest,
    TokenRequest,
)
from kvstore.types import SINGLE_DOMAIN, Outcome
from tests.core_driver import Driver, chain, keys
from tests.payload import filled, writers

ONE, OTHER = 1, 2


class TestSession:
    """The same in an embedded store; tests/daemon has it over processes."""

    def test_a_lease_lasts_until_all_have_released_it(self, store, session, namespace):
        keys = filled(session, 1, 3)
        lease = session.lease(keys)
        with store.session(namespace) as second:
            adopted = second.adopt(lease.token(), keys)
            lease.release()
            assert adopted.valid()
            assert writers(adopted.views, keys) == [1] * 3
            assert store.check().leases == 1
        assert store.check().leases == 0

    def test_what_cannot_be_adopted(self, session, namespace, clock):
        keys, others = filled(session, 1, 3), filled(session, 2, 3)
        lease = session.lease(keys, ttl_seconds=5)
        token = lease.token()
        assert session.adopt(token, others).reason is Outcome.ABSENT
        assert session.adopt(token[:-1] + b"x", keys).reason is Outcome.EXPIRED
        with pytest.raises(InvalidRequest, match="expected bytes"):
            session.adopt(1, keys)
        with pytest.raises(InvalidRequest, match="no blocks"):
            session.lease(namespace.keys([9])).token()
        clock.advance(6)
        assert session.adopt(token, keys).reason is Outcome.EXPIRED
        with pytest.raises(LeaseExpired):
            lease.token()
        lease.release()
        with pytest.raises(LeaseExpired):
            lease.token()


@pytest.fixture
def driver():
    return Driver(16)


@pytest.fixture
def specs(driver):
    specs = chain("a", 2)
    driver.put(specs)
    return specs


def a_lease(driver, specs, holder=ONE):
    return driver.ask(LeaseRequest(SINGLE_DOMAIN, keys(specs), 32, 30.0, 0.0, holder=holder))


def adopt(driver, token, specs, holder=OTHER, domain=SINGLE_DOMAIN):
    return driver.ask(AdoptRequest(domain, token, keys(specs), 1, holder))


class TestHolders:
    def test_only_a_holder_has_a_say(self, driver, specs):
        lease = a_lease(driver, specs)
        assert driver.ask(TokenRequest(lease.lease_id, OTHER)).token is None
        assert not driver.ask(ReleaseRequest(lease.lease_id, OTHER)).was_held
        assert driver.ask(RenewRequest(lease.lease_id, 60.0, OTHER)).deadline is None
        token = driver.ask(TokenRequest(lease.lease_id, ONE)).token
        assert adopt(driver, token, specs).lease_id == lease.lease_id
        assert driver.ask(RenewRequest(lease.lease_id, 60.0, OTHER)).deadline is not None

    def test_a_process_that_is_gone_holds_nothing_however_often_it_adopted(self, driver, specs):
        lease = a_lease(driver, specs)
        token = driver.ask(TokenRequest(lease.lease_id, ONE)).token
        for _ in range(3):
            adopt(driver, token, specs)
        assert driver.core.has_holder(OTHER)
        assert driver.ask(EndHolderRequest(OTHER)).leases == 1
        assert not driver.core.has_holder(OTHER)
        assert driver.core.check().leases == 1
        assert driver.ask(EndHolderRequest(ONE)).leases == 1
        assert driver.core.check().leases == 0

    def test_as_often_released_as_held(self, driver, specs):
        lease = a_lease(driver, specs)
        token = driver.ask(TokenRequest(lease.lease_id, ONE)).token
        adopt(driver, token, specs, holder=ONE)
        release = ReleaseRequest(lease.lease_id, ONE)
        assert [driver.ask(release).was_held for _ in range(3)] == [True, True, False]

    def test_another_domain_adopts_nothing(self, driver, specs):
        token = driver.ask(TokenRequest(a_lease(driver, specs).lease_id, ONE)).token
        assert adopt(driver, token, specs, domain=b"x" * 32).reason is Outcome.EXPIRED

    def test_a_token_of_another_core_is_worth_nothing(self, driver, specs):
        token = driver.ask(TokenRequest(a_lease(driver, specs).lease_id, ONE)).token
        driver.core._leases._token_secret = b"another"
        assert adopt(driver, token, specs).reason is Outcome.EXPIRED

    def test_a_writer_holds_until_its_end(self, driver):
        driver.ask(ReserveRequest(SINGLE_DOMAIN, chain("b", 2), 0, 1.0, 0.0, None, 1, ONE))
        assert driver.core.has_holder(ONE)
        driver.tick(2.0)
        assert driver.core.has_holder(ONE), "its memory is held"
        assert driver.core.check().held_bytes
        driver.ask(EndHolderRequest(ONE))
        assert not driver.core.has_holder(ONE)
        assert not driver.core.check().held_bytes
