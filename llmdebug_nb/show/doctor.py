"""What differs between two set-ups, as text and as HTML."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from html import escape

from llmdebug_nb.core.printable import printable, printable_lines
from llmdebug_nb.core.setups import DoctorResult, Part, Symptom
from llmdebug_nb.show.html_table import html_table
from llmdebug_nb.show.tables import aligned
from llmdebug_nb.show.words import count_text

_MARKS = {"high": "✗", "medium": "!", "low": "·"}
_SHOWN = 30  # symptoms that are printed
_WIDTH = 90  # characters of a value
HEAD = ("", "where", "golden", "mine", "can cause", "do")


def text(result: DoctorResult) -> str:
    """Return the verdict, all differences, and what was not compared."""
    return printable_lines([*head(result), *_symptoms(result), *tail(result)])


def head(result: DoctorResult) -> Iterator[str]:
    """Yield the verdict, and how much was compared."""
    count = sum(result.compared.values())
    harmless = len(result.symptoms) - len(result.suspicious)
    sections = ", ".join(f"{name} {n:,}" for name, n in result.compared.items() if n)
    yield (
        f"doctor: {result.verdict}: {count_text(len(result.suspicious), 'suspicious difference')},"
        f" {harmless:,} that {'is' if harmless == 1 else 'are'} harmless as a rule"
    )
    yield f"golden: {result.golden}; mine: {result.mine}"
    yield f"compared: {count_text(count, 'fact')} ({sections})" if count else "compared: nothing"


def _symptoms(result: DoctorResult) -> Iterator[str]:
    for each in result.symptoms[:_SHOWN]:
        yield f"{_MARKS[each.level]} {each.section}: {each.name}"
        yield f"    golden: {cut(each.golden)}"
        yield f"    mine:   {cut(each.mine)}"
        if each.can:
            yield f"    can cause: {each.can}" + (f"; do: {each.do}" if each.do else "")
    if len(result.symptoms) > _SHOWN:
        yield f"… {len(result.symptoms) - _SHOWN:,} more: to_pandas(), --csv"


def cut(value: str) -> str:
    """Return a value that fits a line."""
    value = printable(value)
    return value if len(value) <= _WIDTH else f"{value[: _WIDTH - 2]} …"


def tail(result: DoctorResult) -> Iterator[str]:
    """Yield what was not compared, and why."""
    for why, count in result.not_compared.items():
        yield f"not compared: {why}" + (f" ({count:,})" if count > 1 else "")


def fragment(result: DoctorResult) -> str:
    """Return the same for an output cell, as a table."""
    table = html_table(HEAD, map(_cells, result.symptoms[:_SHOWN]))
    heads, tails = (escape(printable_lines(part(result))) for part in (head, tail))
    more = len(result.symptoms) - _SHOWN
    note = f"<p>… {more:,} more: to_pandas()</p>" if more > 0 else ""
    return f"<pre>{heads}</pre>{table}{note}<pre>{tails}</pre>"


def _cells(each: Symptom) -> tuple[str, ...]:
    return (
        _MARKS[each.level], f"{each.section}: {each.name}", cut(each.golden), cut(each.mine),
        each.can, each.do,
    )  # fmt: skip


def own_text(parts: Iterable[Part]) -> str:
    """Return what works on this machine, and what is missing."""
    marks = {True: "✓", False: "✗", None: "·"}
    rows = [[marks[each.works], each.name, each.says, each.do] for each in parts]
    return "\n".join(aligned(("", "part", "state", "do"), rows))
