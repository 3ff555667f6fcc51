"""The facts read from a model: its entry modules, weights and attributes."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from llmdebug_nb.capture.compat import pytorch


def find_fused(root: nn.Module) -> set[int]:
    """Return the ids of the modules that may only be hooked by global hooks."""
    layers = [module for module in root.modules() if isinstance(module, nn.TransformerEncoderLayer)]
    return {id(module) for layer in layers for module in layer.modules()}


def find_entries(root: nn.Module) -> list[nn.Module]:
    """Return the modules whose outermost call begins a root call: root, children and encoder.

    Encoder-decoder models run their encoder alone before the first decoder call, and some programs
    call `model.model` instead of `model`.
    """
    entries = [root, *root.children()]
    config = getattr(root, "config", None)
    get_encoder: Callable[[], nn.Module] | None = getattr(root, "get_encoder", None)
    if get_encoder is not None and getattr(config, "is_encoder_decoder", False):
        entries.append(get_encoder())
    return entries


def weights_of(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return a module's own parameters and buffers by name, offloaded ones included."""
    weights, offloaded = {}, pytorch.offloaded_tensors(module)
    for name, tensor in pytorch.own_tensors(module).items():
        if tensor is not None:
            weights[name] = offloaded[name] if tensor.is_meta and name in offloaded else tensor
    return weights


def attributes_of(module: nn.Module) -> dict[str, object]:
    """Return a module's own public attributes with plain values: numbers, flags, texts, None."""
    plain = (bool, int, float, str, type(None))
    return {
        name: value
        for name, value in vars(module).items()
        if isinstance(value, plain) and not name.startswith("_")
    }
