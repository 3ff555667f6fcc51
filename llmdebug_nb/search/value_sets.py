"""Compare a tensor with those that calls of the other program compute, step by step.

One program calls ``softmax`` where another writes it in five lines. To tell which of the five is
wrong, golden's operator is replayed by the formula that torch itself has for it
(`Replayed.steps`), and each step's result is kept.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Iterator

import torch

from llmdebug_nb.comparison.differences import Difference
from llmdebug_nb.core import constants
from llmdebug_nb.core.dtypes import epsilon
from llmdebug_nb.core.identity import identifies_itself
from llmdebug_nb.core.kernels.masks import hidden
from llmdebug_nb.core.kernels.summary import summarize
from llmdebug_nb.replay.operators import CannotReplay
from llmdebug_nb.replay.runs import Runs


def is_reordered(row: Difference, runs: Runs) -> bool:
    """Tell whether mine's tensor of a row has the elements of golden's, but for order and signs."""
    golden, mine = row.pair.golden, row.pair.mine
    if golden is None or mine is None or golden.summary.numel != mine.summary.numel:
        return False
    limit = constants.OPERATORS_EPSILONS * max(epsilon(r.summary.dtype) for r in (golden, mine))
    try:
        theirs, ours = runs.golden.load(golden), runs.mine.load(mine)
    except CannotReplay:
        return False
    return Values([theirs]).hold(ours, limit)


class Values:
    """Tensors that others are compared with.

    The error of a tensor is relative to its spread, so that constants answer to nothing.
    """

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self._by_size: dict[int, list[tuple[float, torch.Tensor]]] = {}
        for tensor in tensors:
            shown = _shown(tensor)
            known = self._by_size.setdefault(shown.numel(), [])
            norm = float(shown.norm())
            # a formula passes most tensors on from step to step
            if not any(
                norm == other and torch.equal(shown, x)
                for other, x in known
                if shown.shape == x.shape
            ):
                known.append((norm, shown))

    def have(self, tensor: torch.Tensor, limit: float) -> bool:
        """Tell whether one of the tensors is this one, up to the order of axes.

        ``limit``: of the relative L2 error.
        """
        candidates = self._by_size.get(tensor.numel())
        if not candidates:
            return False
        shown = _shown(tensor)
        norm, spread = float(shown.norm()), float((shown - shown.mean()).norm())
        return any(
            abs(other - norm) <= limit * norm
            and any(float((g - m).norm()) < limit * spread for g, m in _layouts(known, shown))
            for other, known in candidates
        )

    def pad(self, tensor: torch.Tensor, limit: float) -> bool:
        """Tell whether a tensor is one of these with padding along one axis, or the other way.

        So are keys in a cache that is longer than what is in it, and the mask of one.
        """
        shown = _shown(tensor)
        return any(
            _is_padded(known, shown, limit)
            if size < shown.numel()
            else _is_padded(shown, known, limit)
            for size, sames in self._by_size.items()
            if size != shown.numel()
            for _, known in sames
        )

    def hold(self, tensor: torch.Tensor, limit: float) -> bool:
        """Tell whether the elements of a tensor are in one of these, in any order, but for signs.

        This also finds the rows of a sorted tensor, and half of its channels.
        """
        if not _is_dense(tensor):
            return False
        ours = _magnitudes(tensor)
        return any(_places(ours, theirs, limit) is not None for theirs in self._sorted)

    def cover(self, tensor: torch.Tensor, limit: float) -> bool:
        """Tell whether a tensor has the elements of several of these, and zeros besides.

        So have the result of a fused projection, and a cache that is longer than what is in it.
        """
        if not _is_dense(tensor):
            return False
        ours = _magnitudes(tensor)
        for theirs in self._sorted:
            if constants.FEWEST_FOUND <= len(theirs) <= len(ours):
                places = _places(theirs, ours, limit)
                if places is not None:
                    left = torch.ones(len(ours), dtype=torch.bool)
                    left[places] = False
                    ours = ours[left]
        return not len(ours)

    @functools.cached_property
    def _sorted(self) -> list[torch.Tensor]:
        """The numbers of each, the largest tensor first."""
        tensors = [x for known in self._by_size.values() for _, x in known]
        return sorted((_magnitudes(x) for x in tensors), key=len, reverse=True)


def _is_dense(tensor: torch.Tensor) -> bool:
    """Tell whether the numbers of a tensor, in any order, identify it, and none is masked."""
    if tensor.numel() < constants.FEWEST_FOUND or not identifies_itself(summarize(tensor)):
        return False
    return tensor.is_complex() or (tensor.is_floating_point() and hidden(tensor) is None)


def _magnitudes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements without their signs, sorted. Zeros are anywhere, so they are left out."""
    numbers = _shown(tensor).abs().flatten().sort().values
    return numbers[numbers > 0]


def _places(few: torch.Tensor, many: torch.Tensor, limit: float) -> torch.Tensor | None:
    """Return where sorted numbers are among others, each in its own place; None if not all are.

    None as well where chance would find them.
    """
    size = float(few.square().mean().sqrt()) if len(few) else 0.0
    if len(few) > len(many) or not size or few[0] == few[-1]:
        return None
    place = torch.arange(len(few))
    if len(few) == len(many):
        # of two samples of one distribution, the sorted numbers differ by about 1 / sqrt(n)
        error, spread = float((few - many).norm()), float((few - few.mean()).norm())
        telling = limit <= constants.SORTED_BY_CHANCE / len(few) ** 0.5
        return place if telling and error <= limit * spread else None
    if limit * len(many) > 1:  # any number is near one of so many
        return None
    near = limit * size
    at = torch.searchsorted(many, few - near)
    at = (at - place).cummax(0).values + place
    found = bool(at[-1] < len(many)) and bool((many[at] <= few + near).all())
    return at if found else None


def _shown(x: torch.Tensor) -> torch.Tensor:
    """Return a tensor in float64, with masked elements far below the others."""
    x = (torch.view_as_real(x) if x.is_complex() else x).to(torch.float64)
    places = hidden(x)
    if places is None:
        return x
    rest = x.masked_fill(places, 0.0)
    return rest.masked_fill(places, -2 * float(rest.abs().max()) or -1.0)


def _is_padded(few: torch.Tensor, many: torch.Tensor, limit: float) -> bool:
    """Tell whether a tensor is another one, up to the order of axes, at one end of an axis.

    Behind it, or in front of it, are zeros or what is masked.
    """
    few, many = few.squeeze(), many.squeeze()
    if few.dim() != many.dim() or few.dim() > constants.PERMUTED_AXES:
        return False
    for order in itertools.permutations(range(few.dim())):
        turned = few.permute(order)
        longer = [axis for axis, size in enumerate(turned.shape) if size != many.shape[axis]]
        if len(longer) != 1 or turned.shape[longer[0]] > many.shape[longer[0]]:
            continue
        axis, size = longer[0], turned.shape[longer[0]]
        rest = many.shape[axis] - size
        for held, empty in ((0, size), (rest, 0)):
            part, left = many.narrow(axis, held, size), many.narrow(axis, empty, rest)
            nothing = bool((left == 0).all()) or bool((left == many.min()).all())
            spread = float((part - part.mean()).norm())
            if nothing and float((turned - part).norm()) < limit * spread:
                return True
    return False


def _layouts(
    golden: torch.Tensor, mine: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    yield golden.flatten(), mine.flatten()
    golden, mine = golden.squeeze(), mine.squeeze()
    if sorted(golden.shape) != sorted(mine.shape) or golden.dim() > constants.PERMUTED_AXES:
        return
    for order in itertools.permutations(range(golden.dim())):
        turned = golden.permute(order)
        if turned.shape == mine.shape:
            yield turned, mine
