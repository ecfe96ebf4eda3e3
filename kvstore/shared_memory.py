"""Memory that processes share by a descriptor: a sealed memfd, and mappings of it.

Mappings begin at a huge page, so that the kernel can use huge pages. A forked child finds zeros of
its own there: it could otherwise write to what its parent was granted, and without any mapping a
view in the child would crash it.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import weakref
from contextlib import suppress
from typing import TYPE_CHECKING

import numpy as np

from kvstore.errors import TierError

if TYPE_CHECKING:
    from kvstore.buffers import Bytes

HUGE_PAGE_BYTES = 2 * 1024 * 1024
# linux/mman.h; Python 3.11's mmap has no names for them.
_MADV_DONTFORK = 10
_F_SEAL_FUTURE_WRITE = 0x10  # linux/fcntl.h, since 5.1; Python 3.13 has a name for it
_MADV_POPULATE_WRITE = 23  # since 5.14
_MADV_COLLAPSE = 25  # since 6.1
_MAP_FIXED = 0x10
_MAP_NORESERVE = 0x4000
_PROT_NONE = 0
_EINVAL = 22
_FAILED = ctypes.c_void_p(-1).value
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def create(name: str, length_bytes: int, *, is_sealed: bool = True) -> int:
    """A descriptor of new shared memory whose length nobody can change. The caller closes it.

    Without `is_sealed`, `forbid_writers` may follow.
    """
    try:
        fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except OSError as error:
        raise TierError(f"no shared memory: {error.strerror}") from error
    try:
        os.ftruncate(fd, length_bytes)
        seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
        seals |= fcntl.F_SEAL_SEAL if is_sealed else 0
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    except OSError as error:
        os.close(fd)
        raise TierError(f"no shared memory of {length_bytes} bytes: {error.strerror}") from error
    return fd


def forbid_writers(fd: int) -> None:
    """From now on nobody writes to this memory but through the mappings that there are.

    A descriptor that was opened for reading would be no obstacle: whoever has it can open the
    memory again.
    """
    seals = fcntl.F_SEAL_SEAL
    with suppress(OSError):  # a kernel before 5.1
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _F_SEAL_FUTURE_WRITE)
    try:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    except OSError as error:
        raise TierError(f"shared memory cannot be sealed: {error.strerror}") from error


def read_only(fd: int) -> int:
    """Another descriptor of the same memory, through which it cannot be written."""
    return os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)


def check_sealed(fd: int, length_bytes: int) -> None:
    """Raise TierError unless this is memory of that length, which nobody can take away again."""
    needed = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
        length = os.fstat(fd).st_size
    except OSError as error:
        raise TierError(f"not a descriptor of shared memory: {error.strerror}") from error
    if seals & needed != needed or length != length_bytes:
        raise TierError(f"shared memory of {length} bytes, seals {seals:#x}: not as announced")


class SharedMapping:
    """`length_bytes` of shared memory, mapped into this process.

    `memory` is an array over it, writable where asked for. The descriptor stays the caller's and
    may be closed at once. The memory is given back with the last reference to `memory` or a view of
    it; the addresses are kept, so that a tensor over a view that was released, which nobody can
    see, then reads zeros and does not crash. Raises TierError.
    """

    def __init__(self, fd: int, length_bytes: int, *, is_writable: bool) -> None:
        reserved_bytes = length_bytes + HUGE_PAGE_BYTES
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        reserved = _mmap(None, reserved_bytes, _PROT_NONE, flags, -1)
        self._address = -(-reserved // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if is_writable else 0)
        try:
            _mmap(self._address, length_bytes, protection, mmap.MAP_SHARED | _MAP_FIXED, fd)
        except TierError:
            _libc.munmap(reserved, reserved_bytes)
            raise
        self._length_bytes = length_bytes
        _libc.madvise(self._address, length_bytes, _MADV_DONTFORK)
        raw = (ctypes.c_ubyte * length_bytes).from_address(self._address)
        memory: Bytes = np.frombuffer(memoryview(raw), np.uint8)
        memory.flags.writeable = is_writable
        self._memory: Bytes | None = memory
        _mapped[self._address] = length_bytes
        # Every view refers to this array.
        weakref.finalize(memory, _unmap, self._address, length_bytes, os.getpid()).atexit = False

    @property
    def memory(self) -> Bytes:
        """All of it. Raises TierError once the mapping is closed."""
        if self._memory is None:
            raise TierError("the mapping of shared memory is closed")
        return self._memory

    def populate(self, start_bytes: int, end_bytes: int) -> None:
        """Have the memory of a range now, in huge pages where the kernel gives them.

        Raises TierError where there is not so much memory.
        """
        address, length = self._address + start_bytes, end_bytes - start_bytes
        if _libc.madvise(address, length, _MADV_POPULATE_WRITE):
            number = ctypes.get_errno()
            if number != _EINVAL:
                raise TierError(f"no memory for {length} bytes: {os.strerror(number)}")
            self.memory[start_bytes : end_bytes : mmap.PAGESIZE] = 0  # a kernel before 5.14

    def collapse(self, start_bytes: int, end_bytes: int) -> bool:
        """Put a range of whole huge pages into such; False where the kernel cannot."""
        length = end_bytes - start_bytes
        return not _libc.madvise(self._address + start_bytes, length, _MADV_COLLAPSE)

    def close(self) -> None:
        """Give the memory back, or leave it to whoever still refers to the array."""
        self._memory = None


#: Lengths of the mappings that live, by address.
_mapped: dict[int, int] = {}


def _unmap(address: int, length_bytes: int, pid: int) -> None:
    if os.getpid() == pid and _mapped.pop(address, None) is not None:
        _put_zeros(address, length_bytes)


def _put_zeros(address: int, length_bytes: int) -> None:
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED | _MAP_NORESERVE
    with suppress(TierError):
        _mmap(address, length_bytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1)


def _put_zeros_in_child() -> None:
    for address, length_bytes in _mapped.items():
        _put_zeros(address, length_bytes)
    _mapped.clear()


os.register_at_fork(after_in_child=_put_zeros_in_child)


def _mmap(address: int | None, length: int, protection: int, flags: int, fd: int) -> int:
    found = _libc.mmap(address, length, protection, flags, fd, 0)
    if found is None or found == _FAILED:
        number = ctypes.get_errno()
        raise TierError(f"cannot map {length} bytes: {os.strerror(number)}")
    return int(found)
