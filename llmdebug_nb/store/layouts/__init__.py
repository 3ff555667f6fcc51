"""Dumps that other tools wrote: one module per layout, each reads a folder into `Contents`.

A layout module has ``NAME``, ``detect(path) -> bool`` (cheap: a look at names, no tensor is read)
and ``read(path) -> Contents``. Nothing outside the folder is ever opened, no pickle is trusted
(``weights_only=True``), and no length field is believed before it is checked against the file.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from llmdebug_nb.core.records import Node, Record, RootCall

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Contents:
    """A foreign dump, read. ``load(record)`` gives the tensor of a record whose payload is not None. ``ids``: execution ids by path."""

    records: list[Record]
    calls: list[RootCall]
    nodes: list[Node]
    load: Callable[[Record], torch.Tensor]
    meta: dict[str, Any] = field(default_factory=dict)
    ids: dict[str, str] = field(default_factory=dict)


class Layout(Protocol):
    """A module that reads the dumps of one tool."""

    NAME: str

    def detect(self, path: Path) -> bool: ...
    def read(self, path: Path) -> Contents: ...


def layouts() -> list[Layout]:
    """Return every known layout, the most telling first: plain files match nearly any folder."""
    from llmdebug_nb.store.layouts import atb, msit, msprobe, plain

    return [msprobe, msit, atb, plain]


def detect(path: Path) -> Layout | None:
    """Return the layout module that knows ``path``, or None."""
    return next((layout for layout in layouts() if layout.detect(path)), None)
