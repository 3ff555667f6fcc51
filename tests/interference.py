"""Compare a recorded run with an unrecorded one: recording must change no result.

``python tests/interference.py`` prints the table.

Every cell of the table in docs/capture.md is one call of `differences`.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn

import llmdebug_nb as ld
from models import ARCHITECTURES, hooks_left, prompt

MODES: dict[str, dict[str, Any]] = {
    "module": {"mode": "module"},
    "api": {"mode": "api"},
    "aten": {"mode": "aten"},
    "module+api+aten": {"mode": "module+api+aten"},
    "statistics only": {"mode": "module+aten", "stats_only": True},
    "outermost module found": {"found": True},
    "one layer, outputs": {"layers": "*1*", "part": "out"},
}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
WORKS = ("inference", "training")


class Encoder(nn.Module):
    """Like a vision transformer: patches, encoder layers, attention with its fused path, a head."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 16, 4, stride=4)
        layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.1, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.attention = nn.MultiheadAttention(16, 4, batch_first=True)
        self.head = nn.Linear(16, 5)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = self.layers(self.patches(images).flatten(2).transpose(1, 2))
        return self.head(self.attention(x, x, x, need_weights=False)[0].mean(1))


def encoder() -> Encoder:
    torch.manual_seed(0)
    return Encoder().eval()


MODELS: dict[str, Callable[[], Any]] = {**ARCHITECTURES, "encoder": encoder}


def differences(name: str, dtype: str, work: str, mode: str) -> list[str]:
    """Return the differences between an unrecorded and a recorded run; empty if all is well."""
    outcomes = []
    for recorded in (False, True):
        model = MODELS[name]().to(DTYPES[dtype])
        options = {"name": "r", "tokens": "all", **MODES[mode]}
        if not recorded:
            outcomes.append(_run(name, model, work))
            continue
        with ld.dump(None if options.pop("found", False) else model, **options) as run:
            outcomes.append(_run(name, model, work))
        after = (
            hooks_left(model),
            torch._C._len_torch_function_stack(),
            torch._C._len_torch_dispatch_stack(),
        )
        outcomes[1]["hooks and modes gone"] = after == (0, 0, 0)
        outcomes[1]["recorded whole"] = run.info()["complete"]
    outcomes[0] |= {"hooks and modes gone": True, "recorded whole": True}
    return [what for what, value in outcomes[0].items() if not _equal(value, outcomes[1][what])]


def _run(name: str, model: Any, work: str) -> dict[str, Any]:
    for seed in (torch.manual_seed, random.seed, np.random.seed):
        seed(7)
    outcome = _inference(name, model) if work == "inference" else _training(name, model)
    return {
        **outcome,
        "random numbers": (
            random.getstate(),
            np.random.get_state()[1].tolist(),
            torch.get_rng_state(),
        ),
    }


def _inference(name: str, model: Any) -> dict[str, Any]:
    if name == "encoder":
        with torch.no_grad():
            return {"logits": model(_images(model))}
    out = model.generate(
        prompt(batch=2),
        attention_mask=torch.ones(2, 7, dtype=torch.long),
        max_new_tokens=5,
        do_sample=True,
        output_logits=True,
        return_dict_in_generate=True,
    )
    return {"tokens": out.sequences, "logits": torch.stack(out.logits)}


def _training(name: str, model: Any) -> dict[str, Any]:
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses, graph, gradients = [], [], []
    for _ in range(2):
        if name == "encoder":
            loss = nn.functional.cross_entropy(model(_images(model)).float(), torch.tensor([1, 4]))
        else:
            loss = model(input_ids=prompt(batch=2), labels=prompt(batch=2)).loss
        graph.append(_graph(loss))
        loss.backward()
        losses.append(loss.detach())
        gradients += [p.grad.clone() for p in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
    state = [value for slots in optimizer.state.values() for value in slots.values()]
    weights = [p.detach() for p in model.parameters()]
    return {
        "loss": losses,
        "gradients": gradients,
        "weights": weights,
        "optimizer state": state,
        "graph": graph,
    }


def _images(model: Any) -> torch.Tensor:
    return torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(1)).to(
        model.head.weight.dtype
    )


def _graph(loss: torch.Tensor) -> Counter[str]:
    """Count the autograd graph's nodes by name. A dispatch mode makes torch use views."""
    seen, todo = set(), [loss.grad_fn]
    while todo:
        node = todo.pop()
        if node is not None and node not in seen:
            seen.add(node)
            todo += [parent for parent, _ in node.next_functions]
    names = (node.name().removesuffix("0") for node in seen)
    return Counter(
        {"ReshapeAliasBackward": "ViewBackward", "UnsafeViewBackward": "ViewBackward"}.get(n, n)
        for n in names
    )


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(_equal, a, b))
    return bool(a == b)


def table() -> str:
    """Return the matrix as Markdown: ``=``, or the differences of a cell."""
    lines = [
        "| model | dtype | work | " + " | ".join(MODES) + " |",
        "|---" * (3 + len(MODES)) + "|",
    ]
    for name in MODELS:
        for dtype in DTYPES:
            for work in WORKS:
                cells = [", ".join(differences(name, dtype, work, mode)) or "=" for mode in MODES]
                lines.append(f"| {name} | {dtype} | {work} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
