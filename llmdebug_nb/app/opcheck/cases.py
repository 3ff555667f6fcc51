"""The cases of a csv: only the calls that its rows name are checked, as with msit's ``-c``.

Three tables are read. They are told apart by their columns:

    OpName[, OpParam]     msit's ``operation_tensors_N.csv``, columns separated by ``|``. A name is
                          type and execution id, ``LinearOperation_3_1``; in ours it is a path,
                          ``model.layers.0.mlp``, with ``#1`` for its second call.
    op_id, op_name        the result of a check of msit's, perhaps with fewer rows
    ... and our columns   of ours: then a row names one call, of one step and phase
"""

from __future__ import annotations

import csv
import dataclasses
import io
import os
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from llmdebug_nb.app.opcheck.choosing import Call
from llmdebug_nb.core.errors import OptionError
from llmdebug_nb.core.printable import printable

_BAR = "|"
_MOST = 1 << 28  # bytes: a row has some hundreds, so a million rows; no table of a model has more
_OURS = ("tensor_path", "phase", "generation", "step", "call", "rank")
_EXPECTED = "expected msit's operation_tensors csv (column OpName), or the csv of a check"


@dataclass(frozen=True)
class Case:
    """A row. ``line``: its line in the file. ``name``: as written. ``keys``: what calls have it.

    ``parameters``: of an ATB operation, JSON, "" if the row has none.
    """

    line: int
    name: str
    keys: tuple[tuple[str, ...], ...]
    parameters: str = ""

    def __str__(self) -> str:
        return f"line {self.line}: {self.name}"


def read(path: str | os.PathLike[str]) -> list[Case]:
    """Return the rows of a csv. Raises OptionError."""
    where, file = printable(os.fspath(path)), Path(path).expanduser()
    try:
        size = file.stat().st_size
        text = file.read_text("utf-8-sig") if size <= _MOST else None
    except OSError as error:
        raise OptionError(f"cases: can't read {where}: {error.strerror or error}") from None
    except ValueError:
        raise OptionError(f"cases: {where} is no text; {_EXPECTED}") from None
    if text is None:
        raise OptionError(f"cases: {where} has {size:,} bytes; at most {_MOST:,} are read")
    try:
        found = list(_cases(text, where))
    except csv.Error as error:
        raise OptionError(f"cases: {where} can't be read: {error}") from None
    if not found:
        raise OptionError(f"cases: {where} has no rows; write one for each call to check")
    return found


def _cases(text: str, where: str) -> Iterator[Case]:
    """Raises OptionError: a column or the name of an operator is missing."""
    head = text.partition("\n")[0]
    bars = _BAR in head  # nothing is quoted then, and OpParam has quotes
    reader = csv.DictReader(
        io.StringIO(text, newline=""), delimiter=_BAR if bars else ",",
        quoting=csv.QUOTE_NONE if bars else csv.QUOTE_MINIMAL,
    )  # fmt: skip
    columns = {name.strip() for name in reader.fieldnames or () if name}
    needed = {"OpName"} if "OpName" in columns else {"op_id", "op_name"}
    if not needed <= columns:
        absent = " and ".join(sorted(needed - columns))
        raise OptionError(f"cases: {where} has no column {absent}; {_EXPECTED}")
    before: set[tuple[tuple[str, ...], ...]] = set()
    for row in reader:
        cells = {k.strip(): _cell(v) for k, v in row.items() if k and isinstance(v, str)}
        case = _named(cells, reader.line_num) if "OpName" in needed else _checked(cells, reader)
        if case is None:
            raise OptionError(f"cases: {where} names no operator in line {reader.line_num}")
        if case.keys not in before:  # a check has a row for each output
            before.add(case.keys)
            yield case


def _cell(text: str) -> str:
    """Return a cell as it was, before an apostrophe kept a spreadsheet from computing it."""
    return text.strip().removeprefix("'")


def _named(cells: dict[str, str], line: int) -> Case | None:
    name = cells.get("OpName", "")
    if not name:
        return None
    path, _, number = name.partition("#")
    keys = [("path", printable(path), number or "0")]
    if typed := re.fullmatch(r"([A-Za-z]\w*?)_(\d+(?:_\d+)*)", name):
        keys.append(("id", typed[2], typed[1].lower()))
    return Case(line, printable(name), tuple(keys), cells.get("OpParam", ""))


def _checked(cells: dict[str, str], reader: csv.DictReader[str]) -> Case | None:
    name, number = cells.get("op_name", ""), cells.get("op_id", "")
    if not name:
        return None
    ours = tuple(cells.get(column, "") for column in _OURS)
    key = ("key", *ours) if all(ours) else ("id", number, name.lower())
    parameters = cells.get("op_param", "")
    return Case(reader.line_num, printable(f"{name} {number}".strip()), (key,), parameters)


def choose(cases: Iterable[Case], calls: Iterable[Call]) -> tuple[list[Call], list[Case]]:
    """Return the calls that cases name, in execution order, and the cases that name none."""
    calls = list(calls)
    places: dict[tuple[str, ...], list[int]] = defaultdict(list)
    for place, call in enumerate(calls):
        for key in _keys(call):
            places[key].append(place)
    chosen: dict[int, Case] = {}
    absent = []
    for case in cases:
        found = [place for key in case.keys for place in places.get(key, ())]
        if not found:
            absent.append(case)
        for place in found:
            chosen.setdefault(place, case)
    return [
        dataclasses.replace(calls[place], parameters=chosen[place].parameters)
        for place in sorted(chosen)
    ], absent


def _keys(call: Call) -> Iterator[tuple[str, ...]]:
    key = call.key
    yield "path", printable(key.path), str(key.call)
    if call.id:
        yield "id", call.id, call.op.lower()
    facts = {"tensor_path": key.path, **key._asdict()}
    yield "key", *(printable(str(facts[column])) for column in _OURS)
