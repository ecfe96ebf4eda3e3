"""Where block bytes cross between host pool memory and tensors, on whatever device these are.

The pool has blocks: one buffer per block, contiguous, axes "layer kv head token dim". A model has a
sequence: keys and values of one layer in one tensor, with the tokens of all blocks side by side.

    block i of the pool    [layers, 2, kv_heads, block_tokens, head_dim]
                                                 └───────────────────┘ one run of contiguous bytes
    prefix on the device   [layers, 2, kv_heads,       tokens, head_dim]
                                      tokens i * block_tokens .. (i + 1) * block_tokens

On the CPU each block is one strided copy. Elsewhere a window of blocks is staged in host memory
(pinned, where the device is CUDA), crosses in one transfer, and is permuted on the device, where
that is cheap. Nothing here keeps a reference to pool memory after it has returned.
"""

from __future__ import annotations

import math
import mmap
from contextlib import suppress
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

#: Host memory that one transfer to or from another device is staged in, at most (or one block).
STAGING_BYTES = 8 << 20


def allocate_prefix(
    shape: tuple[int, int, int, int, int], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Uninitialised memory for a prefix of `shape` = [layers, 2, kv_heads, tokens, head_dim].

    The tensor owns it. On the CPU it asks for huge pages: filling fresh 4 KiB pages costs four
    times what the copy into them does (50 MB: 26 ms against 6 ms).
    """
    if device.type != "cpu":
        return torch.empty(shape, dtype=dtype, device=device)
    private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS  # shared memory seldom gets huge pages
    memory = mmap.mmap(-1, math.prod(shape) * dtype.itemsize, flags=private)
    with suppress(OSError):  # a kernel without huge pages: slower, and just as right
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).view(shape)


def load_blocks(views: Sequence[memoryview], prefix: torch.Tensor) -> None:
    """Copy block i from `views[i]` to its tokens in `prefix`, which the blocks fill exactly.

    `prefix` is contiguous, [layers, 2, kv_heads, len(views) * block_tokens, head_dim]. When this
    returns, the last byte of every view has been read; the caller asks then whether the lease was
    still valid, and reads nothing of `prefix` if it was not.
    """
    if prefix.device.type == "cpu":
        _load_strided(views, prefix)
    else:
        _load_staged(views, prefix)


def store_blocks(
    tensors: Sequence[torch.Tensor], first_token: int, views: Sequence[memoryview | None]
) -> None:
    """Copy tokens of a sequence into the blocks that `views` are, None being a block to skip.

    `tensors` are keys, values, keys, values ... of the layers in turn, each [kv_heads, tokens,
    head_dim]; block i begins at token `first_token` + i * block_tokens. Each view is writable, and
    is complete when this returns.
    """
    if tensors[0].device.type == "cpu":
        _store_strided(tensors, first_token, views)
    else:
        _store_staged(tensors, first_token, views)


def _load_strided(views: Sequence[memoryview], prefix: torch.Tensor) -> None:
    # A head's tokens are one run of bytes on both sides, so two axes are left: which head, and
    # where in its tokens. NumPy, because torch has no tensor over read-only memory.
    layers, _, heads, tokens, _ = prefix.shape
    rows = layers * 2 * heads
    target = _byte_array(prefix).reshape(rows, -1)
    run_bytes = target.shape[1] // tokens * (tokens // len(views))
    for i, view in enumerate(views):
        block = np.frombuffer(view, np.uint8).reshape(rows, run_bytes)
        np.copyto(target[:, i * run_bytes : (i + 1) * run_bytes], block)


def _store_strided(
    tensors: Sequence[torch.Tensor], first_token: int, views: Sequence[memoryview | None]
) -> None:
    heads, tokens, _ = tensors[0].shape
    sources = [_byte_array(tensor.contiguous()).reshape(heads, -1) for tensor in tensors]
    token_bytes = sources[0].shape[1] // tokens
    for i, view in enumerate(views):
        if view is None:
            continue
        block = np.frombuffer(view, np.uint8).reshape(len(sources), heads, -1)
        run_bytes = block.shape[2]
        start = first_token * token_bytes + i * run_bytes
        for target, source in zip(block, sources, strict=True):
            np.copyto(target, source[:, start : start + run_bytes])


def _load_staged(views: Sequence[memoryview], prefix: torch.Tensor) -> None:
    layers, _, heads, tokens, dim = prefix.shape
    block_tokens = tokens // len(views)
    staging = _allocate_staging(views[0].nbytes, len(views), prefix.device)
    for first in range(0, len(views), len(staging)):
        window = views[first : first + len(staging)]
        for row, view in zip(staging.numpy(), window, strict=False):
            np.copyto(row, np.frombuffer(view, np.uint8))
        blocks = (
            staging[: len(window)]
            .to(prefix.device, non_blocking=prefix.device.type == "cuda")
            .view(prefix.dtype)
        )
        blocks = blocks.view(len(window), layers, 2, heads, block_tokens, dim)
        start = first * block_tokens
        target = prefix[:, :, :, start : start + len(window) * block_tokens]
        # A view with the tokens of each block apart, so that blocks go in as they are.
        target = target.view(layers, 2, heads, len(window), block_tokens, dim)
        target.copy_(blocks.permute(1, 2, 3, 0, 4, 5))
        _synchronize(prefix.device)  # the next window is staged in the same memory


def _store_staged(
    tensors: Sequence[torch.Tensor], first_token: int, views: Sequence[memoryview | None]
) -> None:
    wanted = [(i, view) for i, view in enumerate(views) if view is not None]
    if not wanted:
        return
    device, dtype = tensors[0].device, tensors[0].dtype
    heads, _, dim = tensors[0].shape
    block_bytes = wanted[0][1].nbytes
    block_tokens = block_bytes // (len(tensors) * heads * dim * dtype.itemsize)
    staging = _allocate_staging(block_bytes, len(wanted), device)
    for first in range(0, len(wanted), len(staging)):
        window = wanted[first : first + len(staging)]
        offsets = [first_token + i * block_tokens for i, _ in window]
        blocks = torch.stack(
            [tensor[:, at : at + block_tokens] for at in offsets for tensor in tensors]
        )
        staged = staging[: len(window)]
        staged.copy_(
            blocks.view(len(window), -1).view(torch.uint8), non_blocking=device.type == "cuda"
        )
        _synchronize(device)
        for (_, view), row in zip(window, staged.numpy(), strict=True):
            np.copyto(np.frombuffer(view, np.uint8), row)


def _byte_array(tensor: torch.Tensor) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    """The tensor's own memory, the last axis in bytes: NumPy has no bfloat16 and no float8."""
    array: np.ndarray[tuple[int, ...], np.dtype[np.uint8]]
    array = tensor.detach().view(torch.uint8).numpy()
    return array


def _allocate_staging(block_bytes: int, blocks: int, device: torch.device) -> torch.Tensor:
    rows = max(1, min(blocks, STAGING_BYTES // block_bytes))
    pinned = device.type == "cuda"
    return torch.empty((rows, block_bytes), dtype=torch.uint8, pin_memory=pinned)


def _synchronize(device: torch.device) -> None:
    """Wait until all transfers that this thread has queued on the device are done."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
