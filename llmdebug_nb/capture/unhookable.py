"""Explains why a model can't be hooked."""

from __future__ import annotations

import torch
from torch import nn

from llmdebug_nb.capture.compat import pytorch


def why_compiled(root: nn.Module) -> str | None:
    """Explain that a part of a model is compiled and can't be hooked; None if no part is."""
    for name, module in root.named_modules():
        where = f"its module {name!r}" if name else type(root).__name__
        functions = [] if pytorch.is_compiled(module) else pytorch.compiled_parts(module)
        if functions:
            where = f"the function {functions[0]!r} of {where}"
        if functions or pytorch.is_compiled(module):
            return (
                f"{where} is compiled by torch.compile, where hooks would be traced or never fire; "
                "record with force_eager=True, which runs it eagerly while it is recorded, "
                "or record the original module"
            )
    return None


def why_script(root: nn.Module) -> str | None:
    """Explain that a model is a TorchScript module; None if it isn't."""
    if not isinstance(root, torch.jit.ScriptModule):
        return None
    return (
        f"{type(root).__name__} is a TorchScript module, which takes no hooks; "
        "record the module it was made from"
    )
