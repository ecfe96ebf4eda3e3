"""The transformers connector where the store fails, and where a call or a model is refused."""

from __future__ import annotations

import logging
from typing import Any

import pytest

import kvstore
from kvstore.client.session import Session
from kvstore.clock import FakeClock
from kvstore.errors import InvalidNamespace, InvalidTokens, TierError
from kvstore.types import Outcome

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from transformers.generation.streamers import BaseStreamer  # noqa: E402

from kvstore.connectors.transformers import PrefixCache, caches  # noqa: E402
from kvstore.cuda import host_copy  # noqa: E402

GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": 24}


@pytest.fixture
def expected(llama, prompt):
    return llama.generate(prompt(40), **GREEDY)


@pytest.fixture
def warnings(caplog):
    caplog.set_level(logging.WARNING, "kvstore")
    return lambda: [record.getMessage() for record in caplog.records]


@pytest.fixture(scope="module")
def wide(build, llama_settings):
    """12 KiB of KV per token."""
    return build(llama_settings(4, head_dim=128))


@pytest.fixture
def five_blocks():
    """The smallest store there is, with room for five blocks of `wide`."""
    with kvstore.open(dram_capacity_bytes="1MiB") as store:
        yield store


class TestFaults:
    def test_a_deleted_prefix_is_computed_again(self, llama, store, prompt, expected, warnings):
        cache = PrefixCache(llama, store)
        cache.generate(prompt(40), **GREEDY)
        with store.session(cache.namespace) as session:
            session.delete(cache.namespace.keys(prompt(40)[0]))
        assert torch.equal(cache.generate(prompt(40), **GREEDY), expected)
        assert cache.last.loaded_tokens == 0
        assert cache.last.reason is Outcome.ABSENT  # deleted, not evicted
        assert cache.last.stored_blocks == 2  # the third, of the answer, was not deleted
        assert warnings() == []

    def test_an_evicted_prefix_is_computed_again(self, wide, five_blocks, prompt, warnings):
        cache = PrefixCache(wide, five_blocks)
        cache.generate(prompt(40), **GREEDY)
        cache.generate(prompt(60, seed=2), **GREEDY)  # five blocks
        output = cache.generate(prompt(40), **GREEDY)
        assert torch.equal(output, wide.generate(prompt(40), **GREEDY))
        assert cache.last.loaded_tokens == 0
        assert cache.last.reason is Outcome.EVICTED
        assert cache.misses[Outcome.EVICTED] > 0
        five_blocks.check()
        assert warnings() == []

    def test_a_store_that_is_too_small_keeps_what_fits(self, wide, five_blocks, prompt, warnings):
        cache = PrefixCache(wide, five_blocks)
        expected = wide.generate(prompt(100), **GREEDY)
        for loaded, reason in ((0, Outcome.ABSENT), (32, Outcome.BUSY), (32, Outcome.BUSY)):
            assert torch.equal(cache.generate(prompt(100), **GREEDY), expected)
            # Five blocks are stored, but at most half of a tier is leased at a time.
            assert (cache.last.loaded_tokens, cache.last.reason) == (loaded, reason)
            assert cache.last.put_outcomes[Outcome.FULL] > 0
        five_blocks.check()
        assert [message.split(".")[0] for message in warnings()] == [
            "Blocks not stored: full",
            "Prefix not loaded: busy",
        ]

    def test_a_closed_store_costs_hits_and_one_warning(
        self, llama, store, prompt, expected, warnings
    ):
        with kvstore.open(dram_capacity_bytes="1MiB") as closed:
            cache = PrefixCache(llama, closed)
            cache.generate(prompt(40), **GREEDY)
        for _ in range(3):
            assert torch.equal(cache.generate(prompt(40), **GREEDY), expected)
            assert (cache.last.loaded_tokens, cache.last.reason) == (0, Outcome.UNAVAILABLE)
        assert (
            cache.misses[Outcome.UNAVAILABLE] == 3 * 2
        )  # to load; a closed store is offered nothing
        assert ["unavailable" in message for message in warnings()] == [True]

    def test_a_store_that_closes_in_the_middle(self, llama, prompt, expected, warnings):
        store = kvstore.open(dram_capacity_bytes="1MiB")
        cache = PrefixCache(llama, store)

        class Close(BaseStreamer):
            left = 5  # the prompt, then tokens: two blocks are stored, the third is not

            def put(self, value):
                self.left -= 1
                if self.left == 0:
                    store.close()

            def end(self):
                pass

        assert torch.equal(cache.generate(prompt(40), streamer=Close(), **GREEDY), expected)
        assert cache.last.put_outcomes == {Outcome.OK: 2, Outcome.UNAVAILABLE: 1}
        assert len(warnings()) == 1

    @pytest.mark.parametrize("work", ["lease", "reserve"])
    def test_a_broken_tier_is_a_miss(
        self, llama, store, prompt, expected, warnings, monkeypatch, work
    ):
        cache = PrefixCache(llama, store)

        def broken(*_, **__):
            raise TierError("gone")

        monkeypatch.setattr(Session, work, broken)
        assert torch.equal(cache.generate(prompt(40), **GREEDY), expected)
        assert cache.last.loaded_tokens == 0
        assert len(warnings()) == 1

    def test_bytes_read_under_an_expired_lease_are_discarded(
        self, llama, prompt, expected, warnings, monkeypatch
    ):
        clock = FakeClock()
        with kvstore.open(dram_capacity_bytes="1MiB", clock=clock) as store:
            cache = PrefixCache(llama, store)
            cache.generate(prompt(40), **GREEDY)

            def slow(views, spots, prefix):
                host_copy_load_blocks(views, spots, prefix)
                for stripe in prefix.stripes:
                    stripe.zero_()  # what another writer might have left there
                clock.advance(3_600)

            host_copy_load_blocks = host_copy.load_blocks
            monkeypatch.setattr(host_copy, "load_blocks", slow)
            assert torch.equal(cache.generate(prompt(40), **GREEDY), expected)
            assert (cache.last.loaded_tokens, cache.last.reason) == (0, Outcome.EXPIRED)
            audit = store.check()
            assert (audit.leases, audit.reservations) == (0, 0)
        assert ["expired" in message for message in warnings()] == [True]

    def test_a_late_commit_stores_nothing(self, llama, prompt, expected, warnings, monkeypatch):
        clock = FakeClock()
        with kvstore.open(dram_capacity_bytes="1MiB", clock=clock) as store:
            cache = PrefixCache(llama, store)

            def slow(*_):
                clock.advance(3_600)

            monkeypatch.setattr(host_copy, "store_blocks", slow)
            assert torch.equal(cache.generate(prompt(40), **GREEDY), expected)
            assert cache.last.put_outcomes == {Outcome.EXPIRED: 2}
            audit = store.check()
            assert audit.free_bytes == audit.capacity_bytes  # nothing is held for a late writer
        assert len(warnings()) == 1

    def test_a_cache_that_is_not_of_these_tokens_is_not_stored(
        self, llama, store, prompt, warnings, monkeypatch
    ):
        """Whatever a version of transformers may do to the cache: no wrong block is left behind."""
        cache = PrefixCache(llama, store)
        made: Any = caches.FollowedCache(llama)
        monkeypatch.setattr(caches, "FollowedCache", lambda _: made)

        class Disturb(BaseStreamer):
            def put(self, value):
                for layer in made.layers if value.numel() == 1 else []:
                    layer.update(layer.keys[:, :, :2], layer.values[:, :, :2])

            def end(self):
                pass

        cache.generate(prompt(40), streamer=Disturb(), **GREEDY)
        assert cache.last.put_outcomes == {Outcome.INCOMPATIBLE: 2}
        assert store.check().ready_blocks == 0
        assert len(warnings()) == 1

    def test_programming_errors_are_raised(self, llama, store, prompt, monkeypatch):
        with pytest.raises(InvalidNamespace):
            PrefixCache(llama, store, block_tokens=0)
        with pytest.raises(TypeError, match=r"expected a tensor of token ids, \[rows, tokens\]"):
            PrefixCache(llama, store).generate([[1, 2]])  # type: ignore[arg-type]
        for swapped in ((store, llama), (type(llama), store), (None, store)):
            with pytest.raises(TypeError, match=r"^model is .*: expected a transformers model"):
                PrefixCache(*swapped)
        for wrong in (3, None, type(store), "8GiB"):
            with pytest.raises(TypeError, match=r"^store is .*: expected an open store"):
                PrefixCache(llama, wrong)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match=r"got \[3\]"):
            PrefixCache(llama, store).generate(torch.tensor([1, 2, 3]))
        with pytest.raises(InvalidTokens):
            PrefixCache(llama, store).generate(prompt(40) - 300)
