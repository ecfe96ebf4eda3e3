"""A chain of keys is what the namespace says of all its tokens, however they came."""

from __future__ import annotations

import hashlib
from itertools import chain as joined

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvstore.keys
from kvstore import Layout, Namespace
from kvstore.errors import InvalidTokens
from kvstore.key_chain import KeyChain

LAYOUT = Layout.mqa(layers=1, head_dim=8, dtype="float16")


def a_namespace(block_tokens: int) -> Namespace:
    return Namespace(model="m", fingerprint="f", layout=LAYOUT, block_tokens=block_tokens)


token_ids = st.integers(min_value=0, max_value=2**32 - 1)
pieces = st.lists(st.lists(token_ids, max_size=9), max_size=9)


@given(block_tokens=st.integers(1, 7), pieces=pieces)
def test_keys_are_those_of_the_whole_sequence(block_tokens, pieces):
    namespace = a_namespace(block_tokens)
    chain = KeyChain(namespace)
    tokens: list[int] = []
    for piece in pieces:
        chain.append(piece)
        tokens += piece
        assert chain.keys == namespace.keys(tokens)
        assert chain.token_count == len(tokens)


@given(block_tokens=st.integers(1, 5), before=pieces, one=pieces, other=pieces)
def test_a_fork_goes_its_own_way(block_tokens, before, one, other):
    namespace = a_namespace(block_tokens)
    chain = KeyChain(namespace)
    for piece in before:
        chain.append(piece)
    fork = chain.fork()
    for piece in one:
        chain.append(piece)
    for piece in other:
        fork.append(piece)
    assert chain.keys == namespace.keys([*joined(*before), *joined(*one)])
    assert fork.keys == namespace.keys([*joined(*before), *joined(*other)])


def test_no_block_is_hashed_twice(monkeypatch):
    hashed: list[bytes] = []

    class CountingHashlib:
        @staticmethod
        def sha256(message):
            hashed.append(message)
            return hashlib.sha256(message)

    namespace = a_namespace(4)
    expected = namespace.keys(range(4_000))
    monkeypatch.setattr(kvstore.keys, "hashlib", CountingHashlib)
    chain = KeyChain(namespace)
    for token in range(4_000):
        chain.append([token])
    assert len(hashed) == 1_000
    assert chain.keys == expected


def test_any_container_of_ids():
    namespace = a_namespace(2)
    chain = KeyChain(namespace)
    chain.append(np.array([1, 2, 3], np.int64))
    chain.append((4,))
    chain.append(range(5, 7))
    assert chain.keys == namespace.keys(range(1, 7))


def test_what_is_no_token_is_refused_and_nothing_added():
    chain = KeyChain(a_namespace(2))
    chain.append([1, 2, 3])
    with pytest.raises(InvalidTokens, match=r"token_ids\[1\] = -1"):
        chain.append([4, -1])
    assert chain.token_count == 3
    assert len(chain.keys) == 1
