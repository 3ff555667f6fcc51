"""The command line, ``llmdebug COMMAND``. Each command parses, calls one use case, and prints."""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import NoReturn

from llmdebug_nb.cli.command import FAILED, PIPE_CLOSED, Commands, say, split
from llmdebug_nb.core.errors import LLMDebugError

# the module of each command, and its function that adds it; imported only when it is needed, as a
# launched program waits for it
_COMMANDS = {
    "dump": ("dump", "add"),
    "errcheck": ("errcheck", "add"),
    "opcheck": ("opcheck", "add"),
    "logits": ("logits", "add"),
    "doctor": ("doctor", "add"),
    "info": ("info", "add"),
    "compare": ("compare", "add"),
    "lockstep": ("lockstep", "add"),
    "ranks": ("ranks", "add"),
    "report": ("report", "add_report"),
    "reduce": ("reduce", "add_reduce"),
    "convert": ("reduce", "add_convert"),
    "redact": ("redact", "add"),
    "copy": ("copy", "add"),
    "export": ("report", "add_export"),
    "tables": ("tables", "add_tables"),
    "timeline": ("tables", "add_timeline"),
    "topology": ("topology", "add_topology"),
    "onnx": ("topology", "add_onnx"),
    "build": ("build", "add"),
    "msit": ("msit", "add"),
}

_LAUNCHING = (["dump"], ["errcheck"], ["logits"])  # commands that take another one after --


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return its exit status, one of those in `command.py`."""
    argv = sys.argv[1:] if argv is None else list(argv)
    try:
        if argv[:1] == ["msit"] and not {"-h", "--help"} & set(argv):
            from llmdebug_nb.cli import msit

            argv = msit.translate(argv[1:])
        ours, command = split(argv) if argv[:1] in _LAUNCHING else (argv, None)
        args = command_parser(_Parser, only=ours[0] if ours else None).parse_args(ours)
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
    except Exception:  # Python's own status for it is 1, which says that something is wrong
        traceback.print_exc()
        say("llmdebug: this is an error of ours; nothing was decided", file=sys.stderr)
        return FAILED
    return status


def command_parser(
    kind: type[argparse.ArgumentParser], prog: str = "llmdebug", only: str | None = None
) -> argparse.ArgumentParser:
    """Return the parser of the command line; ``kind`` says what becomes of wrong arguments.

    ``only``: the command that is meant; if there is none of that name, all are there.
    """
    parser = kind(
        prog=prog,
        description="Numerical debugger for LLMs: look at dumps and compare them. "
        "Exit status: 0 fine, 3 an error; compare and the checks have more.",
    )
    parser.add_argument(
        "--version", action=_Version, nargs=0, help="versions, and whether the C kernel is used"
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for module, function in [_COMMANDS[only]] if only in _COMMANDS else _COMMANDS.values():
        add: Callable[[Commands], object] = getattr(import_module(f"{__name__}.{module}"), function)
        add(commands)
    return parser


class _Parser(argparse.ArgumentParser):
    """Reports wrong arguments with the exit status of errors; argparse's 2 means incomparable."""

    def error(self, message: str) -> NoReturn:
        self.print_usage(sys.stderr)
        self.exit(FAILED, f"{self.prog}: error: {message}\n")


class _Version(argparse.Action):
    """Prints the versions of llmdebug and torch, and what of it runs in C."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        import torch

        from llmdebug_nb.capture.tape import torch_observer
        from llmdebug_nb.core.kernels import native

        why = native.why_not()
        kernel = f"without the C kernel ({why})" if why else "with the C kernel"
        why = torch_observer.why_not()
        observer = (
            f"without the observer of operators ({why})"
            if why
            else "with the observer of operators"
        )
        say(f"llmdebug {_version()}, torch {torch.__version__}, {kernel}, {observer}")
        parser.exit()


def _version() -> str:
    """Return the version of the running package: installed metadata may be absent or of another."""
    return str(vars(sys.modules[__name__.partition(".")[0]])["__version__"])
