"""Questions to the index of a dump, each a method with a type; no other part asks in SQL."""

from __future__ import annotations

import json
import threading
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from llmdebug_nb.core import constants, interrupts
from llmdebug_nb.core.errors import TensorLookupError
from llmdebug_nb.core.function_text import Function
from llmdebug_nb.core.records import CallKey, Frame, Kernel, Record
from llmdebug_nb.store.row_filter import (
    OperatorColumns,
    RecordColumns,
    RowFilter,
    ScalarColumns,
    row_text,
)
from llmdebug_nb.store.rows import SELECTED, SELECTED_KINDS, record_of, texts_of
from llmdebug_nb.store.source import Source
from llmdebug_nb.store.views import VIEWS, quoted

if TYPE_CHECKING:
    from typing_extensions import Unpack

T = TypeVar("T")
Values = Sequence[object]
_BAD = "(coalesce(nan, 0) + coalesce(inf, 0) > 0)"
_FIGURES = {"abs": "max(abs(min), abs(max))"}  # any other figure is a column
# what a row's text holds beside its path: few combinations, however many rows
_KIND = "role, slot, op, dtype"
_KIND_OF_JSON = ", ".join(f"json_extract(value, '$[{place}]')" for place in range(4))
_HAS_WORD = f"""(path LIKE ? ESCAPE '\\'
 OR ({_KIND}) IN (SELECT {_KIND_OF_JSON} FROM json_each(?)))"""
_IN_CALL = """(phase = 'forward' OR path NOT LIKE '%/%') AND (rank, generation, step, path, call)
 IN (SELECT rank, generation, step, path, call FROM call_rows WHERE id = ? OR id GLOB ?)"""
_FRAMES = """SELECT o.source, s.frames FROM operator_rows o
 LEFT JOIN all_sources s ON s.idx = o.source WHERE {} ORDER BY o.id LIMIT 1"""
_STACK = """SELECT s.frames, s.inside, o.forward_path, o.forward_call FROM operator_rows o
 LEFT JOIN all_sources s ON s.idx = o.source WHERE {} ORDER BY o.rank != ?, o.id LIMIT 1"""
_PASS = ("rank", "generation", "step", "phase")
_STACKS_OF_PASS = """SELECT path, call, source, forward_path, forward_call FROM operator_rows
 WHERE {} ORDER BY id"""
_FUNCTIONS = """SELECT line, function, substr(text, 1, ?) FROM all_functions
 WHERE file = ? AND line BETWEEN 1 AND ? ORDER BY line DESC LIMIT ?"""  # nearest first
# characters of a text that are read; functions that are looked at: a class has fewer inside it
_FUNCTION_BYTES, _FUNCTIONS_AT = 1 << 20, 64
# the input of a model that is named so, or of its first embedding
_TOKEN_IDS = """SELECT generation, step, min(id) FROM rows WHERE role = 'input'
 AND phase = 'forward' AND (slot LIKE '%input_ids' OR op LIKE '%Embedding')
 AND payload IS NOT NULL AND kept IS NULL AND dtype IN ('int64', 'int32')
 GROUP BY generation, step"""


class ScalarRow(NamedTuple):
    """An argument, output or attribute that is not a tensor.

    ``value``: its text. ``phase``: None in older dumps.
    """

    generation: int
    step: int
    path: str
    call: int
    role: str
    slot: str
    type: str
    value: str | None
    phase: str | None = None


class StepCount(NamedTuple):
    """Records of a step; ``bad``: those that hold NaN or infinity."""

    generation: int
    step: int
    records: int
    bad: int


class _Stack(NamedTuple):
    frames: str | None
    inside: int | None
    forward_path: str | None
    forward_call: int | None


class _Numbered(NamedTuple):
    path: str
    call: int
    source: int | None
    forward_path: str | None
    forward_call: int | None


class _Enclosed(NamedTuple):
    path: str
    call: int
    level: str
    within: str | None
    within_call: int | None


class Index:
    """The index of a dump, opened when it is first asked, and anew when the dump has grown."""

    def __init__(self, name: str, path: Path | None, open_: Callable[[], Source]) -> None:
        """``name`` and ``path`` of the run are for messages."""
        self._name, self.path, self._open = name, path, open_
        self._source: Source | None = None
        self.lock = threading.RLock()

    @property
    def source(self) -> Source:
        with self.lock:
            if self._source is None or self._source.outdated():
                self._reopen()
            assert self._source is not None
            return self._source

    @interrupts.unbroken
    def _reopen(self) -> None:
        """Open the index; an interrupt in between would leave it open and unknown."""
        self._source = self._open()

    def query(self, kind: type[T], sql: str, values: Values = ()) -> list[T]:
        """Return the rows of a SELECT as ``kind``; for modules of `store` alone.

        Raises CorruptDumpError.
        """
        with self.lock:
            return self.source.db.rows(kind, sql, values)

    def _once(self, kind: type[T], sql: str) -> list[T]:
        """Return the rows of a SELECT that looks through the whole index, kept until it grows."""
        with self.lock:
            if sql not in (answers := self.source.answers):
                answers[sql] = self.query(kind, sql)
            return answers[sql]

    def _one(self, kind: type[tuple[T, ...]], sql: str, values: Values = ()) -> T:
        """Return the only value of a SELECT that gives one row."""
        return self.query(kind, sql, values)[0][0]

    # -- records ------------------------------------------------------------------------------

    def records(
        self, after: int | None = None, n: int = -1, **columns: Unpack[RecordColumns]
    ) -> Iterator[Record]:
        """Yield records in execution order; see `Run.records`."""
        if unknown := columns.keys() - RecordColumns.__annotations__.keys():
            raise TypeError(f"records() has no column {', '.join(sorted(unknown))}")
        where, values = equal(columns)
        sql = f"SELECT {SELECTED} FROM rows WHERE {where} AND id > ? ORDER BY id LIMIT ?"
        after, n = -(1 << 63) if after is None else after, 1 << 62 if n < 0 else n
        while most := min(n, constants.ROWS_AT_ONCE):
            rows = self.query(SELECTED_KINDS, sql, (*values, after, most))
            yield from (record_of(row, self.path) for row in rows)
            after, n = (rows[-1][0], n - most) if len(rows) == most else (0, 0)

    def record(self, number: int) -> Record:
        """Return one record by id. Raises TensorLookupError."""
        record = next(self.records(id=number), None)
        if record is None:
            raise TensorLookupError(f"run {self._name!r} has no record {number}")
        return record

    def record_ids(self, **columns: Unpack[RecordColumns]) -> list[int]:
        """Return the ids of records in execution order."""
        where, values = equal(columns)
        sql = f"SELECT id FROM rows WHERE {where} ORDER BY id"
        with self.lock:
            return self.source.db.numbers(sql, values).tolist()

    def ids_of_call(self, key: CallKey, role: str) -> list[int]:
        """Return the ids of a call's records in one role."""
        return self.record_ids(
            path=key.path, call=key.call, phase=key.phase, generation=key.generation,
            step=key.step, rank=key.rank, role=role,
        )  # fmt: skip

    def count(self, view: str = "rows") -> int:
        """Return how many rows a view has; of ``rows``, one for each record."""
        return self._once(tuple[int], f"SELECT count(*) FROM {view}")[0][0]

    def count_kept_and_lost(self) -> tuple[int, int]:
        """Return how many records have values, and how many have lost them, as far as is known."""
        sql = f"SELECT count(payload), count(lost) FROM {self.source.listed}"
        return self.query(tuple[int, int], sql)[0]

    def recorded_steps(self) -> set[tuple[int, int]]:
        """Return generation and step of each step with more than weights."""
        sql = "SELECT DISTINCT generation, step FROM rows WHERE role != 'weight'"
        return set(self._once(tuple[int, int], sql))

    def forward_steps(self) -> list[tuple[int, int, int]]:
        """Return generation, step and rank of each step with forward inputs or outputs."""
        sql = """SELECT DISTINCT generation, step, rank FROM rows
 WHERE phase = 'forward' AND role IN ('input', 'output')"""
        return self.query(tuple[int, int, int], sql)

    def first_step(self, path: str, role: str) -> int | None:
        """Return the first step, warm-ups apart, with a record of this path and role."""
        sql = "SELECT min(step) FROM rows WHERE path = ? AND role = ? AND generation >= 0"
        return self._one(tuple[int | None], sql, (path, role))

    def token_ids(self) -> dict[tuple[int, int], int]:
        """Return, by generation and step, the id of the record that holds the token ids."""
        found = self.query(tuple[int, int, int], _TOKEN_IDS)
        return {(generation, step): number for generation, step, number in found}

    # -- lists of rows ------------------------------------------------------------------------

    def matching(self, wanted: RowFilter) -> array[int]:
        """Return the ids of the records that pass a filter, in execution order."""
        where, values = self._compiled(wanted)
        sql = f"SELECT id FROM rows WHERE {where} ORDER BY id"
        with self.lock:
            return self.source.db.numbers(sql, values)

    def nearest_match(self, wanted: RowFilter, start: int, backwards: bool) -> int | None:
        """Return the id of the first matching record after ``start``, or the last before it."""
        where, values = self._compiled(wanted)
        aim, side = ("max", "<") if backwards else ("min", ">")
        sql = f"SELECT {aim}(id) FROM rows WHERE {where} AND id {side} ?"
        return self._one(tuple[int | None], sql, (*values, start))

    def count_by_path(self, bad: bool = False) -> Counter[str]:
        """Return the records of each path; ``bad``: those that hold NaN or infinity."""
        where = _BAD if bad else "1"
        sql = f"SELECT path, count(*) FROM rows WHERE {where} GROUP BY path"
        return Counter(dict(self.query(tuple[str, int], sql)))

    def count_by_step(self) -> list[StepCount]:
        """Return the records of each step."""
        counts = f"generation, step, count(*), sum({_BAD})"
        return self._once(StepCount, f"SELECT {counts} FROM rows GROUP BY generation, step")

    def first_bad(self) -> int | None:
        """Return the id of the first record that holds NaN or infinity."""
        return self._once(tuple[int | None], f"SELECT min(id) FROM rows WHERE {_BAD}")[0][0]

    def lost_reasons(self, n: int) -> list[tuple[str, int]]:
        """Return the ``n`` most frequent reasons for lost values, each with its count."""
        sql = f"""SELECT lost, count(*) FROM {self.source.listed} WHERE lost IS NOT NULL
 GROUP BY lost ORDER BY 2 DESC LIMIT ?"""
        return self.query(tuple[str, int], sql, (n,))

    def _compiled(self, wanted: RowFilter) -> tuple[str, list[object]]:
        """Return a filter as a condition in SQL with its values.

        A word is looked for in each path, and once in each kind of row: building the text of
        every row would take ten times as long.
        """
        parts: list[tuple[str, Values]] = [equal({"rank": wanted.ranks} if wanted.ranks else {})]
        if wanted.step is not None:
            parts.append(("generation = ? AND step = ?", wanted.step))
        if wanted.module is not None:
            parts.append(("within(path, ?)", (wanted.module,)))
        if wanted.bad:
            parts.append((_BAD, ()))
        parts += [(f"{name} > 0", ()) for name in wanted.counts]
        for figure, sign, value in wanted.bounds:
            parts.append((f"{_FIGURES.get(figure, figure)} {sign} ?", (value,)))
        if wanted.ids:
            calls = [value for one in wanted.ids for value in (one, f"{one}[._]*")]
            parts.append((f"(({') OR ('.join([_IN_CALL] * len(wanted.ids))}))", calls))
        for word in wanted.words:  # last, as they take longest
            kinds = [kind for kind in self._kinds() if word in row_text("", *kind)]
            parts.append((_HAS_WORD, (_containing(word), json.dumps(kinds))))
        condition = " AND ".join(clause for clause, _ in parts)
        return condition, [value for _, values in parts for value in values]

    def _kinds(self) -> list[tuple[str, str, str, str]]:
        """Return role, slot, op and dtype of all rows."""
        source = self.source
        if source.kinds is None:
            sql = f"SELECT DISTINCT {_KIND} FROM rows"
            source.kinds = self.query(tuple[str, str, str, str], sql)
        return source.kinds

    # -- scalars, operators, kernels ----------------------------------------------------------

    def scalars(self, **columns: Unpack[ScalarColumns]) -> list[ScalarRow]:
        """Return arguments, outputs and attributes that are not tensors."""
        where, values = equal(columns)
        sql = f"SELECT {quoted(ScalarRow._fields)} FROM scalar_rows WHERE {where}"
        return self.query(ScalarRow, sql, values)

    def first_stack(
        self, **columns: Unpack[OperatorColumns]
    ) -> tuple[int | None, str | None] | None:
        """Return number and text of the first such operator's call stack; None: no such call."""
        where, values = equal(columns)
        found = self.query(tuple[int | None, str | None], _FRAMES.format(where), values)
        return found[0] if found else None

    def frames(self, key: CallKey, whole: bool = False) -> tuple[Frame, ...]:
        """Return an operator's call stack, innermost frame first, to its module's forward.

        ``whole``: with the frames around that module too, as far as they were recorded. An operator
        of a backward pass has that of its forward call. Empty where stacks were not recorded, as
        for modules; msprobe records them. Raises CorruptDumpError.
        """
        columns = key._asdict()
        rank = columns.pop("rank")  # its own row first: the other ranks run the same lines
        where, values = equal(columns)
        found = self.query(_Stack, _STACK.format(where), [*values, rank])
        text, inside, forward, number = found[0] if found else (None, None, None, None)
        if text is None and forward is not None and key.phase == "backward":
            forwards = key._replace(phase="forward", path=forward, call=number or 0)
            return self.frames(forwards, whole)
        frames = () if text is None else _frames(text, self.path)
        if whole:
            return frames
        if not isinstance(inside, int):  # in dumps of graphs and older ones, the name must tell
            last = (at for at, frame in enumerate(frames, 1) if frame.function == "forward")
            inside = next(last, len(frames))
        return frames[: max(inside, 0)]

    def stacks(self, key: CallKey) -> dict[tuple[str, int], tuple[Frame, ...]]:
        """Return the whole call stacks of all operators that ran in the pass of a call.

        By path and call. Operators of a backward pass have those of their forward calls. Raises
        CorruptDumpError.
        """
        where, values = equal({name: getattr(key, name) for name in _PASS})
        calls = self.query(_Numbered, _STACKS_OF_PASS.format(where), values)
        if key.phase == "backward":
            forward = self.stacks(key._replace(phase="forward"))
            made = ((c.path, c.call, (c.forward_path or "", c.forward_call or 0)) for c in calls)
            return {(path, call): forward[of] for path, call, of in made if of in forward}
        texts = dict(self.query(tuple[int, str], "SELECT idx, frames FROM all_sources"))
        stacks = {
            number: _frames(texts[number], self.path)
            for number in {call.source for call in calls if call.source is not None} & texts.keys()
        }
        return {
            (call.path, call.call): stacks[call.source] for call in calls if call.source in stacks
        }

    def code(self, frame: Frame) -> str:
        """Return the line of code of a frame, as it was when it ran; "" if it was not recorded.

        Raises CorruptDumpError.
        """
        source = self.source
        if source.code is None:
            sql = "SELECT frames, code FROM all_sources WHERE code IS NOT NULL"
            rows = self.query(tuple[str, str], sql)
            source.code = {
                read: line
                for frames, code in rows
                for text, line in zip(
                    texts_of(frames, self.path, "a call stack"),
                    texts_of(code, self.path, "the code of a call stack"),
                    strict=False,
                )
                if (read := Frame.read(text)) is not None
            }
        return source.code.get(frame, "")

    def function(self, frame: Frame) -> Function | None:
        """Return the text of the function of a frame, as it was when it ran.

        None if it was not recorded, or not the part in which the line is. Raises CorruptDumpError.
        """
        values = _FUNCTION_BYTES, frame.file, frame.line, _FUNCTIONS_AT
        own, code = frame.function.rpartition(".")[2], self.code(frame)
        for line, name, text in self.query(tuple[int, str, str], _FUNCTIONS, values):
            lines = tuple(text.split("\n")[: constants.FUNCTION_LINES])
            function = Function(frame.file, line, name, lines)
            known = code in ("", function.at(frame.line)[: len(code)])
            if known and frame.line in function and name.rpartition(".")[2] == own:
                return function
        return None

    def enclosing_calls(
        self, generation: int, step: int, rank: int
    ) -> dict[tuple[str, int], tuple[str, tuple[str, int] | None]]:
        """Return level and enclosing call of each operator call of a forward pass."""
        sql = """SELECT path, call, level, "within", within_call FROM operator_rows
 WHERE phase = 'forward' AND level != 'module' AND (generation, step, rank) = (?, ?, ?)"""
        return {
            (row.path, row.call): (
                row.level,
                None if row.within is None else (row.within, row.within_call or 0),
            )
            for row in self.query(_Enclosed, sql, (generation, step, rank))
        }

    def kernel(self, name: str) -> Kernel | None:
        """Return a kernel of compiled code by its name."""
        sql = "SELECT name, nodes, source FROM all_kernels WHERE name = ? LIMIT 1"
        for found, nodes, source in self.query(tuple[str, str, str], sql, (name,)):
            return Kernel(found, tuple(nodes.split(", ")), source)
        return None

    def recording_time(self, generation: int, step: int) -> float:
        """Return the microseconds that recording took in a step."""
        sql = """SELECT sum(duration) FROM all_timings
 WHERE level = 'recording' AND generation = ? AND step = ?"""
        return (self._one(tuple[int | None], sql, (generation, step)) or 0) / 1e3

    # -- execution ids ------------------------------------------------------------------------

    def execution_ids(
        self, step: int | None, generation: int, rank: int | None
    ) -> dict[tuple[str, int], str]:
        """Return the ids of a step's calls by path and call; see `Run.ids`."""
        if step is None:
            first = """SELECT generation, step FROM call_rows
 WHERE generation >= ? ORDER BY 1, 2 LIMIT 1"""
            first_found = self.query(tuple[int, int], first, (generation,))
            generation, step = first_found[0] if first_found else (generation, 0)
        if rank is None:
            rank = self._one(tuple[int | None], "SELECT min(rank) FROM call_rows")
        sql = """SELECT path, call, id FROM call_rows
 WHERE generation = ? AND step = ? AND rank = ? ORDER BY seq"""
        found = self.query(tuple[str, int, str], sql, (generation, step, rank))
        return {(path, call): number for path, call, number in found}

    def execution_id(self, **columns: Unpack[OperatorColumns]) -> str | None:
        """Return the id of one call."""
        where, values = equal(columns)
        sql = f"SELECT id FROM call_rows WHERE {where} LIMIT 1"
        return next((id_ for (id_,) in self.query(tuple[str], sql, values)), None)

    # -- lookups that fail --------------------------------------------------------------------

    def first_unknown(
        self, view: str, columns: Mapping[str, object], order: Sequence[str]
    ) -> tuple[str, list[str]] | None:
        """Return the first column whose value no row has, and the values that rows have there.

        The columns are checked in ``order``; only rows that fit the columns before are searched.
        """
        before: dict[str, object] = {}
        for name in order:
            if name not in columns:
                continue
            where, values = equal({**before, name: columns[name]})
            if self.is_empty(view, where, values):
                where, values = equal(before)
                sql = f"SELECT DISTINCT {name} FROM {view} WHERE {where}"
                rows = self.query(VIEWS[view].row(name), sql, values)
                return name, [str(value) for (value,) in rows]
            before[name] = columns[name]
        return None

    def is_empty(self, view: str, where: str = "1", values: Values = ()) -> bool:
        """Tell whether a view has no such rows."""
        return not self.query(tuple[int], f"SELECT 1 FROM {view} WHERE {where} LIMIT 1", values)


def equal(columns: Mapping[str, object]) -> tuple[str, list[object]]:
    """Return the condition that columns have these values; of a tuple, one of its values."""
    clauses, values = ["1"], list[object]()
    for name, value in columns.items():
        several = isinstance(value, tuple)
        clauses.append(f"{name} IN (SELECT value FROM json_each(?))" if several else f"{name} = ?")
        values.append(json.dumps(value) if several else value)
    return " AND ".join(clauses), values


def _frames(text: str, path: Path | None) -> tuple[Frame, ...]:
    """Read a call stack. Raises CorruptDumpError."""
    texts = texts_of(text, path, "a call stack")
    return tuple(frame for frame in map(Frame.read, texts) if frame is not None)


def _containing(word: str) -> str:
    """Return a pattern for LIKE (ESCAPE '\\') that fits texts with ``word`` in them."""
    for special in "\\%_":
        word = word.replace(special, "\\" + special)
    return f"%{word}%"
