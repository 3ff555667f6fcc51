"""The tables of a run for pandas: its records, scalars and operator calls.

Those of calls with their tensors, of kernels and of times are in `profile.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmdebug_nb.store.queries import Index, ScalarRow
from llmdebug_nb.store.rows import texts_of
from llmdebug_nb.store.views import OPERATOR_COLUMNS, VIEWS, quoted

if TYPE_CHECKING:
    import pandas

_SITE = ("rank", "generation", "step", "path", "call", "phase", "role", "slot")
_FLOATS = ("min", "max", "mean", "l2norm")
_COUNTS = ("nan", "inf", "zero")
_SUMMARY = ("dtype", "shape", *_FLOATS, *_COUNTS, "fingerprint")


def records(index: Index) -> pandas.DataFrame:
    """Return `Run.to_pandas`."""
    import pandas

    rows = list(index.records())
    kinds = {(c.generation, c.step): c.kind for c in reversed(index.source.root_calls())}
    columns: dict[str, list[object]] = {
        name: [getattr(r.site, name) for r in rows] for name in _SITE
    }
    columns["kind"] = [kinds.get((r.site.generation, r.site.step), "") for r in rows]
    columns |= {name: [getattr(r, name) for r in rows] for name in ("op", "seq")}
    columns |= {name: [getattr(r.summary, name) for r in rows] for name in _SUMMARY}
    columns |= {name: [getattr(r, name) for r in rows] for name in ("device", "producer")}
    columns["payload"] = [r.payload is not None for r in rows]
    columns |= {name: [getattr(r, name) for r in rows] for name in ("kept", "lost")}
    columns["placed"] = [None if r.placed is None else str(r.placed) for r in rows]
    frame = pandas.DataFrame(columns, index=pandas.Index([r.id for r in rows], name="id"))
    dtypes = dict.fromkeys(_FLOATS, "float64") | dict.fromkeys((*_COUNTS, "producer"), "Int64")
    return frame.astype(dtypes)


def scalars(index: Index, path: str | None) -> pandas.DataFrame:
    """Return `Run.scalars`."""
    import pandas

    rows = index.scalars() if path is None else index.scalars(path=path)
    return pandas.DataFrame(rows, columns=list(ScalarRow._fields))


def operators(index: Index) -> pandas.DataFrame:
    """Return `Run.operators`."""
    import pandas

    chosen = quoted(OPERATOR_COLUMNS)
    sql = f"SELECT {chosen} FROM operator_rows WHERE level != 'module' ORDER BY id"
    rows = index.query(VIEWS["operator_rows"].row(), sql)
    columns = {name: [row[i] for row in rows] for i, name in enumerate(OPERATOR_COLUMNS)}
    innermost = {
        number: next(iter(texts_of(text, index.path, "a call stack")), None)
        for number, text in index.query(tuple[int, str], "SELECT idx, frames FROM all_sources")
    }
    columns["source"] = [innermost.get(number) for number in columns["source"]]
    del columns["id"]
    frame = pandas.DataFrame(columns)
    return frame.astype(dict.fromkeys(("within_call", "forward_call"), "Int64"))
