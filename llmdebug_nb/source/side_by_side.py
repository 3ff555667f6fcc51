"""Two texts side by side: which line of one answers to which line of the other."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence

from llmdebug_nb.core import constants

Row = tuple[int | None, int | None]  # the places of golden's line and mine's; None for none


def aligned(
    golden: Sequence[str], mine: Sequence[str], anchors: Mapping[tuple[int, int], int]
) -> list[Row]:
    """Return all lines of both texts in order, each beside the one that answers to it.

    ``anchors``: places of lines that compute the same, and how many values say so. Those that
    would cross others are given up, so that as many values as possible agree. Between anchors,
    lines answer to each other if their texts are equal or similar.
    """
    rows: list[Row] = []
    g = m = 0
    for anchor in [*in_order(anchors), (len(golden), len(mine))]:
        rows += _between(golden, mine, (g, anchor[0]), (m, anchor[1]))
        if anchor[0] < len(golden):
            rows.append(anchor)
        g, m = anchor[0] + 1, anchor[1] + 1
    return rows


def in_order(anchors: Mapping[tuple[int, int], int]) -> list[tuple[int, int]]:
    """Return the heaviest anchors that rise on both sides."""
    best: list[tuple[int, int]] = []  # weight of the chain that ends in an anchor, place before it
    ordered = sorted(anchors)
    for at, (g, m) in enumerate(ordered):
        before = ((best[i][0], i) for i in range(at) if ordered[i][0] < g and ordered[i][1] < m)
        weight, last = max(before, default=(0, -1))
        best.append((weight + anchors[g, m], last))
    at = max(range(len(best)), key=lambda i: best[i][0], default=-1)
    chain = []
    while at >= 0:
        chain.append(ordered[at])
        at = best[at][1]
    return chain[::-1]


def _between(
    golden: Sequence[str], mine: Sequence[str], g: tuple[int, int], m: tuple[int, int]
) -> Iterator[Row]:
    """Yield the rows of two ranges of lines, by their texts."""
    texts = [line.strip() for line in golden[slice(*g)]], [line.strip() for line in mine[slice(*m)]]
    matcher = difflib.SequenceMatcher(lambda line: not line, *texts, autojunk=False)
    for kind, g0, g1, m0, m1 in matcher.get_opcodes():
        ours, theirs = range(g[0] + g0, g[0] + g1), range(m[0] + m0, m[0] + m1)
        if kind == "equal":
            yield from zip(ours, theirs, strict=True)
        else:
            yield from _similar(golden, mine, ours, theirs)


def _similar(golden: Sequence[str], mine: Sequence[str], g: range, m: range) -> Iterator[Row]:
    """Yield the rows of lines none of which is equal to another, the likest beside each other."""
    if len(g) * len(m) > constants.LINES_COMPARED:
        yield from ((each, None) for each in g)
        yield from ((None, each) for each in m)
        return
    likeness = [[_likeness(golden[a], mine[b]) for b in m] for a in g]
    solid = [a for a in g if golden[a].strip()], [b for b in m if mine[b].strip()]
    if len(solid[0]) == len(solid[1]) == 1:  # the only ones between lines that are known
        likeness[solid[0][0] - g.start][solid[1][0] - m.start] = 1.0
    # by place: the likeness of all that follows
    best = [[0.0] * (len(m) + 1) for _ in range(len(g) + 1)]
    for a in reversed(range(len(g))):
        for b in reversed(range(len(m))):
            both = likeness[a][b] and likeness[a][b] + best[a + 1][b + 1]
            best[a][b] = max(both, best[a + 1][b], best[a][b + 1])
    a = b = 0
    while a < len(g) or b < len(m):
        if b == len(m) or (a < len(g) and best[a][b] == best[a + 1][b]):
            yield g[a], None
            a += 1
        elif a == len(g) or best[a][b] == best[a][b + 1]:
            yield None, m[b]
            b += 1
        else:
            yield g[a], m[b]
            a, b = a + 1, b + 1


def _likeness(golden: str, mine: str) -> float:
    """Return how similar two lines of code are, from 0 to 1; 0 if they are not."""
    golden, mine = golden.strip(), mine.strip()
    matcher = difflib.SequenceMatcher(None, golden, mine, autojunk=False)
    if not golden or not mine or matcher.real_quick_ratio() < constants.SIMILAR_LINES:
        return 0.0
    ratio = matcher.ratio()
    return ratio if ratio >= constants.SIMILAR_LINES else 0.0
