"""How stored bytes are vouched for.

One xxh3-64 a part, over its bytes as they were committed. It is not cryptographic: it finds rot
and stray writes, not forgers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import xxhash

if TYPE_CHECKING:
    from kvstore.buffers import Bytes


def checksum(payload: Bytes) -> int:
    """The xxh3-64 of `payload`, without a copy; other threads run meanwhile if it is large.

    Source: https://github.com/Cyan4973/xxHash, XXH3_64bits, seed 0.
    """
    return xxhash.xxh3_64_intdigest(payload.data)
