"""What mine's value is of golden's: each relation, made by an independent expression, is found."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from llmdebug_nb.core.dtypes import DTYPES
from llmdebug_nb.relation import evidence as e
from llmdebug_nb.relation.distortion import describe_mask
from llmdebug_nb.relation.relation import relation, weight_relation

SHAPE = BATCH, HEADS, TOKENS, CHANNELS = 2, 8, 12, 16
LIMITS = {torch.float32: 1e-3, torch.bfloat16: 1e-2}
SEEDS = st.integers(0, 2**30)


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=seeded(seed))


def heavy(tails: str, *shape: int, seed: int) -> Tensor:
    """Return random values: normal, Student's t with 3 degrees, or with outlier channels."""
    values = normal(*shape, seed=seed)
    if tails == "student":
        chi = normal(3, *shape, seed=seed + 1).square().mean(0)
        return values / chi.sqrt()
    if tails == "outliers":
        values[..., ::5] *= 30
    return values


@dataclass(frozen=True)
class Drawn:
    """Random values, in a form that is short to print."""

    tails: str
    dtype: torch.dtype
    seed: int

    @property
    def values(self) -> Tensor:
        return heavy(self.tails, *SHAPE, seed=self.seed).to(self.dtype)


TAILS = st.sampled_from(["normal", "student", "outliers"])
DRAWN = st.builds(Drawn, TAILS, st.sampled_from(list(LIMITS)), SEEDS)


def noisy(x: Tensor, limit: float, seed: int) -> Tensor:
    return (x * (1 + limit / 5 * normal(*x.shape, seed=seed + 3 * 2**30))).to(x.dtype)


def found(golden: Tensor, mine: Tensor, **kwargs):
    kwargs.setdefault("limit", LIMITS.get(golden.dtype, 1e-3))
    answer = relation(golden, mine, groups=kwargs.pop("groups", (HEADS,)), **kwargs)
    assert answer is None or (answer.kind and answer.error < kwargs["limit"])
    return answer


@dataclass(frozen=True)
class Case:
    kind: str
    make: Callable[[Tensor], Tensor]  # mine of golden, by another expression than the product's
    says: str


def interleave(x: Tensor) -> Tensor:
    """Half-split to interleaved: the first of each half, the second of each half, ..."""
    first, second = x.chunk(2, -1)
    return torch.stack([first, second], -1).flatten(-2)


def changed(x: Tensor, axis: int, index: int, value: Tensor) -> Tensor:
    x = x.clone()
    x.select(axis, index).copy_(value)
    return x


def alone(x: Tensor) -> Tensor:
    """Return other values of golden's size."""
    return normal(*x.shape, seed=99) * x.float().std()


STEPS = torch.linspace(0.5, 2.0, CHANNELS)
CASES = {
    "negated": Case(e.NEGATED, lambda x: 0 - x, "negated"),
    "doubled": Case(e.SCALED, lambda x: x + x, "times 2"),
    "scaled twice": Case(e.SCALED, lambda x: x / math.sqrt(CHANNELS), "times 0.25, 1 / sqrt(16)"),
    "scaled never": Case(e.SCALED, lambda x: x * 4, "times 4, the square root of 16"),
    "summed": Case(e.SCALED, lambda x: x * TOKENS, "times 12, the size of axis 2"),
    "averaged": Case(e.SCALED, lambda x: x / TOKENS, "1 / 12, the size of axis 2"),
    "an odd factor": Case(e.SCALED, lambda x: x * 1.7, "times 1.7"),
    "heads before tokens": Case(
        e.PERMUTED,
        lambda x: torch.einsum("bhtd->bthd", x).reshape(x.shape),
        "axes in order [0, 2, 1, 3], viewed as",
    ),
    "flipped": Case(e.FLIPPED, lambda x: x[:, :, range(TOKENS - 1, -1, -1)], "axis 2 flipped"),
    "other heads": Case(
        e.REORDERED,
        lambda x: torch.stack([x[:, at] for at in (3, 1, 7, 0, 2, 4, 6, 5)], 1),
        "mine has 3, 1, 7, 0, 2, 4, 6, 5, right: 0, 1, 2, 3",
    ),
    "two heads": Case(
        e.REORDERED,
        lambda x: torch.stack([x[:, at] for at in (0, 1, 6, 3, 4, 5, 2, 7)], 1),
        "heads are in another order along axis 1: at 2, 6 mine has 6, 2",
    ),
    "other heads, scaled": Case(
        e.REORDERED,
        lambda x: torch.stack([x[:, at] / 4 for at in (3, 1, 7, 0, 2, 4, 6, 5)], 1),
        "right: 0, 1, 2, 3, 4, 5, 6, 7, times 0.25",
    ),
    "transposed heads": Case(
        e.TILED,
        lambda x: torch.stack([x[:, at] for at in (0, 4, 1, 5, 2, 6, 3, 7)], 1),
        "mine has 0, 4, 1, 5, 2, 6, 3, 7",
    ),
    "rolled": Case(
        e.SHIFTED,
        lambda x: torch.cat([x[:, :, -3:], x[:, :, :-3]], 2),
        "moved by +3 along axis 2, round the end",
    ),
    "shifted": Case(
        e.SHIFTED,
        lambda x: torch.cat([x[:, :, 2:], alone(x)[:, :, :2].to(x.dtype)], 2),
        "moved by -2 along axis 2, with other values at the border",
    ),
    "interleaved": Case(e.INTERLEAVED, interleave, "axis 3 interleaved where golden is half-split"),
    "half-split": Case(
        e.INTERLEAVED,
        lambda x: torch.cat([x[..., ::2], x[..., 1::2]], -1),
        "axis 3 half-split where golden is interleaved",
    ),
    "halves": Case(
        e.HALVES, lambda x: torch.cat(x.chunk(2, -1)[::-1], -1), "two halves of axis 3 swapped"
    ),
    "a sign of rotate_half": Case(
        e.SIGNS,
        lambda x: torch.cat([0 - x[..., :8], x[..., 8:]], -1),
        "the other sign at 0-7 of axis 3",
    ),
    "one token": Case(
        e.PART, lambda x: changed(x, 2, 5, alone(x)[:, :, 5]), "only 5 of axis 2 differs"
    ),
    "one head is scaled": Case(
        e.PART, lambda x: changed(x, 1, 6, x[:, 6] * 3), "6 of the 8 heads along axis 1 differs"
    ),
    "later tokens": Case(
        e.PART,
        lambda x: torch.cat([x[:, :, :4], alone(x)[:, :, 4:].to(x.dtype)], 2),
        "0-3 of axis 2 agree, 4-11 differ",
    ),
    "scale of channels": Case(
        e.CHANNEL_SCALE, lambda x: (x * STEPS.flip(0) ** 1.5).to(x.dtype), "index of axis 3"
    ),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@settings(deadline=None, max_examples=12)
@given(drawn=DRAWN, noise=st.booleans(), seed=SEEDS)
def test_a_relation_is_found_with_its_parameters_with_and_without_noise(case, drawn, noise, seed):
    golden = drawn.values
    mine = case.make(golden.double()).to(golden.dtype)
    mine = noisy(mine, LIMITS[golden.dtype], seed) if noise else mine
    answer = found(golden, mine)
    assert answer is not None
    assert (answer.kind, case.says in answer.says) == (case.kind, True), answer.says


@settings(deadline=None, max_examples=60)
@given(DRAWN, SEEDS, TAILS)
def test_unrelated_values_have_no_relation(drawn, seed, tails):
    golden = drawn.values
    mine = heavy(tails, *SHAPE, seed=seed + 2**31).to(golden.dtype)
    assert found(golden, mine) is None


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=3), SEEDS, st.sampled_from([0.05, 1.0]))
def test_unrelated_small_tensors_and_norm_weights_have_no_relation(shape, seed, spread):
    golden = 1 + spread * normal(*shape, seed=seed)
    mine = 1 + spread * normal(*shape, seed=seed + 1)
    for limit in (1e-4, 1e-2):
        assert found(golden, mine, limit=limit) is None


@settings(deadline=None, max_examples=10)
@given(SEEDS, st.sampled_from(["normal", "student"]))
def test_long_vectors_are_not_sorted_into_each_other(seed, tails):
    golden, mine = (heavy(tails, 20_000, seed=seed + at) for at in (0, 5))
    assert found(golden, mine, limit=1e-2) is None


@settings(deadline=None, max_examples=25)
@given(DRAWN, SEEDS)
def test_rounding_noise_is_no_relation(drawn, seed):
    golden = drawn.values
    assert found(golden, noisy(golden, LIMITS[golden.dtype], seed)) is None
    assert found(golden, golden.clone()) is None


@pytest.mark.parametrize("name", ["bfloat16", "float16", "float8_e4m3fn", "float8_e5m2"])
@settings(deadline=None, max_examples=12)
@given(seed=SEEDS, kept=st.booleans())
def test_a_coarser_dtype_is_named_whatever_dtype_mine_has(name, seed, kept):
    golden = normal(*SHAPE, seed=seed)
    mine = golden.to(DTYPES[name])
    answer = found(golden, mine if kept else mine.float())
    assert (answer.kind, answer.says) == (e.ROUNDED, f"mine is golden's value rounded to {name}")
    assert bool(answer.advice) is not kept


@settings(deadline=None, max_examples=25)
@given(SEEDS, st.floats(-50, 50).filter(lambda x: abs(x) > 0.1 and abs(abs(x) - 1) > 0.1))
def test_an_added_constant_is_found(seed, by):
    answer = found(golden := normal(*SHAPE, seed=seed), golden + by)
    assert answer.kind == e.OFFSET
    assert float(answer.says.split()[-1]) == pytest.approx(abs(by), rel=1e-3)
    assert ("plus" in answer.says) is (by > 0)


@settings(deadline=None, max_examples=25)
@given(SEEDS, st.booleans())
def test_norm_weights_with_and_without_the_one_are_told(seed, more):
    w = 0.2 * normal(64, seed=seed)
    golden, mine = (w, 1 + w) if more else (1 + w, w)
    answer = found(golden, noisy(mine, 1e-3, seed))
    assert answer.kind == e.ONE_PLUS
    assert answer.says.endswith("1 + golden's value" if more else "minus 1")


@settings(deadline=None, max_examples=25)
@given(SEEDS)
def test_positions_and_tokens_that_are_off_by_one(seed):
    tokens = torch.randint(0, 50_000, (2, 40), generator=seeded(seed))
    assert found(tokens, tokens + 1).kind == e.ONE_PLUS
    labels = torch.cat([tokens[:, 1:], torch.full((2, 1), -100)], 1)
    assert "moved by -1 along axis 1" in found(tokens, labels).says
    assert found(tokens, tokens.clone()) is None


@settings(deadline=None, max_examples=25)
@given(SEEDS, st.booleans())
def test_a_bias_is_found(seed, noise):
    golden, bias = normal(*SHAPE, seed=seed), 2 * normal(CHANNELS, seed=seed + 1)
    mine = torch.stack([golden[..., at] + bias[at] for at in range(CHANNELS)], -1)
    answer = found(golden, noisy(mine, 1e-3, seed) if noise else mine)
    assert answer.kind == e.CHANNEL_OFFSET
    told = [float(x) for x in answer.says.split(": ")[1].split(", ")[:8]]
    assert told == pytest.approx(bias[:8].tolist(), abs=0.01)


@settings(deadline=None, max_examples=25)
@given(SEEDS, st.sampled_from([1, -1]))
def test_scales_of_the_neighbouring_channel_are_told(seed, by):
    steps = torch.randint(-127, 128, (32, 64), generator=seeded(seed)).float()
    steps[:, 3] = 127
    scale = 0.1 + torch.rand(32, generator=seeded(seed))
    answer = found(steps * scale[:, None], steps * scale.roll(-by)[:, None])
    assert answer.kind == e.NEIGHBOUR_SCALE
    assert f"index i of axis 0 carries the scale of i{by:+d}" in answer.says


@settings(deadline=None, max_examples=25)
@given(SEEDS, st.floats(0.5, 3), st.booleans())
def test_a_missing_soft_cap_is_told_with_its_size(seed, relative, more):
    scores = 8 * normal(*SHAPE, seed=seed)
    cap = relative * float(scores.std())
    capped = (scores / cap).tanh() * cap
    answer = found(*((scores, capped) if more else (capped, scores)))
    assert answer.kind == e.SOFT_CAP
    assert ("after" if more else "before") in answer.says
    assert float(answer.says.split()[-1]) == pytest.approx(cap, rel=0.01)


@settings(deadline=None, max_examples=25)
@given(SEEDS, st.booleans())
def test_clipping_on_one_side_is_told(seed, ours):
    golden = normal(*SHAPE, seed=seed)
    clipped = torch.minimum(torch.maximum(golden, torch.tensor(-0.5)), torch.tensor(1.5))
    answer = found(*((golden, clipped) if ours else (clipped, golden)))
    assert answer.kind == e.CLIPPED
    assert ("mine is golden's" if ours else "golden is mine's") in answer.says
    assert "-0.5 ... 1.5" in answer.says


# --- shapes -------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=25)
@given(SEEDS)
def test_axes_in_another_order_and_reshaped(seed):
    golden = normal(*SHAPE, seed=seed)
    assert "order [0, 2, 1, 3]" in found(golden, torch.einsum("bhtd->bthd", golden)).says
    answer = found(golden, golden.flatten(2))
    assert (answer.kind, "[2, 8, 192] instead of [2, 8, 12, 16]" in answer.says) == (e.RESHAPED, 1)
    matrix = normal(24, 24, seed=seed)
    assert found(matrix, torch.einsum("ij->ji", matrix)).says == "mine is golden's value transposed"
    assert found(matrix, 2 * matrix.T).says.endswith("transposed, times 2")


@settings(deadline=None, max_examples=25)
@given(SEEDS, st.booleans())
def test_heads_flattened_before_the_transpose_are_told(seed, ours):
    heads = normal(BATCH, HEADS, TOKENS, CHANNELS, seed=seed)
    right = torch.einsum("bhtd->bthd", heads).reshape(BATCH, TOKENS, -1)
    wrong = heads.reshape(BATCH, TOKENS, -1)
    answer = found(*((right, wrong) if ours else (wrong, right)))
    assert answer.kind == e.PERMUTED
    assert "8 heads before axis 1" in answer.says


def _moves_single_heads(order):
    """Tell whether a head moves without its neighbour: else blocks of two move."""
    return any(a % 2 or b != a + 1 for a, b in zip(order[::2], order[1::2], strict=True))


@settings(deadline=None, max_examples=25)
@given(SEEDS, st.permutations(range(HEADS)).filter(_moves_single_heads))
def test_the_order_of_flattened_heads_is_told(seed, order):
    golden = normal(BATCH, TOKENS, HEADS * CHANNELS, seed=seed)
    mine = torch.cat([golden[..., at * CHANNELS : (at + 1) * CHANNELS] for at in order], -1)
    answer = found(golden, mine)
    moved = [at for at in range(HEADS) if order[at] != at]
    has = [f"mine has {', '.join(map(str, each))}" for each in (order, [order[i] for i in moved])]
    assert "heads" in answer.says
    assert answer.kind in (e.FLIPPED, e.SHIFTED, e.HALVES) or any(w in answer.says for w in has)


@settings(deadline=None, max_examples=25)
@given(SEEDS, st.sampled_from([2, 4]))
def test_repeating_as_a_whole_is_told_from_repeating_each_head(seed, times):
    heads = normal(BATCH, HEADS // times, TOKENS, CHANNELS, seed=seed)
    answer = found(heads.repeat_interleave(times, 1), torch.cat([heads] * times, 1))
    right = torch.arange(HEADS).view(-1, times).T.flatten().tolist()
    assert answer.kind == e.TILED
    assert f"mine has {', '.join(map(str, right))}, right: 0, 1" in answer.says
    assert "repeat_interleave" in answer.advice
    assert "repeated as a whole" in found(heads, torch.cat([heads] * times, 1)).says
    assert "repeats each index of axis 1" in found(heads, heads.repeat_interleave(times, 1)).says


@settings(deadline=None, max_examples=25)
@given(SEEDS, st.integers(0, 5), st.integers(1, 6))
def test_a_slice_is_told_with_its_place(seed, start, length):
    golden = normal(*SHAPE, seed=seed)
    answer = found(golden, golden[:, :, start : start + length])
    last = start + length - 1
    where = str(start) if length == 1 else f"{start}-{last}"
    assert (answer.kind, f"golden's {where} of axis 2" in answer.says) == (e.SLICED_OUT, True)


# --- weights and other tensors ------------------------------------------------------------------


@settings(deadline=None, max_examples=25)
@given(SEEDS, st.booleans())
def test_rows_for_interleaved_rotary_embedding_are_told(seed, noise):
    weight = normal(HEADS * CHANNELS, 40, seed=seed)
    mine = weight.view(HEADS, 2, CHANNELS // 2, 40).transpose(1, 2).reshape(weight.shape)
    answer = weight_relation(
        weight, noisy(mine, 1e-3, seed) if noise else mine, limit=1e-3, groups=(HEADS,)
    )
    assert answer.kind == e.INTERLEAVED
    assert "each of the 8 heads of the rows interleaved where golden is half-split" in answer.says
    assert "rotary" in answer.advice


@settings(deadline=None, max_examples=25)
@given(SEEDS)
def test_gate_and_up_the_other_way_round_are_told(seed):
    gate, up = normal(2, 48, 40, seed=seed)
    answer = weight_relation(torch.cat([gate, up]), torch.cat([up, gate]), limit=1e-3)
    assert (answer.kind, answer.says) == (e.HALVES, "mine has the two halves of the rows swapped")


@settings(deadline=None, max_examples=25)
@given(DRAWN, SEEDS, st.integers(0, 2))
def test_another_tensor_of_golden_is_named(drawn, seed, which):
    golden = drawn.values
    others = [(f"layer {at}", normal(*SHAPE, seed=seed + 2**31 + at)) for at in range(3)]
    mine = others[which][1].to(golden.dtype)
    answer = found(golden, mine, others=others)
    assert (answer.kind, answer.says) == (e.OTHER, f"mine is golden's layer {which}")


# --- masks and distributions --------------------------------------------------------------------


def attention(scores: Tensor, allowed: Tensor) -> Tensor:
    weights = scores.exp() * allowed
    return weights / weights.sum(-1, keepdim=True)


def band(low: int, high: int) -> Tensor:
    return torch.tensor([[low <= j - i <= high for j in range(TOKENS)] for i in range(TOKENS)])


WORDS = {
    "positions j <= i": band(-99, 0),
    "positions j <= i+1": band(-99, 1),
    "positions j >= i": band(0, 99),
    "positions j >= i-3 and j <= i": band(-3, 0),
    "every position": band(-99, 99),
}


@pytest.mark.parametrize("words", [w for w in WORDS if w != "positions j <= i"])
@settings(deadline=None, max_examples=10)
@given(seed=SEEDS, form=st.sampled_from(["bool", "additive", "scores", "probabilities"]))
def test_a_mask_of_other_places_is_told(words, seed, form):
    scores = normal(BATCH, HEADS, TOKENS, TOKENS, seed=seed)

    def made(allowed: Tensor) -> Tensor:
        if form == "bool":
            return allowed
        if form == "probabilities":
            return attention(scores, allowed)
        hides = -math.inf if seed % 2 else torch.finfo(torch.float32).min
        return (scores * (form == "scores")).masked_fill(~allowed, hides)

    answer = found(made(WORDS["positions j <= i"]), made(WORDS[words]))
    assert answer.kind == e.MASKED
    verb = "is true at" if form == "bool" else "keeps"  # True may mean shown or hidden
    assert answer.says == f"mine {verb} {words}, golden {verb} positions j <= i"


@pytest.mark.parametrize("words", WORDS)
def test_a_mask_is_described(words):
    assert describe_mask(WORDS[words]) == words
    assert describe_mask(WORDS[words].expand(3, -1, -1)) == words


def test_padding_is_described_by_its_keys():
    allowed = torch.ones(4, 6, dtype=torch.bool)
    allowed[:, :2] = False
    assert (
        describe_mask(allowed) == "positions j <= i" or describe_mask(allowed) == "keys 2, 3, 4, 5"
    )


def test_an_inverted_mask_is_told():
    padding = torch.rand(40, generator=seeded(1)) < 0.3
    assert found(padding, ~padding).kind == e.INVERTED


@settings(deadline=None, max_examples=25)
@given(SEEDS)
def test_a_softmax_along_another_axis_is_told(seed):
    scores = normal(BATCH, HEADS, TOKENS, CHANNELS, seed=seed)
    answer = found(attention(scores, True), attention(scores.mT, True).mT)
    assert answer.kind == e.OTHER_SOFTMAX
    assert answer.says == "mine adds up to 1 along axis 2, golden along axis 3"


# --- any input ----------------------------------------------------------------------------------

PLAIN = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int8]
ODD = [torch.bool, torch.uint8, torch.complex64, torch.float8_e4m3fn]


@st.composite
def anything(draw):
    """Draw a tensor of any dtype and shape with infinities, NaN, zeros and equal values."""
    shape = draw(st.lists(st.integers(0, 4), max_size=4))
    values = [0.0, 1.0, -1.0, 2.0, 0.5, math.nan, math.inf, -math.inf, 1e30, -1e9, 1e-40, 3e38]
    count = math.prod(shape)
    listed = draw(st.lists(st.sampled_from(values), min_size=count, max_size=count))
    dtype = draw(st.sampled_from(PLAIN + ODD))
    flat = torch.tensor(listed, dtype=torch.float64)
    if not (dtype.is_floating_point or dtype.is_complex):
        flat = flat.nan_to_num(0, 7, 7).clamp(0, 100)
    return flat.reshape(shape).to(dtype)


@settings(deadline=None, max_examples=300)
@given(anything(), anything(), st.sampled_from([0.0, 1e-3, math.inf]), st.booleans())
def test_any_two_tensors_give_an_answer_or_none(first, second, limit, same):
    second = first if same else second
    for pair in ((first, second), (first.unsqueeze(0), second)):
        answer = relation(*pair, limit=limit, groups=(0, 1, 2, 4), others=[("a", first)])
        assert answer is None or (answer.kind and answer.says)


def test_values_everywhere_the_same_are_told():
    golden = normal(*SHAPE)
    assert found(golden, golden * math.nan).says == "mine is NaN everywhere"
    assert "mine is 0 everywhere, golden is -" in found(golden, golden * 0).says
    hides = torch.full(SHAPE, -math.inf)
    assert found(golden, hides).says.startswith("mine is -inf everywhere")
    assert found(torch.ones(8), torch.zeros(8)).says.endswith("golden is 1 everywhere")


def test_a_token_of_nan_is_a_part():
    golden = normal(*SHAPE)
    mine = changed(golden, 2, 7, torch.tensor(math.nan))
    assert "only 7 of axis 2 differs" in found(golden, mine).says


def test_ten_million_elements_have_a_relation():
    golden = normal(1, 32, 2442, 128)
    changes = {"+5 along axis 1": golden[:, torch.arange(32).roll(5)], "times 2": golden * 2}
    for expected, mine in changes.items():
        found = relation(golden, mine, limit=1e-3, groups=(32,))
        assert found is not None
        assert expected in found.says
    assert relation(golden, normal(1, 32, 2442, 128, seed=1), limit=1e-3, groups=(32,)) is None


def test_golden_and_mine_are_left_as_they_are():
    golden, mine = (
        normal(*SHAPE),
        normal(*SHAPE, seed=1).masked_fill_(torch.rand(SHAPE) < 0.1, -1e9),
    )
    before = golden.clone(), mine.clone()
    found(golden, mine)
    assert torch.equal(golden, before[0])
    assert torch.equal(mine, before[1])


# --- one for all, and powers --------------------------------------------------------------------


def test_one_row_in_place_of_all_is_told_as_such_and_not_as_an_order():
    golden = normal(*SHAPE, seed=3)
    answer = found(golden, golden[1:2].expand(SHAPE).contiguous())
    assert answer.kind == e.BROADCAST
    assert "mine has golden's index 1 of axis 0 in place of all" in answer.says


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (torch.square, "golden's value squared"),
        (lambda x: 3 * x.square(), "golden's value squared, times 3"),
        (torch.reciprocal, "golden's value under 1"),
    ],
)
def test_powers_are_told(change, words):
    golden = normal(*SHAPE, seed=4)
    answer = found(golden, change(golden))
    assert (answer.kind, words in answer.says) == (e.POWER, True)


def test_the_only_index_that_is_right_is_named_in_words():
    golden = normal(1, 12, 40, seed=5)
    mine = normal(1, 12, 40, seed=6)
    mine[:, 0] = golden[:, 0]
    answer = relation(golden, mine, limit=1e-5, axes=("axis 0", "the tokens", "the channels"))
    assert answer.says == "only the first token is right; the other 11 differ"
