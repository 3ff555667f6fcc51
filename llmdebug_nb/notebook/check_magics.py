"""The magics of checks that need no deep comparison: `%llmlogits`, `%llmdoctor`."""

from __future__ import annotations

import argparse

from IPython.core.error import UsageError
from IPython.core.magic import line_magic, magics_class
from IPython.core.magic_arguments import argument, magic_arguments

from llmdebug_nb.app.doctor.check import Diagnosis, doctor
from llmdebug_nb.app.doctor.own import parts
from llmdebug_nb.app.logits import arguments as logits_arguments
from llmdebug_nb.app.logits.check import LogitsCheck, logits
from llmdebug_nb.app.logits.command import repeated_command
from llmdebug_nb.app.logits.repeat import Repeated
from llmdebug_nb.notebook.magic_line import declared, one_line, parse, write
from llmdebug_nb.notebook.namespace import NamespaceMagics
from llmdebug_nb.show.doctor import own_text


def _logits_options(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of %llmlogits: two runs, or a run and a model, or one program."""
    add = parser.add_argument
    add("golden", nargs="?", help="the reference: a run, its name or path; or a model to run"
        " twice")  # fmt: skip
    add("mine", nargs="?", help="a run, its name or path, or the variable of a live model")
    add("--inputs", metavar="EXPR", help="of a model that is run twice: a tensor, or a dict")
    add("--exec", metavar="COMMAND", help="a command to run twice")
    add("--tokenizer", metavar="EXPR", help="a tokenizer: texts in place of ids")
    add("--by-layer", metavar="EXPR", help="the live model of one run: what each part of it"
        " contributes to the difference")  # fmt: skip
    logits_arguments.declare(parser)


@magics_class
class CheckMagics(NamespaceMagics):
    """%llmlogits, %llmdoctor."""

    @magic_arguments()
    @declared(_logits_options)
    @line_magic
    def llmlogits(self, line: str) -> LogitsCheck | Repeated:
        """Compare the logits of two runs, or of a run and a live model, token by token.

        Examples: ``%llmlogits golden mine``, ``%llmlogits golden port --tokenizer tok``,
        ``%llmlogits model --inputs ids`` (one model twice: is it deterministic?)
        """
        args = parse(self.llmlogits, line)
        space = self._namespace
        if (args.golden is None) == (args.exec is None):
            raise UsageError("%llmlogits: name two runs, a run and a model, or --exec a command")
        with one_line():
            if args.exec is not None:
                return repeated_command(args.exec, output=write)
            golden, mine = space.get(args.golden), space.get(args.mine)
            if mine is None:
                return logits(golden, inputs=space.evaluate(args.inputs, "%llmlogits"))
            tokenizer = space.evaluate(args.tokenizer, "%llmlogits")
            chosen = logits_arguments.options(vars(args))
            check = logits(golden, mine, tokenizer=tokenizer, **chosen)
            assert isinstance(check, LogitsCheck)
            if args.by_layer is not None:
                print(check.by_layer(space.evaluate(args.by_layer, "%llmlogits")))
            for target, save in ((args.csv, check.to_csv), (args.html, check.to_html)):
                if target:
                    print(f"written: {save(target)}")
            return check

    @magic_arguments()
    @argument(
        "golden", nargs="?", help="a run, its name or path, a model, or a checkpoint's folder"
    )
    @argument("mine", nargs="?", help="another one")
    @argument("--self", action="store_true", dest="own", help="what works on this machine")
    @argument("--tokenizer", metavar="EXPR", help="a tokenizer, or a pair: golden's and mine's")
    @argument("--csv", metavar="F", help="write a table of the differences")
    @line_magic
    def llmdoctor(self, line: str) -> Diagnosis | None:
        """Tell what differs between two set-ups, the most suspicious first.

        Examples: ``%llmdoctor golden mine``, ``%llmdoctor model path/of/checkpoint``,
        ``%llmdoctor --self``
        """
        args = parse(self.llmdoctor, line)
        if args.own is (args.golden is not None) or (args.mine is None) is not args.own:
            raise UsageError("%llmdoctor: name two runs, models or checkpoints, or say --self")
        with one_line():
            if args.own:
                print(own_text(parts()))
                return None
            space = self._namespace
            tokenizer = space.evaluate(args.tokenizer, "%llmdoctor")
            found = doctor(space.get(args.golden), space.get(args.mine), tokenizer=tokenizer)
            if args.csv:
                print(f"written: {found.to_csv(args.csv)}")
            return found
