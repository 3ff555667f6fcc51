"""Find how the elements of one tensor lie in the other tensor of its pair.

A tensor may be transposed, have its heads flattened, be one part of a fused tensor, some rows of a
batch, the shard of a rank, or quantised. Shapes and statistics limit the possible layouts. The
values decide between them, if they were kept; the decision holds for all similar pairs.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import replace

import torch

from llmdebug_nb.align import fit as moves
from llmdebug_nb.align.batch_layout import BatchMap, BatchMaps, Load
from llmdebug_nb.align.fit import Fit, Move, span_text
from llmdebug_nb.align.sequence import TELLING, agreement
from llmdebug_nb.core.errors import CorruptDumpError, TensorLookupError
from llmdebug_nb.core.kernels.relative import relative_l2
from llmdebug_nb.core.paths import any_layer
from llmdebug_nb.core.records import Record, Summary, summed

_FITS = 0.25  # largest relative L2 error in a right layout: bugs and rounding to 4 bits included
_SAME = 0.02  # the same if only the values show that the two belong together
_TIES = 4.0  # a layout must be this many times better than an earlier, simpler one
_CLOSE = 1e-6  # relative; statistics and errors this close count as equal
_MOST_GROUPS = 512  # heads that a fused tensor is split into
_MOST_STARTS = 64  # offsets at which a part is looked for, along one axis
_MOST_LAYOUTS = 400  # layouts that are tried for one pair
_HUGE = torch.finfo(torch.float32).max / 2  # entries of masks are larger; clamped to this
_QUANTISED = ("int8", "uint8", "int16", "int32")

UNSEEN = "a part of it; which one can't be told without values"

Shape = tuple[int, ...]


class LayoutFinder:
    """Finds the layouts of pairs, and remembers them for similar pairs."""

    def __init__(
        self, sides: tuple[list[Record], list[Record]], load: tuple[Load, Load] | None
    ) -> None:
        self._load = load
        self._batches = BatchMaps(sides, load)
        self._weights: dict[str, list[Record]] = {}  # mine's, by module
        for record in sides[1]:
            if record.site.role == "weight":
                self._weights.setdefault(record.site.path, []).append(record)
        self._known: dict[Hashable, Fit] = {}
        self._batch_fits: dict[tuple[BatchMap, BatchMap | None, tuple[Shape, Shape]], list[Fit]]
        self._batch_fits = {}
        self._last: tuple[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] | None = None

    def fit(self, golden: Record, mine: Record, fused: bool = False) -> Fit | None:
        """Return the fit that brings two tensors to one shape.

        None if they have the same layout, or if no layout is found. ``fused``: one module holds
        parts of the other.
        """
        a, b, s = golden.summary, mine.summary, golden.site
        divided = _divided(golden, mine)
        if divided is not None:
            return divided
        if s.role == "weight" and b.dtype in _QUANTISED and a.dtype not in _QUANTISED:
            return self._dequantised(golden, mine)
        by_tokens = self._by_tokens(golden, mine) if s.role in ("input", "output") else None
        if by_tokens is not None:
            return by_tokens
        if a.shape == b.shape:
            # One class of module has one layout: a transposed tensor is a bug there.
            if golden.op == mine.op or len(a.shape) < 2:
                return None
            known = s.role == "weight" and (a.shape, b.shape, any_layer(s.path)) in self._known
            return self._of_same_size(golden, mine) if known or _same_elements(a, b) else None
        if math.prod(a.shape) == math.prod(b.shape):
            return self._of_same_size(golden, mine)
        other = mine.site
        places = any_layer(s.path), any_layer(other.path), other.rank, s.role, s.slot
        changed = [(x, y) for x, y in zip(a.shape, b.shape, strict=False) if x != y]
        parts = _parts(a.shape, b.shape, s.role == "weight")
        sharded = s.rank != other.rank
        return self._best(("part", *places, *changed), golden, mine, parts, fused or sharded)

    def agree(self, golden: Record, mine: Record) -> bool:
        """Tell whether two tensors hold the same values; False without values."""
        fit = self.fit(golden, mine)
        error = self._error(golden, mine, fit or Fit(""))
        return error is not None and error < _SAME

    def relaid(self, generation: int, step: int) -> bool:
        """Tell whether the batches of a step differ in the rows or the places of tokens."""
        maps = (self._batches.of(generation, each) for each in (step, 0))
        return any(found is not None for found in maps)

    def _by_tokens(self, golden: Record, mine: Record) -> Fit | None:
        """Return the fit that the batch maps of the step explain."""
        s = golden.site
        batch = self._batches.of(s.generation, s.step)
        prefill = self._batches.of(s.generation, 0)
        if batch is None:
            if prefill is None or golden.summary.shape == mine.summary.shape:
                return None
            batch = prefill.later()
        shapes = golden.summary.shape, mine.summary.shape
        key = batch, prefill, shapes
        if key not in self._batch_fits:
            self._batch_fits[key] = [
                fit for begun in batch.fits(*shapes, prefill) for fit in _completed(begun, *shapes)
            ]
        fits = self._batch_fits[key]
        if len(fits) == 1:
            return fits[0]
        return self._best((s.path, s.role, s.slot, *key), golden, mine, fits, sure=True)

    def _of_same_size(self, golden: Record, mine: Record) -> Fit | None:
        a, b = golden.summary, mine.summary
        key = a.shape, b.shape, any_layer(golden.site.path)
        sure = agreement(a, b) >= TELLING
        fit = self._best(key, golden, mine, _layouts(a.shape, b.shape), sure)
        return fit if fit is not None and fit.golden + fit.mine else None

    def _dequantised(self, golden: Record, mine: Record) -> Fit | None:
        """Return the fit that multiplies mine's weight by the scale recorded beside it."""
        scale = self._beside(mine, "scale")
        if scale is None or scale.payload is None or self._load is None:
            return None
        offset = self._beside(mine, "offset", "zero")
        load = self._load[1]
        zero = None if offset is None or offset.payload is None else load(offset)
        spread = moves.dequantised(load(scale), zero)
        says = f"dequantised: {'w * scale' if offset is None else '(w - offset) * scale'}"
        fits = [Fit(says, (), (spread,))]
        a, b = golden.summary.shape, mine.summary.shape
        if a != b or a[0] == a[-1]:
            fits.append(Fit(f"{says}, transposed", (), (spread, lambda x: x.t())))
        return self._best(None, golden, mine, fits, sure=False)

    def _beside(self, weight: Record, *names: str) -> Record | None:
        """Return a weight of the same module whose slot contains one of the names."""
        others = self._weights.get(weight.site.path, ())
        return next((r for r in others if any(n in r.site.slot for n in names)), None)

    def _best(
        self, key: Hashable, golden: Record, mine: Record, fits: Iterable[Fit], sure: bool
    ) -> Fit | None:
        """Return the fit with the smallest error; without values, the one known for ``key``.

        ``sure``: the two are known to belong together. Then the likeliest fit is taken even
        without values.
        """
        known = self._known.get(key)
        if known is not None:
            return known
        errors: list[tuple[float, Fit]] = []
        for fit in itertools.islice(fits, _MOST_LAYOUTS):
            error = self._error(golden, mine, fit)
            if error is None:
                assumed = replace(fit, says=f"{fit.says}, assumed" if fit.whole else UNSEEN)
                return assumed if sure else None
            errors.append((error, fit))
            if error == 0.0:
                break
        if not errors:
            return None
        least = min(error for error, _ in errors)
        best = next(fit for error, fit in errors if error <= least * _TIES)
        if least > _FITS:
            return best if sure else None
        if key is not None and sum(error <= least * _TIES + _CLOSE for error, _ in errors) == 1:
            self._known[key] = best
        return best

    def _error(self, golden: Record, mine: Record, fit: Fit) -> float | None:
        """Return the relative L2 error in this layout.

        None if the values were not kept, inf if the shapes do not match.
        """
        tensors = self._read(golden, mine)
        if tensors is None:
            return None
        try:
            g, m = fit(*tensors)
        except ValueError:
            return math.inf
        return relative_l2(g, m) if g.shape == m.shape and g.numel() else math.inf

    def _read(self, golden: Record, mine: Record) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return both tensors as finite float64, or None. The last pair read is kept."""
        if self._load is None or any(r.payload is None or r.kept for r in (golden, mine)):
            return None
        key = golden.id, mine.id
        if self._last is None or self._last[0] != key:
            loads = self._load
            try:
                pair = loads[0](golden).to(torch.float64), loads[1](mine).to(torch.float64)
            except (CorruptDumpError, TensorLookupError, RuntimeError):
                return None
            g, m = (x.nan_to_num(0.0).clamp(-_HUGE, _HUGE) for x in pair)
            self._last = key, (g, m)
        return self._last[1]


def _completed(fit: Fit, golden: Shape, mine: Shape) -> Iterator[Fit]:
    """Yield fits that extend one until tensors of these shapes have equal shapes."""
    try:
        pair = fit(torch.empty(golden, device="meta"), torch.empty(mine, device="meta"))
    except ValueError:
        return
    a, b = (tuple(x.shape) for x in pair)
    if a == b:
        yield fit
        return
    rests = _layouts(a, b) if math.prod(a) == math.prod(b) else _parts(a, b, False)
    for rest in rests:
        yield Fit(f"{fit.says}; {rest.says}", (*fit.golden, *rest.golden), (*fit.mine, *rest.mine))


def _same_elements(golden: Summary, mine: Summary) -> bool:
    """Tell whether two tensors of one dtype may hold the same elements in another order."""
    a, b = ((s.min, s.max, s.dtype) for s in (golden, mine))
    if a != b or golden.min == golden.max:
        return False
    gaps = (
        (getattr(golden, name) or 0.0) - (getattr(mine, name) or 0.0) for name in ("l2norm", "mean")
    )
    return all(abs(gap) <= _CLOSE * (golden.l2norm or 0.0) for gap in gaps)


def _divided(golden: Record, mine: Record) -> Fit | None:
    """Return the layout that compares a sum with a mean: the sum is divided by its count."""
    sums = summed(golden.site.slot), summed(mine.site.slot)
    if sums[0] == sums[1] or golden.summary.numel != mine.summary.numel:
        return None
    divisions = [(moves.divided(one[1]),) if one else () for one in sums]
    says = " and ".join(
        f"{side}'s is the sum over {one[1]}"
        for side, one in zip(("golden", "mine"), sums, strict=True)
        if one
    )
    to_shape = moves.viewed(golden.summary.shape)
    return Fit(f"{says}, divided before comparing", divisions[0], (*divisions[1], to_shape))


def _layouts(golden: Shape, mine: Shape) -> Iterator[Fit]:
    """Yield layouts of equal size: reshaped, transposed, heads flattened or split."""
    same = golden == mine
    yield Fit("" if same else "reshaped", () if same else (moves.viewed(mine),), whole=True)
    sides = [("golden", golden, mine)]
    if len(golden) != len(mine):
        sides.append(("mine", mine, golden))
    for turned, shape, other in sides:
        if not 2 <= len(shape) <= 4:
            continue
        orders = sorted(itertools.permutations(range(len(shape))), key=_displaced)
        for order in orders[1:]:
            if not _merges(tuple(shape[a] for a in order), other):
                continue
            matrices = len(shape) == len(other) == 2
            says = "transposed" if matrices else f"axes {order} of {turned}"
            if len(shape) != len(other):
                says += ", then flattened" if len(shape) > len(other) else ", then split"
            done = moves.permuted(order), moves.viewed(other)
            ours = turned == "golden"
            yield Fit(says, done if ours else (), () if ours else done, whole=True)


def _displaced(order: tuple[int, ...]) -> int:
    """Count the axes that a permutation moves."""
    return sum(axis != place for place, axis in enumerate(order))


def _merges(shape: Shape, other: Shape) -> bool:
    """Tell whether merging or splitting adjacent axes turns one shape into the other."""
    if len(shape) == len(other):
        return shape == other
    ends = [
        set(itertools.accumulate((n for n in sizes if n != 1), lambda a, b: a * b))
        for sizes in (shape, other)
    ]
    return ends[0] <= ends[1] or ends[1] <= ends[0]


def _parts(golden: Shape, mine: Shape, weight: bool) -> Iterator[Fit]:
    """Yield the layouts in which one tensor is a part of the other, contiguous ones first.

    A weight may be transposed as well.
    """
    if len(golden) != len(mine):
        return
    turns: list[tuple[str, Shape, tuple[Move, ...]]] = [("", mine, ())]
    if weight and len(mine) == 2:
        turns.append((", transposed", mine[::-1], (moves.permuted((1, 0)),)))
    for find in (_blocks, _interleaved):
        for says, shape, before in turns:
            for fit in find(golden, shape, weight):
                yield replace(fit, says=fit.says + says, mine=(*before, *fit.mine))


def _blocks(golden: Shape, mine: Shape, weight: bool) -> Iterator[Fit]:
    """Yield the contiguous blocks of the larger tensor, along every axis that differs."""
    axes = [axis for axis in range(-len(golden), 0) if golden[axis] != mine[axis]]
    choices = []
    for axis in axes:
        large, small = max(golden[axis], mine[axis]), min(golden[axis], mine[axis])
        if not small:
            return
        # features come in equal blocks, tokens may start anywhere
        equal = weight or axis == -1 or large - small >= _MOST_STARTS
        starts = range(0, large - small + 1, math.gcd(large, small) if equal else 1)
        choices.append(starts[:_MOST_STARTS])
    for chosen in itertools.product(*choices):
        cuts: tuple[list[Move], list[Move]] = [], []
        says = []
        for axis, start in zip(axes, chosen, strict=True):
            side, length = int(golden[axis] < mine[axis]), min(golden[axis], mine[axis])
            cuts[side].append(moves.narrowed(axis, start, length))
            part = f"{span_text(start, length)} of {max(golden[axis], mine[axis])}"
            says.append(f"{part} along axis {axis} of {('golden', 'mine')[side]}")
        yield Fit("; ".join(says), tuple(cuts[0]), tuple(cuts[1]))


def _interleaved(golden: Shape, mine: Shape, weight: bool) -> Iterator[Fit]:
    """Yield the parts that take an equal share of each group (head), if one axis differs."""
    axes = [axis for axis in range(-len(golden), 0) if golden[axis] != mine[axis]]
    if len(axes) != 1:
        return
    axis = axes[0]
    side, small, large = int(golden[axis] < mine[axis]), *sorted((golden[axis], mine[axis]))
    common = math.gcd(large, small)
    for groups in range(2, min(common, _MOST_GROUPS) + 1):
        if common % groups:
            continue
        size, share = large // groups, small // groups
        for start in range(0, size - share + 1, math.gcd(size, share)):
            move = (moves.grouped(axis, groups, start, share),)
            of = f"of each {size} along axis {axis} of {('golden', 'mine')[side]}"
            yield Fit(f"{span_text(start, share)} {of}", () if side else move, move if side else ())
