"""Checking a program for the first operator with clean inputs and bad outputs."""

from __future__ import annotations

import atexit
import os
import sys
import time
import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from llmdebug_nb.app.live_models import modules_in
from llmdebug_nb.app.recording import rank_here
from llmdebug_nb.capture.hooks import module_tree
from llmdebug_nb.core.errors import (
    CaptureError,
    DumpWriteError,
    LLMDebugError,
    OptionError,
    nearest,
)
from llmdebug_nb.core.faults import KINDS, CheckResult, ProcessCheck
from llmdebug_nb.core.options import EVERY_TOKEN, DumpOptions, runs_folder
from llmdebug_nb.show.errcheck import check_html, check_text
from llmdebug_nb.store.writer import Writer, create_run

if TYPE_CHECKING:
    from torch import nn

    from llmdebug_nb.app.live_models import Models
    from llmdebug_nb.capture.errcheck.optimizers import OptimizerSteps
    from llmdebug_nb.capture.errcheck.origins import Origin
    from llmdebug_nb.capture.session import Session
    from llmdebug_nb.core.columns import Row
    from llmdebug_nb.core.records import Node

MODES = ("aten", "module")
RUN = "errcheck"  # name of the run that holds the inputs and outputs of the first faulty call


class StoppedAtError(SystemExit):
    """Ends a program that is checked with ``exit``, with status 1."""


class ErrorCheck:
    """A check of everything that runs in a ``with`` block. Made by `errcheck`.

    ``result``: what was found, once the block has ended. ``path``: the result file.
    ``dumped``: folder of the run with the tensors of the first faulty call, if ``exit`` stopped.
    """

    def __init__(
        self,
        model: Models | None,
        types: str | Iterable[str] = KINDS,
        mode: str = "aten",
        exit: bool = False,
        output: str | os.PathLike[str] | None = None,
    ) -> None:
        """Raises OptionError."""
        self.types, self.mode, self.exit = kinds(types), checked_mode(mode), exit
        self.output = runs_folder() if output is None else Path(output)
        self._models: tuple[nn.Module, ...] = modules_in(model)
        self._session: Session | None = None
        self.result: CheckResult | None = None
        self.path: Path | None = None
        self.dumped: Path | None = None

    @property
    def running(self) -> bool:
        return self._session is not None

    @property
    def generations(self) -> object:
        """The listener of `generate` calls."""
        if self._session is None:
            raise CaptureError("the check is not running")
        return self._session.generations

    def start(self) -> ErrorCheck:
        """Begin to check. Raises CaptureError."""
        from llmdebug_nb.capture.errcheck.checker import Checker
        from llmdebug_nb.capture.errcheck.optimizers import OptimizerSteps
        from llmdebug_nb.capture.session import check_session

        if self._session is not None:
            raise CaptureError("this check is already running")
        options = DumpOptions.of(
            name=RUN, mode=self.mode, tokens=EVERY_TOKEN, stats_only=True, sources=False,
            force_eager=True,
        )  # fmt: skip
        self._checker = Checker(_NoSink(), options, self.types, self.exit, self._on_fault)
        self._session, parts = check_session(
            options, self._checker, module_tree.build, self._models, rank_here()
        )
        self._checker.attach(parts)
        self._optimizers: OptimizerSteps = OptimizerSteps(parts, self._checker)
        self._session.start()
        self._optimizers.start()
        atexit.register(self.at_exit)
        return self

    def stop(self, ended_by: str | None = None) -> CheckResult:
        """Take every hook off and write the result file.

        Raises:
            CaptureError: the check is not running. DumpWriteError: the file can't be written.
        """
        session = self._session
        if session is None:
            raise CaptureError("the check is not running")
        self.abandon()
        if ended_by is None:
            self._checker.finish()
        session.stop(ended_by)
        process = self._checker.result(rank_here(), os.getpid(), ended_by)
        self._keep(process)
        return self.finished

    @property
    def finished(self) -> CheckResult:
        """The result. Raises CaptureError: the check has not ended."""
        if self.result is None:
            raise CaptureError("the check has not ended yet")
        return self.result

    def abandon(self) -> None:
        """Take every hook off and leave no result, as in a forked child."""
        session, self._session = self._session, None
        atexit.unregister(self.at_exit)
        if session is not None:
            self._optimizers.stop()
            session.abandon()

    def at_exit(self) -> None:
        """End a check that the program left running."""
        if self._session is not None:
            error = getattr(sys, "last_type", None)
            try:
                self.stop(None if error is None else error.__name__)
            except LLMDebugError as problem:
                print(f"llmdebug: {problem}", file=sys.stderr)

    def _keep(self, process: ProcessCheck) -> None:
        self.result = CheckResult(self.mode, self.types, (process,))
        self.path = write_result(self.result, self.output)

    def _on_fault(self, origin: Origin) -> None:
        """Bad values have reached a result: if asked to, dump the tensors and stop the program."""
        if not self.exit or self.dumped is not None:
            return
        self.dumped = self._dump(origin)
        raise StoppedAtError(1)

    def _dump(self, origin: Origin) -> Path:
        """Write inputs and outputs of the first faulty call as a run."""
        from llmdebug_nb.capture.calls import OpenCall
        from llmdebug_nb.capture.recorder import Recorder
        from llmdebug_nb.core.records import RootCall

        options = DumpOptions(name=RUN)
        folder = create_run(self.output, RUN, {"options": options.as_json()})
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

    # -- a with block ---------------------------------------------------------------------------

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

    # -- the result -----------------------------------------------------------------------------

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
    return ErrorCheck(model, types, mode, exit, output)


def kinds(types: str | Iterable[str]) -> tuple[str, ...]:
    """Return kinds of errors in their usual order. Raises OptionError."""
    names = types.replace(",", " ").split() if isinstance(types, str) else list(types)
    for name in names:
        if name not in KINDS:
            raise OptionError(f"types: {name!r} is not known{nearest(str(name), KINDS)}")
    if not names:
        raise OptionError(f"types: expected any of {', '.join(KINDS)}")
    return tuple(name for name in KINDS if name in names)


def checked_mode(mode: str) -> str:
    """Return the mode. Raises OptionError."""
    if mode not in MODES:
        raise OptionError(f"mode {mode!r} is not known{nearest(str(mode), MODES)}")
    return mode


def write_result(result: CheckResult, folder: Path) -> Path:
    """Write the result file into a folder. Raises DumpWriteError."""
    stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for number in range(1, 10**6):
            path = folder / f"errcheck_{stamp}{f'_{number}' if number > 1 else ''}.json"
            try:
                with open(path, "xb") as file:
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


class _NoSink:
    """Receives nothing: a check keeps no records."""

    def shortage(self, nbytes: int) -> str | None:
        return None

    def payload(self, row: Row, data: object) -> None: ...
    def duplicate(self, row: Row, offset: int, length: int) -> None: ...
    def commit(self, *rows: object, **more: object) -> None: ...
    def nodes(self, nodes: Iterable[Node], start: int) -> None: ...
    def table(self, name: str, rows: Iterable[Sequence[object]]) -> None: ...
    def close(self, meta: Mapping[str, object]) -> None: ...
