"""Factors of channels that one program moved from a weight into the next one.

Who quantises divides a norm, or the rows of a weight, by factors, and multiplies the columns of the
weights that take its channels by them: SmoothQuant, AWQ and their kin. The model stays the same,
though its weights and what lies between them do not. The factors are told by the weights alone. A
weight that takes such channels without its factors is wrong; then the others tell, or other layers.

G. Xiao et al.: SmoothQuant. 2023. J. Lin et al.: AWQ. 2023.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace

import torch

from llmdebug_nb.align.batch_layout import Load
from llmdebug_nb.align.fit import Fit, Move
from llmdebug_nb.align.pairs import Pair
from llmdebug_nb.core import constants
from llmdebug_nb.core.errors import CorruptDumpError, TensorLookupError
from llmdebug_nb.core.layers import layer_of
from llmdebug_nb.core.paths import any_layer, is_operator, module_of

_SAYS = "its channels have factors that one weight gives and the next one takes back"


@dataclass(slots=True)
class _Module:
    """The pairs of a module that holds weights, and the factors of its channels.

    ``gives``, ``takes``: what mine's outputs are times golden's, and its inputs, float64[channels].
    None for 1. ``content``: what tells mine's input.
    """

    path: str
    vectors: list[Pair] = field(default_factory=list)
    matrix: Pair | None = None
    inputs: list[Pair] = field(default_factory=list)
    outputs: list[Pair] = field(default_factory=list)
    gives: torch.Tensor | None = None
    takes: torch.Tensor | None = None

    @property
    def content(self) -> Hashable:
        return next((content for pair in self.inputs if (content := _content(pair))), None)


def unfolded(pairs: Sequence[Pair], load: tuple[Load, Load] | None) -> list[Pair]:
    """Return the pairs with the layouts that take such factors back."""
    if load is None:
        return list(pairs)
    modules: dict[tuple[int, str], _Module] = {}
    for pair in pairs:
        site = pair.either.site
        if pair.golden is None or pair.mine is None or is_operator(site.path):
            continue
        module = modules.setdefault((site.rank, site.path), _Module(site.path))
        shape = pair.golden.summary.shape
        if site.role == "weight" and pair.golden.payload and pair.mine.payload:
            if len(shape) == 1:
                module.vectors.append(pair)
            elif len(shape) == 2:
                module.matrix = module.matrix or pair
        elif site.role in ("input", "output"):
            (module.inputs if site.role == "input" else module.outputs).append(pair)
    ranks: dict[tuple[int, str], list[_Module]] = defaultdict(list)
    for (rank, path), module in modules.items():
        if module.vectors or module.matrix:
            ranks[rank, layer_of(path)].append(module)
    folds = _Folds(load)
    for layer in ranks.values():
        folds.add(layer)
    for layer in ranks.values():
        folds.add_forgotten(layer)
    return folds.taken_back(pairs, modules) if folds.any else list(pairs)


class _Folds:
    """The factors that were found."""

    def __init__(self, load: tuple[Load, Load]) -> None:
        self._load = load
        self._kinds: set[tuple[str, str]] = set()  # modules that give and take, in any layer
        # what lies between matrices that give and take factors: golden's ids, the factors' inverse
        self._between: list[tuple[range, torch.Tensor]] = []
        self.any = False

    def add(self, layer: Sequence[_Module]) -> None:
        """Find the factors within a layer. ``layer``: its modules, in order."""
        for place, maker in enumerate(layer):
            factors = self._given(maker)
            if factors is None:
                continue
            rest = [m for m in layer[place + 1 :] if m.takes is None and m.matrix is not None]
            takers = [m for m in rest if self._takes(m, factors)]
            known = {m.content for m in takers}
            for taker in (m for m in rest if m in takers or m.content in known - {None}):
                self._fold(maker, taker, factors)

    def add_forgotten(self, layer: Sequence[_Module]) -> None:
        """Give factors to what takes those of its kind in other layers, and not in this one."""
        for place, maker in enumerate(layer):
            takers = [
                m for m in layer[place + 1 :]
                if (any_layer(maker.path), any_layer(m.path)) in self._kinds and m.takes is None
            ]  # fmt: skip
            factors = self._given(maker) if takers and maker.gives is None else None
            for taker in takers if factors is not None else ():
                self._fold(maker, taker, factors)

    def _fold(self, maker: _Module, taker: _Module, factors: torch.Tensor | None) -> None:
        maker.gives = taker.takes = factors
        self._kinds.add((any_layer(maker.path), any_layer(taker.path)))
        self.any = True
        if maker.matrix is not None and maker.outputs and taker.inputs and factors is not None:
            first, last = maker.outputs[0].either.id, taker.inputs[0].either.id
            self._between.append((range(first + 1, last), 1 / factors))

    def _given(self, maker: _Module) -> torch.Tensor | None:
        """Return what mine's channels are times golden's, None if they are the same.

        A vector, a norm or a bias, tells it exactly; rows of a matrix but for their rounding.
        """
        found = [_ratio(*both) for pair in maker.vectors if (both := self._values(pair))]
        exact = next((each for each in found if _differ(each)), None)
        both = self._values(maker.matrix) if maker.matrix is not None else None
        if both is None:
            return None if maker.matrix is not None else exact
        rows = _rows(both[1], both[0] if maker.takes is None else both[0] / maker.takes)
        if not _differ(rows):
            return None
        same = exact is not None and exact.shape == rows.shape and _follow(exact, rows)
        return exact if same else rows

    def _takes(self, taker: _Module, factors: torch.Tensor) -> bool:
        """Tell whether mine's columns are golden's over these factors, apart from its rows'."""
        both = self._values(taker.matrix) if taker.matrix is not None else None
        if both is None or both[0].shape[1] != len(factors):
            return False
        golden, mine = both
        columns = torch.ones(len(factors), dtype=torch.float64)
        for _ in range(constants.FACTOR_ROUNDS):
            rows = _rows(golden, mine * columns)
            columns = _rows(golden.t(), (mine * rows[:, None]).t())
        return bool((columns > 0).all() and (factors > 0).all()) and _follow(columns, factors)

    def _values(self, pair: Pair) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return both weights in one shape, float64; None if they are as good as equal."""
        golden, mine = pair.golden, pair.mine
        if golden is None or mine is None or _are_alike(pair):
            return None
        try:
            both = self._load[0](golden), self._load[1](mine)
            g, m = both if pair.fit is None else pair.fit(*both)
        except (CorruptDumpError, TensorLookupError, ValueError):
            return None
        return (g.double(), m.double()) if g.shape == m.shape else None

    def taken_back(
        self, pairs: Sequence[Pair], modules: dict[tuple[int, str], _Module]
    ) -> list[Pair]:
        """Return the pairs with layouts that take the factors back."""
        moves: dict[Hashable, list[tuple[torch.Tensor, int]]] = defaultdict(list)
        for module in modules.values():
            matrix = [module.matrix] if module.matrix is not None else []
            if module.gives is not None:
                back = 1 / module.gives
                weights = {_weight(pair): 0 for pair in matrix}
                weights |= {_weight(pair): -1 for pair in module.vectors}
                for key, axis in weights.items():
                    moves[key].append((back, axis))
                moves |= {_content(pair): [(back, -1)] for pair in module.outputs}
            if module.takes is not None:
                for pair in matrix:
                    moves[_weight(pair)].append((module.takes, -1))
                moves |= {_content(pair): [(1 / module.takes, -1)] for pair in module.inputs}
        moves.pop(None, None)
        return [
            _scaled(pair, taken)
            if (taken := moves.get(_weight(pair)) or moves.get(_content(pair)))
            else self._in_heads(pair)
            for pair in pairs
        ]

    def _in_heads(self, pair: Pair) -> Pair:
        """Return the pair of a tensor between two weights whose channels lie in heads, scaled."""
        golden = pair.golden
        for ids, back in self._between if golden is not None else ():
            shape = golden.summary.shape if golden is not None else ()
            if golden is None or golden.id not in ids or len(shape) < 3:
                continue
            for axis in (-2, -3):  # of the heads
                if shape[axis] * shape[-1] != len(back) or (both := self._values(pair)) is None:
                    continue
                factors = back.reshape(shape[axis], *[1] * (-2 - axis), shape[-1])
                plain, scaled = ((x - both[0]).norm() for x in (both[1], both[1] * factors))
                if float(scaled) < float(plain):
                    return _moved(pair, (functools.partial(_product, factors),))
        return pair


def _content(pair: Pair) -> Hashable:
    """Return what tells mine's tensor, wherever it is seen; None if that is not known."""
    golden, mine = pair.golden, pair.mine
    if golden is None or mine is None or mine.summary.fingerprint is None:
        return None
    return mine.site.rank, mine.summary.fingerprint


def _weight(pair: Pair) -> Hashable:
    """Return what tells golden's weight where its module or an operator in that takes it."""
    golden, mine = pair.golden, pair.mine
    known = golden is not None and mine is not None and golden.site.role in ("weight", "input")
    if golden is None or not known or golden.summary.fingerprint is None:
        return None
    return golden.site.rank, module_of(golden.site.path), golden.summary.fingerprint


def _scaled(pair: Pair, by: Sequence[tuple[torch.Tensor, int]]) -> Pair:
    """Return a pair whose layout multiplies mine by factors along axes."""
    shape = pair.either.summary.shape
    by = [(factors, axis) for factors, axis in by if shape and shape[axis] == len(factors)]
    return _moved(pair, [functools.partial(_times, factors, axis) for factors, axis in by])


def _moved(pair: Pair, moves: Sequence[Move]) -> Pair:
    if not moves:
        return pair
    fit = pair.fit or Fit("")
    grain = fit.grain and functools.partial(_grain, fit.grain, moves)
    says = "; ".join(filter(None, (fit.says, _SAYS)))
    fit = replace(fit, says=says, mine=(*fit.mine, *moves), grain=grain, whole=False, computes=True)
    return replace(pair, fit=fit)


def _times(factors: torch.Tensor, axis: int, x: torch.Tensor) -> torch.Tensor:
    shape = [1] * x.dim()
    shape[axis] = -1
    return x * factors.reshape(shape).to(x.dtype if x.is_floating_point() else torch.float64)


def _product(factors: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return x * factors.to(x.dtype)


def _grain(
    grain: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    moves: Sequence[Move],
    golden: torch.Tensor,
    mine: torch.Tensor,
) -> torch.Tensor:
    made = grain(golden, mine)
    for move in moves:
        made = move(made)
    return made.abs()


def _rows(golden: torch.Tensor, mine: torch.Tensor) -> torch.Tensor:
    """Return what golden's rows are times mine's, by least squares; 1 for rows of zeros."""
    square = (mine * mine).sum(1)
    return torch.where(square > 0, (golden * mine).sum(1) / square, 1.0)


def _ratio(golden: torch.Tensor, mine: torch.Tensor) -> torch.Tensor:
    return torch.where(golden != 0, mine / golden, 1.0)


def _follow(found: torch.Tensor, factors: torch.Tensor) -> bool:
    """Tell whether factors explain others, apart from one that is common to all."""
    plain, rest = found.log(), found.log() - factors.log()
    return float(rest.std()) * constants.LAYOUT_TIE < float(plain.std())


def _differ(factors: torch.Tensor) -> bool:
    """Tell whether factors are more than rounding, and not all one: that is a scale."""
    return bool(factors.isfinite().all() and (factors > 0).all()) and (
        float(factors.log().std()) > constants.SAME_VALUES
    )


def _are_alike(pair: Pair) -> bool:
    """Tell cheaply whether two weights have the same size and extremes: then none has factors."""
    golden, mine = pair.golden, pair.mine
    if golden is None or mine is None or (pair.fit is not None and pair.fit.grain is not None):
        return False
    figures = [(s.l2norm, s.min, s.max) for s in (golden.summary, mine.summary)]
    return all(
        a is not None and b is not None and abs(a - b) <= constants.SAME_VALUES * abs(a)
        for a, b in zip(*figures, strict=True)
    )
