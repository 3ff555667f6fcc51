"""Views as one self-contained HTML page: no script, no external address, every name escaped."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING, Any

from llmdebug_nb.core.errors import LLMDebugError, TensorLookupError
from llmdebug_nb.core.findings import Difference, Finding
from llmdebug_nb.show import wire
from llmdebug_nb.show.figure import errors_picture, heatmaps, layer_pictures
from llmdebug_nb.show.tensors import number
from llmdebug_nb.show.text import (
    EVERYTHING,
    ROWS,
    difference_line,
    figure,
    finding_line,
    finding_text,
    row_cells,
    side_cells,
)
from llmdebug_nb.show.timeline import TOP, Timeline, timeline

if TYPE_CHECKING:
    import pandas

MAX_ROWS = 5000
_FIRST_ROWS = 60
_STYLE = """
:root{color-scheme:light dark;--ok:#2e7d32;--noise:#8a6d00;--bad:#c62828;--dim:#777;--line:#8884}
body{font:14px/1.45 system-ui,sans-serif;margin:2rem auto;max-width:1200px;padding:0 1rem}
h1{font-size:1.4rem;margin:0 0 .3rem}h2{font-size:1.05rem;margin:1.6rem 0 .4rem}
.badge{color:#fff;border-radius:4px;padding:.1rem .5rem;font-weight:600}
.badge.match,.badge.expected{background:var(--ok)}.badge.within_noise{background:var(--noise)}.badge.diverged{background:var(--bad)}
table{border-collapse:collapse;font:12px/1.4 ui-monospace,monospace;width:100%}
th,td{text-align:left;padding:.15rem .5rem;border-bottom:1px solid var(--line);vertical-align:top}
th{position:sticky;top:0;background:Canvas}td.n{text-align:right}
tr.diverged td:first-child{box-shadow:inset 3px 0 var(--bad)}tr.within_noise td:first-child{box-shadow:inset 3px 0 var(--noise)}
tr.expected td:first-child{box-shadow:inset 3px 0 var(--ok)}tr.unmatched{color:var(--dim)}.wide{overflow-x:auto}img{max-width:100%}
.note{color:var(--dim);font-size:12px}ol.findings li{margin:.3rem 0}pre{overflow:auto;max-height:30rem;border:1px solid var(--line);padding:.5rem}code{font:12px ui-monospace,monospace}
"""
MADE_BY = '<meta name="generator" content="llmdebug_nb">'
_SIDES: tuple[wire.Which, ...] = ("golden", "mine", "difference")
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"


def page(view: Any) -> str:
    """Return the whole page for a `RunView` or a `ReportView`.

    Rows beyond `MAX_ROWS` are left out and the page says so; of a report, the mismatches come first.
    """
    overview: wire.Overview = view.overview()
    body = [
        _head(overview), _sentences(overview), _opened_findings(view, overview), _expected(overview), _notes(overview), _layers(view, overview),
        _times(view, overview), _picture(view, overview), _rows(view, overview),
    ]  # fmt: skip
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">{MADE_BY}<title>{escape(overview["title"])}</title>'
        f'<meta http-equiv="Content-Security-Policy" content="{escape(_POLICY)}"><style>{_STYLE}</style></head>\n'
        f"<body>{''.join(body)}</body></html>\n"
    )


def fragment(view: Any) -> str:
    """Return head, findings and the first rows (of a report, mismatches), for an output cell of a notebook."""
    overview: wire.Overview = view.overview({"op": "overview"})
    mismatch = overview["first_bad"] >= 0 and overview["kind"] == "report"
    rows = _table(
        view, overview, "First mismatches" if mismatch else "First rows", mismatch, ROWS, 4
    )
    return f"<div>{_head(overview, 3)}{_sentences(overview)}{_findings(overview)}{_notes(overview)}{rows}</div>"


def finding_fragment(finding: Finding) -> str:
    """Return a finding and its script, for an output cell."""
    first, *others = finding_text(finding).split("\n")
    lines = "".join(f"<div>{escape(line)}</div>" for line in others)
    script = "" if finding.repro is None else _details(finding.repro)
    return f"<div><b>{escape(first)}</b>{lines}{script}</div>"


def difference_fragment(difference: Difference) -> str:
    """Return a row of a report with both sides' figures and the metrics, for an output cell."""
    metrics = [[name, figure(number(value))] for name, value in difference.metrics.items()]
    tables = _cells(*side_cells(difference)) + (
        _cells(["metric", "value"], metrics) if metrics else ""
    )
    return f"<div><b>{escape(difference_line(difference))}</b>{tables}</div>"


def timeline_fragment(shown: Timeline) -> str:
    """Return a timeline's picture and tables, for an output cell."""
    tables = [("most time", shown.top), ("longest gaps before an operator", shown.gaps)]
    parts = [f"<b>{title}</b> (µs){_frame(frame, TOP)}" for title, frame in tables if len(frame)]
    return f"<div>{shown.picture()}{''.join(parts)}</div>"


def table_fragment(frame: pandas.DataFrame) -> str:
    """Return the first rows of a table, for an output cell."""
    return str(frame.head(_FIRST_ROWS).to_html(escape=True))


def _frame(frame: pandas.DataFrame, rows: int) -> str:
    return str(
        frame.head(rows).to_html(index=False, float_format=lambda number: f"{number:.2f}", border=0)
    )


def _cells(head: list[str], lines: list[list[str]]) -> str:
    rows = "".join(
        f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in line)}</tr>" for line in lines
    )
    return f"<table><thead><tr>{''.join(f'<th>{escape(name)}</th>' for name in head)}</tr></thead>{rows}</table>"


def _details(script: str, save: str = "") -> str:
    return f"<details><summary>Repro script</summary>{save}<pre><code>{escape(script)}</code></pre></details>"


def _head(overview: wire.Overview, level: int = 1) -> str:
    verdict = overview["verdict"]
    badge = f' <span class="badge {verdict}">{verdict.replace("_", " ")}</span>' if verdict else ""
    lines = "".join(f"<div>{escape(line)}</div>" for line in overview["lines"])
    return f"<h{level}>{escape(overview['title'])}{badge}</h{level}>{lines}"


def _notes(overview: wire.Overview) -> str:
    return "".join(f'<div class="note">{escape(note)}</div>' for note in overview["notes"])


def _findings(overview: wire.Overview) -> str:
    items = [
        f"<li>{escape(finding_line(finding, overview))}</li>" for finding in overview["findings"]
    ]
    return f'<h4>To blame</h4><ol class="findings">{"".join(items)}</ol>' if items else ""


def _sentences(overview: wire.Overview) -> str:
    return f"<p>{escape(overview['summary'])}</p>" if overview["summary"] else ""


def _opened_findings(view: Any, overview: wire.Overview) -> str:
    items = [
        f"<li>{escape(finding_line(finding, overview))}{_script(view.finding({'op': 'finding', 'finding': at}))}</li>"
        for at, finding in enumerate(overview["findings"])
    ]
    return f'<h2>To blame</h2><ol class="findings">{"".join(items)}</ol>' if items else ""


def _script(detail: wire.FindingDetail) -> str:
    source = f"<div>called at {escape(detail['source'])}</div>" if detail["source"] else ""
    if detail["code"]:
        source += f"<details><summary>Kernel {escape(detail['kernel'])}</summary><pre><code>{escape(detail['code'])}</code></pre></details>"
    if not detail["script"]:
        return f'{source}<div class="note">no repro script: {escape(detail["why"])}</div>'
    save = f"<div><code>{escape(detail['save'])}</code></div>"
    return source + _details(detail["script"], save)


def _layers(view: Any, overview: wire.Overview) -> str:
    if overview["kind"] != "report" or not view.layer_errors.layers:
        return ""
    steps = [step["label"] for step in overview["steps"]]
    picture = layer_pictures(view.layer_errors, steps)
    return f'<h2>Layers and tokens</h2><img alt="error over limit by layer and token, and along depth" src="{picture}">'


def _times(view: Any, overview: wire.Overview) -> str:
    """Draw the first step that has times."""
    if overview["kind"] != "run":
        return ""
    try:
        shown = timeline(view.run)
    except TensorLookupError:
        return ""
    return f"<h2>Times</h2>{timeline_fragment(shown)}"


def _worst(view: Any, row: int) -> str:
    """Return the elements that differ most, as a table."""
    found: wire.Worst = view.worst({"op": "worst", "row": row, "n": 10})
    lines = [
        f"<tr><td>{element['index']}</td>"
        + "".join(f'<td class="n">{escape(figure(element[name]))}</td>' for name in _SIDES)
        + "</tr>"
        for element in found["elements"]
    ]
    heads = "".join(f"<th>{name}</th>" for name in ("element", *_SIDES))
    title = f"Worst elements: {len(lines)} of {found['differing']:,} that differ"
    return f"<h2>{title}</h2><table><thead><tr>{heads}</tr></thead>{''.join(lines)}</table>"


def _picture(view: Any, overview: wire.Overview) -> str:
    """Draw the tensor that is to blame, or that diverged first."""
    row = next((f["row"] for f in overview["findings"] if f["row"] >= 0), overview["first_bad"])
    if overview["kind"] != "report" or row < 0:
        return ""
    detail = view.detail({"op": "detail", "row": row})
    sides = {side["which"]: side for side in detail["sides"]}
    if not all(which in sides and sides[which]["kept"] for which in ("golden", "mine")):
        return ""
    try:
        panels = [(which, view.array(row, which)) for which in _SIDES]
    except LLMDebugError as error:
        return f"<p>{escape(str(error))}</p>"
    if not panels[0][1].size:
        return ""
    where = " ".join(row_cells(detail["row"], overview["steps"])[:3])
    return (
        f'<h2>{escape(where)}</h2><img alt="heat maps of golden, mine and their difference" src="{heatmaps(panels)}">'
        + _errors(view, row)
        + _worst(view, row)
    )


def _errors(view: Any, row: int) -> str:
    """Draw how large the differences of the elements are, and golden against mine."""
    errors: wire.ErrorHistogram = view.errors({"op": "errors", "row": row, "bins": 60})
    scatter, buffers = view.scatter({"op": "scatter", "row": row, "points": 3000, "size": 160})
    words = f"{errors['same']:,} of {errors['total']:,} elements are the same"
    words += f", {errors['broken']:,} differ by NaN or infinity" if errors["broken"] else ""
    return (
        f'<img alt="how many elements differ by how much, and golden against mine" src="{errors_picture(errors, scatter, buffers)}">'
        f'<div class="note">{words}</div>'
    )


def _expected(overview: wire.Overview) -> str:
    """Return what was marked as expected, as a table."""
    if not overview["marks"]:
        return ""
    lines = "".join(
        f'<tr><td>{escape(mark["text"])}</td><td class="n">{mark["rows"]:,}</td><td>{escape(mark["comment"])}</td></tr>'
        for mark in overview["marks"]
    )
    heads = "<tr><th>expected</th><th>rows</th><th>comment</th></tr>"
    kept = f'<div class="note">kept in {escape(overview["kept"])}</div>' if overview["kept"] else ""
    return f"<h2>Expected</h2><table><thead>{heads}</thead>{lines}</table>{kept}"


def _rows(view: Any, overview: wire.Overview) -> str:
    if overview["kind"] == "run":
        return _table(view, overview, "Rows in execution order", False)
    mismatches = (
        _table(view, overview, "Mismatches in execution order", True)
        if overview["first_bad"] >= 0
        else ""
    )
    everything = _table(view, overview, "All rows in execution order", False)
    return f"{mismatches}<details><summary>All rows</summary>{everything}</details>"


def _table(
    view: Any,
    overview: wire.Overview,
    title: str,
    mismatch: bool,
    most: int = MAX_ROWS,
    level: int = 2,
) -> str:
    report = overview["kind"] == "report"
    figures = ("error", "limit") if report else ("min", "max", "mean", "l2norm")
    heads = [
        "step",
        "path",
        "tensor",
        "op",
        "dtype",
        "shape",
        *figures,
        *(("verdict",) if report else ()),
    ]
    lines: list[str] = []
    total = 1
    while len(lines) < min(total, most):
        request = {
            "op": "rows",
            "step": -1,
            **EVERYTHING,
            "mismatch": mismatch,
            "start": len(lines),
            "n": min(1000, most),
        }
        page = view.rows(request)
        total = page["total"]
        lines += [_line(row, overview, figures, report) for row in page["rows"]]
    note = f"<p>The first {len(lines):,} of {total:,} rows.</p>" if total > len(lines) else ""
    head = "".join(f"<th>{name}</th>" for name in heads)
    table = f"<table><thead><tr>{head}</tr></thead>{''.join(lines)}</table>"
    return f'<h{level}>{title}</h{level}>{note}<div class="wide">{table}</div>'


def _line(row: wire.Row, overview: wire.Overview, figures: tuple[str, ...], report: bool) -> str:
    cells = "".join(f"<td>{escape(cell)}</td>" for cell in row_cells(row, overview["steps"]))
    cells += "".join(f'<td class="n">{escape(figure(row[name]))}</td>' for name in figures)  # type: ignore[literal-required]
    if report:
        said = row["expected"] or row["reason"]
        cells += f"<td>{escape(str(row['verdict']))}{': ' + escape(said) if said else ''}</td>"
    return f'<tr class="{escape(row["verdict"] or "")}">{cells}</tr>\n'
