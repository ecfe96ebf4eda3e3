"""Token ids: the container leaves no trace, and what is not an id is refused by its position."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.errors import InvalidTokens
from kvstore.keys import Media, Namespace
from kvstore.layout import Layout

LAYOUT = Layout.mqa(layers=1, head_dim=1, dtype="int8")
NAMESPACE = Namespace(model="m", fingerprint="f", layout=LAYOUT, block_tokens=4)


def keys(token_ids, **options):
    return NAMESPACE.keys(token_ids, partial=True, **options)


class ReadOnlyList(Sequence[int]):
    """As engines wrap the tokens of a request."""

    def __init__(self, ids):
        self._ids = ids

    def __getitem__(self, index):
        return self._ids[index]

    def __len__(self):
        return len(self._ids)


DTYPES = ["i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8"]
CONTAINERS: dict[str, Callable[[list[int]], Any]] = {
    "tuple": tuple,
    "range": lambda ids: range(ids[0], ids[-1] + 1),
    "deque": deque,
    "read-only list": ReadOnlyList,
    "list of NumPy scalars": lambda ids: list(np.array(ids)),
    "list of mixed integers": lambda ids: [np.uint64(ids[0]), *ids[1:]],
    "array of objects": lambda ids: np.array(ids, dtype=object),
    "memoryview": lambda ids: memoryview(array("q", ids)),
    "strided array": lambda ids: np.array([ids, ids]).T[:, 0],
    "reversed array": lambda ids: np.array(ids[::-1])[::-1],
    "read-only array": lambda ids: np.frombuffer(np.array(ids).tobytes(), dtype=np.int64),
    **{f"array.{code}": partial(array, code) for code in "bBhHiIlLqQ"},
    **{
        f"NumPy {order}{dtype}": partial(np.array, dtype=order + dtype)
        for order in "<>"
        for dtype in DTYPES
    },
}


@pytest.mark.parametrize("name", CONTAINERS)
def test_container_leaves_no_trace(name):
    ids = list(range(100, 110))
    assert keys(CONTAINERS[name](ids)) == keys(ids)


@given(st.lists(st.integers(0, 2**32 - 1), max_size=12))
def test_wide_ids_have_the_same_keys_in_every_container(ids):
    expected = keys(ids)
    for dtype in (np.uint32, np.int64, np.uint64, object):
        assert keys(np.array(ids, dtype=dtype)) == expected
    assert keys(tuple(ids)) == keys(array("Q", ids)) == expected


@pytest.mark.parametrize("dtype", ["uint8", "int16", "int32", "int64"])
def test_tensor_leaves_no_trace(dtype):
    torch = pytest.importorskip("torch")
    tensor = torch.arange(10, dtype=getattr(torch, dtype))
    assert keys(tensor) == keys(range(10))
    assert keys(torch.stack([tensor, tensor], dim=1)[:, 0]) == keys(range(10))


def test_tensor_that_is_no_sequence_of_ids_is_refused():
    torch = pytest.importorskip("torch")
    for tensor, said in [
        (torch.ones(4), r"token_ids\[0\] = 1.0"),
        (torch.ones(4, requires_grad=True), "cannot be read"),
        (torch.ones(4, dtype=torch.bfloat16), "cannot be read"),
        (torch.ones(4, dtype=torch.bool), r"token_ids\[0\] = True"),
        (torch.ones(4, dtype=torch.int32, device="meta"), "cannot be read"),
        (torch.ones(1, 4, dtype=torch.int64), r"shape \(1, 4\)"),
        (torch.tensor([0, -1]), r"token_ids\[1\] = -1"),
        (torch.tensor([0, 2**32 + 5]), r"token_ids\[1\] = 4294967301"),
    ]:
        with pytest.raises(InvalidTokens, match=said):
            keys(tensor)


@pytest.mark.parametrize("empty", [[], (), range(0), array("i"), np.array([]), np.array([], "u4")])
def test_no_tokens_have_no_keys(empty):
    assert keys(empty) == []


@pytest.mark.parametrize(
    ("ids", "said"),
    [
        ([1, 2, -1], r"\[2\] = -1: expected an integer from 0 to 4294967295"),
        ([2**32], r"\[0\] = 4294967296"),
        ([1, 2**64 + 1], r"\[1\] = 18446744073709551617"),
        ([10**6000], r"\[0\] = an integer of 19932 bits"),
        ([1, True], r"\[1\] = True"),
        ([1, np.True_], r"\[1\] = "),
        ([1.0], r"\[0\] = 1.0"),
        ([1, np.float32(2)], r"\[1\] = "),
        ([1, None], r"\[1\] = None"),
        (["1"], r"\[0\] = '1'"),
        ([[1, 2]], r"\[0\] = \[1, 2\]"),
        ([1, float("nan")], r"\[1\] = nan"),
        ([np.int64(-1)], r"\[0\] = "),
        (range(3, -2, -1), r"\[4\] = -1"),
        (array("i", [5, -5]), r"\[1\] = -5"),
        (array("d", [5]), r"\[0\] = 5.0"),
        (np.array([0, -1], "i8"), r"\[1\] = -1"),
        (np.array([0, -1], "i1"), r"\[1\] = -1"),
        (np.array([0, -1], ">i4"), r"\[1\] = -1"),
        (np.array([2**32 + 5], "i8"), r"\[0\] = 4294967301"),
        (np.array([7, 2**64 - 1], "u8"), r"\[1\] = 18446744073709551615"),
        (np.array([1.0, 2.0]), r"\[0\] = 1.0"),
        (np.array([True]), r"\[0\] = True"),
        (np.array([1, None], dtype=object), r"\[1\] = None"),
        (np.array(["1"]), r"\[0\] = '1'"),
        (np.array([[1, 2]]), r"shape \(1, 2\): expected one sequence.*give one row"),
        (np.int32(5), r"shape \(\)"),
        ("12", "='12' of type str"),
        (b"12", "of type bytes"),
        (bytearray(b"12"), "of type bytearray"),
        (None, "of type NoneType"),
        (7, "of type int"),
        ({1, 2}, "of type set"),
        ({1: 2}, "of type dict"),
        (iter([1]), "of type list_iterator"),
    ],
)
def test_what_is_no_id_is_refused_by_its_position(ids, said):
    with pytest.raises(InvalidTokens, match=f"token_ids.*{said}"):
        keys(ids)


@pytest.mark.parametrize(
    ("digest", "start", "end", "said"),
    [
        (b"short", 0, 1, "media digest=b'short': expected 32 bytes"),
        ("0" * 32, 0, 1, "media digest="),
        (bytes(32), -1, 1, "media start=-1"),
        (bytes(32), 2, 2, "media end=2: expected an integer from 3"),
        (bytes(32), 0, 2**32, "media end=4294967296"),
        (bytes(32), False, 1, "media start=False"),
    ],
)
def test_media_that_cannot_be_hashed_are_refused(digest, start, end, said):
    with pytest.raises(InvalidTokens, match=said):
        Media(digest, start, end)


def test_extra_of_another_type_is_refused_by_its_position():
    with pytest.raises(InvalidTokens, match=r"extra\[1\] = .*expected a Media item"):
        keys(range(8), extra=[Media(bytes(32), 0, 1), (bytes(32), 0, 1)])
