"""Views of pool memory that know whether anybody still holds on to them."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvstore.buffers import Bytes

#: References to a `PoolView`'s array that are its own: the attribute and getrefcount's argument.
_OWN_REFERENCES = 2


class PoolView:
    """One read-only memoryview of pool memory, and the array that exports it.

    A view can be handed on in two ways, and each leaves another trace: whatever takes its buffer
    (`np.frombuffer`) is counted by the view itself, which then refuses to be
    released; slices of it share its export, which keeps the array referenced.
    """

    __slots__ = ("_array", "view")

    def __init__(self, array: Bytes) -> None:
        """`array` is the caller's own view of the pool's memory; it becomes read-only."""
        array.flags.writeable = False
        self._array = array
        self.view = array.data

    def release(self) -> bool:
        """Invalidate the view; False where something made from it is alive."""
        try:
            self.view.release()
        except BufferError:
            return False
        return sys.getrefcount(self._array) <= _OWN_REFERENCES
