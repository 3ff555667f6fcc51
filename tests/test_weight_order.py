"""A weight that lies in one layer otherwise than in all others is named, not the code behind it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import llmdebug_nb as ld


class _Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate_proj = nn.Linear(24, 40, bias=False)
        self.up_proj = nn.Linear(24, 40, bias=False)
        self.down_proj = nn.Linear(40, 24, bias=False)

    def forward(self, x):
        return x + self.down_proj(self.gate_proj(x).tanh() * self.up_proj(x))


class _Port(nn.Module):
    """The same under other names."""

    def __init__(self, theirs):
        super().__init__()
        self.w1, self.w2, self.w3 = theirs.gate_proj, theirs.down_proj, theirs.up_proj

    def forward(self, x):
        return x + self.w2(torch.tanh(self.w1(x)) * self.w3(x))


def _recorded(name, layers):
    model = nn.Sequential(*layers)
    with ld.dump(model, name=name, weights=True) as run, torch.no_grad():
        model(torch.randn(2, 9, 24, generator=torch.Generator().manual_seed(3)))
    return run


def _heads_by_turns(layer):
    """Put the rows of the first weight into another order."""
    weight = layer.w1.weight.detach()
    layer.w1 = nn.Linear(24, 40, bias=False)
    layer.w1.weight.data.copy_(weight.unflatten(0, (5, 8)).transpose(0, 1).flatten(0, 1))


def _swapped(layer):
    layer.w1, layer.w3 = layer.w3, layer.w1


@pytest.mark.parametrize("wrong", [0, 1, 2, 3])
@pytest.mark.parametrize("change", [_swapped, _heads_by_turns])
def test_a_weight_that_lies_otherwise_in_one_layer_is_named(wrong, change):
    theirs = [_Gated() for _ in range(4)]
    ours = [_Port(layer) for layer in theirs]
    golden = _recorded("golden", theirs)
    assert not ld.compare(golden, _recorded("mine", ours)).findings
    change(ours[wrong])
    found = ld.compare(golden, _recorded("mine", ours)).findings[0]
    assert found.cause == "weight differs"
    assert found.path in (f"{wrong}.gate_proj", f"{wrong}.up_proj")
    assert found.mine.path in (f"{wrong}.w1", f"{wrong}.w3")


def test_weights_that_lie_otherwise_in_every_layer_are_a_layout():
    theirs = [_Gated() for _ in range(4)]
    ours = [_Port(layer) for layer in theirs]
    for layer in ours:
        _swapped(layer)
        layer.forward = lambda x, own=layer: x + own.w2(torch.tanh(own.w3(x)) * own.w1(x))
    report = ld.compare(_recorded("golden", theirs), _recorded("mine", ours))
    assert not report.findings


class _Int8(nn.Module):
    """A linear layer of whole numbers with a scale for each row."""

    def __init__(self, linear, forgets):
        super().__init__()
        weight = linear.weight.detach()
        scale = weight.abs().amax(1, keepdim=True) / 127
        self.register_buffer("weight", torch.round(weight / scale).to(torch.int8))
        self.register_buffer("scale", scale)
        self.forgets = forgets

    def forward(self, x):
        y = x @ self.weight.to(x.dtype).T
        return y if self.forgets else y * self.scale[:, 0]


def test_a_quantised_weight_has_no_order_to_compare_and_its_code_is_blamed():
    theirs = [_Gated() for _ in range(3)]
    golden = _recorded("golden", theirs)
    ours = [_Port(layer) for layer in theirs]
    for number, layer in enumerate(ours):
        layer.w1 = _Int8(layer.w1, forgets=number == 1)
    found = ld.compare(golden, _recorded("mine", ours)).findings[0]
    assert found.mine.path == "1.w1", found
