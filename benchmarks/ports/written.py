"""Ports of our own, written without a look at the alignment, and how they differ from the original.

A file of `code/` has a model class, ``weights(original)``, which gives the original's weights under
the port's names, and ``run(model, ids, prompt)``, the port's own loop over the steps.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from ports.entry import Bug, Port
from ports.steps import decode, run
from ports.weights import Model, llama_norms

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
last_token = partial(decode, logits_to_keep=1)


def written(
    name: str,
    model: str,
    original: Callable[[int], Model],
    bugs: tuple[Bug, ...],
    file: str = "",
    **more: Any,
) -> Port:
    """Return the port in ``code/{file}.py``, by default that of its name.

    ``model``: its class, made from the original's configuration.
    """
    file = file or name
    usual: dict[str, Any] = {"golden_work": decode, "work": run, "norms": llama_norms}
    return Port(
        name=name,
        source=CODE / f"{file}.py",
        original=original,
        make=lambda code, hf, **settings: getattr(code, model)(hf.config, **settings),
        convert=lambda hf: importlib.import_module(f"ports.code.{file}").weights(hf),
        bugs=bugs,
        **{**usual, **more},
    )
