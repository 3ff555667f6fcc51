"""The command line, ``llmdebug COMMAND``. Each command parses, calls one use case, and prints."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from llmdebug_nb.cli import (
    compare,
    copy,
    doctor,
    dump,
    errcheck,
    info,
    lockstep,
    logits,
    msit,
    opcheck,
    ranks,
    redact,
    reduce,
    report,
    tables,
    topology,
)
from llmdebug_nb.cli.command import FAILED, PIPE_CLOSED, say, split
from llmdebug_nb.core.errors import LLMDebugError

_COMMANDS = (
    dump.add,
    errcheck.add,
    opcheck.add,
    logits.add,
    doctor.add,
    info.add,
    compare.add,
    lockstep.add,
    ranks.add,
    report.add_report,
    reduce.add_reduce,
    reduce.add_convert,
    redact.add,
    copy.add,
    report.add_export,
    tables.add_tables,
    tables.add_timeline,
    topology.add_topology,
    topology.add_onnx,
    msit.add,
)

_LAUNCHING = (["dump"], ["errcheck"], ["logits"])  # commands that take another one after --


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return its exit status, one of those in `command.py`."""
    argv = sys.argv[1:] if argv is None else list(argv)
    try:
        if argv[:1] == ["msit"] and not {"-h", "--help"} & set(argv):
            argv = msit.translate(argv[1:])
        ours, command = split(argv) if argv[:1] in _LAUNCHING else (argv, None)
        args = command_parser(_Parser).parse_args(ours)
        args.command = command
        status: int = args.run(args)
    except LLMDebugError as error:
        say(f"llmdebug: {error}", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        say("llmdebug: interrupted", file=sys.stderr)
        return FAILED
    except BrokenPipeError:  # the reader of our output (such as head) has closed it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return PIPE_CLOSED
    return status


def command_parser(
    kind: type[argparse.ArgumentParser], prog: str = "llmdebug"
) -> argparse.ArgumentParser:
    """Return the parser of the command line; ``kind`` says what becomes of wrong arguments."""
    parser = kind(
        prog=prog,
        description="Numerical debugger for LLMs: look at dumps and compare them. "
        "Exit status: 0 fine, 3 an error; compare and the checks have more.",
    )
    parser.add_argument(
        "--version", action=_Version, nargs=0, help="versions, and whether the C kernel is used"
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for add in _COMMANDS:
        add(commands)
    return parser


class _Parser(argparse.ArgumentParser):
    """Reports wrong arguments with the exit status of errors; argparse's 2 means incomparable."""

    def error(self, message: str) -> NoReturn:
        self.print_usage(sys.stderr)
        self.exit(FAILED, f"{self.prog}: error: {message}\n")


class _Version(argparse.Action):
    """Prints the versions of llmdebug and torch, and why the C kernel is not used, if it isn't."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        import torch

        from llmdebug_nb.core.kernels import native

        why = native.why_not()
        kernel = f"without the C kernel ({why})" if why else "with the C kernel"
        say(f"llmdebug {_version()}, torch {torch.__version__}, {kernel}")
        parser.exit()


def _version() -> str:
    """Return the version of the running package: installed metadata may be absent or of another."""
    return str(vars(sys.modules[__name__.partition(".")[0]])["__version__"])
