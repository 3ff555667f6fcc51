"""Shared by the tests of PrecisionDebugger: a model, its batches and a training loop."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch import nn


def mlp():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))


def batch(number=0):
    return torch.full((2, 3), float(number + 1))


def train(debugger, model, steps, given=True):
    """Run the loop of msprobe's users; return the result of each forward pass."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    outputs = []
    for number in range(steps):
        debugger.start(model) if given else debugger.start()
        output = model(batch(number))
        output.sum().backward()
        debugger.stop()
        optimizer.step()
        optimizer.zero_grad()
        debugger.step()
        outputs.append(output.detach())
    return outputs


def config_file(folder: Path, values, name="config.json"):
    """Write msprobe's config.json."""
    path = folder / name
    path.write_text(values if isinstance(values, str) else json.dumps(values), encoding="utf-8")
    return path
