"""Operations of ggml by their definitions, number by number: no formula of opcheck is used here.

A case of `ggml_graphs.CASES` is computed from the weights and the tokens alone, in float64. Its
result is ``[tokens, ...]``.
"""

from __future__ import annotations

import cmath
import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np

Array = np.ndarray
HEADS, KEYS, WIDTH = 6, 8, 16


class Text:
    """The weights, and the embeddings of some tokens. ``x(name)``: their projections."""

    def __init__(self, weights: Mapping[str, Array], tokens: Sequence[int]) -> None:
        self.weights = {name: weight.astype(np.float64) for name, weight in weights.items()}
        self.embedded, self.count = self.weights["token_embd"][list(tokens)], len(tokens)
        self.places = [70 * at + 5 for at in range(self.count)]

    def x(self, name: str) -> Array:
        return self.embedded @ self.weights[name].T

    def heads(self, name: str = "wide") -> Array:
        return self.x(name).reshape(self.count, -1, self.x(name).shape[1] // HEADS)

    def chosen(self, count: int = 2) -> Array:
        return np.argsort(-self.x("router"), axis=1)[:, :count]


Case = Callable[[Text], Array]


# -- experts ---------------------------------------------------------------------------------------


def experts(own: bool = False, count: int = 2) -> Case:
    def made(text: Text) -> Array:
        pairs, found = text.x("pairs").reshape(text.count, 2, -1), []
        for token, chosen in enumerate(text.chosen(count)):
            rows = [pairs[token, at % 2] if own else text.embedded[token] for at in range(count)]
            of_token = zip(chosen, rows, strict=True)
            found.append([text.weights["experts"][expert] @ row for expert, row in of_token])
        return np.array(found)

    return made


def with_bias(text: Text) -> Array:
    pairs, bias = text.x("pairs").reshape(text.count, 2, -1), text.weights["expert_bias"]
    return np.array([
        [pairs[token, at] + bias[expert] for at, expert in enumerate(chosen)]
        for token, chosen in enumerate(text.chosen())
    ])  # fmt: skip


# -- attention -------------------------------------------------------------------------------------


def slopes(heads: int, most: float) -> list[float]:
    """Return ALiBi's slope of each head: a geometric series; if heads are no power of 2, those of
    the next smaller one, and then every other of the next larger one.
    """
    if not most:
        return [1.0] * heads
    if math.log2(heads).is_integer():
        return [2 ** (-most / heads * (head + 1)) for head in range(heads)]
    fewer = 2 ** math.floor(math.log2(heads))
    return slopes(fewer, most) + slopes(2 * fewer, most)[::2][: heads - fewer]


def shares(scores: Sequence[float], sink: float | None = None) -> list[float]:
    """Return the softmax; a sink is one score more, whose share is left out."""
    powers = [math.exp(score) for score in scores]
    whole = sum(powers) + (0 if sink is None else math.exp(sink))
    return [power / whole for power in powers]


def soft_max(mask: bool = False, most: float = 0.0, sinks: bool = False) -> Case:
    def made(text: Text) -> Array:
        scores, found = text.heads("scores"), np.zeros((text.count, HEADS, KEYS))
        for token, head in np.ndindex(text.count, HEADS):
            slope, row = slopes(HEADS, most)[head], []
            for key in range(KEYS):
                hidden = key > KEYS - text.count + token
                distance = -math.inf if hidden else slope * (key - KEYS + 1)
                row.append(0.7 * scores[token, head, key] + (distance if mask else 0))
            found[token, head] = shares(row, text.weights["sinks"][head] if sinks else None)
        return found

    return made


def attention(most: float = 0.0, cap: float = 0.0, sinks: bool = False) -> Case:
    """Tokens see themselves and those before; queries 0 and 1 have key 0."""

    def made(text: Text) -> Array:
        q = text.heads("queries")
        k, v = (text.x(name).reshape(text.count, 3, -1) for name in ("keys", "values"))
        found = np.zeros_like(q)
        for token, head in np.ndindex(text.count, HEADS):
            row = []
            for before in range(token + 1):
                score = 0.5 * float(q[token, head] @ k[before, head // 2])
                score = cap * math.tanh(score / cap) if cap else score
                row.append(score + slopes(HEADS, most)[head] * (before - token))
            each = shares(row, text.weights["sinks"][head] if sinks else None)
            found[token, head] = sum(s * v[at, head // 2] for at, s in enumerate(each))
        return found

    return made


# -- positions -------------------------------------------------------------------------------------


def turned(
    halves: bool = False, count: int = WIDTH, start: int = 0, scale: float = 1.0,
    yarn: float = 0.0, size: float = 1.0, fast: float = 32.0, slow: float = 1.0,
    length: int = 512, factors: bool = False,
) -> Case:  # fmt: skip
    """Pairs of channels as complex numbers, times e^(i angle). ``yarn``: how much of NTK-by-parts,
    whose first ``length`` places turn the channels between ``fast`` and ``slow`` times.
    """

    def channel(turns: float) -> float:
        """Return which pair turns so often over the length."""
        return count / 2 * math.log(length / (2 * math.pi * turns), 10000.0)

    def angle(text: Text, place: int, pair: int) -> float:
        plain = place * 10000.0 ** (-2 * pair / count)
        if factors:
            plain /= text.weights["rope_factors"][pair]
        low, high = max(math.floor(channel(fast)), 0), min(math.ceil(channel(slow)), count - 1)
        kept = yarn * (1 - min(max((pair - low) / max(high - low, 0.001), 0), 1))
        return plain * scale * (1 - kept) + plain * kept

    def made(text: Text) -> Array:
        x = text.heads().copy()
        grown = size * (1 + 0.1 * math.log(1 / scale) if yarn else 1)
        for token, head, pair in np.ndindex(text.count, HEADS, count // 2):
            one = start + (pair if halves else 2 * pair)
            two = one + (count // 2 if halves else 1)
            number = complex(x[token, head, one], x[token, head, two])
            number *= cmath.rect(grown, angle(text, text.places[token], pair))
            x[token, head, one], x[token, head, two] = number.real, number.imag
        return x

    return made


# -- gates and caps --------------------------------------------------------------------------------


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def silu(x: float) -> float:
    return x * sigmoid(x)


def gelu(x: float) -> float:
    return x / 2 * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


ACTIVATIONS: dict[str, Callable[[float], float]] = {
    "reglu": lambda x: max(x, 0.0), "geglu": gelu, "swiglu": silu,
    "geglu_erf": lambda x: x / 2 * (1 + math.erf(x / math.sqrt(2))),
    "geglu_quick": lambda x: x * sigmoid(1.702 * x),
}  # fmt: skip


def each(function: Callable[..., float], *parts: Array) -> Array:
    return np.vectorize(function, otypes=[float])(*parts)


def gated(name: str, swapped: bool = False) -> Case:
    """The first half of a row goes through the activation, or the second if they are swapped."""

    def made(text: Text) -> Array:
        first, second = np.split(text.x("wide"), 2, 1)
        gate, up = (second, first) if swapped else (first, second)
        return each(ACTIVATIONS[name], gate) * up

    return made


def gated_apart(name: str) -> Case:
    return lambda text: each(ACTIVATIONS[name], text.x("gate")) * text.x("up")


def clamped(formula: Callable[[float, float], float]) -> Case:
    def one(gate: float, up: float) -> float:
        return formula(min(gate, 1.5), min(max(up, -1.5), 1.5))

    return lambda text: each(one, text.x("gate"), text.x("up"))


def xielu(x: float) -> float:
    """Published with an alpha for each sign, through a softplus; here 0.6 and 0.8, beta 0.5."""
    rising, falling = math.log1p(math.exp(0.6)), 0.5 + math.log1p(math.exp(0.8))
    return rising * x * x + 0.5 * x if x > 0 else falling * (math.expm1(x) - x) + 0.5 * x


def capped(text: Text) -> Array:
    return 5 * np.tanh(text.x("wide") / 5)


YARN = {"scale": 0.25, "yarn": 1.0, "size": 0.9}
CASES: dict[str, Case] = {
    "mul_mat_id": experts(), "mul_mat_id_each": experts(own=True),
    "mul_mat_id_in_turn": experts(own=True, count=4), "mul_mat_id_f16": experts(own=True),
    "mul_mat_id_q8_0": experts(), "add_id": with_bias, "argsort_view": Text.chosen,
    "top_k": lambda text: text.chosen(3),
    "soft_max": soft_max(), "soft_max_mask": soft_max(True), "soft_max_mask_f16": soft_max(True),
    "soft_max_alibi": soft_max(True, 8.0), "soft_max_sinks": soft_max(True, sinks=True),
    "soft_max_alibi_sinks": soft_max(True, 4.0, True),
    "rope": turned(), "rope_halves": turned(True), "rope_partial": turned(True, 8),
    "rope_offset": turned(True, 8, 4), "rope_scaled": turned(scale=0.25),
    "rope_yarn": turned(**YARN),
    "rope_yarn_halves": turned(True, **YARN, fast=16.0, slow=2.0, length=4096),
    "rope_yarn_part": turned(True, **{**YARN, "yarn": 0.5}),
    "rope_factors": turned(True, factors=True), "rope_factors_yarn": turned(factors=True, **YARN),
    **{f"{name}_one": gated(name) for name in ACTIVATIONS},
    **{f"{name}_two": gated_apart(name) for name in ACTIVATIONS},
    **{f"{name}_swapped": gated(name, True) for name in ("reglu", "geglu", "swiglu")},
    "swiglu_oai": clamped(lambda gate, up: gate * sigmoid(1.702 * gate) * (up + 1)),
    "swiglu_clamp": clamped(lambda gate, up: silu(gate) * up),
    "xielu": lambda text: each(xielu, text.x("wide")),
    "flash": attention(), "flash_f32": attention(), "flash_q8_0": attention(),
    "flash_alibi": attention(8.0), "flash_cap": attention(cap=2.0),
    "flash_sinks": attention(sinks=True), "flash_all": attention(8.0, 2.0, True),
    "soft_cap": capped,
}  # fmt: skip
