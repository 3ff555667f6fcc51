"""``llmdebug logits``: compare the logits of two programs, token by token."""

from __future__ import annotations

import argparse
import contextlib
from pathlib import Path

from llmdebug_nb.app.logits import arguments
from llmdebug_nb.cli.command import DIVERGED, INCOMPARABLE, OK, Commands, say
from llmdebug_nb.comparison.token_checks import FAIL, PASS
from llmdebug_nb.core.errors import OptionError

_DESCRIPTION = (
    "Compare the logits of two runs, or of two dumps of other tools, token by token: KL, cosine,"
    " L1, ULP, rank and probability of golden's token, and the first token that differs. Only"
    " tokens that follow the same tokens are compared; the others are counted. Or run one command"
    " twice, and name the operator that differs first."
)
_EXAMPLES = """\
examples:
  llmdebug logits golden mine --html logits.html
  llmdebug logits msit_dump_1 msit_dump_2 --rule msit --csv logits.csv
  llmdebug logits transformers engine --by-layer path/of/checkpoint
  llmdebug logits --exec "python generate.py"
Exit status: 0 all compared tokens pass, 1 one fails, 2 nothing was compared, 3 llmdebug itself
failed.
"""


def add(commands: Commands) -> None:
    """Declare the command."""
    parser = commands.add_parser(
        "logits", allow_abbrev=False, help="compare logits, token by token",
        description=_DESCRIPTION, epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="llmdebug logits [options] (GOLDEN MINE | --exec COMMAND | -- COMMAND …)",
    )  # fmt: skip
    parser.add_argument("golden", metavar="GOLDEN", nargs="?", help="the reference: run or dump")
    parser.add_argument("mine", metavar="MINE", nargs="?", help="the run or dump to judge")
    parser.add_argument("--exec", metavar="COMMAND", help="a command to run twice")
    parser.add_argument("--tokenizer", metavar="DIR", help="folder or known name of a tokenizer")
    parser.add_argument(
        "--by-layer",
        metavar="DIR",
        help="folder of the model of one run: put the"
        " other run's values into it, and say what each part contributes",
    )
    arguments.declare(parser)
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    """Compare, print the result, and return the exit status."""
    status = {PASS: OK, FAIL: DIVERGED}
    if args.golden is None and not (args.exec is None and args.command is None):
        from llmdebug_nb.app.logits.command import repeated_command
        from llmdebug_nb.cli.command import command_of

        repeated = repeated_command(command_of(args, "logits"))
        say(repeated)
        return status.get(repeated.verdict, INCOMPARABLE)
    if args.mine is None or args.exec is not None or args.command is not None:
        raise OptionError("expected GOLDEN and MINE, or one command: --exec 'python run.py'")
    from llmdebug_nb.app.logits.check import LogitsCheck, logits

    tokenizer = None if args.tokenizer is None else arguments.tokenizer(args.tokenizer)
    check = logits(args.golden, args.mine, tokenizer=tokenizer, **arguments.options(vars(args)))
    assert isinstance(check, LogitsCheck)
    say(check)
    if args.by_layer is not None:
        say(f"\n{check.by_layer(arguments.model(args.by_layer))}")
    for target, write in ((args.csv, check.to_csv), (args.html, check.to_html)):
        if target:
            with contextlib.suppress(OSError):  # writing says what is wrong
                Path(target).parent.mkdir(parents=True, exist_ok=True)
            say(f"written: {write(target)}")
    return status.get(check.verdict, INCOMPARABLE)
