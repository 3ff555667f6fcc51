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
from llmdebug_nb.core.records import Record, Site

Load = Callable[[Record], torch.Tensor]
Shape = tuple[int, ...]
_Step = tuple[int, int, int]  # rank, generation, step


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

    def readings(self, shape: Shape) -> Iterator[Reading]:
        """Yield the ways to see rows and tokens in a shape."""
        for length in {self.tokens, self.tokens - self.fed} - {0}:
            places = self.places[:, :length]
            for batch, size in enumerate(shape):
                heads = size // self.rows if batch == 0 and size % self.rows == 0 else 1
                tokens = [a for a, n in enumerate(shape) if n == length and a != batch]
                if size == self.rows * heads and tokens:
                    yield Reading(places.repeat_interleave(heads, 0), batch, tuple(tokens))
            for axis, size in enumerate(shape):
                if size == self.rows * length:
                    yield Reading(places.reshape(1, -1), None, (axis,))
                    yield Reading(places.T.reshape(1, -1), None, (axis,))


@dataclass(frozen=True, slots=True)
class Reading:
    """Places [rows, tokens] in a tensor: the axis of rows, None if there is none, and of tokens."""

    places: torch.Tensor
    batch: int | None
    tokens: tuple[int, ...]

    def blank(self, axes: tuple[int, ...], shape: Shape) -> torch.Tensor:
        """Return where elements belong to a place, along any of some axes of tokens; bool."""
        found = torch.zeros(shape, dtype=torch.bool)
        for axis in axes:
            sizes = [1] * len(shape)
            sizes[axis] = shape[axis]
            places = self.places
            if self.batch is not None:
                sizes[self.batch] = shape[self.batch]
                places = places if self.batch < axis else places.T
            found |= places.reshape(sizes)
        return found

    def varies(self, x: torch.Tensor) -> bool:
        """Tell whether a tensor varies along another axis, as states do, and masks do not."""
        others = [a for a in range(x.dim()) if a != self.batch and a not in self.tokens]
        if not others or not x.numel():
            return False
        return bool((x.amax(others) != x.amin(others)).any())


class Padding:
    """Finds the blank places of each step in golden's records."""

    def __init__(self, load: Load) -> None:
        self._load = load
        self._marks: dict[_Step, list[Record]] = defaultdict(list)
        self._masks: dict[_Step, list[Record]] = defaultdict(list)
        self._known: dict[_Step, tuple[int, Blanks | None]] = {}

    def add(self, record: Record) -> None:
        """Take note of a record of golden if it may mark or hide places."""
        s, shape = record.summary, record.summary.shape
        if record.payload is None or record.kept is not None or s.min == s.max:
            return
        step = _step(record.site)
        if len(shape) == 2 and (s.min, s.max) == (0, 1) and not is_floating(s.dtype):
            self._marks[step].append(record)
        elif len(shape) in (3, 4) and (s.dtype == "bool" or (is_floating(s.dtype) and may_hide(s))):
            self._masks[step].append(record)

    @property
    def is_known(self) -> bool:
        """Whether any step has blank places."""
        steps = self._marks.keys() & self._masks.keys()
        return any(self._of(step) is not None for step in steps)

    def of(self, site: Site) -> Blanks | None:
        """Return the blank places of a step, as far as its records are known."""
        return self._of(_step(site))

    def _of(self, step: _Step) -> Blanks | None:
        marks, masks = self._marks.get(step), self._masks.get(step)
        if not marks or not masks:
            return None
        count = len(marks) + len(masks)
        known = self._known.get(step)
        if known is None or (known[1] is None and known[0] != count):
            known = self._known[step] = count, self._found(marks, masks)
        return known[1]

    def _found(self, marks: list[Record], masks: list[Record]) -> Blanks | None:
        for mark in _each_once(marks):
            values = self._values(mark)
            for mask in _each_once(masks):
                if values is None or mask.summary.shape[-1] != mark.summary.shape[1]:
                    continue
                hides = self._values(mask)
                for blank in (values == 0, values != 0):
                    if hides is not None and _is_hidden(blank, _hiding(hides)):
                        fed = min(hides.shape[-2], hides.shape[-1])
                        rows, tokens = blank.shape
                        return Blanks(rows, tokens, fed, bytes(blank.flatten().tolist()))
        return None

    def _values(self, record: Record) -> torch.Tensor | None:
        try:
            return self._load(record)
        except (CorruptDumpError, TensorLookupError):
            return None


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


def _is_hidden(blank: torch.Tensor, hides: torch.Tensor) -> bool:
    """Tell whether a mask hides blank places [rows, tokens] from all tokens, and because of that.

    ``hides``: bool [rows, (heads,) queries, tokens]. Each token sees some other one. A blank place
    is hidden from itself or from what comes after it, so that it isn't the order alone that hides.
    """
    rows, tokens = blank.shape
    queries = hides.shape[-2]
    if hides.shape[0] % rows or queries > tokens:
        return False
    hides = hides.reshape(rows, -1, queries, tokens)
    at = torch.arange(tokens - queries, tokens)
    for row in torch.nonzero(blank.any(1)).flatten().tolist():
        none, seen = blank[row], hides[row]
        asks = ~none[at] if queries > 1 else torch.ones(1, dtype=torch.bool)
        before = at[:, None] >= torch.arange(tokens)[None]
        hidden = seen[:, asks][..., none].all() & (~seen[:, asks]).any(-1).all()
        because = (seen.all(0) & before).any(0)[none].all()
        if not bool(asks.any()) or not bool(hidden & because):
            return False
    return True
