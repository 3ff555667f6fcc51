"""What the fuzzing starts from, made by code: sound dumps of every layout, and sound documents."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import nn

import llmdebug_nb as ld
from layout_files import X, save
from test_layout_atb import atb_round
from test_layout_msit import msit_process
from test_layout_msprobe import msprobe_rank
from test_layout_torchair import fx_dump, ge_dump

NATIVE = ("modules", "operators", "parts", "unsettled", "processes", "compiled")
LAYOUTS = ("msprobe", "msit", "atb", "fx", "ge", "plain")
CONTROL = {"enable": True, "steps": "0-2", "ids": ["a.*"], "ranks": [0]}
MSIT_CONTROL = {"dump_enable": True, "er": "0,2", "ids": "0_1", "child": False, "device": "cpu"}
MAP = """\
modules:
  model.layers.*.mlp: layers.*.feed_forward
  lm_head: head
types:
  - [Linear, MyLinear]
"""
EXPECTED = {
    "format": "llmdebug-expected",
    "version": 1,
    "expected": [
        {"golden": "golden", "path": "0", "role": "output", "slot": "0", "comment": "meant"}
    ],
}


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(4), nn.Linear(4, 6), nn.Linear(6, 4)

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x)))) * scale


def _model(factor: float) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(_Block(), _Block())
    with torch.no_grad():
        model[1].up.weight *= factor
    return model


def make(home: Path) -> None:
    """Write the dumps below ``home``, each in a folder of its name, and ``golden`` beside them."""
    home.mkdir(parents=True)
    _record(home, "golden", 1.0, mode="module+api+aten")
    _record(home, "operators", 2.0, mode="module+api+aten")
    _record(home, "modules", 2.0)
    _record(home, "parts", 2.0, reduce="minmax")
    _record(home, "processes", 2.0)
    _record(home, "compiled", 2.0, graph="fx")
    (process,) = (home / "processes").glob("rank*")
    shutil.copytree(process, home / "processes" / "rank0_99999999")
    model = _model(2.0)
    with ld.dump(model, name="live", path=str(home / "tmp"), tokens="all") as run:
        model(torch.ones(2, 4))
        model(torch.ones(2, 4))
        shutil.copytree(run.path, home / "unsettled")
    shutil.rmtree(home / "tmp")
    msprobe_rank(home / "msprobe/step0/rank0")
    msit_process(home / "msit/msit_dump_20250101_000000/torch_tensors/cpu_4242")
    atb_round(home / "atb/atb_dump_data/data/0_4242")
    fx_dump(home / "fx")
    ge_dump(home / "ge")
    _plain(home / "plain")


def _record(home: Path, name: str, factor: float, **options: Any) -> None:
    model = _model(factor)
    with ld.dump(model, name=name, path=str(home), tokens="all", **options):
        for _ in range(2):
            model(torch.arange(8.0).reshape(2, 4))


def _plain(folder: Path) -> None:
    (folder / "sub").mkdir(parents=True)
    np.save(folder / "sub/model.layers.0.npy", X.numpy())
    save({"fc.weight": X * 3, "n": 1, "inner": {"w": X * 4}}, folder / "state.pth")
    save((X * 5, [X * 6]), folder / "several.pt")
    np.savez(folder / "z.npz", q=X.numpy() * 7)
    save_file({"head.weight": X.half()}, folder / "m.safetensors")


def topology_text(home: Path) -> Any:
    """Return the topology of golden as JSON data."""
    return json.loads(json.dumps(ld.topology(ld.open_run(home / "golden")).to_json()))
