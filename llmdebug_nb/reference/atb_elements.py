"""Formulas of ATB operations that compute elements: products, norms, activations, reductions.

The parameters are those of the ATB API reference, and the inputs in its order. Where it is silent,
the formula is that of msit's opcheck.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import functional as F

from llmdebug_nb.reference.atb_parameters import Inputs, Parameters
from llmdebug_nb.replay.checks import UNKNOWN
from llmdebug_nb.replay.operators import CannotReplay

_LARGEST_HALF = torch.finfo(torch.float16).max


def matmul(given: Parameters, inputs: Inputs) -> Inputs:
    """Two matrices, each transposed if the parameters say so."""
    x, weight = inputs[:2]
    x = x.transpose(-2, -1) if given.flag("transposeA") else x
    return [x @ (weight.transpose(-2, -1) if given.flag("transposeB") else weight)]


def linear(given: Parameters, inputs: Inputs) -> Inputs:
    """x @ weight, with bias, or added to a third input, or int8 with a scale for each channel."""
    given.refuse("quantMode", "matmulType")
    x, weight, *rest = inputs
    turned = Parameters({"transposeB": True, **given.found})
    whole = not x.is_floating_point()
    if whole is weight.is_floating_point():
        raise CannotReplay("no formula for weights of another kind than x is known", UNKNOWN)
    made = matmul(turned, [x.double(), weight.double()])[0]
    if given.flag("hasBias") and rest:
        made, rest = made + rest[0], rest[1:]
    if given.flag("enAccum"):
        return [made + rest[0]]
    if whole:
        if len(rest) != 1:
            raise CannotReplay("no formula for quantised inputs without one scale is known")
        made = made * _scale(rest[0])
    return [made]


def _scale(scale: torch.Tensor) -> torch.Tensor:
    """Return scales that may be float32 numbers in the low half of whole numbers of 64 bits."""
    if scale.is_floating_point():
        return scale
    low = scale.to(torch.int64) & 0xFFFFFFFF
    signed = torch.where(low >= 1 << 31, low - (1 << 32), low).to(torch.int32)
    return signed.view(torch.float32).double()


def rms_norm(given: Parameters, inputs: Inputs) -> Inputs:
    """x / rms(x) * gamma; before it a residual and a bias may be added."""
    kind = given.choice("layerType", (1, 2, 3))
    own = given.part({1: "normParam", 2: "preNormParam", 3: "postNormParam"}[kind])
    own.refuse("quantType", "precisionMode", "dynamicQuantType")
    own.not_quantised()
    x, *rest = inputs
    if kind > 1:  # the residual, and a bias perhaps, are added first
        added = rest[: 2 if own.flag("hasBias") else 1]
        x, rest = sum(added, x), rest[len(added) :]
    gamma = rest[0] + 1 if own.integer("modelType") else rest[0]
    scale = (x * x).mean(-1, keepdim=True) + own.number("epsilon", 1e-5)
    made = x * gamma.reshape(-1) / scale.sqrt()
    if kind == 1 and own.flag("rstd"):
        return [made, scale.rsqrt()]
    return [made, x] if kind == 2 else [made]


def layer_norm(given: Parameters, inputs: Inputs) -> Inputs:
    """The norm over the last axes; before it a scaled residual may be added."""
    kind = given.choice("layerType", (1, 2, 3))
    own = given.part({1: "normParam", 2: "preNormParam", 3: "postNormParam"}[kind])
    own.refuse("dynamicQuantType")
    own.not_quantised()
    epsilon = own.number("epsilon", 1e-5)
    if kind == 1:
        x, weight, bias = inputs[:3]
        shape = list(x.shape[own.integer("beginNormAxis") :])
        return [F.layer_norm(x, shape, weight.reshape(shape), bias.reshape(shape), epsilon)]
    x, residual, weight, bias = inputs[:4]
    x = x + own.number("zoomScaleValue", 1.0) * residual
    made = F.layer_norm(x, [x.shape[-1]], weight.flatten(), bias.flatten(), epsilon)
    return [made, x] if kind == 2 else [made]


_OF_ONE: dict[int, Callable[[torch.Tensor], torch.Tensor]] = {
    3: torch.cos, 4: torch.sin, 5: torch.neg, 7: torch.logical_not, 20: torch.tanh,
}  # fmt: skip
_OF_TWO: dict[int, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    8: torch.add, 9: torch.mul, 10: torch.true_divide, 11: torch.logical_and,
    12: torch.logical_or, 13: torch.less, 14: torch.greater, 15: torch.sub, 16: torch.eq,
}  # fmt: skip


def elewise(given: Parameters, inputs: Inputs) -> Inputs:
    """One function of each element, or of two."""
    kind = given.integer("elewiseType")
    if kind == 1:  # a cast
        return inputs[:1]
    if kind == 2:
        return [inputs[0] * given.part("mulsParam").number("varAttr", 0.0)]
    if kind == 18:  # int8 and float16 to float16, by channel
        x, scale, *offset = inputs
        x = x - offset[0] if offset and offset[0].numel() else x
        return [(x * scale).clamp(-_LARGEST_HALF, _LARGEST_HALF)]
    if kind in _OF_ONE:
        return [_OF_ONE[kind](inputs[0])]
    if kind in _OF_TWO:
        return [_OF_TWO[kind](*inputs[:2])]
    raise CannotReplay(f"no formula for elewiseType={kind} is known", UNKNOWN)


def activation(given: Parameters, inputs: Inputs) -> Inputs:
    """One activation, or the gradient of SwiGLU."""
    kind, x = given.choice("activationType", (1, 2, 3, 4, 5, 6, 7)), inputs[0]
    if kind == 1:
        return [x.relu()]
    if kind == 2:
        return [F.gelu(x, approximate="none" if given.integer("geluMode") == 1 else "tanh")]
    if kind in (3, 4):
        return [x * torch.sigmoid((1.702 if kind == 3 else given.number("scale", 1.0)) * x)]
    if kind == 5:
        return [x.log()]
    axis = given.integer("dim", -1)
    if kind == 6:
        gate, up = x.chunk(2, axis)
        return [F.silu(gate) * up]
    gate, up = inputs[1].chunk(2, axis)
    share = torch.sigmoid(gate)
    slope = share * (1 + gate * (1 - share))
    return [torch.cat([x * up * slope, x * gate * share], axis)]


def softmax(given: Parameters, inputs: Inputs) -> Inputs:
    """The softmax over several axes."""
    return [(inputs[0] - inputs[0].logsumexp(given.integers("axes"), keepdim=True)).exp()]


def cumsum(given: Parameters, inputs: Inputs) -> Inputs:
    """The sums so far along one axis."""
    given.refuse("exclusive", "reverse")
    return [inputs[0].cumsum(given.integers("axes")[0])]


def reduce(given: Parameters, inputs: Inputs) -> Inputs:
    """The largest or smallest elements, or their sum."""
    kind, axes = given.choice("reduceType", (1, 2, 3)), given.integers("axis")
    if kind == 3:
        return [inputs[0].sum(axes)]
    return [inputs[0].amax(axes) if kind == 1 else inputs[0].amin(axes)]
