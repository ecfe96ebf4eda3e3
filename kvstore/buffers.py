"""Callers' memory: seen as bytes, and made at the right alignment.

A copy between a page-aligned slot and a buffer that starts 16 bytes into a page, where large NumPy
arrays usually start, runs at half the speed or less for 64 to 512 KiB: a store then looks to the
processor as if it hit the load that follows. Buffers from here start at a page.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, cast

import numpy as np

from kvstore.errors import InvalidBuffer
from kvstore.types import SLOT_ALIGNMENT_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterable

    import torch
    from numpy.typing import NDArray

    Bytes = NDArray[np.uint8]


_BYTE = np.dtype(np.uint8)


def batch_as_bytes(
    buffers: Iterable[object], lengths_bytes: Iterable[int], *, is_writable: bool, name: str
) -> list[Bytes]:
    """`as_bytes` of each buffer, which must have the length that goes with it.

    As many as there are of both. Raises InvalidBuffer, with `name` and position of the wrong one.
    """
    found: list[Bytes] = []
    for buffer, length_bytes in zip(buffers, lengths_bytes, strict=False):
        # A short way for flat arrays of bytes; `carray` is contiguous, aligned and writable.
        if (
            type(buffer) is np.ndarray
            and buffer.dtype is _BYTE
            and buffer.ndim == 1
            and (buffer.flags.carray)
        ):
            memory: Bytes = buffer
        else:
            try:
                memory = as_bytes(buffer, is_writable=is_writable)
            except InvalidBuffer as error:
                raise InvalidBuffer(f"{name}[{len(found)}]: {error}") from error
        if len(memory) != length_bytes:
            raise InvalidBuffer(
                f"{name}[{len(found)}] has {len(memory)} bytes, its block {length_bytes}"
            )
        found.append(memory)
    return found


def as_bytes(buffer: object, *, is_writable: bool) -> Bytes:
    """The memory of `buffer` as a flat array of bytes, without a copy.

    Takes anything with the buffer protocol (bytes, bytearray, memoryview, NumPy arrays of any
    type and shape) and torch tensors on the CPU. The memory stays the caller's. Raises
    InvalidBuffer for what is not C-contiguous, not in host memory, or read-only where it is to be
    written.
    """
    # Whoever has a tensor has imported torch; this package does not.
    tensor_type = getattr(sys.modules.get("torch"), "Tensor", None)
    if tensor_type is not None and isinstance(buffer, tensor_type):
        return _tensor_bytes(buffer)
    try:
        view = memoryview(cast("bytes", buffer))
    except (TypeError, ValueError) as error:  # ValueError: a memoryview that was released
        raise InvalidBuffer(
            f"{type(buffer).__name__} is no buffer ({error}): give bytes, a memoryview, a NumPy "
            "array or a torch tensor on the CPU"
        ) from error
    if "O" in view.format:
        raise InvalidBuffer("an array of Python objects has addresses in it, and no contents")
    if not view.c_contiguous:
        raise InvalidBuffer(f"a buffer of shape {view.shape} is not C-contiguous")
    if is_writable and view.readonly:
        raise InvalidBuffer(f"a buffer of {view.nbytes} bytes is read-only")
    return np.frombuffer(view, np.uint8) if view.nbytes else np.empty(0, np.uint8)


def _tensor_bytes(tensor: torch.Tensor) -> Bytes:
    if tensor.device.type != "cpu":
        raise InvalidBuffer(f"a tensor on {tensor.device} is not in host memory")
    if not tensor.is_contiguous():
        raise InvalidBuffer(f"a tensor of shape {tuple(tensor.shape)} is not contiguous")
    if tensor.is_conj() or tensor.is_neg():
        raise InvalidBuffer("a conjugate or negated view has other bytes than values: resolve it")
    flat = tensor.detach().reshape(-1)
    as_array: Bytes = flat.view(sys.modules["torch"].uint8).numpy()
    return as_array


def aligned_buffers(count: int, length_bytes: int) -> list[Bytes]:
    """`count` writable buffers of `length_bytes` each, every one starting at a page.

    They share one allocation, which lives as long as any of them. Contents are undefined.
    """
    stride = -(-length_bytes // SLOT_ALIGNMENT_BYTES) * SLOT_ALIGNMENT_BYTES
    memory = np.empty(count * stride + SLOT_ALIGNMENT_BYTES, np.uint8)
    skip = -memory.ctypes.data % SLOT_ALIGNMENT_BYTES
    starts = range(skip, skip + count * stride, stride) if stride else [skip] * count
    return [memory[start : start + length_bytes] for start in starts]
