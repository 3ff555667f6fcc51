"""Code beside code: the functions of golden and mine that hold the lines to blame.

The line of an operator is known from its call stack, that of a module from the operators in it, or
from its name in the text of the forward around it. Lines of both programs whose results were
compared with each other stand side by side.
"""

from __future__ import annotations

import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from llmdebug_nb.comparison.differences import Difference
from llmdebug_nb.core.records import Record
from llmdebug_nb.findings.finding import Finding
from llmdebug_nb.source.inlined import Inlined, Row
from llmdebug_nb.source.line_states import Line, lines_of
from llmdebug_nb.source.lines import LinePair, Source
from llmdebug_nb.source.listed_code import Code, Program
from llmdebug_nb.source.listings import ListedLine, Listing
from llmdebug_nb.source.side_by_side import aligned, in_order
from llmdebug_nb.store.run import Run

_NOTHING = Row(0, "", ())
_NO_ROW = "no tensor shows this finding, so no line does"


class _Text(NamedTuple):
    """A function as it is listed. ``anchors``: its rows and the other's lines that answer."""

    code: Code
    rows: Inlined
    anchors: Mapping[tuple[int, int], int]


def listing(finding: Finding, golden: Run, mine: Run, differences: Sequence[Difference]) -> Listing:
    """Return the code of a finding. ``differences``: all rows. Raises CorruptDumpError."""
    row = finding.difference
    if row is None:
        return Listing(note=_NO_ROW)
    key = row.pair.either.site.key
    programs = Program(golden, key), Program(mine, key)
    code = _code_of_mine(finding, programs, differences)
    lines: dict[int, Line] = {}
    if code is not None:
        guilty = _guilty_lines(finding, programs[1], code)
        seen = sys.maxsize if row.pair.mine is None else row.pair.mine.id
        lines = lines_of(code, programs[1], key, differences, guilty, seen)
    texts = (
        _golden(finding, programs, code, lines),
        None if code is None else _Text(code, Inlined(programs[1], code), {}),
    )
    listed = tuple(_beside(*texts, lines))
    names = [
        ("", "") if each is None else (each.code.function.file, each.code.name) for each in texts
    ]
    note = "; ".join(_notes(programs, texts))
    return Listing(*names[0], *names[1], listed, _at(texts, listed), note)


def _guilty(finding: Finding) -> list[LinePair]:
    return [pair for pair in finding.pairs if pair.state == "guilty"]


def _code_of_mine(
    finding: Finding, programs: tuple[Program, Program], differences: Sequence[Difference]
) -> Code | None:
    """Return the function of mine's line to blame, or of the lines around what it leaves out."""
    takers = [pair.mine for pair in _guilty(finding)]
    lacks = finding.mine is not None and finding.mine.lacks  # then its own line is right
    sources = [*takers, finding.mine] if lacks else [finding.mine, *takers]
    found = next((code for each in sources for code in programs[1].candidates(each)), None)
    golden = next(programs[0].candidates(finding.golden), None)
    if found is not None or golden is None:
        return found
    partners: dict[int, list[Record]] = defaultdict(list)
    for row in differences:
        there, here = row.pair.golden, row.pair.mine
        line = programs[0].line(golden, there) if there is not None else None
        if line is not None and here is not None:
            partners[line].append(here)
    around = programs[1].around(record for records in partners.values() for record in records)
    texts = {code: Inlined(programs[1], code) for code in around}
    count = {code: len(in_order(_anchors(text, partners))) for code, text in texts.items()}
    return max(count, key=lambda code: count[code], default=None)


def _golden(
    finding: Finding,
    programs: tuple[Program, Program],
    mine: Code | None,
    lines: Mapping[int, Line],
) -> _Text | None:
    """Return golden's function that answers to most lines of mine's, else the innermost one."""
    sources = [finding.golden, *(pair.golden for pair in _guilty(finding))]
    own = [code for source in sources for code in programs[0].candidates(source)]
    partners = {number: line.partners for number, line in lines.items()}
    around = programs[0].around(record for records in partners.values() for record in records)
    together = {} if mine is None else _together(finding, programs[1], mine)
    stacks = {(programs[0].stack(r), line) for line, records in partners.items() for r in records}
    stacks |= {(programs[0].whole(source), line) for source, line in together.items()}
    found: list[tuple[tuple[object, ...], _Text]] = []
    for code in dict.fromkeys([*own, *around]):
        rows = Inlined(programs[0], code, stacks)
        anchors: dict[tuple[int, int], int] = dict(_anchors(rows, partners))
        most = sum(anchors.values()) + 1  # lines to blame outweigh all others
        for source, line in together.items():
            place = rows.place_of(source)
            anchors |= {} if place is None else {(place, line): most}
        chain = len(in_order(dict.fromkeys(anchors, 1)))
        same_name = mine is not None and code.name == mine.name
        lacks = finding.mine is None or finding.mine.lacks
        alone = lacks and code in own  # the line that mine lacks must be seen
        found.append(((alone, chain, code in own, same_name), _Text(code, rows, anchors)))
    return max(found, key=lambda each: each[0], default=(None, None))[1]


def _together(finding: Finding, program: Program, mine: Code) -> dict[Source, int]:
    """Return the lines of mine to blame that answer to a source of golden: one to each."""
    found: dict[Source, int] = {}
    for pair in _guilty(finding):
        line = None if pair.mine is None else mine.line_of(program.whole(pair.mine))
        if line is not None and pair.golden is not None and line not in found.values():
            found[pair.golden] = line
    return found


def _guilty_lines(finding: Finding, program: Program, code: Code) -> set[int]:
    """Return the lines of mine's function that are to blame."""
    sources = (pair.mine for pair in _guilty(finding) if pair.mine is not None)
    found = [code.line_of(program.whole(source)) for source in sources]
    return {line for line in (*found, code.blamed) if line is not None}


def _anchors(rows: Inlined, partners: Mapping[int, Sequence[Record]]) -> Counter[tuple[int, int]]:
    """Return which rows of a function and lines of the other one compute the same.

    ``partners``: by the other's lines, the tensors of this program for their results. Counted are
    the values that say so.
    """
    found: Counter[tuple[int, int]] = Counter()
    for number, records in partners.items():
        for record in records:
            there = rows.place(record)
            if there is not None:
                found[there, number] += 1
    return found


def _beside(
    golden: _Text | None, mine: _Text | None, lines: Mapping[int, Line]
) -> Iterator[ListedLine]:
    """Yield the lines of both functions side by side."""
    ours, theirs = (() if each is None else each.rows.rows for each in (golden, mine))
    start = theirs[0].number if theirs else 0
    anchors = {} if golden is None or mine is None else golden.anchors
    places = {(g, m - start): votes for (g, m), votes in anchors.items()}
    sparse = any(each is not None and each.code.sparse for each in (golden, mine))
    for g, m in aligned([row.text for row in ours], [row.text for row in theirs], places):
        one = _NOTHING if g is None else ours[g]
        other = _NOTHING if m is None else theirs[m]
        line = lines.get(other.number, Line())
        if one.text or other.text or not sparse:
            yield ListedLine(one.number, one.text, other.number, other.text, line.state, line.error)


def _at(texts: Sequence[_Text | None], listed: Sequence[ListedLine]) -> int:
    """Return the index of the line to blame: mine's, else golden's; -1 for none."""
    golden, mine = (-1 if each is None else each.code.blamed or -1 for each in texts)
    found = (
        [at for at, line in enumerate(listed) if line.mine_line == mine],
        [at for at, line in enumerate(listed) if line.state == "guilty"],
        [at for at, line in enumerate(listed) if line.golden_line == golden],
    )
    return next((places[0] for places in found if places), -1)


def _notes(programs: Sequence[Program], texts: Sequence[_Text | None]) -> Iterator[str]:
    for name, program, text in zip(("golden", "mine"), programs, texts, strict=True):
        if text is None:
            yield f"{name}'s code is not known: {program.why}"
            continue
        if text.code.note:
            yield f"{name}: {text.code.note}"
        if helpers := ", ".join(dict.fromkeys(text.rows.helpers)):
            yield f"{name}: lines of {helpers} stand where they are called"
