"""The two runs of a comparison as the search for causes sees them."""

from __future__ import annotations

from llmdebug_nb.app.live_models import is_recorded_here
from llmdebug_nb.replay import execution, worker
from llmdebug_nb.replay.runs import Side
from llmdebug_nb.store.run import Run


def sides(golden: Run, mine: Run) -> tuple[Side, Side]:
    """Return the two sides.

    Operators are replayed in a process of their own, unless this process recorded both runs.
    """
    own = is_recorded_here(golden) and is_recorded_here(mine)
    execute = execution.run if own else worker.Replays().run
    return Side(golden, golden.kernel, execute), Side(mine, mine.kernel, execute)
