"""The processes below a launched program, as Linux shows them in /proc: whom a signal goes to, and which Python the hook could not reach.

Elsewhere nothing is known of them: signals go to the program itself, and only its own command line is looked at.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from llmdebug_nb.app.launching.environment import HOOK, is_python

_PROC = Path("/proc")
_CODE = (
    "/libtorch_cpu.",
    "/libtorch_python.",
    "onnxruntime_pybind11_state",
)  # mapped by who runs models
_OFF = {"I": "-I (isolated mode)", "E": "-E (which ignores PYTHONPATH)", "S": "-S (without site)"}
_VALUED = "cmWX"  # options of python after which the program's own arguments, or a value, begin


def below(pid: int) -> Iterator[int]:
    """Yield the processes that descend from one, parents first."""
    children: list[int] = []
    with contextlib.suppress(OSError, ValueError):
        for task in (_PROC / str(pid) / "task").iterdir():
            children += map(int, (task / "children").read_text().split())
    for child in children:
        yield child
        yield from below(child)


class Unreached:
    """Finds the Pythons of a program that run torch or ONNX Runtime without our hook. ``found``: what each is, and why."""

    def __init__(self, pth: bool) -> None:
        self._pth = pth
        self._settled: set[int] = set()  # processes known to be reached, or found already
        self.found: list[str] = []

    def look(self, pid: int) -> None:
        """Look at a process and all below it, those that are new."""
        for each in (pid, *below(pid)):
            if each in self._settled:
                continue
            with contextlib.suppress(OSError):
                words = (
                    (_PROC / str(each) / "cmdline")
                    .read_bytes()
                    .decode(errors="replace")
                    .split("\0")[:-1]
                )
                if not words or not _runs_models(each):
                    continue
                self._settled.add(each)
                why = why_unreached(words, self._pth) or self._overwritten(each)
                if why is not None:
                    self.found.append(
                        f"not reached: process {each}, {' '.join(words)[:200]}: {why}"
                    )

    def _overwritten(self, pid: int) -> str | None:
        variables = (_PROC / str(pid) / "environ").read_bytes().split(b"\0")
        paths = next(
            (
                each[11:].decode(errors="replace")
                for each in variables
                if each.startswith(b"PYTHONPATH=")
            ),
            "",
        )
        if self._pth or str(HOOK) in paths.split(os.pathsep):
            return None
        return "PYTHONPATH was overwritten, and python called by its path; extend PYTHONPATH, call python by name, or add --pth"


def _runs_models(pid: int) -> bool:
    text = (_PROC / str(pid) / "maps").read_text(errors="replace")
    return any(code in text for code in _CODE)


def why_unreached(words: Sequence[str], pth: bool) -> str | None:
    """Say why a Python with that command line does not run our hook; None where nothing in it prevents that."""
    if not is_python(words[0]):
        return None
    for word in words[1:]:
        if not word.startswith("-") or word.startswith("--"):
            break
        for letter in word[1:]:
            if letter in _VALUED:
                return None
            if letter in _OFF and not (pth and letter != "S"):
                cure = "leave it out" if letter == "S" else "leave it out, or add --pth"
                return f"it was started with {_OFF[letter]}; {cure}"
    return None
