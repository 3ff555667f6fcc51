"""``llmdebug doctor``: what differs between two set-ups, or what works on this machine."""

from __future__ import annotations

import argparse

from llmdebug_nb.cli.command import DIVERGED, INCOMPARABLE, OK, Commands, say
from llmdebug_nb.core.errors import OptionError
from llmdebug_nb.core.setups import SAME, SUSPICIOUS

_DESCRIPTION = (
    "Tell what differs between two set-ups, before any comparison of tensors: versions, switches,"
    " seeds, configs, the ids of the prompt, every weight. The most suspicious comes first, with"
    " what it can cause and what to do."
)
_EXAMPLES = """\
examples:
  llmdebug doctor golden mine
  llmdebug doctor golden path/of/checkpoint
  llmdebug doctor path/of/checkpoint model.gguf
  llmdebug doctor --self
Exit status: 0 nothing suspicious, 1 something is, 2 nothing could be compared, 3 llmdebug itself
failed. With --self: 0 all that is needed works, 1 something does not.
"""


def add(commands: Commands) -> None:
    """Declare the command."""
    parser = commands.add_parser(
        "doctor", allow_abbrev=False, help="what differs between two set-ups",
        description=_DESCRIPTION, epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="llmdebug doctor [options] (GOLDEN MINE | --self)",
    )  # fmt: skip
    what = "name or path of a run, folder of a checkpoint, or GGUF file"
    parser.add_argument("golden", metavar="GOLDEN", nargs="?", help=what)
    parser.add_argument("mine", metavar="MINE", nargs="?", help=what)
    parser.add_argument("--self", action="store_true", dest="own",
                        help="what works on this machine, and what is missing")  # fmt: skip
    parser.add_argument("--tokenizer", metavar="DIR", action="append",
                        help="folder or known name of a tokenizer; twice: golden's, mine's"
                        )  # fmt: skip
    parser.add_argument("--csv", metavar="F", help="write a table of the differences")
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    """Compare, print the result, and return the exit status."""
    if args.own:
        return _own(args)
    if args.mine is None:
        raise OptionError("expected GOLDEN and MINE, or --self")
    from llmdebug_nb.app.doctor.check import doctor
    from llmdebug_nb.app.logits.arguments import tokenizer

    given = [tokenizer(where) for where in args.tokenizer or ()]
    if len(given) > 2:
        raise OptionError(f"tokenizer: {len(given)} of them; expected one, or two")
    both = None if not given else (given[0], given[-1])
    diagnosis = doctor(args.golden, args.mine, tokenizer=both)
    say(diagnosis)
    if args.csv:
        say(f"written: {diagnosis.to_csv(args.csv)}")
    return {SAME: OK, SUSPICIOUS: DIVERGED}.get(diagnosis.verdict, INCOMPARABLE)


def _own(args: argparse.Namespace) -> int:
    if args.golden is not None:
        raise OptionError("--self looks at this machine: leave out the runs")
    from llmdebug_nb.app.doctor.own import parts
    from llmdebug_nb.show.doctor import own_text

    found = parts()
    say(own_text(found))
    return DIVERGED if any(each.works is False for each in found) else OK
