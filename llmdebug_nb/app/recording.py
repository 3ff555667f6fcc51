"""Recordings: what starts a capture session, gives it a place to write to, and ends it."""

from __future__ import annotations

import atexit
import contextlib
import os
import platform
import shutil
import sys
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

from llmdebug_nb.capture.hooks import module_tree
from llmdebug_nb.core import determinism
from llmdebug_nb.core.errors import CaptureError, OptionError, StoreError
from llmdebug_nb.core.options import DumpOptions, runs_folder
from llmdebug_nb.core.paths import within
from llmdebug_nb.core.records import Node
from llmdebug_nb.show.words import count_text, size_text
from llmdebug_nb.store import reader
from llmdebug_nb.store.run import Run
from llmdebug_nb.store.writer import Writer, create_run

recorded: dict[str, Path] = {}  # runs of this process by name, wherever they were put
_models: dict[
    Path, list[tuple[str, weakref.ref[Any]]]
] = {}  # their folder -> path and module of each root


class Recording:
    """A recording: a context manager that gives the Run; or `start` … `stop` by hand. Made by `dump`.

    ``model``: a module, a session of ONNX Runtime, several, or None for whatever runs.
    """

    def __init__(
        self,
        model: Any,
        options: DumpOptions,
        manual: bool = False,
        rank: int | None = None,
        compiles: bool = False,
    ) -> None:
        """``manual``: steps are counted by `step` alone, from 0. ``rank``: of this process, where torch can't tell.
        ``compiles``: whatever is compiled with `backend` is recorded.

        Raises:
            OptionError: something is no module, or given twice; no model, where one is to be compiled.
        """
        if options.graph is not None and model is None and not compiles:
            raise OptionError(
                f"graph={options.graph!r} compiles the model: name it, as in dump(model, graph={options.graph!r});"
                " code that you compile yourself is recorded by fx_backend and inductor_backend"
            )
        self.options = options
        self._rank = rank_here() if rank is None else rank
        self._models = recordable(model)
        if options.graph is not None:
            checked(model)  # sessions of ONNX Runtime are recorded as they are
        self._manual = manual
        self._session: Any = None
        self._switched = determinism.Switched()
        self._made: list[Path] = []  # folders of runs
        self._written: list[Path] = []  # those of this process in them
        self.run: Run | None = None

    def start(self) -> Run:
        """Hook the model and begin. Raises CaptureError, StoreError; then nothing is left behind."""
        if self._session is not None:
            raise CaptureError(f"the recording {self.options.name!r} is already running")
        folder = self._create(self.options.name)
        self._made, self._written, writers = [folder], [], []
        try:
            writers.append(self._writer(folder))
            if self.options.graph == "both":
                self._made.append(self._create(f"{self.options.name}.fx"))
                writers.append(self._writer(self._made[1]))
            self._session = self._make_session(*writers)
            self._switched = self._seed()
            if self._switched:
                for writer in writers:
                    writer.note({"determinism": self._switched})
        except BaseException:
            self._session = None
            self._switched.restore()
            for writer in writers:
                writer.close({})
            self._discard()
            raise
        self._session.start()
        if self._manual:
            self._session.stepping()
        atexit.register(self.at_exit)
        self.run = reader.native(folder)
        recorded[self.options.name] = folder
        recorded.update({f"{self.options.name}.fx": place for place in self._made[1:]})
        return self.run

    def _create(self, name: str) -> Path:
        details = {"options": self.options.as_json(), "environment": _environment()}
        return create_run(_parent(self.options), name, details)

    def _writer(self, folder: Path) -> Writer:
        writer = Writer(folder, self._rank)
        self._written.append(writer.folder)
        return writer

    def _discard(self) -> None:
        """Remove what was written: there is nothing in it."""
        for place in self._made:
            shutil.rmtree(place, ignore_errors=True)

    def _make_session(self, writer: Writer, reference: Writer | None = None) -> Any:
        if self.options.graph is None:
            from llmdebug_nb.capture.session import Session

            return Session(self.options, writer, module_tree.build, self._models, self._rank)
        from llmdebug_nb.capture.compiled.session import CompiledSession

        return CompiledSession(
            self.options, writer, module_tree.build, self._models, self._rank, reference
        )

    def stop(self, ended_by: str | None = None) -> Run:
        """Take every hook off and finish the dump.

        Raises:
            EmptyDumpError: nothing was recorded; the message says why. The empty dump is removed.
            DumpWriteError: the dump could not be completed (disk full); what was written stays readable.
        """
        session, run = self._session, self.run
        if session is None or run is None:
            raise CaptureError("the recording is not running")
        self._session = None
        atexit.unregister(self.at_exit)
        try:
            session.stop(ended_by)
        finally:
            self._switched.restore()
        if run.path is not None:
            _models[run.path] = [(path, weakref.ref(root)) for path, root in session.followed()]
        refusal = session.refusal()
        if refusal is not None:
            recorded.pop(self.options.name, None)
            recorded.pop(f"{self.options.name}.fx", None)
            self._discard()
            raise refusal
        return run

    remove = stop

    @property
    def backend(self) -> Callable[..., Any]:
        """Compiles a traced program, recorded: a backend of `torch.compile`. Raises CaptureError where nothing is recorded."""
        compile_: Callable[..., Any] = self._running().graphs.backend
        return compile_

    @property
    def running(self) -> bool:
        return self._session is not None

    @property
    def nodes(self) -> list[Node]:
        """The modules that are followed by now."""
        return list(self._running().nodes)

    def step(self) -> int:
        """End the current step; return the number of the one that begins. From now on, only this ends a step."""
        return int(self._running().step())

    def pause(self, backward: bool = False) -> None:
        """Record nothing more until `resume`; with ``backward``, still the gradients of what was recorded."""
        self._running().pause(backward)

    def resume(self) -> None:
        """Go on recording after `pause`."""
        self._running().resume()

    def on_call_end(self, callback: Callable[..., None]) -> None:
        """Have ``callback(call, root_call, outputs)`` called after each recorded call; the program waits until it returns."""
        self._running().on_call_end(callback)

    def save(self, name: str, value: Any, gradients: bool = True) -> None:
        """Record the tensors in ``value`` (one, or containers of them) as the output of ``save/name``.

        With ``gradients``, those that arrive for them later are recorded too (phase ``backward``). Also during a pause.
        """
        self._running().save(name, value, gradients)

    def status(self) -> str:
        """Return one line that says how far the recording is."""
        steps, records, kept, paused = self._running().progress()
        where = (
            f"step {steps[-1]} of {count_text(len(set(steps)), 'step')}" if steps else "no step yet"
        )
        parts = [
            f"{self.options.name}: recording",
            where,
            count_text(records, "tensor"),
            f"{size_text(kept)} kept",
        ]
        return ", ".join(parts) + ("; paused" if paused else "")

    def _running(self) -> Any:
        if self._session is None:
            raise CaptureError(f"the recording {self.options.name!r} is not running")
        return self._session

    def __enter__(self) -> Run:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        if kind is None:
            self.stop()
            return
        try:
            self.stop(ended_by=kind.__name__)
        except (CaptureError, StoreError) as ours:  # the program's own exception is the news
            warnings.warn(str(ours), stacklevel=2)

    def _seed(self) -> determinism.Switched:
        """Seed what options ask to, and say what was done."""
        return (
            determinism.Switched()
            if self.options.seed is None
            else determinism.seed_only(self.options.seed)
        )

    def abandon(self) -> None:
        """Let go of a recording that goes on in the process that this one was forked from."""
        session, self._session = self._session, None
        atexit.unregister(self.at_exit)
        if session is not None:
            session.abandon()

    def at_exit(self) -> None:
        """End a recording that the program has left running."""
        if self._session is not None:
            try:
                self.stop()
            except (CaptureError, StoreError) as error:
                print(f"llmdebug: {error}", file=sys.stderr)


def checked(model: Any) -> tuple[Any, ...]:
    """Return the modules in ``model``: none, one, or several."""
    return _checked(model, lambda one: False, "a torch.nn.Module")


def recordable(model: Any) -> tuple[Any, ...]:
    """Return the modules and the sessions of ONNX Runtime in ``model``: none, one, or several."""
    from llmdebug_nb.capture.compat.onnxruntime_api import is_session

    return _checked(model, is_session, "a torch.nn.Module or an onnxruntime.InferenceSession")


def _checked(model: Any, also: Callable[[Any], bool], expected: str) -> tuple[Any, ...]:
    if model is None:
        return ()
    import torch

    models = tuple(model) if isinstance(model, (list, tuple)) else (model,)
    for number, one in enumerate(models):
        if not isinstance(one, torch.nn.Module) and not also(one):
            raise OptionError(
                f"model: expected {expected}, got {type(one).__name__}; leave it out to record whatever runs"
            )
        if any(one is other for other in models[:number]):
            raise OptionError(f"model: the same {type(one).__name__} is given twice")
    return models


def finder(run: Run, model: Any = None) -> Callable[[str], Any]:
    """Return what gives the live module at a path of a run, or None: of ``model``, else of what this process recorded, as
    long as that still exists.

    Raises:
        OptionError: ``model`` is no module.
    """
    given = checked(model)
    known = [] if run.path is None or given else _models.get(run.path, [])

    def find(path: str) -> Any:
        roots = [("", one) for one in given] or [(place, seen()) for place, seen in known]
        for place, root in roots:
            inside = (
                path
                if not place
                else path.removeprefix(place).removeprefix(".")
                if within(path, place)
                else None
            )
            if root is not None and inside is not None:
                with contextlib.suppress(AttributeError):
                    return root.get_submodule(inside)
        return None

    return find


def rank_here() -> int:
    """Return this process's rank in its job: what torch knows, else ``$RANK``, else 0."""
    import torch

    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank()
    return int(os.environ.get("RANK", "0") or 0)


def _parent(options: DumpOptions) -> Path:
    return runs_folder() if options.path is None else Path(options.path)


def _environment() -> dict[str, str]:
    """Return versions that bear on numerics; nothing that names a machine or a person."""
    import torch

    found = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "platform": f"{platform.system()} {platform.machine()}",
    }
    for name in ("transformers", "numpy", "accelerate", "onnxruntime"):
        if name in sys.modules:
            found[name] = str(getattr(sys.modules[name], "__version__", ""))
    if torch.cuda.is_available():
        found["device"] = torch.cuda.get_device_name()
    return found
