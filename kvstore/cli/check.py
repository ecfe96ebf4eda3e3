"""`kvstore check`: does the daemon keep what it is given? Blocks of a scratch namespace try it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from kvstore.cli.daemon import add_socket_argument, ask, socket_of

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable

    from kvstore.client.session import Session
    from kvstore.types import BlockKey, Outcome

_BLOCKS = 8
_BLOCK_TOKENS = 16
_TTL_SECONDS = 60.0  # should this command be killed, its blocks go by themselves


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add_socket_argument(parser)


def run(arguments: argparse.Namespace) -> int:
    """Put, read in two ways, compare, delete; 1 with the first thing that is wrong."""
    path = socket_of(arguments)
    ask(path, {"t": "status"})  # tells a daemon that hangs from one that refuses
    steps, problem = _try_out(str(path))
    if arguments.json:
        print(json.dumps({"socket": str(path), "steps": steps, "problem": problem}, indent=2))
    else:
        from kvstore.cli.table import facts

        rows = [(s["step"], f"ok, {s['milliseconds']:.2f} ms") for s in steps]
        if problem:
            rows.append((problem["step"], f"FAILED: {problem['reason']}"))
        print("\n".join(facts(rows)))
    return 1 if problem else 0


class _Wrong(Exception):
    """A step has brought something else than it should."""


def _try_out(path: str) -> tuple[list[dict[str, Any]], dict[str, str] | None]:
    """The steps that went well, each with its time, and the one that did not."""
    import secrets

    import kvstore
    from kvstore.clock import SystemClock
    from kvstore.errors import KVStoreError

    layout = kvstore.Layout.gqa(layers=2, kv_heads=4, head_dim=128, dtype="bfloat16")
    namespace = kvstore.Namespace(
        model="kvstore-check",
        fingerprint=secrets.token_hex(16),  # so that nobody else's blocks are ever touched
        layout=layout,
        block_tokens=_BLOCK_TOKENS,
    )
    keys = namespace.keys(range(_BLOCKS * _BLOCK_TOKENS))
    blocks = [secrets.token_bytes(layout.bytes_per_block(_BLOCK_TOKENS)) for _ in keys]
    steps: list[dict[str, Any]] = []
    clock = SystemClock()
    with (
        kvstore.connect(path, name="kvstore check") as store,
        store.session(namespace) as session,
    ):
        for step, action in _STEPS.items():
            started = clock.now()
            try:
                action(session, keys, blocks)
            except (_Wrong, KVStoreError) as error:
                session.delete(keys)
                return steps, {"step": step, "reason": str(error)}
            milliseconds = round(1_000 * (clock.now() - started), 3)
            steps.append({"step": step, "milliseconds": milliseconds})
    return steps, None


def _expect(outcomes: list[Outcome], expected: str) -> None:
    for position, outcome in enumerate(outcomes):
        if outcome != expected:
            raise _Wrong(f"block {position} is {outcome}, not {expected}")


def _compare(contents: list[Any], blocks: list[bytes]) -> None:
    for position, (content, block) in enumerate(zip(contents, blocks, strict=True)):
        if bytes(content) != block:
            raise _Wrong(f"block {position} has other bytes than were put")


def _put(session: Session, keys: list[BlockKey], blocks: list[bytes]) -> None:
    _expect(session.put(keys, blocks, wait_seconds=1.0, expire_seconds=_TTL_SECONDS), "ok")


def _get(session: Session, keys: list[BlockKey], blocks: list[bytes]) -> None:
    buffers = [bytearray(len(block)) for block in blocks]
    _expect(session.get_into(keys, buffers), "ok")
    _compare(buffers, blocks)


def _lease(session: Session, keys: list[BlockKey], blocks: list[bytes]) -> None:
    with session.lease(keys, wait_seconds=1.0) as lease:
        if lease.blocks != len(keys):
            raise _Wrong(f"{lease.blocks} of {len(keys)} blocks: {lease.reason}")
        _compare([bytes(view) for view in lease.views], blocks)
        if not lease.valid():
            raise _Wrong("it has ended before its blocks were read")


def _delete(session: Session, keys: list[BlockKey], _blocks: list[bytes]) -> None:
    _expect(session.delete(keys), "ok")
    found = session.match(keys)
    if found.blocks:
        raise _Wrong(f"{found.blocks} blocks are still found")


_STEPS: dict[str, Callable[[Session, list[BlockKey], list[bytes]], None]] = {
    "put": _put,
    "get": _get,
    "lease": _lease,
    "delete": _delete,
}
