"""Every tier keeps the one contract, each damaged and read round its own back."""

from __future__ import annotations

import os

import numpy as np
import pytest

from kvstore.errors import TierError
from kvstore.testing.tier_contract import Shelf, TierContract, payload, read, write
from kvstore.tiers.dram import DramTier
from kvstore.types import Outcome
from tests.contract.file_tier import FileTier


class TestDramTier(TierContract):
    """Memory does not notice: what is read there, the core's checksums vouch for."""

    @pytest.fixture
    def tier(self):
        tier = DramTier(self.capacity_bytes)
        yield tier
        tier.close()

    def read_raw(self, tier, place):
        return tier._memory[place.offset_bytes :][: place.length_bytes].tobytes()


class TestFileTier(TierContract):
    notices_damage = True

    @pytest.fixture
    def tier(self, tmp_path):
        tier = FileTier(tmp_path / "blocks", self.capacity_bytes)
        yield tier
        tier.close()

    def read_raw(self, tier, place):
        with tier.path.open("rb") as file:
            file.seek(tier.data_offset(place.offset_bytes))
            return file.read(place.length_bytes)

    def flip_raw(self, tier, place, position):
        with tier.path.open("r+b") as file:
            file.seek(tier.data_offset(place.offset_bytes) + position)
            byte = file.read(1)[0]
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([byte ^ 1]))

    @pytest.mark.parametrize("kept_bytes", [0, 1_000, -1])
    def test_a_file_that_was_cut_short_is_misses(self, tier, kept_bytes):
        place, memory = Shelf().place(5_000), payload(1, 5_000)
        write(tier, [(place, memory)])
        end = tier.data_offset(place.offset_bytes) + place.length_bytes
        os.truncate(tier.path, end + kept_bytes if kept_bytes < 0 else kept_bytes)
        outcomes, _ = read(tier, [place])
        assert outcomes[0].is_miss

    def test_the_systems_errors_are_tier_errors(self, tier, tmp_path):
        with pytest.raises(TierError, match="nowhere"):
            FileTier(tmp_path / "nowhere" / "blocks", self.capacity_bytes)
        place, memory = Shelf().place(4096), payload(1, 4096)
        os.close(tier._fd)
        try:
            with pytest.raises(TierError, match="blocks"):
                tier.read([(place, np.empty_like(memory))])
        finally:
            tier._fd = -1


def test_the_first_write_of_a_place_is_all_that_a_second_reader_needs(tmp_path):
    """What was written is in the medium: another process's tier over it reads the same."""
    place, memory = Shelf().place(7_000), payload(1, 7_000)
    writer = FileTier(tmp_path / "blocks", 1 << 20)
    write(writer, [(place, memory)])
    writer.close()
    reader = FileTier(tmp_path / "blocks", 1 << 20)
    outcomes, found = read(reader, [place])
    reader.close()
    assert outcomes == [Outcome.OK]
    assert np.array_equal(found[0], memory)
