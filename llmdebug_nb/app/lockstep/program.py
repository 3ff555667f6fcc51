"""A program of this process, which runs in a thread of its own, event by event."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, TypeAlias

import torch

from llmdebug_nb.app.lockstep.events import End, Event, Play, Puts, Rows, values_in
from llmdebug_nb.app.lockstep.grafting import Grafting
from llmdebug_nb.app.lockstep.lockstep_sink import Tap
from llmdebug_nb.app.perturbing.program import arguments, without_gradients
from llmdebug_nb.app.stepping.thread import under_same_settings
from llmdebug_nb.capture import setup
from llmdebug_nb.capture.hooks import module_tree
from llmdebug_nb.capture.session import eager_session
from llmdebug_nb.core.determinism import random_state
from llmdebug_nb.core.errors import CaptureError, LLMDebugError, OptionError, first_line
from llmdebug_nb.core.interrupts import Unbroken, let_through
from llmdebug_nb.core.options import DumpOptions
from llmdebug_nb.replay.swap import restored, without_new_hooks

if TYPE_CHECKING:
    from llmdebug_nb.capture.calls import OpenCall
    from llmdebug_nb.capture.session import Session
    from llmdebug_nb.core.records import RootCall

Inputs: TypeAlias = (
    "torch.Tensor | Mapping[str, object] | tuple[object, ...] | list[object]"
    " | Callable[[torch.nn.Module], object]"
)
STOPPED = "it was stopped by the comparison in lockstep"
_PATIENCE = 0.1  # seconds between two attempts to stop a program that computes


class Stopped(BaseException):
    """Ends a program at an event; an ``except Exception`` of the program does not catch it."""


class LocalProgram:
    """A model of this process on its inputs. It leaves no trace but what the model writes outside.

    Parameters that the program changes stay changed: then it can't be run again.
    """

    def __init__(
        self, name: str, model: torch.nn.Module, inputs: Inputs, options: DumpOptions
    ) -> None:
        """``name``: golden or mine.

        Raises OptionError: no module, or inputs that can't be copied for each run.
        """
        if not isinstance(model, torch.nn.Module):
            raise OptionError(f"{name}: expected a torch.nn.Module, got {type(model).__name__}")
        self.name, self.model, self.options = name, model, options
        self._inputs = inputs
        arguments(inputs)  # refuses what can't be copied before anything runs
        self._restart = random_state()
        self._versions = self._weights()
        self.run_program = under_same_settings(self._work)

    def close(self) -> None:
        """It holds nothing."""

    def play(self, how: Play, rows: Rows | None) -> Running:
        return Running(self, how, rows, self._restart)

    @property
    def why_once(self) -> str:
        changed = self._weights() != self._versions
        return f"the program of {self.name} changes its weights" if changed else ""

    def _weights(self) -> int:
        return sum(weight._version for weight in self.model.parameters())

    def _work(self) -> object:
        if callable(self._inputs) and not isinstance(self._inputs, torch.Tensor):
            return self._inputs(self.model)
        args, kwargs = arguments(self._inputs)
        return self.model(*args, **kwargs)


class Running:
    """A program that runs in a thread, but only while somebody waits for its next event."""

    def __init__(
        self, program: LocalProgram, how: Play, rows: Rows | None, restart: Callable[[], None]
    ) -> None:
        self._program, self._how, self._restart = program, how, restart
        self._tap = Tap(self._offer, rows, how.since)
        self._rows = rows
        self._events: deque[Event] = deque()
        self._bytes = self._values = 0  # bytes of the events that wait, and of values in them
        self._go, self._back = threading.Semaphore(0), threading.Semaphore(0)
        self._outside: Callable[[], None] = lambda: None  # sets the caller's random numbers
        self._stopping = self._closing = self._ended = False
        self._error: BaseException | None = None
        self._grafting = Grafting(self._wait_for_puts) if how.waits else None
        self._puts: Puts | None = None
        self._thread = threading.Thread(
            target=self._run, name=f"llmdebug lockstep {program.name}", daemon=True
        )

    # -- in the thread that waits -----------------------------------------------------------------

    def next(self) -> Event | None:
        while not self._events:
            if self._ended:
                self._raise()
                return None
            if self._thread.ident is None:
                self._thread.start()
            else:
                self._go.release()
            self._back.acquire()
        event = self._events.popleft()
        self._bytes -= event.nbytes
        self._values -= values_in(event)
        return event

    @property
    def waiting(self) -> int:
        """How many events are there to be taken before the program runs on."""
        return len(self._events)

    @property
    def ahead(self) -> int:
        return self._values

    def reply(self, puts: Puts) -> None:
        self._puts = puts

    def stop(self) -> None:
        self._stopping = True
        while self._thread.is_alive():
            self._go.release()
            self._thread.join(_PATIENCE)
        self._events.clear()
        self._bytes, self._ended, self._error = 0, True, None

    def _raise(self) -> None:
        self._thread.join()
        error, self._error = self._error, None
        if error is None:
            return
        if isinstance(error, LLMDebugError):
            raise error
        what = f"{type(error).__name__}: {first_line(error)}"
        raise CaptureError(f"the program of {self._program.name} failed: {what}") from error

    # -- in the thread of the program -------------------------------------------------------------

    def _run(self) -> None:
        self._outside = random_state()
        try:
            self._restart()
            self._record()
        except Stopped:
            pass
        except BaseException as error:
            self._error = error
        self._outside()
        self._ended = True
        self._back.release()

    def _record(self) -> None:
        program, model = self._program, self._program.model
        with Unbroken(restored(model), without_new_hooks(model), without_gradients(model)):
            self._record_restored(program)

    def _record_restored(self, program: LocalProgram) -> None:
        @let_through
        def run() -> None:
            program.run_program()

        self._tap.note({"setup": setup.here()})
        session = eager_session(program.options, self._tap, module_tree.build, [program.model])
        session.on_call_end(self._on_call_end)
        ended_by: str | None = STOPPED
        try:
            session.start()
            if self._grafting is not None:
                self._grafting.start(program.model, session.nodes)
            run()
            ended_by = None
        except Stopped:
            raise
        except BaseException as error:
            ended_by = type(error).__name__
            raise
        finally:
            self._closing = True
            if self._grafting is not None:
                self._grafting.stop()
            self._end(session, ended_by)

    def _end(self, session: Session, ended_by: str | None) -> None:
        session.stop(ended_by)
        if ended_by is None:
            refusal = session.refusal()
            if refusal is not None:
                raise refusal

    def _offer(self, event: Event) -> None:
        """Hand an event over; wait if too much was handed over already."""
        if self._stopping:
            if self._closing:
                return
            raise Stopped
        self._events.append(event)
        self._bytes += event.nbytes
        self._values += values_in(event)
        if self._bytes > self._how.ahead and not self._closing:
            self._hand_over()

    def _hand_over(self) -> None:
        """Let the other thread run, with its own random numbers, until it waits again."""
        own = random_state()
        self._outside()
        self._back.release()
        self._go.acquire()
        self._outside = random_state()
        own()
        if self._stopping:
            raise Stopped

    def _on_call_end(self, call: OpenCall, at: RootCall, outputs: list[tuple[str, object]]) -> None:
        waits = self._grafting is not None and self._grafting.expects(call)
        self._puts = None  # of a call whose hook did not run
        self._offer(End(call.root_call, at.generation, at.step, call.path, call.number, waits))

    def _wait_for_puts(self) -> Puts:
        """Return the outputs that the program goes on with after the call that has just ended."""
        while self._puts is None:
            self._hand_over()
        puts, self._puts = self._puts, None
        return puts
