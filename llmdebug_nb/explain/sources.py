"""The lines of the two programs that make a call."""

from __future__ import annotations

import json
import linecache
import re

from llmdebug_nb.core.findings import Source
from llmdebug_nb.core.paths import is_operator
from llmdebug_nb.core.records import CallKey, Frame
from llmdebug_nb.explain.calls import ComparedCall
from llmdebug_nb.explain.runs import Runs, Side

_FRAME = re.compile(r"(.*):(\d+) (.*)", re.DOTALL)


def source_of(
    side: Side, key: CallKey | None, op: str | None, node: CallKey | None = None
) -> Source | None:
    """Return a call's source in one program, or None if the program lacks the call.

    ``node``: the node of an exported graph that makes a module's error; the line is then its own.
    """
    if key is None:
        return None
    operator = key if is_operator(key.path) else node
    frames = _frames(side, operator) if operator is not None else ()
    if not frames:
        return Source(key.path, op or "")
    code = linecache.getline(frames[0].file, frames[0].line).strip()
    return Source(key.path, op or "", frames[0].file, frames[0].line, code, frames)


def of_call(
    call: ComparedCall, runs: Runs, node: CallKey | None = None
) -> tuple[Source | None, Source | None]:
    """Return the sources of a call in golden and in mine."""
    golden, mine = call.ops
    return (
        source_of(runs.golden, call.golden, golden, node),
        source_of(runs.mine, call.mine, mine, node),
    )


def _frames(side: Side, key: CallKey) -> tuple[Frame, ...]:
    """Return the call stack of an operator, innermost first, up to the module's forward."""
    columns = key._asdict()
    del columns["rank"]
    found = side.run.index.first_stack(**columns)
    try:
        texts = json.loads(found[1]) if found is not None else []
    except (ValueError, TypeError):  # a damaged dump
        return ()
    frames: list[Frame] = []
    for text in texts if isinstance(texts, list) else []:
        match = _FRAME.fullmatch(str(text))
        if match is None:
            break
        frames.append(Frame(match[1], int(match[2]), match[3]))
        if match[3].rpartition(".")[2] == "forward":
            break
    return tuple(frames)
