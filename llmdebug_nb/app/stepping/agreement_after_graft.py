"""What agrees with golden after its values were put into a program that was stepped through."""

from __future__ import annotations

from collections.abc import Sequence

from llmdebug_nb.app.compare import compare
from llmdebug_nb.comparison.differences import Difference
from llmdebug_nb.core.errors import LLMDebugError
from llmdebug_nb.core.records import Site
from llmdebug_nb.graph.flow import AGREES
from llmdebug_nb.show.words import count_text
from llmdebug_nb.store.run import Run

_NAMED = 3  # places
Place = tuple[str, int, int, int]  # path, generation, step, call


def place_of(site: Site) -> Place:
    """Return the call that a tensor is of."""
    return site.path, site.generation, site.step, site.call


def rest(golden: Run, mine: Run, replaced: Sequence[Place]) -> str:
    """Return what became of the outputs behind the places where golden's values were put in.

    ``mine``: the recording of the program, which has ended.
    """
    put = f"With golden's values put in at {named(replaced)}"
    try:
        report = compare(golden, mine, explain=False, progress=False)
    except LLMDebugError as error:
        return f"{put}. What follows could not be compared: {error}"
    outputs = [d for d in report.differences if d.site.role == "output" and d.pair.mine is not None]
    puts = [_seq(d) for d in outputs if place_of(_site(d)) in replaced]
    compared = [d for d in outputs if d.verdict != "unmatched"]
    behind = [d for d in compared if puts and _seq(d) > max(puts)]
    if not behind:
        return f"{put}. No output behind it could be compared."
    left = [d for d in behind if d.verdict not in AGREES]
    count = count_text(len(behind), "output")
    if not left:
        return f"{put}, the rest agrees: {count} behind it. What was replaced is the only cause."
    first = _site(left[0])
    return (
        f"{put}, {len(left):,} of {count} behind it still differ, first that of "
        f"{first.path or 'the model'} in step {first.step}: there is another cause."
    )


def named(replaced: Sequence[Place]) -> str:
    """Return the modules and operators of places."""
    paths = list(dict.fromkeys(place[0] or "the model" for place in replaced))
    more = len(paths) - _NAMED
    return ", ".join(paths[:_NAMED]) + (f" and {more:,} more" if more > 0 else "")


def _site(d: Difference) -> Site:
    return d.pair.either.site if d.pair.mine is None else d.pair.mine.site


def _seq(d: Difference) -> int:
    return -1 if d.pair.mine is None else d.pair.mine.seq
