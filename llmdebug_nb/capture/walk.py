"""Finding the tensors in what a module takes and gives."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import torch

_PLAIN = (bool, int, float, complex, str, torch.dtype, torch.device)
_LEAVES = frozenset((torch.Tensor, torch.nn.Parameter, type(None), *_PLAIN))  # known at a glance


def leaves(value: Any, slot: str = "") -> list[tuple[str, Any]]:
    """Return (slot, leaf) for tensors and everything else that isn't a container, in order.

    Enters mappings (Hugging Face's ModelOutput is one), other collections, dataclasses, and objects that hold
    tensors themselves; not key-value caches. A slot names
    the way: ``0``, ``hidden_states.3``. Positions count None and scalars too, so none is ever shifted.
    """
    return [(slot or "0", value)] if type(value) in _LEAVES else list(_walk(value, slot, ()))


def _walk(value: Any, slot: str, above: tuple[int, ...]) -> Iterator[tuple[str, Any]]:
    if isinstance(value, torch.Tensor):
        yield slot or "0", value
        return
    parts = None if id(value) in above else _parts(value)
    if parts is None:
        yield slot or "0", value
        return
    above = (*above, id(value))
    for key, part in parts:
        name = str(key).replace(".", "\\.")  # so that two ways never have one name
        yield from _walk(part, f"{slot}.{name}" if slot else name, above)


def _parts(value: Any) -> Iterable[tuple[Any, Any]] | None:
    """Return the parts of a container by key, or None where there are none to enter."""
    if isinstance(value, Mapping):
        return value.items()
    if isinstance(value, Collection) and not isinstance(value, (str, bytes, bytearray)):
        return enumerate(value)
    if isinstance(value, type) or not hasattr(value, "__dict__"):
        return None
    if dataclasses.is_dataclass(value):
        return [(f.name, getattr(value, f.name, None)) for f in dataclasses.fields(value)]
    # a plain object that holds tensors itself; deeper ones (key-value caches) stay closed
    return (
        vars(value).items()
        if any(isinstance(part, torch.Tensor) for part in vars(value).values())
        else None
    )


def call_inputs(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Return the leaves of a call: positional ones as ``0``, ``1.0``; keyword ones as ``kwargs.name``."""
    found: list[tuple[str, Any]] = []
    for i, value in enumerate(args):
        if type(value) in _LEAVES:
            found.append((str(i), value))
        else:
            found += _walk(value, str(i), ())
    for name, value in kwargs.items():
        if type(value) in _LEAVES:
            found.append((f"kwargs.{name}", value))
        else:
            found += _walk(value, f"kwargs.{name}", ())
    return found


def operator_inputs(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield what an operator is given, slots as in `call_inputs`; of a list without tensors in it, only its text."""
    for name, value in (
        *((str(i), value) for i, value in enumerate(args)),
        *((f"kwargs.{k}", v) for k, v in kwargs.items()),
    ):
        if type(value) in _LEAVES or isinstance(value, torch.Tensor):
            yield name, value
        elif isinstance(value, (list, tuple)) and any(
            isinstance(part, torch.Tensor) for part in value
        ):
            yield from leaves(value, name)
        else:
            yield name, str(value) if isinstance(value, (list, tuple, slice)) else value


def scalar_text(value: Any) -> tuple[str, str | None]:
    """Return type name and text of a leaf that is no tensor; only plain values have a text."""
    if value is None:
        return "None", None
    return type(value).__name__, str(value)[:200] if isinstance(value, _PLAIN) else None
