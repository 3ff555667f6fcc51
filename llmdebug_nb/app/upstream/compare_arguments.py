"""The flags of ``llmdebug compare`` and ``%llmcompare``: ours, and ``msit llm compare``'s."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from llmdebug_nb.app.option_flags import LEVELS
from llmdebug_nb.comparison.columns import CUTS, LIST_ALL
from llmdebug_nb.core.errors import OptionError
from llmdebug_nb.core.options import CLUSTER_HELP

if TYPE_CHECKING:
    from llmdebug_nb.app.report import Report


def declare(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of a comparison."""
    add = parser.add_argument
    add("golden", metavar="GOLDEN", nargs="?", help="the reference")
    add("mine", metavar="MINE", nargs="?", help="the run to judge")
    add("-gp", "--golden-path", dest="golden_path", metavar="GOLDEN",
        help="as in msit: the reference; an xlsx and csv of msit's are written, too")  # fmt: skip
    add("-mp", "--my-path", dest="mine_path", metavar="MINE", help="as in msit: the run to judge")
    declare_judging(parser)
    declare_results(parser)
    add("--cluster", metavar="ADDRESS", help=CLUSTER_HELP)
    _declare_expected(parser)


def declare_judging(parser: argparse.ArgumentParser) -> None:
    """Declare what decides which rows are wrong, and what is said of them."""
    add = parser.add_argument
    add("--limits", metavar="F", help="fixed limits by path and dtype: a YAML or JSON file")
    add("--calibrate", metavar="RUN", action="append",
        help="another recording of golden: their differences count as noise")  # fmt: skip
    add("--metric", metavar="F.py:FUNC", action="append",
        help="your own metric, (golden, mine) -> float; its file is run")  # fmt: skip
    add("-alg", "--custom-algorithms", dest="metric", metavar="F.py:FUNC", nargs="+",
        action="extend", help="the same, several at once")  # fmt: skip
    add("--map", "-mf", "--op-mapping-file", dest="map", metavar="F",
        help="YAML or JSON file: modules of GOLDEN with those of MINE;"
        " or the folder of msit's op_mapping_file.json")  # fmt: skip
    add("--no-explain", action="store_true", help="skip the search for the cause")


def _declare_expected(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--expect", metavar="GLOB", action="append", default=[],
        help="mark deviations of these modules as expected, from now on")  # fmt: skip
    add("--comment", metavar="TEXT", default="", help="why they are expected")
    add("--unexpect", metavar="GLOB", action="append", default=[],
        help="remove a mark; give its glob")  # fmt: skip


def declare_results(parser: argparse.ArgumentParser) -> None:
    """Declare what is printed and written of a report."""
    add = parser.add_argument
    add("-o", "--output", dest="output", metavar="OUT",
        help="a name that ends in .csv: write the table of differences there; else a folder: write"
        " msit's tables into it (default with -gp: the current folder)")  # fmt: skip
    add("--csv", metavar="CSV", help="write the table of differences")
    add("--html", metavar="F", help="write the report as one HTML page")
    add("-cl", "--cmp-level", dest="level", choices=(*CUTS, "token"),
        help="the rows of msit's table; token means logits (default: all)")  # fmt: skip
    add("-w", "--weight", dest="level", action="store_const", const="weight",
        help="weights alone are the rows of msit's table")  # fmt: skip
    add("-st", "--stats", dest="stats", action="store_true",
        help="msit's table of the errors of statistics")  # fmt: skip
    add("-l", "--log-level", choices=tuple(LEVELS), default="info",
        help="info: the whole report; warning: its summary and notes; error and above: the verdict"
        " (default: %(default)s)")  # fmt: skip


def both_sides(args: argparse.Namespace) -> tuple[str, str]:
    """Return golden and mine, however they were given. Raises OptionError."""
    by_flag, by_place = (args.golden_path, args.mine_path), (args.golden, args.mine)
    if any(by_flag) and any(by_place):
        raise OptionError("compare: give GOLDEN and MINE, or -gp GOLDEN -mp MINE, not both")
    golden, mine = by_flag if any(by_flag) else by_place
    if not golden or not mine:
        side = "golden (GOLDEN or -gp)" if not golden else "mine (MINE or -mp)"
        raise OptionError(f"compare: {side} is missing; say GOLDEN MINE, or -gp GOLDEN -mp MINE")
    return golden, mine


def report_text(report: Report, level: str) -> str:
    """Return what is printed of a report at a level of messages."""
    if LEVELS[level] <= LEVELS["info"]:
        return str(report)
    verdict = f"Verdict: {report.verdict}"
    if level != "warning":
        return verdict
    return "\n".join([verdict, report.summary(), *report.notes()])


def write_results(report: Report, args: argparse.Namespace) -> list[str]:
    """Write the files that were asked for; return a line for each.

    Raises:
        OptionError: no row for the chosen level.
        DumpWriteError: a file can't be written.
    """
    from llmdebug_nb.app.upstream.compare_tables import write_tables

    output, written = args.output, []
    as_msit = getattr(args, "golden_path", None)
    if output and output.lower().endswith(".csv"):
        written.append(report.to_csv(output))
        output = None
    for target, write in ((args.csv, report.to_csv), (args.html, report.to_html)):
        if target:
            written.append(write(target))
    if output or as_msit or args.level or args.stats:
        level = {"token": "logits", None: LIST_ALL}.get(args.level, args.level)
        written += write_tables(report, output or ".", level, args.stats)
    return [f"written: {path}" for path in written]
