"""``llmdebug opcheck``: compute each recorded operator again, and judge its recorded output."""

from __future__ import annotations

import argparse

from llmdebug_nb.cli.command import DIVERGED, INCOMPARABLE, OK, Commands, say
from llmdebug_nb.core.opchecks import METRICS, NOT_CHECKED, WRONG

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
    declare(parser)
    parser.set_defaults(run=_run)


def declare(parser: argparse.ArgumentParser) -> None:
    """Declare the options of a check; their names are those of `app.opcheck.opcheck`."""
    option = parser.add_argument
    option("-o", "--output", metavar="DIR", help="folder of the result (default: that of the runs)")
    option("-ids", "--operation-ids", metavar="ID", nargs="+", dest="ids",
           help="execution ids of calls, such as 3_1; what runs inside them too")  # fmt: skip
    option("-opname", "--operation-name", metavar="NAME", nargs="+", dest="names",
           help="parts of operators' names, such as linear")  # fmt: skip
    option("--path", metavar="GLOB", nargs="+", dest="paths",
           help="paths of modules, such as model.layers.3")  # fmt: skip
    option("-metric", "--metric", nargs="+", choices=METRICS, default=["rel"], dest="metrics",
           help="msit's metrics to report (default: rel)")  # fmt: skip
    option("-device", "--device", metavar="DEVICE", default="cpu",
           help="where the reference is computed (default: cpu)")  # fmt: skip
    option(
        "-rerun",
        "--rerun",
        action="store_true",
        help="run wrong operators here too: is the recorded output wrong, or the operator?",
    )
    option("-j", "--jobs", type=int, metavar="N", default=1, help="processes (default: 1)")


def _run(args: argparse.Namespace) -> int:
    """Check, print the result, and return the exit status."""
    from llmdebug_nb.app.opcheck import opcheck

    check = opcheck(
        args.input, ids=args.ids, names=args.names, paths=args.paths, metrics=args.metrics,
        device=args.device, rerun=args.rerun, jobs=args.jobs, output=args.output,
    )  # fmt: skip
    say(check)
    return {WRONG: DIVERGED, NOT_CHECKED: INCOMPARABLE}.get(check.verdict, OK)
