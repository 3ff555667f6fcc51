"""Views as HTML: pages that need neither scripts nor external addresses, and parts of notebooks.

The templates in `templates/` escape every name.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from llmdebug_nb.comparison.differences import Difference
from llmdebug_nb.core.errors import LLMDebugError
from llmdebug_nb.core.printable import sentence
from llmdebug_nb.findings.finding import Finding
from llmdebug_nb.show import tables, wire
from llmdebug_nb.show.figure import data_url, errors_picture, heatmaps, layer_pictures
from llmdebug_nb.show.findings import Answer, answers, detail, finding_head, pairs_table
from llmdebug_nb.show.timeline import TOP, Timeline
from llmdebug_nb.show.view_data import ViewData

if TYPE_CHECKING:
    import pandas

MAX_ROWS = 5000
MADE_BY = Markup('<meta name="generator" content="llmdebug_nb">')
_FIRST_ROWS = 60
_FINDINGS, _ROWS = 5, 3  # of a report in an output cell
_BINS, _POINTS, _GRID = 60, 3000, 160  # of the pictures of the worst tensor
_SIDES: tuple[wire.Which, ...] = ("golden", "mine", "difference")


@functools.cache
def _templates() -> Environment:
    return Environment(
        loader=FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )


def render(template: str, **values: object) -> Markup:
    """Return a filled-in template; it is marked as safe to put into another one."""
    return Markup(_templates().get_template(template).render(made_by=MADE_BY, **values))


def page(view: ViewData) -> str:
    """Return a whole page for a view.

    It holds the first `MAX_ROWS` rows and says so if there are more; for a report it lists the
    mismatches before all rows.
    """
    overview = view.overview()
    errors, times = view.layer_errors, view.timeline()
    steps = [step["label"] for step in overview["steps"]]
    is_bad = overview["kind"] == "report" and overview["first_bad"] >= 0
    return render(
        "page.html",
        overview=overview,
        findings=answers(view),
        marks=tables.marks_table(overview),
        layers=layer_pictures(errors, steps) if errors is not None and errors.layers else "",
        times=timeline_fragment(times) if times is not None else "",
        tensor=_worst_tensor(view, overview),
        mismatches=tables.rows_table(view, MAX_ROWS, mismatch=True) if is_bad else None,
        rows=tables.rows_table(view, MAX_ROWS),
    )


def fragment(view: ViewData) -> Markup:
    """Return verdict, findings and the rows that matter, or the first ones, for an output cell."""
    overview = view.overview()
    telling = tables.telling_table(view, _ROWS) if overview["kind"] == "report" else None
    matters = telling is not None and bool(telling.lines)
    return render(
        "fragment.html",
        overview=overview,
        findings=answers(view, _FINDINGS),
        title="Rows that matter" if matters else "First rows",
        table=telling if matters else tables.rows_table(view),
    )


def finding_fragment(finding: Finding) -> str:
    """Return a finding with both sources and its script, for an output cell."""
    shown = detail(finding)
    said = [finding.evidence, shown["relation"], sentence(finding.which), shown["advice"]]
    answer = Answer(
        finding_head(finding), list(filter(None, said)), shown, [], pairs_table(shown["pairs"])
    )
    return render("finding.html", finding=answer)


def difference_fragment(difference: Difference) -> str:
    """Return a difference with the figures of both sides and the metrics, for an output cell."""
    return render(
        "difference.html",
        line=tables.difference_line(difference),
        sides=tables.sides_table(difference),
        metrics=tables.metrics_table(difference),
    )


def timeline_fragment(timeline: Timeline) -> Markup:
    """Return a timeline's picture and tables, for an output cell."""
    return render(
        "timeline.html",
        title=timeline.title,
        picture=data_url(timeline.figure),
        top=_frame(timeline.top),
        gaps=_frame(timeline.gaps) if len(timeline.gaps) else "",
    )


def table_fragment(frame: pandas.DataFrame) -> str:
    """Return the first rows of a table, for an output cell."""
    return str(frame.head(_FIRST_ROWS).to_html(escape=True))


def _frame(frame: pandas.DataFrame) -> Markup:
    first, text = frame.head(TOP), "{:.2f}".format
    return Markup(first.to_html(index=False, float_format=text, border=0, escape=True))


class _Tensor(NamedTuple):
    """The tensor that shows the first finding, or the first divergence."""

    problem: str = ""  # why there is no picture
    place: str = ""
    heatmaps: str = ""
    errors: str = ""
    note: str = ""
    worst: tables.Table | None = None


def _worst_tensor(view: ViewData, overview: wire.Overview) -> _Tensor | None:
    row = next((f["row"] for f in overview["findings"] if f["row"] >= 0), overview["first_bad"])
    if overview["kind"] != "report" or row < 0:
        return None
    detail = view.detail({"op": "detail", "row": row})
    recorded = {side["which"] for side in detail["sides"] if side["kept"]}
    if not {"golden", "mine"} <= recorded:
        return None
    try:
        panels = [(which, view.array(row, which)) for which in _SIDES]
    except LLMDebugError as error:
        return _Tensor(problem=str(error))
    if not panels[0][1].size:
        return None
    errors = view.errors({"op": "errors", "row": row, "bins": _BINS})
    scatter, buffers = view.scatter({"op": "scatter", "row": row, "points": _POINTS, "size": _GRID})
    note = f"{errors['same']:,} of {errors['total']:,} elements are the same"
    if errors["broken"]:
        note += f", {errors['broken']:,} differ by NaN or infinity"
    return _Tensor(
        place=tables.place_text(detail["row"], overview["steps"]),
        heatmaps=heatmaps(panels),
        errors=errors_picture(errors, scatter, buffers),
        note=note,
        worst=tables.worst_table(view, row),
    )
