"""``llmdebug report`` and ``llmdebug export``: reports, explorers and figures as files."""

from __future__ import annotations

import argparse

from llmdebug_nb.cli.command import OK, Commands, add_command, add_run, say, say_written
from llmdebug_nb.core.errors import OptionError


def add_report(commands: Commands) -> None:
    """Declare ``report``."""
    parser = add_command(
        commands, "report", _report, "write an HTML page of a dump, or of two compared",
        "Write one self-contained HTML page: of one dump, or of two dumps compared.",
    )  # fmt: skip
    add_run(parser, second=True)
    parser.add_argument(
        "-o", "--output", metavar="F", default="llmdebug_report.html",
        help="the file (default: %(default)s)",
    )  # fmt: skip


def _report(args: argparse.Namespace) -> int:
    from llmdebug_nb.app.export import write_report

    say(f"written: {write_report(args.golden, args.mine, args.output)}")
    return OK


def add_export(commands: Commands) -> None:
    """Declare ``export``."""
    parser = add_command(
        commands, "export", _export,
        "write the explorer of a dump, or of two compared, as a page or a figure; or a dump as"
        " another tool's",
        "Write what the explorer shows: as one HTML page that needs no kernel, or as a figure."
        " The suffix of F decides. With --layout, write all tensors of RUN into the new folder F,"
        " as another tool writes its dumps.",
    )  # fmt: skip
    add_run(parser, second=True)
    add = parser.add_argument
    add(
        "-o",
        "--output",
        metavar="F",
        required=True,
        help="the file: .html, .png, .svg or .pdf; with --layout, a new folder",
    )
    add(
        "--layout",
        metavar="L",
        help="msit, msprobe, atb, atb-msprobe, npy; of compiled code also fx, fx-old, ge",
    )
    add("--at", metavar="PATH", help="show the tensor of this module")
    add("--role", default="output", help="input or output of that module (default: %(default)s)")
    add("--step", type=int, metavar="N", help="at this generated token")
    add("--side", metavar="S", help="golden, mine, difference or all")
    add("--slice", metavar="INDEX", help="part of the tensor: 0,3,:,:")
    add("--show", metavar="P", action="append", default=[],
        help="only this picture; may be repeated")  # fmt: skip


def _export(args: argparse.Namespace) -> int:
    if args.layout is not None:
        return _export_dump(args)
    from llmdebug_nb.app.compare import compare
    from llmdebug_nb.app.export import export

    what = compare(args.golden, args.mine) if args.mine else args.golden
    path = export(
        what, args.output, at=args.at, role=args.role, step=args.step, side=args.side,
        slice=args.slice, show=args.show,
    )  # fmt: skip
    say(f"written: {path}")
    return OK


def _export_dump(args: argparse.Namespace) -> int:
    from llmdebug_nb.app.convert import export_dump

    if args.mine:
        raise OptionError("--layout is for one run: leave MINE out")
    say_written(export_dump(args.golden, args.output, args.layout))
    return OK
