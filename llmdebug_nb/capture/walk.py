"""Finds the tensors in the arguments and results of a call."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Mapping
from typing import NamedTuple

import torch

from llmdebug_nb.capture.calls import Leaf
from llmdebug_nb.core.masking import masked

_PLAIN = (bool, int, float, complex, str, torch.dtype, torch.device)
LEAVES = frozenset((torch.Tensor, torch.nn.Parameter, type(None), *_PLAIN))  # no look inside
_SEARCHED, _SHOWN = 4096, 200  # characters of a text: searched for secrets, and kept


class OtherLeaf(NamedTuple):
    """Stands for a leaf that is no tensor and has no text. ``kind``: the name of its class."""

    kind: str

    @classmethod
    def of(cls, kind: type) -> OtherLeaf:
        return cls(kind.__name__)


def leaves(value: object, slot: str = "") -> list[Leaf]:
    """Return slot and value of each tensor and everything else that isn't a container, in order.

    Enters mappings (such as Hugging Face's ModelOutput), other collections, dataclasses, and
    objects that hold tensors themselves; not key-value caches. An empty container is a leaf. A slot
    names the way: ``0``, ``hidden_states.3``. Positions count None and scalars too, so none is ever
    shifted.
    """
    return [(slot or "0", value)] if type(value) in LEAVES else list(_walk(value, slot, ()))


def _walk(value: object, slot: str, above: tuple[int, ...]) -> Iterator[Leaf]:
    if isinstance(value, torch.Tensor):
        yield slot or "0", value
        return
    parts = None if id(value) in above else _parts(value)
    if not parts:
        yield slot or "0", value
        return
    above = (*above, id(value))
    for key, part in parts:
        # keeps slots unambiguous
        name = _writable(masked(key)).replace(".", "\\.") if isinstance(key, str) else str(key)
        yield from _walk(part, f"{slot}.{name}" if slot else name, above)


def _parts(value: object) -> Collection[tuple[object, object]] | None:
    """Return the parts of a container by key, or None if it isn't entered."""
    if isinstance(value, Mapping):
        return value.items()
    if isinstance(value, Collection) and not isinstance(value, (str, bytes, bytearray)):
        return list(enumerate(value))
    if isinstance(value, type) or not hasattr(value, "__dict__"):
        return None
    if dataclasses.is_dataclass(value):
        return [(f.name, getattr(value, f.name, None)) for f in dataclasses.fields(value)]
    # a plain object that holds tensors itself; deeper ones (key-value caches) stay closed
    attributes = vars(value)
    holds_tensors = any(isinstance(part, torch.Tensor) for part in attributes.values())
    return attributes.items() if holds_tensors else None


def call_inputs(args: tuple[object, ...], kwargs: Mapping[str, object]) -> list[Leaf]:
    """Return the leaves of a module's arguments: ``0``, ``1.0``; by keyword ``kwargs.name``."""
    inputs: list[Leaf] = []
    for i, value in enumerate(args):
        if type(value) in LEAVES:
            inputs.append((str(i), value))
        else:
            inputs += _walk(value, str(i), ())
    for name, value in kwargs.items():
        slot = f"kwargs.{_writable(name)}"
        if type(value) in LEAVES:
            inputs.append((slot, value))
        else:
            inputs += _walk(value, slot, ())
    return inputs


def operator_inputs(args: tuple[object, ...], kwargs: Mapping[str, object]) -> Iterator[Leaf]:
    """Yield the leaves of an operator's arguments, slots as in `call_inputs`.

    A list without tensors in it is one leaf, its text.
    """
    for name, value in (
        *((str(i), value) for i, value in enumerate(args)),
        *((f"kwargs.{_writable(k)}", v) for k, v in kwargs.items()),
    ):
        if type(value) in LEAVES or isinstance(value, torch.Tensor):
            yield name, value
        elif isinstance(value, (list, tuple)) and any(
            isinstance(part, torch.Tensor) for part in value
        ):
            yield from leaves(value, name)
        else:
            yield name, str(value) if isinstance(value, (list, tuple, slice)) else value


def scalar_text(value: object, name: str) -> tuple[str, str | None]:
    """Return type name and text of a leaf that is not a tensor; only plain values have a text.

    ``name``: its slot. Secrets in the text are masked.
    """
    if value is None:
        return "None", None
    if type(value) is OtherLeaf:
        return value.kind, None
    if isinstance(value, str):
        return type(value).__name__, _writable(masked(str(value)[:_SEARCHED], name)[:_SHOWN])
    return type(value).__name__, str(value)[:_SHOWN] if isinstance(value, _PLAIN) else None


def _writable(text: str) -> str:
    """Return a text that UTF-8 can hold: half a character of UTF-16 becomes ``\\ud800``."""
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode()
