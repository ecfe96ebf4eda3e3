"""Sizes, durations and fractions: what people write, and what they are shown."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.errors import ConfigError
from kvstore.units import (
    exact_bytes,
    is_size,
    nearest_sizes,
    parse_bytes,
    parse_fraction,
    parse_seconds,
    shown_bytes,
    shown_fraction,
    shown_seconds,
)

MIB = 1024 * 1024


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (4096, 4096),
        ("0", 0),
        ("4096", 4096),
        ("512 MiB", 512 * MIB),
        (" 8GiB ", 8 * 1024 * MIB),
        ("8gib", 8 * 1024 * MIB),
        ("8GB", 8_000_000_000),
        ("1.5KiB", 1536),
        ("2TiB", 2 * 1024**4),
        ("7B", 7),
        ("9007199254740993", 2**53 + 1),
    ],
)
def test_sizes_have_units(text, expected):
    assert parse_bytes(text) == expected
    assert is_size(str(text))


@pytest.mark.parametrize(
    "text",
    ["", "MiB", "-1", "1e9", "1 M", "1 PiBs", "0x10", "1,5MiB", True, "1MiB\x00", "٣", "9" * 5000],
)
def test_what_is_no_size_is_named(text):
    with pytest.raises(
        ConfigError, match="is no size: write a number of bytes, or one with a unit"
    ):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("text", "nearest"),
    [
        ("8G", ["8GiB", "8GB"]),
        ("1.5 m", ["1.5MiB", "1.5MB"]),
        ("8Gi", ["8GiB"]),
        ("8", []),
        ("8GiB", []),
        ("G", []),
    ],
)
def test_a_size_without_its_b_may_be_two(text, nearest):
    assert nearest_sizes(text) == nearest
    for each in nearest:
        assert parse_bytes(each)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("30s", 30.0),
        ("5m", 300.0),
        ("250ms", 0.25),
        ("1h", 3600.0),
        ("30d", 2_592_000.0),
        (" 1.5 h ", 5400.0),
        ("30", 30.0),
        (30, 30.0),
        (0.5, 0.5),
    ],
)
def test_durations_have_units(text, expected):
    assert parse_seconds(text) == expected


@pytest.mark.parametrize(
    "text", ["", "s", "-1s", "5M", "1h30m", "5 minutes", "inf", float("nan"), float("inf"), True]
)
def test_what_is_no_duration_is_named(text):
    with pytest.raises(ConfigError, match=r"is no duration.*there are ms, s, m, h and d"):
        parse_seconds(text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [("50%", 0.5), ("0.5", 0.5), (0.5, 0.5), (1, 1.0), (0, 0.0), ("12.5 %", 0.125), ("29%", 0.29)],
)
def test_fractions_may_be_percentages(text, expected):
    assert parse_fraction(text) == expected


@pytest.mark.parametrize("text", ["", "%", "101%", 1.01, 50, -0.1, "half", float("nan"), True])
def test_what_is_no_fraction_is_named(text):
    with pytest.raises(ConfigError, match=r"is no fraction.*or a percentage"):
        parse_fraction(text)


def test_sizes_are_shown_rounded_or_exact():
    assert shown_bytes(25_125_558_681) == "23.4 GiB"
    assert shown_bytes(1023) == "1023 bytes"
    assert [exact_bytes(n) for n in (0, 8 << 30, 1_500_000, 3 << 19)] == [
        "0",
        "8GiB",
        "1500000",
        "1536KiB",
    ]


def test_durations_are_shown_in_the_largest_whole_unit():
    shown = [shown_seconds(n) for n in (0.0, 0.25, 1.5, 90.0, 5400.0, 86400.0, 2592000.0, 0.0001)]
    assert shown == ["0s", "250ms", "1500ms", "90s", "90m", "1d", "30d", "0.0001s"]


@given(st.integers(min_value=0, max_value=1 << 59))
def test_an_exact_size_comes_back(count):
    assert parse_bytes(exact_bytes(count)) == count


@given(st.integers(min_value=0, max_value=10**12))
def test_a_shown_duration_comes_back(milliseconds):
    assert parse_seconds(shown_seconds(milliseconds / 1_000)) == milliseconds / 1_000


@given(st.integers(min_value=0, max_value=10_000))
def test_a_shown_fraction_comes_back(hundredths_of_a_percent):
    fraction = hundredths_of_a_percent / 10_000
    assert parse_fraction(shown_fraction(fraction)) == pytest.approx(fraction, abs=1e-15)
