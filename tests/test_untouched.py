"""Behind a near tie, what no other choice has touched is compared; the rest is not."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import llmdebug_nb as ld
from llmdebug_nb.comparison.choices import in_one_order, without
from llmdebug_nb.comparison.rules import Rule
from llmdebug_nb.comparison.untouched import Steps
from llmdebug_nb.core.kernels.padding import Blanks
from llmdebug_nb.core.records import RootCall, Site
from models import prompt
from test_places import AGREED

ROWS, TOKENS, TIED = 2, 12, 5  # in the second row, the sixth token has a near tie


def experts(layers: int = 3):
    """Return a mixture of experts in float32."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.MixtralConfig(
        num_hidden_layers=layers, hidden_size=32, intermediate_size=40, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=60, num_local_experts=4, num_experts_per_tok=2,
        initializer_range=0.3, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    make = transformers.MixtralForCausalLM
    return make._from_config(config, attn_implementation="eager").eval()


def near_tie(sign: float, token: int = TIED):
    """Return a hook that gives the second and the third expert of a token about one score."""

    def hook(module, args, out):
        logits = out[0]
        if len(logits) != ROWS * TOKENS:
            return out
        row = logits[TOKENS + token].detach()
        second, third = row.topk(3).indices[1:]
        tied = logits.detach().clone()
        tied[TOKENS + token, third] = row[second]
        # some units in the last place of both the score and its exponential, on any processor
        tied[TOKENS + token, second] = row[second] + sign * 3e-7 * row[second].abs().clamp_min(1.0)
        logits = tied + (logits - logits.detach())  # adds nothing but the gradient
        values, index = logits.softmax(-1).topk(2, -1)
        return logits, values / values.sum(-1, keepdim=True), index

    return hook


def rounded_otherwise(module, args, out):
    """Move every other element to the next number: this is what rounding may do."""
    moved = torch.nextafter(out, out.new_tensor(torch.inf))
    return torch.where(torch.arange(out.shape[-1]) % 2 == 0, moved, out)


def pair(change=None, run=None, ties=((0, TIED),), limits=None, **options):
    """Record two programs that choose otherwise at near ties; mine may have a bug besides.

    ``ties``: the layer and the token of each, in the second row.
    """
    ids = prompt(TOKENS, ROWS) % 50 + 3
    runs = []
    for sign, name in ((1.0, "golden"), (-1.0, "mine")):
        model = experts()
        for layer, token in ties:
            model.model.layers[layer].mlp.gate.register_forward_hook(near_tie(sign, token))
        if name == "mine":
            model.model.embed_tokens.register_forward_hook(rounded_otherwise)
            if change is not None:
                change(model.model.layers)
        with ld.dump(model, **{"name": name, "tokens": "all", "mode": "module", **options}) as dump:
            (run or (lambda model, ids: model(ids, use_cache=False)))(model, ids)
        runs.append(dump)
    return ld.compare(*runs, progress=False, limits=limits)


def counts(report) -> Counter[Rule]:
    return Counter(d.rule for d in report.differences)


def test_what_is_behind_a_near_tie_is_compared_at_the_tokens_that_it_does_not_touch():
    report = pair()
    assert report.verdict == "within_noise", report.first_divergence
    found = counts(report)
    assert found[Rule.UNTOUCHED] > 3 * found[Rule.AFTER_TIE] > 0
    assert f"{found[Rule.UNTOUCHED]:,} were compared only at the tokens" in report.summary()


def _scaled_weight(layers):
    layers[2].self_attn.o_proj.weight.data *= 1.01


def _other_expert(layers):
    layers[2].mlp.experts.down_proj.data = layers[2].mlp.experts.down_proj.data.roll(1, 0)


def _one_token(layers):
    def hook(module, args, out):
        out = out.clone()
        out[1, TIED - 1] *= 1.5
        return out

    layers[1].post_attention_layernorm.register_forward_hook(hook)


def _other_row(layers):
    def hook(module, args, out):
        out = out.clone()
        out[0, -1] *= 1.5
        return out

    layers[1].post_attention_layernorm.register_forward_hook(hook)


BUGS = {
    _scaled_weight: "model.layers.2.self_attn.o_proj",
    _other_expert: "model.layers.2.mlp.experts",
    _one_token: "model.layers.1.post_attention_layernorm",
    _other_row: "model.layers.1.post_attention_layernorm",
}


@pytest.mark.parametrize("bug", BUGS)
def test_a_bug_behind_a_near_tie_is_found_where_it_is(bug):
    report = pair(bug)
    assert report.verdict == "diverged"
    assert report.findings[0].path == BUGS[bug], report.summary()


@pytest.mark.parametrize("token", range(TOKENS))
def test_each_near_tie_touches_its_token_and_those_behind_it(token):
    def bug(layers):
        def hook(module, args, out):
            out = out.clone()
            out[1, token] *= 1.5
            return out

        layers[2].input_layernorm.register_forward_hook(hook)

    ties = (0, 8), (1, 3), (1, 6)
    assert pair(ties=ties).verdict == "within_noise"
    assert pair(bug, ties=ties).verdict == ("diverged" if token < 3 else "within_noise")


def test_tokens_see_others_where_attention_is_not_causal():
    def both_ways(model, ids):
        for layer in model.model.layers:
            layer.self_attn.is_causal = False
        seen = torch.zeros(ROWS, 1, TOKENS, TOKENS)
        model(ids, attention_mask=seen, use_cache=False)

    report = pair(run=both_ways)
    assert report.verdict == "within_noise", report.first_divergence
    assert counts(report)[Rule.UNTOUCHED]  # of the other row
    wrong = pair(_other_row, run=both_ways)
    assert wrong.verdict == "diverged"


def test_a_row_without_a_near_tie_is_compared_in_later_steps():
    def run(model, ids):
        with torch.no_grad():
            model.generate(ids, max_new_tokens=3, min_new_tokens=3, do_sample=False)

    def later(layers):
        def hook(module, args, out):
            return out if out.shape[1] > 1 else out * torch.tensor([1.2, 1.0])[:, None, None]

        layers[1].input_layernorm.register_forward_hook(hook)

    report = pair(run=run)
    assert report.verdict == "within_noise", report.first_divergence
    assert {d.site.step for d in report.differences if d.rule is Rule.UNTOUCHED} == {0, 1, 2}
    wrong = pair(later, run=run)
    assert wrong.verdict == "diverged"
    assert wrong.findings[0].path == "model.layers.1.input_layernorm"
    assert wrong.findings[0].difference.site.step == 1


def test_a_loop_by_hand_has_touched_tokens_in_its_cache():
    def run(model, ids):
        with torch.no_grad():
            cache = model(ids, use_cache=True).past_key_values
            for token in (5, 6):
                model(ids[:, token : token + 1], past_key_values=cache, use_cache=True)

    report = pair(run=run)
    assert report.verdict == "within_noise", report.first_divergence
    assert {d.site.step for d in report.differences if d.rule is Rule.UNTOUCHED} == {0, 1, 2}


def test_a_call_without_a_cache_is_compared_however_many_calls_came_before():
    def run(model, ids):
        for _ in range(3):
            model(ids, use_cache=False)

    def later(layers):
        calls = iter(range(3))

        def hook(module, args, out):
            return out * 1.2 if next(calls) == 2 else out

        layers[1].input_layernorm.register_forward_hook(hook)

    report = pair(later, run, ties=((0, 0),))
    assert report.findings[0].path == "model.layers.1.input_layernorm"
    assert report.findings[0].difference.site.step == 2


def test_a_backward_pass_adds_all_tokens_up_so_nothing_behind_it_is_compared():
    def train(model, ids):
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        for _ in range(2):
            model(ids, labels=ids, use_cache=False).loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    report = pair(run=train, phase="both")
    assert report.verdict == "within_noise", report.first_divergence
    at = {(d.site.step, d.site.phase) for d in report.differences if d.rule is Rule.UNTOUCHED}
    assert at == {(0, "forward")}


def test_what_the_user_has_a_limit_for_is_judged_by_it_as_a_whole():
    bound = {"model.layers.2.*": {"max_absolute_error": 0.0}}
    report = pair(limits=bound)
    assert report.verdict == "diverged"
    bad = [d for d in report.differences if d.verdict == "diverged"]
    assert {d.site.path.split(".")[2] for d in bad} == {"2"}
    assert not any(d.rule is Rule.UNTOUCHED for d in bad)


class Unsorted(torch.nn.Module):
    """Chooses the best of each row, and gives them in some order."""

    def __init__(self, flipped: bool = False, mixed: bool = False) -> None:
        super().__init__()
        self.scores = torch.nn.Linear(16, 8, bias=False)
        self.flipped, self.mixed = flipped, mixed

    def forward(self, x):
        scores = self.scores(x)
        values, index = scores.topk(3, -1)
        if self.flipped:
            values, index = values.flip(-1), index if self.mixed else index.flip(-1)
        return scores, values, index


@pytest.mark.parametrize("mixed", [False, True])
def test_the_order_of_a_choice_counts_only_if_values_and_places_have_other_ones(mixed):
    runs = []
    for model in (Unsorted(), Unsorted(True, mixed)):
        torch.manual_seed(3)
        torch.nn.init.normal_(model.scores.weight)
        x = torch.randn(20, 16)
        with ld.dump(model, name=f"run{len(runs)}", tokens="all", mode="module") as run:
            model(x if not runs else rounded_otherwise(None, None, x))
        runs.append(run)
    report = ld.compare(*runs, progress=False)
    assert (report.verdict in AGREED) is not mixed


@given(seed=st.integers(0, 10_000), tokens=st.integers(1, 6), k=st.integers(1, 5))
def test_values_in_one_order_are_those_that_belong_to_the_same_places(seed, tokens, k):
    draw = torch.Generator().manual_seed(seed)
    scores = torch.randn(tokens, 7, generator=draw)
    index = scores.topk(k).indices
    order = torch.rand(tokens, k, generator=draw).argsort(-1)
    other = index.gather(-1, order)
    values = scores.gather(-1, index), scores.gather(-1, other)
    golden, mine = in_one_order(*values, (index, other))
    assert torch.equal(golden, mine)
    assert torch.equal(golden.sort(-1).values, values[0].sort(-1).values)


def test_only_the_rows_of_other_tokens_are_left_of_a_choice():
    blanks = Blanks(2, 5, 3, bytes([0, 0, 0, 1, 1, 0, 0, 0, 0, 1]))
    places = torch.arange(12).reshape(6, 2)
    assert without(places, blanks).tolist() == [[0, 1], [6, 7], [8, 9]]
    assert torch.equal(without(places.view(2, 3, 2), blanks), without(places, blanks))
    assert without(places.view(3, 4), blanks).shape == (3, 4)


def test_a_matrix_of_one_row_has_no_heads_in_its_first_axis():
    blanks = Blanks(1, 8, 8, bytes([0] * 7 + [1]))
    assert [each.axis for each in blanks.readings((8, 8))] == [0]
    assert not [*blanks.readings((32, 8))]
    assert [each.axis for each in blanks.readings((4, 8, 6))] == [1]


def test_a_step_with_several_batches_tells_none():
    calls = [RootCall(i, 0, step, "forward", 7, None, rows) for i, (step, rows) in
             enumerate([(0, 2), (1, 2), (1, 3), (2, 2)])]  # fmt: skip
    steps = Steps(calls)
    known = [steps.of(Site("", step)) is not None for step in range(4)]
    assert known == [True, False, True, False]
    assert not steps.is_causal
    assert Steps([RootCall(0, 0, 0, "decode", 1, 9, 2)]).is_causal
    assert Steps([RootCall(0, 0, 0, "decode", 1, None, 2)]).is_causal
    assert not Steps([RootCall(0, 0, 0, "decode", 1, 9, 2)], False).is_causal
