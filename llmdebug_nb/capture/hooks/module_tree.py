"""The module tree of a model, as rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from llmdebug_nb.capture.source_lines import forward_of
from llmdebug_nb.core.paths import DEEPEST, bounded, module_path
from llmdebug_nb.core.records import Node

if TYPE_CHECKING:
    import torch
    from torch import nn


def build(root: nn.Module, prefix: str = "") -> list[Node]:
    """Return the modules of ``root`` in registration order, parents before children.

    ``prefix`` goes before every path (``""``: paths as `named_modules` gives them). A module
    registered in several places is one row under its first name; the others are its aliases.
    """
    _settle(root)
    names: dict[int, list[str]] = {}
    for path, module in root.named_modules(remove_duplicate=False):
        names.setdefault(id(module), []).append(path)
    at: dict[str, int] = {}
    nodes: list[Node] = []
    label = prefix.rstrip(".") or type(root).__name__
    for path, module in root.named_modules():
        owned = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
        parent, _, name = path.rpartition(".")
        at[path] = len(nodes)
        nodes.append(
            Node(
                path=_join(prefix, path),
                name=name or label,
                type=type(module).__name__,
                parent=_parent(at, parent) if path else -1,
                params={key: _sizes(tensor) for key, tensor in owned},
                aliases=tuple(_join(prefix, other) for other in names[id(module)] if other != path),
                root=label,
                source=forward.first if (forward := forward_of(module)) else None,
            )
        )
    return nodes


def _settle(root: nn.Module) -> None:
    """Ask all modules for their parameters: some make them, and modules that hold them, only then.

    Keras layers do.
    """
    known: list[nn.Module] = []
    while len(modules := list(root.modules())) > len(known):
        known = modules
        for module in modules:
            for _ in module.named_parameters(recurse=False):
                pass


def _sizes(tensor: torch.Tensor) -> list[int]:
    """Return the sizes of a parameter or buffer; none for a lazy one that has none yet."""
    try:
        return list(tensor.shape)
    except RuntimeError:
        return []


def _parent(at: Mapping[str, int], path: str) -> int:
    """Return the place of a module's parent, or of the innermost one that readers can nest in."""
    while path.count(".") > DEEPEST // 2:
        path = path.rpartition(".")[0]
    return at[path]


def _join(prefix: str, path: str) -> str:
    path = module_path(path)
    return bounded(f"{prefix}{path}" if path else prefix.rstrip("."))
