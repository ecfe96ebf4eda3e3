"""kvstore: a tiered store for the KV cache of LLM inference.

    import kvstore

    namespace = kvstore.Namespace(model=…, fingerprint=…, block_tokens=16, layout=…)
    keys = namespace.keys(token_ids)
    with kvstore.open() as store, store.session(namespace) as session:
        found = session.match(keys)

The names below are loaded when they are first used, so `import kvstore` costs an engine next to
nothing and brings in neither torch nor a tier.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvstore import errors
    from kvstore._open import EmbeddedStore, open
    from kvstore.client.lease import Lease
    from kvstore.client.reservation import Reservation
    from kvstore.client.session import Session
    from kvstore.client.store import NodeStore, connect
    from kvstore.keys import Media, Namespace
    from kvstore.layout import Layout
    from kvstore.types import BlockKey, Found, Outcome

__version__ = "0.1.0"

__all__ = [
    "BlockKey",
    "EmbeddedStore",
    "Found",
    "Layout",
    "Lease",
    "Media",
    "Namespace",
    "NodeStore",
    "Outcome",
    "Reservation",
    "Session",
    "__version__",
    "connect",
    "errors",
    "open",
]

#: Public name -> the module that defines it.
_HOMES = {
    "BlockKey": "kvstore.types",
    "EmbeddedStore": "kvstore._open",
    "Found": "kvstore.types",
    "Layout": "kvstore.layout",
    "Lease": "kvstore.client.lease",
    "Media": "kvstore.keys",
    "Namespace": "kvstore.keys",
    "NodeStore": "kvstore.client.store",
    "Outcome": "kvstore.types",
    "Reservation": "kvstore.client.reservation",
    "Session": "kvstore.client.session",
    "connect": "kvstore.client.store",
    "open": "kvstore._open",
}


def __getattr__(name: str) -> object:
    """Load a public name at its first use."""
    if name == "errors":
        return import_module("kvstore.errors")  # which also sets it here
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'kvstore' has no attribute {name!r}")
    value: object = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """The public names, loaded or not, and the rest of the module."""
    return sorted({*globals(), *__all__})
