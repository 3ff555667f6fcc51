"""What a notebook shows as the value of a cell, and tables for pandas and Arrow."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from llmdebug_nb.core.errors import MissingPackageError

if TYPE_CHECKING:
    import pandas


class Shown:
    """What a notebook shows as the value of a cell: as text, as HTML, and as an explorer.

    Nouns know no front end: the one that shows them is looked up, by its name, when a notebook asks.
    """

    __slots__ = ()

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> Any:
        return import_module("llmdebug_nb.notebook.display").bundle(self)


class Tabular:
    """A table: for pandas, and for what reads Arrow (polars, DuckDB, pyarrow)."""

    __slots__ = ()

    def to_pandas(self) -> pandas.DataFrame:
        raise NotImplementedError

    def __arrow_c_stream__(self, requested_schema: Any = None) -> Any:
        """Return `to_pandas` as an Arrow stream. Raises MissingPackageError where there is no pyarrow, which pandas makes it with."""
        try:
            return self.to_pandas().__arrow_c_stream__(requested_schema)
        except ImportError:
            raise MissingPackageError(
                "a table for Arrow needs pyarrow, which is not installed: pip install pyarrow; to_pandas() does without"
            ) from None
