"""``llmdebug ranks``: the ranks of a run against each other."""

from __future__ import annotations

import argparse
import json

from llmdebug_nb.cli.command import DIVERGED, INCOMPARABLE, OK, Commands, add_command, run_name, say


def add(commands: Commands) -> None:
    """Declare the command."""
    parser = add_command(
        commands, "ranks", _run, "hold the ranks of a dump against each other",
        "Check that replicas of weights, gradients and tensors are equal on all ranks, and that"
        " collectives gave what their ranks put in. The exit status is 1 if something is wrong, 2"
        " if nothing could be checked.",
    )  # fmt: skip
    parser.add_argument("path", metavar="RUN", type=run_name, help="name or path of a run")
    parser.add_argument("--json", action="store_true", help="one JSON object")


def _run(args: argparse.Namespace) -> int:
    from llmdebug_nb.app.rank_check import check_ranks

    found = check_ranks(args.path)
    if args.json:
        faults = [
            {"kind": each.kind, "path": each.site.path, "step": each.site.step,
             "ranks": each.ranks, "says": each.says}
            for each in found.faults
        ]  # fmt: skip
        say(json.dumps({
            "verdict": found.verdict, "ranks": found.ranks, "replicas": found.replicas,
            "collectives": found.collectives, "faults": faults, "unchecked": found.unchecked,
        }))  # fmt: skip
    else:
        say(found)
    return {"agree": OK, "do not agree": DIVERGED}.get(found.verdict, INCOMPARABLE)
