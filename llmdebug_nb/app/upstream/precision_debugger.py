"""`PrecisionDebugger`: recording a loop step by step, as msprobe users know it."""

from __future__ import annotations

import atexit
import os
import sys
import warnings
import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from types import TracebackType
from typing import TYPE_CHECKING

from llmdebug_nb.app.live_models import modules_in
from llmdebug_nb.app.recording import Recording, rank_here
from llmdebug_nb.app.upstream.option_names import named_as
from llmdebug_nb.app.upstream.precision_debugger_config import OPTION_NAMES, read_config
from llmdebug_nb.core import determinism
from llmdebug_nb.core.errors import CaptureError, EmptyDumpError, LLMDebugError, OptionError
from llmdebug_nb.core.option_parsing import flag
from llmdebug_nb.show.words import count_text

if TYPE_CHECKING:
    from torch import nn
    from torch.utils.hooks import RemovableHandle

    from llmdebug_nb.store.run import Run

_debuggers: weakref.WeakSet[PrecisionDebugger] = weakref.WeakSet()


class PrecisionDebugger:
    """Records the steps of a loop into one run.

        debugger = PrecisionDebugger(task="tensor", level="mix", step=[0, 5])
        for batch in batches:
            debugger.start(model)
            loss = model(batch).sum()
            loss.backward()
            debugger.stop()
            debugger.step()
        run = debugger.close()

    Any number of debuggers may work at the same time. `step` counts steps; steps that are not
    recorded cost next to nothing. The run ends with `close`, with the ``with`` block, after the
    last step to record, or with the process; it can be read at any time (`run`). A call in the
    wrong place is a warning, and nothing recorded is lost.

    Args:
        config_path: msprobe's config.json. The other arguments override it.
        task: statistics (the default), tensor or overflow_check.
        dump_path: the folder that will hold the run.
        level: L0 (modules), L1 (operators, the default), mix (both) or debug (only tensors passed
            to `save`).
        model: one or several modules, unless given to `start`. Without any, whatever outermost
            modules run.
        step: numbers and ranges of steps, ``[0, "4-6"]``.
        apis: the operators of levels L1 and mix: names, or a YAML file of them, as the option
            ``apis`` of `dump`. msprobe's support_wrap_ops.yaml is such a file, too.
        name: name of the run.

    See docs/precision_debugger.md.

    Raises:
        OptionError: an argument or a field of the file that is invalid or not supported.
    """

    def __init__(
        self,
        config_path: str | os.PathLike[str] | None = None,
        task: str | None = None,
        dump_path: str | os.PathLike[str] | None = None,
        level: str | None = None,
        model: nn.Module | Sequence[nn.Module] | None = None,
        step: int | str | Sequence[int | str] | None = None,
        *,
        apis: str | os.PathLike[str] | Sequence[str] | None = None,
        name: str = "debugger",
    ) -> None:
        config = read_config(
            config_path, task=task, dump_path=dump_path, level=level, step=step, apis=apis,
            name=name,
        )  # fmt: skip
        self.options = config.options
        self._saves_only, self._switch = config.saves_only, config.switch
        self._models = modules_in(model)
        self._rank: int | None = None
        self._recording: Recording | None = None
        self._window: _Window | None = None
        self._step = 0
        self._used = False  # start or save was called
        self._started = False  # between start and stop
        self._on = False  # and in a step that is recorded
        self._ended = False  # the run is finished
        self._closed = False  # by `close` or the ``with`` block
        self._why_off: str | None = None  # why this process records nothing
        self._failure: LLMDebugError | None = None
        _debuggers.add(self)

    # -- the loop -----------------------------------------------------------------------------

    def start(
        self,
        model: nn.Module | Sequence[nn.Module] | None = None,
        token_range: Sequence[int] | None = None,
        rank_id: int | None = None,
    ) -> AbstractContextManager[object]:
        """Record from here to `stop`, or to the end of ``with debugger.start(model):``.

        Args:
            model: one or several modules, the same in every step.
            token_range: the first and the last forward call to record, counted from here.
            rank_id: the rank of this process, where torch doesn't know it.

        Raises:
            OptionError: an invalid argument, or another model than before.
            CaptureError: the model can't be recorded, the filters match nothing, or the debugger
                is closed.
            StoreError: the run can't be written.
        """
        models = self._agreed(model)
        window = _window(token_range, models)
        if self._closed:
            raise CaptureError("this PrecisionDebugger is closed; make a new one for another run")
        block = ExitStack()
        if self._started:
            warnings.warn("start() again before stop(): it has no effect", stacklevel=2)
            return block
        before, self._models = self._models, models
        self._rank, self._used = _rank(rank_id, self._rank), True
        try:
            if not self._saves_only and self._wanted():
                self._go_on(window)
        except BaseException:
            self._models = before  # another model may be given next time
            raise
        self._started = True
        block.callback(self.stop)
        return block

    def stop(self) -> None:
        """Pause until the next `start`."""
        if not self._started:
            warnings.warn("stop() without start(): nothing was being recorded", stacklevel=2)
        self._halt()

    def forward_backward_dump_end(self) -> None:
        """Record only the backward pass of the recorded calls, until `stop`."""
        if not self._started:
            warnings.warn(
                "forward_backward_dump_end() without start(): nothing was being recorded",
                stacklevel=2,
            )
        self._close_window()
        if self._on and self._recording is not None:
            self._recording.pause(backward=True)

    def step(self) -> None:
        """End a step. After the last step to record, the run is finished."""
        if self._closed:
            warnings.warn("step() of a closed PrecisionDebugger has no effect", stacklevel=2)
            return
        started = self._started
        if started:
            warnings.warn(
                "step() between start() and stop(): recording goes on as step"
                f" {self._step + 1}; call stop() first",
                stacklevel=2,
            )
            self._halt()
        elif not (self._used or self._step or self._saves_only):
            warnings.warn(
                "step() before the first start(): counted, so that start() begins with step 1",
                stacklevel=2,
            )
        self._step += 1
        if self._recording is not None and not self._ended:
            self._recording.step()
        last = self.options.tokens.last
        if last is not None and self._step > last and not self._ended:
            self._finish()
            if self._failure is not None:  # `close` raises it; here it would end the user's loop
                warnings.warn(str(self._failure), stacklevel=2)
        if started:
            self.start()

    def save(self, variable: object, name: str, save_backward: bool = True) -> None:
        """Record the tensors in a variable as ``save/NAME``.

        At level debug anywhere, at other levels between `start` and `stop`. ``save_backward``:
        also their gradients, when they arrive.

        Raises:
            OptionError: the name is not a text, or save_backward is neither True nor False.
        """
        if not isinstance(name, str) or not name:
            raise OptionError(f"save(variable, name): expected a text to call it by, got {name!r}")
        flag(save_backward, "save_backward")
        self._used = True
        if self._closed or not (self._saves_only or self._started):
            why = (
                "the PrecisionDebugger is closed"
                if self._closed
                else "call it between start() and stop()"
            )
            warnings.warn(
                f"save({name!r}) was not recorded: {why}, or use level debug", stacklevel=2
            )
        elif self._wanted() if self._saves_only else self._on:
            self._opened().save(name, variable, gradients=save_backward)

    seed_all = staticmethod(determinism.seed_all)

    # -- the run ------------------------------------------------------------------------------

    @property
    def run(self) -> Run:
        """The run so far; it grows during the recording. Raises CaptureError if there is none."""
        run = None if self._recording is None else self._recording.run
        if run is None or isinstance(self._failure, EmptyDumpError):
            raise self._failure or CaptureError(f"there is no run yet: {self._why_nothing()}")
        return run

    def close(self) -> Run | None:
        """Finish the run and return it; None, after a warning, if this process records nothing.

        Raises:
            EmptyDumpError: nothing was recorded; the message says why.
            DumpWriteError: the run is incomplete (disk full); what was written can be read.
        """
        self._closed = True
        self._finish()
        if self._failure is not None:
            raise self._failure
        return None if self._recording is None else self._recording.run

    def __enter__(self) -> PrecisionDebugger:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
            return
        self._closed = True
        self._finish(kind.__name__)
        if self._failure is not None:  # must not hide the program's own exception
            warnings.warn(str(self._failure), stacklevel=2)

    # -- within -------------------------------------------------------------------------------

    def _agreed(self, model: nn.Module | Sequence[nn.Module] | None) -> tuple[nn.Module, ...]:
        """Return the models to record. Raises OptionError if they differ from those before."""
        models = modules_in(model)
        if not models or models == self._models:
            return self._models
        if not self._models and self._recording is None:
            return models
        before = ", ".join(type(each).__name__ for each in self._models) or "none"
        raise OptionError(
            f"start(model): another model than before (which was {before}); give all of them each"
            " time, as in start([actor, critic])"
        )

    def _wanted(self) -> bool:
        """True if this process is to record this step; warn if it never will."""
        rank = rank_here() if self._rank is None else self._rank
        if self.options.ranks is not None and rank not in self.options.ranks:
            self._warn_off(
                f"this process is rank {rank}, and only rank {self.options.ranks} is recorded"
            )
            return False
        if self._step not in self.options.tokens or self._ended:
            return False
        if not self._switch.is_on():
            self._warn_off("dump_enable is false")
            return False
        return True

    def _warn_off(self, why: str) -> None:
        if self._recording is None and why != self._why_off:
            warnings.warn(f"nothing is recorded: {why}", stacklevel=4)
            self._why_off = why

    def _opened(self) -> Recording:
        """Return the recording; start it if this is the first recorded step."""
        if self._recording is None:
            recording = Recording(self._models, self.options, manual=True, rank=self._rank)
            with named_as(OPTION_NAMES):
                recording.start()
            self._recording = recording
            for _ in range(self._step):
                recording.step()
            if self._saves_only:
                recording.pause(backward=True)
        return self._recording

    def _go_on(self, window: _Window | None) -> None:
        if self._recording is not None:
            self._recording.resume()
        recording, self._on = self._opened(), True
        if window is not None:
            self._window = window
            window.open(recording)

    def _halt(self) -> None:
        self._close_window()
        if self._on and self._recording is not None:
            self._recording.pause()
        self._started = self._on = False

    def _close_window(self) -> None:
        if self._window is not None:
            self._window.close()
            self._window = None

    def _finish(self, ended_by: str | None = None) -> None:
        """End the run, once. `_failure` is set if that fails."""
        if self._ended:
            return
        self._halt()
        self._ended = True
        try:
            if self._recording is not None:
                with named_as(OPTION_NAMES):
                    self._recording.stop(ended_by)
            elif self._why_off is None:
                self._failure = EmptyDumpError(f"nothing was recorded: {self._why_nothing()}")
        except LLMDebugError as error:
            self._failure = error

    def _why_nothing(self) -> str:
        if not self._used:
            return f"{'save' if self._saves_only else 'start'}() was never called"
        if self._why_off is not None:
            return self._why_off
        calls = count_text(self._step, "time")
        return f"step {self.options.tokens} never came: step() was called {calls}"


class _Window:
    """Restricts a recording to the calls ``first`` to ``last`` of a model, counted from `open`."""

    def __init__(self, model: nn.Module | None = None, first: int = -1, last: int = -2) -> None:
        self._model, self._first, self._last = model, first, last
        self._next = 0  # number of the next call
        self._recording: Recording | None = None
        self._handle: RemovableHandle | None = None

    def open(self, recording: Recording) -> None:
        self._recording = recording
        if self._first > 0:
            recording.pause()
        self._watch()

    def close(self) -> None:
        if self._handle is not None:
            self._handle.remove()

    def _watch(self) -> None:
        """Hook the model after the recording, whose hooks must see the end of the last call."""
        self.close()
        if self._model is not None:
            self._handle = self._model.register_forward_hook(self._after, always_call=True)

    def _after(self, *_: object) -> None:
        self._next += 1
        if self._recording is not None and self._next == self._first:
            self._recording.resume()
            self._watch()
        elif self._recording is not None and self._next == self._last + 1:
            self._recording.pause()

    def __reduce__(self) -> tuple[type[_Window], tuple[()]]:
        return _Window, ()  # a copied or pickled model has an inactive window


def _window(token_range: Sequence[int] | None, models: tuple[nn.Module, ...]) -> _Window | None:
    if token_range is None:
        return None
    ends = list(token_range) if isinstance(token_range, (list, tuple)) else []
    if len(ends) != 2 or not all(type(n) is int for n in ends) or not 0 <= ends[0] <= ends[1]:
        raise OptionError(
            f"token_range {token_range!r}: expected the first and the last forward call,"
            " as in [0, 3]"
        )
    if len(models) != 1:
        raise OptionError(
            "token_range counts the forward calls of one model: give it one, as in"
            " start(model, [0, 3])"
        )
    return _Window(models[0], ends[0], ends[1])


def _rank(rank_id: int | None, before: int | None) -> int | None:
    if rank_id is not None and (type(rank_id) is not int or rank_id < 0):
        raise OptionError(f"rank_id {rank_id!r}: expected the rank of this process, 0 or more")
    return before if rank_id is None else rank_id


@atexit.register
def _say_what_never_came() -> None:
    """Name, at the end of the process, each debugger that never started to record."""
    for debugger in tuple(_debuggers):
        if not debugger._ended and debugger._recording is None and debugger._why_off is None:
            why = f"nothing was recorded: {debugger._why_nothing()}"
            print(f"llmdebug: {debugger.options.name}: {why}", file=sys.stderr)
