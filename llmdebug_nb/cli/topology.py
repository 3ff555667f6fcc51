"""``llmdebug topology`` and ``llmdebug onnx``: the call tree of a run."""

from __future__ import annotations

import argparse
import json
import os

from llmdebug_nb.cli.command import OK, Commands, add_command, add_step, run_name, say


def add_topology(commands: Commands) -> None:
    """Declare ``topology``."""
    parser = add_command(
        commands, "topology", _topology, "print the call tree of a dump, or write it as JSON",
        "Print the calls of a step with their execution ids, types and shapes, or write them as"
        " ATB's topology JSON.",
    )  # fmt: skip
    add = parser.add_argument
    add("path", metavar="RUN", type=run_name,
        help="name or path of a run, or a topology in a JSON file")  # fmt: skip
    add("-o", "--output", metavar="DIR",
        help="write model/PID/NAME.json and layer/PID/NAME.json there")  # fmt: skip
    add("--json", action="store_true", help="one JSON object, of the model")
    add_step(parser)


def _topology(args: argparse.Namespace) -> int:
    from llmdebug_nb.app import topology

    if args.output:
        files = topology.write_topology(args.path, args.output, args.step)
        say(f"written: {len(files)} files in {args.output}, the first one {files[0]}")
        return OK
    tree = topology.read(args.path, args.step)
    say(json.dumps(tree.to_json()) if args.json else tree)
    return OK


def add_onnx(commands: Commands) -> None:
    """Declare ``onnx``."""
    parser = add_command(
        commands, "onnx", _onnx, "write the topology of a dump as an ONNX model, for Netron",
        "Write the topology of a dump, or one that ATB's tools wrote, as an ONNX model to look at"
        " in Netron.",
    )  # fmt: skip
    add = parser.add_argument
    add("path", metavar="RUN|X.json", type=run_name,
        help="name or path of a run, or a topology as JSON")  # fmt: skip
    add("-o", "--output", metavar="F", help="the file (default: X.onnx, or RUN.onnx)")
    add("--level", type=int, default=-1, metavar="N",
        help="1: layers, 2: the calls in them, …, -1: the innermost operations"
        " (default: %(default)s)")  # fmt: skip
    add_step(parser)


def _onnx(args: argparse.Namespace) -> int:
    from llmdebug_nb.app.topology import to_onnx

    stem = os.path.splitext(os.path.basename(os.path.normpath(args.path)))[0]
    say(f"written: {to_onnx(args.path, args.output or f'{stem}.onnx', args.level, args.step)}")
    return OK
