"""Block bytes between pool memory and tensors: on the CPU everywhere, on CUDA where there is one.

The staged way, which other devices take, also runs on the CPU here: only the pinning differs.
Every copy is compared with one token by token, which knows nothing of stripes, runs and windows.
"""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from kvstore.cuda import host_copy  # noqa: E402
from kvstore.cuda.block_form import BlockForm, Member  # noqa: E402
from kvstore.cuda.host_copy import Spot  # noqa: E402

BLOCK_TOKENS = 4
DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.int8]

DEVICES = [
    pytest.param(("cpu", False), id="cpu"),
    pytest.param(("cpu", True), id="cpu-staged"),
    pytest.param(("cuda", False), id="cuda", marks=pytest.mark.gpu),
]


@pytest.fixture(params=DEVICES)
def device(request, monkeypatch):
    """A device, and how it is reached."""
    name, is_staged = request.param
    if is_staged:
        monkeypatch.setattr(host_copy, "_load_strided", host_copy._load_staged)
        monkeypatch.setattr(host_copy, "_store_strided", host_copy._store_staged)
    return torch.device(name)


def separate(layers: list[tuple[int, int, int]], dtype) -> BlockForm:
    """Keys and values one after the other: (heads, key dim, value dim) of each layer."""
    members, offset = [], 0
    for heads, *dims in layers:
        for dim in dims:
            token = dim * dtype.itemsize
            members.append(Member(offset, heads, dim, BLOCK_TOKENS * token, token))
            offset += heads * BLOCK_TOKENS * token
    return BlockForm(members, BLOCK_TOKENS, dtype)


def side_by_side(layers: int, dims: tuple[int, int], dtype) -> BlockForm:
    """Latents: what is a key and a value to the cache lies in one row for each token."""
    token = sum(dims) * dtype.itemsize
    members = [
        Member(layer * BLOCK_TOKENS * token + start * dtype.itemsize, 1, dim, 0, token)
        for layer in range(layers)
        for start, dim in ((0, dims[0]), (dims[0], dims[1]))
    ]
    return BlockForm(members, BLOCK_TOKENS, dtype)


FORMS = {
    "alike": lambda dtype: separate([(2, 8, 8)] * 3, dtype),
    "one layer": lambda dtype: separate([(1, 8, 8)], dtype),
    "values of another dim": lambda dtype: separate([(2, 8, 4)] * 3, dtype),
    "layers that differ": lambda dtype: separate(
        [(2, 8, 8), (4, 8, 8), (1, 4, 8), (1, 4, 8)], dtype
    ),
    "latents": lambda dtype: side_by_side(3, (8, 4), dtype),
}
STRIPES = {
    "alike": 1,
    "one layer": 1,
    "values of another dim": 2,
    "layers that differ": 4,
    "latents": 2,
}


@pytest.fixture(params=FORMS)
def form(request):
    return FORMS[request.param](torch.float16)


def random_blocks(form, count):
    return np.random.default_rng(0).integers(0, 256, (count, form.block_bytes), np.uint8)


def views_of(blocks):
    return [memoryview(block.tobytes()) for block in blocks]


def as_bytes(tensor):
    """[row, head, column, bytes of dim]."""
    return tensor.cpu().contiguous().view(torch.uint8).numpy()


def token_bytes(form, block, index, head, token):
    """The bytes that tensor `index` of a block has of one token; by the member's own numbers."""
    member = members_of(form)[index]
    start = member.offset_bytes + head * member.head_step_bytes + token * member.token_step_bytes
    return block[start : start + member.dim * form.dtype.itemsize]


def members_of(form):
    found = {}
    for stripe in form.stripes:
        for position, index in enumerate(stripe.indices):
            offset = stripe.first.offset_bytes + position * stripe.step_bytes
            found[index] = stripe.first._replace(offset_bytes=offset)
    return [found[index] for index in range(form.tensor_count)]


def check_loaded(form, blocks, spots, prefix, columns):
    """Every spot has its block's bytes, and every other column is zero."""
    for index, tensor in enumerate(prefix.tensors()):
        found = as_bytes(tensor)
        expected = np.zeros_like(found)
        for block, places in zip(blocks, spots, strict=True):
            for row, column, first, count in places:
                for head in range(found.shape[1]):
                    for i in range(count):
                        content = token_bytes(form, block, index, head, first + i)
                        expected[row, head, column + i] = content
        assert found.shape[2] == columns
        np.testing.assert_array_equal(found, expected)


def whole(row, column):
    return Spot(row, column, 0, BLOCK_TOKENS)


#: Name -> rows, columns, and where each block goes.
PLACES = {
    "one block": (1, 4, [[whole(0, 0)]]),
    "one row": (1, 20, [[whole(0, 4 * i)] for i in range(5)]),
    "rows that share, at paddings of their own": (
        3,
        14,
        [
            [whole(0, 0), whole(1, 3), whole(2, 6)],
            [whole(0, 4), whole(1, 7), whole(2, 10)],
            [whole(0, 8), Spot(1, 11, 0, 3)],
            [Spot(0, 12, 0, 2)],
        ],
    ),
    "ends of windows": (2, 7, [[Spot(0, 0, 2, 2)], [whole(0, 2), Spot(1, 3, 3, 1)], [whole(1, 0)]]),
    "a row between": (2, 8, [[whole(0, 0)], [whole(1, 0)], [whole(0, 4)], [whole(1, 4)]]),
    "nothing": (1, 4, []),
}


@pytest.mark.parametrize("name", FORMS)
def test_tensors_that_are_alike_are_one_stripe(name):
    form = FORMS[name](torch.float16)
    assert len(form.stripes) == STRIPES[name]
    tensors = form.allocate(2, 5, torch.device("cpu")).tensors()
    assert [t.shape[0] for t in tensors] == [2] * form.tensor_count
    assert form.block_bytes == sum(t[0, :, :1].numel() * 2 * BLOCK_TOKENS for t in tensors)


@pytest.mark.parametrize("places", PLACES)
def test_load_puts_tokens_where_they_are_wanted(device, form, places):
    rows, columns, spots = PLACES[places]
    blocks = random_blocks(form, len(spots))
    prefix = form.allocate(rows, columns, device)
    host_copy.load_blocks(views_of(blocks), spots, prefix)
    assert {tensor.device.type for tensor in prefix.tensors()} == {device.type}
    check_loaded(form, blocks, spots, prefix, columns)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_any_dtype(device, dtype):
    form = separate([(2, 8, 4)] * 2, dtype)
    blocks = random_blocks(form, 5)
    spots = [[whole(0, 4 * i)] for i in range(5)]
    prefix = form.allocate(1, 20, device)
    host_copy.load_blocks(views_of(blocks), spots, prefix)
    assert {tensor.dtype for tensor in prefix.tensors()} == {dtype}
    check_loaded(form, blocks, spots, prefix, 20)
    check_stored(form, blocks, prefix, device)


def test_store_is_the_inverse_of_load(device, form):
    blocks = random_blocks(form, 5)
    prefix = form.allocate(2, 23, device)
    spots = [[whole(0, 4 * i)] for i in range(3)] + [[whole(1, 3 + 4 * i)] for i in range(2)]
    host_copy.load_blocks(views_of(blocks), spots, prefix)
    columns = [(spot.row, spot.column) for [spot] in spots]
    targets = store(form, prefix.tensors(), columns, skipped=(1,))
    for i, (target, block) in enumerate(zip(targets, blocks, strict=True)):
        assert bytes(target) == (bytes(len(target)) if i == 1 else block.tobytes())


def check_stored(form, blocks, prefix, device):
    targets = store(form, prefix.tensors(), [(0, 4 * i) for i in range(5)])
    assert [bytes(target) for target in targets] == [block.tobytes() for block in blocks]


def store(form, tensors, columns, skipped=()):
    targets = [bytearray(form.block_bytes) for _ in columns]
    views = [None if i in skipped else memoryview(target) for i, target in enumerate(targets)]
    host_copy.store_blocks(form, tensors, columns, views)
    return targets


def test_store_from_tensors_in_any_memory_order(device, form):
    """A projection's output is seen through a transposed view, and stored from there."""
    blocks = random_blocks(form, 2)
    prefix = form.allocate(1, 8, device)
    host_copy.load_blocks(views_of(blocks), [[whole(0, 0)], [whole(0, 4)]], prefix)
    tensors = []
    for number, tensor in enumerate(prefix.tensors()):
        raw = tensor.view(torch.uint8)
        order = (
            raw.transpose(1, 2).contiguous().transpose(1, 2)
        )  # [row, token, head, dim] in memory
        if number == 0:
            order = raw.transpose(2, 3).contiguous().transpose(2, 3)  # not even dim is contiguous
            tensors.append(tensor.transpose(2, 3).contiguous().transpose(2, 3))
            assert tensors[0].stride(-1) != 1 or tensors[0].shape[2] == 1
            continue
        tensors.append(order.view(form.dtype))
    targets = store(form, tensors, [(0, 0), (0, 4)])
    assert [bytes(target) for target in targets] == [block.tobytes() for block in blocks]


def test_a_window_smaller_than_the_batch(device, form, monkeypatch):
    monkeypatch.setattr(host_copy, "STAGING_BYTES", 2 * form.block_bytes)
    for places in PLACES:
        test_load_puts_tokens_where_they_are_wanted(device, form, places)
    test_store_is_the_inverse_of_load(device, form)


def test_nothing_is_stored_where_no_block_is_wanted(device, form):
    tensors = form.allocate(1, 8, device).tensors()
    host_copy.store_blocks(form, tensors, [(0, 0), (0, 4)], [None, None])


def test_pool_memory_is_free_again_after_a_copy(device, form):
    block = bytearray(random_blocks(form, 1).tobytes())
    prefix = form.allocate(1, 4, device)
    view = memoryview(block).toreadonly()
    host_copy.load_blocks([view], [[whole(0, 0)]], prefix)
    host_copy.store_blocks(form, prefix.tensors(), [(0, 0)], [memoryview(block)])
    view.release()  # raises BufferError while something made from it is alive
    block.append(0)  # likewise


def test_pool_memory_is_free_again_where_a_copy_was_interrupted(form, monkeypatch):
    """The frames that a traceback keeps alive hold nothing of it."""

    def interrupt(target, source):
        del target, source
        raise KeyboardInterrupt

    view = memoryview(bytearray(form.block_bytes)).toreadonly()
    prefix = form.allocate(1, 4, torch.device("cpu"))
    monkeypatch.setattr(np, "copyto", interrupt)
    with pytest.raises(KeyboardInterrupt) as caught:
        host_copy.load_blocks([view], [[whole(0, 0)]], prefix)
    view.release()
    assert caught.traceback
