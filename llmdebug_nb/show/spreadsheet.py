"""Tables as an xlsx workbook: the few parts of Office Open XML that plain cells need."""

from __future__ import annotations

import io
import math
import re
import zipfile
from collections.abc import Mapping, Sequence
from xml.sax.saxutils import escape, quoteattr

Cell = str | int | float | bool | None
_MOST_ROWS, _MOST_CHARACTERS = 1_048_576, 32_767  # of a sheet, and of a cell
_FORBIDDEN = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\ufffe\uffff\ud800-\udfff]")
_HEAD = '<?xml version="1.0" encoding="UTF-8" standalone="yes"?>\n'
_MAIN = "http://schemas.openxmlformats.org/spreadsheetml/2006/main"
_OFFICE = "http://schemas.openxmlformats.org/officeDocument/2006/relationships"
_PACKAGE = "http://schemas.openxmlformats.org/package/2006"
_KIND = "application/vnd.openxmlformats-officedocument.spreadsheetml"


def workbook(sheets: Mapping[str, Sequence[Sequence[Cell]]]) -> bytes:
    """Return a workbook of several sheets, each a list of rows. What is beyond its limits is cut.

    Texts are never formulas, whatever they begin with.
    """
    names, made = list(sheets), io.BytesIO()
    overrides = [("workbook.xml", "sheet.main")] + [
        (f"worksheets/sheet{n}.xml", "worksheet") for n in range(1, len(names) + 1)
    ]
    kinds = "".join(
        f'<Override PartName="/xl/{part}" ContentType="{_KIND}.{kind}+xml"/>'
        for part, kind in overrides
    )
    entries = "".join(
        f'<sheet name={quoteattr(_text(name)[:31])} sheetId="{n}" r:id="r{n}"/>'
        for n, name in enumerate(names, 1)
    )
    links = "".join(_link(f"r{n}", "worksheet", f"worksheets/sheet{n}.xml")
                    for n in range(1, len(names) + 1))  # fmt: skip
    relations = _PACKAGE + "/relationships"
    parts = {
        "[Content_Types].xml": f'<Types xmlns="{_PACKAGE}/content-types"><Default Extension="rels"'
        f' ContentType="application/vnd.openxmlformats-package.relationships+xml"/>{kinds}</Types>',
        "_rels/.rels": f'<Relationships xmlns="{relations}">'
        f"{_link('r1', 'officeDocument', 'xl/workbook.xml')}</Relationships>",
        "xl/workbook.xml": f'<workbook xmlns="{_MAIN}" xmlns:r="{_OFFICE}">'
        f"<sheets>{entries}</sheets></workbook>",
        "xl/_rels/workbook.xml.rels": f'<Relationships xmlns="{relations}">{links}</Relationships>',
        **{f"xl/worksheets/sheet{n}.xml": _sheet(sheets[name]) for n, name in enumerate(names, 1)},
    }
    with zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED) as archive:
        for part, text in parts.items():
            archive.writestr(part, _HEAD + text)
    return made.getvalue()


def _link(name: str, kind: str, target: str) -> str:
    return f'<Relationship Id="{name}" Type="{_OFFICE}/{kind}" Target="{target}"/>'


def _sheet(rows: Sequence[Sequence[Cell]]) -> str:
    lines = "".join(f"<row>{''.join(map(_cell, row))}</row>" for row in rows[:_MOST_ROWS])
    return f'<worksheet xmlns="{_MAIN}"><sheetData>{lines}</sheetData></worksheet>'


def _cell(value: Cell) -> str:
    if value is None:
        return "<c/>"
    if isinstance(value, bool):
        return f'<c t="b"><v>{int(value)}</v></c>'
    if isinstance(value, (int, float)) and math.isfinite(value):
        return f"<c><v>{value!r}</v></c>"
    text = escape(_text(str(value))[:_MOST_CHARACTERS])
    return f'<c t="inlineStr"><is><t xml:space="preserve">{text}</t></is></c>'


def _text(text: str) -> str:
    """Return a text without the characters that XML can't hold."""
    return _FORBIDDEN.sub("\ufffd", text)
