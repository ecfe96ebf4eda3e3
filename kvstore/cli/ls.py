"""`kvstore ls`: what a daemon holds and for whom, in slices that cost it next to nothing."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from kvstore.cli import terminal
from kvstore.cli.arguments import refusal, whole_number
from kvstore.cli.daemon import add_socket_argument, ask, clients_of, socket_of

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable

KINDS = ("blocks", "leases", "reservations", "clients")
_LIMIT_MAX = 1_000  # as the daemon has it
_KEY_SHOWN = 16

_RULES = """\
Blocks come in the order in which they were written. A daemon looks at 10,000 of them for one list
at most, so the beginning of a key may find none of the older ones: --oldest looks from the other
end, and a whole key finds its block at once."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.epilog = terminal.fill(_RULES)
    parser.add_argument("kind", choices=KINDS, metavar="WHAT", help=", ".join(KINDS))
    parser.add_argument(
        "--limit",
        type=whole_number(1, _LIMIT_MAX),
        default=100,
        metavar="N",
        help="at most so many (default: %(default)s)",
    )
    parser.add_argument(
        "--oldest", action="store_true", help="blocks: the oldest first, not the newest"
    )
    parser.add_argument(
        "--key",
        type=key_prefix,
        default=b"",
        metavar="HEX",
        help="blocks: those whose key begins so, in pairs of hexadecimal digits",
    )
    add_socket_argument(parser)


def key_prefix(text: str) -> bytes:
    """An option's `type`: up to 32 bytes in hexadecimal digits."""
    try:
        prefix = bytes.fromhex(text)
    except ValueError:
        prefix = b""
    if not 1 <= len(prefix) <= 32:
        raise refusal(repr(text[:80]), "give 2 to 64 hexadecimal digits, an even number of them")
    return prefix


def run(arguments: argparse.Namespace) -> int:
    """Ask, and print."""
    path = socket_of(arguments)
    if arguments.kind == "clients":
        rows = clients_of(ask(path, {"t": "status"}))
        found: dict[str, Any] = {
            "rows": rows[: arguments.limit],
            "scanned": len(rows),
            "total": len(rows),
        }
    else:
        options = {"limit": arguments.limit, "newest": not arguments.oldest}
        question = {"t": "list", "what": arguments.kind, "prefix": arguments.key, **options}
        found = ask(path, question)
    if arguments.json:
        names = ("rows", "scanned", "total")
        print(json.dumps({"what": arguments.kind, **{n: found[n] for n in names}}, indent=2))
        return 0
    if found["rows"]:
        titles, cells = _TABLES[arguments.kind]
        from kvstore.cli.table import columns

        print("\n".join(columns([titles, *map(cells, found["rows"])])))
    print(terminal.fill_line(_summary(arguments, found)))
    return 0


def _summary(arguments: argparse.Namespace, found: dict[str, Any]) -> str:
    shown, scanned, total = len(found["rows"]), found["scanned"], found["total"]
    if arguments.kind != "blocks":
        return f"{shown} of {total} {arguments.kind}"
    end = "oldest" if arguments.oldest else "newest"
    if not arguments.key:
        return f"the {end} {shown} of {total} blocks" if shown < total else f"all {total} blocks"
    looked = f"the {end} {scanned:,} of {total:,}" if scanned < total else f"all {total:,}"
    if len(arguments.key) == 32:
        looked = f"all {total:,}"
    return f"{shown} blocks whose key begins with {arguments.key.hex()}, among {looked}"


def _block(row: dict[str, Any]) -> list[str]:
    from kvstore.units import shown_bytes

    pin = "hard" if row["is_hard_pinned"] else "-" if row["soft_pin_seconds"] is None else "soft"
    return [
        row["key"][:_KEY_SHOWN],
        row["state"],
        str(row["tokens"]),
        shown_bytes(row["bytes"]),
        str(row["hits"]),
        str(row["leases"]),
        str(row["children"]),
        pin,
    ]


def _lease(row: dict[str, Any]) -> list[str]:
    return [str(row["lease"]), *_holding(row, row["holders"])]


def _reservation(row: dict[str, Any]) -> list[str]:
    return [str(row["reservation"]), *_holding(row, [row["holder"]]), row["state"]]


def _holding(row: dict[str, Any], holders: list[int]) -> list[str]:
    from kvstore.units import shown_bytes

    sessions = ",".join(map(str, holders))
    return [str(row["blocks"]), shown_bytes(row["bytes"]), f"{row['left_seconds']:.1f} s", sessions]


def _client(row: dict[str, Any]) -> list[str]:
    access = "read, write" if row["writes"] else "read"
    numbers = (row.get("session", "?"), row["pid"], row["uid"], row["connections"])
    return [row["name"], access, *map(str, numbers)]


_TABLES: dict[str, tuple[list[str], Callable[[dict[str, Any]], list[str]]]] = {
    "blocks": (
        ["KEY", "STATE", "TOKENS", "SIZE", "HITS", "LEASES", "CHILDREN", "PIN"],
        _block,
    ),
    "leases": (["LEASE", "BLOCKS", "SIZE", "LEFT", "SESSIONS"], _lease),
    "reservations": (["RESERVATION", "BLOCKS", "SIZE", "LEFT", "SESSION", "STATE"], _reservation),
    "clients": (["NAME", "MAY", "SESSION", "PID", "UID", "CONNECTIONS"], _client),
}
