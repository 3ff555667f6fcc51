"""The flags of ``llmdebug lockstep`` and ``%llmlockstep``."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llmdebug_nb.app.lockstep_outcome import AT_FIRST, NOT_HERE, TIMEOUT, WINDOW
from llmdebug_nb.app.option_flags import declare_options, given_options
from llmdebug_nb.app.upstream import compare_arguments
from llmdebug_nb.core.errors import OptionError, first_line
from llmdebug_nb.core.options import EVERY_TOKEN

SECRET = "LLMDEBUG_SECRET"  # the variable of the environment that may hold it
_LONGEST_SECRET = 4096  # bytes of its file: more is no secret


def declare(parser: argparse.ArgumentParser, model: str, inputs: str) -> None:
    """Declare the flags. ``model``, ``inputs``: how a model and its inputs are given."""
    add = parser.add_argument
    add("golden", metavar="GOLDEN", help=f"the reference: {model}; or tcp://host:port, where"
        " another process offers one by --listen. With --listen, the model that is offered"
        )  # fmt: skip
    add("mine", metavar="MINE", nargs="?", help="the model to judge, likewise")
    add("--inputs", metavar="I", help=inputs)
    add("--stop", action="store_true", help="stop both programs at the first divergence")
    add("--graft", action="store_true", help="let mine go on with golden's value after each call"
        " whose output diverges: one run shows all bugs")  # fmt: skip
    add("--window", metavar="SIZE", default=WINDOW,
        help="bytes of values that are held, of both together (default: %(default)s)")  # fmt: skip
    add("--listen", metavar="ADDRESS", help="offer GOLDEN at tcp://host:port to a comparison in"
        " another process, once; port 0 takes any free one")  # fmt: skip
    add("--connect", metavar="ADDRESS", help="in place of MINE: where another process offers it")
    add("--secret-file", metavar="F", help="with a process at an address: a file with the secret"
        f" that both know (default: ${SECRET}; --listen makes one and says it)")  # fmt: skip
    add("--timeout", type=float, metavar="S", default=TIMEOUT, help="seconds of silence after which"
        " the other process counts as gone (default: %(default)g)")  # fmt: skip
    add("--prove", action="store_true", help="put golden's value of the first finding into mine's"
        " model, and run it on")  # fmt: skip
    compare_arguments.declare_judging(parser)
    compare_arguments.declare_results(parser)
    declare_options(parser, {"tokens": EVERY_TOKEN}, NOT_HERE)


def options(args: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keyword arguments of `lockstep` but those that a front end looks up itself.

    These are ``mapping``, ``limits``, ``metrics`` and ``calibrate``. Raises OptionError.
    """
    return {
        "stop": AT_FIRST if args["stop"] else None,
        "graft": args["graft"],
        "window": args["window"],
        "explain": not args["no_explain"],
        "prove": args["prove"],
        **_known(connection(args), args),
        **given_options(args),
    }


def connection(args: Mapping[str, Any]) -> dict[str, Any]:
    """Return the secret, None if none is given, and the seconds to wait. Raises OptionError."""
    return {"secret": _secret(args["secret_file"]), "timeout": args["timeout"]}


def _known(connection: dict[str, Any], args: Mapping[str, Any]) -> dict[str, Any]:
    """Return a connection. Raises OptionError: a side is elsewhere, and no secret is given."""
    if connection["secret"] is None and any(map(is_address, sides(args))):
        raise OptionError(
            f"lockstep: no secret is given for the process at the address; set ${SECRET} to the one"
            " that --listen has, or write it to a file: --secret-file F"
        )
    return connection


def sides(args: Mapping[str, Any]) -> tuple[str, str]:
    """Return golden and mine, as they were given. Raises OptionError."""
    golden, mine, connect = args["golden"], args["mine"], args["connect"]
    if (mine is None) == (connect is None):
        raise OptionError("lockstep: expected GOLDEN and MINE, or GOLDEN --connect ADDRESS")
    return golden, mine or connect


def offered(args: Mapping[str, Any], parser: argparse.ArgumentParser) -> str:
    """Return the model that --listen offers. Raises OptionError: an option of a comparison."""
    known = {"golden", "inputs", "listen", "secret_file", "timeout"}
    for name, value in args.items():
        if name not in known and value != parser.get_default(name):
            raise OptionError(
                f"lockstep --listen: {name} is said where the comparison runs; here are a model,"
                " --inputs, --secret-file and --timeout"
            )
    return str(args["golden"])


def is_address(text: object) -> bool:
    """Tell whether a side is the address of another process."""
    return isinstance(text, str) and text.startswith("tcp://")


def _secret(file: str | None) -> str | None:
    """Return the secret of a file or of the environment; blanks around it do not count."""
    if file is None:
        return os.environ.get(SECRET)
    try:
        with Path(file).open("rb") as stream:
            data = stream.read(_LONGEST_SECRET + 1)
        text = data.decode().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise OptionError(f"secret-file {file}: can't be read: {first_line(error)}") from None
    if not text or len(data) > _LONGEST_SECRET:
        raise OptionError(f"secret-file {file}: expected one secret, got {len(data):,} bytes")
    return text
