"""Findings say what mine's value is of golden's: which heads, which weight, which other tensor."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import llmdebug_nb as ld
from llmdebug_nb.core.findings import Finding
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
        self.change, self.num_heads, self.num_key_value_heads = change, HEADS, PAIRS
        self.q_proj, self.o_proj = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)
        self.k_proj, self.v_proj = (nn.Linear(WIDTH, PAIRS * DIM) for _ in range(2))

    def split(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:-1], -1, DIM).transpose(1, 2)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (self.split(part(x)) for part in (self.q_proj, self.k_proj, self.v_proj))
        q, k = rotary(q, self.change == "interleaved"), rotary(k)
        if self.change == "repeated":
            k = torch.cat([k] * (HEADS // PAIRS), 1)
        else:
            k = torch.repeat_interleave(k, HEADS // PAIRS, 1)
        v = torch.repeat_interleave(v, HEADS // PAIRS, 1)
        scores = torch.matmul(q, k.transpose(2, 3))
        if self.change != "unscaled":
            scores = torch.mul(scores, DIM**-0.5)
        ahead = 2 if self.change == "shifted mask" else 1
        hidden = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(ahead)
        scores = torch.masked_fill(scores, hidden, float("-inf"))
        weights = torch.softmax(scores, -1)
        out = torch.matmul(weights, k if self.change == "k for v" else v)
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


def test_the_weight_of_another_layer_is_named():
    def change(model):
        model.layers[1].o_proj.weight.copy_(model.layers[2].o_proj.weight)

    finding = of_weights(change)
    assert "layers.2.o_proj.weight" in finding.relation


def test_a_scale_that_is_left_out_is_told_as_a_factor():
    assert "times 2.828" in found(Model("unscaled")).relation


def test_statistics_alone_tell_no_relation():
    finding = found(Model("repeated"), stats_only=True)
    assert (finding.relation, finding.advice) == ("", "")
