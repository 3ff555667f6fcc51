"""Dumps of other tools: each module reads the folders of one layout into `Contents`.

Nothing outside the folder is opened, no pickle is trusted (``weights_only=True``), and every length
field is checked against the file before it is used.
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
    """The contents of a foreign dump.

    ``load(record)`` returns the tensor of a record whose payload is not None. ``ids``: execution
    ids by path.
    """

    records: list[Record]
    calls: list[RootCall]
    nodes: list[Node]
    load: Callable[[Record], torch.Tensor]
    meta: dict[str, Any] = field(default_factory=dict)
    ids: dict[str, str] = field(default_factory=dict)


class Layout(Protocol):
    """A module that reads one layout. ``detect`` is cheap: it looks at names alone."""

    NAME: str

    def detect(self, path: Path) -> bool: ...
    def read(self, path: Path) -> Contents: ...


def layouts() -> list[Layout]:
    """Return every known layout, the most specific first: plain files match nearly any folder."""
    from llmdebug_nb.store.layouts import atb, msit, msprobe, plain

    return [msprobe, msit, atb, plain]


def detect(path: Path) -> Layout | None:
    """Return the layout that ``path`` has, or None."""
    return next((layout for layout in layouts() if layout.detect(path)), None)
