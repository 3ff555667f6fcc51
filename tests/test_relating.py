"""Findings say what mine's value is of golden's: which heads, which weight, which other tensor."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import llmdebug_nb as ld
from llmdebug_nb.core.errors import CorruptDumpError
from llmdebug_nb.findings.finding import Finding
from llmdebug_nb.replay.runs import Side
from recordings import record

BATCH, TOKENS, WIDTH, HEADS, PAIRS = 2, 12, 32, 4, 2
DIM = WIDTH // HEADS
LAYERS = 3


def rotary(x: Tensor, interleaved: bool = False) -> Tensor:
    """Rotate [batch, heads, tokens, dim] by position."""
    angles = torch.arange(x.shape[-2]).unsqueeze(1) * 0.5 ** torch.arange(x.shape[-1] // 2)
    if interleaved:
        a, b = x[..., ::2], x[..., 1::2]
        turned = torch.stack((-b, a), -1).flatten(-2)
        angles = angles.repeat_interleave(2, -1)
    else:
        a, b = x.chunk(2, -1)
        turned = torch.cat((-b, a), -1)
        angles = torch.cat((angles, angles), -1)
    return torch.add(torch.mul(x, angles.cos()), torch.mul(turned, angles.sin()))


class Attention(nn.Module):
    """Attention with two heads of keys for four of queries. ``change``: the bug of mine."""

    def __init__(self, change: str = "") -> None:
        super().__init__()
        self._change, self.num_heads, self.num_key_value_heads = (change,), HEADS, PAIRS
        self.q_proj, self.o_proj = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)
        self.k_proj, self.v_proj = (nn.Linear(WIDTH, PAIRS * DIM) for _ in range(2))

    def split(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:-1], -1, DIM).transpose(1, 2)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (self.split(part(x)) for part in (self.q_proj, self.k_proj, self.v_proj))
        q, k = rotary(q, "interleaved" in self._change), rotary(k)
        if "repeated" in self._change:
            k = torch.cat([k] * (HEADS // PAIRS), 1)
        else:
            k = torch.repeat_interleave(k, HEADS // PAIRS, 1)
        v = torch.repeat_interleave(v, HEADS // PAIRS, 1)
        scores = torch.matmul(q, k.transpose(2, 3))
        if "unscaled" not in self._change:
            scores = torch.mul(scores, DIM**-0.5)
        ahead = 2 if "shifted mask" in self._change else 1
        hidden = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(ahead)
        scores = torch.masked_fill(scores, hidden, float("-inf"))
        weights = torch.softmax(scores, -1)
        out = torch.matmul(weights, k if "k for v" in self._change else v)
        return self.o_proj(out.transpose(1, 2).reshape(x.shape))


class Model(nn.Module):
    """Layers of attention with a residual; only the middle one has the bug."""

    def __init__(self, change: str = "") -> None:
        super().__init__()
        torch.manual_seed(0)
        changes = [change if at == 1 else "" for at in range(LAYERS)]
        self.layers = nn.ModuleList(Attention(each) for each in changes)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


def recorded(model: nn.Module, name: str, **options: object) -> ld.Run:
    torch.manual_seed(1)
    x = torch.randn(BATCH, TOKENS, WIDTH)
    return record(model, lambda: model(x), name, **{"mode": "module+api", **options})


def found(mine: nn.Module, **options: object) -> Finding:
    """Return the first finding about a model in comparison with the right one."""
    runs = recorded(Model(), "golden", **options), recorded(mine, "mine", **options)
    report = ld.compare(*runs)
    assert report.findings
    return report.findings[0]


def of_weights(change: object) -> Finding:
    """Return the first finding about a model whose weights were changed."""
    mine = Model()
    with torch.no_grad():
        change(mine)
    return found(mine, mode="module", weights=True)


def test_heads_of_keys_repeated_as_a_whole_are_told_with_their_order():
    finding = found(Model("repeated"))
    assert finding.path.startswith("layers.1")
    assert "heads" in finding.relation
    assert "repeat_interleave" in finding.advice


@pytest.mark.parametrize("options", [{"mode": "module", "weights": True}])
def test_a_transposed_square_weight_is_told(options):
    mine = Model()
    weight = mine.layers[1].o_proj.weight
    weight.data = weight.data.T.contiguous()
    finding = found(mine, **options)
    assert finding.path == "layers.1.o_proj"
    assert "transposed" in finding.relation

    assert "parameter weight holds golden's values, but in other places" in finding.evidence


def test_rows_of_other_heads_are_told_as_heads():
    def change(model):
        k = model.layers[1].k_proj
        for part in (k.weight, k.bias):
            part.copy_(part.view(PAIRS, DIM, -1).flip(0).reshape(part.shape))

    finding = of_weights(change)
    assert "two heads of the rows swapped" in finding.relation
    assert "parameters weight, bias hold golden's values" in finding.evidence


def test_rows_for_another_rotary_embedding_are_told_as_interleaved():
    def change(model):
        weight = model.layers[1].q_proj.weight
        weight.copy_(weight.view(HEADS, 2, DIM // 2, -1).transpose(1, 2).reshape(weight.shape))

    finding = of_weights(change)
    assert f"each of the {HEADS} heads of the rows interleaved" in finding.relation
    assert "rotary" in finding.advice


def test_the_weight_of_another_layer_is_named():
    def change(model):
        model.layers[1].o_proj.weight.copy_(model.layers[2].o_proj.weight)

    finding = of_weights(change)
    assert "layers.2.o_proj.weight" in finding.relation


def test_a_negated_weight_does_not_hold_the_same_values():
    finding = of_weights(lambda model: model.layers[1].o_proj.weight.neg_())
    assert finding.relation == "mine is golden's value negated"
    assert "its parameter weight differs" in finding.evidence


def test_a_weight_kept_without_its_one_is_told():
    def change(model):
        model.layers[1].o_proj.weight.add_(1.0)

    finding = of_weights(change)
    assert finding.relation == "mine is 1 + golden's value"
    assert "w against 1 + w" in finding.advice


def test_a_scale_that_is_left_out_is_told_as_a_factor():
    assert "times 2.828" in found(Model("unscaled")).relation


def test_statistics_alone_tell_no_relation():
    finding = found(Model("repeated"), stats_only=True)
    assert (finding.relation, finding.advice) == ("", "")


def test_a_mask_that_hides_one_token_less_is_described():
    finding = found(Model("shifted mask"))
    assert "mine is true at positions j >= i+2, golden is true at positions j >= i+1" in (
        finding.relation
    )


def test_a_rotation_of_neighbours_instead_of_halves_blames_what_it_rotates():
    finding = found(Model("interleaved"))
    assert finding.path.startswith("layers.1")
    # of 8 channels golden takes 4, 5, 6, 7 and mine 1, 3, 5, 7: the last one is the same
    assert finding.relation == "only the last channel is right; the other 3 differ"


def test_another_tensor_of_golden_is_named_with_the_one_it_replaces():
    finding = found(Model("k for v"))
    assert finding.path.startswith("layers.1")
    assert "output of call 1 of layers.1/Torch.repeat_interleave" in finding.relation


def test_the_first_token_alone_agrees_where_only_modules_are_recorded():
    finding = found(Model("unscaled"), mode="module")
    assert "only the first token is right" in finding.relation
    assert "attention scores" in finding.advice


class Flat(nn.Module):
    """Takes all tokens as one row, as an engine does: its input tells not how many there are."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Model("unscaled")

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x.view(1, TOKENS, WIDTH))


def test_tokens_are_told_where_only_goldens_inputs_say_how_many_there_are():
    golden, mine, x = Model(), Flat(), torch.randn(1, TOKENS, WIDTH)
    runs = (
        record(golden, lambda: golden(x), "golden"),
        record(mine, lambda: mine(x.flatten()), "mine"),
    )
    finding = ld.compare(*runs).findings[0]
    assert "only the first token is right" in finding.relation
    assert "attention scores" in finding.advice


def test_a_value_that_was_rounded_within_its_limit_is_told_as_no_cause():
    def change(model):
        weight = model.layers[1].o_proj.weight
        model.layers[1].o_proj.weight.copy_(weight.bfloat16().float())

    assert "rounded" in of_weights(change).relation  # beyond the limit of a weight


def test_a_dump_whose_values_are_cut_off_tells_no_relation_and_raises_nothing(monkeypatch):
    def cut(self, record):
        raise CorruptDumpError("the values end early")

    golden, mine = recorded(Model(), "golden"), recorded(Model("repeated"), "mine")
    report = ld.compare(golden, mine)
    region = report.findings[0]
    assert region.relation
    monkeypatch.setattr(Side, "load", cut)
    assert ld.compare(golden, mine).findings[0].relation == ""
