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
        self._calls: set[CallKey] = set()  # that were given one
        self._contents: set[object] = set()

    def add(self, pair: Pair) -> None:
        """Take note of a pair that can't be compared."""
        if pair.other_batch:
            self._contents.add(pair.content)
            if pair.either.site.role == "input":
                self._calls.add(pair.either.site.key)

    def holds(self, pair: Pair) -> bool:
        """Tell whether a pair that differs is made of such tensors, and note it."""
        if not pair.other_batch:
            return False
        known = pair.content is not None and pair.content in self._contents
        if known or pair.either.site.key in self._calls:
            self.add(pair)
            return True
        return False
