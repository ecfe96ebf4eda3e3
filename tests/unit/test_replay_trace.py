"""Traces: what is read, what is refused and how it is named, and that what is written is read."""

from __future__ import annotations

import gzip
import io

import pytest

from kvstore.errors import InvalidRequest
from kvstore.replay.trace import TraceRequest, create_trace, read_trace, write_trace

LINE = '{"timestamp": 27, "input_length": 600, "output_length": 5, "hash_ids": [46, 47]}\n'
REQUEST = TraceRequest(27, 600, 5, [46, 47])


@pytest.fixture
def file(tmp_path):
    return tmp_path / "trace.jsonl"


def test_a_line_is_a_request(file):
    file.write_text(LINE * 2, encoding="utf-8")
    assert read_trace(str(file)) == [REQUEST, REQUEST]


@pytest.mark.parametrize("name", ["trace.jsonl.gz", "trace.jsonl"])
def test_gzip_is_known_by_its_content(tmp_path, name):
    path = tmp_path / name
    path.write_bytes(gzip.compress(LINE.encode()))
    assert read_trace(str(path)) == [REQUEST]


@pytest.mark.parametrize("is_packed", [False, True])
def test_standard_input_is_a_trace_too(monkeypatch, is_packed):
    content = gzip.compress(LINE.encode()) if is_packed else LINE.encode()
    stream = io.TextIOWrapper(io.BufferedReader(io.BytesIO(content)))
    monkeypatch.setattr("sys.stdin", stream)
    assert read_trace("-") == [REQUEST]


def test_empty_lines_other_fields_and_a_missing_newline_do_no_harm(file):
    line = '{"hash_ids": [46, 47], "input_length": 600, "model": "x"}'
    file.write_text(f"\n{line}\n \n{line}", encoding="utf-8")
    assert read_trace(str(file)) == [TraceRequest(0, 600, 0, [46, 47])] * 2


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("hello", "JSON is malformed"),
        ('{"input_length": 5, "hash_ids": [1]', "truncated"),
        ("[1, 2]", "Expected `object`, got `array`"),
        ('{"input_length": 5}', "there is no field `hash_ids`"),
        ('{"hash_ids": []}', "there is no field `input_length`"),
        ('{"input_length": "5", "hash_ids": [1]}', r"Expected `int`, got `str` - at `\$.input_le"),
        ('{"input_length": 5.5, "hash_ids": [1]}', "Expected `int`, got `float`"),
        ('{"input_length": -5, "hash_ids": [1]}', "Expected `int` >= 0"),
        ('{"input_length": 5, "hash_ids": [null]}', r"at `\$.hash_ids\[\d*"),
        ('{"input_length": 5, "hash_ids": 1}', "Expected `array`, got `int`"),
        ('{"input_length": 5, "hash_ids": [], "timestamp": "now"}', r"at `\$.timestamp`"),
        ("\udcff", "JSON is malformed"),
    ],
)
def test_a_wrong_line_is_named(file, line, reason):
    file.write_bytes(LINE.encode() + b"\n" + line.encode("utf-8", "surrogateescape") + b"\n")
    with pytest.raises(InvalidRequest, match=f"trace.jsonl, line 3: .*(?:{reason})"):
        read_trace(str(file))


@pytest.mark.parametrize(("content", "lines"), [(b"", 0), (b"\n\n", 2)])
def test_a_trace_without_a_request_is_refused(file, content, lines):
    file.write_bytes(content)
    with pytest.raises(InvalidRequest, match=rf"no request in it \({lines} lines\)"):
        read_trace(str(file))


def test_what_cannot_be_opened_is_named(tmp_path):
    with pytest.raises(InvalidRequest, match=r"nowhere: No such file"):
        read_trace(str(tmp_path / "nowhere"))
    with pytest.raises(InvalidRequest, match=r"Is a directory"):
        read_trace(str(tmp_path))


@pytest.mark.parametrize("damage", ["cut", "changed"])
def test_a_damaged_gzip_file_is_named(file, damage):
    content = bytearray(gzip.compress(LINE.encode() * 100, mtime=0))
    if damage == "cut":
        del content[-10:]
    else:
        content[-6] ^= 1  # the checksum
    file.write_bytes(content)
    with pytest.raises(InvalidRequest, match=r"trace\.jsonl: damaged gzip file"):
        read_trace(str(file))


@pytest.mark.parametrize("name", ["made.jsonl", "made.jsonl.gz"])
def test_what_is_written_is_read(tmp_path, name):
    path = tmp_path / name
    requests = [REQUEST, TraceRequest(28, 0, 0, [])]
    for _ in range(2):  # over an older one
        with create_trace(str(path)) as stream:
            assert write_trace(requests, stream) == 2
        assert read_trace(str(path)) == requests
    assert (path.read_bytes()[:2] == b"\x1f\x8b") == name.endswith(".gz")


def test_the_same_trace_is_the_same_file(tmp_path):
    paths = [tmp_path / name for name in ("a.gz", "b.gz")]
    for path in paths:
        with create_trace(str(path)) as stream:
            write_trace([REQUEST], stream)
    assert paths[0].read_bytes() == paths[1].read_bytes()


def test_a_line_is_written_as_mooncake_wrote_it():
    stream = io.StringIO()
    write_trace([REQUEST], stream)
    assert stream.getvalue() == LINE
