"""What the kernel of this machine offers, tried out rather than read from its version."""

from __future__ import annotations

import mmap
import os
import re
import socket
from pathlib import Path

_SETTINGS = Path("/sys/kernel/mm/transparent_hugepage")
_SO_PEERPIDFD = 77  # linux/socket.h, since 6.5
_MADV_POPULATE_WRITE = 23  # linux/mman.h, since 5.14


def huge_page_setting(name: str) -> str | None:
    """The chosen word of a setting of transparent huge pages; None where there is none."""
    try:
        text = (_SETTINGS / name).read_text(encoding="ascii")
    except OSError:
        return None
    found = re.search(r"\[(\w+)\]", text)
    return found[1] if found else None


def has_peer_pidfd() -> bool:
    """Can a socket name the process at its other end by a descriptor?"""
    ours, theirs = socket.socketpair(socket.AF_UNIX)
    with ours, theirs:
        try:
            os.close(ours.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD))
        except OSError:
            return False
    return True


def has_populate_write() -> bool:
    """Can memory be had in advance, with an error where there is none?"""
    with mmap.mmap(-1, mmap.PAGESIZE) as memory:
        try:
            memory.madvise(_MADV_POPULATE_WRITE)
        except OSError:
            return False
    return True


def shared_memory_problem() -> str | None:
    """Why there can be no sealed shared memory; None where there can."""
    from kvstore import shared_memory
    from kvstore.errors import TierError

    try:
        os.close(shared_memory.create("kvstore-doctor", mmap.PAGESIZE))
    except TierError as error:
        return str(error)
    return None


def can_collapse() -> bool:
    """Can shared memory be put into huge pages on demand?"""
    from kvstore import shared_memory
    from kvstore.errors import TierError

    length = 2 * shared_memory.HUGE_PAGE_BYTES
    try:
        fd = shared_memory.create("kvstore-doctor", length)
    except TierError:
        return False
    try:
        mapping = shared_memory.SharedMapping(fd, length, is_writable=True)
        try:
            mapping.populate(0, length)
            return mapping.collapse(0, length)
        finally:
            mapping.close()
    except TierError:
        return False
    finally:
        os.close(fd)
