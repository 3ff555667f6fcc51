"""A program that msit records, and msit's readers: run as a program, with msit on the path."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from torch import nn

LAYERS, TOKENS = 12, 2  # msit finds layers among more than ten children alone


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.fc1, self.fc2 = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.fc2(torch.relu(self.fc1(self.norm(x))))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))
        self.head = nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def made() -> Net:
    torch.manual_seed(0)
    return Net()


@torch.no_grad()
def run(model: Net) -> None:
    torch.manual_seed(1)
    for _ in range(TOKENS):
        model(torch.randn(2, 8))


def record(folder: str) -> None:
    from msit_llm import DumpConfig, register_hook

    model = made()
    config = DumpConfig(
        folder, [0, 1], analyze=True, dump_weight=True, dump_statistics_mode=2
    )  # fmt: skip
    register_hook(model, config)
    run(model)


def compare(*words: str) -> None:
    from msit_llm.__main__ import CompareCommand

    command, parser = CompareCommand("compare", ""), argparse.ArgumentParser()
    command.add_arguments(parser)
    command.handle(parser.parse_args(words))


def read(folder: str, out: str) -> None:
    """Read all .bin files below a folder with msit, and save them in one file."""
    from msit_llm import read_atb_data

    files = sorted(Path(folder).rglob("*.bin"))
    torch.save({str(file): read_atb_data(str(file)).clone() for file in files}, out)


if __name__ == "__main__":
    {"record": record, "compare": compare, "read": read}[sys.argv[1]](*sys.argv[2:])
