"""The flags of ``llmdebug dump`` and ``%%llmdump``: msit's short names, and long names."""

from __future__ import annotations

import argparse
from collections.abc import Collection, Mapping
from typing import Any

from llmdebug_nb.app.launching import products
from llmdebug_nb.app.option_flags import LEVELS, declare_options, given_options
from llmdebug_nb.core.errors import OptionError
from llmdebug_nb.core.options import LAUNCH_ROUNDS, goes_on

TYPES = ("model", "layer", "op", "kernel", "tensor", "stats", "cpu_profiling", "onnx")
EXAMPLES = """\
examples:
  llmdebug dump --exec "python generate.py --prompt 'a b'" --name golden
  llmdebug dump --tokens all --stats-only -- torchrun --nproc-per-node 2 train.py
  llmdebug dump --exec "bash run.sh" -er 0,1 -opname linear -stp 1 -o dumps
  llmdebug dump --graph both -- python serve.py
Then: llmdebug info golden, or %llmexplore golden in a notebook. The exit status is the command's.
"""


def declare(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of ``llmdebug dump``."""
    parser.usage = "llmdebug dump [options] (--exec COMMAND | -- COMMAND …)"
    parser.epilog, parser.formatter_class = EXAMPLES, argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    add("words", nargs="*", help=argparse.SUPPRESS)  # a command without -- before it
    add("--exec", metavar="COMMAND",
        help="the command, as one text; only quotes work as in a shell")  # fmt: skip
    add("--pth", action="store_true",
        help="also reach Pythons that ignore PYTHONPATH, by a .pth file while it runs")  # fmt: skip
    declare_recording(parser, {"rounds": LAUNCH_ROUNDS, "tokens": None})


def declare_recording(
    parser: argparse.ArgumentParser, defaults: Mapping[str, object] | None = None
) -> None:
    """Declare the flags that a command and a cell share. ``defaults``: as of `declare_options`."""
    add = parser.add_argument
    add("-l", "--log-level", choices=tuple(LEVELS), default="info",
        help="which messages of llmdebug are shown (default: %(default)s)")  # fmt: skip
    add("--type", nargs="+", choices=TYPES, metavar="T",
        help=f"any of {' '.join(TYPES)} (default: tensor); what is not tensors is written to files"
        " at the end")  # fmt: skip
    add("-tiling", "--tiling", "--save-tiling", action="store_true",
        help="with --graph fused or both: launch configurations of kernels")  # fmt: skip
    add("-symlink", "--symlink", "--enable-symlink", action="store_true",
        help="no effect: equal tensors are stored once; kept for msit's scripts")  # fmt: skip
    declare_options(parser, defaults)


def options(arguments: Mapping[str, Any], rounds: str | None = LAUNCH_ROUNDS) -> dict[str, Any]:
    """Return the keyword arguments of `launch`, from parsed arguments.

    ``rounds``: those of a line that names no rounds, tokens or requests; None: `DumpOptions`'
    tokens.

    Raises:
        OptionError: two arguments that contradict each other.
    """
    arguments = _with_all_ids(arguments)
    chosen = given_options(arguments)
    types = set(arguments.get("type") or ("tensor",))
    _check(arguments, chosen, types)
    if "stats" in types or "tensor" not in types:
        chosen["stats_only"] = True
    given = chosen.keys() & {"rounds", "tokens", "requests"}
    if rounds is not None and not given and not goes_on(chosen):
        chosen["rounds"] = rounds
    files = types | {"tiling"} if arguments.get("tiling") else types
    return {**chosen, "files": [kind for kind in products.KNOWN if kind in files]}


def _with_all_ids(arguments: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the arguments with the ids behind a blank, as msit's documents write them: 2, 3_1."""
    ids, words = arguments.get("ids"), list(arguments.get("words") or ())
    while isinstance(ids, str) and ids.endswith(",") and words:
        ids += words.pop(0)
    return {**arguments, "ids": ids, "words": words} if isinstance(ids, str) else arguments


def _check(arguments: Mapping[str, Any], chosen: Mapping[str, Any], types: Collection[str]) -> None:
    """Refuse arguments that contradict each other."""
    if arguments.get("words"):
        raise OptionError(
            f"{arguments['words'][0]!r} is not an option; a command goes behind --:"
            " llmdebug dump [options] -- python run.py"
        )
    if arguments.get("tiling") and chosen.get("graph") not in ("fused", "both"):
        raise OptionError("-tiling is of fused kernels: add --graph fused, or both")
    if "rounds" in chosen and "tokens" in chosen:
        raise OptionError(
            "-er (--range) and --tokens exclude each other: both select the steps to record"
        )
    without_values = ""
    if "stats_only" in chosen:
        without_values = "-sd (--save-desc)"
    elif "stats" in types or "tensor" not in types:
        without_values = f"--type {' '.join(sorted(types))}"
    for name in ("slice", "reduce"):
        if without_values and name in chosen:
            raise OptionError(
                f"--{name} and {without_values} exclude each other: it is of values,"
                " and none are kept"
            )
