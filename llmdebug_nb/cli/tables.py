"""``llmdebug tables`` and ``llmdebug timeline``: operators, kernels and times of a run."""

from __future__ import annotations

import argparse

from llmdebug_nb.cli.command import OK, Commands, add_command, add_run, add_step, say


def add_tables(commands: Commands) -> None:
    """Declare ``tables``."""
    parser = add_command(
        commands, "tables", _tables, "write the tables of a run as csv files",
        "Write operators, kernels and host times of a run as csv files, in the folders and columns"
        " of msit's dumps.",
    )  # fmt: skip
    add_run(parser)
    parser.add_argument(
        "-o", "--output", metavar="DIR", default="llmdebug_tables",
        help="the folder (default: %(default)s)",
    )  # fmt: skip


def _tables(args: argparse.Namespace) -> int:
    from llmdebug_nb.app.tables import TableFiles, write_tables

    say(TableFiles(write_tables(args.golden, args.output)))
    return OK


def add_timeline(commands: Commands) -> None:
    """Declare ``timeline``."""
    parser = add_command(
        commands, "timeline", _timeline, "print the slowest operators of a step, and the gaps",
        "Print what took most time in a step of a run recorded with profile, and the longest gaps"
        " between operators.",
    )  # fmt: skip
    add_run(parser)
    add_step(parser)
    parser.add_argument("-o", "--output", metavar="F", help="also draw it: .png, .svg or .pdf")


def _timeline(args: argparse.Namespace) -> int:
    from llmdebug_nb.app.tables import timeline

    step = timeline(args.golden, args.step)
    say(step)
    if args.output:
        say(f"written: {step.save(args.output)}")
    return OK
