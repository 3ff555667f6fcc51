"""`%llmlockstep`: two models of the notebook run side by side, and are compared without dumps."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from IPython.core.error import UsageError
from IPython.core.magic import line_magic, magics_class
from IPython.core.magic_arguments import magic_arguments

from llmdebug_nb.app.lockstep import arguments
from llmdebug_nb.app.lockstep.lockstep import lockstep
from llmdebug_nb.app.lockstep.peer import lockstep_peer
from llmdebug_nb.app.report import Report
from llmdebug_nb.app.upstream import compare_arguments
from llmdebug_nb.notebook.magic_line import declared, one_line, parse
from llmdebug_nb.notebook.namespace import NamespaceMagics

if TYPE_CHECKING:
    from collections.abc import Callable

    from IPython.core.interactiveshell import InteractiveShell

_INPUTS = (
    "a tensor, a tuple or dict of arguments, or a function that is given a model and runs it;"
    " quoted if it has blanks"
)


@magics_class
class LockstepMagic(NamespaceMagics):
    """%llmlockstep."""

    def __init__(self, shell: InteractiveShell, show: Callable[[Report, str], None]) -> None:
        """``show``: shows a report at a level of messages, and makes it a variable."""
        super().__init__(shell)
        self._show = show

    @magic_arguments()
    @declared(lambda parser: arguments.declare(parser, "a model", _INPUTS))
    @line_magic
    def llmlockstep(self, line: str) -> Report | None:
        """Run two models side by side, compare each call as soon as both have made it; no dumps.

        Examples: ``%llmlockstep golden mine --inputs ids``,
        ``%llmlockstep golden mine --inputs "lambda model: model.generate(ids)" --stop``,
        ``%llmlockstep mine --inputs ids --listen tcp://127.0.0.1:5005`` and, in another notebook,
        ``%llmlockstep golden --inputs ids --connect tcp://127.0.0.1:5005``
        """
        args = parse(self.llmlockstep, line)
        given = vars(args)
        if args.inputs is None:
            raise UsageError("%llmlockstep: --inputs is missing: a tensor, a dict, or a function")
        with one_line():
            if args.listen is not None:
                model = self._value(arguments.offered(given, self.llmlockstep.parser))
                inputs = self._value(args.inputs)
                lockstep_peer(model, args.listen, inputs, **arguments.connection(given))
                return None
            golden, mine = map(self._value, arguments.sides(given))
            space = self._namespace
            report = lockstep(
                golden, mine, self._value(args.inputs),
                mapping=space.get(args.map), limits=space.get(args.limits),
                metrics=[space.get(name) for name in args.metric or ()],
                calibrate=[space.run(name) for name in args.calibrate or ()] or None,
                **arguments.options(given),
            )  # fmt: skip
            self._show(report, args.log_level)
            for text in compare_arguments.write_results(report, args):
                print(text)
        return report

    def _value(self, text: str) -> Any:
        """Return a model or inputs, or the address of another process. Raises UsageError."""
        if arguments.is_address(text):
            return text
        return self._namespace.evaluate(text, "%llmlockstep")
