"""The files that one process wrote of a native dump, opened read-only.

An index that was not closed is copied before SQLite opens it, and the payload frames behind its
last commit are read from the payload file.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypedDict, cast

import msgspec

from llmdebug_nb.core.columns import AT, RECORDS, ROOT_CALLS, TABLES, Row, insert
from llmdebug_nb.core.errors import CorruptDumpError
from llmdebug_nb.core.kernels.raw import from_bytes
from llmdebug_nb.core.kernels.summary import summarize
from llmdebug_nb.core.records import Summary
from llmdebug_nb.store import format as fmt
from llmdebug_nb.store import payload
from llmdebug_nb.store.catalog import process_folders
from llmdebug_nb.store.checked import DAMAGE, MOMENT, json_of, shape_of
from llmdebug_nb.store.connection import Connection, connect, log_of
from llmdebug_nb.store.payload import Piece

if TYPE_CHECKING:
    import torch

_FIGURES = ("min", "max", "mean", "l2norm", "nan", "inf", "zero")


class AlarmMeta(TypedDict):
    """A `moments.Alarm` as JSON."""

    generation: int
    step: int
    first: int
    reason: str


class Meta(TypedDict, total=False):
    """What a process says of itself; `docs/format.md` describes it."""

    rank: Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
    pid: int
    begun: MOMENT
    bytes: Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
    complete: bool
    idle: bool
    ended_by: str | None
    recorded: int
    distinct: int
    masked: int
    lost: dict[str, int]
    problems: dict[str, int]
    notes: list[str]
    alarms: list[AlarmMeta]
    determinism: list[str]


OF_PROCESS = (
    "rank",
    "pid",
    "bytes",
    "masked",
)  # what a run of several processes does not take over


class Process:
    """The recording of one process.

    ``number``: its place among the processes of the run. ``later``: what is added to its
    generations, so that they follow those of an earlier process of the same rank.
    """

    def __init__(self, folder: Path, number: int) -> None:
        self.folder, self.number, self.later = folder, number, 0
        self._summaries: dict[tuple[Any, ...], Summary] = {}
        self._seen = self._state()
        self.db = connect(folder / fmt.INDEX)
        self.settled = self.db.settled
        self._stand_ins = dict(self._absent(self.db.widths))
        self.meta = self._read_meta()
        self.rank, self._covered = self.meta.get("rank", 0), self.meta.get("bytes", 0)
        self.begun = self.meta.get("begun", 0.0)
        self._pieces = payload.pieces(folder)
        self.nbytes = sum(piece.end - piece.start for piece in self._pieces)
        self.missing = self._count_missing()
        self.complete = self.meta.get("complete", False) and not self.missing
        if not self.settled:
            self._add_tail()
        self.stand_in(self.db)

    def _read_meta(self) -> Meta:
        """Return what the process says of itself. Raises CorruptDumpError."""
        pairs = self.db.rows(tuple[str, str], "SELECT key, value FROM main.meta")
        try:
            found = {key: json_of(object, value) for key, value in pairs}
            return cast("Meta", found | msgspec.convert(found, Meta))
        except DAMAGE as error:
            raise self.db.damaged(error) from None

    def stand_in(self, db: Connection) -> None:
        """Give an index, or a copy of it, the tables and columns that older dumps do not have."""
        for name, select in self._stand_ins.items():
            db.write(f"CREATE TEMP VIEW {name} AS SELECT {select}")

    def _absent(self, widths: Mapping[str, int]) -> Iterator[tuple[str, str]]:
        """Yield name and stand-in of each table that is absent, or lacks columns added later."""
        for table in TABLES:
            if table.name not in widths:
                columns = ", ".join(f"NULL AS {column}" for column in ("rowid", *table.names))
                yield table.name, f"{columns} WHERE 0"
            elif lacking := table.names[widths[table.name] :]:
                columns = ", ".join(f"NULL AS {name}" for name in lacking)
                yield table.name, f"rowid AS rowid, *, {columns} FROM main.{table.name}"

    def _count_missing(self) -> int:
        """Count the records whose values the last payload file has lost: it was cut short."""
        end = self._pieces[-1].end if self._pieces else 0
        if end >= self._covered:
            return 0
        sql = "SELECT count(*) FROM main.records WHERE offset + length > ?"
        ((missing,),) = self.db.rows(tuple[int], sql, (end,))
        return missing

    def _state(self) -> list[tuple[int, int]]:
        """Return size and time of change of each file; they tell whether the recording went on."""
        index = self.folder / fmt.INDEX
        states = [file.stat() for file in (index, log_of(index)) if file.is_file()]
        grown = [(piece.start, piece.end) for piece in payload.pieces(self.folder)]
        return [*grown, *((state.st_size, state.st_mtime_ns) for state in states)]

    def outdated(self) -> bool:
        """Tell whether more was recorded since this was opened."""
        if self.settled:
            return False
        there = payload.elsewhere(self.folder.parent)
        if there is not None:
            there.refresh()
        return self._state() != self._seen

    def _add_tail(self) -> None:
        """Add the payload frames that were written after the last commit."""
        rows = list(self._tail())
        found = self.db.rows(tuple[int], "SELECT idx FROM main.root_calls")
        known = {index for (index,) in found}
        columns = self.db.widths[RECORDS.name]
        insert_row = insert("main.records", columns).replace("INSERT", "INSERT OR IGNORE", 1)
        for row in rows:
            if row[AT["root_call"]] not in known:
                self._add_root_call(row[AT["root_call"]])
                known.add(row[AT["root_call"]])
            if row[AT["length"]] is not None and row[AT["kept"]] is None:
                self._add_figures(row)
            self.db.write(insert_row, row[:columns])

    def _tail(self) -> Iterator[Row]:
        for piece in self._pieces:
            if piece.end > self._covered:
                start, first = piece.start, max(self._covered - piece.start, 0)
                with payload.stream(piece) as stream:
                    yield from fmt.scan_frames(stream, first, piece.end - start, start)

    def _add_root_call(self, index: int) -> None:
        """Add a root call that was not committed, as a step after the last one."""
        sql = "SELECT max(generation), max(step) FROM main.root_calls"
        ((generation, last),) = self.db.rows(tuple[int | None, int | None], sql)
        step = 0 if last is None else last + 1
        row = (index, generation or 0, step, "forward", None, None, None, "")
        self.db.write(ROOT_CALLS.insert, row)

    def _add_figures(self, row: Row) -> None:
        """Compute the figures of a row from its values; of values that many rows have, once."""
        place = tuple(row[AT[name]] for name in ("offset", "length", "dtype", "shape"))
        if place not in self._summaries:
            self._summaries[place] = summarize(self.read(*place))
        for name in _FIGURES:
            row[AT[name]] = getattr(self._summaries[place], name)

    def read(
        self,
        offset: int,
        length: int,
        dtype: str,
        shape: str | tuple[int, ...],
        kept: str | None = None,
    ) -> torch.Tensor:
        """Return the values of a record: a ``dtype`` tensor, or what ``kept`` names of it.

        ``shape``: of what is returned. Offset and length are checked before memory is allocated.

        Raises:
            CorruptDumpError: the payload file is gone, too short, or does not hold such values.
        """
        return read_values(self._pieces, offset, length, dtype, shape, kept)


def read_values(
    pieces: Sequence[Piece], offset: int, length: int, dtype: str,
    shape: str | tuple[int, ...], kept: str | None,
) -> torch.Tensor:  # fmt: skip
    """Return values of the process that wrote these files, as `Process.read` does."""
    name = fmt.PAYLOAD
    try:
        name = payload.holding(pieces, offset).name
        data = payload.read(pieces, offset, length)
        sizes = shape_of(shape) if isinstance(shape, str) else shape
        return from_bytes(data, fmt.payload_dtype(kept, dtype), sizes)
    except FileNotFoundError as error:
        gone = error.filename or name
        raise CorruptDumpError(f"{gone} is gone: was the run deleted?") from None
    except (OSError, ValueError, RecursionError) as error:
        raise CorruptDumpError(f"{name}: {error}") from None


def processes(path: Path) -> list[Process]:
    """Return the processes of a native run, in order of rank and start. Raises CorruptDumpError."""
    folders = process_folders(path)
    if not folders:
        raise CorruptDumpError(f"{path} holds no recording: no rank*/{fmt.INDEX} in it")
    found = [Process(folder, 0) for folder in folders]
    found.sort(key=lambda process: (process.rank, process.begun, process.folder.name))
    for number, process in enumerate(found):
        process.number = number
    _number_generations(found)
    return found


def _number_generations(processes: list[Process]) -> None:
    """Let the generations of a process follow those of the process before it with its rank."""
    free: dict[int, int] = {}
    for process in processes:
        sql = "SELECT min(generation), max(generation) FROM main.root_calls"
        ((low, high),) = process.db.rows(tuple[int | None, int | None], sql)
        if process.rank in free and low is not None:
            process.later = free[process.rank] - min(low, 0)
        end = (high if high is not None else -1) + 1 + process.later
        free[process.rank] = max(free.get(process.rank, 0), end)
