"""Memory that processes share: what is sealed, and what is left of a mapping that is gone."""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvstore import shared_memory
from kvstore.errors import TierError
from kvstore.shared_memory import HUGE_PAGE_BYTES, SharedMapping

BYTES = 1 << 20


@pytest.fixture
def fd():
    fd = shared_memory.create("test", BYTES)
    yield fd
    os.close(fd)


def test_its_length_is_fixed(fd):
    for length_bytes in (0, 2 * BYTES):
        with pytest.raises(PermissionError):
            os.ftruncate(fd, length_bytes)
    shared_memory.check_sealed(fd, BYTES)
    with pytest.raises(TierError, match="not as announced"):
        shared_memory.check_sealed(fd, BYTES + 1)


def test_what_is_not_sealed_is_refused(tmp_path):
    raw = os.memfd_create("raw", os.MFD_ALLOW_SEALING)
    os.ftruncate(raw, BYTES)
    with pytest.raises(TierError, match="seals 0x0"):
        shared_memory.check_sealed(raw, BYTES)
    os.close(raw)
    path = tmp_path / "file"
    path.write_bytes(bytes(BYTES))
    with path.open("rb") as file, pytest.raises(TierError, match="not a descriptor of shared"):
        shared_memory.check_sealed(file.fileno(), BYTES)


def test_mappings_share_their_bytes_and_begin_at_a_huge_page(fd):
    writer = SharedMapping(fd, BYTES, is_writable=True)
    reader = SharedMapping(shared_memory.read_only(fd), BYTES, is_writable=False)
    assert writer.memory.ctypes.data % HUGE_PAGE_BYTES == 0
    writer.memory[5] = 7
    assert reader.memory[5] == 7
    with pytest.raises(ValueError, match="read-only"):
        reader.memory[5] = 8
    writer.populate(0, BYTES)
    writer.close()
    with pytest.raises(TierError, match="is closed"):
        _ = writer.memory


def test_a_reader_cannot_make_itself_a_writer_of_the_words():
    """Not even by opening the descriptor again, which a descriptor's mode does not prevent."""
    fd = shared_memory.create("words", BYTES, is_sealed=False)
    mapping = SharedMapping(fd, BYTES, is_writable=True)
    shared_memory.forbid_writers(fd)
    mapping.memory[0] = 1
    again = os.open(f"/proc/self/fd/{fd}", os.O_RDWR)
    with pytest.raises(PermissionError):
        os.pwrite(again, b"1", 0)
    with pytest.raises(PermissionError):
        mmap.mmap(again, BYTES)
    with pytest.raises(PermissionError):
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
    shared_memory.check_sealed(fd, BYTES)
    os.close(again)
    os.close(fd)


def test_its_memory_goes_with_the_last_view_and_its_addresses_stay(fd):
    mapping = SharedMapping(fd, BYTES, is_writable=True)
    mapping.memory[:] = 9
    view = mapping.memory[100:200]
    address = view.ctypes.data
    mapping.close()
    del mapping
    assert view.sum() == 900, "kept for the view"
    del view
    assert ctypes.string_at(address, 4) == bytes(4), "zeros, and no crash"
    reader = SharedMapping(fd, BYTES, is_writable=False)
    assert reader.memory[100] == 9


def test_a_forked_child_finds_zeros_and_cannot_harm_its_parent():
    script = """
import os
from kvstore import shared_memory
fd = shared_memory.create("test", 1 << 20)
mapping = shared_memory.SharedMapping(fd, 1 << 20, is_writable=True)
mapping.memory[:] = 9
view = mapping.memory[:4]
pid = os.fork()
if not pid:
    found = bytes(view)
    view[:] = 1
    del view
    mapping.close()
    os._exit(0 if found == bytes(4) else 1)
print(os.waitpid(pid, 0)[1], bytes(view))
"""
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=Path(__file__).resolve().parents[2],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stdout.strip() == r"0 b'\t\t\t\t'", done.stderr


def test_no_memory_is_said():
    with pytest.raises(TierError, match="no shared memory of"):
        shared_memory.create("none", -1)
