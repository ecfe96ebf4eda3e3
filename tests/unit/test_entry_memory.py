"""How much memory entries take, measured in processes that do nothing else (CA14)."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from kvstore.residency import ENTRY_BYTES

MIB = 1024 * 1024
PUTS = 200_000

#: Fills a core through requests and prints what Python's allocator was asked for meanwhile.
FILL = """
import gc, tracemalloc
from kvstore.cli.bench.match.residents import Residents, Sequences
ENTRIES = 25_000  # between two sizes of the tables
sequences = Sequences(ENTRIES, 1_024)
tracemalloc.start()
gc.collect()
before, _ = tracemalloc.get_traced_memory()
residents = Residents(ENTRIES)
residents.fill(sequences)
gc.collect()
after, _ = tracemalloc.get_traced_memory()
assert residents.core.slots.granted_slots == ENTRIES
print((after - before) / ENTRIES)
"""

#: Puts small blocks through a small store, and prints what is resident after each tenth.
CHURN = f"""
import json
from pathlib import Path
import kvstore
from kvstore.config import Config, DramConfig, StoreConfig
PUTS, BATCH, KEPT = {PUTS}, 64, 1_000
layout = kvstore.Layout.mla(layers=1, latent_dim=4_095, rope_dim=1, dtype="int8")
namespace = kvstore.Namespace(model="m", fingerprint="f", layout=layout, block_tokens=1)
blocks = [bytes(4_096)] * BATCH
config = Config(dram=DramConfig(capacity_bytes="16MiB"), store=StoreConfig(history_entries=KEPT))
resident, stored = [], 0
with kvstore.open(config) as store, store.session(namespace) as session:
    while stored < PUTS:
        keys = namespace.keys([stored] * BATCH)
        assert session.put(keys, blocks) == ["ok"] * BATCH
        stored += BATCH
        if stored % (3 * BATCH) == 0:  # some are used again
            session.lease(keys).release()
        if stored * 10 // PUTS > len(resident):
            resident.append(int(Path("/proc/self/statm").read_text().split()[1]) * 4_096)
    store.check()
    tier = store.stats()["tiers"]["dram"]
print(json.dumps({{"resident": resident, "entries": tier["ready_bytes"] // 4_096}}))
"""


def run_alone(program: str) -> Any:
    """What a program prints, as JSON."""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_an_entry_counts_as_what_it_takes_and_not_as_less():
    measured = run_alone(FILL)
    assert measured <= ENTRY_BYTES <= 1.25 * measured


@pytest.mark.slow
def test_memory_is_flat_while_blocks_come_and_go():
    """60 bytes a put that nobody gives back would be more than 10 MiB."""
    found = run_alone(CHURN)
    assert 3_000 < found["entries"] < 4_000
    assert len(found["resident"]) == 10
    assert max(found["resident"]) - found["resident"][0] < 10 * MIB, found["resident"]
