"""``llmdebug dump``: launch a command, and report its end and the recording."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from llmdebug_nb.app.launching import arguments
from llmdebug_nb.cli.command import Commands, say
from llmdebug_nb.core.errors import OptionError

_DESCRIPTION = (
    "Run a command unchanged, and record the models in all its Python processes into one run."
)


def add(commands: Commands) -> None:
    """Declare the command."""
    parser = commands.add_parser(
        "dump", allow_abbrev=False, help="run a command, and record its models",
        description=_DESCRIPTION,
    )  # fmt: skip
    arguments.declare(parser)
    parser.set_defaults(run=_run)


def split(argv: Sequence[str]) -> tuple[list[str], list[str] | None]:
    """Return the arguments of ``llmdebug``, and the command after ``--`` (None: there is no --)."""
    if "--" not in argv:
        return list(argv), None
    at = list(argv).index("--")
    return list(argv[:at]), list(argv[at + 1 :])


def _run(args: argparse.Namespace) -> int:
    """Launch the command, print the messages, and return the command's exit status."""
    from llmdebug_nb.app.launching.program import launch

    options, command = arguments.options(vars(args)), args.command
    if (args.exec is None) == (command is None):
        problem = "--exec and -- exclude each other" if command is not None else "no command"
        raise OptionError(
            f"{problem}: say llmdebug dump --exec 'python run.py',"
            " or llmdebug dump -- python run.py"
        )
    launched = launch(args.exec if command is None else command, pth=args.pth, **options)
    for line in launched.lines(args.log_level):
        say(f"llmdebug: {line}", file=sys.stderr)
    return launched.status
