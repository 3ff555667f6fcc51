"""The lines of the two programs that make a call."""

from __future__ import annotations

import linecache

from llmdebug_nb.core.findings import Source
from llmdebug_nb.core.paths import is_operator
from llmdebug_nb.core.records import CallKey, Frame
from llmdebug_nb.explain.calls import ComparedCall
from llmdebug_nb.explain.runs import Runs, Side


def source_of(
    side: Side, key: CallKey | None, op: str | None, node: CallKey | None = None
) -> Source | None:
    """Return a call's source in one program, or None if the program lacks the call.

    ``node``: the node of an exported graph that makes a module's error; the line is then its own.
    """
    if key is None:
        return None
    operator = key if is_operator(key.path) else node
    index = side.run.index
    frames = index.frames(operator) if operator is not None else ()
    if frames:
        first: Frame | None = frames[0]
    else:
        first = next((each.source for each in side.run.nodes if each.path == key.path), None)
    if first is None:
        return Source(key.path, op or "")
    code = index.code(first) or linecache.getline(first.file, first.line).strip()
    return Source(key.path, op or "", first.file, first.line, code, frames)


def of_call(
    call: ComparedCall, runs: Runs, node: CallKey | None = None
) -> tuple[Source | None, Source | None]:
    """Return the sources of a call in golden and in mine."""
    golden, mine = call.ops
    return (
        source_of(runs.golden, call.golden, golden, node),
        source_of(runs.mine, call.mine, mine, node),
    )
