"""The processes below a launched program: they get signals, and those without our hook are named.

They are read from /proc, which only Linux has. On other systems, signals go to the program alone,
and only its own command line is checked.
"""

from __future__ import annotations

import contextlib
import os
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

from llmdebug_nb.app.launching.environment import HOOK, is_python
from llmdebug_nb.capture.runtimes import RUNTIMES

_PROC = Path("/proc")
# libraries in the memory of processes that run models
_LIBRARIES = (
    "/libtorch_cpu.", "/libtorch_python.", *(name for each in RUNTIMES for name in each.libraries),
)  # fmt: skip
_OFF = {"I": "-I (isolated mode)", "E": "-E (which ignores PYTHONPATH)", "S": "-S (without site)"}
_VALUED = "cmWX"  # python's options that take the rest of the word, or the next one


def below(pid: int) -> Iterator[int]:
    """Yield the descendants of a process, parents first."""
    children: list[int] = []
    with contextlib.suppress(OSError, ValueError):
        for task in (_PROC / str(pid) / "task").iterdir():
            children += map(int, (task / "children").read_text().split())
    for child in children:
        yield child
        yield from below(child)


class Unreached:
    """Finds Pythons that run torch or another runtime without our hook.

    ``messages``: one for each, with the reason.
    """

    def __init__(self, pth: bool) -> None:
        self._pth = pth
        self._done: set[int] = set()  # processes that were reached, or found
        self.messages: list[str] = []

    def look(self, pid: int) -> None:
        """Check a process and its descendants, each one once."""
        for each in (pid, *below(pid)):
            if each in self._done:
                continue
            with contextlib.suppress(OSError):
                words = _read(each, "cmdline").split("\0")[:-1]
                if not words or not _runs_models(each):
                    continue
                self._done.add(each)
                why = why_unreached(words, self._pth) or self._why_overwritten(each)
                if why is not None:
                    command = shlex.join(words)[:200]
                    self.messages.append(f"not reached: process {each}, {command}: {why}")

    def _why_overwritten(self, pid: int) -> str | None:
        variables = _read(pid, "environ").split("\0")
        prefix = "PYTHONPATH="
        paths = next((v.removeprefix(prefix) for v in variables if v.startswith(prefix)), "")
        if self._pth or str(HOOK) in paths.split(os.pathsep):
            return None
        return (
            "PYTHONPATH was overwritten, and python called by its path; extend PYTHONPATH,"
            " call python by name, or add --pth"
        )


def _read(pid: int, name: str) -> str:
    return (_PROC / str(pid) / name).read_bytes().decode(errors="replace")


def _runs_models(pid: int) -> bool:
    maps = _read(pid, "maps")
    return any(library in maps for library in _LIBRARIES)


def why_unreached(words: Sequence[str], pth: bool) -> str | None:
    """Return why a Python with that command line does not run our hook; None if it does."""
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
