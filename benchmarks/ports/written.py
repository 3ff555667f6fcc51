"""Ports of our own, written without a look at the alignment, and how they differ from the original.

A file of `code/` has a model class, ``weights(original)``, which gives the original's weights under
the port's names, and ``run(model, ids, prompt)``, the port's own loop over the steps.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers

from ports.entry import DECODE, Bug, Logits, Model, Port, State, decode, llama_norms, spread

CODE = Path(__file__).parent / "code"
SMALL: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "intermediate_size": 160,
    "max_position_embeddings": 256,
    "initializer_range": 0.12,  # attention is not uniform then
    "attn_implementation": "eager",
}


def original(kind: str, seed: int, settings: dict[str, Any], embedding: float) -> Model:
    """Return a Hugging Face decoder with random weights, float32, in evaluation mode.

    ``embedding``: what the embeddings are multiplied by.
    """
    config = getattr(transformers, f"{kind}Config")(**settings)
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(embedding)
    return spread(model, seed)


def written(
    name: str,
    model: str,
    kind: str,
    settings: dict[str, Any],
    bugs: tuple[Bug, ...],
    keep: int = 0,
    embedding: float = 1.0,
    file: str = "",
    change: Callable[[Model], Model] = lambda model: model,
    **more: Any,
) -> Port:
    """Return the port in ``code/{file}.py``, by default that of its name.

    ``model``: its class, made from the original's configuration. ``kind``, ``settings``: of the
    original. ``keep``: of so many tokens the original gives logits (0: all).
    ``embedding``: factor of the original's embeddings. ``change``: changes the original.
    """
    file = file or name
    given: dict[str, Any] = {"norms": llama_norms, **more}
    return Port(
        name=name,
        source=CODE / f"{file}.py",
        original=lambda seed: change(original(kind, seed, settings, embedding)),
        make=lambda code, hf: getattr(code, model)(hf.config),
        convert=lambda hf: importlib.import_module(f"ports.code.{file}").weights(hf),
        golden_work=partial(decode, keep=keep),
        work=run,
        bugs=bugs,
        **given,
    )


def run(model: Model, ids: torch.Tensor) -> Logits:
    """Run the port's own loop, which a bug may have changed."""
    code = sys.modules[type(model).__module__]
    return list(code.run(model, ids, ids.shape[1] - DECODE))


# -- conversions gone wrong ----------------------------------------------------------------------


def transpose(*names: str) -> Callable[[State], None]:
    """Leave the transposition of square weights out, or make one too many."""
    return each(lambda weight: weight.T, *names)


def swap(one: str, other: str) -> Callable[[State], None]:
    """Give each of two weights the other's values."""

    def convert(state: State) -> None:
        state[one], state[other] = state[other], state[one]

    return convert


def each(change: Callable[[torch.Tensor], torch.Tensor], *names: str) -> Callable[[State], None]:
    """Change some weights."""

    def convert(state: State) -> None:
        for name in names:
            state[name] = change(state[name]).clone()

    return convert
