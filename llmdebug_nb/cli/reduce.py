"""``llmdebug reduce`` and ``llmdebug convert``: another run, or dump, made of a run."""

from __future__ import annotations

import argparse

from llmdebug_nb.cli.command import OK, Commands, add_command, add_run, say, say_written


def add_reduce(commands: Commands) -> None:
    """Declare ``reduce``."""
    parser = add_command(
        commands, "reduce", _reduce, "keep figures of each tensor in place of its values",
        "Write a smaller run: minimum and maximum, or quantiles, of each tensor in place of all"
        " its values.",
    )  # fmt: skip
    add_run(parser)
    add = parser.add_argument
    add("--to", metavar="R", default="minmax", help="minmax or quantile:N (default: %(default)s)")
    add("--name", metavar="NAME", help="of the new run (default: RUN.minmax)")
    add("--replace", action="store_true", help="remove the old run once the new one is on disk")


def _reduce(args: argparse.Namespace) -> int:
    from llmdebug_nb.app.runs import describe_run, reduce_run

    run = reduce_run(args.golden, to=args.to, name=args.name, replace=args.replace)
    say(describe_run(run))
    return OK


def add_convert(commands: Commands) -> None:
    """Declare ``convert``."""
    parser = add_command(
        commands, "convert", _convert, "write a run of compiled code as torchair's tools read it",
        "Write a run of compiled code in the folders of torchair's FX or GE dumps.",
    )  # fmt: skip
    add_run(parser)
    add = parser.add_argument
    add("--to", metavar="L", default="fx", help="fx, fx-old or ge (default: %(default)s)")
    add("-o", "--output", metavar="DIR", required=True, help="a new folder")


def _convert(args: argparse.Namespace) -> int:
    from llmdebug_nb.app.convert import convert

    say_written(convert(args.golden, args.output, args.to))
    return OK
