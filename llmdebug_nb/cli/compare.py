"""``llmdebug compare``: compare two runs."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from llmdebug_nb.app.upstream import compare_arguments
from llmdebug_nb.cli.command import DIVERGED, INCOMPARABLE, OK, Commands, add_command, say
from llmdebug_nb.comparison.differences import EXPECTED

if TYPE_CHECKING:
    from llmdebug_nb.app.report import Report

_DESCRIPTION = """Compare two dumps.
Exit status: 0 match, within noise or as expected, 1 diverged or nondeterministic, 2 incomparable
(too little of the two answers to each other), 3 an error, such as a run that can't be opened."""


def add(commands: Commands) -> None:
    """Declare the command."""
    parser = add_command(commands, "compare", _run, "compare two dumps", _DESCRIPTION)
    compare_arguments.declare(parser)


def _run(args: argparse.Namespace) -> int:
    from llmdebug_nb.app.compare import compare

    report = compare(
        *compare_arguments.both_sides(args), not args.no_explain, mapping=args.map,
        limits=args.limits, calibrate=args.calibrate, metrics=args.metric, cluster=args.cluster,
    )  # fmt: skip
    for glob in args.unexpect:
        report.unexpect(glob)
    for glob in args.expect:
        report.expect(glob, args.comment)
    return told(report, args)


def told(report: Report, args: argparse.Namespace) -> int:
    """Print a report, write the files that were asked for, and return the exit status."""
    say(compare_arguments.report_text(report, args.log_level))
    for line in compare_arguments.write_results(report, args):
        say(line)
    if report.verdict == "incomparable":
        return INCOMPARABLE
    return OK if report.verdict in ("match", "within_noise", EXPECTED) else DIVERGED
