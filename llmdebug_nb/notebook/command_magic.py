"""`%llmdebug COMMAND …`: the command line in this kernel, with the notebook's runs.

A command that has a magic is that magic; the others run as in a terminal, with the same parser, and
give back the object that a terminal prints.
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Callable
from typing import NoReturn

from IPython.core.error import UsageError
from IPython.core.magic import line_magic, magics_class
from IPython.display import display

from llmdebug_nb.cli import command_parser, msit
from llmdebug_nb.cli.command import heard_by, run_name
from llmdebug_nb.core.errors import nearest
from llmdebug_nb.notebook.magic_line import one_line, with_nearest
from llmdebug_nb.notebook.magics import MAGICS
from llmdebug_nb.notebook.namespace import NamespaceMagics
from llmdebug_nb.store.run import Run


class _Ended(Exception):
    """The parser has printed what was asked for: a help, or the versions."""


class _LineParser(argparse.ArgumentParser):
    """Reports wrong arguments as a line of the cell."""

    def error(self, message: str) -> NoReturn:
        text = with_nearest(f"{self.prog}: {message}", self._option_string_actions)
        raise UsageError(f"{text}; see {self.prog} --help")

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        raise _Ended


def parsers() -> dict[str, argparse.ArgumentParser]:
    """Return the parser of each command, by name."""
    actions = command_parser(_LineParser, "%llmdebug")._actions
    (known,) = (each.choices for each in actions if isinstance(each.choices, dict))
    return known


def _with_help(magic: Callable[..., object]) -> Callable[..., object]:
    """Add the list of commands to the docstring, which ``?`` shows."""
    magic.__doc__ = f"{magic.__doc__}\n{command_parser(_LineParser, '%llmdebug').format_help()}"
    return magic


@magics_class
class CommandMagic(NamespaceMagics):
    """%llmdebug."""

    @line_magic
    @_with_help
    def llmdebug(self, line: str) -> object:
        """Run a command of ``llmdebug`` here, and show its result.

        Runs are named as everywhere: by variable, by name, or by path. ``%llmdebug compare`` is
        ``%llmcompare``, and so with each command that has a magic.

        Examples: ``%llmdebug topology golden``, ``%llmdebug tables golden -o tables``,
        ``%llmdebug export golden for_msprobe --layout msprobe``, ``%llmdebug timeline --help``
        """
        command, _, rest = line.strip().partition(" ")
        if f"llm{command}" in MAGICS:
            return self.shell.run_line_magic(f"llm{command}", rest)
        with one_line():
            words = _words(line)
            if command == "msit":
                return self.llmdebug(shlex.join(msit.translate(words[1:])))
            try:
                return self._run(words)
            except _Ended:
                return None

    def _run(self, words: list[str]) -> object:
        """Run a command; return the last object that it says, and show those before it."""
        if words and words[0].startswith("-"):  # --help, --version
            command_parser(_LineParser, "%llmdebug").parse_args(words)
        command, known = "".join(words[:1]), parsers()
        if command not in known:
            near = nearest(command, known) if command else ""
            raise UsageError(
                f"%llmdebug{command and ' '}{command}: expected a command{near};"
                f" known: {', '.join(known)}"
            )
        args = known[command].parse_args(words[1:])
        for action in known[command]._actions:
            if action.type is run_name:
                setattr(args, action.dest, self._path_of(getattr(args, action.dest)))
        said: list[object] = []
        with heard_by(said.append):
            args.run(args)
        for earlier in said[:-1]:
            display(earlier)
        return said[-1] if said else None

    def _path_of(self, name: str | None) -> str | None:
        """Return the path of the run in the variable of that name; without one, the name."""
        run = None if name is None else self._namespace.run(name)
        return run.where if isinstance(run, Run) and run.where else name


def _words(line: str) -> list[str]:
    """Return the words of a line. Raises UsageError: a quote is missing."""
    try:
        return shlex.split(line)
    except ValueError as error:
        raise UsageError(f"%llmdebug: {error}; quote a word with blanks as in 'a word'") from None
