"""A script that computes one recorded call again, from its dump."""

from __future__ import annotations

from llmdebug_nb.core.errors import TensorLookupError
from llmdebug_nb.findings import repro
from llmdebug_nb.replay.checks import CallCheck
from llmdebug_nb.replay.operators import CannotReplay
from llmdebug_nb.replay.runs import Side
from llmdebug_nb.store.run import Run


def script(run: Run, check: CallCheck) -> str:
    """Return the script. Raises TensorLookupError: the call can't be computed by one."""
    try:
        slot = check.worst.slot if check.worst is not None else "0"
        return repro.call_script(Side(run, run.kernel), check.key, slot)
    except CannotReplay as why:
        raise TensorLookupError(f"{check.key.path} can't be computed by a script: {why}") from None
