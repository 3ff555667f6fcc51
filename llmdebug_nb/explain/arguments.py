"""The arguments of a recorded call, put together again from its tensors and scalars; never by running anything."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from llmdebug_nb.core.dtypes import DTYPES
from llmdebug_nb.core.records import Record
from llmdebug_nb.explain.calls import Key
from llmdebug_nb.explain.runs import NotAgain, Scalar, Side

_SHORTENED = 200  # a text of that length may have been cut when it was recorded
_DOT = re.compile(r"(?<!\\)\.")
_READ: dict[str, Callable[[str], Any]] = {
    "bool": lambda text: text == "True",
    "int": int,
    "float": float,
    "complex": complex,
}


class Tensor(str):
    """Stands for the tensor of that slot."""

    __slots__ = ()


Given = tuple[list[Any], dict[str, Any]]


def given(records: list[Record], scalars: Mapping[str, Scalar], caches: bool = False) -> Given:
    """Return positional and keyword arguments, with a `Tensor` in place of each tensor.

    ``caches``: what holds keys and values of earlier tokens is left out, rather than that the call can't be made.

    Raises:
        NotAgain: an argument was not recorded, or has no text to be read.
    """
    leaves: dict[str, Any] = {record.site.slot: Tensor(record.site.slot) for record in records}
    for slot, scalar in scalars.items():
        if slot not in leaves:
            leaves[slot] = None if caches and is_cache(slot, scalar) else _value(slot, scalar)
    root: dict[str, Any] = {}
    for slot, leaf in leaves.items():
        *way, last = (part.replace("\\.", ".") for part in _DOT.split(slot))
        at = root
        for part in way:
            at = at.setdefault(part, {})
            if not isinstance(at, dict):
                raise NotAgain(f"argument {slot} contradicts another")
        at[last] = leaf
    named = root.pop("kwargs", {})
    if sorted(root, key=_order) != [str(i) for i in range(len(root))] or not isinstance(
        named, dict
    ):
        raise NotAgain("an argument was not recorded")
    return [_built(root[str(i)]) for i in range(len(root))], {
        name: _built(value) for name, value in named.items()
    }


def is_cache(slot: str, scalar: Scalar) -> bool:
    """Tell whether an argument holds keys and values of earlier tokens."""
    return scalar[1] is None and (
        scalar[0].endswith("Cache") or bool(re.search(r"past|cache", slot))
    )


def filled(
    arguments: Given, load: Callable[[str], torch.Tensor], floating: torch.dtype | None = None
) -> Given:
    """Return the arguments with their tensors, each a copy. ``floating``: the dtype that floating ones are turned to."""

    def fill(value: Any) -> Any:
        if isinstance(value, Tensor):
            tensor = load(value)
            wide = floating is not None and tensor.is_floating_point()
            return tensor.to(floating) if wide else tensor.clone()
        if isinstance(value, torch.dtype):
            return floating if floating is not None and value.is_floating_point else value
        if isinstance(value, tuple):
            return tuple(fill(part) for part in value)
        return (
            {name: fill(part) for name, part in value.items()} if isinstance(value, dict) else value
        )

    args, kwargs = arguments
    return [fill(value) for value in args], {name: fill(value) for name, value in kwargs.items()}


def loader(side: Side, records: list[Record]) -> Callable[[str], torch.Tensor]:
    """Return what loads the tensor of a slot. It raises NotAgain where that is not there."""
    by_slot = {record.site.slot: record for record in records}

    def load(slot: str) -> torch.Tensor:
        record = by_slot.get(slot)
        if record is None:
            raise NotAgain(f"argument {slot} was not recorded")
        return side.load(record)

    return load


def results(value: Any, slot: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of a result under the slots that a recording gives them."""
    if isinstance(value, torch.Tensor):
        yield slot or "0", value
    elif isinstance(value, (list, tuple, Mapping)):
        for name, part in value.items() if isinstance(value, Mapping) else enumerate(value):
            escaped = str(name).replace(".", "\\.")
            yield from results(part, f"{slot}.{escaped}" if slot else escaped)


def outputs(side: Side, key: Key) -> dict[str, torch.Tensor]:
    """Return what a call gave, by slot; without what was not kept."""
    return {
        record.site.slot: side.load(record)
        for record in side.records(key, "output")
        if record.payload is not None and record.kept is None
    }


def _order(name: str) -> tuple[int, str]:
    return len(name), name


def _built(value: Any) -> Any:
    """Return a container from its parts by key: a tuple where they are numbered, else a dict."""
    if not isinstance(value, dict):
        return value
    names = sorted(value, key=_order)
    if names == [str(i) for i in range(len(names))]:
        return tuple(_built(value[name]) for name in names)
    return {name: _built(part) for name, part in value.items()}


def _value(slot: str, scalar: Scalar) -> Any:
    kind, text = scalar
    if kind == "None":
        return None
    if text is None or len(text) >= _SHORTENED:
        raise NotAgain(f"argument {slot} is a {kind}, which is not recorded")
    try:
        if kind in _READ:
            return _READ[kind](text)
        if kind == "dtype":
            return DTYPES[text.removeprefix("torch.")]
        if kind == "device":
            return torch.device("cpu")  # where the values are loaded to
        if kind in ("str", "Size"):
            return _literal(text) if text.startswith(("(", "[", "slice(", "torch.Size(")) else text
    except (ValueError, KeyError, SyntaxError, RecursionError, MemoryError):
        pass
    raise NotAgain(f"argument {slot} ({kind} {text[:40]!r}) can't be read")


def _literal(text: str) -> Any:
    """Read the text of a tuple, list, size or slice of plain values. Raises ValueError, SyntaxError."""
    return _node(
        ast.parse(
            text.removeprefix("torch.Size(").removesuffix(")")
            if text.startswith("torch")
            else text,
            mode="eval",
        ).body
    )


def _node(node: ast.expr) -> Any:
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, (ast.Tuple, ast.List)):
        return tuple(_node(part) for part in node.elts)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_node(node.operand)
    if isinstance(node, ast.Name) and node.id == "Ellipsis":
        return ...
    if (
        isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == "torch"
    ):
        return DTYPES[node.attr]
    if (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "slice"
        and not node.keywords
    ):
        return slice(*(_node(part) for part in node.args))
    raise ValueError("no plain value")
