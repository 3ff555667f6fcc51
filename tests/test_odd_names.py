"""Names of modules, parameters and files may hold anything: a program runs on, and is recorded."""

from __future__ import annotations

import importlib.util
import os
import sys

import pytest
import torch
from torch import nn

import llmdebug_nb as ld
from llmdebug_nb.app.live_models import module_finder

HALF = "caf\udce9"  # as the name of a file in Latin-1 is read
SLASHES = "enc/block/conv"


class Chain(nn.Module):
    def __init__(self, names, factor=1.0):
        super().__init__()
        torch.manual_seed(0)
        self.steps = nn.ModuleDict({name: nn.Linear(4, 4) for name in names})
        self.factor = factor

    def forward(self, x):
        for step in self.steps.values():
            x = step(x) * self.factor
        return x


def recorded(model, name, **options):
    with ld.dump(model, name=name, **options) as run:
        model(torch.ones(2, 4))
    return run


@pytest.mark.parametrize("mode", ["module", "module+api"])
@pytest.mark.parametrize("name", [HALF, SLASHES])
def test_a_module_with_an_odd_name_is_recorded_and_compared(name, mode):
    golden = recorded(Chain(["a", name, "b"]), "golden", mode=mode, weights=True)
    mine = recorded(Chain(["a", name, "b"]), "mine", mode=mode, weights=True)
    assert golden.info()["complete"]
    assert not golden.meta.get("problems")
    report = ld.compare(golden, mine)
    assert report.verdict == "match"
    assert all(row.verdict == "match" for row in report.differences)


@pytest.mark.parametrize("name", [HALF, SLASHES])
def test_a_bug_in_such_a_module_is_found_there(name):
    golden, model = recorded(Chain(["a", name, "b"]), "golden"), Chain(["a", name, "b"])
    with torch.no_grad():
        model.steps[name].weight.mul_(1.01)
    (finding,) = ld.compare(golden, recorded(model, "mine")).findings
    assert finding.path == golden.nodes[3].path


def test_the_live_module_is_found_behind_a_name_with_slashes():
    model = Chain(["a", SLASHES])
    run = recorded(model, "r")
    assert module_finder(run)(run.nodes[3].path) is model.steps[SLASHES]


def test_a_parameter_with_an_odd_name_is_recorded():
    model = nn.Linear(4, 4)
    model.register_parameter(HALF, nn.Parameter(torch.ones(2)))
    run = recorded(model, "r", weights=True)
    assert run.info()["complete"]
    assert len(run.to_pandas().query("role == 'weight'")) == 3


@pytest.mark.skipif(sys.platform != "linux", reason="only file systems of Linux hold any bytes")
def test_code_in_a_folder_with_an_odd_name_is_recorded(tmp_path):
    folder = tmp_path / os.fsdecode(b"caf\xe9")
    folder.mkdir()
    file = folder / "odd.py"
    file.write_text(
        "import torch\n\n\nclass Net(torch.nn.Module):\n"
        "    def forward(self, x):\n        return torch.relu(x)\n"
    )
    spec = importlib.util.spec_from_file_location("odd", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    run = recorded(module.Net(), "r", mode="module+api")
    assert run.info()["complete"]
    assert ld.compare(run, run).verdict == "match"
