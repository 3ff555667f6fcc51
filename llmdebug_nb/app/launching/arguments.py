"""The options of ``llmdebug dump`` and ``%llmdump --exec``, by their short names of msit and by long ones, and what they mean here."""

from __future__ import annotations

import argparse
from typing import Any

from llmdebug_nb.app.launching import products
from llmdebug_nb.app.launching.program import LEVELS
from llmdebug_nb.core.errors import OptionError
from llmdebug_nb.core.options import GRAPHS, PHASES, TOKENS, DumpOptions

TYPES = ("model", "layer", "op", "kernel", "tensor", "stats", "cpu_profiling", "onnx")
SEED = 2024  # of a bare -seed, as in msit
EXAMPLES = """\
examples:
  llmdebug dump --exec "python generate.py --prompt 'a b'" --name golden
  llmdebug dump --tokens all --stats-only -- torchrun --nproc-per-node 2 train.py
  llmdebug dump --exec "bash run.sh" -er 0,1 -opname linear -stp 1 -o dumps
  llmdebug dump --graph both -- python serve.py
Then: llmdebug info golden, or %llmexplore golden in a notebook. The exit status is the command's.
"""


def declare(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``llmdebug dump``."""
    parser.usage = "llmdebug dump [options] (--exec COMMAND | -- COMMAND …)"
    parser.epilog, parser.formatter_class = EXAMPLES, argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    add("words", nargs="*", help=argparse.SUPPRESS)  # a command without -- before it
    add(
        "--exec",
        metavar="COMMAND",
        help="the command, as one text; quotes are understood, nothing else of a shell is",
    )
    add(
        "--pth",
        action="store_true",
        help="also reach Pythons that ignore PYTHONPATH, by a .pth file while it runs",
    )
    add(
        "-l",
        "--log-level",
        choices=tuple(LEVELS),
        default="info",
        help="what llmdebug says itself (default: %(default)s)",
    )
    declare_options(parser)


def declare_options(parser: argparse.ArgumentParser) -> None:
    """Declare what to record: for the command line and for ``%llmdump --exec``."""
    usual = DumpOptions()
    add = parser.add_argument_group("what is recorded").add_argument
    add(
        "--type",
        nargs="+",
        choices=TYPES,
        metavar="T",
        help=f"any of {' '.join(TYPES)} (default: tensor); what is no tensor is written to files once the program has ended",
    )
    add("--mode", help="module, api, aten, or several: module+aten (default: module)")
    add("--phase", choices=[*PHASES], help="forward, backward or both (default: both)")
    add(
        "-stp",
        "--part",
        metavar="P",
        help="0 or in: inputs, 1 or out: outputs, 2 or both (default: both)",
    )
    add("-time", "--time", type=int, choices=range(4), metavar="N",
        help="inputs and outputs as they are: 0 before a call, 1 after it, 2 both, 3 inputs before and outputs after (default: 3)")  # fmt: skip
    add(
        "-ids",
        "--ids",
        metavar="A,B",
        help="only calls with these execution ids: 2,3_1 (llmdebug topology RUN shows them)",
    )
    add(
        "-child",
        "--children",
        type=_flag,
        metavar="BOOL",
        help="with -ids: what lies below them too (default: True)",
    )
    add(
        "-opname",
        "--opname",
        metavar="A,B",
        help="only modules and operators whose class or name begins like that, in any case",
    )
    add(
        "--layers",
        metavar="GLOBS",
        help="glob(s) over module paths, with commas: model.layers.*.mlp",
    )
    add("--types", metavar="CLASSES", help="module class name(s), with commas")
    add(
        "--apis",
        help="operators: names or globs with commas, ! in front leaves out; or a YAML file",
    )
    add("--contains", help="only calls whose full name holds one of these texts, with commas")
    add("--scope", help="only calls from one full name to another, with a comma")
    add(
        "--overflow",
        type=int,
        metavar="N",
        help="only calls with NaN or infinity, N of them (0: all)",
    )
    add("--weights", action="store_true", help="also the parameters, once")
    add("--logits", action="store_true", help="only the last logits of each step")
    add(
        "--graph",
        choices=[*GRAPHS],
        help="compile the model, and record its graph, its kernels, or both",
    )
    add(
        "--fusion-switch",
        metavar="F",
        help="with --graph: JSON file that says which fusions are off",
    )
    add(
        "-tiling",
        "--tiling",
        action="store_true",
        help="with --graph fused or both: launch configurations of kernels",
    )
    add(
        "--force-eager",
        action="store_true",
        help="run what torch.compile compiled eagerly meanwhile",
    )

    add = parser.add_argument_group("when").add_argument
    add("-er", "--range", metavar="A,B,…", dest="rounds",
        help="rounds, as pairs of first and last: 1,3,5,7 is 1 to 3 and 5 to 7; or all (default: 0,0). Round 0 is prefill and first decode, or the warm-up where there is one")  # fmt: skip
    add("--tokens", help=f"in place of rounds, generated tokens: {TOKENS}, 0,2,5-7, 4- or all")
    add("--warmup", type=int, metavar="N", help="generations at the start that are warm-ups")
    add("--ranks", help="only these ranks of a distributed job: 0-3")
    add(
        "-device",
        "--device",
        metavar="D",
        help="only models on this device: its number, cpu, cuda0",
    )
    add(
        "-config",
        "--control",
        "--config",
        metavar="F",
        help="JSON file that switches recording while it runs",
    )
    add(
        "-seed",
        "--seed",
        type=int,
        nargs="?",
        const=SEED,
        help=f"seed Python, NumPy and torch as the program begins (alone: {SEED})",
    )

    add = parser.add_argument_group("how much, and where").add_argument
    add(
        "-sd",
        "--save-desc",
        "--stats-only",
        dest="stats_only",
        action="store_true",
        help="descriptions only, no values",
    )
    add("--slice", metavar="INDEX", help="keep a part of each tensor: 0,:,-1")
    add("--reduce", metavar="R", help="keep figures of each tensor: minmax or quantile:N")
    add("--max-bytes", metavar="N", help="keep no more values than this: 500MB, 2GiB")
    add(
        "-symlink",
        "--symlink",
        action="store_true",
        help="equal tensors once: always so, kept for msit's scripts",
    )
    add("--name", help=f"name of the run (default: {usual.name})")
    add(
        "-o",
        "--output",
        "--path",
        dest="path",
        metavar="DIR",
        help="folder that will hold the run (default: llmdebug_runs)",
    )


def _flag(text: str) -> bool:
    """Read True or False. Raises ArgumentTypeError."""
    if text.lower() not in ("true", "false"):
        raise argparse.ArgumentTypeError(f"{text!r}: expected True or False")
    return text.lower() == "true"


def options(given: dict[str, Any]) -> dict[str, Any]:
    """Return what `launch` takes, of what was parsed. Raises OptionError: two that contradict each other."""
    names = DumpOptions.names()
    chosen = {
        name: value
        for name, value in given.items()
        if name in names and value is not None and (value is not False or name == "children")
    }
    types = set(given.get("type") or ("tensor",))
    if chosen.get("part") in ("0", "1", "2"):
        chosen["part"] = ("in", "out", "both")[int(chosen["part"])]
    if "stats" in types and given.get("type") and "tensor" not in types:
        types.add("tensor")
    if "stats" in types or "tensor" not in types:
        chosen["stats_only"] = True
    if "rounds" not in chosen and "tokens" not in chosen:
        chosen["rounds"] = "0,0"
    _refuse_contradictions(given, chosen, types)
    chosen["files"] = [
        name
        for name in products.KNOWN
        if name in types or (name == "tiling" and given.get("tiling"))
    ]
    return chosen


def _refuse_contradictions(given: dict[str, Any], chosen: dict[str, Any], types: set[str]) -> None:
    if given.get("words"):
        raise OptionError(
            f"{given['words'][0]!r} is no option; a command goes behind --: llmdebug dump [options] -- python run.py"
        )
    if given.get("tiling") and given.get("graph") not in ("fused", "both"):
        raise OptionError("-tiling is of fused kernels: add --graph fused, or both")
    if given.get("rounds") is not None and given.get("tokens") is not None:
        raise OptionError(
            "-er (--range) and --tokens exclude each other: rounds and tokens both say which steps"
        )
    for name in ("slice", "reduce"):
        if chosen.get("stats_only") and chosen.get(name):
            what = (
                "-sd (--save-desc)"
                if given.get("stats_only")
                else f"--type {' '.join(sorted(types))}"
            )
            raise OptionError(
                f"--{name} and {what} exclude each other: it is of values, and none are kept"
            )
