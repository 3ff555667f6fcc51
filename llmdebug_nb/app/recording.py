"""Recording a model: `dump`, and the `Recording` that it makes."""

from __future__ import annotations

import atexit
import contextlib
import os
import shutil
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from llmdebug_nb.app.destination import recorded, url_of
from llmdebug_nb.app.live_models import compilable_in, models_in, remember_roots, remember_run
from llmdebug_nb.app.option_signatures import shows_options
from llmdebug_nb.capture.hooks import module_tree
from llmdebug_nb.core import collector, determinism, interrupts
from llmdebug_nb.core.errors import CaptureError, OptionError, StoreError, UploadWarning
from llmdebug_nb.core.options import DumpOptions, runs_folder
from llmdebug_nb.core.records import Node, RootCall
from llmdebug_nb.store.format import MARKER
from llmdebug_nb.store.writer import Writer, create_run

if TYPE_CHECKING:
    import torch
    from typing_extensions import Unpack

    from llmdebug_nb.app.live_models import Models
    from llmdebug_nb.app.uploading import Uploading
    from llmdebug_nb.capture.calls import OpenCall
    from llmdebug_nb.capture.session import Session
    from llmdebug_nb.core.options import DumpKeywords
    from llmdebug_nb.store.run import Run

_begun: Counter[str] = Counter()  # how many recordings of a name this process has begun
_LAST_RANK = 2**31 - 1  # as torch keeps ranks in 32 bits


@shows_options()
def dump(model: Models | None = None, **options: Unpack[DumpKeywords]) -> Recording:
    """Record the tensors of a model in a ``with`` block; the block's target is the Run.

    ``model``: a module, what another runtime runs (a session, a compiled model, an engine), or
    several. None records every outermost module that runs.

        with ld.dump(model, name="golden", tokens="0-3") as golden:
            model.generate(**inputs)

    Raises:
        OptionError: an unknown or invalid option.
        EmptyDumpError: a filter that matches nothing, or a block that ran nothing to record.
        DumpWriteError: the run can't be written.
    """
    return Recording(model, DumpOptions.of(**options))


class Recording:
    """A recording, made by `dump`: a context manager that gives the Run, or `start` and `stop`."""

    def __init__(
        self,
        model: Models | None,
        options: DumpOptions,
        manual: bool = False,
        rank: int | None = None,
        compiles: bool = False,
    ) -> None:
        """Check the models and options.

        Args:
            model: a module, a model of a runtime, several, or None for every one that runs.
            options: which tensors to record, and where to put the run.
            manual: only `step` ends a step; steps count from 0.
            rank: the rank of this process, where torch doesn't know it.
            compiles: record all code that is compiled with `backend`.

        Raises:
            OptionError: no module, the same one twice, or no model where one is to be compiled; or
                a store that can't be recorded to.
            MissingPackageError: the package for a store is not installed.
        """
        if options.graph is not None and model is None and not compiles:
            raise OptionError(
                f"graph={options.graph!r} compiles the model: name it, as in"
                f" dump(model, graph={options.graph!r}); code that you compile yourself is"
                " recorded by fx_backend and inductor_backend"
            )
        self.options = options
        self._url = url_of(options)
        self._rank = rank_here() if rank is None else rank
        # a graph can't be compiled; the module that an engine runs can
        self._models = models_in(model) if options.graph is None else compilable_in(model)
        self._manual = manual
        self._session: Session | None = None
        self._pid = os.getpid()  # of the process whose recording it is
        self._switched = determinism.Switched()
        self._run_folders: list[Path] = []
        self._process_folders: list[Path] = []  # this process's part of each run
        self._uploads: list[Uploading] = []
        self.run: Run | None = None

    @interrupts.held
    def start(self) -> Run:
        """Hook the model and begin. Raises CaptureError, StoreError, and then leaves no files.

        After an interrupt, too, nothing is left.
        """
        with collector.paused(), ExitStack() as undo:  # much is loaded when this is first called
            self._begin(undo)
            run = self.run = self._opened()
            interrupts.deliver()
            undo.pop_all()
        return run

    @interrupts.held
    def begin(self) -> None:
        """As `start`, for a recording whose run this process does not read."""
        with ExitStack() as undo:
            self._begin(undo)
            interrupts.deliver()
            undo.pop_all()

    def _begin(self, undo: ExitStack) -> None:
        if self.running:
            raise CaptureError(f"the recording {self.options.name!r} is already running")
        undo.callback(interrupts.unwatch, self)
        interrupts.watch(self)  # until `abandon`, or the end of `stop`
        self._run_folders, self._process_folders, self._uploads = [], [], []
        self._pid = os.getpid()
        undo.callback(self._discard)
        session = self._hooked(undo)
        session.start()
        if self._manual:
            session.count_steps_by_hand()
        names = (self.options.name, f"{self.options.name}.fx")
        recorded.update(zip(names, self._run_folders, strict=False))
        undo.callback(self._forget)
        self._session = session
        undo.callback(setattr, self, "_session", None)
        atexit.register(self.at_exit)
        undo.callback(atexit.unregister, self.at_exit)

    def _opened(self) -> Run:
        from llmdebug_nb.store import reader

        return reader.native(self._run_folders[0])

    def _forget(self) -> None:
        for name in (self.options.name, f"{self.options.name}.fx"):
            recorded.pop(name, None)

    def _hooked(self, undo: ExitStack) -> Session:
        """Make the run's folders, their writers, and the session. ``undo``: gets how to undo it."""
        from llmdebug_nb.capture import setup

        writers = []
        for suffix in ("", ".fx") if self.options.graph == "both" else ("",):
            self._run_folders.append(self._create(self.options.name + suffix))
            writers.append(self._writer(self._run_folders[-1]))
            undo.callback(writers[-1].close, {})
        session = self._make_session(*writers)
        undo.callback(session.abandon)
        self._switched = self._seed()
        undo.callback(self._switched.restore)
        noted: dict[str, object] = {"setup": setup.here()}
        if self._switched:
            noted["determinism"] = self._switched
        for writer in writers:
            writer.note(noted)
        return session

    def _create(self, name: str) -> Path:
        from llmdebug_nb.capture.compat import torch_distributed
        from llmdebug_nb.capture.versions import versions

        details = {"options": self.options.as_json(), "environment": versions()}

        def make() -> str:
            return str(create_run(_parent(self.options), name, details))

        _begun[name] += 1
        folder = Path(torch_distributed.shared(f"llmdebug/{name}/{_begun[name]}", make))
        if not (folder / MARKER).is_file():  # made on another machine
            folder = Path(make())
        remember_run(folder)
        return folder

    def _writer(self, folder: Path) -> Writer:
        # steps that are dropped again and again must be rows by then
        writer = Writer(folder, self._rank, waits=self.options.last is None)
        self._process_folders.append(writer.folder)
        if self._url is not None:
            from llmdebug_nb.app import uploading

            self._uploads.append(uploading.begin(writer.folder, self._url))
        return writer

    def _discard(self) -> None:
        """Remove the empty folders; what other ranks wrote stays."""
        from llmdebug_nb.store import catalog

        for upload in self._uploads:
            upload.drop()
        for folder in self._process_folders:
            shutil.rmtree(folder, ignore_errors=True)
        for folder in self._run_folders:
            with contextlib.suppress(FileNotFoundError):  # another rank has removed it
                if not catalog.process_folders(folder):
                    shutil.rmtree(folder, ignore_errors=True)

    def _make_session(self, writer: Writer, reference: Writer | None = None) -> Session:
        if self.options.graph is None:
            from llmdebug_nb.capture.session import eager_session

            return eager_session(self.options, writer, module_tree.build, self._models, self._rank)
        from llmdebug_nb.capture.compiled.session import compiled_session

        return compiled_session(
            self.options, writer, module_tree.build, self._models, self._rank, reference
        )

    @interrupts.held
    def stop(self, ended_by: str | None = None) -> Run:
        """Remove every hook and finish the run. ``ended_by``: name of the error that ended it.

        In a forked child, only remove the hooks: the run belongs to the parent process.

        Raises:
            EmptyDumpError: nothing was recorded; the message says why. The empty run is removed.
            DumpWriteError: the run is incomplete (disk full); what was written can be read.
        """
        self.end(ended_by)
        return self._opened() if self.run is None else self.run

    @interrupts.held
    def end(self, ended_by: str | None = None) -> None:
        """As `stop`, without the run."""
        session = self._session
        if session is None:
            raise CaptureError("the recording is not running")
        if not self.running:
            self.abandon()
            return
        with ExitStack() as all_of:
            all_of.callback(interrupts.unwatch, self)
            self._end(session, ended_by)

    def _end(self, session: Session, ended_by: str | None) -> None:
        self._session = None
        atexit.unregister(self.at_exit)
        try:
            session.stop(ended_by)
        except BaseException:
            for upload in self._uploads:
                upload.end()
            raise
        finally:
            self._switched.restore()
        remember_roots(self._run_folders[0], session.followed())
        refusal = session.refusal()
        if refusal is not None:
            self._forget()
            self._discard()
            raise refusal
        if self._uploads:
            from llmdebug_nb.app import uploading

            for missing in uploading.finish(self._uploads, self._run_folders):
                warnings.warn(missing, UploadWarning, stacklevel=5)

    remove = stop

    @property
    def backend(
        self,
    ) -> Callable[[torch.fx.GraphModule, Sequence[torch.Tensor]], Callable[..., object]]:
        """A backend of `torch.compile` whose code is recorded. Raises CaptureError if not running.

        Only for recordings with the option ``graph``.
        """
        compile_ = self._running().backend
        if compile_ is None:
            raise CaptureError(f"the recording {self.options.name!r} compiles nothing: graph=None")
        return compile_

    @property
    def running(self) -> bool:
        return self._session is not None and self._pid == os.getpid()

    @property
    def nodes(self) -> list[Node]:
        """The modules followed so far."""
        return list(self._running().nodes)

    def step(self) -> int:
        """End the step and return the number of the next. From now on, only this ends steps."""
        return int(self._running().step())

    def alarm(self, reason: str) -> None:
        """Keep the steps that the option ``last`` has on hand for good, when this one ends.

        Raises CaptureError: the recording has no such option.
        """
        self._running().alarm(str(reason))

    def pause(self, backward: bool = False) -> None:
        """Pause until `resume`. With ``backward``, gradients of recorded tensors still arrive."""
        self._running().pause(backward)

    def resume(self) -> None:
        """Go on recording after `pause`."""
        self._running().resume()

    def on_call_end(
        self, callback: Callable[[OpenCall, RootCall, list[tuple[str, object]]], None]
    ) -> None:
        """Call ``callback(call, root_call, outputs)`` when a recorded call ends.

        The program waits until it returns.
        """
        self._running().on_call_end(callback)

    def save(self, name: str, value: object, gradients: bool = True) -> None:
        """Record the tensors in ``value`` as the output of ``save/name``, also during a pause.

        ``value`` is a tensor or a container of tensors. With ``gradients``, their gradients are
        recorded too when they arrive (phase ``backward``).
        """
        self._running().save(name, value, gradients)

    def status(self) -> str:
        """Return one line that says how far the recording is."""
        from llmdebug_nb.show.words import count_text, size_text

        steps, records, nbytes, paused = self._running().progress()
        step = "no step yet"
        if steps:
            step = f"step {steps[-1]} of {count_text(len(set(steps)), 'step')}"
        return (
            f"{self.options.name}: recording, {step}, {count_text(records, 'tensor')},"
            f" {size_text(nbytes)} kept{'; paused' if paused else ''}"
        )

    def _running(self) -> Session:
        if self._session is None:
            raise CaptureError(f"the recording {self.options.name!r} is not running")
        return self._session

    @interrupts.held
    def __enter__(self) -> Run:
        return self.start()

    @interrupts.held
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        if kind is None:
            self.stop()
            return
        try:
            self.stop(ended_by=kind.__name__)
        except (CaptureError, StoreError) as error_here:  # must not hide the program's own error
            warnings.warn(str(error_here), stacklevel=2)

    def _seed(self) -> determinism.Switched:
        """Apply the option ``seed``; return the list of its changes."""
        seed = self.options.seed
        return determinism.Switched() if seed is None else determinism.seed_only(seed)

    @interrupts.unbroken
    def abandon(self) -> None:
        """Drop the recording in a forked child; it continues in the parent process."""
        session, self._session = self._session, None
        atexit.unregister(self.at_exit)
        interrupts.unwatch(self)
        if session is not None:
            session.abandon()

    def at_exit(self) -> None:
        """End a recording that the program left running."""
        if self.running:
            try:
                self.end()
            except (CaptureError, StoreError) as error:
                print(f"llmdebug: {error}", file=sys.stderr)


def rank_here() -> int:
    """Return the rank of this process: from torch, else from ``$RANK``, else 0.

    Programs also use the name RANK for other things: anything but a number is left with a warning.
    """
    import torch

    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank()
    text = os.environ.get("RANK") or "0"
    if text.isascii() and text.isdigit() and int(text) <= _LAST_RANK:
        return int(text)
    warnings.warn(
        f"the environment variable RANK is {text[:40]!r}, which is no number from 0 to"
        f" {_LAST_RANK}: this process is recorded as rank 0",
        stacklevel=4,
    )
    return 0


def _parent(options: DumpOptions) -> Path:
    """Return the folder that will hold the run; one for a store is recorded here first."""
    if options.path is None or url_of(options) is not None:
        return runs_folder()
    return Path(options.path)
