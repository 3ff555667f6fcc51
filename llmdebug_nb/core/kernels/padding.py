"""Places of a batch that hold no token, as golden's program marks and hides them.

Some tensor of 0 and 1 marks them, and a mask of attention hides them from every token. Only what
both say counts: token types are marks, too, and order hides the last token.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from llmdebug_nb.core import constants
from llmdebug_nb.core.dtypes import is_floating
from llmdebug_nb.core.errors import CorruptDumpError, TensorLookupError
from llmdebug_nb.core.kernels.masks import is_surely_masked, may_hide
from llmdebug_nb.core.records import Record, Site, Summary

Load = Callable[[Record], torch.Tensor]
Shape = tuple[int, ...]
_Step = tuple[int, int, int]  # rank, generation, step
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by the size of elements


@dataclass(frozen=True)
class Blanks:
    """The places [rows, tokens] of a step that hold no token.

    ``fed``: the tokens of this step; caches hold the others. ``flat``: 1 for each blank place.
    """

    rows: int
    tokens: int
    fed: int
    flat: bytes

    @functools.cached_property
    def places(self) -> torch.Tensor:
        return torch.tensor(list(self.flat), dtype=torch.bool).view(self.rows, self.tokens)

    @property
    def of_fed(self) -> Blanks:
        """The places of the tokens of this step alone."""
        own = self.places[:, self.tokens - self.fed :].flatten()
        return Blanks(self.rows, self.fed, self.fed, bytes(own.tolist()))

    def joined(self, other: Blanks) -> Blanks | None:
        """Return the places of both; None if they are not of one batch."""
        if (self.rows, self.tokens, self.fed) != (other.rows, other.tokens, other.fed):
            return None
        both = (self.places | other.places).flatten()
        return Blanks(self.rows, self.tokens, self.fed, bytes(both.tolist()))

    def up_to(self, length: int) -> Blanks:
        """Return the same places of rows that are longer, as those of a cache of fixed length."""
        longer = torch.nn.functional.pad(self.places, (0, length - self.tokens))
        return Blanks(self.rows, length, length, bytes(longer.flatten().tolist()))

    def readings(self, shape: Shape) -> Iterator[Reading]:
        """Yield the ways to see rows and tokens in a shape; flat ones only if there is no other."""
        found = False
        for length in {self.tokens, self.tokens - self.fed} - {0}:
            places = self.places[:, :length]
            for batch, size in enumerate(shape):
                folded = batch == 0 and len(shape) > 2 and size % self.rows == 0
                heads = size // self.rows if folded else 1  # one axis for rows and heads
                tokens = [a for a, n in enumerate(shape) if n == length and a != batch]
                for axis in tokens if size == self.rows * heads else ():
                    found = True
                    yield Reading(places.repeat_interleave(heads, 0), batch, axis, tuple(tokens))
        for length in {self.tokens, self.tokens - self.fed} - {0}:
            if not found and shape[:1] == (self.rows * length,):
                yield Reading(self.places[:, :length].reshape(1, -1), None, 0, (0,))


@dataclass(frozen=True, slots=True)
class Reading:
    """Places [rows, tokens] in a tensor.

    ``batch``: the axis of rows, None if there is none. ``axis``: that of tokens, of scores that of
    the queries; ``axes``: all that may be, of scores the keys, too.
    """

    places: torch.Tensor
    batch: int | None
    axis: int
    axes: tuple[int, ...]

    def blank(self, axes: tuple[int, ...], shape: Shape) -> torch.Tensor:
        """Return where elements belong to a place, along any of some axes of tokens; bool."""
        found = torch.zeros((), dtype=torch.bool)
        for axis in axes:
            sizes = [1] * len(shape)
            sizes[axis] = shape[axis]
            places = self.places
            if self.batch is not None:
                sizes[self.batch] = shape[self.batch]
                places = places if self.batch < axis else places.T
            found = found | places.reshape(sizes)
        return found.expand(shape)


def zeroed(x: torch.Tensor, blank: torch.Tensor) -> torch.Tensor:
    """Return a tensor of any dtype with zero bits at some places (bool): torch fills not all."""
    bits = x.view(_BITS[x.element_size()])
    return bits.masked_fill(blank, 0).view(x.dtype)


class Padding:
    """Finds the blank places of each step in golden's records."""

    def __init__(self, load: Load) -> None:
        self._load = load
        self._marks: dict[_Step, list[Record]] = defaultdict(list)
        self._masks: dict[_Step, list[Record]] = defaultdict(list)
        self._known: dict[_Step, tuple[int, Blanks | None]] = {}

    def add(self, record: Record) -> None:
        """Take note of a record of golden if it may mark or hide places."""
        s = record.summary
        if record.payload is None or record.kept is not None or s.min == s.max:
            return
        if are_marks(s):
            self._marks[_step(record.site)].append(record)
        elif may_be_mask(s):
            self._masks[_step(record.site)].append(record)

    @property
    def is_known(self) -> bool:
        """Whether any step has blank places."""
        steps = self._marks.keys() & self._masks.keys()
        return any(self._of(step) is not None for step in steps)

    def of(self, site: Site) -> Blanks | None:
        """Return the blank places of a step, as far as its records are known."""
        return self._of(_step(site)) if self._marks else None

    def _of(self, step: _Step) -> Blanks | None:
        marks, masks = self._marks.get(step), self._masks.get(step)
        if not marks or not masks:
            return None
        count = len(marks) + len(masks)
        known = self._known.get(step)
        if known is None or (known[1] is None and known[0] != count):
            known = self._known[step] = count, self._found(step, marks, masks)
        return known[1]

    def _found(self, step: _Step, marks: list[Record], masks: list[Record]) -> Blanks | None:
        prompt = min(other for other in self._marks if other[:2] == step[:2])
        begun = self._of(prompt) if prompt < step else None
        for mark in _each_once(marks):
            values = self._values(mark)
            for mask in _each_once(masks):
                tokens = mark.summary.shape[1]
                if values is None or mask.summary.shape[-1] < tokens:
                    continue
                seen = self._values(mask)
                hides = None if seen is None else _hiding(seen)[..., :tokens]
                for blank in (values == 0, values != 0):
                    if hides is not None and _are_blank(blank, hides, begun):
                        fed = min(hides.shape[-2], tokens)
                        return Blanks(len(blank), tokens, fed, bytes(blank.flatten().tolist()))
        return None

    def _values(self, record: Record) -> torch.Tensor | None:
        try:
            values = self._load(record)
        except (CorruptDumpError, TensorLookupError):
            return None
        return values if tuple(values.shape) == record.summary.shape else None


def are_marks(s: Summary) -> bool:
    """Tell by the statistics whether a tensor [rows, tokens] may mark the places of tokens."""
    return s.min == 0 and s.max == 1 and len(s.shape) == 2 and not is_floating(s.dtype)


def may_be_mask(s: Summary) -> bool:
    """Tell by the statistics whether a tensor may be a mask of scores, or masked scores."""
    hides = s.dtype == "bool" or (may_hide(s) and is_floating(s.dtype))
    return hides and len(s.shape) in (3, 4)


def _step(site: Site) -> _Step:
    return site.rank, site.generation, site.step


def _each_once(records: list[Record]) -> list[Record]:
    """Return the first records of other contents each, as many as are worth reading."""
    found: dict[object, Record] = {}
    for record in records:
        found.setdefault(record.summary.fingerprint or record.id, record)
    return list(found.values())[: constants.CONFIRMED_CANDIDATES]


def _hiding(mask: torch.Tensor) -> torch.Tensor:
    """Return where a mask hides: a bool one where it is False, as attention takes it."""
    return ~mask if mask.dtype == torch.bool else is_surely_masked(mask)


def _are_blank(blank: torch.Tensor, hides: torch.Tensor, begun: Blanks | None) -> bool:
    """Tell whether a mask shows that no tokens are at some places [rows, tokens].

    ``hides``: bool [rows, (heads,) queries, tokens]. ``begun``: of a later step, the blank places
    of the prompt, which are the same.
    """
    rows, tokens = blank.shape
    queries = hides.shape[-2]
    if hides.shape[0] % rows or queries > tokens or not bool(blank.any()):
        return False
    hides = hides.reshape(rows, -1, queries, tokens)
    if queries == tokens:
        return all(_is_of_none(*each) for each in zip(blank, hides, strict=True))
    if begun is None or begun.rows != rows or begun.tokens > tokens - queries:
        return False
    same = torch.equal(blank[:, : begun.tokens], begun.places)
    rest = bool(blank[:, begun.tokens :].any())
    return same and not rest and bool(hides.movedim(-1, 1)[blank].all())


def _is_of_none(blank: torch.Tensor, hides: torch.Tensor) -> bool:
    """Tell whether no token uses some places, nor is anything used there; bool[tokens].

    ``hides``: bool [heads, tokens, tokens]. All tokens hide the places, and each sees some other
    one. The places see nothing, or all: what else would a program make of a row that it hides as a
    whole? Each is hidden from itself or from what follows, else it is order that hides it.
    """
    if not bool(blank.any()):
        return True
    tokens = ~blank
    hidden = hides[:, tokens][..., blank].all() & (~hides[:, tokens]).any(-1).all()
    own = hides[:, blank]
    none = own.all(-1) | ~own.any(-1)
    behind = hides.all(0).tril().any(0)[blank]
    return bool(tokens.any()) and bool(hidden & none.all() & behind.all())
