"""Sizes of a tensor that tell when code compares them with sizes that it worked out otherwise.

``if scores.size() != (B * self.num_heads, T, T): raise ValueError(...)`` is right of the whole and wrong of a share.
Nothing of torch is called where two tuples are compared, so the sizes themselves must notice.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence


class WatchedSizes(tuple[int, ...]):
    """What ``torch.Size`` says, which cannot be subclassed."""

    _noticed: Callable[[], None]

    def __new__(cls, sizes: Sequence[int], noticed: Callable[[], None]) -> WatchedSizes:
        """Makes them.

        Args:
            sizes: as they are.
            noticed: called at a comparison with sizes that are not asked of a tensor too.
        """
        made = super().__new__(cls, sizes)
        made._noticed = noticed
        return made

    def __eq__(self, other: object) -> bool:
        if isinstance(other, tuple) and not isinstance(other, WatchedSizes):
            self._noticed()
        return tuple.__eq__(self, other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = tuple.__hash__

    def numel(self) -> int:
        """Returns the number of elements."""
        return math.prod(self)
