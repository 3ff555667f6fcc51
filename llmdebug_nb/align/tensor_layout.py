"""Find how the elements of one tensor lie in the other tensor of its pair.

Axes may be permuted, split and merged; one tensor may be some rows, one part of a fused tensor or
the shard of a rank; a weight may be quantised, a mask written otherwise. The shapes propose layouts
(`axes.py`), the values decide between them (`layout_search.py`), token ids decide on rows
(`batch_layout.py`). A decision holds for all similar pairs.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import replace

import torch

from llmdebug_nb.align import angles, masks, quantised, rounded
from llmdebug_nb.align import fit as moves
from llmdebug_nb.align.batch_layout import BatchMap, BatchMaps, Load
from llmdebug_nb.align.fit import Fit
from llmdebug_nb.align.layout_search import order_along, proposed, search
from llmdebug_nb.align.reordered import SAYS, Orders, is_within_heads
from llmdebug_nb.align.values import Tensors, Values
from llmdebug_nb.core import constants
from llmdebug_nb.core.dtypes import SINGLE, epsilon, is_floating
from llmdebug_nb.core.kernels.relative import ratio
from llmdebug_nb.core.paths import any_layer, extra_numbers, is_operator, module_of
from llmdebug_nb.core.records import Record, Summary, summed

UNSEEN = "a part of it; which one can't be told without values"
Shape = tuple[int, ...]


class LayoutFinder:
    """Finds the layouts of pairs, and remembers them for similar pairs."""

    def __init__(
        self, sides: tuple[list[Record], list[Record]], load: tuple[Load, Load] | None
    ) -> None:
        self._load = load
        self._batches = BatchMaps(sides, load)
        self._weights: tuple[dict[str, list[Record]], ...] = ({}, {})  # of each side, by module
        for weights, records in zip(self._weights, sides, strict=True):
            for record in records:
                if record.site.role == "weight":
                    weights.setdefault(record.site.path, []).append(record)
        self._read_as: dict[Hashable, str] = {}  # how weights of a kind are stored
        self._roundings = rounded.Roundings(sides, load)
        self._orders = Orders()
        self._shown: set[Hashable] = set()  # kinds of outputs that have shown their order
        self._weights_tell = False  # they are recorded: then no output has to show an order
        self._known: dict[Hashable, Fit] = {}
        self._learned: set[Shape] = set()  # of tensors of one shape that a layout is known of
        self._ordered: dict[Hashable, bool] = {}  # whether a layout keeps the order along each axis
        self._begun: dict[tuple[BatchMap, Shape, Shape], list[Fit]] = {}
        self._tensors = Tensors(load)
        self._last: tuple[tuple[int, int], Values] | None = None

    def fit(self, golden: Record, mine: Record, fused: bool = False) -> Fit | None:
        """Return the fit that brings two tensors to one shape.

        None if they have the same layout, or if no layout is found. ``fused``: one module holds
        parts of the other.
        """
        fit = self._in_order(golden, mine, fused)
        fit = self._rewritten(golden, mine, fit) or fit
        shapes = golden.summary.shape, mine.summary.shape
        longer = fit is None and shapes[0] != shapes[1]
        pair = self._tensors.both(golden, mine) if longer else None
        return fit if pair is None else moves.end_of_longer(pair[0].real, pair[1].real)

    def _in_order(self, golden: Record, mine: Record, fused: bool) -> Fit | None:
        """Return the fit of two tensors in which the rows of weights have golden's order."""
        a, b, s, other = golden.summary, mine.summary, golden.site, mine.site
        divided = _divided(golden, mine)
        if divided is not None or -1 in (*a.shape, *b.shape):
            return divided
        if a.shape != b.shape and not (a.numel and b.numel):
            return Fit("one is empty", (_emptied,), (_emptied,))
        stored = [quantised.stands_for(*pair) for pair in ((golden, mine), (mine, golden))]
        if s.role == "weight" and any(stored):
            return self._dequantised(golden, mine, stored[1])
        if rounded.stand_for_each_other(a, b):
            return self._roundings.fit(golden, mine)
        by_tokens = self._by_tokens(golden, mine) if s.role in ("input", "output") else None
        if by_tokens is not None:
            return by_tokens
        are_masks = masks.are_masks(a, b)
        if a.numel != b.numel and s.role in ("input", "output"):
            rows = self._batches.rows(s.generation, s.step)
            for_all = moves.broadcast(a.shape, b.shape, rows)
            if for_all is not None:
                forms = masks.fits() if are_masks else []
                tries = [for_all.then(form) for form in forms] or [for_all]
                return self._best(None, golden, mine, tries, sure=True)
        if masks.may_be_longer(a, b):
            pair = self._tensors.both(golden, mine)
            return None if pair is None else masks.cut(pair[0].read, pair[1].read)
        turned = a.shape != b.shape or _may_be_turned(golden, mine)
        if not (turned or are_masks or a.shape in self._learned):
            return None  # nearly all: it is not worth a key
        sharded = s.rank != other.rank
        part = fused, extra_numbers(s.path, other.path)
        key = (part, any_layer(s.path), any_layer(other.path), s.rank, other.rank, s.role, s.slot,
               a.shape, b.shape, s.role == "weight" or (s.generation, s.step))  # fmt: skip
        if are_masks:
            return self._best(key, golden, mine, masks.fits(), sure=False)
        if not turned and key not in self._known:
            return None
        one_row = a.shape[-1:] == b.shape[-1:] == (min(a.numel, b.numel),) and s.role != "weight"
        sure = fused or sharded or one_row  # the last token, of all those that the other run has
        found = self._best(key, golden, mine, [Fit("", whole=True)], sure)
        alike = a.shape != b.shape and _long(a.shape) == _long(b.shape)
        if found is None and alike and self._values(golden, mine) is not None:
            # Axes of size 1 move no element: the values that differ are those in the same places.
            return Fit("reshaped", (moves.viewed(b.shape),), whole=True)
        return found

    def _rewritten(self, golden: Record, mine: Record, fit: Fit | None) -> Fit | None:
        """Return the fit of two tensors if mine's has another form: golden's angles, or an order.

        ``fit``: one that keeps form and order. None if it will do. The order is that of a weight's
        rows; without weights, of the channels of heads in the first output of a kind. Modules of
        one path are one program: there, another order of the rows is a bug.
        """
        if module_of(golden.site.path) == module_of(mine.site.path):
            return None
        is_weight = golden.site.role == "weight"
        self._weights_tell = self._weights_tell or is_weight
        forms = [] if is_weight else list(angles.fits(golden.summary, mine.summary))
        shows = not is_weight and self._shows_order(golden, mine)
        if not (is_weight or self._orders or forms or shows):
            return None
        fit = fit or Fit("", whole=golden.summary.shape == mine.summary.shape)
        values = self._values(golden, mine, fit)
        if values is None or values.confirmed or not all(x.numel() for x in values.tensors):
            return None
        order = self.row_order(golden, mine) if is_weight else None
        if shows:
            order = _channel_order(*values.tensors)
        if order is not None:
            self._orders.learn(order)
        if not fit.whole or _similar(golden.summary, mine.summary, constants.WRONG_LAYOUT):
            forms.append(Fit("", whole=True))
        tries = (each for form in forms for each in self._reordered(values, form))
        found = min(tries, key=lambda each: each[0], default=(math.inf, fit))
        near = found[0] * constants.LAYOUT_TIE < values.error
        return fit.then(found[1]) if near else None

    def _reordered(self, values: Values, form: Fit) -> Iterator[tuple[float, Fit]]:
        """Yield the layouts of two tensors, one in another form, in golden's order, with errors."""
        moves = (Fit(SAYS, mine=(m,), whole=True) for m in self._orders.moves(values.shapes[1]))
        for begun in (Fit("", whole=True), *moves):
            fit = begun.then(form)
            moved = values.after(fit)
            g, m = moved.tensors
            if g.shape != m.shape and g.numel() == m.numel():
                found = search(g, m, False, False)
                if found is None or not found[0].keeps_order(*moved.shapes):
                    continue
                fit, moved = fit.then(found[0]), moved.after(found[0])
            # wrong angles are angles
            if moved.confirmed or (form.says and moved.error < constants.UNRELATED):
                yield moved.error, fit

    def _shows_order(self, golden: Record, mine: Record) -> bool:
        """Tell whether two outputs of modules may show in which order mine's channels are.

        One pair of a kind does, whatever it shows: all layers have one layout.
        """
        a, b, s, other = golden.summary, mine.summary, golden.site, mine.site
        kind = any_layer(s.path), any_layer(other.path), s.slot
        if self._weights_tell or s.role != "output" or kind in self._shown or is_operator(s.path):
            return False
        if len(b.shape) < 2 or a.shape[-1:] != b.shape[-1:] or a.numel != b.numel:
            return False
        tokens = math.prod(a.shape[:-1])
        if tokens < constants.FEWEST_ELEMENTS or not (
            is_floating(a.dtype) and is_floating(b.dtype)
        ):
            return False
        self._shown.add(kind)
        return _similar(a, b, constants.UNCLEAR_LAYOUT)

    def row_order(self, golden: Record, mine: Record) -> torch.Tensor | None:
        """Return which of golden's rows each row of mine is, int64[rows], if the order differs.

        Only what takes the tensors tells whether that is a layout or a bug.
        """
        values = self._values(golden, mine)
        if values is None or golden.summary.shape != mine.summary.shape or values.confirmed:
            return None
        g, m = values.tensors
        order = order_along(m.flatten(1), g.flatten(1)) if g.dim() > 1 else None
        if order is None:
            return None
        rows = torch.from_numpy(order)
        done = Values.of(g[rows], m)
        return rows if done.error * constants.LAYOUT_TIE < values.error and done.confirmed else None

    def agree(self, golden: Record, mine: Record) -> bool:
        """Tell whether two tensors hold the same values; False without values."""
        a, b = golden.summary, mine.summary
        coarse = max(map(_coarseness, (a, b))) > SINGLE
        limit = constants.UNCLEAR_LAYOUT if coarse else constants.SAME_VALUES
        if not (a.numel and b.numel) or (a.numel == b.numel and not _similar(a, b, limit)):
            return False
        values = self._nearest(golden, mine)
        return values is not None and values.error < limit

    def unrelated(self, golden: Record, mine: Record) -> bool:
        """Tell whether two tensors are further apart than golden and zeros in their layout."""
        fit = self._in_order(golden, mine, False)
        values = self._values(golden, mine, fit)
        return values is not None and values.error > constants.UNRELATED

    def distance(self, golden: Record, mine: Record, part: bool = False) -> float | None:
        """Return the relative L2 error of two tensors in the layout that fits best.

        ``part``: one of them may be any part of the other.
        None without values, if chance explains that they are near, or if the layout changes the
        order along an axis: heads repeated in turns are no layout of heads repeated one by one.
        """
        values = self._nearest(golden, mine, part)
        return values.error if values is not None and values.confirmed else None

    def _nearest(self, golden: Record, mine: Record, part: bool = False) -> Values | None:
        """Return two tensors in the layout that fits best; None if that changes the order.

        The order along each axis is golden's, or that of a weight.
        """
        fit = self._in_order(golden, mine, part) or Fit("")
        shapes = golden.summary.shape, mine.summary.shape
        key = *shapes, fit.key
        if key not in self._ordered:
            self._ordered[key] = fit.keeps_order(*shapes)
        values = self._values(golden, mine, fit) if self._ordered[key] else None
        if values is None or not values.confirmed:
            found = self._rewritten(golden, mine, fit)
            values = self._values(golden, mine, found) if found is not None else values
        return values

    def is_guess(self, golden: Record, mine: Record) -> bool:
        """Tell whether nothing tells how one of two tensors lies in the other, a larger one."""
        if golden.summary.numel == mine.summary.numel:
            return False
        fit = self.fit(golden, mine)
        return fit is None or not self.holds(golden, mine, fit)

    def holds(self, golden: Record, mine: Record, fit: Fit) -> bool:
        """Tell whether a fit is more than a guess: tokens or values confirm it."""
        if fit.shared or golden.summary.shape == mine.summary.shape:
            return True
        values = self._values(golden, mine, fit)
        return values is None or (values.confirmed and not values.whole_numbers)

    def values_of(self, record: Record, side: int) -> torch.Tensor | None:
        """Return the values of golden's (0) or mine's (1) tensor in float32, None if not kept."""
        tensor = self._tensors.of(record, side)
        return None if tensor is None else tensor.real

    def relaid(self, generation: int, step: int) -> bool:
        """Tell whether the batches of a step differ in the rows or the places of tokens."""
        of, unknown = self._batches.of, self._batches.are_unknown
        return any(of(generation, n) is not None or unknown(generation, n) for n in (step, 0))

    def _by_tokens(self, golden: Record, mine: Record) -> Fit | None:
        """Return the fit that the batch maps of the step explain."""
        s = golden.site
        batch = self._batches.of(s.generation, s.step)
        shapes = golden.summary.shape, mine.summary.shape
        if batch is None:
            prefill = self._batches.of(s.generation, 0)
            if prefill is None or shapes[0] == shapes[1]:
                return None
            batch = prefill.later()
        key = batch, *shapes
        if key not in self._begun:
            begun = self._begun[key] = list(batch.fits(*shapes))
            if len(begun) == 1 and len(set(_shapes_after(begun[0], *shapes))) == 1:
                self._known[key] = begun[0]
        if key in self._known:
            return self._known[key]
        own = s.path, s.role, s.slot, *key
        same_rank = len(shapes[0]) == len(shapes[1])
        return self._best(own, golden, mine, self._begun[key], sure=same_rank)

    def _lacks_tokens_alone(self, golden: Record, mine: Record, fit: Fit) -> bool:
        """Tell whether what takes no part in a fit are tokens that the other run was not given."""
        s = golden.site
        now, first = (self._batches.of(s.generation, step) for step in (s.step, 0))
        batches = [now, first.continued(s.step) if first is not None else None]  # caches hold all
        if s.role == "weight" or not any(batches):
            return False
        shapes = golden.summary.shape, mine.summary.shape
        places = [fit.places(side, shape) for side, shape in enumerate(shapes)]
        return any(
            batch is not None
            and all(
                some is None or batch.has_all(side, shapes[side], some)
                for side, some in enumerate(places)
            )
            for batch in batches
        )

    def _best(
        self, key: Hashable, golden: Record, mine: Record, begun: Sequence[Fit], sure: bool
    ) -> Fit | None:
        """Return the fit with the smallest error, or a simpler one that is about as good.

        ``begun``: fits, some of which have to be completed. ``sure``: the two are known to belong
        together; then the likeliest fit is taken even if nothing confirms it.
        """
        if key in self._known:
            known = self._known[key]
            return self._other_rows(golden, mine, known) or known
        found = [done for fit in begun if (done := self._completed(golden, mine, fit, sure))]
        if not found:
            return None
        least = min(error for error, *_ in found)
        near = [each for each in found if each[0] <= least * constants.LAYOUT_TIE]
        _, clear, best = near[0]
        if key is not None and clear and len(near) == 1:
            self._known[key] = best
            self._learned |= {golden.summary.shape} & {mine.summary.shape}
        return best if best.golden + best.mine else None

    def _other_rows(self, golden: Record, mine: Record, known: Fit) -> Fit | None:
        """Return the fit of two tensors of which one has other rows than those of its kind.

        Each expert is given tokens of its own. The values must be certain of it.
        """
        shapes = golden.summary.shape, mine.summary.shape
        if golden.site.role not in ("input", "output") or known.whole or known.shared:
            return None
        if shapes[0][-1:] != shapes[1][-1:]:
            return None
        values = self._values(golden, mine, known)
        apart = None if values is None or values.error <= constants.CERTAIN_LAYOUT else known
        whole = None if apart is None else self._values(golden, mine)
        found = None if whole is None else search(*whole.tensors, rows=True, sure=False)
        if whole is None or found is None or not found[1]:
            return None
        after = whole.after(found[0])
        return found[0] if after.confirmed and after.error <= constants.CERTAIN_LAYOUT else None

    def _completed(
        self, golden: Record, mine: Record, begun: Fit, sure: bool
    ) -> tuple[float, bool, Fit] | None:
        """Return the fit that extends one until both tensors have one shape.

        With its error, and whether no other fit is as good. None if there is none.
        """
        values = self._values(golden, mine, begun)
        if values is None:
            assumed = _assumed(golden.summary, mine.summary, begun, sure)
            return None if assumed is None else (0.0, False, assumed)
        g, m = values.tensors
        fit, clear = begun, True
        if g.shape != m.shape and (not (sure or begun.whole)):
            return None
        if g.shape != m.shape or not begun.golden + begun.mine:
            found = search(g, m, golden.site.role != "weight", sure)
            if found is None:
                return None
            fit, clear, values = begun.then(found[0]), found[1], values.after(found[0])
            if self._lacks_tokens_alone(golden, mine, fit):
                fit = replace(fit, shared=True)
        if not (sure or values.confirmed):
            return None
        return values.error, clear and values.confirmed, fit

    def _dequantised(self, golden: Record, mine: Record, side: int) -> Fit | None:
        """Return the fit that computes the float weight, with the scale recorded beside it.

        The first reading that is within half its steps, or else one that is clearly the nearest.
        ``side``: golden's weight is quantised (0) or mine's (1).
        """
        stored, other = ((golden, mine), (mine, golden))[side]
        read, floats = self._tensors.of(stored, side), self._tensors.of(other, 1 - side)
        if read is None or floats is None:
            return None
        fits = quantised.fits(read.read, floats.real, self._beside(stored, side), side)
        kind = stored.op, stored.summary.dtype, other.summary.dtype
        likely = self._read_as.get(kind, "")
        best, least = None, math.inf
        for fit in sorted(fits, key=lambda each: each.says != likely):
            values = self._values(golden, mine, fit)
            if values is None or values.error * constants.LAYOUT_TIE >= least:
                continue
            best, least = fit, values.error
            if values.error <= self._half_a_step(golden, mine, fit):
                self._read_as[kind] = fit.says
                break
        return best or rounded.by_least_squares(read.read, floats.real, side)

    def _half_a_step(self, golden: Record, mine: Record, fit: Fit) -> float:
        """Return the relative L2 error that half a step in every element of a weight makes."""
        pair = self._tensors.both(golden, mine)
        if pair is None or fit.grain is None:
            return 0.0
        float_weight = pair[0] if fit.mine else pair[1]
        steps = float(fit.grain(pair[0].read, pair[1].read).norm())
        return ratio(steps * constants.CHANNEL_GRAINS, float(float_weight.real.norm()))

    def _beside(self, weight: Record, side: int) -> list[tuple[str, torch.Tensor]]:
        """Return the other weights of a module, with their names, the one most alike first."""
        others = [r for r in self._weights[side].get(weight.site.path, ()) if r is not weight]
        others.sort(key=lambda r: -_begin_alike(r.site.slot, weight.site.slot))
        found = ((r.site.slot, self._tensors.of(r, side)) for r in others)
        return [(name, tensor.read) for name, tensor in found if tensor is not None]

    def _values(self, golden: Record, mine: Record, fit: Fit | None = None) -> Values | None:
        """Return the values of a pair in a layout, or None if there are none. Keeps the last."""
        unmoved = fit is None or not fit.golden + fit.mine
        key = golden.id, mine.id
        if unmoved and self._last is not None and self._last[0] == key:
            return self._last[1]
        pair = self._tensors.both(golden, mine)
        if pair is None:
            return None
        try:
            if fit is not None and not unmoved:
                return Values.of(*fit(pair[0].read, pair[1].read))
            self._last = key, Values.between(*pair)
        except (ValueError, RuntimeError):
            return None
        return self._last[1]


def _channel_order(golden: torch.Tensor, mine: torch.Tensor) -> torch.Tensor | None:
    """Return which of golden's channels each of mine's is, if each head has them in one order."""
    g, m = (x.reshape(-1, x.shape[-1]).T.contiguous() for x in (golden, mine))
    found = order_along(m, g) if g.shape == m.shape else None
    if found is None:
        return None
    order = torch.from_numpy(found)
    near = Values.of(g[order], m)
    is_near = near.confirmed and near.error * constants.LAYOUT_TIE < Values.of(g, m).error
    return order if is_near and is_within_heads(order) else None


def _may_be_turned(golden: Record, mine: Record) -> bool:
    """Tell whether two tensors of one shape may have different layouts.

    One class of module has one layout: a transposed tensor is a bug there.
    """
    long = _long(golden.summary.shape)
    if golden.op == mine.op or len(set(long)) == len(long):
        return False
    return _similar(golden.summary, mine.summary, constants.UNCLEAR_LAYOUT)


def _long(shape: Shape) -> Shape:
    return tuple(n for n in shape if n != 1)


def _begin_alike(name: str, other: str) -> int:
    """Return how many letters two names have in common, from the first on."""
    pairs = zip(name, other, strict=False)
    return len(list(itertools.takewhile(lambda letters: letters[0] == letters[1], pairs)))


def _emptied(x: torch.Tensor) -> torch.Tensor:
    return x.flatten()[:0]


def _coarseness(summary: Summary) -> float:
    return epsilon(summary.dtype) if is_floating(summary.dtype) else 0.0


def _shapes_after(fit: Fit, golden: Shape, mine: Shape) -> tuple[Shape, ...]:
    """Return the shapes of both tensors in a layout; () if it does not go with these shapes."""
    if not fit.golden + fit.mine:
        return golden, mine
    try:
        pair = fit(torch.empty(golden, device="meta"), torch.empty(mine, device="meta"))
    except (ValueError, NotImplementedError):
        return ()
    return tuple(tuple(x.shape) for x in pair)


def _similar(golden: Summary, mine: Summary, share: float) -> bool:
    """Tell whether two tensors may be within this share of each other, in any order.

    Both bounds follow from the relative L2 error (Cauchy-Schwarz), so they exclude nothing else.
    """
    norms, means = (golden.l2norm, mine.l2norm), (golden.mean, mine.mean)
    if None in (*norms, *means) or not all(map(math.isfinite, (*norms, *means))):  # type: ignore[arg-type]
        return True
    a, b = norms[0] or 0.0, norms[1] or 0.0
    size = share * max(a, b)
    gap = abs((means[0] or 0.0) - (means[1] or 0.0)) * math.sqrt(golden.numel)
    return abs(a - b) <= size and gap <= size


def _assumed(golden: Summary, mine: Summary, begun: Fit, sure: bool) -> Fit | None:
    """Return what shapes and statistics propose: the simplest layout, and how sure it is."""
    shapes = _shapes_after(begun, golden.shape, mine.shape)
    if len(set(shapes)) < 2:
        return begun if sure and shapes else None
    choice = proposed(*shapes)
    if choice is None:
        return None
    fit, count = begun.then(choice[0]), choice[1]
    if fit.whole:
        pairs = ((golden.min, mine.min), (golden.max, mine.max), (golden.l2norm, mine.l2norm))
        alike = _similar(golden, mine, constants.SAME_VALUES) and all(
            x is not None and y is not None and math.isclose(x, y, rel_tol=constants.SAME_VALUES)
            for x, y in pairs
        )
        # unrelated tensors agree to a share in one of the figures with about that probability
        certainty = (1 - constants.SAME_VALUES) / count
        return replace(fit, says=f"{fit.says}, assumed", certainty=certainty) if alike else None
    return replace(fit, says=UNSEEN, certainty=1 / count) if sure else None


def _divided(golden: Record, mine: Record) -> Fit | None:
    """Return the layout that compares a sum with a mean: the sum is divided by its count."""
    if golden.site.slot == mine.site.slot:
        return None
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
