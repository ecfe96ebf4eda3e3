"""Every policy that comes with kvstore keeps the one contract."""

from __future__ import annotations

from kvstore.policy import POLICIES, CreditPolicy, LruNPolicy, LruPolicy, LruRPolicy
from kvstore.testing.policy_contract import PolicyContract


class TestLru(PolicyContract):
    def make_policy(self):
        return LruPolicy()


class TestLruR(PolicyContract):
    partial_first = False

    def make_policy(self):
        return LruRPolicy()


class TestLruN(PolicyContract):
    partial_first = False
    children_first = False

    def make_policy(self):
        return LruNPolicy()


class TestCredit(PolicyContract):
    def make_policy(self):
        return CreditPolicy()


def test_no_policy_is_left_out():
    tested = (TestLru, TestLruR, TestLruN, TestCredit)
    assert {case().make_policy().name for case in tested} == set(POLICIES)
