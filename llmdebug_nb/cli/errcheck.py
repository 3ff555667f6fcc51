"""``llmdebug errcheck``: run a command, and name the first operator that makes bad values."""

from __future__ import annotations

import argparse

from llmdebug_nb.app.launching import check_arguments
from llmdebug_nb.cli.command import DIVERGED, INCOMPARABLE, OK, Commands, command_of, say

FOUND, NOTHING_CHECKED, COMMAND_FAILED = DIVERGED, INCOMPARABLE, 4  # exit statuses
_DESCRIPTION = (
    "Run a command unchanged, and find the first operator with clean inputs and bad outputs: NaN,"
    " overflow, underflow, a cast that loses values. Infinities that are meant (masks, fillers) are"
    " none."
)
_EXAMPLES = """\
examples:
  llmdebug errcheck --exec "python generate.py --prompt 'a b'"
  llmdebug errcheck --exit --type overflow nan -- torchrun --nproc-per-node 2 train.py
A result file (JSON) is written in any case. Exit status: 0 clean, 1 an error was found, 2 nothing
was checked (no model of PyTorch ran), 3 llmdebug itself failed, 4 nothing was found before the
command failed.
"""


def add(commands: Commands) -> None:
    """Declare the command."""
    parser = commands.add_parser(
        "errcheck", allow_abbrev=False, help="run a command, and find its first bad value",
        description=_DESCRIPTION, epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="llmdebug errcheck [options] (--exec COMMAND | -- COMMAND …)",
    )  # fmt: skip
    parser.add_argument(
        "--exec", metavar="COMMAND", help="the command, as one text; only quotes work as in a shell"
    )
    parser.add_argument(
        "--pth", action="store_true",
        help="also reach Pythons that ignore PYTHONPATH, by a .pth file while it runs",
    )  # fmt: skip
    check_arguments.declare(parser)
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    """Run the command, print the result, and return the exit status."""
    from llmdebug_nb.app.launching.checking import check_program

    command = command_of(args, "errcheck")
    checked = check_program(
        command, types=args.types, mode=args.mode, exit=args.exit, output=args.output, pth=args.pth
    )
    say(checked)
    if checked.result.faults:
        return FOUND
    if checked.status:
        say(f"the command ended with status {checked.status}")
        return COMMAND_FAILED
    return OK if checked.result.verdict == "clean" else NOTHING_CHECKED
