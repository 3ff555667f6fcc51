"""%%llmstep halts the program of its cell; later cells, or buttons, let it go on."""

from __future__ import annotations

from typing import TYPE_CHECKING

from IPython.core.error import UsageError
from IPython.core.magic import line_cell_magic, magics_class
from IPython.core.magic_arguments import argument, magic_arguments

from llmdebug_nb.app.stepping import COMMANDS, Stepper, Stop, step
from llmdebug_nb.core.errors import nearest
from llmdebug_nb.notebook.magic_line import one_line, parse
from llmdebug_nb.notebook.namespace import NamespaceMagics

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

STATUS = "status"
BOUND = "stop"  # the variable that holds the current halt


@magics_class
class StepMagics(NamespaceMagics):
    """%%llmstep, %llmstep op|layer|token|continue|replace|abort|status."""

    def __init__(self, shell: InteractiveShell) -> None:
        super().__init__(shell)
        self._stepper: Stepper | None = None

    @magic_arguments()
    @argument(
        "model",
        nargs="?",
        metavar="MODEL_EXPR",
        help="the model; without it, every module that runs",
    )
    @argument(
        "--at", metavar="G", help="halt at these module paths or operators: globs, with commas"
    )
    @argument(
        "--tokens",
        default="all",
        help="halt in these steps: 0-3, 0,2,5-7, 4- or all (default: %(default)s)",
    )
    @argument(
        "--when",
        metavar="C",
        help="halt when values fulfil this: nan, inf, abs>1e4, diverges, diverges>1e-3",
    )
    @argument("--golden", metavar="RUN", help="the reference run: its name, path or variable")
    @argument(
        "--name", default="stepped", help="name of the run that is recorded (default: %(default)s)"
    )
    @argument(
        "--mode",
        default="module+api",
        help="what counts as a call: module, api, aten, or several (default: %(default)s)",
    )
    @line_cell_magic
    def llmstep(self, line: str, cell: str | None = None) -> object:
        """Run the cell until a condition holds; ``%llmstep op`` and so on, or the buttons, go on.

        Without a condition the program halts after every call. At a halt, ``stop.inputs``,
        ``stop.outputs`` and ``stop.golden`` hold the tensors; the program goes on with what you
        write into them.

        ``%%llmstep model --when diverges --golden golden``,
        ``%llmstep op|layer|token|continue|replace|abort|status``
        """
        if cell is None:
            return self._go(line.strip())
        if self._stepper is not None and self._stepper.running:
            raise UsageError(
                f"%%llmstep: another program is halted: {self._where()}; end it with %llmstep abort"
            )
        options = vars(parse(self.llmstep, line))
        model = self._namespace.evaluate(options.pop("model"), "%%llmstep")
        golden = options.pop("golden")
        run_cell = self._namespace.compile(cell)
        with one_line():
            self._stepper = step(model, golden=golden and self._namespace.run(golden), **options)
            return self._show(self._stepper, self._stepper.start(run_cell), panel=True)

    def _go(self, command: str) -> object:
        if command not in (*COMMANDS, STATUS):
            known = ", ".join(f"{name} ({effect})" for name, effect in COMMANDS.items())
            raise UsageError(
                f"%llmstep{command and ' '}{command}: expected {STATUS} or one of {known}"
                f"{nearest(command, COMMANDS)}"
            )
        if self._stepper is None:
            raise UsageError(f"%llmstep {command}: no program is halted; start one with %%llmstep")
        if command == STATUS:
            print(self._where())
            return None
        with one_line():
            return self._show(self._stepper, self._stepper.go(command))

    def _where(self) -> str:
        assert self._stepper is not None
        stop = self._stepper.stop
        if stop is not None:
            return repr(stop).partition("\n")[0]
        return "running" if self._stepper.running else "ended"

    def _show(self, stepper: Stepper, stop: Stop | None, panel: bool = False) -> object:
        """Show a halt; at the end of the program return its result.

        ``panel``: with buttons, which stay with the halt, whoever lets the program go on.
        """
        self._bind(stop)
        if stop is None:
            for line in filter(None, (stepper.note, stepper.rest)):
                print(line)
            run = stepper.run
            if run is not None and run.path is not None and run.path.exists():
                self._namespace.bind(run)
            return stepper.result
        if not panel or getattr(self.shell, "kernel", None) is None:
            print(stop)
            return None
        from IPython.display import display

        from llmdebug_nb.notebook.step_panel import StepPanel

        display(StepPanel(stepper, self._bind))
        return None

    def _bind(self, stop: Stop | None) -> None:
        """Make the halt a variable unless its name is taken."""
        value = self.shell.user_ns.get(BOUND)
        if value is None or isinstance(value, Stop):
            self.shell.user_ns[BOUND] = stop
