"""Find what happened to golden's values in their places: rounded, scaled, shifted, clipped, masked.

Each function takes the two sides and returns a relation, or None.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator

import torch

from llmdebug_nb.core import constants, spans
from llmdebug_nb.core.dtypes import DTYPES, epsilon
from llmdebug_nb.core.kernels.relative import relative_l2
from llmdebug_nb.relation import evidence as e
from llmdebug_nb.relation.evidence import Relation, Sides, listed, nats, remaining

_ROUNDING = ("float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")


def fitted_factor(predicted: torch.Tensor, mine: torch.Tensor, limit: float) -> float:
    """Return the best factor by least squares; exactly 1 or -1 if that is within the limit."""
    size = float(predicted.dot(predicted))
    factor = float(predicted.dot(mine)) / size if size else math.nan
    near = [simple for simple in (1.0, -1.0) if abs(factor - simple) < limit]
    return near[0] if near else factor


def factor_words(sides: Sides, factor: float) -> tuple[str, str, str]:
    """Return the kind of a factor, ``times 0.125, which is 1 / sqrt(64)``, and the advice."""
    if factor == -1.0:
        return e.NEGATED, "negated", "look for a wrong sign or a difference taken the other way"
    for value, words, advice in _known_factors(sides):
        if abs(abs(factor) - value) < value * sides.limit:
            sign = "-" if factor < 0 else ""
            return e.SCALED, f"times {sign}{value:.6g}{words}", advice
    digits = min(max(3, math.ceil(-math.log10(sides.limit)) + 1), 6)  # those that noise leaves
    return e.SCALED, f"times {factor:.{digits}g}", "look for a scale that only one side applies"


def _known_factors(sides: Sides) -> Iterator[tuple[float, str, str]]:
    """Yield factors with a meaning, the most common ones first."""
    axes = {n: f"the size of {sides.axis(at)}" for at, n in enumerate(sides.mine.shape) if n > 2}
    for heads in sides.groups:
        for n in list(axes):
            if n % heads == 0 and n // heads > 2:
                axes.setdefault(n // heads, f"{n} / {heads} heads")
    root = "look at the scale by the square root of the size: left out, or applied twice"
    mean = "look for a scale that only one side applies, such as a mean where the other sums"
    for n, words in axes.items():
        yield n**0.5, f", the square root of {n}, {words}", root
        yield n**-0.5, f", 1 / sqrt({n}), {words}", root
        yield n, f", {words}", mean
        yield 1 / n, f", 1 / {n}, {words}", mean
    twice = "look for a term that is added twice, or for a factor of 2"
    yield 2.0, "", twice
    yield 0.5, "", twice
    for n in sides.groups:
        yield n, f", the number of heads or groups, {n}", mean
        yield 1 / n, f", 1 / {n}, one over the number of heads or groups", mean
    for n in range(3, constants.LARGEST_FACTOR + 1):
        yield 1 / n, f", 1 / {n}", ""
        yield n, "", ""


def rounded(sides: Sides, dtypes: tuple[str, str]) -> Relation | None:
    """Recognise golden's value rounded to a coarser dtype, also where that is within the limit."""
    for name in _ROUNDING:
        if name not in DTYPES or epsilon(name) <= epsilon(dtypes[0]):
            continue
        predicted = sides.golden_sample.to(DTYPES[name]).double()
        change, difference = predicted - sides.golden_sample, sides.sample - sides.golden_sample
        found = nats(change, difference, candidates=math.log(len(_ROUNDING)), centred=False)
        if found < constants.CERTAIN_NATS:
            continue
        error = remaining(sides.mine, sides.golden.to(DTYPES[name]))
        if error < sides.limit:
            advice = f"look for a conversion to {name}" if dtypes[1] != name else ""
            says = f"mine is golden's value rounded to {name}"
            return Relation(e.ROUNDED, says, advice, error)
    return None


def constant(sides: Sides) -> Relation | None:
    """Recognise one value everywhere."""
    low, high = (float(bound) + 0.0 for bound in sides.mine.aminmax())  # no -0
    if low != high or sides.mine.numel() < 2:
        return None
    first, last = (float(bound) for bound in sides.golden.aminmax())
    usual = f"{first:.6g} everywhere" if first == last else f"{first:.6g} to {last:.6g}"
    says = f"mine is {low:.6g} everywhere, golden is {usual}"
    return Relation(e.CONSTANT, says, "look for a value that is never filled in", 0.0)


def times(sides: Sides, factor: float) -> str:
    """Return an addition to a relation: ``, times 0.125``; "" for a factor of 1."""
    return "" if factor == 1.0 else f", {factor_words(sides, factor)[1]}"


def scaled(sides: Sides) -> Relation | None:
    """Recognise golden times a constant, -1 included."""
    factor = fitted_factor(sides.golden_sample, sides.sample, sides.limit)
    if factor == 1.0 or not 0.0 < abs(factor) < math.inf:
        return None
    error = sides.left_by(sides.golden_sample, sides.golden, factor, parameters=int(factor != -1.0))
    if error is None:
        return None
    kind, words, advice = factor_words(sides, factor)
    return Relation(kind, f"mine is golden's value {words}", advice, error)


def offset(sides: Sides) -> Relation | None:
    """Recognise golden plus a constant, and golden times a constant plus a constant."""
    g, m = sides.golden_sample, sides.sample
    middle = g - g.mean()
    slope = fitted_factor(middle, m - m.mean(), sides.limit)
    if not 0.0 < abs(slope) < math.inf:
        return None
    by = float((m - slope * g).mean())
    # a mean is as exact as the values' noise / sqrt(n), and as float32
    doubt = (
        constants.SAMPLE_SPREAD * float((m - slope * g - by).square().mean()) ** 0.5 / len(m) ** 0.5
    )
    whole = float(round(by))
    by = whole if abs(by - whole) <= max(doubt, constants.EXACT * abs(by)) else by
    error = sides.left_by(g, sides.golden, slope, by, parameters=2) if by else None
    if error is None:
        return None
    if slope == -1.0 and by == 1.0:
        return Relation(e.INVERTED, "mine is 1 minus golden's value", "look for a not", error)
    if slope == 1.0 and abs(by) == 1.0:
        words = "1 + golden's value" if by > 0 else "golden's value minus 1"
        advice = "look for w against 1 + w, or for counting from 1 against from 0"
        return Relation(e.ONE_PLUS, f"mine is {words}", advice, error)
    scale = times(sides, slope).removeprefix(",") + "," * (slope != 1.0)
    known = max(doubt / abs(by), constants.EXACT)
    digits = max(1, math.floor(-math.log10(known))) if known < 1.0 else 1
    says = f"mine is golden's value{scale} {'plus' if by > 0 else 'minus'} {abs(by):.{digits}g}"
    return Relation(e.OFFSET, says, "look for a constant that only one side adds", error)


def powered(sides: Sides) -> Relation | None:
    """Recognise golden's square, its square root and its reciprocal, also times a constant."""
    for change, words, advice in (
        (torch.square, "squared", "look for a factor that is taken twice"),
        (torch.sqrt, "under a square root", "look for a square root that only one side takes"),
        (torch.reciprocal, "under 1", "look for a division in place of a product"),
    ):
        sample = change(sides.golden_sample)
        if not bool(sample.isfinite().all()):
            continue
        factor = fitted_factor(sample, sides.sample, sides.limit)
        whole = functools.partial(change, sides.golden)
        error = sides.left_by(sample, whole, factor, parameters=1, candidates=math.log(3))
        if error is not None:
            says = f"mine is golden's value {words}{times(sides, factor)}"
            return Relation(e.POWER, says, advice, error)
    return None


def bent(sides: Sides) -> Relation | None:
    """Recognise values that only one side clips or soft-caps."""
    swapped = Sides(sides.mine, sides.golden, sides.limit)
    for each, before, advice in (
        (sides, "mine is golden's value", "look for a limit that only mine has"),
        (swapped, "golden is mine's value", "mine lacks a limit that golden has"),
    ):
        golden, sample = each.golden, each.golden_sample
        low, high = (float(bound) for bound in each.mine.aminmax())
        clipped = functools.partial(golden.clamp, low, high)
        error = each.left_by(sample.clamp(low, high), clipped, parameters=2)
        if error is not None:
            says = f"{before} clipped to {low:.4g} ... {high:.4g}"
            return Relation(e.CLIPPED, says, advice, error)
        cap = _cap(sample, each.sample)
        if not 0.0 < cap < math.inf:
            continue
        bends = functools.partial(torch.tanh, golden / cap)
        error = each.left_by((sample / cap).tanh(), bends, cap, parameters=1)
        if error is not None:
            side = "before" if each is swapped else "after"
            says = f"mine is golden's value {side} a soft-cap (tanh) of about {cap:.4g}"
            return Relation(e.SOFT_CAP, says, advice, error)
    return None


def _cap(before: torch.Tensor, after: torch.Tensor) -> float:
    """Return ``c`` of ``after = c * tanh(before / c)``, NaN if none fits."""
    top = before.abs().topk(max(1, before.numel() // constants.SOFT_CAP_SHARE)).indices
    before, share = before[top], (after / before)[top]
    if not bool(((share > 0.0) & (share < 1.0)).all()):
        return math.nan
    low, high = torch.zeros_like(share), torch.full_like(share, constants.SATURATED)
    for _ in range(constants.BISECTIONS):  # tanh(u) / u falls from 1 to 0
        middle = (low + high) / 2
        above = middle.tanh() / middle > share
        low, high = torch.where(above, middle, low), torch.where(above, high, middle)
    return float((before / high).abs().median())


def signs(sides: Sides) -> Relation | None:
    """Recognise the other sign at some indices of an axis."""
    for axis in _long_axes(sides):
        g, m = sides.slices(axis)
        sign = torch.where(g.square().sum(1) > 0, (g * m).sum(1).sign(), 1.0)
        if bool((sign == 0).any()) or not _explained(sides, sign.unsqueeze(1) * g, (g, m), 0):
            continue
        error = remaining(sides.mine, sides.golden * _spread(sides, axis, sign))
        if error < sides.limit:
            negative = (sign < 0).nonzero().flatten().tolist()
            half = len(negative) * 2 == len(sign)
            advice = "look at the signs of the two halves (rotate_half)" if half else ""
            where = f"{spans.text_of(negative)} of {sides.axis(axis)}"
            says = f"mine is golden's value with the other sign at {where}"
            return Relation(e.SIGNS, says, advice, error)
    return None


def by_channel(sides: Sides) -> Relation | None:
    """Recognise one factor or one offset per index of an axis."""
    for axis in _long_axes(sides):
        g, m = sides.slices(axis)
        if g.shape[1] < 2:
            continue
        square = g.square().sum(1)
        factors = torch.where(square > 0, (g * m).sum(1) / square, 1.0)
        if _explained(sides, factors.unsqueeze(1) * g, (g, m), len(g)):
            error = remaining(sides.mine, sides.golden * _spread(sides, axis, factors))
            if error < sides.limit:
                kind, says, advice = _factors_words(sides, axis, factors)
                return Relation(kind, says, advice, error)
        added = (m - g).mean(1)
        if _explained(sides, g + added.unsqueeze(1), (g, m), len(g)):
            error = remaining(sides.mine, sides.golden + _spread(sides, axis, added))
            if error < sides.limit:
                says = f"mine is golden's value plus one number per index of {sides.axis(axis)}"
                advice = "look for a bias that only one side adds"
                return Relation(e.CHANNEL_OFFSET, f"{says}: {_few(added)}", advice, error)
    return None


def _spread(sides: Sides, axis: int, numbers: torch.Tensor) -> torch.Tensor:
    """Return one number per index of an axis in a shape that golden broadcasts with."""
    shape = [1] * axis + [-1] + [1] * (sides.mine.dim() - axis - 1)
    return numbers.view(shape).to(sides.golden.dtype)


def _long_axes(sides: Sides) -> Iterator[int]:
    """Yield the axes that may have slices, the last one (channels) first."""
    for axis in reversed(range(sides.mine.dim())):
        if 2 <= sides.mine.shape[axis] <= constants.LONGEST_AXIS:
            yield axis


def _explained(
    sides: Sides, predicted: torch.Tensor, sample: tuple[torch.Tensor, torch.Tensor], count: int
) -> bool:
    g, m = sample
    if not relative_l2(predicted, m) < constants.SAMPLE_SPREAD * sides.limit:
        return False
    candidates = math.log(2) * len(g) if count == 0 else 0.0  # signs: two choices each
    found = (
        nats(predicted, m, parameters=count, candidates=candidates),
        nats(predicted - g, m - g, parameters=count, candidates=candidates, centred=False),
    )
    return min(found) >= constants.CERTAIN_NATS


def _factors_words(sides: Sides, axis: int, factors: torch.Tensor) -> tuple[str, str, str]:
    name = sides.axis(axis)
    by = _neighbour(sides, axis, factors)
    if by:
        which = f"i{by:+d}"
        says = f"index i of {name} carries the scale of {which} (factors {_few(factors)})"
        return e.NEIGHBOUR_SCALE, says, f"look at how scales are indexed along {name}"
    says = f"mine is golden's value with one factor per index of {name}: {_few(factors)}"
    return e.CHANNEL_SCALE, says, f"look at the scales along {name}"


def _few(factors: torch.Tensor) -> str:
    words = [f"{x:.4g}" for x in factors[: constants.INDICES_SHOWN].tolist()]
    return ", ".join(words) + (", …" if len(factors) > constants.INDICES_SHOWN else "")


def _neighbour(sides: Sides, axis: int, factors: torch.Tensor) -> int:
    """Return 1 or -1 if each slice has the scale of that neighbour, otherwise 0.

    Scales are read off golden's largest values: those of a quantised slice are 127 steps.
    """
    others = [at for at in range(sides.golden.dim()) if at != axis]
    scale = sides.golden.abs().amax(others).double() if others else sides.golden.abs().double()
    if not bool((scale > 0).all()) or not bool((factors > 0).all()):
        return 0
    for by in (1, -1):
        predicted, seen = (scale.roll(-by) / scale).log(), factors.log()
        near = relative_l2(predicted, seen) < constants.ESTIMATED_SCALES
        if near and nats(predicted, seen, candidates=math.log(2)) >= constants.CERTAIN_NATS:
            return by
    return 0


def other_softmax(sides: Sides) -> Relation | None:
    """Recognise two distributions over different axes."""
    if float(sides.golden.min()) < 0.0 or float(sides.mine.min()) < 0.0:
        return None
    axes = range(sides.mine.dim())
    ours = [axis for axis in axes if _sums_to_one(sides.mine, axis) < sides.limit]
    theirs = [axis for axis in axes if _sums_to_one(sides.golden, axis) < sides.limit]
    if not ours or not theirs or set(ours) & set(theirs):
        return None
    says = f"mine adds up to 1 along {sides.axis(ours[0])}, golden along {sides.axis(theirs[0])}"
    advice = "look at the axis of the softmax"
    return Relation(e.OTHER_SOFTMAX, says, advice, _sums_to_one(sides.mine, ours[0]))


def _sums_to_one(x: torch.Tensor, axis: int) -> float:
    """Return the RMS distance of the sums from 1; inf for an axis with one index."""
    if x.shape[axis] < 2:
        return math.inf
    return float((x.sum(axis) - 1.0).double().square().mean().sqrt())


def masked(
    sides: Sides, hidden: tuple[torch.Tensor, torch.Tensor], keeps: str = "keeps"
) -> Relation | None:
    """Recognise values that are hidden (-inf, a huge negative number, 0) in other places.

    ``hidden``: bool, of mine's shape, golden's and mine's. Where neither hides, both must agree, up
    to one factor per row for distributions, whose rows add up to 1 whatever is hidden. ``keeps``:
    the verb for what is not hidden.
    """
    if sides.mine.dim() < 2 or torch.equal(*hidden):
        return None
    golden, mine, theirs, ours = (_some(x) for x in (sides.golden, sides.mine, *hidden))
    shown = ~(theirs | ours)
    if torch.equal(theirs, ours) or not bool(shown.any()):
        return None
    g, m = golden * shown, mine * shown
    if all(_sums_to_one(x, -1) < constants.SUMS_TO_ONE for x in (golden, mine)):
        sums = g.sum(-1, keepdim=True).clamp_min(constants.SMALLEST_SQUARED)
        g = g * (m.sum(-1, keepdim=True) / sums)
    error = remaining(m, g)
    if not error < sides.limit:
        return None
    patterns = mask_pattern(~theirs), mask_pattern(~ours)
    sample = (x[shown][: constants.SLICED_SAMPLE].double() for x in (g, m))
    if not all(patterns) and nats(*sample) < constants.CERTAIN_NATS:
        return None  # two masks without a pattern have nothing to do with each other
    before, after = describe_mask(~theirs), describe_mask(~ours)
    if before == after:
        count = int((theirs != ours).sum())
        before, after = f"{before}, {count} of them others", before
    says = f"mine {keeps} {after}, golden {keeps} {before}"
    return Relation(e.MASKED, says, "look at how the mask is made or applied", error)


def _some(x: torch.Tensor) -> torch.Tensor:
    """Return evenly spaced heads and rows of a batch, where there are very many elements."""
    matrices = x.reshape(-1, *x.shape[-2:])
    return matrices[:: max(1, x.numel() // constants.MASK_ELEMENTS)]


def describe_mask(allowed: torch.Tensor) -> str:
    """Return what a mask allows over its last two axes (query i, key j), in words."""
    return mask_pattern(allowed) or f"{float(allowed.float().mean()):.1%} of the positions"


def mask_pattern(allowed: torch.Tensor) -> str:
    """Return the pattern of a mask over its last two axes in words; "" if it has none."""
    if bool(allowed.all()):
        return "every position"
    rows, columns = allowed.shape[-2:]
    first = allowed.reshape(-1, rows, columns)[0]
    if bool((allowed == first).all()):
        distance = torch.arange(columns) - torch.arange(rows).unsqueeze(1)  # j - i
        kept = distance[first]
        if kept.numel():
            low, high = int(kept.min()), int(kept.max())
            if bool((first == ((distance >= low) & (distance <= high))).all()):
                lower, upper = low > 1 - rows, high < columns - 1
                words = [f"j >= i{low:+d}"] * lower + [f"j <= i{high:+d}"] * upper
                return "positions " + " and ".join(words).replace("+0", "")
        columns_kept = first.all(0)
        if bool((first == columns_kept).all()):
            return f"keys {listed(columns_kept.nonzero().flatten().tolist())}"
    return ""
