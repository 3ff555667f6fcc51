"""The nouns of a run by its tokens: a sequence, and which of its positions two runs share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple


class Place(NamedTuple):
    """Where a token was computed. ``step``: generation and step. ``item``: of the batch, or None
    of a flat tensor ``[tokens, ...]``. ``row``: of the step's tokens. ``last``: its place among
    the last rows of the step's requests, if it is one; logits have only these.
    """

    step: tuple[int, int]
    item: int | None
    row: int
    last: int | None = None


@dataclass(frozen=True)
class TokenSequence:
    """A text that a model was given: a request and attempt of an engine, or an item of a batch.

    ``tokens``: ids by position, of cached positions too. ``places``: of each computed position.
    ``prompt``: how many tokens of it an engine was given; it sampled the others. None: not known.
    """

    label: str
    tokens: Mapping[int, int | None]
    places: Mapping[int, Place]
    prompt: int | None = None


class Shared(NamedTuple):
    """A sequence of golden and one of mine, and the positions that both computed alike."""

    golden: TokenSequence
    mine: TokenSequence
    positions: tuple[int, ...]


def shared(golden: Sequence[TokenSequence], mine: Sequence[TokenSequence]) -> list[Shared]:
    """Pair each sequence of mine with that of golden with which it begins alike, at most length.

    Sequences are compared by their tokens, as engines name requests anew. Behind the first token
    that differs nothing is shared: what follows was computed of another text.
    """
    found: list[Shared] = []
    used: set[int] = set()
    for one in mine:
        alike = [_common(each.tokens, one.tokens) for each in golden]
        if not any(alike):
            continue
        best = max(range(len(golden)), key=lambda at: (alike[at], at not in used))
        used.add(best)
        both = golden[best].places.keys() & one.places.keys()
        positions = tuple(sorted(at for at in both if at < alike[best]))
        if positions:
            found.append(Shared(golden[best], one, positions))
    return found


def _common(first: Mapping[int, int | None], second: Mapping[int, int | None]) -> int:
    """Return how many tokens two texts have in common, from the first one on."""
    count = 0
    while count in first and count in second and first[count] == second[count]:
        count += 1
    return count
