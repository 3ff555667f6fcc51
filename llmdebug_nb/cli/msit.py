"""``llmdebug msit``: run a line of ``msit llm …``."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence

from llmdebug_nb.app.upstream.msit_line import translated
from llmdebug_nb.cli.command import FAILED, Commands, add_command, say

_DESCRIPTION = (
    "Translate a line of msit's, such as llm compare -gp A -mp B, say what it is here, and run it."
    " Known: llm dump, compare, opcheck, errcheck, logitscmp."
)


def add(commands: Commands) -> None:
    """Declare the command, for the help."""
    parser = add_command(commands, "msit", _run, "run a line of msit's", _DESCRIPTION)
    parser.add_argument("line", metavar="ARGS", nargs="*", help="llm COMMAND, and its options")


def _run(args: argparse.Namespace) -> int:
    """Never run: `main` runs the translation."""
    return FAILED


def translate(line: Sequence[str]) -> list[str]:
    """Return what follows ``llmdebug``, and print it. Raises OptionError."""
    found = translated(line)
    say(f"llmdebug: runs: llmdebug {shlex.join(found.words)}", file=sys.stderr)
    for remark in found.remarks:
        say(f"llmdebug: {remark}", file=sys.stderr)
    return found.words
