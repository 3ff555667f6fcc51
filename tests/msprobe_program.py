"""A training step that msprobe records: run as a program, with msprobe on the path."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from torch import nn


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.act, self.fc2 = nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc2(self.act(self.fc1(x)))


def made() -> tuple[Net, torch.Tensor]:
    torch.manual_seed(0)
    return Net(), torch.randn(2, 4)


def main(folder: Path) -> None:
    from msprobe.pytorch import PrecisionDebugger

    config = {"task": "tensor", "dump_path": str(folder), "rank": [], "step": [], "level": "mix"}
    file = folder.with_suffix(".json")
    file.write_text(json.dumps({**config, "tensor": {"data_mode": ["all"]}}))
    model, x = made()
    debugger = PrecisionDebugger(config_path=str(file))
    for _ in range(2):
        debugger.start(model)
        model(x).sum().backward()
        debugger.stop()
        debugger.step()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
