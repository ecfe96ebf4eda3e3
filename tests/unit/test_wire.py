"""Frames: pinned to the byte, there and back, and refused where they are none."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore import messages, wire
from kvstore.client.greeting import Welcome
from kvstore.errors import WireError
from kvstore.messages import BlockSpec, Column, LeaseRequest, MatchRequest, PartLink, ReserveRequest
from kvstore.types import Outcome
from kvstore.wire_answers import answer_fields, answer_of
from kvstore.wire_requests import request_fields, request_of
from tests.wire_samples import ANSWERS, DOMAIN, HELLOS, HOLDER, NOW, REQUESTS, WELCOME

GOLDEN = Path(__file__).with_name("golden_frames.json")
TABLES = Path(__file__).resolve().parents[2] / "docs" / "wire.md"


def frames() -> dict[str, bytes]:
    """What each sample is on the wire today."""
    found = {f"request: {n}": {"i": 1, **request_fields(r)} for n, r in REQUESTS.items()}
    found |= {f"answer: {n}": {"i": 1, **answer_fields(a, NOW)} for n, a in ANSWERS.items()}
    found |= {f"hello: {name}": fields for name, fields in HELLOS.items()}
    found["releases"] = {"t": "releases", "r": wire.pack_numbers([1, 2])}
    found["welcome"] = WELCOME
    found["incompatible"] = {"t": "incompatible", "v": [1, 0]}
    return {name: wire.frame(fields) for name, fields in found.items()}


def body(frame: bytes) -> bytes:
    assert wire.body_length(frame[:4]) == len(frame) - 4
    return frame[4:]


def as_lists(value: Any) -> Any:
    return [as_lists(item) for item in value] if isinstance(value, (list, tuple)) else value


def same(found: Any, expected: Any) -> bool:
    """Equal, whatever kinds of sequences are in them."""
    return type(found) is type(expected) and as_lists(found) == as_lists(expected)


def test_frames_are_what_they_always_were():
    golden = {name: bytes.fromhex(text) for name, text in json.loads(GOLDEN.read_text()).items()}
    assert frames() == golden, "a frame has changed: that is another version of the wire"


def test_every_message_has_a_sample():
    kinds = {type(message) for message in [*REQUESTS.values(), *ANSWERS.values()]}
    own = {messages.EndHolderRequest, messages.EndHolderAnswer}  # the daemon's own
    asked = set(messages.Request.__args__) | set(messages.Answer.__args__)
    assert kinds == asked - own


@pytest.mark.parametrize("name", REQUESTS)
def test_a_request_comes_back_as_it_was(name):
    request = REQUESTS[name]
    fields = wire.request_fields_of(body(wire.frame(request_fields(request))))
    assert same(request_of(fields, DOMAIN, HOLDER), request)


@pytest.mark.parametrize("name", ANSWERS)
def test_an_answer_comes_back_as_it_was(name):
    answer = ANSWERS[name]
    fields = wire.fields_of(body(wire.frame(answer_fields(answer, NOW))))
    assert same(answer_of(fields, NOW), answer)


def test_a_deadline_travels_as_the_time_that_is_left():
    fields = answer_fields(ANSWERS["leased"], NOW + 10)
    found: Any = answer_of(fields, 5.0)
    assert found.deadline == 5.0 + 20


def test_a_welcome_is_checked():
    assert Welcome.of(WELCOME).pool_bytes == WELCOME["pool_bytes"]
    for name in ("incarnation", "session", "secret", "writes", "pool_bytes", "words_bytes"):
        with pytest.raises(WireError, match=name):
            Welcome.of({k: v for k, v in WELCOME.items() if k != name})
    with pytest.raises(WireError, match="session"):
        Welcome.of({**WELCOME, "session": "1"})


# -- drawn ---------------------------------------------------------------------------------------

KEY = st.binary(min_size=32, max_size=32)
U64 = st.integers(0, 2**64 - 1)
SECONDS = st.floats(0, 3_600)


@st.composite
def columns(draw: Any) -> list[Column]:
    blocks = draw(st.integers(0, 5))
    found = []
    for _ in range(draw(st.integers(1, 3))):
        keys = draw(st.lists(KEY, min_size=blocks, max_size=blocks))
        needed = None
        if draw(st.booleans()):
            needed = [0]
            for n in range(1, blocks + 1):
                needed.append(draw(st.integers(needed[-1], n)))
        found.append(Column(keys, needed))
    return found


@given(columns(), U64, SECONDS, SECONDS)
def test_any_lookup_comes_back(drawn, tokens, ttl, wait):
    first, *more = drawn
    for request in (
        MatchRequest(DOMAIN, first.keys, wait, first.first_needed, more),
        LeaseRequest(DOMAIN, first.keys, tokens, ttl, wait, first.first_needed, more, HOLDER),
    ):
        fields = wire.request_fields_of(body(wire.frame(request_fields(request))))
        assert same(request_of(fields, DOMAIN, HOLDER), request)


LINK = st.builds(
    PartLink, KEY, st.tuples(st.none() | st.text(max_size=5), st.integers(0, 9)), st.booleans()
)
SPEC = st.builds(
    BlockSpec,
    KEY,
    st.none() | KEY.filter(any),
    U64,
    U64,
    st.booleans(),
    st.none() | LINK,
)


@given(st.integers(1, 3), st.integers(0, 4), st.data())
def test_any_reservation_comes_back(width, blocks, data):
    count = width * blocks
    specs = data.draw(st.lists(st.none() | SPEC, min_size=count, max_size=count))
    start = data.draw(st.integers(0, blocks))
    request = ReserveRequest(DOMAIN, specs, start, 1.0, 0.0, None, width, HOLDER)
    fields = wire.request_fields_of(body(wire.frame(request_fields(request))))
    assert same(request_of(fields, DOMAIN, HOLDER), request)


VALUES: list[Any] = [
    None, True, -1, 0, 2**63, 2**64 - 1, 1.5, float("nan"), float("inf"), -0.5, "", "x", b"",
    b"123", bytes(32), bytes(64), [], [1], [[None, 1]], [["a", "b", "c"]], {}, {"k": b"1"},
    [{"k": bytes(32)}], [{"k": 1}],
]  # fmt: skip


@pytest.mark.parametrize("name", REQUESTS)
def test_any_field_with_any_value_is_a_request_or_refused(name):
    """NE09."""
    fields = request_fields(REQUESTS[name])
    for field in [*fields, "m", "n", "g", "groups", "width"]:
        for value in VALUES:
            changed = msgspec.msgpack.encode({**fields, field: value})
            try:
                request_of(wire.request_fields_of(changed), DOMAIN, HOLDER)
            except WireError:
                continue
        without = {key: value for key, value in fields.items() if key != field}
        try:
            request_of(wire.request_fields_of(msgspec.msgpack.encode(without)), DOMAIN, HOLDER)
        except WireError:
            continue


@given(st.binary(max_size=200))
def test_any_bytes_are_a_map_or_refused(raw):
    for read in (wire.request_fields_of, wire.fields_of):
        try:
            assert isinstance(read(raw), dict)
        except WireError:
            continue


@given(st.sampled_from(sorted(ANSWERS)), st.data())
def test_a_changed_answer_is_an_answer_or_refused(name, data):
    fields = answer_fields(ANSWERS[name], NOW)
    field = data.draw(st.sampled_from(sorted(fields)))
    fields[field] = data.draw(st.sampled_from(VALUES))
    with suppress(WireError):
        answer_of(fields, NOW)


@pytest.mark.parametrize(
    "raw",
    [
        b"\x82\xa1t\xa1x\xa1z" + b"\x91" * 100_000,  # deeper than the stack
        b"\x82\xa1t\xa1x\xa1m\xdd\xff\xff\xff\xff",  # a list that says it has 2^32 elements
        b"\x81\xa1t\xa2\xff\xfe",  # no text
        b"\x81\xa1t\xdb\xff\xff\xff\xff",
        b"\xdf\xff\xff\xff\xff",
    ],
)
def test_what_would_take_much_memory_is_refused(raw):
    with pytest.raises(WireError):
        wire.request_fields_of(raw)


def test_lengths_beyond_the_maximum_are_refused_before_anything_is_read():
    with pytest.raises(WireError, match="67108864 are the most"):
        wire.body_length(b"\xff\xff\xff\xff")
    with pytest.raises(WireError, match="4096 are the most"):
        wire.body_length(b"\x01\x10\x00\x00", bytes_max=wire.HELLO_BYTES_MAX)
    with pytest.raises(WireError, match="524288 are the most"):
        wire.unpack_keys(bytes(32 * (wire.KEYS_MAX + 1)))


def test_an_outcome_of_a_newer_version_is_incompatible():
    assert wire.unpack_outcomes(b"\x00\xfe") == [Outcome.OK, Outcome.INCOMPATIBLE]
    assert wire.unpack_outcome(99) is Outcome.INCOMPATIBLE


def test_unknown_fields_are_ignored():
    fields = {**request_fields(REQUESTS["renew"]), "new": [[{"a": [1.5, "x"]}]]}
    read = wire.request_fields_of(msgspec.msgpack.encode(fields))
    assert same(request_of(read, DOMAIN, HOLDER), REQUESTS["renew"])


def test_versions_one_minor_apart_talk_to_each_other():
    assert [wire.serves((1, 1), (1, n)) for n in range(4)] == [True, True, True, False]
    assert not wire.serves((1, 0), (2, 0))


def test_the_tables_name_every_field_of_every_frame():
    rows: dict[str, set[str]] = {}
    for line in TABLES.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if line.startswith("| `") and len(cells) >= 3:
            name, field = cells[0].strip("`"), cells[1].strip("`")
            rows.setdefault(name, set()).add(field)
    for raw in frames().values():
        fields = wire.fields_of(raw[4:])
        missing = set(fields) - {"t", "i", "r"} - rows.get(fields["t"], set())
        assert not missing, f"{fields['t']}: {sorted(missing)} in docs/wire.md"
