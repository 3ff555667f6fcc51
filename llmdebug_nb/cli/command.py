"""The parts that all commands share."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import TextIO, TypeAlias

from llmdebug_nb.core.printable import printable_lines

OK, DIVERGED, INCOMPARABLE, FAILED, PIPE_CLOSED = 0, 1, 2, 3, 141  # exit statuses

Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


def add_command(
    commands: Commands,
    name: str,
    run: Callable[[argparse.Namespace], int],
    help: str,
    description: str,
) -> argparse.ArgumentParser:
    """Add a command that calls ``run`` with its arguments; return its parser."""
    parser = commands.add_parser(name, help=help, description=description)
    parser.set_defaults(run=run)
    return parser


def say(text: object, file: TextIO | None = None) -> None:
    """Print a text; no line of it holds control characters, whatever a dump says."""
    print(printable_lines(str(text).split("\n")), file=file)


def add_run(parser: argparse.ArgumentParser, second: bool = False) -> None:
    """Add the argument RUN; with ``second``, also an optional MINE."""
    parser.add_argument("golden", metavar="RUN", help="name or path of a run")
    if second:
        parser.add_argument(
            "mine", metavar="MINE", nargs="?", help="a second run to compare with the first"
        )


def add_step(parser: argparse.ArgumentParser) -> None:
    """Add the argument --step."""
    parser.add_argument(
        "--step",
        type=int,
        metavar="N",
        help="of this generated token (default: the first recorded)",
    )
