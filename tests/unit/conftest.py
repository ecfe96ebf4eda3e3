"""A small embedded store under a clock that the test moves, and a session on it."""

from __future__ import annotations

import pytest

import kvstore
from kvstore.clock import FakeClock
from tests.payload import BLOCK_BYTES, a_namespace


@pytest.fixture
def clock():
    return FakeClock()


@pytest.fixture
def store(clock):
    """1 MiB: sixteen blocks of `BLOCK_BYTES`. It is recounted at the end."""
    with kvstore.open(dram_capacity_bytes="1MiB", clock=clock) as store:
        yield store
        store.check()


@pytest.fixture
def namespace():
    return a_namespace(BLOCK_BYTES)


@pytest.fixture
def session(store, namespace):
    session = store.session(namespace)
    yield session
    session.close()
