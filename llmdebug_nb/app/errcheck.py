"""Checking a program for the first operator with clean inputs and bad outputs."""

from __future__ import annotations

import atexit
import os
import sys
import time
import warnings
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

import msgspec

from llmdebug_nb.app.live_models import modules_in
from llmdebug_nb.app.recording import rank_here
from llmdebug_nb.capture.hooks import module_tree
from llmdebug_nb.core import interrupts
from llmdebug_nb.core.errors import (
    CaptureError,
    DumpWriteError,
    LLMDebugError,
    OptionError,
    nearest,
)
from llmdebug_nb.core.faults import KINDS, MODES, CheckResult, ProcessCheck
from llmdebug_nb.core.option_parsing import some_of
from llmdebug_nb.core.options import DumpOptions, runs_folder
from llmdebug_nb.core.urls import on_this_machine
from llmdebug_nb.show.errcheck import check_html, check_text
from llmdebug_nb.store.writer import Writer, create_run

if TYPE_CHECKING:
    from torch import nn

    from llmdebug_nb.app.live_models import Models
    from llmdebug_nb.capture.errcheck.origins import Origin
    from llmdebug_nb.capture.generation import GenerateListener
    from llmdebug_nb.capture.session import Session

_KILLED = "a kill, or os._exit"
RUN = "errcheck"  # name of the run that holds the inputs and outputs of the first faulty call


class StoppedAtError(SystemExit):
    """Ends a program that is checked with ``exit``, with status 1."""


@dataclass(frozen=True)
class CheckOptions:
    """What to check for, and what to do then: see `errcheck`. ``output``: folder of the result."""

    types: tuple[str, ...]
    mode: str
    exit: bool
    output: Path

    @classmethod
    def of(
        cls,
        types: str | Iterable[str] = KINDS,
        mode: str = "aten",
        exit: bool = False,
        output: str | os.PathLike[str] | None = None,
    ) -> CheckOptions:
        """Read options. Raises OptionError."""
        names = some_of(types, KINDS, "types")
        if not names:
            raise OptionError(f"types: expected any of {', '.join(KINDS)}")
        if mode not in MODES:
            raise OptionError(f"mode {mode!r} is not known{nearest(str(mode), MODES)}")
        folder = runs_folder() if output is None else on_this_machine(output)
        return cls(tuple(names), mode, exit, folder)


class ErrorCheck:
    """A check of everything that runs in a ``with`` block. Made by `errcheck`.

    ``result``: what was found, None until the block has ended. ``path``: the result file.
    ``dumped``: folder of the run with the tensors of the first faulty call, if ``exit`` stopped.
    """

    def __init__(self, model: Models | None, options: CheckOptions) -> None:
        """Raises OptionError: a value is not a module."""
        self.options = options
        self._models: tuple[nn.Module, ...] = modules_in(model)
        self._session: Session | None = None
        self._pid = os.getpid()
        self._ending = False
        self.result: CheckResult | None = None
        self.path: Path | None = None
        self.dumped: Path | None = None

    @property
    def running(self) -> bool:
        return self._session is not None and self._pid == os.getpid()

    @property
    def generations(self) -> GenerateListener:
        """The listener of `generate`. Raises CaptureError: the check is not running."""
        if self._session is None:
            raise CaptureError("the check is not running")
        return self._session.generations

    @interrupts.held
    def start(self) -> ErrorCheck:
        """Begin to check. Raises CaptureError. After an error or interrupt, nothing is left."""
        from llmdebug_nb.capture.errcheck.session import Checks, CheckSession

        if self.running:
            raise CaptureError("this check is already running")
        self._pid, self._ending = os.getpid(), False
        interrupts.watch(self)  # until `abandon`
        with ExitStack() as undo:
            undo.callback(interrupts.unwatch, self)
            checks = Checks(self.options.types, self.options.mode, self.options.exit)
            self._check = CheckSession(
                self._models, checks, self._on_fault, module_tree.build, rank_here()
            )
            undo.callback(self._check.abandon)
            self._check.start()
            self._session = self._check.session
            undo.callback(setattr, self, "_session", None)
            interrupts.deliver()
            undo.pop_all()
        atexit.register(self.at_exit)
        self._keep(self._check.result(os.getpid(), _KILLED))
        return self

    @interrupts.held
    def stop(self, ended_by: str | None = None) -> CheckResult | None:
        """Take every hook off, write the result file, and return the result.

        In a forked child, only take the hooks off and return None.

        Raises:
            CaptureError: the check is not running. DumpWriteError: the file can't be written.
        """
        if self._session is None:
            raise CaptureError("the check is not running")
        is_ours = self.running
        if is_ours:
            self._ending = True  # there is nothing left to stop
            self._check.stop(at_end=ended_by is None)
        self.abandon()
        if not is_ours:
            return None
        process = self._check.result(os.getpid(), ended_by)
        if self.dumped is not None:
            process = msgspec.structs.replace(process, dumped=str(self.dumped))
        self._keep(process)
        self.result = CheckResult(self.options.mode, self.options.types, (process,))
        self._write(self.result)
        return self.result

    def abandon(self) -> None:
        """Take every hook off and leave no result, as in a forked child."""
        session, self._session = self._session, None
        atexit.unregister(self.at_exit)
        if session is not None:
            self._check.abandon()
        interrupts.unwatch(self)

    def at_exit(self) -> None:
        """End a check that the program left running."""
        if self.running:
            error = getattr(sys, "last_type", None)
            try:
                self.stop(None if error is None else error.__name__)
            except LLMDebugError as problem:
                self._say(str(problem))

    def _say(self, text: str) -> None:
        print(f"llmdebug: {text}", file=sys.stderr)

    def _keep(self, process: ProcessCheck) -> None:
        """Keep what is known by now: the process may be killed."""

    def _write(self, result: CheckResult) -> None:
        self.path = write_result(result, self.options.output)

    def _on_fault(self, origin: Origin) -> None:
        """Bad values have reached a result: if asked to, dump the tensors and stop the program."""
        self._keep(self._check.result(os.getpid(), _KILLED))
        if not self.options.exit or self.dumped is not None:
            return
        self.dumped = self._dump(origin)
        if not self._ending:
            raise StoppedAtError(1)

    def _dump(self, origin: Origin) -> Path:
        """Write inputs and outputs of the first faulty call as a run."""
        from llmdebug_nb.capture.calls import OpenCall
        from llmdebug_nb.capture.recorder import Recorder
        from llmdebug_nb.core.records import RootCall

        options = DumpOptions(name=RUN)
        folder = create_run(self.options.output, RUN, {"options": options.as_json()})
        writer, seen = Writer(folder, rank_here()), origin.call
        recorder = Recorder(writer, options)
        operator, number, _ = seen.op_name.rsplit(".", 2)
        call = OpenCall(seen.path, operator, "aten", None, int(number), 0)
        call.phase = seen.phase
        for role, slot, leaf in origin.held:
            recorder.record(call, role, [(slot, leaf)])
        recorder.end_call([RootCall(0, seen.generation, seen.step)])
        writer.close({"complete": True, "recorded": recorder.records})
        return folder

    # -- a with block -----------------------------------------------------------------------------

    def __enter__(self) -> ErrorCheck:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> bool:
        if kind is None:
            self.stop()
            return False
        try:
            self.stop(kind.__name__)
        except LLMDebugError as problem:  # must not hide the program's own error
            warnings.warn(str(problem), stacklevel=2)
        return isinstance(error, StoppedAtError) and self.dumped is not None

    # -- the result -------------------------------------------------------------------------------

    def __str__(self) -> str:
        return "the check is running" if self.result is None else check_text(self.result, self.path)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return f"<pre>{self}</pre>" if self.result is None else check_html(self.result, self.path)


def errcheck(
    model: Models | None = None,
    *,
    types: str | Iterable[str] = KINDS,
    mode: str = "aten",
    exit: bool = False,
    output: str | os.PathLike[str] | None = None,
) -> ErrorCheck:
    """Check what runs in a ``with`` block for the first operator that makes bad values.

        with ld.errcheck(model) as check:
            loss = model(**batch).loss
            loss.backward()
            optimizer.step()
        print(check)
        check.result.verdict        # error, clean or nothing checked

    Args:
        model: as in `dump`; None checks everything that runs in this thread.
        types: kinds of errors that count: ``overflow``, ``nan``, ``underflow``, ``cast``.
        mode: ``aten`` reads the results of each operator, ``module`` only those of modules, which
            costs less.
        exit: stop the block as soon as bad values reach a result, and dump the tensors of the call
            that made them as the run ``errcheck``.
        output: folder of the result file (default: that of the runs).

    Raises:
        OptionError: an unknown type or mode, or no module.
        DumpWriteError: the result file can't be written.
    """
    return ErrorCheck(model, CheckOptions.of(types, mode, exit, output))


def write_result(result: CheckResult, folder: Path) -> Path:
    """Write the result file into a folder. Raises DumpWriteError."""
    stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for number in range(1, 10**6):
            path = folder / f"errcheck_{stamp}{f'_{number}' if number > 1 else ''}.json"
            try:
                number_of_file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
                with open(number_of_file, "wb") as file:
                    file.write(result.as_json())
                return path
            except FileExistsError:
                continue
    except OSError as error:
        raise DumpWriteError(
            f"can't write the result to {folder}: {error.strerror or error};"
            " choose another place with output= (-o)"
        ) from None
    raise DumpWriteError(f"{folder} is full of results")
