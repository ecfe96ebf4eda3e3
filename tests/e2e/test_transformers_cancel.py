"""A call that is broken off, wherever, leaves no lease and no reservation, and no wrong block."""

from __future__ import annotations

import ctypes
import threading
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from transformers import LogitsProcessor, StoppingCriteria  # noqa: E402
from transformers.generation.streamers import BaseStreamer  # noqa: E402

from kvstore.connectors.transformers import PrefixCache  # noqa: E402
from tests.e2e.reference import GREEDY, batch, check_blocks, check_same  # noqa: E402


class Cancelled(Exception):
    pass


class Count:
    """Raises at the n-th call; whatever it is called with, it holds nothing of it."""

    def __init__(self, calls: int, error: type[BaseException]):
        self.left, self.error = calls, error

    def __call__(self, *arguments: Any, **_: Any) -> None:
        del arguments
        self.left -= 1
        if self.left == 0:
            raise self.error


class Streamer(BaseStreamer):
    def __init__(self, count: Count):
        self.count = count

    def put(self, value):
        self.count()

    def end(self):
        self.count()


class Criterion(StoppingCriteria):
    def __init__(self, count: Count):
        self.count = count

    def __call__(self, input_ids, scores, **_):
        self.count()
        return torch.zeros(len(input_ids), dtype=torch.bool)


class Processor(LogitsProcessor):
    def __init__(self, count: Count):
        self.count = count

    def __call__(self, input_ids, scores):
        self.count()
        return scores


BY_ARGUMENT = {
    "streamer": Streamer,
    "stopping_criteria": lambda count: [Criterion(count)],
    "logits_processor": lambda count: [Processor(count)],
}


@pytest.fixture
def cache(llama, store):
    return PrefixCache(llama, store)


@pytest.fixture
def check(llama, store, cache, prompt):
    """Nothing is held, everything adds up, what was stored is right, and so is the next call."""

    def check_all() -> None:
        audit = store.check()
        assert (audit.leases, audit.reservations) == (0, 0)
        assert (audit.reserved_bytes, audit.held_bytes, audit.condemned_bytes) == (0, 0, 0)
        sequences = check_same(llama, cache, prompt(40))
        check_blocks(llama, cache, store, sequences[0].tolist())

    return check_all


class TestCallersCode:
    @pytest.mark.parametrize("error", [KeyboardInterrupt, Cancelled])
    @pytest.mark.parametrize("calls", [1, 2, 12])
    @pytest.mark.parametrize("argument", BY_ARGUMENT)
    def test_one_sequence(self, cache, check, prompt, argument, calls, error):
        for _ in range(2):  # cold, and with a prefix loaded
            given = {argument: BY_ARGUMENT[argument](Count(calls, error))}
            with pytest.raises(error):
                cache.generate(prompt(40), **GREEDY, **given)
        check()

    @pytest.mark.parametrize("calls", [1, 12])
    @pytest.mark.parametrize("argument", ["stopping_criteria", "logits_processor"])
    @pytest.mark.parametrize("search", [{"num_beams": 3}, {"num_beams": 1}], ids=str)
    def test_a_batch(self, cache, check, prompt, argument, calls, search):
        arguments = batch(prompt(40), prompt(50, seed=2))
        for _ in range(2):
            given = {argument: BY_ARGUMENT[argument](Count(calls, KeyboardInterrupt))}
            with pytest.raises(KeyboardInterrupt):
                cache.generate(**arguments, **GREEDY, **search, **given)
        check()

    def test_what_was_full_is_kept(self, cache, store, prompt):
        for calls, blocks in ((2, 0), (3, 2), (10, 2), (11, 3)):  # the prompt is the first put
            with pytest.raises(Cancelled):
                cache.generate(prompt(40), **GREEDY, streamer=Streamer(Count(calls, Cancelled)))
            assert store.check().ready_blocks == blocks


class TestOurs:
    """Ctrl-C while bytes are copied."""

    @pytest.mark.parametrize("calls", [1, 2, 3])
    def test_while_a_prefix_is_loaded(self, cache, check, prompt, monkeypatch, calls):
        cache.generate(prompt(64), **GREEDY)
        self.interrupt(monkeypatch, cache, prompt, calls)
        check()

    @pytest.mark.parametrize("calls", [1, 2, 7])
    def test_while_blocks_are_stored(self, cache, check, prompt, monkeypatch, calls):
        self.interrupt(monkeypatch, cache, prompt, calls)
        check()

    def interrupt(self, monkeypatch, cache, prompt, calls):
        count, copyto = Count(calls, KeyboardInterrupt), np.copyto

        def copy(target, source):
            if count.left == 1:
                del target, source
                count()
                return
            count()
            copyto(target, source)

        with monkeypatch.context() as patch:
            patch.setattr(np, "copyto", copy)
            with pytest.raises(KeyboardInterrupt):
                cache.generate(prompt(64), **GREEDY)


class TestThreads:
    @pytest.mark.parametrize("puts", [1, 5, 12])
    def test_an_exception_from_another_thread(self, cache, check, prompt, puts):
        """As a server does that gives a request up: it is raised wherever the thread is."""
        reached, killed = threading.Event(), threading.Event()
        errors: list[BaseException] = []

        class Wait(BaseStreamer):
            left = puts

            def put(self, value):
                self.left -= 1
                if self.left == 0:
                    reached.set()
                    killed.wait(10)

            def end(self):
                pass

        def work() -> None:
            try:
                cache.generate(prompt(40), **GREEDY, streamer=Wait())
            except Cancelled as error:
                errors.append(error)

        thread = threading.Thread(target=work)
        thread.start()
        assert reached.wait(60)
        ident = ctypes.c_ulong(thread.ident or 0)
        assert ctypes.pythonapi.PyThreadState_SetAsyncExc(ident, ctypes.py_object(Cancelled)) == 1
        killed.set()
        thread.join(60)
        assert not thread.is_alive()
        assert len(errors) == 1
        check()

    def test_calls_beside_each_other(self, llama, store, cache, prompt):
        """Threads that share a prefix, a store and a PrefixCache, each with a batch of its own."""
        prompts = [batch(prompt(40), prompt(50, seed)) for seed in range(2, 6)]
        expected = [llama.generate(**arguments, **GREEDY) for arguments in prompts]
        found: list[Any] = [None] * len(prompts)

        def work(index: int) -> None:
            for _ in range(2):
                found[index] = cache.generate(**prompts[index], **GREEDY)

        threads = [threading.Thread(target=work, args=(i,)) for i in range(len(prompts))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        for one, other in zip(found, expected, strict=True):
            assert torch.equal(one, other)
