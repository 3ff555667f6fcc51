"""%%llmstep: the cell's program halts, and later cells, or the buttons, tell it how to go on."""

from __future__ import annotations

import html
from typing import Any

from IPython.core.error import UsageError
from IPython.core.magic import Magics, line_cell_magic, magics_class
from IPython.core.magic_arguments import argument, magic_arguments

from llmdebug_nb.app.stepping import COMMANDS, Stepper, Stop, step
from llmdebug_nb.core.errors import LLMDebugError, nearest
from llmdebug_nb.notebook.explore import explore_stop
from llmdebug_nb.notebook.magics import LLMDebugMagics, one_line, parse

STATUS = "status"
BOUND = "stop"  # the variable that holds where the program is halted


@magics_class
class StepMagics(Magics):
    """%%llmstep, %llmstep op|layer|token|continue|replace|abort|status."""

    def __init__(self, shell: Any, cells: LLMDebugMagics) -> None:
        super().__init__(shell)
        self._cells = cells
        self._stepper: Stepper | None = None

    @magic_arguments()
    @argument(
        "model", nargs="?", metavar="MODEL_EXPR", help="the model; without it, whatever module runs"
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
        help="halt when values are so: nan, inf, abs>1e4, diverges, diverges>1e-3",
    )
    @argument(
        "--golden", metavar="RUN", help="name or path of a run to hold against, or a variable"
    )
    @argument(
        "--name", default="stepped", help="name of the run that is recorded (default: %(default)s)"
    )
    @argument(
        "--mode",
        default="module+api",
        help="what is a call: module, api, aten, or several (default: %(default)s)",
    )
    @line_cell_magic
    def llmstep(self, line: str, cell: str | None = None) -> Any:
        """Run the cell up to where a condition holds; then ``%llmstep op`` and so on, or the buttons, go on from there.

        Without a condition it halts after every call. Where it is halted, ``stop.inputs``, ``stop.outputs`` and ``stop.golden`` hold the
        tensors; what is written to them, the program goes on with.

        ``%%llmstep model --when diverges --golden golden``, ``%llmstep op|layer|token|continue|replace|abort|status``
        """
        if cell is None:
            return self._go(line.strip())
        if self._stepper is not None and self._stepper.running:
            raise UsageError(
                f"%%llmstep: another program is halted: {self._where()}; end it with %llmstep abort"
            )
        options = vars(parse(self.llmstep, line))
        model = self._cells.value(options.pop("model"))
        golden = options.pop("golden")
        run_cell = self._cells.parsed(cell)
        with one_line():
            self._stepper = step(model, golden=golden and self._cells.known_run(golden), **options)
            return self._shown(self._stepper.start(run_cell), panel=True)

    def _go(self, command: str) -> Any:
        if command not in (*COMMANDS, STATUS):
            says = ", ".join(f"{name} ({what})" for name, what in COMMANDS.items())
            raise UsageError(
                f"%llmstep {command}: expected {STATUS} or one of {says}{nearest(command, COMMANDS)}"
            )
        if self._stepper is None:
            raise UsageError(f"%llmstep {command}: nothing is stepped through; %%llmstep begins it")
        if command == STATUS:
            print(self._where())
            return None
        with one_line():
            return self._shown(self._stepper.go(command))

    def _where(self) -> str:
        assert self._stepper is not None
        stop = self._stepper.stop
        return (
            repr(stop).partition("\n")[0]
            if stop is not None
            else "running"
            if self._stepper.running
            else "ended"
        )

    def _shown(self, stop: Stop | None, panel: bool = False) -> Any:
        """Show where the program is halted, or that it has ended: then return what its cell gives."""
        stepper = self._stepper
        assert stepper is not None
        self._bind(stop)
        if stop is None:
            if stepper.note:
                print(stepper.note)
            if (
                stepper.run is not None
                and stepper.run.path is not None
                and stepper.run.path.exists()
            ):
                self._cells.bind(stepper.run)
            return stepper.result
        if panel and getattr(self.shell, "kernel", None) is not None:
            from IPython.display import display

            display(Buttons(stepper, self._bind).widget)
        print(stop)
        return None

    def _bind(self, stop: Stop | None) -> None:
        """Put the halt into the user's variable, unless its name holds something else."""
        held = self.shell.user_ns.get(BOUND)
        if held is None or isinstance(held, Stop):
            self.shell.user_ns[BOUND] = stop


class Buttons:
    """A button for each command, where the program is halted, and its tensors there. ``after(stop)`` is told of each halt."""

    def __init__(self, stepper: Stepper, after: Any) -> None:
        import ipywidgets

        self._stepper, self._after = stepper, after
        self._text = ipywidgets.HTML()
        self._buttons = []
        for name, what in COMMANDS.items():
            button = ipywidgets.Button(description=name, tooltip=what)
            button.on_click(lambda _, name=name: self.press(name))
            self._buttons.append(button)
        self._tensors = ipywidgets.VBox()
        self.widget = ipywidgets.VBox([ipywidgets.HBox(self._buttons), self._text, self._tensors])
        self._show()

    def press(self, name: str) -> None:
        """Carry out a command and show where that leads; an error is text as well."""
        said = ""
        try:
            self._after(self._stepper.go(name))
        except LLMDebugError as error:
            said = str(error)
        except Exception as error:  # the program's own
            said = f"the program raised {type(error).__name__}: {error}"
            self._after(None)
        self._show(said)

    def _show(self, said: str = "") -> None:
        stop = self._stepper.stop
        text = repr(stop) if stop is not None else "" if said else "the program has ended"
        self._text.value = f"<pre>{html.escape(chr(10).join(filter(None, (said, text))))}</pre>"
        for explorer in self._tensors.children:
            explorer.close()
        self._tensors.children = [] if stop is None else [explore_stop(stop)]
        for button in self._buttons:
            button.disabled = stop is None or (button.description == "replace" and not stop.golden)
