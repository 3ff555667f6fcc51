"""The flags of ``llmdebug errcheck`` and ``%llmerrcheck``."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from llmdebug_nb.core.faults import KINDS, MODES


def declare(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of a check."""
    add = parser.add_argument
    add("--type", nargs="+", choices=KINDS, dest="types", default=KINDS, metavar="T",
        help=f"kinds of errors that count, any of {' '.join(KINDS)} (default: all)")  # fmt: skip
    add("--mode", choices=MODES, default="aten",
        help="aten reads the results of each operator, module only those of modules, which costs"
        " less (default: %(default)s)")  # fmt: skip
    add("--exit", action="store_true",
        help="stop as soon as bad values reach a result, and dump what the first bad call was"
        " given and made, as the run errcheck")  # fmt: skip
    add("-o", "--output", metavar="DIR", help="folder of the result file")


def options(arguments: Mapping[str, object]) -> dict[str, Any]:
    """Return the keyword arguments of `errcheck`, from parsed arguments."""
    return {name: arguments[name] for name in ("types", "mode", "exit", "output")}
