"""Which tokens of two programs can be compared: those that follow the same tokens."""

from __future__ import annotations

import torch

from llmdebug_nb.app.logits.sources import Step

PARTED = "the tokens before it differ"
FLIPPED = "an earlier token differs, and inputs were not recorded"
LENGTHS = "the inputs have other lengths"
SEQUENCES = "the numbers of sequences differ"
_Sequence = tuple[int, int]  # generation and its number


class Contexts:
    """Follows the tokens that both programs were given, step by step.

    Where they were not recorded, both count as greedy: from the first token that differs, the
    inputs differ. ``guessed``: steps for which that was assumed.
    """

    def __init__(self) -> None:
        self._parted: dict[_Sequence, str] = {}
        self.guessed = 0

    def begin(self, generation: int, golden: Step, mine: Step) -> None:
        """Begin a step: look at what both were given."""
        self._ids: list[tuple[torch.Tensor, torch.Tensor] | None] = [None] * golden.shape[0]
        self._golden = golden
        if golden.ids is None or mine.ids is None:
            self.guessed += 1
            return
        for sequence in range(min(len(golden.ids), len(mine.ids), golden.shape[0])):
            both = _unpadded(golden.ids[sequence], mine.ids[sequence])
            self._ids[sequence] = both
            if golden.cached and _agreeing(*both) < max(map(len, both)):
                why = LENGTHS if len(both[0]) != len(both[1]) else PARTED
                self._parted.setdefault((generation, sequence), why)

    def refusal(self, generation: int, sequence: int, behind: int) -> str:
        """Return why a row can't be compared; "" if it can.

        ``behind``: how many rows of the step come after it.
        """
        ids = self._ids[sequence]
        if self._golden.cached or ids is None:
            return self._parted.get((generation, sequence), "")
        if len(ids[0]) != len(ids[1]):
            return LENGTHS
        return "" if _agreeing(*ids) >= len(ids[0]) - behind else PARTED

    def flipped(self, generation: int, sequence: int) -> None:
        """Note that mine prefers another token here."""
        if self._ids[sequence] is None and self._golden.generating:
            self._parted.setdefault((generation, sequence), FLIPPED)


def _unpadded(golden: torch.Tensor, mine: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return both without the padding in front of the longer one: a token that repeats."""
    short, long = sorted((golden, mine), key=len)
    extra = long[: len(long) - len(short)]
    padded = len(extra) > 0 and bool((extra == extra[0]).all())
    if padded and len(short) and torch.equal(long[len(extra) :], short):
        return short, short
    return golden, mine


def _agreeing(golden: torch.Tensor, mine: torch.Tensor) -> int:
    """Return how many tokens agree before the first that differs."""
    count = min(len(golden), len(mine))
    apart = (golden[:count] != mine[:count]).nonzero()
    return int(apart[0]) if len(apart) else count
