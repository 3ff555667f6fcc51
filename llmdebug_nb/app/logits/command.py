"""A command that is run twice, and recorded each time."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from llmdebug_nb.app.launching.program import launch
from llmdebug_nb.app.logits.repeat import MODE, NAMES, Repeated, compared
from llmdebug_nb.core.errors import CompareError


def repeated_command(
    command: str | Sequence[str], output: Callable[[str, str], object] | None = None
) -> Repeated:
    """Run a command twice, record its operators, and compare.

    The runs stay, as ``repeat.first`` and ``repeat.second``. ``output``: as in `launch`.

    Raises:
        OptionError: no command. CompareError: it failed, or ran no model.
    """
    runs = []
    for name in NAMES:
        done = launch(command, output=output, name=f"repeat.{name}", mode=MODE, tokens="all")
        if done.path is None:
            why = "; ".join(done.lines("warning")) or "the program ran no model"
            raise CompareError(f"nothing was recorded: {why}")
        if done.status:
            raise CompareError(f"the command ended with status {done.status}")
        runs.append(done.run)
    return compared(runs[0], runs[1])
