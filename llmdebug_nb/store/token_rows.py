"""The token of each row of an engine's tensors, as a table."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmdebug_nb.core.records import StepRows, TokenRow
from llmdebug_nb.store.queries import Index
from llmdebug_nb.store.views import VIEWS, quoted

if TYPE_CHECKING:
    import pandas

_COLUMNS = ("step", "row", "request", "position", "token", "attempt", "sampled")


def table(index: Index) -> pandas.DataFrame:
    """Return `Run.rows`. Workers of one engine compute the same rows: they are listed once."""
    import pandas

    sql = f"""SELECT {quoted(_COLUMNS)} FROM all_token_rows
 GROUP BY {quoted(_COLUMNS)} ORDER BY min(root_call), "row" IS NOT NULL, "row", request, position"""
    found = index.query(VIEWS["all_token_rows"].row(*_COLUMNS), sql)
    frame = pandas.DataFrame(found, columns=list(_COLUMNS))
    kinds = {"row": "Int64", "token": "Int64", "sampled": "boolean"}
    return frame.astype(kinds)


def of(index: Index) -> list[TokenRow]:
    """Return the rows of a run in the order in which they were computed; none of other runs."""
    sql = f'SELECT {quoted(TokenRow._fields)} FROM all_token_rows ORDER BY root_call, "row"'
    found = index.query(VIEWS["all_token_rows"].row(*TokenRow._fields), sql)
    return [TokenRow(*row) for row in found]


def by_step(index: Index) -> list[StepRows]:
    """Return `Run.requests`."""
    sql = """SELECT generation, step, request, min("row"), max("row"), min(position), max(position)
 FROM all_token_rows WHERE "row" IS NOT NULL
 GROUP BY generation, step, request ORDER BY generation, step, min("row")"""
    return [StepRows(*row) for row in index.query(StepRows, sql)]
