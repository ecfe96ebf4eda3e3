"""Views of pool memory: read-only, and known to be in use until the last thing made from them."""

from __future__ import annotations

import gc
import warnings
from typing import Any

import numpy as np
import pytest

import kvstore
from kvstore.client.views import PoolView
from kvstore.clock import FakeClock
from kvstore.errors import LeaseInUse
from tests.payload import BLOCK_BYTES, a_namespace, filled, payload, writer_of


@pytest.fixture
def lease(session):
    return session.lease(filled(session, 1, 2))


@pytest.fixture
def keys(namespace):
    return namespace.keys([1, 1])


def of_torch(view):
    torch = pytest.importorskip("torch")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that it cannot make a read-only tensor
        return torch.frombuffer(view, dtype=torch.uint8)


MADE_FROM_VIEWS: dict[str, Any] = {
    "numpy array": lambda view: np.frombuffer(view, np.uint8),
    "part of an array": lambda view: np.frombuffer(view, np.uint8)[100:200],
    "array of another type": lambda view: np.frombuffer(view, np.float32).reshape(4, -1),
    "asarray": np.asarray,
    "part of a view": lambda view: view[100:200],
    "view of a view": memoryview,
    "view of a part of a view": lambda view: memoryview(view[1:])[1:],
    "cast view": lambda view: view.cast("f"),
    "read-only view": lambda view: view.toreadonly(),
    "array of a part of a view": lambda view: np.frombuffer(view[100:200], np.uint8),
    "the exporter": lambda view: view.obj,
}


@pytest.mark.parametrize("kind", MADE_FROM_VIEWS)
def test_what_is_made_from_a_view_keeps_the_lease_until_it_is_gone(store, lease, kind):
    made = MADE_FROM_VIEWS[kind](lease.views[0])
    for _ in range(3):
        with pytest.raises(LeaseInUse, match="1 views of 2 leased blocks are still in use"):
            lease.release()
    assert store.check().leases == 1
    assert lease.valid()
    del made
    gc.collect()
    lease.release()
    assert store.check().leases == 0


def test_a_tensor_of_torch_is_not_seen_and_does_no_harm_after_the_end(session, lease, keys):
    """torch.frombuffer keeps no export: `valid` is what tells its reader, and nothing crashes."""
    tensor = of_torch(lease.views[0])
    lease.release()
    assert not lease.valid()
    session.delete(keys)
    filled(session, 2, 2)
    assert tensor[8:].sum() >= 0, "whatever it is, it can be read"


def test_a_tensor_that_outlives_its_store_reads_zeros(namespace):
    store = kvstore.open(dram_capacity_bytes="1MiB", clock=FakeClock())
    session = store.session(namespace)
    lease = session.lease(filled(session, 1, 1))
    tensor = of_torch(lease.views[0])
    assert tensor.sum() > 0
    lease.release()
    store.close()
    assert tensor.sum() == 0


def test_several_of_them_keep_it_until_the_last_is_gone(lease):
    arrays = [np.frombuffer(view, np.uint8) for view in lease.views]
    while arrays:
        with pytest.raises(LeaseInUse, match=f"{len(arrays)} views"):
            lease.release()
        arrays.pop()
    lease.release()


def test_after_a_refusal_the_lease_gives_views_again(lease, keys):
    array = np.frombuffer(lease.views[1], np.uint8)
    with pytest.raises(LeaseInUse):
        lease.release()
    assert [writer_of(view, key) for view, key in zip(lease.views, keys, strict=True)] == [1, 1]
    del array
    lease.release()


def test_a_view_itself_is_taken_back_with_the_lease(lease):
    views = lease.views
    lease.release()
    for view in views:
        with pytest.raises(ValueError, match="released"):
            view[0]


def test_views_that_nobody_kept_are_in_nobodys_way(lease, keys):
    assert writer_of(lease.views[0], keys[0]) == 1
    assert bytes(lease.views[1][:8]) == payload(keys[1], 1, 8).tobytes()
    lease.release()


def test_views_are_read_only(lease):
    view = lease.views[0]
    assert view.readonly
    with pytest.raises(TypeError, match="read-only"):
        view[0] = 1
    array = np.frombuffer(view, np.uint8)
    with pytest.raises(ValueError, match="read-only"):
        array[0] = 1
    with pytest.raises(ValueError, match="WRITEABLE"):
        array.flags.writeable = True
    del array
    lease.release()


def test_what_exports_a_read_only_view_is_read_only_too(lease):
    assert not lease.views[0].obj.flags.writeable


def test_views_are_the_pools_memory_and_no_copy(session, lease, keys):
    again = session.lease(keys)
    first, second = (np.frombuffer(held.views[0], np.uint8) for held in (lease, again))
    assert first.ctypes.data == second.ctypes.data
    assert np.shares_memory(first, second)
    del first, second
    again.release()
    lease.release()


def test_two_leases_on_a_block_do_not_hold_up_each_other(session, lease, keys):
    other = session.lease(keys)
    array = np.frombuffer(other.views[0], np.uint8)
    lease.release()
    with pytest.raises(LeaseInUse):
        other.release()
    del array
    other.release()


def test_an_expired_lease_still_asks_for_its_views(session, keys, clock):
    """Its memory may be another's by now: whoever reads on should hear of it."""
    filled(session, 1, 2)
    lease = session.lease(keys, ttl_seconds=1)
    array = np.frombuffer(lease.views[0], np.uint8)
    clock.advance(2)
    with pytest.raises(LeaseInUse):
        lease.release()
    del array
    lease.release()


def test_views_outlive_the_store_that_they_are_of():
    namespace = a_namespace(BLOCK_BYTES)
    with kvstore.open(dram_capacity_bytes="1MiB", clock=FakeClock()) as store:
        session = store.session(namespace)
        keys = filled(session, 1, 2)
        views = session.lease(keys).views
        array = np.frombuffer(session.lease(keys).views[1], np.uint8)
    del store, session
    gc.collect()
    assert writer_of(views[0], keys[0]) == 1
    assert writer_of(array, keys[1]) == 1


def test_a_pool_view_counts_only_references_of_others():
    memory = np.zeros(8, np.uint8)
    pool_view = PoolView(memory[:4])
    assert pool_view.view.readonly
    part = pool_view.view[1:]
    assert not pool_view.release()
    del part
    assert pool_view.release()
    assert pool_view.release()
