"""`step` and `Stepper`: run a program up to a halt, and on from there by commands."""

from __future__ import annotations

import contextlib
import math
import os
import queue
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from llmdebug_nb.app.option_signatures import shows_options
from llmdebug_nb.app.recording import Recording
from llmdebug_nb.app.runs import open_run
from llmdebug_nb.app.stepping.agreement_after_graft import Place, named, rest
from llmdebug_nb.app.stepping.conditions import Conditions
from llmdebug_nb.app.stepping.golden import Golden
from llmdebug_nb.app.stepping.stop import Stop
from llmdebug_nb.app.stepping.thread import Ended, under_same_settings
from llmdebug_nb.core import interrupts
from llmdebug_nb.core.errors import CaptureError, LLMDebugError, OptionError, first_line, nearest
from llmdebug_nb.core.layers import is_layer
from llmdebug_nb.core.options import EVERY_TOKEN, DumpKeywords, DumpOptions
from llmdebug_nb.store.run import Run

if TYPE_CHECKING:
    import torch
    from typing_extensions import Unpack

    from llmdebug_nb.app.live_models import Models
    from llmdebug_nb.capture.calls import OpenCall
    from llmdebug_nb.core.records import RootCall

COMMANDS = {
    "op": "to the end of the next operator or module",
    "layer": "to the end of the next numbered module, such as model.layers.3",
    "token": "to the first call of the next step",
    "continue": "to where a condition holds again",
    "replace": "put golden's values into the outputs of this call, and continue",
    "abort": "end the program here",
}
_RAN = "the program ran to its end"
_PATIENCE = 5.0  # seconds in which an interrupted program must reach a call
_LOOK = 0.05  # seconds between two looks whether the user has interrupted


class Aborted(BaseException):
    """Ends the program at a call; an ``except Exception`` of the program does not catch it."""


class Stepper:
    """A program that is stepped through. Made by `step`; it runs once.

    ``stop``: the present halt, or None. ``halts``: how many there were. ``run``: the recording so
    far. ``result``: the value that the program returned, once it has ended. ``watchers``: called at
    each halt and at the end.
    """

    def __init__(
        self,
        model: Models | None,
        conditions: Conditions,
        golden: Golden | None,
        options: DumpOptions,
    ) -> None:
        """Raises OptionError."""
        self._recording = Recording(model, options)
        self._conditions, self._golden = conditions, golden
        self._commands: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._events: queue.SimpleQueue[Stop | Ended | LLMDebugError] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        # the command that is being carried out
        self._command = "op" if conditions == Conditions() else "continue"
        self._interrupted = False  # halt at the next call
        self._last: Stop | None = None
        self._seen: set[str] = set()  # names of the calls before the first halt
        self._replaced: list[Place] = []
        self._rest: str | None = None  # at the end
        self.stop: Stop | None = None
        self.halts = 0
        self.watchers: list[Callable[[], None]] = []
        self.ending = ""  # how the program ended
        self.run: Run | None = None
        self.result: object = None

    @property
    def running(self) -> bool:
        """True from the start of the program to its end."""
        return self._thread is not None and self._thread.is_alive()

    @interrupts.unbroken
    def start(self, work: Callable[[], object]) -> Stop | None:
        """Run ``work()`` up to the first halt and return the halt; None if it ran to its end.

        Raises:
            CaptureError: the program ran already, or can't be recorded.
            Exception: whatever the program raises.
        """
        if self._thread is not None:
            raise CaptureError(
                "this program has been stepped through already; make another with ld.step"
            )
        self._thread = threading.Thread(
            target=self._run_program, args=(under_same_settings(work),), name="llmdebug step",
            daemon=True,
        )  # fmt: skip
        self._thread.start()
        return self.wait()

    @interrupts.unbroken
    def go(self, command: str = "continue") -> Stop | None:
        """Carry out a command of `COMMANDS`; return the next halt, or None if the program ended.

        Raises:
            OptionError: no such command.
            CaptureError: the program is not halted, or golden has no values here.
        """
        if command not in COMMANDS:
            near, known = nearest(command, COMMANDS), ", ".join(COMMANDS)
            raise OptionError(f"step: unknown command {command!r}{near}; known: {known}")
        if self.stop is None:
            state = "" if self.running else ": it has ended"
            state = ": it has not started" if self._thread is None else state
            raise CaptureError(f"the program is not halted{state}")
        if command == "replace":
            _check_replacement(self.stop)
        self._commands.put(command)
        try:
            return self.wait()
        finally:
            for watch in self.watchers:
                watch()

    def abort(self) -> None:
        """End the program at the call where it is halted; does nothing if it isn't halted."""
        if self.stop is not None:
            self.go("abort")

    @property
    def note(self) -> str:
        """Why the program never halted, or ""."""
        if self._last is not None or self.running:
            return ""
        for glob in self._conditions.at:
            if not any(fnmatchcase(name, glob) for name in self._seen):
                near = nearest(glob, sorted(self._seen))
                return f"it never halted: no call is named {glob}{near}"
        return "it never halted: the conditions did not hold at any call"

    @property
    def rest(self) -> str:
        """What agrees since golden's values were put in, in words; "" if none were."""
        if not self._replaced or self._golden is None:
            return ""
        put = f"Golden's values were put in at {named(self._replaced)}"
        if self.stop is not None:
            departs = self._command == "continue" and self._conditions.on_divergence
            return f"{put}; {'here it departs again: another cause' if departs else 'go on'}."
        if self.running or self.run is None or self.ending != _RAN:
            return f"{put}, but the program did not run to its end."
        if self._rest is None:
            self._rest = rest(self._golden.run, self.run, self._replaced)
        return self._rest

    # -- in the thread of the user ---------------------------------------------------------------

    @interrupts.unbroken
    def wait(self) -> Stop | None:
        """Wait for the next halt or the end. An interrupt halts the program at its next call.

        A second one ends the program there.
        """
        halted, self.stop = self.stop, None
        event = self._next_event()
        if isinstance(event, LLMDebugError):
            self.stop = halted
            raise event
        if isinstance(event, Stop):
            self.stop = event
            interrupts.taken()  # it would halt the program, which is halted
            return event
        if self._thread is not None:
            self._thread.join()
        self.result = event.result
        self.ending = _ending(event.error)
        if event.error is not None and not isinstance(event.error, Aborted):
            raise event.error
        return None

    def _next_event(self) -> Stop | Ended | LLMDebugError:
        deadline = math.inf
        while True:
            with contextlib.suppress(queue.Empty):
                return self._events.get(timeout=_LOOK)
            if interrupts.taken():
                if deadline < math.inf:
                    self._commands.put("abort")
                    raise KeyboardInterrupt
                self._interrupted, deadline = True, time.monotonic() + _PATIENCE
            if time.monotonic() > deadline:
                raise CaptureError(
                    "interrupted, but the program is busy with work that is not recorded;"
                    " it halts at its next call"
                )

    # -- in the thread of the program ------------------------------------------------------------

    def _run_program(self, work: Callable[[], object]) -> None:
        ended = Ended()
        try:
            self.run = self._recording.start()
            self._recording.on_call_end(self._on_call_end)
            try:
                ended.result = work()
            except BaseException as error:
                ended.error = error
            with ended.own_errors_second():
                error_name = None if ended.error is None else type(ended.error).__name__
                self._recording.stop(error_name)
        except BaseException as error:
            ended.error = ended.error or error
        self._events.put(ended)

    def _on_call_end(
        self, call: OpenCall, place: RootCall, outputs: Sequence[tuple[str, object]]
    ) -> None:
        """Halt at a call that has ended, if a command or condition says so."""
        if threading.current_thread() is not self._thread:
            return
        if self._golden is not None:
            self._golden.match(self._recording.nodes)
        stop = Stop(
            call.path, call.op, call.number, place.generation, place.step,
            _tensors(call.inputs), _tensors(outputs), self._golden,
        )  # fmt: skip
        why = self._why(stop)
        if self._last is None:
            self._seen |= {*stop.names}
        if why is None:
            return
        self._interrupted, stop.why = False, why
        from llmdebug_nb.capture.current_line import here

        stop.here = here(Stepper._run_program.__code__)
        self._last = stop
        self.halts += 1
        self._events.put(stop)
        while not self._obey(self._commands.get(), stop):
            pass

    def _why(self, stop: Stop) -> str | None:
        """Return why to halt, or None."""
        if self._interrupted:
            return "interrupted"
        if self._command == "op":
            return "next call"
        if self._command == "layer" and is_layer(stop.path):
            return "next layer"
        last = self._last or stop
        here, there = (stop.generation, stop.step), (last.generation, last.step)
        if self._command == "token" and here != there:
            return "next step"
        return self._conditions.why(stop) if self._conditions != Conditions() else None

    def _obey(self, command: str, stop: Stop) -> bool:
        """Carry out a command. False: it failed, and the program stays halted."""
        if command == "abort":
            raise Aborted
        if command == "replace":
            try:
                _write(stop.outputs, stop.golden)
            except RuntimeError as error:
                self._events.put(CaptureError(
                    f"replace: {stop.path or 'the model'} gave a tensor that can't be written to:"
                    f" {first_line(error)}"
                ))  # fmt: skip
                return False
            self._replaced.append(stop.place)
        self._command = "continue" if command == "replace" else command
        return True


@shows_options(tokens=EVERY_TOKEN, name="stepped", mode="module+api")
def step(
    model: Models | None = None,
    *,
    at: str | Iterable[str] | None = (),
    when: str | Iterable[str] | None = (),
    golden: Run | str | os.PathLike[str] | None = None,
    **options: Unpack[DumpKeywords],
) -> Stepper:
    """Return a stepper, which runs a program up to the first call where the conditions hold.

        stop = ld.step(model, when="nan").start(lambda: model.generate(ids))

    Several conditions of one kind are given as a list, or with commas. Each kind that is given
    must hold. Without any the program halts at every call.

    Args:
        model: as in `dump`.
        at: globs over module paths, operators (``Functional.softmax``) or paths of operators.
        when: ``nan``, ``inf``, ``abs>1e4``, ``diverges`` (from golden, by 32 units of rounding
            and more than its inputs' error explains) or ``diverges>1e-3``.
        golden: a run with values, of this model or of one with matching modules.
        tokens: halt only in these steps. All steps are recorded.
        options: of the recording.

    Raises:
        OptionError: an invalid condition or option.
        UnknownRunError: no such golden run.
    """
    conditions = Conditions.of(at, options.get("tokens", EVERY_TOKEN), when)
    run = None if golden is None else open_run(golden)
    if run is None and any(each.kind == "diverges" for each in conditions.when):
        raise OptionError("when: diverges needs golden, the run to compare with")
    recording: DumpKeywords = {
        "name": "stepped", "mode": "module+api", **options, "tokens": EVERY_TOKEN,
    }  # fmt: skip
    reference = None if run is None else Golden(run)
    return Stepper(model, conditions, reference, DumpOptions.of(**recording))


def _ending(error: BaseException | None) -> str:
    if error is None:
        return _RAN
    if isinstance(error, Aborted):
        return "the program was ended here"
    return f"the program raised {type(error).__name__}: {error}"


def _check_replacement(stop: Stop) -> None:
    if not stop.golden:
        raise CaptureError(
            f"replace: golden has no values of {stop.path or 'the model'} in step {stop.step}"
        )
    for slot, theirs in stop.golden.items():
        mine = stop.outputs.get(slot)
        if mine is None or mine.shape != theirs.shape:
            shape = "nothing" if mine is None else list(mine.shape)
            raise CaptureError(
                f"replace: golden's output {slot} has shape {list(theirs.shape)}, mine {shape}"
            )


def _tensors(leaves: Iterable[tuple[str, object]]) -> dict[str, torch.Tensor]:
    import torch

    return {slot: leaf for slot, leaf in leaves if isinstance(leaf, torch.Tensor)}


def _write(outputs: Mapping[str, torch.Tensor], golden: Mapping[str, torch.Tensor]) -> None:
    """Write golden's values into live tensors, with which the program continues."""
    import torch

    with torch.no_grad():
        for slot, theirs in golden.items():
            outputs[slot].data.copy_(theirs)
