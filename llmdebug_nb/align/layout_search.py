"""Find by value how one tensor lies in another: alignments from the shapes, confirmed by samples.

A layout is tried on some hundred elements. Where one tensor has a part of an axis of the other, all
blocks of it are tried at once: the distances between slices along that axis, measured on a sample
of their elements, sum up to the distance of each block. So the time is linear in the longer axis.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from llmdebug_nb.align import fit as moves
from llmdebug_nb.align.axes import Alignment, Part, Shape, View, alignments, parts
from llmdebug_nb.align.fit import Fit, Move, span_text
from llmdebug_nb.core import constants
from llmdebug_nb.core.kernels.relative import ratio

Pick = Part | np.ndarray  # of an axis: a regular part, or places in any order (int64)


@dataclass(frozen=True, slots=True)
class Layout:
    """An alignment, and which part of each axis the small tensor has.

    ``error``: on the sample; ``seen``: the values of the large tensor there, as bytes.
    """

    alignment: Alignment
    picks: Mapping[int, Pick] = field(default_factory=dict)
    error: float = math.inf
    seen: bytes = b""

    def places(self, groups: Sequence[np.ndarray]) -> np.ndarray:
        """Return the offsets in the large flat tensor of places along the small one's groups."""
        return self.alignment.large.offsets(
            [_at(self.picks.get(i), index) for i, index in enumerate(groups)]
        )

    def fit(self, golden: Shape, mine: Shape) -> Fit:
        """Return the fit that brings the larger tensor to the shape of the smaller one."""
        turned = math.prod(golden) < math.prod(mine)
        shape, side = (golden, "mine") if turned else (mine, "golden")
        own, other = self.alignment.small, self.alignment.large
        if not (self.picks or self.alignment.moved):
            same = golden == mine
            return Fit(
                "" if same else "reshaped", () if same else (moves.viewed(mine),), whole=True
            )
        steps: list[Move] = [
            moves.viewed(other.axes), moves.permuted(other.order), moves.viewed(other.sizes)
        ]  # fmt: skip
        steps += [_taken(axis, pick, own.sizes[axis]) for axis, pick in self.picks.items()]
        steps.append(moves.viewed(tuple(own.axes[a] for a in own.order)))
        steps.append(moves.permuted(tuple(np.argsort(own.order).tolist())))
        steps.append(moves.viewed(shape))
        says = self._says(golden if not turned else mine, side, shape)
        done = tuple(steps)
        return Fit(says, () if turned else done, done if turned else (), whole=not self.picks)

    def _says(self, large: Shape, side: str, small: Shape) -> str:
        """Describe the layout. ``side``: the larger tensor's."""
        own, other = self.alignment.small, self.alignment.large
        words = []
        for group, pick in self.picks.items():
            axes = sorted({_axis(other, a, large) - len(large) for a in other.groups[group]})
            where = f"axis {axes[0]}" if len(axes) == 1 else f"axes {tuple(axes)}"
            part = _part_text(pick, own.sizes[group], other.sizes[group])
            words.append(f"{part} along {where} of {side}")
        if self.alignment.moved:
            back, order = self.alignment.orders
            order = order if list(order) != sorted(order) else tuple(np.argsort(back).tolist())
            then = len(own.axes) - len(other.axes)
            split = f", then {'split' if then > 0 else 'flattened'}" if then else ""
            matrices = len(own.axes) == len(other.axes) == 2
            words.append("transposed" if matrices else f"axes {order} of {side}{split}")
        return "; ".join(words)


def search(
    golden: torch.Tensor, mine: torch.Tensor, rows: bool, sure: bool
) -> tuple[Fit, bool] | None:
    """Return the fit of two tensors (float32), and whether no other is as good; None if none is.

    ``rows``: the first axis of the larger one may be in any order (tokens, requests). ``sure``: the
    two belong together; then the best fit is returned even if it is bad.
    """
    small, large = (golden, mine) if golden.numel() < mine.numel() else (mine, golden)
    flat = small.reshape(-1).numpy(), large.reshape(-1).numpy()
    found: list[Layout] = []
    tries = _Tries(*flat, rows).layouts(tuple(small.shape), tuple(large.shape))
    for layout in itertools.islice(tries, constants.LAYOUTS_TRIED):
        found.append(layout)
        if layout.error <= constants.CERTAIN_LAYOUT:
            break
    if not found:
        return None
    least = min(layout.error for layout in found)
    near = [layout for layout in found if layout.error <= least * constants.LAYOUT_TIE]
    unclear = least > constants.CERTAIN_LAYOUT and any(
        layout.seen != near[0].seen for layout in near
    )
    if not sure and (
        least > constants.WRONG_LAYOUT or (unclear and least > constants.UNCLEAR_LAYOUT)
    ):
        return None
    return near[0].fit(tuple(golden.shape), tuple(mine.shape)), not unclear


def proposed(golden: Shape, mine: Shape) -> tuple[Fit, int] | None:
    """Return the simplest fit that the shapes allow, and how many they allow; None if none."""
    small, large = sorted((mine, golden), key=math.prod)
    found = [each for split in (False, True) for each in alignments(small, large, split)]
    if not found:
        return None
    sizes = zip(found[0].small.sizes, found[0].large.sizes, strict=True)
    choices = {i: list(parts(a, b)) for i, (a, b) in enumerate(sizes) if a != b}
    first: dict[int, Pick] = {group: each[0] for group, each in choices.items()}
    count = len(found) if not choices else math.prod(map(len, choices.values()))
    return Layout(found[0], first).fit(golden, mine), count


def order_along(small: torch.Tensor, large: torch.Tensor) -> np.ndarray | None:
    """Return the row of the second matrix that each row of the first is, int64, each once."""
    if len(small) * len(large) > constants.ROW_PAIRS:
        return None
    columns = np.unique(np.linspace(0, small.shape[1] - 1, constants.SLICES).astype(np.int64))
    return _one_to_one(small.numpy()[:, columns], large.numpy()[:, columns])


def runs_text(order: np.ndarray) -> str:
    """Return the first runs of places: ``5-9, 0-4``."""
    ends = np.flatnonzero(np.diff(order) != 1) + 1
    runs = [span_text(int(run[0]), len(run)) for run in np.split(order, ends)]
    most = constants.INDICES_SHOWN
    return ", ".join(runs[:most]) + (f" and {len(runs) - most} more" if len(runs) > most else "")


class _Tries:
    """Tries layouts of one flat tensor in another on the same sample of elements."""

    def __init__(self, small: np.ndarray, large: np.ndarray, rows: bool) -> None:
        self._small, self._large, self._rows = small, large, rows
        self._rng = np.random.default_rng(0)  # the same answer every time
        self._where = self._rng.integers(0, len(small), constants.LAYOUT_SAMPLE)
        self._own = small[self._where]
        self._size = _spread(self._own)

    def layouts(self, small: Shape, large: Shape) -> Iterator[Layout]:
        """Yield the layouts of these shapes, with their errors on the sample."""
        for split in (False, True):
            rest = []
            for alignment in alignments(small, large, split):
                tries = self._tried(alignment)
                yield from itertools.islice(tries, constants.LAYOUTS_IN_TURN)
                rest.append(tries)
            yield from itertools.chain.from_iterable(rest)

    def _tried(self, alignment: Alignment) -> Iterator[Layout]:
        places = alignment.small.places(self._where)
        for picks in self._picks(alignment):
            other = self._large[Layout(alignment, picks).places(places)]
            error = ratio(float(np.linalg.norm(other - self._own.astype(np.float64))), self._size)
            yield Layout(alignment, picks, error, other.tobytes())

    def _picks(self, alignment: Alignment) -> Iterator[dict[int, Pick]]:
        sizes = alignment.small.sizes, alignment.large.sizes
        groups = alignment.parts
        if not groups:
            yield {}
            return
        regular = {g: alignment.parts_of(g) for g in groups}
        # one axis is searched as a whole, which is quick; that with few irregular parts
        telling = [
            g for g in groups if math.prod(sizes[0]) // sizes[0][g] >= constants.FEWEST_ELEMENTS
        ]
        blocks = {g: sum(p.share == sizes[0][g] for p in regular[g]) for g in groups}
        group = min(telling or groups, key=lambda g: len(regular[g]) - blocks[g])
        others = [g for g in groups if g != group]
        for chosen in itertools.product(*(regular[g] for g in others)):
            fixed: dict[int, Pick] = dict(zip(others, chosen, strict=True))
            for pick in self._slices(Layout(alignment, fixed), group):
                yield fixed | {group: pick}

    def _slices(self, fixed: Layout, group: int) -> Iterator[Pick]:
        """Yield which slices of the large tensor along a group the small one may have."""
        own = fixed.alignment.small.sizes
        size, whole = own[group], fixed.alignment.large.sizes[group]
        rest = math.prod(own) // size
        if rest < constants.FEWEST_ELEMENTS:
            yield from fixed.alignment.parts_of(group)
            return
        width = max(
            constants.FEWEST_ELEMENTS,
            min(constants.SLICES, rest, constants.AXIS_ELEMENTS // whole),
        )
        places = [self._rng.integers(0, n, width)[None] for n in own]
        count = max(2, min(size, constants.SLICES, constants.AXIS_ELEMENTS // whole))
        some = np.unique(np.linspace(0, size - 1, count).astype(np.int64))
        places[group] = some[:, None]
        a = self._small[fixed.alignment.small.offsets(places)]
        free = Layout(fixed.alignment, {g: p for g, p in fixed.picks.items() if g != group})
        places[group] = np.arange(whole)[:, None]
        b = self._large[free.places(places)]
        far = _distances(a, b)
        starts = fixed.alignment.starts(group)
        total = np.sum([far[i, starts + at] for i, at in enumerate(some)], axis=0)
        if len(starts):
            nearly = constants.SAME_DISTANCE * float(np.square(a, dtype=np.float64).sum())
            nearest = np.argmax(total <= total.min() + nearly)
            yield Part(size, int(starts[nearest]), whole)
        if (
            size > 1
            and self._rows
            and 0 in fixed.alignment.large.groups[group]
            and size * whole <= constants.AXIS_ELEMENTS
        ):
            places[group] = np.arange(size)[:, None]
            order = _one_to_one(self._small[fixed.alignment.small.offsets(places)], b)
            if order is not None:
                yield order
        yield from (part for part in fixed.alignment.parts_of(group) if part.share != size)


def _distances(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return the squared distances between rows [n, k] and rows [m, k], float64[n, m]."""
    a, b = a.astype(np.float64), b.astype(np.float64)
    far: np.ndarray = np.square(a).sum(1)[:, None] + np.square(b).sum(1)[None] - 2 * (a @ b.T)
    return far.clip(min=0.0)


def _one_to_one(a: np.ndarray, b: np.ndarray) -> np.ndarray | None:
    """Return for each row of a the nearest row of b, int64; of equal rows each is taken once.

    None if there are fewer near rows than needed.
    """
    order = np.zeros(len(a), np.int64)
    free = np.ones(len(b), bool)
    chunk = max(1, constants.AXIS_ELEMENTS // len(b))
    for start in range(0, len(a), chunk):
        for row, far in enumerate(_distances(a[start : start + chunk], b), start):
            place = int(far.argmin())
            if not free[place]:
                left = np.flatnonzero(free & (far <= far[place] * constants.LAYOUT_TIE**2))
                if not len(left):
                    return None
                place = int(left[0])
            order[row], free[place] = place, False
    return order


def _spread(values: np.ndarray) -> float:
    """Return the norm of what is left of values without their mean.

    Values around 1 are near each other in any order; what tells them apart is the rest. Constant
    values have none, so nothing but equal values is near them.
    """
    values = values.astype(np.float64)
    return float(np.linalg.norm(values - values.mean()))


def _at(pick: Pick | None, index: np.ndarray) -> np.ndarray:
    if pick is None:
        return index
    places: np.ndarray = pick.at(index) if isinstance(pick, Part) else pick[index]
    return places


def _taken(axis: int, pick: Pick, size: int) -> Move:
    if not isinstance(pick, Part):
        return moves.taken(axis, torch.from_numpy(pick))
    if pick.share == size:
        return moves.narrowed(axis, pick.start, size)
    return moves.grouped(axis, size // pick.share, pick.start, pick.share)


def _part_text(pick: Pick, size: int, whole: int) -> str:
    if isinstance(pick, Part):
        of = f"of {whole}" if pick.share == size else f"of each {pick.size}"
        return f"{span_text(pick.start, pick.share)} {of}"
    return f"{runs_text(pick)} of {whole}"


def _axis(view: View, axis: int, shape: Shape) -> int:
    """Return the axis of a tensor that an axis of its view is, or is split from."""
    inner = math.prod(view.axes[axis + 1 :])
    ends = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
    return max(i for i, n in enumerate(shape) if n != 1 and ends[i] <= inner < ends[i] * n)
