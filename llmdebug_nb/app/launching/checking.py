"""Checking an unedited program: an error check in each of its Python processes."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from llmdebug_nb.app.errcheck import CheckOptions, write_result
from llmdebug_nb.app.launching import process
from llmdebug_nb.app.launching.children import Unreached, why_unreached
from llmdebug_nb.app.launching.handover import CHECK, Handover
from llmdebug_nb.app.launching.program import hooked, refuse_bad_place, why_nothing, words_of
from llmdebug_nb.core.faults import KINDS, CheckResult, ProcessCheck
from llmdebug_nb.show.errcheck import check_html, check_text


@dataclass(frozen=True)
class CheckedProgram:
    """A program that has ended. ``status``: its exit status. ``path``: the result file."""

    status: int
    result: CheckResult
    path: Path

    def __str__(self) -> str:
        return check_text(self.result, self.path)

    def _repr_html_(self) -> str:
        return check_html(self.result, self.path)


def check_program(
    command: str | Sequence[str],
    *,
    types: str | Iterable[str] = KINDS,
    mode: str = "aten",
    exit: bool = False,
    output: str | os.PathLike[str] | None = None,
    pth: bool = False,
    stream: Callable[[str, str], object] | None = None,
) -> CheckedProgram:
    """Run a command under an error check; write one result file for all its processes.

    Args:
        command: as in `launch`.
        types, mode, exit, output: as in `errcheck`.
        pth: as in `launch`.
        stream: receives the command's output, as ``output`` in `launch`.

    Raises:
        OptionError: an unknown option, or no command.
        DumpWriteError: the folder can't be written.
    """
    words, options = words_of(command), CheckOptions.of(types, mode, exit, output)
    folder = options.output.absolute()
    refuse_bad_place(folder)
    orders = {"types": options.types, "mode": mode, "exit": exit, "output": str(folder)}
    unreached = Unreached(pth)
    with hooked(words, {CHECK: orders}, None, pth) as (handover, variables):
        try:
            program = process.start(words, variables, stream is not None)
            status = process.wait(program, stream, unreached.look)
            parts = list(_parts(handover))
            notes = list(_notes(parts, words, handover, unreached, pth))
        except process.NotStarted as error:
            status, parts, notes = error.status, [], [str(error)]
    result = CheckResult(mode, options.types, tuple(parts), tuple(notes))
    return CheckedProgram(status, result, write_result(result, folder))


def _parts(handover: Handover) -> Iterator[ProcessCheck]:
    """Yield the results of the processes, by rank."""
    found = [msgspec.json.decode(data, type=ProcessCheck) for data in handover.checks()]
    yield from sorted(found, key=lambda each: (each.rank, each.pid))


def _notes(
    parts: list[ProcessCheck],
    words: list[str],
    handover: Handover,
    unreached: Unreached,
    pth: bool,
) -> Iterator[str]:
    """Yield what the reader should know: errors of ours, and processes that were not reached."""
    for each in parts:
        if each.ended_by:
            yield f"process {each.pid} (rank {each.rank}) was ended by {each.ended_by}"
    for pid, text in handover.messages():
        yield f"{text} (process {pid})"
    if not parts:
        yield f"nothing was checked: {why_nothing(handover.processes())}"
        why = None if unreached.messages else why_unreached(words, pth)
        if why is not None:
            yield f"not reached: {words[0]}: {why}"
    yield from unreached.messages
