"""Code of a module is not blamed on a ratio before golden's live module was asked."""

from __future__ import annotations

import copy
import gc

import pytest
import torch
from torch import nn

import llmdebug_nb as ld

WIDTH, LAYERS, SHARP = 64, 6, 4


class Block(nn.Module):
    """Chooses softly among channels; a sharp choice magnifies the rounding of its scores."""

    def __init__(self, sharpness):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.scores, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.sharpness = sharpness

    def forward(self, x):
        return x + self.out(torch.softmax(self.sharpness * self.scores(self.norm(x)), -1))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        sharp = [30.0 if layer == SHARP else 1.0 for layer in range(LAYERS)]
        self.layers = nn.ModuleList(map(Block, sharp))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Net().eval()


@pytest.fixture
def x():
    return torch.randn(2, 24, WIDTH, generator=torch.Generator().manual_seed(1))


def recorded(model, x, name):
    with ld.dump(model, name=name), torch.no_grad():
        model(x.to(next(model.parameters()).dtype))
    return name


def in_bfloat16(model, sharpness=1.0):
    mine = copy.deepcopy(model).to(torch.bfloat16)
    mine.layers[SHARP].sharpness *= sharpness
    return mine


def test_a_call_that_magnifies_is_right_if_goldens_module_gives_the_same_for_its_inputs(model, x):
    mine = in_bfloat16(model)
    golden = recorded(model, x, "golden")
    report = ld.compare(golden, recorded(mine, x, "mine"))
    assert report.verdict == "within_noise"
    assert any(row.rule.name == "MAGNIFIED" for row in report.differences)


def test_without_goldens_module_the_ratio_decides(x):
    torch.manual_seed(0)
    model = Net().eval()
    golden, mine = recorded(model, x, "golden"), in_bfloat16(model)
    del model
    gc.collect()
    assert ld.compare(golden, recorded(mine, x, "mine")).verdict == "diverged"


@pytest.mark.parametrize("sharpness", [1.25, 0.8])
def test_an_error_of_the_call_itself_is_found_beside_what_it_magnifies(model, x, sharpness):
    golden = recorded(model, x, "golden")
    report = ld.compare(golden, recorded(in_bfloat16(model, sharpness), x, "mine"))
    assert report.verdict == "diverged"
    assert report.findings[0].path == f"layers.{SHARP}"
