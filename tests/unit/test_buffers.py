"""Callers' memory as bytes: what is accepted, what is refused, and alignment."""

from __future__ import annotations

import array
from typing import Any

import numpy as np
import pytest

from kvstore.buffers import aligned_buffers, as_bytes
from kvstore.errors import InvalidBuffer

torch = pytest.importorskip("torch")

ACCEPTED = {
    "bytes": lambda: bytes(range(24)),
    "bytearray": lambda: bytearray(range(24)),
    "memoryview": lambda: memoryview(bytes(24)),
    "part of a memoryview": lambda: memoryview(bytes(48))[8:32],
    "array.array": lambda: array.array("d", [1, 2, 3]),
    "numpy float16": lambda: np.zeros(12, np.float16),
    "numpy 3-d": lambda: np.zeros((2, 3, 4), np.int8),
    "numpy scalar": lambda: np.zeros((), "S24"),
    "numpy record": lambda: np.zeros(4, [("a", "u2"), ("b", "f4")]),
    "torch bfloat16": lambda: torch.zeros(12, dtype=torch.bfloat16),
    "torch float8": lambda: torch.zeros(24, dtype=torch.float8_e4m3fn),
    "torch 3-d": lambda: torch.zeros(2, 3, 2, dtype=torch.float16),
    "torch scalar": lambda: torch.zeros((), dtype=torch.complex128),
    "torch with gradient": lambda: torch.zeros(6, requires_grad=True),
    "part of a tensor": lambda: torch.zeros(4, 6)[1:2],
}


@pytest.mark.parametrize("kind", ACCEPTED)
def test_contiguous_memory_of_any_type_is_seen_as_its_bytes(kind):
    given = ACCEPTED[kind]()
    found = as_bytes(given, is_writable=False)
    assert found.dtype == np.uint8
    assert found.ndim == 1
    assert len(found) in (16, 24)


def test_it_is_the_same_memory():
    given: Any
    for given in (bytearray(8), np.zeros(2, np.float32), torch.zeros(2)):
        as_bytes(given, is_writable=True)[:] = 255
        seen = given.view(torch.uint8).numpy() if hasattr(given, "numpy") else given
        assert bytes(seen) == b"\xff" * 8


def test_empty_memory_is_no_bytes():
    for given in (b"", np.empty((0, 3)), torch.empty(0)):
        assert len(as_bytes(given, is_writable=False)) == 0


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (None, "NoneType is no buffer"),
        ("text", "str is no buffer"),
        ([1, 2], "list is no buffer"),
        (np.zeros((4, 4))[:, 0], "not C-contiguous"),
        (np.zeros((2, 3)).T, "not C-contiguous"),
        (memoryview(bytes(8))[::2], "not C-contiguous"),
        (torch.zeros(4, 4).T, "not contiguous"),
        (torch.zeros(4)[::2], "not contiguous"),
        (torch.zeros(4, device="meta"), "not in host memory"),
    ],
)
def test_other_memory_is_refused_with_the_reason(given, message):
    with pytest.raises(InvalidBuffer, match=message):
        as_bytes(given, is_writable=False)


def test_read_only_memory_is_refused_as_a_target_only():
    for given in (bytes(4), memoryview(bytes(4)), np.frombuffer(bytes(4), np.uint8)):
        assert len(as_bytes(given, is_writable=False)) == 4
        with pytest.raises(InvalidBuffer, match="4 bytes is read-only"):
            as_bytes(given, is_writable=True)


def a_released_view():
    view = memoryview(bytes(4))
    view.release()
    return view


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(a_released_view, id="released view"),
        pytest.param(lambda: np.array(["2020-01-01"], "M8[D]"), id="dates"),
        pytest.param(lambda: np.array([object()]), id="pointers of Python objects"),
        pytest.param(lambda: torch.ones(2, dtype=torch.complex64).conj(), id="conjugate"),
    ],
)
def test_memory_that_is_not_what_it_looks_like_is_refused(make):
    with pytest.raises(InvalidBuffer):
        as_bytes(make(), is_writable=False)


@pytest.mark.parametrize("length_bytes", [1, 4095, 4096, 4097, 100_000])
def test_aligned_buffers_are_page_aligned_and_do_not_overlap(length_bytes):
    buffers = aligned_buffers(5, length_bytes)
    assert [len(buffer) for buffer in buffers] == [length_bytes] * 5
    assert all(buffer.ctypes.data % 4096 == 0 for buffer in buffers)
    for number, buffer in enumerate(buffers):
        buffer[:] = number
    assert all((buffer == number).all() for number, buffer in enumerate(buffers))


def test_no_aligned_buffers_are_none():
    assert aligned_buffers(0, 4096) == []
    assert [len(buffer) for buffer in aligned_buffers(2, 0)] == [0, 0]
