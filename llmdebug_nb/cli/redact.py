"""``llmdebug redact``: a copy of a run that can be shared."""

from __future__ import annotations

import argparse

from llmdebug_nb.cli.command import OK, Commands, add_command, add_run, say


def add(commands: Commands) -> None:
    """Declare the command."""
    parser = add_command(
        commands, "redact", _run, "write a copy of a dump without values, sources and texts",
        "Write a copy of a run without values, sources, texts and token ids, to share it. Two such"
        " copies compare by statistics. The run itself is unchanged.",
    )  # fmt: skip
    add_run(parser)
    parser.add_argument(
        "-o", "--output", metavar="OUT", help="the new folder (default: RUN.redacted)"
    )


def _run(args: argparse.Namespace) -> int:
    from llmdebug_nb.app.runs import describe_run, redact_run
    from llmdebug_nb.core.places import shown

    run = redact_run(args.golden, args.output)
    say(describe_run(run))
    say(f"what it still tells: llmdebug info --privacy {shown(str(run.path))}")
    return OK
