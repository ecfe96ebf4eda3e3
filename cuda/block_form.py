"""Which tensors a block is made of, and the memory for those of a whole prefix.

    one part of a block    key 0 | value 0 | key 1 | value 1 | ...      each [heads, tokens, dim]
    stripes                └─ members 0, 1, 2, 3: one shape, at equal distances ─┘
    or, by dim             └ 0, 2, ... ┘ the keys, and └ 1, 3, ... ┘ the values

Members of a stripe are copied in one go, so a model whose keys and values are all alike is one
stripe, and one with values of another dim, or with latents, is two.
"""

from __future__ import annotations

import math
import mmap
from contextlib import suppress
from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence


class Member(NamedTuple):
    """One tensor in a part of a block, [heads, tokens, dim], with `dim` contiguous."""

    offset_bytes: int
    heads: int
    dim: int
    head_step_bytes: int  # from one head to the next
    token_step_bytes: int


class Stripe(NamedTuple):
    """Tensors that differ in their offsets alone, which are at equal distances."""

    indices: range  # which of the part's tensors
    first: Member
    step_bytes: int  # from one to the next


class BlockForm:
    """One part of a full block: `members` are the keys and values of its layers in turn.

    Layers that are alike and neighbours lie at equal distances. All are of one dtype.
    """

    def __init__(self, members: Sequence[Member], block_tokens: int, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.block_tokens = block_tokens
        self.tensor_count = len(members)
        self.stripes = _stripes(members)
        self.token_bytes = sum(member.heads * member.dim for member in members) * dtype.itemsize

    @property
    def block_bytes(self) -> int:
        """Bytes of the part."""
        return self.token_bytes * self.block_tokens

    def allocate(self, rows: int, columns: int, device: torch.device) -> Prefix:
        """Memory for the keys and values of `columns` tokens in each of `rows` sequences; zero.

        The prefix owns it. On the CPU it asks for huge pages: filling fresh 4 KiB pages costs four
        times what the copy into them does (50 MB: 26 ms against 6 ms).
        """
        shapes = [
            (len(stripe.indices), rows, stripe.first.heads, columns, stripe.first.dim)
            for stripe in self.stripes
        ]
        sizes = [math.prod(shape) for shape in shapes]
        flat = _zeros(sum(sizes), self.dtype, device)
        tensors = [
            part.view(shape) for part, shape in zip(torch.split(flat, sizes), shapes, strict=True)
        ]
        return Prefix(self, tensors)


class Prefix:
    """Keys and values of some columns of a batch, by stripe: [member, row, head, column, dim].

    A row is a sequence of the batch. A column is a place in all rows, whatever token is there.
    """

    def __init__(self, form: BlockForm, stripes: list[torch.Tensor]) -> None:
        self.form = form
        self.stripes = stripes

    def tensors(self) -> list[torch.Tensor]:
        """The part's tensors in its order, each [row, head, column, dim]; views, not copies."""
        found: dict[int, torch.Tensor] = {}
        for stripe, tensor in zip(self.form.stripes, self.stripes, strict=True):
            found |= zip(stripe.indices, tensor, strict=True)
        return [found[index] for index in range(self.form.tensor_count)]


def _stripes(members: Sequence[Member]) -> list[Stripe]:
    """As few stripes as there can be: of all tensors of neighbouring layers, or of every second."""
    found: list[Stripe] = []
    first = 0
    shapes = [member[1:] for member in members]
    for (key, value), alike in groupby(zip(shapes[::2], shapes[1::2], strict=True)):
        end = first + 2 * len(list(alike))
        distances = {
            members[i + 1].offset_bytes - members[i].offset_bytes for i in range(first, end - 1)
        }
        stride = 1 if key == value and len(distances) == 1 else 2
        found += (_stripe(members, range(first + side, end, stride)) for side in range(stride))
        first = end
    return found


def _stripe(members: Sequence[Member], indices: range) -> Stripe:
    offsets = [members[index].offset_bytes for index in indices]
    step_bytes = offsets[1] - offsets[0] if len(offsets) > 1 else 0
    return Stripe(indices, members[indices[0]], step_bytes)


def _zeros(elements: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    if device.type != "cpu" or elements == 0:
        return torch.zeros(elements, dtype=dtype, device=device)
    private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS  # shared memory seldom gets huge pages
    memory = mmap.mmap(-1, elements * dtype.itemsize, flags=private)
    with suppress(OSError):  # a kernel without huge pages: slower, and just as right
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype)
