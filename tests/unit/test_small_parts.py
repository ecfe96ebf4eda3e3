"""Checksums, clocks, errors and counters."""

from __future__ import annotations

import threading

import numpy as np
import pytest

import kvstore
from kvstore import codec, errors
from kvstore.clock import FakeClock, SystemClock
from kvstore.metrics import COUNTERS, Counters
from kvstore.types import Outcome


class TestCodec:
    @pytest.mark.parametrize(
        ("payload", "expected"),
        [(b"", 0x2D06800538D394C2), (b"abc", 0x78AF5F94892F3950)],
    )
    def test_it_is_the_published_xxh3(self, payload, expected):
        """The values of the xxHash sources for seed 0: stored bytes must be readable for ever."""
        assert codec.checksum(np.frombuffer(payload, np.uint8)) == expected

    def test_every_bit_counts(self):
        memory = np.zeros(4097, np.uint8)
        seen = {codec.checksum(memory)}
        for position in (0, 1, 2048, 4095, 4096):
            for bit in range(8):
                memory[position] ^= 1 << bit
                seen.add(codec.checksum(memory))
                memory[position] ^= 1 << bit
        assert len(seen) == 41

    def test_length_counts(self):
        assert codec.checksum(np.zeros(4096, np.uint8)) != codec.checksum(np.zeros(4097, np.uint8))


class TestClock:
    def test_a_fake_clock_moves_only_forward_and_only_when_told(self):
        clock = FakeClock(5)
        assert (clock.now(), clock.now()) == (5, 5)
        clock.advance(1.5)
        assert clock.now() == 6.5
        with pytest.raises(ValueError, match="does not go back"):
            clock.advance(-1)

    def test_waiting_on_a_fake_clock_lets_the_time_pass(self):
        clock, condition = FakeClock(0), threading.Condition()
        with condition:
            clock.wait(condition, 3)
            clock.wait(condition, -3)
        assert clock.now() == 3

    def test_the_systems_clock_never_goes_back_and_waits_are_woken(self):
        clock, condition = SystemClock(), threading.Condition()
        times = [clock.now() for _ in range(1_000)]
        assert times == sorted(times)
        news = []

        def wake():
            with condition:
                news.append(1)
                condition.notify_all()

        thread = threading.Thread(target=wake)
        with condition:
            thread.start()
            while not news:
                clock.wait(condition, 60)
        thread.join(60)
        assert news


class TestErrors:
    def test_every_error_is_ours_and_drawn_in_the_tree(self):
        kinds = [kind for kind in vars(errors).values() if isinstance(kind, type)]
        assert len(kinds) > 10
        for kind in kinds:
            assert issubclass(kind, errors.KVStoreError)
            assert kind.__doc__
            assert kind is errors.KVStoreError or kind.__name__ in (errors.__doc__ or "")

    @pytest.mark.parametrize("name", ["Namespace", "Layout", "Tokens", "Keys", "Buffer"])
    def test_what_cannot_be_right_is_an_invalid_request_and_a_value_error(self, name):
        kind = getattr(errors, f"Invalid{name}")
        assert issubclass(kind, errors.InvalidRequest)
        assert issubclass(kind, ValueError)

    def test_a_lease_error_is_no_invalid_request(self):
        assert issubclass(errors.LeaseExpired, errors.LeaseError)
        assert issubclass(errors.LeaseInUse, errors.LeaseError)
        assert not issubclass(errors.LeaseError, errors.InvalidRequest)
        assert kvstore.errors is errors


class TestOutcome:
    def test_three_are_no_misses(self):
        assert {o for o in Outcome if not o.is_miss} == {
            Outcome.OK,
            Outcome.GRANTED,
            Outcome.PRESENT,
        }


class TestCounters:
    def test_a_snapshot_has_every_counter_also_those_at_zero(self):
        counters = Counters()
        assert counters.snapshot() == {
            name: {} if label else 0 for name, (label, _) in COUNTERS.items()
        }

    def test_they_add_up_by_label(self):
        counters = Counters()
        counters.add("misses", 2, "absent")
        counters.add("misses", 1, "evicted")
        counters.add("misses", 3, "absent")
        counters.add("differing_puts")
        assert counters["misses", "absent"] == 5
        assert counters.by_label("misses") == {"absent": 5, "evicted": 1}
        assert counters.snapshot()["differing_puts"] == 1
        assert counters["misses", "corrupt"] == 0
