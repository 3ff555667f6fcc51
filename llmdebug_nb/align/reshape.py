"""How the tensors of a pair lie: transposed, heads flattened, a part of a fused one, rows of a batch, a shard, quantised.

What may be is told by shapes and statistics; where values are kept they decide, once for all pairs that lie alike.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from llmdebug_nb.align import fit as moves
from llmdebug_nb.align.fit import Fit
from llmdebug_nb.align.sequence import TELLING, agreement
from llmdebug_nb.align.tokens import Frame, Frames, Load
from llmdebug_nb.core.errors import CorruptDumpError, TensorLookupError
from llmdebug_nb.core.paths import any_layer
from llmdebug_nb.core.records import Record, Summary, summed

if TYPE_CHECKING:
    import torch

_FITS = 0.25  # largest relative L2 error of two tensors that hold the same, bugs and rounding to 4 bits included
_SAME = 0.02  # the same, where only the values say that the two belong together
_TIES = 4.0  # one way must be so much better than another that is shorter to say
_MOST_GROUPS, _MOST_STARTS, _MOST_WAYS = 512, 64, 400
_INTEGERS = ("int8", "uint8", "int16", "int32")

UNSEEN = "a part of it; which one can't be told without values"

Shape = tuple[int, ...]


class Fitter:
    """Finds how the tensors of pairs lie, and remembers it for the next ones."""

    def __init__(
        self, sides: tuple[list[Record], list[Record]], load: tuple[Load, Load] | None
    ) -> None:
        self._load = load
        self._frames = Frames(sides, load)
        self._weights: dict[str, list[Record]] = {}
        for record in sides[1]:
            if record.site.role == "weight":
                self._weights.setdefault(record.site.path, []).append(record)
        self._known: dict[Any, Fit] = {}
        self._ways: dict[tuple[Frame, Frame | None, tuple[Shape, Shape]], list[Fit]] = {}

    def fit(self, golden: Record, mine: Record, fused: bool = False) -> Fit | None:
        """Return how two tensors are brought to one shape, or None where they lie alike, or nothing is found."""
        a, b, s = golden.summary, mine.summary, golden.site
        divided = _divided(golden, mine)
        if divided is not None:
            return divided
        if s.role == "weight" and b.dtype in _INTEGERS and a.dtype not in _INTEGERS:
            return self._dequantised(golden, mine)
        framed = self._framed(golden, mine) if s.role in ("input", "output") else None
        if framed is not None:
            return framed
        if a.shape == b.shape and golden.op == mine.op:
            return None  # one kind of module lays its tensors out in one way: what is turned there is a bug
        if a.shape == b.shape:
            known = s.role == "weight" and (a.shape, b.shape, any_layer(s.path)) in self._known
            return (
                self._of_same_size(golden, mine)
                if len(a.shape) > 1 and (known or _same_elements(a, b))
                else None
            )
        if math.prod(a.shape) == math.prod(b.shape):
            return self._of_same_size(golden, mine)
        sharded = golden.site.rank != mine.site.rank
        apart = [(x, y) for x, y in zip(a.shape, b.shape, strict=False) if x != y]
        key = (
            "part",
            any_layer(s.path),
            any_layer(mine.site.path),
            mine.site.rank,
            s.role,
            s.slot,
            *apart,
        )
        return self._best(
            key, golden, mine, _parts(a.shape, b.shape, s.role == "weight"), sure=fused or sharded
        )

    def agree(self, golden: Record, mine: Record) -> bool:
        """Tell whether two tensors hold the same, as laid out in `fit`; False where it can't be seen."""
        fitted = self.fit(golden, mine)
        error = self._error(golden, mine, fitted or Fit(""))
        return error is not None and error < _SAME

    def _framed(self, golden: Record, mine: Record) -> Fit | None:
        s = golden.site
        frame = self._frames.of(s.generation, s.step)
        first = self._frames.of(s.generation, 0)
        if frame is None:
            if first is None or golden.summary.shape == mine.summary.shape:
                return None
            frame = first.later()
        shapes = golden.summary.shape, mine.summary.shape
        if (key := (frame, first, shapes)) not in self._ways:
            found = frame.fits(*shapes, first)
            self._ways[key] = [way for begun in found for way in _completed(begun, *shapes)]
        ways = self._ways[key]
        if len(ways) == 1:
            return ways[0]
        return self._best((golden.site.path, s.role, s.slot, *key), golden, mine, ways, sure=True)

    def relaid(self, generation: int, step: int) -> bool:
        """Tell whether the two runs were given their tokens in other places, or other ones beside them."""
        return (
            self._frames.of(generation, step) is not None
            or self._frames.of(generation, 0) is not None
        )

    def _of_same_size(self, golden: Record, mine: Record) -> Fit | None:
        a, b = golden.summary, mine.summary
        key = a.shape, b.shape, any_layer(golden.site.path)
        found = self._best(
            key, golden, mine, _layouts(a.shape, b.shape), sure=agreement(a, b) >= TELLING
        )
        return found if found is not None and found.golden + found.mine else None

    def _dequantised(self, golden: Record, mine: Record) -> Fit | None:
        beside = {name: next((r for r in self._weights.get(mine.site.path, ()) if any(n in r.site.slot for n in names)), None)
                  for name, names in (("scale", ("scale",)), ("offset", ("offset", "zero")))}  # fmt: skip
        scale = beside["scale"]
        if scale is None or scale.payload is None or self._load is None:
            return None
        offset = beside["offset"]
        read = self._load[1]
        spread = moves.dequantised(
            read(scale), None if offset is None or offset.payload is None else read(offset)
        )
        formula = "(w - offset) * scale" if offset is not None else "w * scale"
        ways = [Fit(f"dequantised: {formula}", (), (spread,)),
                Fit(f"dequantised: {formula}, transposed", (), (spread, lambda x: x.t()))]  # fmt: skip
        ways = ways[
            : 1
            if golden.summary.shape == mine.summary.shape
            and golden.summary.shape[0] != golden.summary.shape[-1]
            else 2
        ]
        return self._best(None, golden, mine, ways, sure=False)

    def _best(
        self, key: Any, golden: Record, mine: Record, ways: Iterable[Fit], sure: bool
    ) -> Fit | None:
        """Return the way in which the two agree best; where values can't say, the one found for others that lie like them.

        ``sure``: something else says that they belong together, so without values the likeliest way is taken.
        """
        known = self._known.get(key)
        if known is not None:
            return known
        errors: list[tuple[float, Fit]] = []
        for way in itertools.islice(ways, _MOST_WAYS):
            error = self._error(golden, mine, way)
            if error is None:
                return (
                    replace(way, says=f"{way.says}, assumed" if way.whole else UNSEEN)
                    if sure
                    else None
                )
            errors.append((error, way))
            if error == 0.0:
                break
        if not errors:
            return None
        least = min(error for error, _ in errors)
        best = next(way for error, way in errors if error <= least * _TIES)
        if least > _FITS:
            return best if sure else None
        if key is not None and sum(error <= least * _TIES + 1e-6 for error, _ in errors) == 1:
            self._known[key] = best
        return best

    def _error(self, golden: Record, mine: Record, way: Fit) -> float | None:
        """Return |m - g| / |g| in the middle of a search, None if the values are not there, inf where they don't fit."""
        if self._load is None or any(
            r.payload is None or r.kept is not None for r in (golden, mine)
        ):
            return None
        tensors = self._read(golden, mine)
        if tensors is None:
            return None
        try:
            g, m = way(*tensors)
        except ValueError:
            return math.inf
        if g.shape != m.shape or not g.numel():
            return math.inf
        size = float(g.norm())
        error = float((m - g).norm())
        return error / size if size > 0 and error == error else 0.0 if error == 0 else math.inf

    def _read(self, golden: Record, mine: Record) -> tuple[torch.Tensor, torch.Tensor] | None:
        import torch

        key = golden.id, mine.id
        if getattr(self, "_last", (None,))[0] != key:
            assert self._load is not None
            try:
                g, m = (
                    load(r).to(torch.float64)
                    for load, r in zip(self._load, (golden, mine), strict=True)
                )
            except (CorruptDumpError, TensorLookupError, RuntimeError):
                return None
            fine = torch.finfo(torch.float32).max / 2  # masks
            self._last = key, tuple(x.nan_to_num(0.0).clamp(-fine, fine) for x in (g, m))
        return self._last[1]  # type: ignore[return-value]


def _completed(way: Fit, golden: Shape, mine: Shape) -> Iterator[Fit]:
    """Yield a way that brings tensors of these shapes to one; where an axis is still larger on one side, with its parts."""
    import torch

    try:
        shapes = [
            tuple(x.shape)
            for x in way(torch.empty(golden, device="meta"), torch.empty(mine, device="meta"))
        ]
    except ValueError:
        return
    if shapes[0] == shapes[1]:
        yield way
        return
    same_size = math.prod(shapes[0]) == math.prod(shapes[1])
    for rest in (
        _layouts(shapes[0], shapes[1]) if same_size else _parts(shapes[0], shapes[1], False)
    ):
        yield Fit(f"{way.says}; {rest.says}", (*way.golden, *rest.golden), (*way.mine, *rest.mine))


def _same_elements(golden: Summary, mine: Summary) -> bool:
    """Tell whether two tensors of one dtype may hold the same elements in another order."""
    if (golden.min, golden.max, golden.dtype) != (
        mine.min,
        mine.max,
        mine.dtype,
    ) or golden.min == golden.max:
        return False
    gaps = (
        (getattr(golden, name) or 0.0) - (getattr(mine, name) or 0.0) for name in ("l2norm", "mean")
    )
    return all(abs(gap) <= 1e-6 * (golden.l2norm or 0.0) for gap in gaps)


def _divided(golden: Record, mine: Record) -> Fit | None:
    """Return how a sum that has yet to be divided, to be the mean that the other side is, is held against it."""
    sums = summed(golden.site.slot), summed(mine.site.slot)
    if sums[0] == sums[1] or golden.summary.numel != mine.summary.numel:
        return None
    sides = []
    for one, shape in zip(sums, (None, golden.summary.shape), strict=True):
        sides.append(
            (
                *((moves.divided(one[1]),) if one else ()),
                *((moves.viewed(shape),) if shape is not None else ()),
            )
        )
    says = " and ".join(
        f"{side}'s is the sum over {one[1]}"
        for side, one in zip(("golden", "mine"), sums, strict=True)
        if one
    )
    return Fit(f"{says}, which its reader divides", sides[0], sides[1])


def _layouts(golden: Shape, mine: Shape) -> Iterator[Fit]:
    """Yield ways in which tensors of as many elements may lie: reshaped, transposed, heads flattened or split."""
    yield Fit(
        "" if golden == mine else "reshaped",
        () if golden == mine else (moves.viewed(mine),),
        whole=True,
    )
    for turned, shape, other in (("golden", golden, mine), ("mine", mine, golden)):
        if not 2 <= len(shape) <= 4 or (turned == "mine" and len(golden) == len(mine)):
            continue
        orders = sorted(
            itertools.permutations(range(len(shape))),
            key=lambda o: sum(a != i for i, a in enumerate(o)),
        )
        for order in orders[1:]:
            if _merges(tuple(shape[a] for a in order), other):
                done = moves.permuted(order), moves.viewed(other)
                says = (
                    "transposed" if len(order) == 2 == len(other) else f"axes {order} of {turned}"
                )
                says += (
                    ""
                    if len(golden) == len(mine)
                    else ", then flattened"
                    if len(shape) > len(other)
                    else ", then split"
                )
                yield Fit(
                    says,
                    done if turned == "golden" else (),
                    () if turned == "golden" else done,
                    whole=True,
                )


def _merges(shape: Shape, other: Shape) -> bool:
    """Tell whether one shape comes of the other by merging or splitting axes that are next to each other."""
    ends = [
        set(itertools.accumulate((n for n in sizes if n != 1), lambda a, b: a * b))
        for sizes in (shape, other)
    ]
    return ends[0] <= ends[1] or ends[1] <= ends[0] if len(shape) != len(other) else shape == other


def _parts(golden: Shape, mine: Shape, weight: bool) -> Iterator[Fit]:
    """Yield ways in which one tensor may be a part of the other, contiguous ones first; a weight may lie transposed, too."""
    if len(golden) != len(mine):
        return
    turns: list[tuple[str, Shape, tuple[Any, ...]]] = [("", mine, ())]
    if weight and len(mine) == 2:
        turns.append((", transposed", mine[::-1], (moves.permuted((1, 0)),)))
    for find in (_blocks, _interleaved):
        for says, shape, before in turns:
            for way in find(golden, shape, weight):
                yield replace(way, says=way.says + says, mine=(*before, *way.mine))


def _blocks(golden: Shape, mine: Shape, weight: bool) -> Iterator[Fit]:
    """Yield the blocks of the larger along every axis in which they differ."""
    axes = [axis for axis in range(-len(golden), 0) if golden[axis] != mine[axis]]
    choices = []
    for axis in axes:
        large, small = max(golden[axis], mine[axis]), min(golden[axis], mine[axis])
        if not small:
            return
        whole = (
            weight or axis == -1 or large - small >= _MOST_STARTS
        )  # features come in equal blocks, tokens anywhere
        choices.append(
            range(0, large - small + 1, math.gcd(large, small) if whole else 1)[:_MOST_STARTS]
        )
    for starts in itertools.product(*choices):
        sides: tuple[list[Any], list[Any]] = [], []
        said = []
        for axis, start in zip(axes, starts, strict=True):
            side, length = int(golden[axis] < mine[axis]), min(golden[axis], mine[axis])
            sides[side].append(moves.narrowed(axis, start, length))
            where = f"{start}-{start + length - 1}" if length > 1 else str(start)
            said.append(
                f"{where} of {max(golden[axis], mine[axis])} along axis {axis} of {('golden', 'mine')[side]}"
            )
        yield Fit("; ".join(said), tuple(sides[0]), tuple(sides[1]))


def _interleaved(golden: Shape, mine: Shape, weight: bool) -> Iterator[Fit]:
    """Yield the parts of the larger that take a share of each group (head) along the one axis in which they differ."""
    axes = [axis for axis in range(-len(golden), 0) if golden[axis] != mine[axis]]
    if len(axes) != 1:
        return
    axis = axes[0]
    side, small, large = int(golden[axis] < mine[axis]), *sorted((golden[axis], mine[axis]))
    common = math.gcd(large, small)
    for groups in range(2, min(common, _MOST_GROUPS) + 1):
        if common % groups:
            continue
        per, share = large // groups, small // groups
        for start in range(0, per - share + 1, math.gcd(per, share)):
            move = (moves.grouped(axis, groups, start, share),)
            where = f"{start}-{start + share - 1}" if share > 1 else str(start)
            says = f"{where} of each {per} along axis {axis} of {('golden', 'mine')[side]}"
            yield Fit(says, () if side else move, move if side else ())
