"""Block bytes between pool memory and tensors: on the CPU everywhere, on CUDA where there is one.

The staged way, which other devices take, also runs on the CPU here: only the pinning differs.
"""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from kvstore.cuda import host_copy  # noqa: E402

LAYERS, HEADS, BLOCK_TOKENS, DIM = 3, 2, 4, 8
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


def random_blocks(count, dtype):
    """Blocks of random bytes; each with its bytes as [layers, 2, heads, tokens, dim * itemsize]."""
    shape = (count, LAYERS, 2, HEADS, BLOCK_TOKENS, DIM * dtype.itemsize)
    return np.random.default_rng(0).integers(0, 256, shape, np.uint8)


def as_bytes(tensor):
    return tensor.cpu().contiguous().view(torch.uint8).numpy()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("count", [1, 5])
def test_load_puts_each_block_at_its_tokens(device, dtype, count):
    blocks = random_blocks(count, dtype)
    views = [memoryview(block.tobytes()) for block in blocks]
    shape = (LAYERS, 2, HEADS, count * BLOCK_TOKENS, DIM)
    prefix = host_copy.allocate_prefix(shape, dtype, device)
    host_copy.load_blocks(views, prefix)
    assert prefix.device.type == device.type
    assert prefix.dtype is dtype
    # blocks side by side along the tokens: axis 0 of blocks becomes the outer half of axis 3
    expected = np.moveaxis(blocks, 0, 3).reshape(*shape[:4], -1)
    np.testing.assert_array_equal(as_bytes(prefix), expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("first_block", [0, 2])
def test_store_is_the_inverse_of_load(device, dtype, first_block):
    blocks = random_blocks(5, dtype)
    shape = (LAYERS, 2, HEADS, 5 * BLOCK_TOKENS, DIM)
    prefix = host_copy.allocate_prefix(shape, dtype, device)
    host_copy.load_blocks([memoryview(block.tobytes()) for block in blocks], prefix)
    # Of a cache with one token more than its full blocks, as it usually is.
    raw = prefix.view(torch.uint8)
    longer = torch.cat([raw, raw[..., :1, :]], dim=3)
    tensors = [tensor.view(dtype) for tensor in longer.flatten(0, 1)]

    wanted = blocks[first_block:]
    targets = [bytearray(wanted[0].nbytes) for _ in wanted]
    views = [None if i == 1 else memoryview(target) for i, target in enumerate(targets)]
    host_copy.store_blocks(tensors, first_block * BLOCK_TOKENS, views)
    for i, (target, block) in enumerate(zip(targets, wanted, strict=True)):
        assert bytes(target) == (bytes(len(target)) if i == 1 else block.tobytes())


def test_a_window_smaller_than_the_batch(device, monkeypatch):
    monkeypatch.setattr(host_copy, "STAGING_BYTES", 2 * random_blocks(1, torch.float32).nbytes)
    test_load_puts_each_block_at_its_tokens(device, torch.float32, 5)
    test_store_is_the_inverse_of_load(device, torch.float32, 2)


def test_nothing_is_stored_where_no_block_is_wanted(device):
    tensors = [torch.zeros(HEADS, 8, DIM, device=device) for _ in range(2 * LAYERS)]
    host_copy.store_blocks(tensors, 0, [None, None])


def test_pool_memory_is_free_again_after_a_copy(device):
    block = bytearray(random_blocks(1, torch.float32).tobytes())
    prefix = host_copy.allocate_prefix((LAYERS, 2, HEADS, BLOCK_TOKENS, DIM), torch.float32, device)
    view = memoryview(block).toreadonly()
    host_copy.load_blocks([view], prefix)
    host_copy.store_blocks(list(prefix.flatten(0, 1)), 0, [memoryview(block)])
    view.release()  # raises BufferError while something made from it is alive
    block.append(0)  # likewise
