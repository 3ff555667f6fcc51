"""Formulas of ggml's operations on elements and rows: arithmetic, norms, activations, places.

Each takes its sources ``[ne3, ne2, ne1, ne0]`` and gives the result in these axes, in float64. The
source of a formula is the function of its name in ``ggml/src/ggml-cpu/ops.cpp`` and ``vec.h``.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch.nn import functional as F

from llmdebug_nb.core.opchecks import UNKNOWN
from llmdebug_nb.explain.operators import CannotReplay
from llmdebug_nb.explain.reference.ggml_given import Given

Formula = Callable[[Given], torch.Tensor]
Function = Callable[[torch.Tensor], torch.Tensor]

ACTIVATIONS: dict[str, Function] = {
    "GELU": lambda x: F.gelu(x, approximate="tanh"),
    "GELU_ERF": F.gelu,
    "GELU_QUICK": lambda x: x * torch.sigmoid(1.702 * x),
    "RELU": torch.relu,
    "SILU": F.silu,
}
_OF_ONE: dict[str, Function] = {
    **ACTIVATIONS,
    "ABS": torch.abs,
    "COS": torch.cos,
    "ELU": F.elu,
    "EXP": torch.exp,
    "EXPM1": torch.expm1,
    "HARDSIGMOID": F.hardsigmoid,
    "HARDSWISH": F.hardswish,
    "LOG": torch.log,
    "NEG": torch.neg,
    "SGN": torch.sign,
    "SIGMOID": torch.sigmoid,
    "SIN": torch.sin,
    "SOFTPLUS": F.softplus,
    "SQR": torch.square,
    "SQRT": torch.sqrt,
    "STEP": lambda x: (x > 0).double(),
    "TANH": torch.tanh,
}
_OF_TWO: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "ADD": torch.add, "DIV": torch.div, "MUL": torch.mul, "SUB": torch.sub,
}  # fmt: skip
_GATES = {
    "GEGLU": "GELU", "GEGLU_ERF": "GELU_ERF", "GEGLU_QUICK": "GELU_QUICK", "REGLU": "RELU",
    "SWIGLU": "SILU",
}  # fmt: skip
# they look values up in a table of float16
IN_HALF = frozenset(("GELU", "GELU_QUICK", "GEGLU", "GEGLU_QUICK"))


def _of_one(function: Function) -> Formula:
    return lambda given: function(given.x())


def _of_two(function: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Formula:
    return lambda given: function(given.x(), _tiled(given.x(1), given.own(0).shape))


def _tiled(x: torch.Tensor, shape: torch.Size | tuple[int, ...]) -> torch.Tensor:
    """Repeat a tensor until it has a shape."""
    if any(n % own for n, own in zip(shape, x.shape, strict=True)):
        raise CannotReplay(f"shape {list(x.shape)} does not go into {list(shape)}")
    return x.repeat([n // own for n, own in zip(shape, x.shape, strict=True)])


def _gated(function: Function) -> Formula:
    def formula(given: Given) -> torch.Tensor:
        gate, up = _halves(given)
        return function(gate) * up

    return formula


def _halves(given: Given) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what goes through the activation, and what it is multiplied by."""
    if given.has(1):
        return given.x(), given.x(1)
    first, second = given.x().chunk(2, -1)
    return (second, first) if given.number("swapped") else (first, second)


def _swiglu_oai(given: Given) -> torch.Tensor:
    gate, up = _halves(given)
    limit = given.number("limit")
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return gate * torch.sigmoid(given.number("alpha") * gate) * (up + 1)


def _rms_norm(given: Given) -> torch.Tensor:
    return _divided(given.x(), given)


def _divided(x: torch.Tensor, given: Given) -> torch.Tensor:
    size: torch.Tensor = x.square().mean(-1, keepdim=True) + given.number("eps")
    return x / size.sqrt()


def _norm(given: Given) -> torch.Tensor:
    x = given.x()
    return _divided(x - x.mean(-1, keepdim=True), given)


def _l2_norm(given: Given) -> torch.Tensor:
    x = given.x()
    size: torch.Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return x / size.clamp_min(given.number("eps"))


def _add_id(given: Given) -> torch.Tensor:
    """Add to each row the row of an expert: ``b[ids]``."""
    chosen = given.x(1)[0, 0].index_select(0, given.whole(2)[0, 0].flatten())
    return given.x() + chosen.reshape(given.own(0).shape)


def get_rows(given: Given) -> torch.Tensor:
    """Return rows by their numbers; those of the last axes go along."""
    table, at = given.own(0), given.whole(1)
    if at.shape[0] != 1:
        raise CannotReplay("no formula for rows of four axes is known", UNKNOWN)
    index = at[0].unsqueeze(-1)
    if index.numel() and not 0 <= int(index.min()) <= int(index.max()) < table.shape[-2]:
        raise CannotReplay("it reads rows outside of its table")
    rows = table.expand(*index.shape[:2], *table.shape[2:])
    return given.wide(rows.take_along_dim(index, -2))


def _top_k(given: Given) -> torch.Tensor:
    """Return which elements of a row are the largest, in the order of their places."""
    order: torch.Tensor = given.x().sort(dim=-1, stable=True, descending=True).indices
    return order[..., : given.shape[-1]].sort(-1).values


def _argsort(given: Given) -> torch.Tensor:
    given.refuse("order", 0, 1)
    falling = bool(given.number("order"))
    order: torch.Tensor = given.x().sort(dim=-1, stable=True, descending=falling).indices
    return order


def _concat(given: Given) -> torch.Tensor:
    given.refuse("dim", 0, 1, 2, 3)
    return torch.cat([given.x(), given.x(1)], 3 - int(given.number("dim")))


def _scale(given: Given) -> torch.Tensor:
    return given.x() * given.number("scale") + given.number("bias")


def _clamp(given: Given) -> torch.Tensor:
    return given.x().clamp(given.number("min"), given.number("max"))


def _leaky_relu(given: Given) -> torch.Tensor:
    return F.leaky_relu(given.x(), given.number("negative_slope"))


# -- positions -------------------------------------------------------------------------------------

_PAIRS, _HALVES = 0, 2  # of `enum ggml_rope_type`: neighbours turn together, or halves


def rope(given: Given) -> torch.Tensor:
    """Turn the first channels of each head by the angles of its position."""
    given.refuse("mode", _PAIRS, _HALVES)
    given.refuse("n_offs", 0)
    x, count = given.x(), int(given.number("n_dims"))
    if not 0 < count <= x.shape[-1] or count % 2:
        raise CannotReplay(f"its parameter n_dims={count} does not fit {x.shape[-1]} channels")
    cos, sin = _turns(given, count)
    turned, rest = x[..., :count], x[..., count:]
    if given.number("mode") == _PAIRS:
        a, b = turned[..., ::2], turned[..., 1::2]
    else:
        a, b = turned.chunk(2, -1)
    made = [a * cos - b * sin, a * sin + b * cos]
    if given.number("mode") == _PAIRS:
        return torch.cat([torch.stack(made, -1).flatten(-2), rest], -1)
    return torch.cat([*made, rest], -1)


def _turns(given: Given, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cosines and sines, ``[tokens, 1, pairs]``.

    An angle is the one before it times a factor, in float32: so large ones are as coarse as they
    are in ggml. YaRN mixes angles with and without the scale (``rope_yarn``).
    """
    step = torch.tensor(given.number("freq_base") ** (-2.0 / count), dtype=torch.float32)
    angle, angles = given.whole(1).flatten().float(), []
    for _ in range(count // 2):
        angles.append(angle)
        angle = angle * step
    plain = torch.stack(angles, -1)
    if given.has(2):
        plain = plain / given.own(2).float().flatten()[: count // 2]
    scaled = (plain * torch.tensor(given.number("freq_scale"), dtype=torch.float32)).double()
    size = given.number("attn_factor")
    if mix := given.number("ext_factor"):
        ramp = _ramp(given, count) * mix
        scaled = scaled * (1 - ramp) + plain.double() * ramp
        size *= 1 + 0.1 * math.log(1 / given.number("freq_scale"))
    # each product of the way has rounded it
    moved = given.wide(scaled.float())
    lost = (moved - scaled.float().double()) * torch.arange(1, count // 2 + 1)
    whole = (scaled + lost)[:, None]
    return whole.cos() * size, whole.sin() * size


def _ramp(given: Given, count: int) -> torch.Tensor:
    """Return how much of the plain angle each pair keeps, float64[pairs]."""

    def pair(turns: float) -> float:
        wave = given.number("n_ctx_orig") / (turns * 2 * math.pi)
        return count * math.log(wave) / (2 * math.log(given.number("freq_base")))

    try:
        low = max(0.0, math.floor(pair(given.number("beta_fast"))))
        high = min(count - 1.0, math.ceil(pair(given.number("beta_slow"))))
    except (ValueError, ZeroDivisionError, OverflowError):
        raise CannotReplay("its parameters of YaRN are no numbers that have a logarithm") from None
    at = torch.arange(count // 2, dtype=torch.float64)
    return 1 - ((at - low) / max(0.001, high - low)).clamp(0, 1)


FORMULAS: dict[str, Formula] = {
    **{name: _of_one(function) for name, function in _OF_ONE.items()},
    **{name: _of_two(function) for name, function in _OF_TWO.items()},
    **{name: _gated(ACTIVATIONS[function]) for name, function in _GATES.items()},
    "ADD_ID": _add_id,
    "ARGSORT": _argsort,
    "CLAMP": _clamp,
    "CONCAT": _concat,
    "CONT": lambda given: given.x().reshape(given.shape),
    "DUP": lambda given: given.x().reshape(given.shape),
    "GET_ROWS": get_rows,
    "L2_NORM": _l2_norm,
    "LEAKY_RELU": _leaky_relu,
    "MEAN": lambda given: given.x().mean(-1, keepdim=True),
    "NORM": _norm,
    "REPEAT": lambda given: _tiled(given.x(), given.shape),
    "RMS_NORM": _rms_norm,
    "ROPE": rope,
    "SCALE": _scale,
    "SUM": lambda given: given.x().sum().reshape(1, 1, 1, 1),
    "SUM_ROWS": lambda given: given.x().sum(-1, keepdim=True),
    "SWIGLU_OAI": _swiglu_oai,
    "TOP_K": _top_k,
}
