"""An opened index and the way to its payloads."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from llmdebug_nb.core.columns import NODES, ROOT_CALLS
from llmdebug_nb.core.paths import within
from llmdebug_nb.core.records import Frame, Node, Record, RootCall
from llmdebug_nb.store.checked import DAMAGE, SIZE, check_nested, json_of, shape_of_sizes
from llmdebug_nb.store.connection import Connection
from llmdebug_nb.store.views import VIEWS, quoted

if TYPE_CHECKING:
    import torch


_PARENT = NODES.names[1:].index("parent")


@dataclass(frozen=True)
class About:
    """What is known of a dump as a whole.

    ``nbytes``: its size; the files of a foreign one are asked for theirs when it is. ``processes``:
    what each process says of itself, at least its ``rank``.
    """

    layout: str
    nbytes: int | Callable[[], int]
    complete: bool
    processes: list[dict[str, Any]]
    meta: dict[str, Any]


class Source:
    """An opened index with the view ``rows``. Made by `store/reader.py`. ``outdated()``: the
    dump has grown since. ``kinds``: role, slot, op and dtype of all rows, once they were read;
    ``code``: the line of code of each frame, likewise; ``answers``: the rows of queries that look
    through the whole index, likewise. ``listed``: the table of ``rows`` as far as
    they are known without reading a tensor.
    """

    def __init__(
        self,
        db: Connection,
        load: Callable[[Record], torch.Tensor],
        about: About,
        *,
        outdated: Callable[[], bool] = lambda: False,
        listed: str = "rows",
    ) -> None:
        self.db, self.load, self.outdated = db, load, outdated
        self.layout, self.complete, self.listed = about.layout, about.complete, listed
        self._nbytes = about.nbytes
        self.processes, self.meta = about.processes, about.meta
        self.kinds: list[tuple[str, str, str, str]] | None = None
        self.code: dict[Frame, str] | None = None
        self.answers: dict[str, list[Any]] = {}
        self._nodes: list[Node] | None = None
        db.create_function("within", 2, within, deterministic=True)

    @property
    def nbytes(self) -> int:
        """The size of the dump in bytes."""
        if not isinstance(self._nbytes, int):
            self._nbytes = self._nbytes()
        return self._nbytes

    def nodes(self) -> list[Node]:
        """Return the model tree, parents before children."""
        if self._nodes is None:
            self._nodes = read_nodes(self.db, "all_nodes")
        return self._nodes

    def root_calls(self) -> list[RootCall]:
        """Return the root calls in their order."""
        return read_root_calls(self.db, "all_calls")


def read_root_calls(db: Connection, table: str) -> list[RootCall]:
    """Return the root calls of a table of them. Raises CorruptDumpError."""
    sql = f"SELECT {quoted(ROOT_CALLS.names)} FROM {table} ORDER BY idx"
    return [RootCall(*row) for row in db.rows(VIEWS["all_calls"].row(*ROOT_CALLS.names), sql)]


def read_nodes(db: Connection, table: str) -> list[Node]:
    """Return the model tree of a table of nodes. Raises CorruptDumpError."""
    names = NODES.names[1:]
    found = db.rows(
        VIEWS["all_nodes"].row(*names), f"SELECT {quoted(names)} FROM {table} ORDER BY idx"
    )
    try:
        check_nested([row[_PARENT] for row in found])
        frames = {text: Frame.read(text or "") for text in {row[-1] for row in found}}  # few
        return [_node(frames, *row) for row in found]
    except DAMAGE as error:
        raise db.damaged(f"the model tree: {error}") from None


def _node(
    frames: Mapping[str | None, Frame | None], path: str, name: str, kind: str, parent: int,
    params: str, aliases: str, root: str, source: str | None,
) -> Node:  # fmt: skip
    others = () if aliases == "[]" else tuple(json_of(list[str], aliases))
    return Node(path, name, kind, parent, dict(_shapes(params)), others, root, frames[source])


@functools.lru_cache(1024)  # modules of a kind have parameters of the same shapes
def _shapes(text: str) -> dict[str, list[int]]:
    shapes = json_of(dict[str, list[SIZE]], text)
    for shape in shapes.values():
        shape_of_sizes(tuple(shape))
    return shapes
