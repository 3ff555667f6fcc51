"""What perturbations move: rows for tables, text for terminals, a page for notebooks."""

from __future__ import annotations

import html
import math
from collections.abc import Iterator

from llmdebug_nb.core.perturbations import KINDS, Moved, Sensitivity, common_path
from llmdebug_nb.core.printable import printable_lines
from llmdebug_nb.show.html_table import html_table
from llmdebug_nb.show.tables import aligned
from llmdebug_nb.show.words import count_text

_SHOWN, _CODE = 5, 60  # rows of each kind; characters of a line of code
HEAD = ("operator", "result moves", "amplified", "flips", "line")
_FIGURES = (1, 2, 3)  # of these columns
COLUMNS = [
    "kind", "path", "operator", "call", "operators", "moved", "amplification", "moved_inputs",
    "flips", "loss_moved", "above_spread", "source", "code", "problem",
]  # fmt: skip
Cell = str | int | float | bool | None


def rows(result: Sensitivity) -> list[dict[str, Cell]]:
    """Return a row for each kind and unit or group, by kind, the farthest moved first."""
    return [_row(result, row) for kind in result.rows for row in result.sorted(kind)]


def _row(result: Sensitivity, row: Moved) -> dict[str, Cell]:
    first, alone = row.units[0], row.alone
    cells: list[Cell] = [
        row.kind, first.path if alone else common_path(row.units), first.op if alone else None,
        first.number if alone else None, len(row.units), row.moved, row.amplification,
        row.given or None, row.flips, row.loss, result.tells(row), first.source if alone else None,
        first.code if alone else None, row.problem or None,
    ]  # fmt: skip
    return dict(zip(COLUMNS, cells, strict=True))


def text(result: Sensitivity) -> str:
    """Return the most sensitive operators by kind, and what was not done."""
    lines = list(_head(result))
    for kind in result.rows:
        lines += ["", f"{kind}: {KINDS[kind]}"]
        lines += aligned(HEAD, table) if (table := _table(result, kind)) else []
        lines += _rest(result, kind)
    return printable_lines([*lines, "", *result.notes])


def page(result: Sensitivity) -> str:
    """Return the same for a notebook."""
    parts = [_pre(list(_head(result)))]
    for kind in result.rows:
        table = html_table(HEAD, _table(result, kind), _FIGURES)
        parts += [_pre([f"{kind}: {KINDS[kind]}"]), table]
        parts += [_pre(list(_rest(result, kind)))]
    return "".join([*parts, _pre(result.notes)])


def _table(result: Sensitivity, kind: str) -> list[list[str]]:
    return [cells(result, row) for row in _moving(result, kind)[:_SHOWN]]


def _moving(result: Sensitivity, kind: str) -> list[Moved]:
    return [row for row in result.sorted(kind) if row.moved != 0]


def _pre(lines: list[str]) -> str:
    return f"<pre>{html.escape(printable_lines(lines))}</pre>" if lines else ""


def _head(result: Sensitivity) -> Iterator[str]:
    runs = count_text(result.runs, "run")
    line = f"perturb: how far the result ({result.result}) moves, as relative L2; {runs}"
    yield f"{line}; interrupted: not all was measured" if result.interrupted else line
    if result.spread:
        yield (
            f"the program is not deterministic: unperturbed runs differ by {result.spread:.3g}."
            " What moves no farther tells nothing"
        )


def cells(result: Sensitivity, row: Moved) -> list[str]:
    """Return the cells of a row, in the order of `HEAD`."""
    if row.moved is None:
        return [_name(row), row.problem, "", "", _line(row)]
    moved = "to NaN or infinity" if math.isinf(row.moved) else f"{row.moved:.3g}"
    if not result.tells(row):
        moved += " (by itself)" if row.moved else ""
    times = "" if row.amplification is None else f"{row.amplification:.3g}×"
    flips = f"{row.flips:,} of {result.positions:,}" if result.positions else ""
    return [_name(row), moved, times, flips, _line(row)]


def _name(row: Moved) -> str:
    first = row.units[0]
    if not row.alone:
        where = common_path(row.units) or "the model"
        return f"{where}: {count_text(len(row.units), 'operator')}"
    path = first.path or "the model"
    return f"{path} (call {first.number + 1})" if first.number else path


def _line(row: Moved) -> str:
    first = row.units[0]
    if not row.alone or not first.source:
        return ""
    code = first.code if len(first.code) <= _CODE else f"{first.code[:_CODE]}…"
    return f"{first.source}: {code}" if code else first.source


def _rest(result: Sensitivity, kind: str) -> Iterator[str]:
    """Yield what is not shown, and what is known only of groups."""
    every, moving = result.sorted(kind), _moving(result, kind)
    if len(moving) > _SHOWN:
        yield f"… {len(moving) - _SHOWN:,} more rows: .to_pandas()"
    still = sum(len(row.units) for row in every if row.moved == 0)
    if still:
        yield f"{still:,} of {count_text(result.units[kind], 'operator')} move nothing"
    grouped = sum(len(row.units) for row in moving if not row.alone)
    if grouped:
        yield f"{count_text(grouped, 'operator')} known in groups; top=None measures all alone"
