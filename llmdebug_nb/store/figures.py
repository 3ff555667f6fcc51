"""Statistics of a foreign dump's tensors, read when a query asks for them.

SQLite computes the columns of a view only for the rows and columns that a SELECT needs. So in the
view ``rows``, a column of statistics is a function that reads the tensor. What was read is written
into the table ``listed`` below it, and is not read again.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

from llmdebug_nb.core.bars import progress_bar
from llmdebug_nb.core.records import Record
from llmdebug_nb.store.connection import Connection
from llmdebug_nb.store.layouts import Contents
from llmdebug_nb.store.rows import FIGURES, Value, figures_of
from llmdebug_nb.store.views import VIEWS

if TYPE_CHECKING:
    from tqdm import tqdm

LISTED = "listed"
_SETTLE = f"UPDATE {LISTED} SET {', '.join(f'{name} = ?' for name in FIGURES)} WHERE id = ?"


class Figures:
    """The tensors of a dump that are not read yet. ``name``: of the dump, for the progress bar."""

    def __init__(self, db: Connection, name: str, contents: Contents) -> None:
        """Put the view over the table ``rows``, which then has another name.

        A record that is not read yet has no dtype there.
        """
        self._db, self._name, self._contents = db, name, contents
        self._records = {record.id: record for record in contents.records}
        self._weights = _weights_of(contents)
        self._left = len(contents.unread)
        self._found: dict[int, Mapping[str, Value]] = {}
        self._failure: BaseException | None = None
        self._bar: tqdm[None] | None = None
        db.execute(f"ALTER TABLE rows RENAME TO {LISTED}")
        db.execute(f"CREATE INDEX by_id ON {LISTED}(id)")
        db.execute("ALTER TABLE all_nodes RENAME TO nodes")
        db.create_function("figure", 2, self._figure)
        db.create_function("shapes", 1, self._shapes)
        figure = "CASE WHEN dtype IS NULL THEN figure(id, '{0}') ELSE {0} END"
        shapes = "CASE params WHEN '{{}}' THEN shapes(path) ELSE params END"
        _put_view(db, "rows", LISTED, dict.fromkeys(FIGURES, figure))
        _put_view(db, "all_nodes", "nodes", {"params": shapes})
        db.reading = self._reading

    @contextmanager
    def _reading(self) -> Iterator[None]:
        """Show the progress of a query, keep what it read, and raise what stopped it."""
        try:
            yield
        finally:
            if self._bar is not None:
                self._bar.close()
            found, failure = self._found, self._failure
            self._found, self._failure, self._bar = {}, None, None
            rows = [(*(row[name] for name in FIGURES), number) for number, row in found.items()]
            self._db.executemany(_SETTLE, rows)
            self._left -= len(found)
            if failure is not None:
                raise failure from None

    def _figure(self, number: int, column: str) -> Value:
        """Return a column of a record."""
        return self._tried(lambda: self._row(number)[column])

    def _shapes(self, path: str) -> Value:
        """Return the shapes of a module's weights by name, as JSON."""
        return self._tried(
            lambda: json.dumps(
                {
                    record.site.slot: json.loads(str(row["shape"]))
                    for record in self._weights.get(path, ())
                    if (row := self._row(record.id))["lost"] is None
                }
            )
        )

    def _tried(self, get: Callable[[], Value]) -> Value:
        """Return what a function does. SQLite hides errors, so they are raised afterwards."""
        try:
            return get() if self._failure is None else None
        except BaseException as error:
            self._failure = error
            return None

    def _row(self, number: int) -> Mapping[str, Value]:
        if number not in self._found:
            if self._bar is None:
                name = f"reading {self._name}"
                self._bar = progress_bar(total=self._left, desc=name, unit="tensor")
            self._found[number] = figures_of(self._contents.describe(self._records[number]))
            self._bar.update()
        return self._found[number]


def _put_view(db: Connection, name: str, table: str, other: Mapping[str, str]) -> None:
    """Make a view that every query finds in the place of a table; ``other``: its own columns."""
    chosen = (f'{other.get(c, "{}").format(c)} AS "{c}"' for c in VIEWS[name].columns)
    db.execute(f"CREATE VIEW {name} AS SELECT {', '.join(chosen)} FROM {table}")


def _weights_of(contents: Contents) -> Mapping[str, list[Record]]:
    """Return the recorded weights of each module."""
    found = defaultdict[str, list[Record]](list)
    for record in contents.records:
        if record.site.role == "weight" and record.site.phase == "forward":
            found[record.site.path].append(record)
    return found
