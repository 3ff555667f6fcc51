"""Formulas of ggml's operations on elements and rows: arithmetic, norms, activations, places.

Each takes its sources ``[ne3, ne2, ne1, ne0]`` and gives the result in these axes, in float64. The
source of a formula is the function of its name in ``ggml/src/ggml-cpu/ops.cpp`` and ``vec.h``.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch.nn import functional as F

from llmdebug_nb.reference.ggml_given import Given
from llmdebug_nb.replay.checks import UNKNOWN
from llmdebug_nb.replay.operators import CannotReplay

Formula = Callable[[Given], torch.Tensor]
Activation = Callable[[Given, torch.Tensor], torch.Tensor]
Function = Callable[[torch.Tensor], torch.Tensor]

_EXACT: dict[str, Function] = {
    "ABS": torch.abs,
    "CEIL": torch.ceil,
    "COS": torch.cos,
    "ELU": F.elu,
    "EXP": torch.exp,
    "FLOOR": torch.floor,
    "GELU_QUICK": lambda x: x * torch.sigmoid(1.702 * x),
    "HARDSIGMOID": F.hardsigmoid,
    "HARDSWISH": F.hardswish,
    "LOG": torch.log,
    "NEG": torch.neg,
    "RELU": torch.relu,
    "ROUND": lambda x: (x.abs() + 0.5).floor() * x.sign(),  # halves go away from 0
    "SGN": torch.sign,
    "SIGMOID": torch.sigmoid,
    "SILU": F.silu,
    "SIN": torch.sin,
    "SQR": torch.square,
    "SQRT": torch.sqrt,
    "STEP": lambda x: (x > 0).double(),
    "TANH": torch.tanh,
    "TRUNC": torch.trunc,
}


def _exact(function: Function) -> Activation:
    return lambda given, x: function(x)


def _gelu(given: Given, x: torch.Tensor) -> torch.Tensor:
    share = (math.sqrt(2 / math.pi) * x * (1 + 0.044715 * x.square())).tanh()
    return 0.5 * x * (1 + given.rounded(share))


def _gelu_erf(given: Given, x: torch.Tensor) -> torch.Tensor:
    return 0.5 * x * (1 + given.rounded((x * math.sqrt(0.5)).erf()))


def _expm1(given: Given, x: torch.Tensor) -> torch.Tensor:
    return given.rounded(x.exp()) - 1


def _softplus(given: Given, x: torch.Tensor) -> torch.Tensor:
    return torch.where(x > 20, x, given.rounded(1 + x.exp()).log())


# torch has the others; these lose digits where ggml adds to 1 in float32
_OF_ONE: dict[str, Activation] = {
    "EXPM1": _expm1, "GELU": _gelu, "GELU_ERF": _gelu_erf, "SOFTPLUS": _softplus,
    **{name: _exact(function) for name, function in _EXACT.items()},
}  # fmt: skip
_OF_TWO: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "ADD": torch.add, "DIV": torch.div, "MUL": torch.mul, "SUB": torch.sub,
}  # fmt: skip
_GATES = {
    "GEGLU": "GELU", "GEGLU_ERF": "GELU_ERF", "GEGLU_QUICK": "GELU_QUICK", "REGLU": "RELU",
    "SWIGLU": "SILU",
}  # fmt: skip
# they look values up in a table of float16
IN_HALF = frozenset(("GELU", "GELU_QUICK", "GEGLU", "GEGLU_QUICK"))


def _of_one(activation: Activation) -> Formula:
    return lambda given: activation(given, given.x())


def _of_two(function: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Formula:
    return lambda given: function(given.x(), _tiled(given.x(1), given.own(0).shape))


def _tiled(x: torch.Tensor, shape: torch.Size | tuple[int, ...]) -> torch.Tensor:
    """Repeat a tensor until it has a shape."""
    if any(n % own for n, own in zip(shape, x.shape, strict=True)):
        raise CannotReplay(f"shape {list(x.shape)} does not go into {list(shape)}")
    return x.repeat([n // own for n, own in zip(shape, x.shape, strict=True)])


def _gated(activation: Activation) -> Formula:
    def formula(given: Given) -> torch.Tensor:
        gate, up = _halves(given)
        return activation(given, gate) * up

    return formula


def _halves(given: Given) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what goes through the activation, and what it is multiplied by."""
    if given.has(1):
        return given.x(), given.x(1)
    first, second = given.x().chunk(2, -1)
    return (second, first) if given.number("swapped") else (first, second)


def _swiglu_oai(given: Given) -> torch.Tensor:
    gate, up = _clamped(given)
    return gate * torch.sigmoid(given.number("alpha") * gate) * (up + 1)


def _swiglu_clamp(given: Given) -> torch.Tensor:
    gate, up = _clamped(given)
    return F.silu(gate) * up


def _clamped(given: Given) -> tuple[torch.Tensor, torch.Tensor]:
    (gate, up), limit = _halves(given), given.number("limit")
    return gate.clamp(max=limit), up.clamp(-limit, limit)


def _xielu(given: Given) -> torch.Tensor:
    x, beta = given.x(), given.number("beta")
    rising = given.number("alpha_p") * x.square()
    falling = (torch.expm1(x.clamp(max=given.number("eps"))) - x) * given.number("alpha_n")
    return torch.where(x > 0, rising, falling) + beta * x


def _divided(x: torch.Tensor, given: Given) -> torch.Tensor:
    size: torch.Tensor = x.square().mean(-1, keepdim=True) + given.number("eps")
    return x / size.sqrt()


def _normed(x: torch.Tensor, given: Given) -> torch.Tensor:
    return _divided(x - x.mean(-1, keepdim=True), given)


def _group_norm(given: Given) -> torch.Tensor:
    """Norm groups of channels, which are the third axis; the last group may be smaller."""
    parts = given.x().chunk(int(given.number("n_groups")), 1)
    return torch.cat([_normed(part.flatten(1), given).reshape(part.shape) for part in parts], 1)


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


# -- positions -------------------------------------------------------------------------------------

_PAIRS, _HALVES = 0, 2  # of `enum ggml_rope_type`: neighbours turn together, or halves


def rope(given: Given) -> torch.Tensor:
    """Turn channels of each head, the first ones or from an offset, by the angles of its place."""
    given.refuse("mode", _PAIRS, _HALVES)
    x, count, start = given.x(), int(given.number("n_dims")), int(given.number("n_offs"))
    if not 0 < count <= x.shape[-1] - start or count % 2 or start < 0:
        raise CannotReplay(
            f"its parameters n_dims={count}, n_offs={start} do not fit {x.shape[-1]} channels"
        )
    cos, sin = _turns(given, count)
    before, turned, rest = x.tensor_split([start, start + count], -1)
    if given.number("mode") == _PAIRS:
        a, b = turned[..., ::2], turned[..., 1::2]
    else:
        a, b = turned.chunk(2, -1)
    made = [a * cos - b * sin, a * sin + b * cos]
    if given.number("mode") == _PAIRS:
        made = [torch.stack(made, -1).flatten(-2)]
    return torch.cat([before, *made, rest], -1)


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
    scaled = plain * torch.tensor(given.number("freq_scale"), dtype=torch.float32)
    size = given.number("attn_factor")
    if mix := given.number("ext_factor"):
        ramp = (_ramp(given, count) * mix).float()
        scaled = scaled * (1 - ramp) + plain * ramp
        size *= 1 + 0.1 * math.log(1 / given.number("freq_scale"))
    # each product of the way has rounded it
    lost = (given.wide(scaled) - scaled.double()) * torch.arange(1, count // 2 + 1)
    whole = (scaled.double() + lost)[:, None]
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
    **{name: _gated(_OF_ONE[function]) for name, function in _GATES.items()},
    "ADD_ID": _add_id,
    "ARGSORT": _argsort,
    "CLAMP": lambda given: given.x().clamp(given.number("min"), given.number("max")),
    "CONCAT": _concat,
    "CUMSUM": lambda given: given.x().cumsum(-1),
    "CONT": lambda given: given.x().reshape(given.shape),
    "DUP": lambda given: given.x().reshape(given.shape),
    "GET_ROWS": get_rows,
    "GROUP_NORM": _group_norm,
    "L2_NORM": _l2_norm,
    "LEAKY_RELU": lambda given: F.leaky_relu(given.x(), given.number("negative_slope")),
    "MEAN": lambda given: given.x().mean(-1, keepdim=True),
    "NORM": lambda given: _normed(given.x(), given),
    "REPEAT": lambda given: _tiled(given.x(), given.shape),
    "RMS_NORM": lambda given: _divided(given.x(), given),
    "ROPE": rope,
    "SCALE": lambda given: given.x() * given.number("scale") + given.number("bias"),
    "SUM": lambda given: given.x().sum().reshape(1, 1, 1, 1),
    "SUM_ROWS": lambda given: given.x().sum(-1, keepdim=True),
    "SWIGLU_CLAMP": _swiglu_clamp,
    "SWIGLU_OAI": _swiglu_oai,
    "TOP_K": _top_k,
    "VIEW": lambda given: given.own(0),  # as it lies in its source
    "XIELU": _xielu,
}
