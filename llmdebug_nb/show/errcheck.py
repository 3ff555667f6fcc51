"""The result of an error check as text and as HTML."""

from __future__ import annotations

import html
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from llmdebug_nb.core.faults import CheckResult, Fault, Headroom
from llmdebug_nb.core.printable import printable
from llmdebug_nb.show.words import count_text

_SHOWN = 3  # faults and followers in full; the file has them all


def check_text(result: CheckResult, path: Path | None = None) -> str:
    """Return verdict, first faults, headroom, and what was meant to be infinite."""
    return "\n".join(_lines(result, path))


def check_html(result: CheckResult, path: Path | None = None) -> str:
    """Return the same for a notebook."""
    return f"<pre>{html.escape(check_text(result, path))}</pre>"


def _lines(result: CheckResult, path: Path | None) -> Iterator[str]:
    yield f"errcheck: {result.verdict}: {_summary(result)}"
    yield from result.notes
    several = len(result.processes) > 1
    for at, (rank, fault) in enumerate(result.faults[:_SHOWN]):
        yield from _fault_lines(fault, f" on rank {rank}" if several else "", at == 0)
    if len(result.faults) > _SHOWN:
        yield f"… {count_text(len(result.faults) - _SHOWN, 'more error')} in the file"
    for each in result.processes:
        rank_text = f"rank {each.rank}: " if several else ""
        yield from (f"{rank_text}{line}" for line in map(_headroom_line, each.headroom))
        if each.meant:
            yield f"{rank_text}infinities that calls were given: {_counts(each.meant)}"
        if each.masked:
            yield f"{rank_text}bad values that reach no result: {_counts(each.masked)}"
        for problem, count in each.problems.items():
            yield f"{rank_text}not checked: {problem} ({count} times)"
        if each.dumped is not None:
            folder = printable(os.path.relpath(each.dumped))
            yield f"{rank_text}tensors of the first bad call: {folder} (llmdebug opcheck -i)"
    if path is not None:
        yield f"written: {os.path.relpath(path)}"


def _summary(result: CheckResult) -> str:
    checked = sum(each.checked for each in result.processes)
    noun = "operator call" if result.mode == "aten" else "module call"
    text = f"{count_text(checked, noun)} checked"
    roots = sum(each.root_calls for each in result.processes)
    text += f" in {count_text(roots, 'call')} of models" if roots else "; no model ran"
    if result.faults:
        text = f"{count_text(len(result.faults), 'place')} where bad values begin; {text}"
    ended = next((each.ended_by for each in result.processes if each.ended_by), None)
    return f"{text}; ended by {ended}" if ended else text


def _fault_lines(fault: Fault, rank: str, first: bool) -> Iterator[str]:
    call = fault.call
    step = f"step {call.step}" + (f" of generation {call.generation}" if call.generation else "")
    where = f"{call.path or call.op_name} ({call.op_name}, {step}){rank}"
    yield f"{'→' if first else ' '} {call.level} {fault.kind}: {where}"
    yield f"    {fault.evidence}"
    times = f"; {fault.times:,} times" if fault.times > 1 else ""
    yield f"    reached: {fault.reached}{times}"
    yield from (f"    {line}" for line in call.stack_info[:_SHOWN])
    for each in fault.followed[:_SHOWN]:
        yield f"    {each.level}: {each.path or each.op_name}"
    if fault.passed_on > _SHOWN:
        yield f"    passed on by {count_text(fault.passed_on, 'call')}"


def _headroom_line(room: Headroom) -> str:
    text = (
        f"{room.dtype}: values reach {room.reach:.4g} of {room.limit:.4g}"
        f" (room for a factor of {room.factor:.3g}) at {room.path or room.op_name}"
    )
    near = ", ".join(f"{each.path} {each.reach:.4g}" for each in room.near[:_SHOWN])
    return (
        f"{text}; near the limit: {count_text(room.near_calls, 'call')}: {near}" if near else text
    )


def _counts(counts: Mapping[str, int]) -> str:
    ordered = sorted(counts.items(), key=lambda pair: -pair[1])
    text = ", ".join(f"{name} ({count:,})" for name, count in ordered[:_SHOWN])
    return f"{text}, …" if len(ordered) > _SHOWN else text
