"""Models of OpenVINO: the small models converted, with a cache outside or in states, tiny ones."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import numpy as np
import openvino as ov
import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from models import ARCHITECTURES, llama, prompt

try:
    from openvino import opset13 as ops
except ImportError:  # before 2025
    from openvino.runtime import opset13 as ops

LAYERS, HEADS, WIDTH = 2, 2, 8  # of keys and values of the small Llama
PAST = [f"past.{layer}.{what}" for layer in range(LAYERS) for what in ("key", "value")]
FEED = {"input_ids": prompt().numpy(), "attention_mask": np.ones(prompt().shape, np.int64)}


def converted(model: torch.nn.Module, example: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # those of tracing
        return ov.convert_model(model, example_input=example)


def of(model: torch.nn.Module) -> Any:
    """Return a language model without a cache, of prompts of any length."""
    model.config.use_cache = False
    ids = prompt()
    return converted(model, {"input_ids": ids, "attention_mask": torch.ones_like(ids)})


@functools.cache
def _exported(name: str) -> Any:
    return of(ARCHITECTURES[name]())


def exported(name: str) -> Any:
    """Return a copy of a model as it was converted."""
    return _exported(name).clone()


class _Step(torch.nn.Module):
    """One generation step: takes tokens, keys and values; returns logits, keys and values."""

    def __init__(self) -> None:
        super().__init__()
        self.m = llama()

    def forward(self, input_ids: Any, attention_mask: Any, position_ids: Any, *past: Any) -> Any:
        cache = DynamicCache()
        for keys, values in zip(past[::2], past[1::2], strict=True):
            layer = DynamicLayer()
            layer.keys, layer.values, layer.is_initialized = keys, values, True
            layer.dtype, layer.device = torch.float32, torch.device("cpu")
            cache.layers.append(layer)
        out = self.m(
            input_ids=input_ids, attention_mask=attention_mask, position_ids=position_ids,
            past_key_values=cache, use_cache=True,
        )  # fmt: skip
        now = out.past_key_values.layers
        return out.logits, *(tensor for layer in now for tensor in (layer.keys, layer.values))


@functools.cache
def _with_cache() -> Any:
    past = [torch.randn(1, HEADS, 3, WIDTH) for _ in PAST]
    ids, mask, places = torch.randint(3, 90, (1, 2)), torch.ones(1, 5, dtype=torch.long), [[3, 4]]
    model = converted(_Step().eval(), (ids, mask, torch.tensor(places), *past))
    names = ["input_ids", "attention_mask", "position_ids", *PAST]
    for port, name in zip(model.inputs, names, strict=True):
        port.get_tensor().set_names({name})
        port.get_node().set_friendly_name(name)
        if name in PAST:
            port.get_node().set_partial_shape(ov.PartialShape([-1, HEADS, -1, WIDTH]))
    made = ["logits", *(name.replace("past", "present") for name in PAST)]
    for port, name in zip(model.outputs, made, strict=True):
        port.get_tensor().set_names({name})
    model.validate_nodes_and_infer_types()
    return model


def with_cache() -> Any:
    """Return a model that takes keys and values of any length and gives the new ones."""
    return _with_cache().clone()


def with_states() -> Any:
    """Return the same model with keys and values as states, reordered by ``beam_idx``.

    OpenVINO fuses attention with such states, and keeps them in u8.
    """
    from openvino._offline_transformations import apply_make_stateful_transformation

    model = with_cache()
    beams = ops.parameter([-1], np.int32, name="beam_idx")
    beams.output(0).get_tensor().add_names({"beam_idx"})
    model.add_parameters([beams])
    for name in PAST:
        port = model.input(name)
        users = port.get_target_inputs()
        chosen = ops.gather(port, beams, ops.constant(0))
        for user in users:
            user.replace_source_output(chosen.output(0))
    model.validate_nodes_and_infer_types()
    kept = {name: name.replace("past", "present") for name in PAST}
    apply_make_stateful_transformation(model, kept)
    shape = ops.shape_of(model.input("input_ids"), output_type="i64")
    batch = ops.gather(shape, ops.constant([0]), ops.constant(0))
    sizes = [batch, *(ops.constant(np.array([n], np.int64)) for n in (HEADS, 0, WIDTH))]
    for node in model.get_ops():
        if node.get_type_name() == "ReadValue":
            node.set_arguments([ops.broadcast(ops.constant(np.float32(0)), ops.concat(sizes, 0))])
    model.validate_nodes_and_infer_types()
    return model


def fed(ids: list[int], past: int) -> dict[str, np.ndarray]:
    """Return the inputs of a step of these tokens after ``past`` others."""
    return {
        "input_ids": np.array([ids]),
        "attention_mask": np.ones((1, past + len(ids)), np.int64),
        "position_ids": np.arange(past, past + len(ids))[None],
        "beam_idx": np.zeros(1, np.int32),
    }


def generate(request: Any, ids: list[int], new: int) -> list[np.ndarray]:
    """Return the logits of each step of a text-generation loop with states."""
    steps, past = [], 0
    for _ in range(new):
        logits = request.infer(fed(ids, past))["logits"]
        steps.append(logits)
        past += len(ids)
        ids = [int(logits[0, -1].argmax())]
    return steps


def constant(model: Any, name: str) -> Any:
    """Return the node of a constant, by the end of its name."""
    kinds = ("Constant",) if "/" not in name else ("Add",)
    return next(
        node
        for node in model.get_ops()
        if node.get_type_name() in kinds and node.get_friendly_name().endswith(name)
    )


def put(model: Any, name: str, values: np.ndarray) -> None:
    """Set a constant, by the end of its name."""
    node = constant(model, name)
    assert node.data.size == values.size
    new = ops.constant(values.reshape(node.data.shape), dtype=node.get_element_type())
    new.set_friendly_name(node.get_friendly_name())
    for user in node.output(0).get_target_inputs():
        user.replace_source_output(new.output(0))


def small(*, outputs: int = 1) -> Any:
    """Return y = relu(x * 2) for x float32[?, 3]."""
    x = ops.parameter([-1, 3], np.float32, name="x")
    x.output(0).get_tensor().set_names({"x"})
    node = ops.relu(ops.multiply(x, ops.constant(np.float32(2)), name="doubled"), name="y")
    node.output(0).get_tensor().set_names({"y"})
    return ov.Model([node.output(0)] * outputs, [x], "small")
