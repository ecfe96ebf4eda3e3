"""Where block bytes cross between host pool memory and tensors, on whatever device these are.

The pool has blocks: one buffer for a part of each. A model has a batch of sequences: the keys of
one layer in one tensor, [row, head, column, dim], with the tokens of all blocks side by side, and
the values in another.

    block i of the pool     key 0 [heads, block_tokens, dim], value 0 [...], key 1 ...
                                          └── one run of contiguous bytes for each head
    prefix on the device    row 0   .  .  .  .  0  1  2  3 | 4  5  6      a padding of four columns
                            row 1   0  1  2  3 | 4  5  6  7 | 8  9 10
                                                                   └─ column 10

`Spot`s say where in the prefix a block goes: to each row that has it, at that row's own columns.

On the CPU each block is one strided copy for each stripe. Elsewhere a window of blocks is staged in
host memory (pinned, where the device is CUDA), crosses in one transfer, and is permuted on the
device, where that is cheap. Nothing here keeps a reference to pool memory after it has returned.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvstore.cuda.block_form import BlockForm, Prefix, Stripe

    Bytes = np.ndarray[tuple[int, ...], np.dtype[np.uint8]]

#: Host memory that one transfer to or from another device is staged in, at most (or one block).
STAGING_BYTES = 8 << 20


class Spot(NamedTuple):
    """Tokens of a block, `first_token` and those after it, in `row` from `column` on."""

    row: int
    column: int
    first_token: int
    token_count: int


def load_blocks(
    views: Sequence[memoryview], spots: Sequence[Sequence[Spot]], prefix: Prefix
) -> None:
    """Copy block i from `views[i]`, which is read once, to all of `spots[i]` in `prefix`.

    When this returns, the last byte of every view has been read; the caller asks then whether the
    lease was still valid, and reads nothing of `prefix` if it was not.
    """
    if prefix.stripes[0].device.type == "cpu":
        _load_strided(views, spots, prefix)
    else:
        _load_staged(views, spots, prefix)


def store_blocks(
    form: BlockForm,
    tensors: Sequence[torch.Tensor],
    columns: Sequence[tuple[int, int]],
    views: Sequence[memoryview | None],
) -> None:
    """Copy tokens of a batch into the blocks that `views` are, None being a block to skip.

    `tensors` are the part's in its order, each [row, head, column, dim]; `columns[i]` are the row
    and the first column of block i. Each view is writable, and is complete when this returns.
    """
    wanted = [(at, view) for at, view in zip(columns, views, strict=True) if view is not None]
    if not wanted:
        return
    if tensors[0].device.type == "cpu":
        _store_strided(form, tensors, wanted)
    else:
        _store_staged(form, tensors, wanted)


def _load_strided(
    views: Sequence[memoryview], spots: Sequence[Sequence[Spot]], prefix: Prefix
) -> None:
    # NumPy, because torch has no tensor over read-only memory.
    block = source = None
    try:
        for stripe, tensor in zip(prefix.form.stripes, prefix.stripes, strict=True):
            target = _byte_array(tensor)
            for view, places in zip(views, spots, strict=True):
                block = _members_of(view, stripe, prefix.form)
                for row, column, first_token, token_count in places:
                    source = block[:, :, first_token : first_token + token_count]
                    np.copyto(target[:, row, :, column : column + token_count], source)
    finally:
        # A traceback keeps this frame, and arrays over the views in it would keep their lease.
        del block, source


def _store_strided(
    form: BlockForm,
    tensors: Sequence[torch.Tensor],
    wanted: Sequence[tuple[tuple[int, int], memoryview]],
) -> None:
    size = form.block_tokens
    for stripe in form.stripes:
        sources = [_byte_array(tensors[member]) for member in stripe.indices]
        for (row, column), view in wanted:
            block = _members_of(view, stripe, form)
            for target, source in zip(block, sources, strict=True):
                np.copyto(target, source[row, :, column : column + size])


def _load_staged(
    views: Sequence[memoryview], spots: Sequence[Sequence[Spot]], prefix: Prefix
) -> None:
    device = prefix.stripes[0].device
    staging = _allocate_staging(prefix.form.block_bytes, len(views), device)
    for first in range(0, len(views), len(staging)):
        window = views[first : first + len(staging)]
        for staged, view in zip(staging.numpy(), window, strict=False):
            np.copyto(staged, np.frombuffer(view, np.uint8))
        blocks = staging[: len(window)].to(device, non_blocking=device.type == "cuda")
        runs = _runs(spots[first : first + len(window)], prefix.form.block_tokens)
        for stripe, target in zip(prefix.form.stripes, prefix.stripes, strict=True):
            members = _members_on_device(blocks, stripe, prefix.form)
            for run in runs:
                _scatter(members, run, target)
        _synchronize(device)  # the next window is staged in the same memory


def _scatter(members: torch.Tensor, run: Sequence[tuple[int, Spot]], target: torch.Tensor) -> None:
    """Copy the blocks of a run, [block, member, head, token, dim], side by side into one row."""
    (block, spot), end = run[0], run[-1][0] + 1
    column = spot.column
    if len(run) == 1:
        tokens = slice(spot.first_token, spot.first_token + spot.token_count)
        target[:, spot.row, :, column : column + spot.token_count] = members[block, :, :, tokens]
        return
    blocks = members[block:end].permute(1, 2, 0, 3, 4)
    columns = blocks.shape[2] * blocks.shape[3]
    place = target[:, spot.row, :, column : column + columns]
    # A view with the tokens of each block apart, so that blocks go in as they are.
    place.view(blocks.shape).copy_(blocks)


def _runs(spots: Sequence[Sequence[Spot]], size: int) -> list[list[tuple[int, Spot]]]:
    """Neighbours in the window that are whole, and neighbours in one row, too, go in one copy."""
    runs: list[list[tuple[int, Spot]]] = []
    last_of_row: dict[int, list[tuple[int, Spot]]] = {}
    for block, places in enumerate(spots):
        for spot in places:
            run = last_of_row.get(spot.row)
            if run is not None and _follows(run[-1], (block, spot), size):
                run.append((block, spot))
            else:
                runs.append([(block, spot)])
                last_of_row[spot.row] = runs[-1]
    return runs


def _follows(before: tuple[int, Spot], after: tuple[int, Spot], size: int) -> bool:
    are_whole = before[1].token_count == after[1].token_count == size
    return are_whole and after[0] == before[0] + 1 and after[1].column == before[1].column + size


def _store_staged(
    form: BlockForm,
    tensors: Sequence[torch.Tensor],
    wanted: Sequence[tuple[tuple[int, int], memoryview]],
) -> None:
    device, size = tensors[0].device, form.block_tokens
    staging = _allocate_staging(form.block_bytes, len(wanted), device)
    blocks = torch.empty(staging.shape, dtype=torch.uint8, device=device)
    for first in range(0, len(wanted), len(staging)):
        window = wanted[first : first + len(staging)]
        for stripe in form.stripes:
            pieces = [
                tensors[member][row, :, column : column + size]
                for (row, column), _ in window
                for member in stripe.indices
            ]
            place = _members_on_device(blocks[: len(window)], stripe, form)
            place.copy_(torch.stack(pieces).view(place.shape))
        staged = staging[: len(window)]
        staged.copy_(blocks[: len(window)], non_blocking=device.type == "cuda")
        _synchronize(device)
        for (_, view), row in zip(window, staged.numpy(), strict=True):
            np.copyto(np.frombuffer(view, np.uint8), row)


def _members_of(view: memoryview, stripe: Stripe, form: BlockForm) -> Bytes:
    """A stripe inside a block, as [member, head, token, bytes of dim]; the block's own memory."""
    offset, heads, dim, head_step, token_step = stripe.first
    shape = (len(stripe.indices), heads, form.block_tokens, dim * form.dtype.itemsize)
    strides = (stripe.step_bytes, head_step, token_step, 1)
    return np.ndarray(shape, np.uint8, view, offset, strides)


def _members_on_device(blocks: torch.Tensor, stripe: Stripe, form: BlockForm) -> torch.Tensor:
    """The same of blocks on the device, [block, byte], as [block, member, head, token, dim]."""
    elements, size = blocks.view(form.dtype), form.dtype.itemsize
    offset, heads, dim, head_step, token_step = stripe.first
    shape = (len(blocks), len(stripe.indices), heads, form.block_tokens, dim)
    steps = (stripe.step_bytes, head_step, token_step)
    strides = (elements.stride(0), *(step // size for step in steps), 1)
    return elements.as_strided(shape, strides, elements.storage_offset() + offset // size)


def _byte_array(tensor: torch.Tensor) -> Bytes:
    """The tensor's own memory, the last axis in bytes: NumPy has no bfloat16 and no float8."""
    if tensor.stride(-1) != 1:
        tensor = tensor.contiguous()
    array: Bytes = tensor.detach().view(torch.uint8).numpy()
    return array


def _allocate_staging(block_bytes: int, blocks: int, device: torch.device) -> torch.Tensor:
    rows = max(1, min(blocks, STAGING_BYTES // block_bytes))
    pinned = device.type == "cuda"
    return torch.empty((rows, block_bytes), dtype=torch.uint8, pin_memory=pinned)


def _synchronize(device: torch.device) -> None:
    """Wait until all transfers that this thread has queued on the device are done."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
