"""Bringing two runs whose steps have other tokens to the same steps: one for each text of both.

An engine has steps of its own. So has a program that feeds a text token by token, against one that
feeds it at once.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

from llmdebug_nb.app.scratch import Scratch
from llmdebug_nb.comparison.differences import Reach
from llmdebug_nb.comparison.modules import Modules
from llmdebug_nb.core.errors import CompareError
from llmdebug_nb.store import by_token, reader
from llmdebug_nb.store.by_token import Joined, Sizes, Texts
from llmdebug_nb.store.run import Run
from llmdebug_nb.store.sequences import Shared, TokenSequence, shared


class SameSteps(NamedTuple):
    """Two runs with the same steps. ``reach``: how much of the recorded runs they have."""

    golden: Run
    mine: Run
    remarks: list[str]
    reach: tuple[Reach, Reach]


def same_steps(golden: Run, mine: Run, only_engines: bool = False) -> SameSteps:
    """Return both runs by their tokens if their steps have others, else as they are.

    The runs by tokens lie in a temporary folder, for as long as they are used. ``only_engines``:
    only if one of them is of an engine.

    Raises:
        CompareError: one is of an engine, and the runs were given no text that begins alike, or a
            run can't be put together.
    """
    if by_token.is_engine(golden) or by_token.is_engine(mine):
        of_golden, of_mine = by_token.sequences(golden), by_token.sequences(mine)
        both = shared(of_golden[0], of_mine[0])
        if not both:
            raise CompareError(_nothing_shared(golden, mine, of_golden[0], of_mine[0]))
        return _by_tokens((golden, mine), both, (of_golden, of_mine), "request")
    as_they_are = SameSteps(golden, mine, [], (Reach(golden.calls()), Reach(mine.calls())))
    if only_engines or golden.index.recorded_steps() == mine.index.recorded_steps():
        return as_they_are
    if _feed_alike(golden, mine):
        return as_they_are
    if any(next(run.records(n=1, phase="backward"), None) for run in (golden, mine)):
        return as_they_are  # gradients are of all tokens
    of_golden, of_mine = by_token.sequences(golden), by_token.sequences(mine)
    both = shared(of_golden[0], of_mine[0])
    if not any(one.golden.places[at].step != one.mine.places[at].step
               for one in both for at in one.positions):  # fmt: skip
        return as_they_are
    try:
        return _by_tokens((golden, mine), both, (of_golden, of_mine), "text")
    except CompareError:
        return as_they_are  # step by step, something can be compared


def _feed_alike(golden: Run, mine: Run) -> bool:
    """Tell whether all steps that both ran were given as many tokens: one only ran more of them."""
    fed = [{(c.generation, c.step): c.query for c in run.root_calls()} for run in (golden, mine)]
    both = fed[0].keys() & fed[1].keys()
    return bool(both) and all(fed[0][step] == fed[1][step] for step in both)


_Sequences = tuple[list[TokenSequence], Mapping[tuple[int, int], Sizes]]


def _by_tokens(
    runs: tuple[Run, Run], both: list[Shared], known: tuple[_Sequences, _Sequences], noun: str
) -> SameSteps:
    """Return both runs by the tokens that they share. ``noun``: of a sequence."""
    positions = [each.positions for each in both]
    places = [each.golden.places for each in both], [each.mine.places for each in both]
    with ExitStack() as undo:
        begun = [
            _begin(run, Texts(own, positions, sizes), undo)
            for run, own, (_, sizes) in zip(runs, places, known, strict=True)
        ]
        left_out = _write([side for _, _, side in begun], len(both))
        found = [reader.native(path) for _, path, _ in begun]
        undo.pop_all()
    for run, (folder, _, _) in zip(found, begun, strict=True):
        weakref.finalize(run, folder.remove)
    remarks = [*_remarks(both, known[1][0], left_out, noun), *_of_ranks(*runs)]
    compared = [
        len({(id(text), at) for text, one in zip(own, both, strict=True) for at in one.positions})
        for own in ([one.golden for one in both], [one.mine for one in both])
    ]
    golden, mine = (
        Reach(run.calls(), (count, sum(len(text.places) for text in texts)))
        for run, count, (texts, _) in zip(runs, compared, known, strict=True)
    )
    return SameSteps(found[0], found[1], remarks, (golden, mine))


def _begin(run: Run, texts: Texts, undo: ExitStack) -> tuple[Scratch, Path, Joined]:
    """Begin a run by tokens in a folder of its own. ``undo``: gets how to remove that."""
    folder = Scratch("by-token")
    undo.callback(folder.remove)
    path, side = by_token.begin(run, folder.path, texts, Modules(run.nodes).are_logits)
    undo.callback(side.abandon)
    return folder, path, side


def _write(sides: Sequence[Joined], texts: int) -> Counter[str]:
    """Write runs by tokens; return how many tensors were left out, by the reason."""
    rows = [[side.last_rows(text) for side in sides] for text in range(texts)]
    for side in sides:
        side.write([set.intersection(*each) for each in rows])
        if not side.written:
            why = ", ".join(f"{count} {reason}" for reason, count in side.left_out.items())
            raise CompareError(
                f"{side.label}: no tensor has values of each token ({why or 'it has none'});"
                " an engine's run is compared by its values: record without stats_only and part="
            )
    return sum((side.left_out for side in sides), Counter[str]())


def _remarks(
    both: Sequence[Shared],
    mine: Sequence[TokenSequence],
    left_out: Mapping[str, int],
    noun: str,
) -> list[str]:
    count = sum(len(each.positions) for each in both)
    cached = sum(len(each.mine.tokens) - len(each.mine.places) for each in both)
    found = [
        f"compared by {noun} and position: {len(both)} of mine's {len(mine)} {noun}s,"
        f" {count} positions; step 0 of generation n is {noun} n"
    ]
    if cached:
        found.append(f"{cached} positions came from the engine's cache: they were not computed")
    different = sum(
        len(each.mine.places.keys() & each.golden.places.keys()) - len(each.positions)
        for each in both
    )
    if different:
        found.append(
            f"{different} positions follow a token that differs between the runs: not compared"
        )
    reasons = Counter(left_out)
    found += [f"{reasons[why]} tensors {why} were left out" for why in sorted(reasons)]
    return found


def _of_ranks(*runs: Run) -> Iterator[str]:
    for run in runs:
        first, *others = run.info()["ranks"]
        if others:
            yield (
                f"{run.label}: rank {first} of {1 + len(others)} is compared; what the ranks divide"
                " is found as a part of the other run's"
            )


def _nothing_shared(
    golden: Run, mine: Run, first: Sequence[TokenSequence], second: Sequence[TokenSequence]
) -> str:
    def begin(found: Sequence[TokenSequence]) -> str:
        texts = [[each.tokens[at] for at in sorted(each.tokens)[:8]] for each in found[:3]]
        return ", ".join(map(str, texts)) or "no token ids"

    return (
        f"no text of {mine.label} begins like one of {golden.label}, so no rows belong together;"
        f" golden's begin {begin(first)}, mine's {begin(second)}: give both the same token ids"
    )
