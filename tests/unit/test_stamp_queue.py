"""The queue of stamps against a heap, in every order of pushes that makes it hard."""

from __future__ import annotations

import gc
import heapq
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore import stamp_queue
from kvstore.stamp_queue import StampQueue


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("push"), st.integers(-20, 20)),
            st.tuples(st.just("pop"), st.none()),
            st.tuples(st.just("sweep"), st.integers(2, 4)),
        ),
        max_size=200,
    ),
    st.integers(2, 6),
    st.integers(2, 40),
)
def test_it_yields_what_a_heap_yields(steps, run_items, runs):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stamp_queue, "RUN_ITEMS_MAX", run_items)
        patch.setattr(stamp_queue, "RUNS_MAX", runs)
        queue = StampQueue()
        heap: list[tuple[float, int]] = []
        for number, (what, value) in enumerate(steps):
            if what == "push":
                queue.push(float(value), number)
                heapq.heappush(heap, (float(value), number))
            elif what == "pop":
                assert_pop(queue, heap)
            else:
                unwanted = Unwanted(value)
                queue.sweep(unwanted)
                swept = unwanted.swept
                heap = [item for item in heap if item[1] not in swept]
                heapq.heapify(heap)
            assert len(queue) == len(heap)
        while heap:
            assert_pop(queue, heap)
        assert queue.pop() is None


class Unwanted:
    """Says of multiples of `divisor` that they are of no use, and remembers which it was asked."""

    def __init__(self, divisor: int) -> None:
        self.divisor = divisor
        self.swept: set[int] = set()

    def __call__(self, _: float, number: int) -> bool:
        if number % self.divisor == 0:
            self.swept.add(number)
        return number not in self.swept


def assert_pop(queue, heap):
    """Equal stamps come in any order, so the heap gives up the number that the queue gave."""
    found = queue.pop()
    if not heap:
        assert found is None
        return
    assert found is not None
    assert found[0] == heap[0][0]
    heap.remove(found)
    heapq.heapify(heap)


@pytest.mark.parametrize("order", ["ascending", "descending", "random"])
def test_it_stays_small_and_sorted_in_any_order(order):
    count = 50_000
    stamps = [float(i) for i in range(count)]
    if order == "descending":
        stamps.reverse()
    elif order == "random":
        random.Random(1).shuffle(stamps)
    queue = StampQueue()
    for number, stamp in enumerate(stamps):
        queue.push(stamp, number)
    assert len(queue._growing) <= stamp_queue.RUNS_MAX
    assert len(queue._firsts) <= stamp_queue.RUNS_MAX + count // 1000
    popped = [queue.pop() for _ in range(count)]
    assert [item[0] for item in popped if item] == sorted(stamps)
    assert [queue._growing, queue._ends, queue._firsts] == [[], [], []]


def test_the_garbage_collector_does_not_see_its_items():
    queue = StampQueue()
    for number in range(100_000):
        queue.push(float(number), number)
    gc.collect()
    seen = gc.get_objects()
    pairs = [item for item in seen if type(item) is tuple and len(item) == 2]
    assert not any(type(stamp) is float and stamp == 50_000.0 for stamp, _ in pairs)
    assert sum(type(item) is stamp_queue._Run for item in seen) < 100
    del seen, pairs


def test_sweeping_reaches_every_run():
    """Of what comes up first all may be wanted; what is of no use lies behind it."""
    queue = StampQueue()
    for number in range(30_000):
        queue.push(float(number), number)
    for _ in range(40):
        queue.sweep(lambda _, number: number < 5_000)
    assert len(queue) == 5_000
