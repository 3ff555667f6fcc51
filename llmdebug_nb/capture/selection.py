"""The selection of modules to record: pure functions of their names, types and places."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

import torch
from torch import nn

from llmdebug_nb.core.layers import repeated_layers
from llmdebug_nb.core.options import DumpOptions
from llmdebug_nb.core.records import Node


def selects(options: DumpOptions, names: Iterable[str], cls: type | str) -> bool:
    """Return whether the filters select a module.

    ``names``: its path and aliases. ``cls``: its class, or the name of that.
    """
    if options.layers and not any(
        fnmatchcase(name, glob) for glob in options.layers for name in names
    ):
        return False
    if options.opname and not options.operators:
        name = cls if isinstance(cls, str) else cls.__name__
        if not starts_with_any(name, options.opname):
            return False
    return not options.types or any(_is_a(cls, wanted) for wanted in options.types)


def _is_a(cls: type | str, wanted: type | str) -> bool:
    if isinstance(cls, str):
        return cls == (wanted if isinstance(wanted, str) else wanted.__name__)
    if isinstance(wanted, str):
        return any(base.__name__ == wanted for base in cls.__mro__)
    return issubclass(cls, wanted)


def is_device(device: torch.device, wanted: str) -> bool:
    """Return whether a device has that name (``cpu``, ``cuda0``, ``npu``) or number.

    As in msit, a number selects the CPU as well.
    """
    if wanted.isdigit():
        return device.type == "cpu" or (device.index or 0) == int(wanted)
    return wanted in (device.type, f"{device.type}{device.index or 0}")


def starts_with_any(name: str, prefixes: Iterable[str]) -> bool:
    """Return whether a class or an operator starts with one of these lower-case prefixes.

    An operator (``Aten.mm``) is also compared without its level.
    """
    name = name.lower()
    bare = name.partition(".")[2]
    return any(name.startswith(prefix) or (bare and bare.startswith(prefix)) for prefix in prefixes)


def places(nodes: Sequence[Node]) -> dict[str, tuple[str, ...]]:
    """Return the place of every module in its tree by path.

    ``0_3_1`` is the second child of the fourth child of the first child of the root.
    """
    by_path: dict[str, tuple[str, ...]] = {}
    texts: list[str] = []
    children: Counter[int] = Counter()
    for node in nodes:
        number = children[node.parent]
        children[node.parent] += 1
        above = texts[node.parent] if node.parent >= 0 else ""
        texts.append((f"{above}_{number}" if above else str(number)) if node.parent >= 0 else "")
        by_path[node.path] = (texts[-1],)
    return by_path


def outermost(nodes: Sequence[Node]) -> set[str]:
    """Return the paths of a model's layers; of a model without any, those of the root's children.

    They are what msit records with ``-child False`` alone.
    """
    roots = {index for index, node in enumerate(nodes) if node.parent < 0}
    return repeated_layers(nodes) or {node.path for node in nodes if node.parent in roots}


def is_container(module: nn.Module) -> bool:
    """Return whether a module is never called itself: the module around it calls its children.

    A list or dict of modules that was given a ``forward`` is called like any module.
    """
    called = getattr(module.forward, "__func__", None) is not nn.Module.forward
    return isinstance(module, (nn.ModuleList, nn.ModuleDict)) and not called


def counted(
    paths: Sequence[str], selected: Sequence[bool], containers: Sequence[bool]
) -> list[bool]:
    """Return for each module whether the execution ids of selected modules depend on its calls.

    That is so if it is selected, or if a module around a selected one calls it. All arguments are
    in the order of the tree, the root first. ``containers``: modules that are never called.
    """
    uncalled = {path for path, is_one in zip(paths, containers, strict=True) if is_one}

    def caller(path: str) -> str:
        path = path.rpartition(".")[0]
        while path and path in uncalled:
            path = path.rpartition(".")[0]
        return path

    callers: set[str] = set()
    for path, is_selected in zip(paths, selected, strict=True):
        while is_selected and path and caller(path) not in callers:
            path = caller(path)
            callers.add(path)
    return [
        is_selected or (path not in uncalled and caller(path) in callers)
        for path, is_selected in zip(paths, selected, strict=True)
    ]
