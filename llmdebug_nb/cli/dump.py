"""``llmdebug dump``: launch a command, and report its end and the recording."""

from __future__ import annotations

import argparse
import sys

from llmdebug_nb.app.launching import arguments
from llmdebug_nb.cli.command import Commands, command_of, say

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


def _run(args: argparse.Namespace) -> int:
    """Launch the command, print the messages, and return the command's exit status."""
    from llmdebug_nb.app.launching.program import launch

    options = arguments.options(vars(args))
    launched = launch(command_of(args, "dump"), pth=args.pth, **options)
    for line in launched.lines(args.log_level):
        say(f"llmdebug: {line}", file=sys.stderr)
    return launched.status
