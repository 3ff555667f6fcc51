"""Bringing an engine's run and another one to the same steps: one for each text that both had."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from llmdebug_nb.app.scratch import Scratch
from llmdebug_nb.comparison.modules import Modules
from llmdebug_nb.core.errors import CompareError
from llmdebug_nb.store import by_token, reader
from llmdebug_nb.store.by_token import Joined, Texts
from llmdebug_nb.store.run import Run
from llmdebug_nb.store.sequences import Shared, TokenSequence, shared


def same_steps(golden: Run, mine: Run) -> tuple[Run, Run, list[str]]:
    """Return both runs by their tokens if one is of an engine, else as they are; and remarks.

    The runs by tokens lie in a temporary folder, for as long as they are used.

    Raises:
        CompareError: the runs were given no text that begins alike, or a run can't be put together.
    """
    if not (by_token.is_engine(golden) or by_token.is_engine(mine)):
        return golden, mine, []
    of_golden, of_mine = by_token.sequences(golden), by_token.sequences(mine)
    both = shared(of_golden[0], of_mine[0])
    if not both:
        raise CompareError(_nothing_shared(golden, mine, of_golden[0], of_mine[0]))
    positions = [each.positions for each in both]
    with ExitStack() as undo:
        begun = [
            _begin(run, Texts(places, positions, sizes), undo)
            for run, places, sizes in (
                (golden, [each.golden.places for each in both], of_golden[1]),
                (mine, [each.mine.places for each in both], of_mine[1]),
            )
        ]
        left_out = _write([side for _, _, side in begun], len(both))
        runs = [reader.native(path) for _, path, _ in begun]
        undo.pop_all()
    for run, (folder, _, _) in zip(runs, begun, strict=True):
        weakref.finalize(run, folder.remove)
    remarks = [*_remarks(both, of_mine[0], left_out), *_of_ranks(golden, mine)]
    return runs[0], runs[1], remarks


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
    both: Sequence[Shared], mine: Sequence[TokenSequence], left_out: Mapping[str, int]
) -> list[str]:
    count = sum(len(each.positions) for each in both)
    cached = sum(len(each.mine.tokens) - len(each.mine.places) for each in both)
    found = [
        f"compared by request and position: {len(both)} of mine's {len(mine)} requests,"
        f" {count} positions; step 0 of generation n is request n"
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
