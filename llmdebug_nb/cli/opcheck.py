"""``llmdebug opcheck``: compute each recorded operator again, and judge its recorded output."""

from __future__ import annotations

import argparse

from llmdebug_nb.app.opcheck import arguments
from llmdebug_nb.cli.command import DIVERGED, INCOMPARABLE, OK, Commands, say
from llmdebug_nb.replay.checks import NOT_CHECKED, WRONG

_DESCRIPTION = (
    "Compute each recorded operator again in float64, and judge its recorded output by what"
    " rounding explains and by msit's standards. What can't be checked is listed with the reason."
)
_EXAMPLES = """\
examples:
  llmdebug opcheck -i golden -j 2
  llmdebug opcheck -i golden -ids 3_1 -opname linear,softmax -metric abs cos_sim -rerun -o results
An interrupted check goes on where it stopped when the same command runs again. Exit status: 0
right, 1 an operator is wrong, 2 nothing was checked, 3 llmdebug itself failed.
"""


def add(commands: Commands) -> None:
    """Declare the command."""
    parser = commands.add_parser(
        "opcheck", allow_abbrev=False, help="compute recorded operators again, and judge them",
        description=_DESCRIPTION, epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    option = parser.add_argument
    option("-i", "--input", metavar="DUMP", required=True, help="name or path of a run or dump")
    arguments.declare(parser)
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    """Check, print the result, and return the exit status."""
    from llmdebug_nb.app.opcheck.check import opcheck

    check = opcheck(args.input, **arguments.options(vars(args)))
    say(check)
    return {WRONG: DIVERGED, NOT_CHECKED: INCOMPARABLE}.get(check.verdict, OK)
