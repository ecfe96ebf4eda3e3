"""The encoding of fields: no two identities may have the same bytes."""

from __future__ import annotations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from kvstore.encoding import encode_fields
from kvstore.errors import InvalidRequest

fields = st.lists(st.none() | st.binary(max_size=6), max_size=5)


@given(fields, fields)
def test_different_fields_never_have_one_encoding(one, other):
    assert (encode_fields(*one) == encode_fields(*other)) == (one == other)


@given(st.binary(min_size=1, max_size=8), st.data())
def test_text_that_shifts_between_fields_changes_the_encoding(text, data):
    """ID08: a|bc and ab|c."""
    cut, other = (data.draw(st.integers(0, len(text))) for _ in range(2))
    assume(cut != other)
    assert encode_fields(text[:cut], text[cut:]) != encode_fields(text[:other], text[other:])


def test_absent_is_not_empty():
    assert encode_fields(None) == b"\xff\xff\xff\xff"
    assert encode_fields(b"") == b"\x00\x00\x00\x00"
    assert encode_fields(b"ab", None) == b"\x02\x00\x00\x00ab\xff\xff\xff\xff"


def test_field_that_would_read_as_absent_is_refused():
    class Vast(bytes):
        def __len__(self):
            return 0xFFFF_FFFF

    with pytest.raises(InvalidRequest, match="4294967294 fit"):
        encode_fields(Vast())
