"""Recordings of statistics alone: what rounding does is no difference, and bugs still are."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

import llmdebug_nb as ld
import recordings
from llmdebug_nb.comparison.choices import moved, moved_norm, near_ties
from llmdebug_nb.comparison.rules import Rule
from llmdebug_nb.core import constants
from llmdebug_nb.core.kernels.masks import hide_as_much, hides_tokens
from llmdebug_nb.core.kernels.summary import summarize
from llmdebug_nb.core.records import Summary
from test_places import AGREED

HALF = torch.bfloat16


def decoder(kind: str, attention: str, dtype=torch.float32, seed: int = 0):
    """Return a small decoder, or a mixture of experts."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(seed)
    settings = {
        "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "vocab_size": 128,
        "num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.2,
        "pad_token_id": 0, "eos_token_id": None,
    }  # fmt: skip
    if kind == "Mixtral":
        settings |= {"num_local_experts": 8, "num_experts_per_tok": 2}
    make = getattr(transformers, f"{kind}ForCausalLM")
    config = getattr(transformers, f"{kind}Config")(**settings)
    model = make._from_config(config, attn_implementation=attention).eval()
    for parameter in model.parameters():
        if parameter.ndim == 1:  # norms that are all one hide what they do
            parameter.data += 0.1 * torch.randn_like(parameter)
        parameter.data = parameter.data.to(dtype)
    return model


def compared(golden, mine, change=None, mode=("module", "api")):
    ids = torch.randint(3, 128, (2, 64), generator=torch.Generator().manual_seed(7))
    if change is not None:
        change(mine)
    options = {"mode": mode, "stats_only": True}
    with torch.no_grad():
        runs = recordings.recorded_both(golden, mine, lambda m: m(ids, use_cache=False), **options)
    return ld.compare(*runs, progress=False)


@pytest.mark.parametrize("kind", ["Llama", "Mixtral"])
def test_attention_of_another_kind_in_half_precision_agrees_but_for_chance(kind):
    alarms = []
    for seed in range(6):
        pair = (decoder(kind, attention, HALF, seed) for attention in ("eager", "sdpa"))
        mode = ("module", "api") if kind == "Llama" else "module"
        report = compared(*pair, mode=mode)
        if report.verdict not in AGREED or report.findings:
            alarms.append(report.summary())
    assert len(alarms) <= 2, alarms  # how kernels round is chance, and so is where ties are


def test_a_near_tie_is_told_and_what_follows_it_is_compared():
    pair = (decoder("Mixtral", attention, HALF) for attention in ("eager", "sdpa"))
    report = compared(*pair, mode="module")
    assert Rule.NEAR_TIE in {d.rule for d in report.differences}
    left = [d for d in report.differences if d.verdict == "unmatched" and d.pair.mine is not None]
    assert len(left) < len(report.differences) / 6


def test_statistics_of_another_batch_are_not_compared_and_the_reason_is_told():
    runs = []
    for rows in (1, 2):
        model = decoder("Llama", "sdpa")
        with ld.dump(model, name=f"rows{rows}", stats_only=True) as run, torch.no_grad():
            model(torch.arange(3, 11).repeat(rows, 1))
        runs.append(run)
    report = ld.compare(*runs, progress=False)
    assert report.verdict == "incomparable"
    assert "statistics of other batches. Record values" in report.summary()


@pytest.mark.parametrize("padded", [True, False])
def test_what_statistics_cover_besides_tokens_is_told(padded):
    ids = torch.arange(3, 27).view(2, 12)
    mask = torch.ones_like(ids)
    golden, mine = (decoder("Llama", attention) for attention in ("eager", "sdpa"))
    if padded:
        mask[1, :4] = 0
    else:
        mine.model.layers[2].self_attn.o_proj.weight.data *= 1.1

    def work(model):
        with torch.no_grad():
            model(ids, attention_mask=mask, use_cache=False)

    report = ld.compare(
        *recordings.recorded_both(golden, mine, work, stats_only=True), progress=False
    )
    assert report.verdict == "diverged"
    told = [line for line in report.notes() if line.startswith("Padding")]
    assert bool(told) is padded
    assert all("Values (stats_only=False) tell" in line for line in told)


@given(st.integers(2, 9), st.integers(0, 4), st.booleans())
def test_order_hides_no_tokens_and_padding_does(tokens, padding, as_bool):
    seen = torch.ones(2, 1, tokens, tokens, dtype=torch.bool).tril()
    padding = min(padding, tokens - 1)
    seen[1, :, :, :padding] = False
    mask = seen if as_bool else torch.where(seen, 0.0, -3e38)
    assert hides_tokens(summarize(mask)) is (padding > 0)


def _shifted(module, args, out):
    logits, values, index = out
    return logits, values, (index + 1) % logits.shape[-1]


def _norm(layers):
    layers[2].post_attention_layernorm.variance_epsilon = 0.3


def _experts(layers):
    layers[1].mlp.gate.register_forward_hook(_shifted)


@pytest.mark.parametrize(
    ("bug", "place", "dtype"),
    [
        (_norm, "model.layers.2.post_attention_layernorm", torch.float32),
        (_norm, "model.layers.2.post_attention_layernorm", HALF),
        (_experts, "model.layers.1.mlp.gate", torch.float32),
    ],
)
def test_a_bug_is_found_by_statistics(bug, place, dtype):
    pair = (decoder("Mixtral", attention, dtype) for attention in ("eager", "sdpa"))
    report = compared(*pair, lambda model: bug(model.model.layers))
    assert report.verdict == "diverged"
    assert report.findings[0].path.partition("/")[0] == place, report.summary()


class Masked(nn.Module):
    """Attention over scores that are masked, as dropout of other numbers made them."""

    def forward(self, x):
        x = F.dropout(x, 0.5, training=True)
        scores = x @ x.transpose(-1, -2)
        hides = torch.full(scores.shape, torch.finfo(x.dtype).min).triu(1)
        return torch.softmax(scores + hides, -1) @ x


def test_masked_scores_are_not_taken_for_equal_and_random_numbers_are_told():
    x = torch.randn(2, 9, 8, generator=torch.Generator().manual_seed(0))
    report = recordings.compared(Masked(), Masked(), x, mode="api", stats_only=True)
    assert report.verdict == "nondeterministic", report.summary()
    assert Rule.MASK_ALONE in {d.rule for d in report.differences}


@given(st.integers(1, 40), st.integers(0, 40), st.sampled_from([-math.inf, -3e38, -1e9]))
def test_statistics_of_masked_tensors_tell_how_many_entries_are_hidden(shown, hidden, fill):
    draw = torch.Generator().manual_seed(shown)
    both = []
    for more in (0, 1):
        x = torch.cat([torch.randn(shown, generator=draw), torch.full((hidden + more,), fill)])
        both.append(summarize(x))
    assert hide_as_much(both[0], both[0]) is (hidden > 0)
    assert not hide_as_much(*both)


@given(st.integers(2, 64), st.integers(4, 64), st.integers(0, 100))
def test_one_other_place_is_a_near_tie_and_none_is_nothing(n, times, seed):
    places = torch.arange(n).repeat(times)
    draw = torch.Generator().manual_seed(seed)
    at, to = torch.randint(n, (2,), generator=draw).tolist()
    other = places.clone()
    other[at] = to
    golden, mine = summarize(places.reshape(-1, 1)), summarize(other.reshape(-1, 1))
    assert moved(golden, golden) == 0.0
    assert moved(golden, mine) <= near_ties(golden, 0.0) + 1e-9
    assert near_ties(golden, 0.0) <= near_ties(golden, 0.1) <= max(6.0, places.numel() / 4)


@pytest.mark.parametrize("figure", [None, math.nan, math.inf, -math.inf, 1e308, -1e308])
@pytest.mark.parametrize("shape", [(0,), (2, 0), (), (4, 2), (-1, 3)])
@pytest.mark.parametrize("dtype", ["int64", "float32", "float64", "bool", "nothing"])
def test_absurd_statistics_are_no_near_ties_and_raise_nothing(figure, shape, dtype):
    odd = Summary(dtype, shape, figure, figure, figure, figure, 0, 0, 0, "xxh3:0")
    plain = Summary(dtype, shape, -9001.0, 1.0, 0.5, 2.0, 0, 0, 0, "xxh3:1")
    for golden, mine in ((odd, plain), (plain, odd)):
        assert golden.numel <= 0 or moved(golden, mine) >= 0.0
        assert hide_as_much(golden, mine) in (True, False)
        assert hides_tokens(golden) in (True, False)


def test_large_values_are_no_mask_and_a_scale_is_no_choice():
    x = 2e4 * torch.randn(4096, generator=torch.Generator().manual_seed(0))
    assert not hide_as_much(summarize(x), summarize(1.1 * x))
    codes = (40 * torch.randn(64, 64, generator=torch.Generator().manual_seed(0))).to(torch.int8)
    scaled = (codes.float() * 1.1).round().to(torch.int8)
    golden, mine = summarize(codes), summarize(scaled)
    assert moved(golden, mine) > near_ties(golden, 0.01)


def test_places_that_are_all_others_are_no_near_ties():
    draw = torch.Generator().manual_seed(0)
    scores = torch.randn(400, 16, generator=draw)
    golden = summarize(scores.topk(2).indices)
    assert moved(golden, summarize((scores.topk(2).indices + 1) % 16)) > near_ties(golden, 1e-5)


@given(st.integers(1, 30), st.integers(0, 1000))
def test_tokens_that_go_on_otherwise_move_the_norm_by_chance_only_so_far(count, seed):
    draw = torch.Generator().manual_seed(seed)
    golden = torch.randn(64, 32, generator=draw)
    mine = golden.clone()
    at = torch.randperm(64, generator=draw)[:count]
    mine[at] = torch.randn(count, 32, generator=draw)
    off = abs(float(mine.norm() / golden.norm()) - 1)
    chosen = summarize(torch.zeros(64, 1, dtype=torch.long))
    assert off <= constants.AMPLIFICATION * moved_norm(chosen, count)
