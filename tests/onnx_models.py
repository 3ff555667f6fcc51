"""Exports of the small models, made once for all tests: with module names, with a cache."""

from __future__ import annotations

import functools
import logging
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from onnx import numpy_helper
from transformers import DynamicCache

from models import ARCHITECTURES, llama, prompt

LAYERS, HEADS, WIDTH = 2, 2, 8  # of keys and values of the small Llama
PAST = [f"past_key_values.{layer}.{what}" for layer in range(LAYERS) for what in ("key", "value")]


def _export(model: torch.nn.Module, args: Any, **options: Any) -> onnx.ModelProto:
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch's own
        program = torch.onnx.export(model, args, dynamo=True, verbose=False, **options)
    return program.model_proto


@functools.cache
def _exported(name: str) -> bytes:
    inputs = {"input_ids": prompt(), "use_cache": False}
    return _export(ARCHITECTURES[name](), (), kwargs=inputs).SerializeToString()


def exported(name: str) -> onnx.ModelProto:
    """Return a copy of a model exported for prompts of 7 tokens, without a cache."""
    return onnx.load_model_from_string(_exported(name))


class Step(torch.nn.Module):
    """One generation step: takes tokens, keys and values; returns logits, keys and values."""

    def __init__(self) -> None:
        super().__init__()
        self.m = llama()

    def forward(
        self, input_ids: torch.Tensor, past: list[tuple[torch.Tensor, torch.Tensor]]
    ) -> Any:
        cache = DynamicCache()
        for layer, (key, value) in enumerate(past):
            cache.update(key, value, layer)
        out = self.m(input_ids=input_ids, past_key_values=cache, use_cache=True)
        return out.logits, [(layer.keys, layer.values) for layer in out.past_key_values.layers]


@functools.cache
def with_cache() -> bytes:
    """Return a model that takes keys and values of any length and gives the new ones."""
    moves = torch.export.Dim.DYNAMIC
    past = [
        (torch.randn(1, HEADS, 4, WIDTH), torch.randn(1, HEADS, 4, WIDTH)) for _ in range(LAYERS)
    ]
    return _export(
        Step().eval(),
        (torch.randint(3, 90, (1, 3)), past),
        input_names=["input_ids", *PAST],
        output_names=["logits", *(name.replace("past_key_values", "present") for name in PAST)],
        dynamic_shapes=({1: moves}, [({2: moves}, {2: moves}) for _ in range(LAYERS)]),
    ).SerializeToString()


def generate(session: Any, ids: torch.Tensor, new: int) -> list[int]:
    """Return the tokens that a text-generation loop with a cache makes."""
    tokens, feed, made = (
        ids.numpy(),
        {name: np.zeros((1, HEADS, 0, WIDTH), np.float32) for name in PAST},
        [],
    )
    for _ in range(new):
        logits, *present = session.run(None, {"input_ids": tokens, **feed})
        tokens = logits[:, -1:].argmax(-1)
        made.append(int(tokens[0, 0]))
        feed = dict(zip(PAST, present, strict=True))
    return made


def strip(model: onnx.ModelProto) -> onnx.ModelProto:
    """Remove all traces of modules: metadata, and the names of nodes and initializers."""
    renamed = {one.name: f"w{at}" for at, one in enumerate(model.graph.initializer)}
    for one in model.graph.initializer:
        one.name = renamed[one.name]
    for at, node in enumerate(model.graph.node):
        del node.metadata_props[:]
        node.name = f"n{at}"
        for place, value in enumerate(node.input):
            node.input[place] = renamed.get(value, value)
    return model


def initializer(model: onnx.ModelProto, name: str) -> np.ndarray:
    return np.array(
        numpy_helper.to_array(next(one for one in model.graph.initializer if one.name == name))
    )


def put(model: onnx.ModelProto, name: str, values: np.ndarray) -> None:
    """Set an initializer, a new one if there is none of that name."""
    found = (
        next((one for one in model.graph.initializer if one.name == name), None)
        or model.graph.initializer.add()
    )
    found.CopyFrom(numpy_helper.from_array(values, name))


def node_of(model: onnx.ModelProto, scope: str, kind: str, place: int = 0) -> onnx.NodeProto:
    """Return the n-th node of that kind in a module."""
    key = "pkg.torch.onnx.name_scopes"
    scopes = {
        node.name: next((p.value for p in node.metadata_props if p.key == key), "[]")
        for node in model.graph.node
    }
    return [n for n in model.graph.node if n.op_type == kind and f"'{scope}'," in scopes[n.name]][
        place
    ]


def save(model: onnx.ModelProto, path: Path) -> str:
    onnx.save(model, path)
    return str(path)
