"""``llmdebug compare``: compare two runs."""

from __future__ import annotations

import argparse

from llmdebug_nb.cli.command import DIVERGED, INCOMPARABLE, OK, Commands, add_command, say

_DESCRIPTION = """Compare two dumps.
Exit status: 0 match, within noise or as expected, 1 diverged or nondeterministic, 2 incomparable
(too little of the two answers to each other), 3 an error, such as a run that can't be opened."""


def add(commands: Commands) -> None:
    """Declare the command."""
    parser = add_command(commands, "compare", _run, "compare two dumps", _DESCRIPTION)
    add = parser.add_argument
    add("golden", metavar="GOLDEN", help="the reference")
    add("mine", metavar="MINE", help="the run to judge")
    add("--limits", metavar="F", help="fixed limits by path and dtype: a YAML or JSON file")
    add("--calibrate", metavar="RUN", action="append",
        help="another recording of golden: their differences count as noise")  # fmt: skip
    add("--metric", metavar="F.py:FUNC", action="append",
        help="your own metric, (golden, mine) -> float; its file is run")  # fmt: skip
    add("-o", "--csv", metavar="CSV", help="write the table of differences")
    add("--html", metavar="F", help="write the report as one HTML page")
    add("--map", metavar="F",
        help="YAML or JSON file: modules of GOLDEN with those of MINE")  # fmt: skip
    add("--no-explain", action="store_true", help="skip the search for the cause")
    add("--expect", metavar="GLOB", action="append", default=[],
        help="mark deviations of these modules as expected, from now on")  # fmt: skip
    add("--comment", metavar="TEXT", default="", help="why they are expected")
    add("--unexpect", metavar="GLOB", action="append", default=[],
        help="remove a mark; give its glob")  # fmt: skip


def _run(args: argparse.Namespace) -> int:
    from llmdebug_nb.app.compare import compare
    from llmdebug_nb.core.findings import EXPECTED

    report = compare(
        args.golden, args.mine, not args.no_explain, mapping=args.map, limits=args.limits,
        calibrate=args.calibrate, metrics=args.metric,
    )  # fmt: skip
    for glob in args.unexpect:
        report.unexpect(glob)
    for glob in args.expect:
        report.expect(glob, args.comment)
    say(report)
    for target, write in ((args.csv, report.to_csv), (args.html, report.to_html)):
        if target:
            say(f"written: {write(target)}")
    if report.verdict == "incomparable":
        return INCOMPARABLE
    return OK if report.verdict in ("match", "within_noise", EXPECTED) else DIVERGED
