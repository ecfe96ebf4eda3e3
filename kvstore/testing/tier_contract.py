"""The contract of a tier, as tests that anyone can run on a tier of their own.

    class TestMyTier(TierContract):
        notices_damage = True

        @pytest.fixture
        def tier(self, tmp_path):
            tier = MyTier(tmp_path, capacity_bytes=self.capacity_bytes)
            yield tier
            tier.close()

        def read_raw(self, tier, place):
            ...                         # the payload, read from the medium and not from the tier

        def flip_raw(self, tier, place, position):
            ...                         # change one byte there, likewise

The last two go round the tier, so that it cannot grade itself. A medium that cannot be reached
otherwise leaves them out; the tests that need them are skipped then.
"""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import pytest
from msgspec import structs

from kvstore.errors import TierError
from kvstore.types import SLOT_ALIGNMENT_BYTES, Outcome, Place

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvstore.buffers import Bytes
    from kvstore.tiers.base import Tier

MIB = 1024 * 1024
#: One byte, the neighbourhood of a page of memory, sizes that are no power of two, and a large one.
LENGTHS_BYTES = (1, 4095, 4096, 4097, 777, 12_345, 100_003, MIB)
GUARD_BYTES = 64
GUARD = 0xA5
THREADS = 8


def payload(seed: int, length_bytes: int) -> Bytes:
    """Bytes that differ for every seed and repeat nowhere."""
    return np.random.default_rng(seed).integers(0, 256, length_bytes, np.uint8)


class Guarded:
    """Memory for a read, with bytes on both sides that no read may touch."""

    def __init__(self, length_bytes: int) -> None:
        self._whole = np.full(length_bytes + 2 * GUARD_BYTES, GUARD, np.uint8)
        self.memory: Bytes = self._whole[GUARD_BYTES : GUARD_BYTES + length_bytes]

    def is_whole(self) -> bool:
        """True while nothing was written beside the memory."""
        before, after = self._whole[:GUARD_BYTES], self._whole[-GUARD_BYTES:]
        return bool((before == GUARD).all() and (after == GUARD).all())


class Shelf:
    """Places side by side, as the core grants them: 4 KiB-aligned, each with a generation."""

    def __init__(self) -> None:
        self._offset_bytes = 0
        self._granted = 0

    def place(self, length_bytes: int, offset_bytes: int | None = None) -> Place:
        """The next place, or one at an offset that was used before, for another key."""
        self._granted += 1
        key = self._granted.to_bytes(8, "little").ljust(64, b"k")
        if offset_bytes is None:
            offset_bytes = self._offset_bytes
            units = -(-length_bytes // SLOT_ALIGNMENT_BYTES)
            self._offset_bytes += units * SLOT_ALIGNMENT_BYTES
        return Place(key, offset_bytes, length_bytes, self._granted)


def write(tier: Tier, contents: Sequence[tuple[Place, Bytes]]) -> None:
    """Write a batch that has to succeed."""
    outcomes = tier.write([(place, memory) for place, memory in contents])
    assert outcomes == [Outcome.OK] * len(contents)


def read(tier: Tier, places: Sequence[Place]) -> tuple[list[Outcome], list[Bytes]]:
    """Read a batch: outcomes, and what came, each in memory of exactly its length."""
    targets = [Guarded(place.length_bytes) for place in places]
    pieces = [(p, target.memory) for p, target in zip(places, targets, strict=True)]
    outcomes = tier.read(pieces)
    assert len(outcomes) == len(places), "one outcome a piece"
    assert all(target.is_whole() for target in targets), "a read wrote beside its memory"
    return outcomes, [target.memory for target in targets]


def assert_holds(tier: Tier, contents: Sequence[tuple[Place, Bytes]]) -> None:
    """Every place gives back its own bytes."""
    outcomes, found = read(tier, [place for place, _ in contents])
    assert outcomes == [Outcome.OK] * len(contents)
    for position, ((place, expected), memory) in enumerate(zip(contents, found, strict=True)):
        assert np.array_equal(memory, expected), f"piece {position}, {place}: other bytes"


class TierContract:
    """Subclass it in a test module, as a class whose name begins with Test."""

    #: Of the tier that the fixture makes, at least.
    capacity_bytes: ClassVar[int] = 8 * MIB
    #: True for a tier that checks what it reads: damaged, foreign and deleted bytes are misses.
    notices_damage: ClassVar[bool] = False

    @pytest.fixture
    def tier(self) -> Tier:
        """An open and empty tier of `capacity_bytes`."""
        raise NotImplementedError("give the tier under test: override this fixture")

    def read_raw(self, tier: Tier, place: Place) -> bytes:
        """The payload at `place`, read from the medium without the tier."""
        pytest.skip("the medium cannot be read round the tier")

    def flip_raw(self, tier: Tier, place: Place, position: int) -> None:
        """Change the payload's byte at `position`, in the medium, without the tier."""
        pytest.skip("the medium cannot be written round the tier")

    # -- bytes -------------------------------------------------------------------------------

    @pytest.mark.parametrize("length_bytes", LENGTHS_BYTES)
    def test_every_length_comes_back_exactly(self, tier: Tier, length_bytes: int) -> None:
        """The logical length: never padded, never cut."""
        content = Shelf().place(length_bytes), payload(1, length_bytes)
        write(tier, [content])
        assert_holds(tier, [content])

    @pytest.mark.parametrize("length_bytes", LENGTHS_BYTES)
    def test_the_medium_holds_what_was_written(self, tier: Tier, length_bytes: int) -> None:
        """Said by the medium itself."""
        place, memory = Shelf().place(length_bytes), payload(2, length_bytes)
        write(tier, [(place, memory)])
        # As arrays: of unequal bytes pytest explains each one that differs, which takes minutes.
        raw = np.frombuffer(self.read_raw(tier, place), np.uint8)
        assert np.array_equal(raw, memory), f"{place}: other bytes in the medium"

    def test_a_batch_may_name_places_in_any_order(self, tier: Tier) -> None:
        """Pieces of many sizes, written and read in two different orders."""
        shelf, rng = Shelf(), random.Random(3)
        contents = [(shelf.place(n), payload(n, n)) for n in rng.sample(range(1, 40_000), 40)]
        rng.shuffle(contents)
        write(tier, contents)
        rng.shuffle(contents)
        assert_holds(tier, contents)

    def test_an_empty_batch_has_no_outcomes(self, tier: Tier) -> None:
        """Nothing asked, nothing done."""
        assert tier.read([]) == []
        assert tier.write([]) == []
        assert tier.delete([]) == []

    def test_a_place_may_be_read_twice_in_a_batch(self, tier: Tier) -> None:
        """Each piece gets the bytes."""
        content = Shelf().place(5_000), payload(4, 5_000)
        write(tier, [content])
        assert_holds(tier, [content, content])

    def test_a_write_leaves_its_neighbours_alone(self, tier: Tier) -> None:
        """Also where a place is filled to its last byte, or by one byte only."""
        shelf = Shelf()
        contents = [(shelf.place(n), payload(n, n)) for n in (8192, 4096, 8192)]
        write(tier, contents)
        for length_bytes in (4096, 1, 4095):
            middle = shelf.place(length_bytes, contents[1][0].offset_bytes)
            contents[1] = middle, payload(length_bytes + 1, length_bytes)
            write(tier, [contents[1]])
            assert_holds(tier, contents)

    def test_a_place_may_be_written_again_for_another_key(self, tier: Tier) -> None:
        """With and without a delete in between, shorter and longer than before."""
        shelf = Shelf()
        for round_, length_bytes in enumerate((9_000, 100, 12_288, 5)):
            content = shelf.place(length_bytes, 4096), payload(round_, length_bytes)
            write(tier, [content])
            assert_holds(tier, [content])
            if round_ % 2:
                tier.delete([content[0]])

    def test_sources_may_be_read_only_and_stay_as_they_are(self, tier: Tier) -> None:
        """A tier only reads what it is to store."""
        place, memory = Shelf().place(10_000), payload(5, 10_000)
        source = memory.copy()
        source.flags.writeable = False
        write(tier, [(place, source)])
        assert np.array_equal(source, memory)
        assert_holds(tier, [(place, memory)])

    def test_sources_may_change_once_the_write_has_returned(self, tier: Tier) -> None:
        """The caller's memory is not used after the call."""
        place, memory = Shelf().place(10_000), payload(6, 10_000)
        source = memory.copy()
        write(tier, [(place, source)])
        source[:] = 0
        assert_holds(tier, [(place, memory)])

    def test_memory_may_start_anywhere(self, tier: Tier) -> None:
        """A tier that needs aligned memory makes its own."""
        place, memory = Shelf().place(9_999), payload(7, 9_999)
        for skip in (0, 1, 7, 512):
            source = np.empty(skip + 9_999, np.uint8)[skip:]
            source[:] = memory
            write(tier, [(place, source)])
            target = np.empty(skip + 9_999, np.uint8)[skip:]
            assert tier.read([(place, target)]) == [Outcome.OK]
            assert np.array_equal(target, memory)

    # -- room --------------------------------------------------------------------------------

    def test_capacity_is_whole_slots_and_what_was_asked_for(self, tier: Tier) -> None:
        """The core cuts it into slots of 4 KiB."""
        assert tier.capacity_bytes % SLOT_ALIGNMENT_BYTES == 0
        assert tier.capacity_bytes >= self.capacity_bytes
        assert tier.name

    def test_the_first_and_the_last_place_are_usable(self, tier: Tier) -> None:
        """Up to the very last byte, and without touching the ends' neighbours."""
        shelf, last = Shelf(), tier.capacity_bytes - SLOT_ALIGNMENT_BYTES
        offsets = (0, 4096, last - 4096, last)
        contents = [(shelf.place(4096, offset), payload(offset, 4096)) for offset in offsets]
        write(tier, contents)
        assert_holds(tier, contents)

    def test_every_place_can_be_full_at_once(self, tier: Tier) -> None:
        """All of the capacity is there, and each place has bytes of its own."""
        shelf, size = Shelf(), 64 * 1024
        count = self.capacity_bytes // size
        contents = [(shelf.place(size), payload(i, size)) for i in range(count)]
        for start in range(0, count, 16):
            write(tier, contents[start : start + 16])
        random.Random(8).shuffle(contents)
        assert_holds(tier, contents)

    # -- deleting and closing ----------------------------------------------------------------

    def test_deleting_is_ok_also_where_nothing_is(self, tier: Tier) -> None:
        """Twice, and for a place that was never written."""
        shelf = Shelf()
        written, never = shelf.place(5_000), shelf.place(5_000)
        write(tier, [(written, payload(9, 5_000))])
        assert tier.delete([written, never]) == [Outcome.OK] * 2
        assert tier.delete([never, written]) == [Outcome.OK] * 2

    def test_a_delete_leaves_its_neighbours_alone(self, tier: Tier) -> None:
        """Only the place that was named."""
        shelf = Shelf()
        contents = [(shelf.place(6_000), payload(i, 6_000)) for i in range(5)]
        write(tier, contents)
        tier.delete([contents[1][0], contents[3][0]])
        assert_holds(tier, [contents[0], contents[2], contents[4]])

    def test_closing_twice_does_nothing(self, tier: Tier) -> None:
        """Whoever cleans up need not know who did before."""
        tier.close()
        tier.close()

    def test_calls_after_close_raise(self, tier: Tier) -> None:
        """A closed tier is a fault of its caller, and no miss."""
        place, memory = Shelf().place(4096), payload(10, 4096)
        write(tier, [(place, memory)])
        tier.close()
        with pytest.raises(TierError):
            tier.read([(place, memory.copy())])
        with pytest.raises(TierError):
            tier.write([(place, memory)])
        with pytest.raises(TierError):
            tier.delete([place])

    # -- threads -----------------------------------------------------------------------------

    def test_threads_may_use_different_places_at_the_same_time(self, tier: Tier) -> None:
        """Each thread finds its own bytes, round after round."""
        shelf, places_each = Shelf(), 6
        places = [
            [shelf.place(length_bytes) for length_bytes in (1, 4096, 4097, 30_000, 65_536, 777)]
            for _ in range(THREADS)
        ]

        def work(thread: int) -> int:
            for round_ in range(10):
                seeds = (thread * 1_000 + round_ * 10 + i for i in range(places_each))
                contents = [
                    (place, payload(seed, place.length_bytes))
                    for place, seed in zip(places[thread], seeds, strict=True)
                ]
                write(tier, contents)
                assert_holds(tier, contents[::-1])
            return thread

        with ThreadPoolExecutor(THREADS) as pool:
            assert list(pool.map(work, range(THREADS))) == list(range(THREADS))

    # -- damage ------------------------------------------------------------------------------

    @pytest.mark.parametrize("position", [0, 5_000, 9_999])
    def test_a_changed_byte_is_a_miss_and_spoils_no_other_piece(
        self, tier: Tier, position: int
    ) -> None:
        """One outcome a piece: its neighbours in batch and medium are read all the same."""
        self._needs_notice()
        shelf = Shelf()
        contents = [(shelf.place(10_000), payload(i, 10_000)) for i in range(5)]
        write(tier, contents)
        self.flip_raw(tier, contents[2][0], position)
        outcomes, found = read(tier, [place for place, _ in contents])
        assert [outcome.is_miss for outcome in outcomes] == [False, False, True, False, False]
        for i in (0, 1, 3, 4):
            assert np.array_equal(found[i], contents[i][1])

    def test_a_deleted_place_is_a_miss(self, tier: Tier) -> None:
        """Until it is written again."""
        self._needs_notice()
        shelf = Shelf()
        contents = [(shelf.place(5_000), payload(i, 5_000)) for i in range(2)]
        write(tier, contents)
        tier.delete([contents[0][0]])
        outcomes, _ = read(tier, [place for place, _ in contents])
        assert [outcome.is_miss for outcome in outcomes] == [True, False]
        write(tier, contents[:1])
        assert_holds(tier, contents)

    def test_another_keys_bytes_are_a_miss(self, tier: Tier) -> None:
        """A place is read for the key that was written there, and for no other."""
        self._needs_notice()
        shelf = Shelf()
        mine = shelf.place(5_000)
        theirs = shelf.place(5_000, mine.offset_bytes)
        write(tier, [(mine, payload(1, 5_000))])
        outcomes, _ = read(tier, [theirs])
        assert outcomes[0].is_miss
        write(tier, [(theirs, payload(2, 5_000))])
        outcomes, _ = read(tier, [mine])
        assert outcomes[0].is_miss

    def test_another_length_is_a_miss(self, tier: Tier) -> None:
        """Neither cut nor padded to what was asked for."""
        self._needs_notice()
        place = Shelf().place(5_000)
        write(tier, [(place, payload(1, 5_000))])
        for length_bytes in (4_999, 5_001):
            outcomes, _ = read(tier, [structs.replace(place, length_bytes=length_bytes)])
            assert outcomes[0].is_miss

    def test_a_place_that_was_covered_by_a_larger_one_is_a_miss(self, tier: Tier) -> None:
        """Slots of other sizes come to lie over those that were freed."""
        self._needs_notice()
        shelf = Shelf()
        small = shelf.place(4096, 8192)
        write(tier, [(small, payload(1, 4096))])
        write(tier, [(shelf.place(16_384, 4096), payload(2, 16_384))])
        outcomes, _ = read(tier, [small])
        assert outcomes[0].is_miss

    def _needs_notice(self) -> None:
        if not self.notices_damage:
            pytest.skip("the tier does not claim to notice")
