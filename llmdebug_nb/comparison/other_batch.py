"""What is made of a batch as a whole, where the runs were given other rows or tokens.

Once tokens are sorted by expert, or only counted, their positions in the two batches no longer
correspond. We judge again where a tensor has rows and tokens at known positions.
"""

from __future__ import annotations

from llmdebug_nb.align.pairs import Pair
from llmdebug_nb.comparison.taint import Followed


class OfAllBatch:
    """Follows such tensors through the calls, in execution order."""

    def __init__(self) -> None:
        self._whole, self._moved = Followed(), Followed()
        self._apart: set[tuple[int | None, int | None]] = set()  # ids of outputs that diverged

    def agree(self, pair: Pair) -> None:
        """Take note of a pair that has not diverged: its rows may lie in other places."""
        if pair.fit is not None and pair.fit.shared:
            self._moved.add(pair)

    def differ(self, pair: Pair) -> None:
        """Take note of a pair that has diverged."""
        if pair.golden is not None and pair.mine is not None and pair.either.site.role == "output":
            self._apart.add((pair.golden.id, pair.mine.id))

    def add(self, pair: Pair) -> None:
        """Take note of a pair that can't be compared."""
        if pair.other_batch:
            self._whole.add(pair)

    def holds(self, pair: Pair, is_order: bool) -> bool:
        """Tell whether a pair that differs is made of such tensors, and note it.

        Or it is a view of what has not diverged in which rows and tokens no longer show; or an
        order of all tokens (``is_order``).
        """
        golden, mine = pair.golden, pair.mine
        if is_order and pair.fit is not None and pair.fit.shared:
            self._whole.add(pair)
            return True
        if not pair.other_batch or golden is None or mine is None:
            return False
        kinds = self._whole, self._moved
        if golden.site.role == "output":
            made = any(kind.are_given_to(golden.site) for kind in kinds)
        elif golden.producer is not None and mine.producer is not None:
            made = (golden.producer, mine.producer) not in self._apart
        else:
            made = any(kind.are_viewed(golden, mine) for kind in kinds)
        made = made or self._whole.hold(pair)
        if made:
            self.add(pair)
        return made
