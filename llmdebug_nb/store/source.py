"""An opened index and the way to its payloads."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from llmdebug_nb.core.paths import within
from llmdebug_nb.core.records import Frame, Node, Record, RootCall

if TYPE_CHECKING:
    import torch


class Source:
    """An opened index with the view ``rows``. Made by `store/reader.py`.

    ``processes``: what each process says of itself, at least its ``rank``. ``outdated()``: the
    dump has grown since. ``kinds``: role, slot, op and dtype of all rows, once they were read;
    ``code``: the line of code of each frame, likewise.
    """

    def __init__(
        self,
        db: sqlite3.Connection,
        load: Callable[[Record], torch.Tensor],
        *,
        layout: str,
        nbytes: int,
        complete: bool,
        processes: list[dict[str, Any]],
        meta: dict[str, Any],
        outdated: Callable[[], bool] = lambda: False,
    ) -> None:
        self.db, self.load, self.outdated = db, load, outdated
        self.layout, self.nbytes, self.complete = layout, nbytes, complete
        self.processes, self.meta = processes, meta
        self.kinds: list[tuple[str, str, str, str]] | None = None
        self.code: dict[Frame, str] | None = None
        self._nodes: list[Node] | None = None
        db.create_function("within", 2, within, deterministic=True)

    def nodes(self) -> list[Node]:
        """Return the model tree, parents before children."""
        if self._nodes is None:
            self._nodes = read_nodes(self.db, "all_nodes")
        return self._nodes

    def root_calls(self) -> list[RootCall]:
        """Return the root calls in their order."""
        sql = """SELECT idx, generation, step, kind, query, total, batch, root FROM all_calls
 ORDER BY idx"""
        return [RootCall(*row) for row in self.db.execute(sql)]


def read_nodes(db: sqlite3.Connection, table: str) -> list[Node]:
    """Return the model tree of a table of nodes."""
    names = "path, name, type, parent, params, aliases, root, source"
    sql = f"SELECT {names} FROM {table} ORDER BY idx"
    return [_node(*row) for row in db.execute(sql)]


def _node(
    path: str, name: str, kind: str, parent: int, params: str, aliases: str, root: str,
    source: str | None,
) -> Node:  # fmt: skip
    frame = Frame.read(source) if isinstance(source, str) else None
    others = () if aliases == "[]" else tuple(json.loads(aliases))
    return Node(path, name, kind, parent, json.loads(params), others, root, frame)
