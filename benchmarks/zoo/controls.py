"""Changes that are no bugs: whoever blames something here has raised a false alarm."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from zoo import models
from zoo.entry import Answer, Case, Zoo
from zoo.models import Model

CONTROLS = Zoo()
ALL = "llama qwen2 gpt2 gemma2 gemma3 mixtral phi3"


@CONTROLS.add(
    "C0", "the same twice", on="llama gpt2 mixtral", precisions=("fp32", "bf16/bf16"), benign=True
)
def same(model: Model, case: Case) -> None:
    pass


@CONTROLS.add(
    "C1",
    "fused kernel keeps fp32 temporaries",
    on="llama phi3",
    precisions=("bf16/bf16",),
    benign=True,
)  # pytorch#168186
def fused(model: Model, case: Case) -> None:
    for n in range(models.LAYERS):
        mlp = case.part(model, "mlp", n)
        mlp.forward = _gated(mlp)


def _gated(mlp: Any) -> Any:
    """Return the MLP with its activation and product in float32, rounded once."""

    def forward(x: torch.Tensor) -> torch.Tensor:
        gate, up = (
            mlp.gate_up_proj(x).chunk(2, dim=-1)
            if hasattr(mlp, "gate_up_proj")
            else (mlp.gate_proj(x), mlp.up_proj(x))
        )
        return mlp.down_proj((F.silu(gate.float()) * up.float()).to(x.dtype))

    return forward


@CONTROLS.add(
    "C3a",
    "eager attention against SDPA",
    on="llama gpt2 phi3",
    precisions=("fp32", "bf16/bf16"),
    benign=True,
)
def sdpa(model: Model, case: Case) -> None:
    model.set_attn_implementation("sdpa")


@CONTROLS.add(
    "C3b",
    "another batch size",
    on="llama qwen2 gpt2",
    precisions=("fp32", "bf16/bf16"),
    benign=True,
)
def larger_batch(model: Model, case: Case) -> Answer:
    return Answer(program={"batch": 2})


def dropping(model: Model, case: Case) -> None:
    """Leave the dropout of one MLP (or of its attention) on, in both."""
    if case.architecture == "gpt2":
        case.part(model, "mlp").dropout.train()
    else:
        attn = case.part(model, "attn")
        attn.training, attn.attention_dropout = True, 0.1


@CONTROLS.add(
    "C4",
    "the same random program twice",
    on="llama gpt2",
    precisions=("fp32",),
    setup=dropping,
    benign=True,
)
def random_twice(model: Model, case: Case) -> None:
    pass


@CONTROLS.add("C5", "the same weights in fp32 and bf16", on=ALL, precisions=("bf16",), benign=True)
def half(model: Model, case: Case) -> None:
    pass


class Pair(nn.Linear):
    """A linear layer as the sum of two matrix products."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        half = self.in_features // 2
        total = torch.matmul(x[..., :half], self.weight[:, :half].T) + torch.matmul(
            x[..., half:], self.weight[:, half:].T
        )
        return total if self.bias is None else total + self.bias


@CONTROLS.add(
    "C6",
    "a linear layer as a pair of matrix products",
    on="llama qwen2 gemma2 mixtral",
    benign=True,
)
def pair(model: Model, case: Case) -> None:
    case.part(model, "attn").o_proj.__class__ = Pair
