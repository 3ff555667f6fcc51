"""``llmdebug copy``: copy a run to a remote store, or from one."""

from __future__ import annotations

import argparse

from llmdebug_nb.cli.command import OK, Commands, add_command, add_run, say


def add(commands: Commands) -> None:
    """Declare the command."""
    parser = add_command(
        commands, "copy", _run, "copy a run to a remote store, or from one",
        "Copy a run to a remote store that fsspec reaches (s3://, gs://, hf:// …), or from one to"
        " this machine. What is in the store already is not uploaded again, so this also ends an"
        " upload that failed or was interrupted.",
    )  # fmt: skip
    add_run(parser)
    parser.add_argument(
        "to", metavar="TO", nargs="?",
        help="the URL or folder that will hold the copy (default: where the run was recorded to,"
        " or the folder of runs)",
    )  # fmt: skip


def _run(args: argparse.Namespace) -> int:
    from llmdebug_nb.app.copying import copy_run
    from llmdebug_nb.app.runs import describe_run

    say(describe_run(copy_run(args.golden, args.to)))
    return OK
