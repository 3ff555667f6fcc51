"""The contents of a foreign dump, and the protocol of the modules that read one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from llmdebug_nb.core.records import CallKey, Frame, Node, Record, RootCall

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class CallStack:
    """The lines of the program that led to a call, innermost first, each with its code.

    ``level``: api | module.
    """

    key: CallKey
    op: str
    level: str
    lines: tuple[tuple[Frame, str], ...]


@dataclass(frozen=True, slots=True)
class Contents:
    """The contents of a foreign dump.

    ``load(record)`` returns the tensor of a record whose payload is not None. ``ids``: execution
    ids by path. ``unread``: the ids of records whose summary is not known yet; ``describe(record)``
    reads the tensor of one, and returns the record with its summary, or why it has none.
    """

    records: list[Record]
    calls: list[RootCall]
    nodes: list[Node]
    load: Callable[[Record], torch.Tensor]
    meta: dict[str, Any] = field(default_factory=dict)
    ids: dict[str, str] = field(default_factory=dict)
    stacks: Sequence[CallStack] = ()
    unread: frozenset[int] = frozenset()
    describe: Callable[[Record], Record] = lambda record: record


class Layout(Protocol):
    """A module that reads one layout.

    ``detect`` is cheap: it only checks names. ``names``: some of the files in a folder, enough to
    tell its layout.
    """

    NAME: str

    def detect(self, path: Path, names: Sequence[str]) -> bool: ...
    def read(self, path: Path) -> Contents: ...
