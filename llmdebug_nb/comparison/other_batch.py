"""What is made of a batch as a whole, where the runs were given other rows or tokens.

Tokens sorted by their experts, or counts of them, lie in no place that answers to one of the other
batch. What is made of these is judged where rows and tokens show again.
"""

from __future__ import annotations

from llmdebug_nb.core.findings import Pair
from llmdebug_nb.core.records import CallKey


class OfAllBatch:
    """Follows such tensors through the calls, in execution order."""

    def __init__(self) -> None:
        self._calls: set[CallKey] = set()  # that were given one, or rows in other places
        self._contents: set[object] = set()
        self._made: set[tuple[int, int]] = set()  # ids of outputs that agree, or are such tensors

    def agree(self, pair: Pair) -> None:
        """Take note of a pair that has not diverged."""
        self._made_by(pair)
        if pair.fit is not None and pair.fit.shared and pair.either.site.role == "input":
            self._calls.add(pair.either.site.key)

    def _made_by(self, pair: Pair) -> None:
        if pair.golden is not None and pair.mine is not None and pair.either.site.role == "output":
            self._made.add((pair.golden.id, pair.mine.id))

    def add(self, pair: Pair) -> None:
        """Take note of a pair that can't be compared."""
        if pair.other_batch:
            self._contents.add(pair.content)
            self._made_by(pair)
            if pair.either.site.role == "input":
                self._calls.add(pair.either.site.key)

    def holds(self, pair: Pair) -> bool:
        """Tell whether a pair that differs is made of such tensors, and note it.

        Or it is a view of what agrees in which rows and tokens no longer show.
        """
        golden, mine = pair.golden, pair.mine
        if not pair.other_batch or golden is None or mine is None:
            return False
        known = pair.content is not None and pair.content in self._contents
        viewed = (golden.producer, mine.producer) in self._made
        made = golden.site.role == "output" and golden.site.key in self._calls
        if known or viewed or made:
            self.add(pair)
            return True
        return False
