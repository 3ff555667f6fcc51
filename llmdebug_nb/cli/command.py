"""The parts that all commands share."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, TextIO, TypeAlias

from llmdebug_nb.core.errors import OptionError
from llmdebug_nb.core.printable import printable_lines

if TYPE_CHECKING:
    from llmdebug_nb.store.layouts.writing import Written

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


_listener: ContextVar[Callable[[object], None] | None] = ContextVar("listener", default=None)


@contextmanager
def heard_by(listener: Callable[[object], None]) -> Iterator[None]:
    """Give ``listener`` what commands say here, results as the objects that they are."""
    token = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(token)


def say(what: object, file: TextIO | None = None) -> None:
    """Print a text or a result; no line of it holds control characters, whatever a dump says."""
    listener = _listener.get()
    if listener is not None and not isinstance(what, str):
        listener(what)
        return
    print(printable_lines(str(what).split("\n")), file=file)


def say_written(written: Written) -> None:
    """Print how many tensors were written, and how many were left out and why."""
    from llmdebug_nb.show.words import count_text

    alone = f", {written.described:,} with statistics alone" if written.described else ""
    left_out = "".join(f"; {count:,} left out, {why}" for why, count in written.left_out.items())
    say(f"written: {count_text(written.tensors, 'tensor')}{alone} to {written.folder}{left_out}")


def run_name(text: str) -> str:
    """Return the name or path of a run. Arguments of this type can be variables in a notebook."""
    return text


def add_run(parser: argparse.ArgumentParser, second: bool = False) -> None:
    """Add the argument RUN; with ``second``, also an optional MINE."""
    parser.add_argument("golden", metavar="RUN", type=run_name, help="name or path of a run")
    if second:
        parser.add_argument(
            "mine", metavar="MINE", nargs="?", type=run_name,
            help="a second run to compare with the first",
        )  # fmt: skip


def add_step(parser: argparse.ArgumentParser) -> None:
    """Add the argument --step."""
    parser.add_argument(
        "--step",
        type=int,
        metavar="N",
        help="of this generated token (default: the first recorded)",
    )


def split(argv: Sequence[str]) -> tuple[list[str], list[str] | None]:
    """Return the arguments of ``llmdebug``, and the command after ``--`` (None: there is no --)."""
    if "--" not in argv:
        return list(argv), None
    at = list(argv).index("--")
    return list(argv[:at]), list(argv[at + 1 :])


def command_of(args: argparse.Namespace, name: str) -> str | Sequence[str]:
    """Return the command that a user gives to ``llmdebug NAME``, by --exec or after --.

    Raises:
        OptionError: both, or neither.
    """
    if (args.exec is None) == (args.command is None):
        problem = "--exec and -- exclude each other" if args.command is not None else "no command"
        raise OptionError(
            f"{problem}: say llmdebug {name} --exec 'python run.py',"
            f" or llmdebug {name} -- python run.py"
        )
    command: str | Sequence[str] = args.exec if args.command is None else args.command
    return command
