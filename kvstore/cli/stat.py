"""`kvstore stat KEY`: all that the daemon knows of one block."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from kvstore.cli.daemon import add_socket_argument, ask, socket_of
from kvstore.cli.ls import key_prefix

if TYPE_CHECKING:
    import argparse

_KEY_BYTES = 32


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument(
        "key",
        type=key_prefix,
        metavar="KEY",
        help="a storage key as `kvstore ls blocks` shows it, whole or its beginning",
    )
    add_socket_argument(parser)


def run(arguments: argparse.Namespace) -> int:
    """Ask, and print; 1 where there is no such block, or more than one."""
    path, key = socket_of(arguments), arguments.key
    if len(key) == _KEY_BYTES:
        found = ask(path, {"t": "stat", "k": key})
        blocks, reason = [found["block"]] if found["block"] else [], found["reason"]
    else:
        found = ask(path, {"t": "list", "what": "blocks", "prefix": key, "limit": 2})
        blocks, reason = found["rows"], f"not among the newest {found['scanned']:,} blocks"
        if len(blocks) > 1:
            reason = f"several begin so: kvstore ls blocks --key {key.hex()}"
    block = blocks[0] if len(blocks) == 1 else None
    if arguments.json:
        print(json.dumps({"block": block, "reason": None if block else reason}, indent=2))
    elif block is None:
        print(f"{key.hex()[:16]}: {reason}")
    else:
        print("\n".join(_lines(block)))
    return 0 if block else 1


def _lines(block: dict[str, Any]) -> list[str]:
    from kvstore.cli.table import facts, shown_duration
    from kvstore.units import shown_bytes

    parts = f", one of {block['parts']} parts" if block["parts"] > 1 else ""
    partial = ", the partial end of a sequence" if block["is_partial"] else ""
    pins = []
    if block["soft_pin_seconds"] is not None:
        pins.append(f"soft for {shown_duration(block['soft_pin_seconds'])}")
    if block["is_hard_pinned"]:
        left = block["hard_pin_seconds"]
        pins.append("hard" if left is None else f"hard for {shown_duration(left)}")
    expires = block["expires_seconds"]
    return facts(
        [
            ("key", block["key"]),
            ("parent", block["parent"] or "none: it begins a sequence"),
            ("state", f"{block['state']}{partial}{parts}"),
            ("tokens", str(block["tokens"])),
            ("size", f"{block['bytes']:,} bytes in a slot of {shown_bytes(block['slot_bytes'])}"),
            ("place", f"at {block['offset_bytes']:,}, generation {block['generation']}"),
            ("checksum", block["checksum"] or "not made yet"),
            ("used by", f"{block['users']} (leases {block['leases']}), hit {block['hits']} times"),
            ("children", f"{block['children']} resident"),
            ("pins", ", ".join(pins) or "none"),
            ("expires", "never" if expires is None else f"in {shown_duration(expires)}"),
        ]
    )
