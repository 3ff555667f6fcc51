"""Products with a quantised weight: mine's output against the product of mine's own factors.

How far a quantised weight moves an output depends on the input, so a limit on that has to be wide.
But where inputs and weights were recorded, the output can be computed. Golden's values tell that
its module multiplies its input by its weight and adds a bias. So must mine's, with its own input
and the weight that its integers stand for. What is left is the rounding of the product, and of the
input, if mine rounds that, too: as much as rounding it to 8 bits makes.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass

import torch

from llmdebug_nb.align.pairs import Pair
from llmdebug_nb.align.quantised import FLOATS, is_scale
from llmdebug_nb.comparison import metrics
from llmdebug_nb.comparison.measured import Measured, error_of
from llmdebug_nb.comparison.metrics import Metrics
from llmdebug_nb.comparison.noise import floor
from llmdebug_nb.core import constants
from llmdebug_nb.core.dtypes import DTYPE_NAMES, DTYPES, SINGLE, epsilon, is_floating
from llmdebug_nb.core.paths import any_layer, is_operator
from llmdebug_nb.core.records import CallKey, Record

ERROR, NOISE = "product_error", "product_noise"  # figures of a row
Load = Callable[[Record], torch.Tensor]
_Module = tuple[int, str]  # its rank and path
Both = tuple[torch.Tensor, torch.Tensor]  # golden's and mine's


@dataclass(frozen=True, slots=True)
class Product:
    """The pairs of the factors of an output: input and weight, and the biases that it may have.

    ``scales``: of mine's module, each of one number: one may be that of its input.
    """

    given: Pair
    weight: Pair
    biases: tuple[Pair, ...]
    scales: tuple[Record, ...]

    @property
    def key(self) -> Hashable:
        """What its figures depend on, besides the output."""
        return tuple(
            (p.golden and p.golden.payload, p.mine and p.mine.payload, p.fit and p.fit.key)
            for p in (self.given, self.weight, *self.biases)
        ) + tuple(scale.payload for scale in self.scales)

    def figures(self, golden: torch.Tensor, mine: torch.Tensor, load: tuple[Load, Load]) -> Metrics:
        """Return the figures of an output, both of one shape; none if golden's is no product.

        ``product_error``: the relative error of mine's output against the product of its factors,
        the input as it is or rounded to 8 bits. ``product_noise``: what such rounding makes.
        """
        given, weight = _values(self.given, load), _values(self.weight, load)
        eps = max(epsilon(DTYPE_NAMES.get(golden.dtype, "")), SINGLE)
        for bias in (*(_values(pair, load) for pair in self.biases), None):
            for turned in (True, False):
                own = _product(given[0], weight[0], bias and bias[0], turned, golden)
                if own is None or _apart(own, golden) > floor(eps, given[0].shape[-1]):
                    continue
                made, *rounded = (
                    _product(x, weight[1], bias and bias[1], turned, mine)
                    for x in (given[1], *self._rounded(load))
                )
                if made is None:
                    return {}
                found = [made, *(each for each in rounded if each is not None)]
                errors = [_apart(each, mine) for each in found]
                nearest = found[errors.index(min(errors))]
                # of what the module states, one may be the scale of its weight
                usual = (*found[: len(found) - len(self.scales)], nearest)
                return {ERROR: min(errors), NOISE: max(_apart(made, each) for each in usual)}
        return {}

    def _rounded(self, load: tuple[Load, Load]) -> list[torch.Tensor]:
        """Return mine's input rounded to 8 bits by one scale, by one for each token, and as stated.

        To floats of 8 bits, if the weight has such.
        """
        assert self.given.golden is not None
        assert self.given.mine is not None
        golden, x = load[0](self.given.golden), load[1](self.given.mine).float()
        names = {
            record.summary.dtype for record in (self.weight.golden, self.weight.mine) if record
        }
        tiny = DTYPES.get(next(iter(names & set(FLOATS)), ""))
        most = constants.BYTE_STEPS if tiny is None else torch.finfo(tiny).max
        found = []
        sizes = x.abs().max(), x.abs().amax(-1, keepdim=True)
        scales = [size / most for size in sizes] + [load[1](each).float() for each in self.scales]
        for scale in (torch.where(each > 0, each, 1.0) for each in scales):
            steps = (x / scale).round() if tiny is None else (x / scale).to(tiny).float()
            fit = self.given.fit
            found.append(steps * scale if fit is None else fit(golden, steps * scale)[1].float())
        return found


class Products:
    """The outputs that may be products of an input and a weight that one side quantises.

    ``any``: one side quantises a weight at all.
    """

    def __init__(self, pairs: Iterable[Pair]) -> None:
        self._of: dict[Hashable, Product] = {}  # by the payloads of an output
        weights: dict[_Module, Pair] = {}
        biases: dict[_Module, list[Pair]] = defaultdict(list)
        given: dict[CallKey, Pair] = {}
        scales: dict[_Module, list[Record]] = defaultdict(list)  # of mine
        for pair in pairs:
            if pair.mine is not None and _is_number(pair.mine):
                scales[pair.mine.site.rank, pair.mine.site.path].append(pair.mine)
            site = pair.either.site
            module = site.rank, site.path
            if not _has_values(pair) or is_operator(site.path):
                continue
            if site.role == "weight" and pair.fit is not None and pair.fit.grain is not None:
                matrix = len(pair.either.summary.shape) == 2
                weights[module] = pair if matrix else weights.get(module, pair)
            if site.role == "weight" and len(pair.either.summary.shape) == 1:
                biases[module].append(pair)
            if site.role == "input":
                given.setdefault(site.key, pair)
            elif site.role == "output" and site.key in given and module in weights:
                mine = weights[module].mine
                stated = tuple(scales[mine.site.rank, mine.site.path]) if mine is not None else ()
                product = Product(given[site.key], weights[module], tuple(biases[module]), stated)
                self._of.setdefault(_payloads(pair), product)
        self.any = bool(weights)

    def of(self, pair: Pair) -> Product | None:
        """Return the product that an output is, wherever it is seen; None for other tensors."""
        return self._of.get(_payloads(pair)) if pair.either.site.role == "output" else None


def settle(rows: Iterable[Measured]) -> None:
    """Allow modules of a kind less if what they do with their inputs in most layers is known."""
    kinds: dict[Hashable, list[Measured]] = defaultdict(list)
    for row in rows:
        if row.metrics and ERROR in row.metrics and row.pair.mine is not None:
            kinds[row.pair.mine.op, any_layer(row.pair.mine.site.path)].append(row)
    for of_kind in kinds.values():
        errors = [_figure(row, ERROR) for row in of_kind]
        rounded = [_figure(row, NOISE) for row in of_kind]
        if statistics.median_low(errors) < constants.EXACT_PRODUCT * statistics.median(rounded):
            for row in of_kind:
                noise = constants.EXACT_PRODUCT * _figure(row, NOISE)
                row.metrics = {**(row.metrics or {}), NOISE: noise}


def _figure(row: Measured, name: str) -> float:
    return float((row.metrics or {}).get(name) or 0.0)


def _is_number(record: Record) -> bool:
    """Tell whether a weight is a scale of one number, whose value is known."""
    summary, site = record.summary, record.site
    known = record.payload is not None and summary.numel == 1 and is_floating(summary.dtype)
    return site.role == "weight" and known and is_scale(site.slot)


def _has_values(pair: Pair) -> bool:
    return all(
        record is not None and record.payload is not None and record.kept is None
        for record in (pair.golden, pair.mine)
    )


def _payloads(pair: Pair) -> Hashable:
    return pair.golden and pair.golden.payload, pair.mine and pair.mine.payload


def _values(pair: Pair, load: tuple[Load, Load]) -> Both:
    """Return both tensors of a pair in one shape, float32. Raises ValueError."""
    assert pair.golden is not None
    assert pair.mine is not None
    both = load[0](pair.golden), load[1](pair.mine)
    golden, mine = both if pair.fit is None else pair.fit(*both)
    return golden.float(), mine.float()


def _product(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    turned: bool,
    like: torch.Tensor,
) -> torch.Tensor | None:
    """Return x @ weight + bias in the shape of an output; None if the shapes do not go together.

    ``turned``: the weight has a row for each element of the output.
    """
    matrix = weight.t() if turned else weight
    if weight.dim() != 2 or x.shape[-1:] != matrix.shape[:1]:
        return None
    made = x.reshape(-1, x.shape[-1]) @ matrix
    if made.numel() != like.numel() or (bias is not None and bias.numel() != made.shape[1]):
        return None
    return (made if bias is None else made + bias).reshape(like.shape)


def _apart(golden: torch.Tensor, mine: torch.Tensor) -> float:
    return error_of(metrics.compare(golden, mine.to(golden.dtype)))
