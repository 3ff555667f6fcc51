"""The command line: ``llmdebug dump | info | compare | report | reduce | convert | export | tables | timeline | topology | onnx``.
Parse, call one use case, print."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from typing import Any

from llmdebug_nb.app.launching import arguments
from llmdebug_nb.cli import dump
from llmdebug_nb.core.errors import LLMDebugError

_DUMP = "Run a command as it is, and record what the models in it compute: in all its Python processes, into one run."
MATCH, DIVERGED, FAILED, PIPE_CLOSED = 0, 1, 2, 141


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status: 0 fine (or no divergence), 1 diverged, 2 could not do it."""
    argv = sys.argv[1:] if argv is None else list(argv)
    ours, command = dump.split(argv) if argv[:1] == ["dump"] else (argv, None)
    args = _parser().parse_args(ours)
    args.command = command
    try:
        status: int = args.run(args)
    except LLMDebugError as error:
        print(f"llmdebug: {error}", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        print("llmdebug: interrupted", file=sys.stderr)
        return FAILED
    except BrokenPipeError:  # the reader (head, say) has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return PIPE_CLOSED
    return status


def _version() -> str:
    """Return the version of the package that is running: installed metadata may be absent, or of another one."""
    return str(vars(sys.modules[__name__.partition(".")[0]])["__version__"])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="llmdebug", description="Numerical debugger for LLMs: look at dumps and compare them."
    )
    parser.add_argument(
        "--version", action=_Version, nargs=0, help="versions, and whether the C kernel is used"
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    dumping = commands.add_parser(
        "dump",
        allow_abbrev=False,
        help="run a command, and record what its models compute",
        description=_DUMP,
    )
    arguments.declare(dumping)
    dumping.set_defaults(run=dump.run)

    info = commands.add_parser(
        "info", help="say what a dump holds", description="Say what a dump holds."
    )
    info.add_argument("path", metavar="RUN", help="name or path of a run, or a foreign dump folder")
    info.add_argument("--json", action="store_true", help="one JSON object")
    info.add_argument(
        "--ids",
        action="store_true",
        help="the calls of a step with their execution ids, types and shapes",
    )
    info.set_defaults(run=_info)

    compare = commands.add_parser(
        "compare",
        help="compare two dumps",
        description="Compare two dumps. Exit status: 0 match, within noise or as expected, 1 diverged, 2 could not compare.",
    )
    compare.add_argument("golden", metavar="GOLDEN", help="the run to hold against")
    compare.add_argument("mine", metavar="MINE", help="the run in question")
    compare.add_argument(
        "--limits", metavar="F", help="fixed limits by path and dtype: a YAML or JSON file"
    )
    compare.add_argument(
        "--calibrate",
        metavar="RUN",
        action="append",
        help="another recording of golden: what they differ by is noise",
    )
    compare.add_argument(
        "--metric",
        metavar="F.py:FUNC",
        action="append",
        help="a metric of yours, (golden, mine) -> float; its file is run",
    )
    compare.add_argument("-o", "--csv", metavar="CSV", help="write the table of differences")
    compare.add_argument("--html", metavar="F", help="write the report as one HTML page")
    compare.add_argument(
        "--map", metavar="F", help="YAML or JSON file: which module of GOLDEN is which of MINE"
    )
    compare.add_argument(
        "--no-explain", action="store_true", help="skip the search for what is to blame"
    )
    compare.add_argument(
        "--expect", metavar="GLOB", action="append", default=[],
        help="mark what such modules make as expected, in this comparison and those to come",
    )  # fmt: skip
    compare.add_argument("--comment", metavar="TEXT", default="", help="why that is expected")
    compare.add_argument(
        "--unexpect",
        metavar="GLOB",
        action="append",
        default=[],
        help="take a mark back: its glob as it was given",
    )
    compare.set_defaults(run=_compare)

    report = commands.add_parser(
        "report",
        help="write an HTML page of a dump, or of two compared",
        description="Write one self-contained HTML page: of one dump, or of two dumps compared.",
    )
    report.add_argument("golden", metavar="RUN", help="name or path of a run")
    report.add_argument(
        "mine", metavar="MINE", nargs="?", help="a second run to compare with the first"
    )
    report.add_argument(
        "-o",
        "--output",
        metavar="F",
        default="llmdebug_report.html",
        help="the file (default: %(default)s)",
    )
    report.set_defaults(run=_report)

    reduce = commands.add_parser(
        "reduce",
        help="keep figures of each tensor in place of its values",
        description="Write a smaller run: least and greatest value, or quantiles, of each tensor in place of all its values.",
    )
    reduce.add_argument("golden", metavar="RUN", help="name or path of a run")
    reduce.add_argument(
        "--to", metavar="R", default="minmax", help="minmax or quantile:N (default: %(default)s)"
    )
    reduce.add_argument("--name", metavar="NAME", help="of the new run (default: RUN.minmax)")
    reduce.add_argument(
        "--replace", action="store_true", help="remove the old run once the new one is on the disk"
    )
    reduce.set_defaults(run=_reduce)

    convert = commands.add_parser(
        "convert",
        help="write a run of compiled code as torchair's tools read it",
        description="Write a run of compiled code in the folders of torchair's FX or GE dumps.",
    )
    convert.add_argument("golden", metavar="RUN", help="name or path of a run")
    convert.add_argument(
        "--to", metavar="L", default="fx", help="fx, fx-old or ge (default: %(default)s)"
    )
    convert.add_argument("-o", "--output", metavar="DIR", required=True, help="a new folder")
    convert.set_defaults(run=_convert)

    export = commands.add_parser(
        "export",
        help="write the explorer of a dump, or of two compared, as a page or a figure",
        description="Write what an explorer shows: as one HTML page that needs no kernel, or as a figure. The suffix of F decides.",
    )
    export.add_argument("golden", metavar="RUN", help="name or path of a run")
    export.add_argument(
        "mine", metavar="MINE", nargs="?", help="a second run to compare with the first"
    )
    export.add_argument(
        "-o", "--output", metavar="F", required=True, help="the file: .html, .png, .svg or .pdf"
    )
    export.add_argument("--at", metavar="PATH", help="show the tensor of this module")
    export.add_argument(
        "--role", default="output", help="input or output, of that module (default: %(default)s)"
    )
    export.add_argument("--step", type=int, metavar="N", help="at this generated token")
    export.add_argument("--side", metavar="S", help="golden, mine, difference or all")
    export.add_argument("--slice", metavar="INDEX", help="which part of the tensor: 0,3,:,:")
    export.add_argument(
        "--show",
        metavar="P",
        action="append",
        default=[],
        help="only this picture; may be repeated",
    )
    export.set_defaults(run=_export)

    tables = commands.add_parser(
        "tables",
        help="write the tables of a run as csv files",
        description="Write operators, kernels and host times of a run as csv files, in the folders and columns of msit's dumps.",
    )
    tables.add_argument("golden", metavar="RUN", help="name or path of a run")
    tables.add_argument(
        "-o",
        "--output",
        metavar="DIR",
        default="llmdebug_tables",
        help="the folder (default: %(default)s)",
    )
    tables.set_defaults(run=_tables)

    timeline = commands.add_parser(
        "timeline",
        help="say where the time of a step went",
        description="Print what took most time in a step of a run recorded with profile, and the longest gaps between operators.",
    )
    timeline.add_argument("golden", metavar="RUN", help="name or path of a run")
    timeline.add_argument(
        "--step",
        type=int,
        metavar="N",
        help="of this generated token (default: the first recorded)",
    )
    timeline.add_argument("-o", "--output", metavar="F", help="also draw it: .png, .svg or .pdf")
    timeline.set_defaults(run=_timeline)
    _add_topologies(commands)
    return parser


def _add_topologies(commands: Any) -> None:
    topology = commands.add_parser(
        "topology",
        help="print what calls what in a dump, or write it as JSON",
        description="Print the calls of a step with their execution ids, types and shapes, or write them as ATB's topology JSON.",
    )
    topology.add_argument(
        "path", metavar="RUN", help="name or path of a run, or a topology that was written as JSON"
    )
    topology.add_argument(
        "-o",
        "--output",
        metavar="DIR",
        help="write model/PID/NAME.json and layer/PID/NAME.json there",
    )
    topology.add_argument("--json", action="store_true", help="one JSON object, of the model")
    topology.add_argument(
        "--step",
        type=int,
        metavar="N",
        help="of this generated token (default: the first recorded)",
    )
    topology.set_defaults(run=_topology)

    onnx = commands.add_parser(
        "onnx",
        help="write the topology of a dump as an ONNX model, for Netron",
        description="Write the topology of a dump, or one that ATB's tools wrote, as an ONNX model to look at in Netron.",
    )
    onnx.add_argument(
        "path", metavar="RUN|X.json", help="name or path of a run, or a topology as JSON"
    )
    onnx.add_argument("-o", "--output", metavar="F", help="the file (default: X.onnx, or RUN.onnx)")
    onnx.add_argument(
        "--level", type=int, default=-1, metavar="N",
        help="1: layers, 2: what runs in them, …, -1: the innermost operations (default: %(default)s)",
    )  # fmt: skip
    onnx.add_argument(
        "--step",
        type=int,
        metavar="N",
        help="of this generated token (default: the first recorded)",
    )
    onnx.set_defaults(run=_onnx)


class _Version(argparse.Action):
    """Says our version, that of torch, and why the C kernel isn't used where it isn't."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        import torch

        from llmdebug_nb.core.kernels import native

        why = native.why_not()
        kernel = f"without the C kernel ({why})" if why else "with the C kernel"
        print(f"llmdebug {_version()}, torch {torch.__version__}, {kernel}")
        parser.exit()


def _info(args: argparse.Namespace) -> int:
    from llmdebug_nb.app import api

    run = api.open_run(args.path)
    if args.json:
        print(json.dumps(run.info()))
        return MATCH
    if args.ids:
        from llmdebug_nb.app import topology

        print(topology.topology(run))
        return MATCH
    from llmdebug_nb.show.run_view import RunView

    for key, value in run.info().items():
        print(f"{key:11} {value}")
    print("\n" + RunView(run).text())
    return MATCH


def _compare(args: argparse.Namespace) -> int:
    from llmdebug_nb.app import api
    from llmdebug_nb.core.findings import EXPECTED

    report = api.compare(
        args.golden,
        args.mine,
        explain=not args.no_explain,
        mapping=args.map,
        limits=args.limits,
        calibrate=args.calibrate,
        metrics=args.metric,
    )
    for glob in args.unexpect:
        report.unexpect(glob)
    for glob in args.expect:
        report.expect(glob, args.comment)
    print(report)
    for target, write in ((args.csv, report.to_csv), (args.html, report.to_html)):
        if target:
            print(f"written: {write(target)}")
    return MATCH if report.verdict in ("match", "within_noise", EXPECTED) else DIVERGED


def _report(args: argparse.Namespace) -> int:
    from llmdebug_nb.app import api

    target = api.write_report(args.golden, args.mine, args.output)
    print(f"written: {target}")
    return MATCH


def _reduce(args: argparse.Namespace) -> int:
    from llmdebug_nb.app import api

    run = api.reduce_run(args.golden, to=args.to, name=args.name, replace=args.replace)
    print(api.kept_line(run))
    return MATCH


def _convert(args: argparse.Namespace) -> int:
    from llmdebug_nb.app import api
    from llmdebug_nb.show.words import count_text

    written = api.convert(args.golden, args.output, args.to)
    left = "".join(f"; {count:,} left out, {why}" for why, count in written.left_out.items())
    print(f"written: {count_text(written.tensors, 'tensor')} to {written.folder}{left}")
    return MATCH


def _export(args: argparse.Namespace) -> int:
    from llmdebug_nb.app import api

    what = api.compare(args.golden, args.mine) if args.mine else args.golden
    state = {name: getattr(args, name) for name in ("at", "role", "step", "side", "slice", "show")}
    print(f"written: {api.export(what, args.output, **state)}")
    return MATCH


def _tables(args: argparse.Namespace) -> int:
    from llmdebug_nb.app import api

    for path in api.write_tables(args.golden, args.output):
        print(f"written: {path}")
    return MATCH


def _timeline(args: argparse.Namespace) -> int:
    from llmdebug_nb.app import api

    shown = api.timeline(args.golden, args.step)
    print(shown)
    if args.output:
        print(f"written: {shown.save(args.output)}")
    return MATCH


def _topology(args: argparse.Namespace) -> int:
    from llmdebug_nb.app import topology

    if args.output:
        files = topology.write_topology(args.path, args.output, args.step)
        print(f"written: {len(files)} files in {args.output}, the first one {files[0]}")
        return MATCH
    found = topology.read(args.path, args.step)
    print(json.dumps(found.to_json()) if args.json else found)
    return MATCH


def _onnx(args: argparse.Namespace) -> int:
    from llmdebug_nb.app import topology

    target = (
        args.output or os.path.splitext(os.path.basename(os.path.normpath(args.path)))[0] + ".onnx"
    )
    print(f"written: {topology.to_onnx(args.path, target, args.level, args.step)}")
    return MATCH
