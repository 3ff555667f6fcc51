"""The parameters of ggml's operations, by their places in ``op_params``.

The names and places are those of the functions in ``ggml/src/ggml.c`` that make the nodes, as of
llama-cpp-python 0.3.36. An operation that is not here has none that a result depends on, or no
formula.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

# an operation -> place of each parameter, its name, and whether it is a float
_EPS = ((0, "eps", True),)
_GATED = ((1, "swapped", False),)
_LIMIT = (3, "limit", True)
_PARAMETERS: dict[str, tuple[tuple[int, str, bool], ...]] = {
    "ARGSORT": ((0, "order", False),),
    "CLAMP": ((0, "min", True), (1, "max", True)),
    "CONCAT": ((0, "dim", False),),
    "FLASH_ATTN_EXT": ((0, "scale", True), (1, "max_bias", True), (2, "logit_softcap", True)),
    "GEGLU": _GATED,
    "GEGLU_ERF": _GATED,
    "GEGLU_QUICK": _GATED,
    "GROUP_NORM": ((0, "n_groups", False), (1, "eps", True)),
    "L2_NORM": _EPS,
    "LEAKY_RELU": ((0, "negative_slope", True),),
    "NORM": _EPS,
    "REGLU": _GATED,
    "RMS_NORM": _EPS,
    "ROPE": (
        (1, "n_dims", False), (2, "mode", False), (4, "n_ctx_orig", False), (5, "freq_base", True),
        (6, "freq_scale", True), (7, "ext_factor", True), (8, "attn_factor", True),
        (9, "beta_fast", True), (10, "beta_slow", True), (15, "n_offs", False),
    ),
    "SCALE": ((0, "scale", True), (1, "bias", True)),
    "SOFT_MAX": ((0, "scale", True), (1, "max_bias", True)),
    "SWIGLU": _GATED,
    "SWIGLU_CLAMP": (*_GATED, _LIMIT),
    "SWIGLU_OAI": (*_GATED, (2, "alpha", True), _LIMIT),
    "XIELU": ((1, "alpha_n", True), (2, "alpha_p", True), (3, "beta", True), (4, "eps", True)),
}  # fmt: skip


def parameters_of(op: str, params: Sequence[int]) -> Iterator[tuple[str, int | float]]:
    """Yield the names and values of a node's parameters. ``params``: its int32 numbers.

    A float32 is given in its shortest form: rounded to float32, it is the same number.
    """
    for place, name, is_float in _PARAMETERS.get(op, ()):
        value = int(params[place])
        yield name, float(str(np.int32(value).view(np.float32))) if is_float else value
