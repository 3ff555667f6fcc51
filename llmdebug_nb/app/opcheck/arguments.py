"""The flags of ``llmdebug opcheck`` and ``%llmopcheck``."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from llmdebug_nb.core.options import CLUSTER_HELP
from llmdebug_nb.replay.checks import METRICS, MODES, REFERENCES

_OPTIONS = (
    "output",
    "ids",
    "names",
    "paths",
    "cases",
    "metrics",
    "device",
    "dtype",
    "threads",
    "rerun",
    "jobs",
    "mode",
    "algorithms",
    "weights",
    "cluster",
)


def declare(parser: argparse.ArgumentParser) -> None:
    """Declare the options of a check; their names are those of `app.opcheck.opcheck`."""
    option = parser.add_argument
    option("-o", "--output", metavar="DIR", help="folder of the result (default: that of the runs)")
    option("-ids", "--operation-ids", metavar="ID", nargs="+", dest="ids",
           help="execution ids of calls, such as 3_1; what runs inside them too")  # fmt: skip
    option("-opname", "--operation-name", metavar="NAME", nargs="+", dest="names",
           help="parts of operators' names, such as linear")  # fmt: skip
    option("--path", metavar="GLOB", nargs="+", dest="paths",
           help="paths of modules, such as model.layers.3")  # fmt: skip
    option("-c", "--csv-path", metavar="CSV", dest="cases",
           help="check only the calls that the rows of this file name: msit's"
           " operation_tensors csv, or the csv of a check; it gives the parameters that an ATB"
           " dump lacks")  # fmt: skip
    option("-metric", "--metric", nargs="+", choices=METRICS, default=["rel"], dest="metrics",
           help="msit's metrics to report (default: rel)")  # fmt: skip
    option("-device", "--device", metavar="DEVICE", default="cpu",
           help="where the reference is computed (default: cpu)")  # fmt: skip
    option("-dtype", "--reference-dtype", choices=REFERENCES, dest="dtype",
           help="dtype of the reference; own: that of the recorded tensors (default: float64; own"
           " with -threads)")  # fmt: skip
    option(
        "-threads",
        "--threads",
        type=int,
        metavar="N",
        help="threads that compute the reference: does the result depend on their number?",
    )
    option(
        "-rerun",
        "--rerun",
        action="store_true",
        help="run wrong operators here too: is the recorded output wrong, or the operator?",
    )
    option("-pmode", "--precision-mode", choices=tuple(MODES), default="keep_origin_dtype",
           dest="mode", help="round recorded floating tensors to this dtype first")  # fmt: skip
    option("-alg", "--custom-algorithms", metavar="FILE.py:FUNCTION", nargs="+", default=[],
           dest="algorithms", help="report your own comparisons too: function(golden, mine) ->"
           " (number, message); the file is run")  # fmt: skip
    option("--weights", metavar="FILE.gguf",
           help="the file that ran, for a run of llama.cpp recorded without weights")  # fmt: skip
    option("--cluster", metavar="ADDRESS", help=CLUSTER_HELP)
    option("-j", "--jobs", type=int, metavar="N", default=1, help="processes (default: 1)")


def options(args: Mapping[str, object]) -> dict[str, Any]:
    """Return the arguments of `opcheck` among the parsed ones."""
    return {name: args[name] for name in _OPTIONS}
