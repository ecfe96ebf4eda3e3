"""What is worth doing outside Python: today the batch copy, here on NumPy.

Callers see the same functions whether a compiled module stands behind them or not; `IS_COMPILED`
says which, for benchmarks and `kvstore version`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvstore.buffers import Bytes

IS_COMPILED = False


def copy_batch(pairs: Iterable[tuple[Bytes, Bytes]]) -> None:
    """Copy each (destination, source) of equal length.

    The GIL is free during each copy (a slice assignment to a memoryview would hold it), so that an
    engine's other threads go on.
    """
    copyto = np.copyto
    for destination, source in pairs:
        copyto(destination, source)
