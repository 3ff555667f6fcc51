"""Tables for pandas and Arrow."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmdebug_nb.core.errors import MissingPackageError

if TYPE_CHECKING:
    import pandas


class Tabular:
    """A table for pandas, and for libraries that read Arrow (polars, DuckDB, pyarrow)."""

    __slots__ = ()

    def to_pandas(self) -> pandas.DataFrame:
        raise NotImplementedError

    def __arrow_c_stream__(self, requested_schema: object = None) -> object:
        """Return `to_pandas` as an Arrow stream.

        Raises:
            MissingPackageError: pyarrow is not installed; pandas needs it for that.
        """
        try:
            return self.to_pandas().__arrow_c_stream__(requested_schema)
        except ImportError:
            raise MissingPackageError(
                "a table for Arrow needs pyarrow, which is not installed: pip install pyarrow; "
                "to_pandas() works without it"
            ) from None
