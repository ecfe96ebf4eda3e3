"""What is worth doing outside Python: today the batch copy, here on NumPy.

Callers see the same functions whether a compiled module stands behind them or not; `IS_COMPILED`
says which, for benchmarks and `kvstore version`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvstore.buffers import Bytes

IS_COMPILED = False


def copy_batch(targets: Sequence[Bytes], sources: Sequence[Bytes]) -> None:
    """Copy `sources[i]` into `targets[i]`, which is as long.

    The GIL is free during each copy (a slice assignment to a memoryview would hold it), so that an
    engine's other threads go on.
    """
    copyto = np.copyto
    for target, source in zip(targets, sources, strict=True):
        copyto(target, source)
