"""``llmdebug dump``: launch a command, say what became of it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from llmdebug_nb.core.errors import OptionError


def split(argv: Sequence[str]) -> tuple[list[str], list[str] | None]:
    """Return our own arguments, and the words of the command behind ``--``."""
    if "--" not in argv:
        return list(argv), None
    at = list(argv).index("--")
    return list(argv[:at]), list(argv[at + 1 :])


def run(args: argparse.Namespace) -> int:
    """Launch the command, say what became of it, and return its exit status."""
    from llmdebug_nb.app.launching.arguments import options
    from llmdebug_nb.app.launching.program import launch

    chosen, command = options(vars(args)), args.command
    if (args.exec is None) == (command is None):
        both = "--exec and -- exclude each other" if command is not None else "no command"
        raise OptionError(
            f"{both}: say llmdebug dump --exec 'python run.py', or llmdebug dump -- python run.py"
        )
    done = launch(args.exec if command is None else command, pth=args.pth, **chosen)
    for line in done.lines(args.log_level):
        print(f"llmdebug: {line}", file=sys.stderr)
    return done.status
