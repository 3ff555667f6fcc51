"""Choices among scores: rounding excuses another one only where the scores are about the same."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import llmdebug_nb as ld
from llmdebug_nb.comparison.choices import gap
from llmdebug_nb.comparison.rules import Rule
from models import prompt
from test_places import AGREED

shapes = st.tuples(st.integers(1, 4), st.integers(2, 9), st.integers(0, 10_000))


@given(shape=shapes, part=st.floats(0, 1))
def test_the_gap_is_what_the_scores_of_two_choices_differ_by(shape, part):
    tokens, n, seed = shape
    draw = torch.Generator().manual_seed(seed)
    scores = torch.randn(tokens, n, generator=draw)
    k = 1 + int(part * (n - 2))
    best = scores.topk(k).indices
    assert gap(best, best.flip(-1), scores) == 0.0
    other = scores.argsort(descending=True)[:, 1 : k + 1]  # all but the best, and the next one
    off = scores.topk(k + 1).values
    rms = scores.double().square().mean(-1).sqrt()
    each = (off[:, :k] - off[:, 1:]).double() / rms[:, None]
    assert gap(best, other, scores) == pytest.approx(float(each.max()), rel=1e-6, abs=1e-9)
    assert gap(scores.topk(k, largest=False).indices, other, scores) is not None


def test_places_that_golden_did_not_choose_by_these_scores_have_no_gap():
    scores = torch.tensor([[1.0, 3.0, 2.0]])
    assert gap(torch.tensor([[2]]), torch.tensor([[1]]), scores) is None
    assert gap(torch.tensor([[7]]), torch.tensor([[1]]), scores) is None
    assert gap(torch.tensor([1]), torch.tensor([2]), scores) == pytest.approx(1 / math.sqrt(14 / 3))


@pytest.mark.parametrize("mine", [[[1, 1]], [[1, 3]], [[-1, 1]]])
def test_a_choice_that_is_none_is_infinitely_far(mine):
    assert gap(torch.tensor([[1, 2]]), torch.tensor(mine), torch.tensor([[1.0, 3.0, 2.0]])) == (
        math.inf
    )


def test_an_order_counts_place_by_place_and_hidden_scores_do_not():
    scores = torch.tensor([[-math.inf, 2.0, 2.0, 1.0]])
    order = torch.tensor([[1, 2, 3, 0]])
    assert gap(order, torch.tensor([[2, 1, 3, 0]]), scores) == 0.0
    assert gap(order, torch.tensor([[3, 2, 1, 0]]), scores) == pytest.approx(1 / math.sqrt(3))
    assert gap(order, torch.tensor([[0, 2, 3, 1]]), scores) == math.inf


def _experts(kind):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {
        "num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 48,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 60,
        "initializer_range": 0.3, "eos_token_id": None, "pad_token_id": 0,
    }  # fmt: skip
    if kind == "mixtral":
        config = transformers.MixtralConfig(**sizes, num_local_experts=4, num_experts_per_tok=2)
        made = transformers.MixtralForCausalLM
    else:
        more = {"head_dim": 8, "num_experts": 4, "moe_intermediate_size": 24}
        config = transformers.Qwen3MoeConfig(**sizes, **more, num_experts_per_tok=1)
        made = transformers.Qwen3MoeForCausalLM
    return made._from_config(config, attn_implementation="eager").eval()


def _next_expert(module, args, out):
    return (*out[:-1], (out[-1] + 1) % 4)


def _next_for_one_token(module, args, out):
    index = out[-1].clone()
    index[0] = (index[0] + 1) % 4
    return (*out[:-1], index)


def _worst_experts(module, args, out):
    return (*out[:-1], (-out[0]).topk(out[-1].shape[-1], -1).indices)


@pytest.mark.parametrize("mode", ["module", "module+api"])
@pytest.mark.parametrize("kind", ["mixtral", "one each"])
@pytest.mark.parametrize("bug", [None, _next_expert, _next_for_one_token, _worst_experts])
def test_noise_of_another_attention_excuses_no_wrong_choice_of_experts(bug, kind, mode):
    model, ids = _experts(kind), prompt(batch=2) % 50 + 3
    runs = []
    for name in ("golden", "mine"):
        with torch.no_grad(), ld.dump(model, name=name, tokens="all", mode=mode) as run:
            model.generate(ids, max_new_tokens=3, do_sample=False)
        runs.append(run)
        model.set_attn_implementation("sdpa")
        if bug is not None:
            model.model.layers[1].mlp.gate.register_forward_hook(bug)
    report = ld.compare(*runs, progress=False)
    assert not any(d.rule is Rule.NEAR_TIE for d in report.differences)
    if bug is None:
        assert report.verdict in AGREED
        return
    assert report.verdict == "diverged"
    assert report.findings[0].path.partition("/")[0] == "model.layers.1.mlp.gate"
    assert report.findings[0].difference.site.step == 0
