"""Traces of requests: JSON lines as Mooncake published them, plain or compressed with gzip.

    {"timestamp": 27, "input_length": 6758, "output_length": 500, "hash_ids": [0, 1, 2, …]}

`timestamp` is in milliseconds, lengths are in tokens. Each id names one block *and all before it*,
as our own keys do; the last block may be partial. Other fields are passed over.
"""

from __future__ import annotations

import gzip
import json
import sys
import zlib
from contextlib import ExitStack, contextmanager
from io import TextIOWrapper
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, NamedTuple, cast

import msgspec

from kvstore.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from io import BufferedReader

#: Where a trace comes from, or goes to, that is no file.
STANDARD_STREAM = "-"
_GZIP_MAGIC = b"\x1f\x8b"

_Count = Annotated[int, msgspec.Meta(ge=0)]


class TraceRequest(NamedTuple):
    """One request: its prompt's length and blocks, in the order of the prompt."""

    timestamp_ms: int
    input_tokens: int
    output_tokens: int
    ids: list[int]


class _Line(msgspec.Struct):
    """One line of a trace, as it stands there."""

    input_length: _Count
    hash_ids: list[int]
    timestamp: _Count | float = 0
    output_length: _Count = 0


def shown_name(path: str) -> str:
    """What a trace is called in a message."""
    return "standard input" if path == STANDARD_STREAM else path


def read_trace(path: str) -> list[TraceRequest]:
    """The requests of a trace, in file order; `-` is standard input. Empty lines are passed over.

    Raises InvalidRequest, which names file and line, for one that cannot be read.
    """
    decoder = msgspec.json.Decoder(_Line)
    requests = []
    name = shown_name(path)
    number = 0
    with _errors_of(name), _open(path) as lines:
        for number, text in enumerate(lines, 1):
            if text.isspace():
                continue
            try:
                line = decoder.decode(text)
            except msgspec.DecodeError as error:
                reason = str(error).replace("Object missing required field", "there is no field")
                raise InvalidRequest(
                    f"{name}, line {number}: {reason}; a line is a JSON object with input_length "
                    "and hash_ids"
                ) from error
            requests.append(
                TraceRequest(
                    int(line.timestamp), line.input_length, line.output_length, line.hash_ids
                )
            )
    if not requests:
        raise InvalidRequest(f"{name}: no request in it ({number} lines)")
    return requests


def write_trace(requests: Iterable[TraceRequest], stream: IO[str]) -> int:
    """Write requests as lines of a trace, each as it comes; how many there were."""
    count = 0
    for request in requests:
        line = {
            "timestamp": request.timestamp_ms,
            "input_length": request.input_tokens,
            "output_length": request.output_tokens,
            "hash_ids": request.ids,
        }
        stream.write(json.dumps(line) + "\n")
        count += 1
    return count


@contextmanager
def create_trace(path: str) -> Iterator[IO[str]]:
    """A file to write a trace to, compressed if its name ends with .gz; for a `with` block.

    Raises OSError.
    """
    with Path(path).open("wb") as file:
        if not path.endswith(".gz"):
            with TextIOWrapper(file, encoding="ascii") as text:
                yield text
            return
        # Neither name nor time goes into it, so that the same seed makes the same file.
        with (
            gzip.GzipFile(filename="", mode="wb", fileobj=file, mtime=0) as packed,
            TextIOWrapper(packed, encoding="ascii") as text,
        ):
            yield text


@contextmanager
def _open(path: str) -> Iterator[Iterable[bytes]]:
    """The lines of a file or of standard input, compressed or not: its first bytes say which."""
    with ExitStack() as stack:
        if path == STANDARD_STREAM:
            file = cast("BufferedReader", sys.stdin.buffer)  # not ours to close
        else:
            file = stack.enter_context(Path(path).open("rb"))
        is_packed = file.peek(2)[:2] == _GZIP_MAGIC
        yield stack.enter_context(gzip.GzipFile(fileobj=file)) if is_packed else file


@contextmanager
def _errors_of(name: str) -> Iterator[None]:
    """Say the system's and gzip's errors in our words."""
    try:
        yield
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise InvalidRequest(f"{name}: damaged gzip file: {error}") from error
    except OSError as error:
        raise InvalidRequest(f"{name}: {error.strerror or error}") from error
