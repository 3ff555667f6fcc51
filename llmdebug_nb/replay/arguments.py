"""Build the arguments of a recorded call from its tensors and scalars; no recorded code runs."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Mapping

import torch

from llmdebug_nb.core import constants
from llmdebug_nb.core.dtypes import DTYPES
from llmdebug_nb.core.nested import mapped
from llmdebug_nb.core.records import CallKey, Record
from llmdebug_nb.replay.checks import GAP
from llmdebug_nb.replay.operators import CannotReplay
from llmdebug_nb.replay.runs import Scalar, Side

_DOT = re.compile(r"(?<!\\)\.")
_READ: dict[str, Callable[[str], object]] = {
    "bool": lambda text: text == "True",
    "int": int,
    "float": float,
    "complex": complex,
}
# a container without a text had nothing in it
_EMPTY: dict[str, Callable[[], object]] = {"dict": dict, "list": list, "tuple": tuple}
# arguments that say how a result lies in memory, not what its values are
_NO_VALUES = ("layout", "memory_format")


class Tensor(str):
    """Stands for the tensor of that slot."""

    __slots__ = ()


Arguments = tuple[list[object], dict[str, object]]  # positional, by keyword


def arguments_of(
    records: list[Record], scalars: Mapping[str, Scalar], without_cache: bool = False
) -> Arguments:
    """Return the arguments of a call, with a `Tensor` in place of each tensor.

    ``without_cache``: a cache of earlier tokens becomes None, so that the call can still be made.

    Raises:
        CannotReplay: an argument was not recorded, or its text can't be read.
    """
    leaves: dict[str, object] = {record.site.slot: Tensor(record.site.slot) for record in records}
    for slot, scalar in scalars.items():
        if slot not in leaves and not (slot.startswith("kwargs.") and scalar[0] in _NO_VALUES):
            skipped = without_cache and is_cache(slot, scalar)
            leaves[slot] = None if skipped else value(slot, scalar)
    root: dict[str, object] = {}
    for slot, leaf in leaves.items():
        *way, last = (part.replace("\\.", ".") for part in _DOT.split(slot))
        if len(way) > constants.ARGUMENT_DEPTH:
            raise CannotReplay("an argument is nested too deeply")
        at = root
        for part in way:
            inner = at.setdefault(part, {})
            if not isinstance(inner, dict):
                raise CannotReplay(f"argument {slot} contradicts another")
            at = inner
        at[last] = leaf
    named = root.pop("kwargs", {})
    places = [str(i) for i in range(len(root))]
    if sorted(root, key=_order) != places or not isinstance(named, dict):
        raise CannotReplay("an argument was not recorded", GAP)
    by_name = {name: _built(value) for name, value in named.items()}
    return [_built(root[place]) for place in places], by_name


def is_cache(slot: str, scalar: Scalar) -> bool:
    """Tell whether an argument holds keys and values of earlier tokens."""
    kind, text = scalar
    return (
        text is None
        and kind not in ("None", *_EMPTY)
        and (kind.endswith("Cache") or bool(re.search(r"past|cache", slot)))
    )


def filled(
    arguments: Arguments, load: Callable[[str], torch.Tensor], floating: torch.dtype | None = None
) -> Arguments:
    """Return the arguments with a copy of each tensor, `widened` to ``floating``."""

    def fill(value: object) -> object:
        if isinstance(value, Tensor):
            return widened(load(value), floating)
        return widened_dtype(value, floating) if isinstance(value, torch.dtype) else value

    return mapped(arguments, fill)


def widened(x: torch.Tensor, floating: torch.dtype | None) -> torch.Tensor:
    """Return a copy of a tensor: a floating one in dtype ``floating``, a complex one of two."""
    return x.to(widened_dtype(x.dtype, floating), copy=True)


def widened_dtype(dtype: torch.dtype, floating: torch.dtype | None) -> torch.dtype:
    """Return ``floating`` for a floating dtype, its complex dtype for a complex one, else itself.

    None: always itself.
    """
    if floating is None:
        return dtype
    if dtype.is_complex:
        return floating.to_complex()
    return floating if dtype.is_floating_point else dtype


def loader(side: Side, records: list[Record]) -> Callable[[str], torch.Tensor]:
    """Return a function that loads the tensor of a slot, or raises CannotReplay."""
    by_slot = {record.site.slot: record for record in records}

    def load(slot: str) -> torch.Tensor:
        record = by_slot.get(slot)
        if record is None:
            raise CannotReplay(f"argument {slot} was not recorded", GAP)
        return side.load(record)

    return load


def outputs(side: Side, key: CallKey) -> dict[str, torch.Tensor]:
    """Return the outputs of a call whose values were kept, by slot."""
    return {
        record.site.slot: side.load(record)
        for record in side.records(key, "output")
        if record.payload is not None and record.kept is None
    }


def _order(name: str) -> tuple[int, str]:
    return len(name), name


def _built(value: object) -> object:
    """Return a container from its parts by key: a tuple if they are numbered, else a dict."""
    if not isinstance(value, dict) or not value:
        return value
    names = sorted(value, key=_order)
    if names == [str(i) for i in range(len(names))]:
        return tuple(_built(value[name]) for name in names)
    return {name: _built(part) for name, part in value.items()}


def value(slot: str, scalar: Scalar) -> object:
    """Read the value of an argument from its text. Raises CannotReplay."""
    kind, text = scalar
    if kind == "None":
        return None
    if text is None and kind in _EMPTY:
        return _EMPTY[kind]()
    if text is None or len(text) >= constants.ARGUMENT_CHARACTERS:
        raise CannotReplay(f"argument {slot} is a {kind}, which is not recorded", GAP)
    try:
        if kind in _READ:
            return _READ[kind](text)
        if kind == "dtype":
            return DTYPES[text.removeprefix("torch.")]
        if kind == "device":
            return torch.device("cpu")  # where the values are loaded
        if kind in ("str", "Size"):
            is_container = text.startswith(("(", "[", "slice(", "torch.Size("))
            return _literal(text) if is_container else text
    except (ValueError, KeyError, SyntaxError, RecursionError, MemoryError):
        pass
    raise CannotReplay(f"argument {slot} ({kind} {text[:40]!r}) can't be read")


def _literal(text: str) -> object:
    """Read a tuple, list, size or slice of plain values. Raises ValueError, SyntaxError."""
    if text.startswith("torch"):
        text = text.removeprefix("torch.Size(").removesuffix(")")
    return _plain(ast.parse(text, mode="eval").body)


def _plain(node: ast.expr) -> object:
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, (ast.Tuple, ast.List)):
        return tuple(_plain(part) for part in node.elts)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        number = _plain(node.operand)
        if isinstance(number, (int, float, complex)):
            return -number
    if isinstance(node, ast.Name) and node.id == "Ellipsis":
        return ...
    if isinstance(node, ast.Attribute) and is_name(node.value, "torch"):
        return DTYPES[node.attr]
    if isinstance(node, ast.Call) and is_name(node.func, "slice") and not node.keywords:
        return slice(*(_plain(part) for part in node.args))
    raise ValueError("no plain value")


def is_name(node: ast.expr, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name
