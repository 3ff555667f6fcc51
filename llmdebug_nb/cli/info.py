"""``llmdebug info``: the contents of a run."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

from llmdebug_nb.cli.command import OK, Commands, add_command, run_name, say
from llmdebug_nb.core.printable import printable


def add(commands: Commands) -> None:
    """Declare the command."""
    text = "print the contents of a dump"
    parser = add_command(commands, "info", _run, text, f"{text.capitalize()}.")
    parser.add_argument(
        "path", metavar="RUN", type=run_name,
        help="name or path of a run, or a dump of another tool",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="one JSON object")
    parser.add_argument(
        "--ids",
        action="store_true",
        help="the calls of a step with their execution ids, types and shapes",
    )
    parser.add_argument(
        "--privacy",
        action="store_true",
        help="what it holds that tells about a text, a program or a person",
    )


def _run(args: argparse.Namespace) -> int:
    from llmdebug_nb.app.runs import open_run, upload_text

    run = open_run(args.path)
    if args.privacy:
        privacy = run.privacy()
        rows = [asdict(each) for each in privacy.holdings]
        say(json.dumps(rows) if args.json else str(privacy))
    elif args.json:
        say(json.dumps(run.info()))
    elif args.ids:
        from llmdebug_nb.app.topology import topology

        say(topology(run))
    else:
        from llmdebug_nb.core.places import shown
        from llmdebug_nb.show.run_view import RunView

        for key, value in {**run.info(), "path": shown(run.where)}.items():
            say(f"{key:11} {printable(str(value))}")
        if uploaded := upload_text(run):
            say(f"{'upload':11} {printable(uploaded)}")
        say("")
        say(RunView(run).text())
    return OK
