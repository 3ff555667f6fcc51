"""Judge the recorded outputs of one call by its reference in float64."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable

import torch

from llmdebug_nb.app.opcheck import algorithms
from llmdebug_nb.comparison import metrics, operator_error, standards
from llmdebug_nb.comparison.operator_error import WORDS, Bound, Figures
from llmdebug_nb.core import constants
from llmdebug_nb.core.dtypes import DTYPE_NAMES, epsilon
from llmdebug_nb.core.torch_internals import has_own_kernel
from llmdebug_nb.reference.atb_calls import SUFFIX
from llmdebug_nb.reference.computed import Computed, Tensors
from llmdebug_nb.replay.checks import DTYPE, GAP, OPERATOR_IS_WRONG, RECORD_IS_WRONG, OutputCheck
from llmdebug_nb.replay.operators import CannotReplay, bare_name

# they, or their gradients, add to a tensor again and again, and each sum is rounded to its dtype
_ADD_IN_PLACE = frozenset(
    (
        "grid_sample", "grid_sampler", "grid_sampler_2d", "index_add", "index_put", "index_reduce",
        "scatter_add", "scatter_reduce",
    )
)  # fmt: skip
# they give positions: of equal elements, any may be given
_GIVE_POSITIONS = frozenset(
    (
        "adaptive_max_pool1d", "adaptive_max_pool2d", "adaptive_max_pool3d",
        "adaptive_max_pool1d_with_indices", "adaptive_max_pool2d_with_indices",
        "adaptive_max_pool3d_with_indices", "argmax", "argmin",
        "argsort", "cummax", "cummin", "kthvalue", "max", "max_pool1d_with_indices",
        "max_pool2d_with_indices", "max_pool3d_with_indices", "median", "min", "mode", "nanmedian",
        "sort", "topk",
    )
)  # fmt: skip


class Judge:
    """Judges calls.

    ``wanted``: upstream's metrics, of `core.opchecks.METRICS`. ``own``: the user's comparisons.
    ``rounds``: the reference is computed in a dtype whose rounding counts, too.
    """

    def __init__(
        self, wanted: Iterable[str] = ("rel",), own: Iterable[str] = (), rounds: bool = False
    ) -> None:
        self._wanted, self._own, self._rounds = frozenset(wanted), tuple(own), rounds

    def outputs(self, call: Computed, op: str) -> tuple[OutputCheck, ...]:
        """Return a check of each recorded output of a call. Raises CannotReplay."""
        return tuple(self._checks(call, op, call.recorded, call.exact()))

    def again(self, call: Computed, op: str, device: str) -> str:
        """Return what running a wrong call again says; "" if that can't be."""
        try:
            made, exact = call.again(device), call.exact()
            checks = self._checks(call, op, {s: made[s] for s in call.recorded}, exact)
        except (CannotReplay, KeyError):
            return ""
        return OPERATOR_IS_WRONG if any(each.why for each in checks) else RECORD_IS_WRONG

    def _checks(
        self, call: Computed, op: str, outputs: Tensors, exact: Tensors
    ) -> list[OutputCheck]:
        found = []
        for slot, recorded in outputs.items():
            reference = exact.get(slot)
            if reference is None:
                raise CannotReplay(f"the operator gives no output {slot}", GAP)
            found.append(self._one(call, op, slot, reference, recorded))
        return found

    def _one(
        self, call: Computed, op: str, slot: str, reference: torch.Tensor, recorded: torch.Tensor
    ) -> OutputCheck:
        name = DTYPE_NAMES.get(recorded.dtype, str(recorded.dtype))
        check = OutputCheck(slot, name, tuple(recorded.shape))
        if reference.shape != recorded.shape:
            shapes = f"{list(recorded.shape)}, but the operator gives {list(reference.shape)}"
            return _wrong(check, f"its shape is {shapes}")
        if recorded.is_complex():
            reference, recorded = torch.view_as_real(reference), torch.view_as_real(recorded)
        if recorded.is_floating_point() and not epsilon(str(recorded.dtype)[6:]):
            raise CannotReplay(f"dtype {name} has no machine epsilon", DTYPE)
        made_in = reference.dtype if self._rounds and reference.is_floating_point() else None
        reference = reference.double()
        check = self._upstream(check, reference, recorded)
        if not recorded.is_floating_point():
            return _whole(call, op, check, slot, reference, recorded)
        why = operator_error.differs(reference, recorded)
        if why:
            return _wrong(check, why)
        return _floating(call, op, check, reference, recorded, made_in)

    def _upstream(
        self, check: OutputCheck, reference: torch.Tensor, recorded: torch.Tensor
    ) -> OutputCheck:
        """Add what upstream reports, and what the user's comparisons do."""
        own = tuple(algorithms.measured(each, reference, recorded) for each in self._own)
        check = dataclasses.replace(check, own=own)
        standard = standards.standard_of(recorded.dtype)
        if standard is not None:
            rates = standards.rates(reference, recorded, standard)
            check = dataclasses.replace(
                check, standard=str(standard), meets=rates.meets(standard), rate=rates.relative,
                max_rel=rates.max_relative, abs_rate=rates.absolute, max_abs=rates.max_absolute,
            )  # fmt: skip
        if self._wanted & {"cos_sim", "kl"} and recorded.numel():
            found = metrics.compare(reference, recorded, logits="kl" in self._wanted)
            check = dataclasses.replace(
                check, cosine=found["cosine_similarity"], kl=found.get("kl_divergence")
            )
        return check


def _wrong(check: OutputCheck, why: str) -> OutputCheck:
    return dataclasses.replace(check, error=math.inf, l2=math.inf, why=why)


# -- integers and flags ----------------------------------------------------------------------------


def _whole(
    call: Computed, op: str, check: OutputCheck, slot: str, reference: torch.Tensor,
    recorded: torch.Tensor,
) -> OutputCheck:  # fmt: skip
    """Judge whole numbers: they are equal, unless rounding decides between them."""
    other = reference != recorded.double()
    count = int(other.sum())
    name = (bare_name(op) or op.removesuffix(SUFFIX)).lower()
    if not count or (name in _GIVE_POSITIONS and _are_ties(call, reference, recorded)):
        return check
    share = count / other.numel()
    if share <= constants.NEAR_TIES:
        try:  # the same operator in its own dtype: does rounding decide so?
            made = call.again().get(slot)
        except CannotReplay:
            made = None
        if made is not None and made.shape == recorded.shape and torch.equal(made, recorded):
            return check
    return _wrong(check, f"{count} of {other.numel()} whole numbers are others")


def _are_ties(call: Computed, reference: torch.Tensor, recorded: torch.Tensor) -> bool:
    """Tell whether positions that differ point at equal elements of an operand."""
    if recorded.dtype not in (torch.int64, torch.int32):
        return False
    recorded = recorded.long()
    for operand in call.operands:
        for axis in range(operand.dim()):
            keeps = recorded.dim() == operand.dim()
            whole = reference.long(), recorded
            chosen = [x if keeps else x.unsqueeze(axis) for x in whole]
            most = operand.shape[axis]
            inside = all(bool(((x >= 0) & (x < most)).all()) for x in whole)
            if chosen[0].dim() != operand.dim() or not inside:  # torch may wrap what is outside
                continue
            try:
                one, two = (operand.take_along_dim(x, axis) for x in chosen)
            except (RuntimeError, IndexError):
                continue
            if one.shape == chosen[0].shape and torch.equal(one, two):
                return True
        if not recorded.dim() and all(0 <= int(x) < operand.numel() for x in (recorded, reference)):
            flat = operand.flatten()
            if bool(flat[int(recorded)] == flat[int(reference)]):
                return True
    return False


# -- floating-point numbers ------------------------------------------------------------------------


def _floating(
    call: Computed, op: str, check: OutputCheck, reference: torch.Tensor, recorded: torch.Tensor,
    made_in: torch.dtype | None = None,
) -> OutputCheck:  # fmt: skip
    """Judge by the noise model; a suspect by what its inputs' rounding may move, too.

    ``made_in``: the dtype of the reference, if its rounding counts.
    """
    if not recorded.numel():
        return check
    sums_narrow = bare_name(op) in _ADD_IN_PLACE
    bound = Bound.of(recorded.dtype, call.length, call.is_one, sums_narrow)
    inner = call.rounds_to if call.rounds_to != recorded.dtype else None
    for other in (made_in, inner):
        if other is not None:
            bound = bound.with_other(Bound.of(other, call.length, call.is_one, sums_narrow))
    most = max((x.numel() for x in call.operands), default=1)
    terms = 1.0 if call.is_one else max(1.0, most / recorded.numel())
    found = operator_error.figures(reference, recorded.double(), recorded.dtype, terms)
    units = bound.units(found)
    if max(units) > 1 or (max(found) > 0 and not bool(reference.any())):
        units = _explained(call, op, check.slot, bound, found, reference, recorded)
    worst = max(range(len(units)), key=lambda at: units[at])
    check = dataclasses.replace(
        check, l2=found.l2, error=units[worst], figure=WORDS[worst] if units[worst] else ""
    )
    if units[worst] > 1:
        why = f"{check.figure} is {found[worst]:.3g} off, {units[worst]:.3g} times what rounding"
        return dataclasses.replace(check, why=f"{why} explains")
    narrower = _narrower(call, op, recorded)
    return dataclasses.replace(check, why=narrower) if narrower else check


def _explained(
    call: Computed, op: str, slot: str, bound: Bound, found: Figures, reference: torch.Tensor,
    recorded: torch.Tensor,
) -> Figures:  # fmt: skip
    """Return the figures in units of what rounding explains, its way through the inputs too."""
    moves = moved(call, bound, slot, reference, recorded.dtype)
    rows = constants.WORST_ROW * bound.error
    least: tuple[float, ...] = (bound.error, rows, rows, bound.factor, bound.factor)
    if not bool(reference.any()):  # then errors are absolute, and no rounding of zero explains any
        least = (0.0,) * len(found)
    limits = [
        math.hypot(own, constants.CALIBRATED * move) for own, move in zip(least, moves, strict=True)
    ]
    if moves.l2 > constants.AMPLIFICATION * bound.error:
        # the terms cancel: what is left of their rounding may be even by chance
        by_chance = constants.EVEN_BY_CHANCE * constants.CALIBRATED * moves.l2
        limits[3:] = [math.hypot(limit, by_chance) for limit in limits[3:]]
    units = [
        figure / limit if limit else math.inf if figure else 0.0
        for figure, limit in zip(found, limits, strict=True)
    ]
    factors = units[3:]
    one = op.startswith("Aten.") or has_own_kernel(bare_name(op))
    if max(factors) > 1 and max(units[:3]) <= 1 and max(found[3:]) <= bound.error and not one:
        # A function of several operators rounds between them, all elements by one factor perhaps.
        try:
            made = _numbers(call.again()[slot])
            own = operator_error.figures(reference, made, recorded.dtype)
            units[3:] = [
                min(unit, figure / (constants.CALIBRATED * max(limit, seen)))
                for unit, figure, limit, seen in zip(
                    factors, found[3:], limits[3:], own[3:], strict=True
                )
            ]
        except (CannotReplay, KeyError):
            pass
    return Figures(*units)


def moved(
    call: Computed, bound: Bound, slot: str, reference: torch.Tensor, dtype: torch.dtype
) -> Figures:
    """Return how far an output moves if rounding moves each input, all by random signs."""
    draws = torch.Generator().manual_seed(0)

    def change(x: torch.Tensor) -> torch.Tensor:
        signs = torch.randint(0, 2, x.shape, generator=draws) * 2 - 1
        return x * (1 + bound.error * signs)

    count = constants.DRAWS if reference.numel() < constants.FEW_ELEMENTS else 1
    try:
        made = [_numbers(call.exact(change)[slot]) for _ in range(count)]
    except (CannotReplay, KeyError):
        return Figures()
    # of another shape: values decide how many there are
    same = [other for other in made if other.shape == reference.shape]
    drawn = [operator_error.figures(reference, other, dtype) for other in same]
    return Figures(*map(max, zip(*drawn, strict=True))) if drawn else Figures()


def _numbers(x: torch.Tensor) -> torch.Tensor:
    """Return a tensor in float64; the parts of complex numbers lie along a last axis."""
    return (torch.view_as_real(x.resolve_conj()) if x.is_complex() else x).double()


def _narrower(call: Computed, op: str, recorded: torch.Tensor) -> str:
    """Tell if an operator of the dispatcher gave a narrower dtype than it gives of its inputs."""
    eps = epsilon(str(recorded.dtype)[6:])
    given = [x.dtype for x in call.operands if x.is_floating_point()]
    if (
        not op.startswith("Aten.")
        or not given
        or any(epsilon(str(dtype)[6:]) >= eps for dtype in given)
    ):
        return ""
    try:
        made = [x.dtype for x in call.again().values()]
    except CannotReplay:
        return ""
    if recorded.dtype in made or not made:
        return ""
    return f"its dtype is {DTYPE_NAMES[recorded.dtype]}, but the operator gives {str(made[0])[6:]}"
