"""Run a recorded step of a live model again, and record it: alone, or with tensors put in."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from llmdebug_nb.capture import generation
from llmdebug_nb.capture.hooks import module_tree
from llmdebug_nb.capture.intervention import Intervention
from llmdebug_nb.capture.session import eager_session
from llmdebug_nb.capture.walk import leaves
from llmdebug_nb.core.errors import LLMDebugError, first_line
from llmdebug_nb.core.interrupts import Unbroken, let_through, unbroken
from llmdebug_nb.core.options import DumpOptions
from llmdebug_nb.core.paths import module_name, within
from llmdebug_nb.core.records import CallKey, Site
from llmdebug_nb.replay import arguments
from llmdebug_nb.replay.execution import quiet
from llmdebug_nb.replay.operators import CannotReplay
from llmdebug_nb.replay.runs import Side
from llmdebug_nb.replay.swap import restored
from llmdebug_nb.store import reader
from llmdebug_nb.store.run import Run
from llmdebug_nb.store.writer import Writer, create_run

if TYPE_CHECKING:
    from llmdebug_nb.capture.hooks.handles import Handle
    from llmdebug_nb.replay.in_place import Put
    from llmdebug_nb.store.run import Run

Weights = Mapping[tuple[str, str], "Put"]  # by path of the module and name
FindModule: TypeAlias = Callable[[str], torch.nn.Module | None]
# options that say which calls were recorded; the rest of a run's options is kept
_ANY = ("rounds", "ranks", "warmup", "device", "scope", "ids", "overflow", "seed", "profile")


def live(path: str, find: FindModule) -> torch.nn.Module:
    """Return the live module of a path. Raises CannotReplay."""
    module = find(path)
    if module is None:
        raise CannotReplay("the model is gone: this process has no live one of this run")
    return module


@dataclass
class Step:
    """A recorded call of a live model or module. ``key``: the call in its run.

    ``options_of``: the run whose options it is recorded with; default: that of the call.
    """

    side: Side
    key: CallKey
    model: torch.nn.Module
    options_of: Run | None = None
    _arguments: arguments.Arguments = field(init=False)
    _load: Callable[[str], torch.Tensor] = field(init=False)

    def __post_init__(self) -> None:
        """Raises CannotReplay: its inputs can't be rebuilt."""
        inputs = self.side.records(self.key, "input")
        scalars = self.side.scalars(self.key)
        where = self.key.path or "the model"
        if not inputs and not scalars:
            raise CannotReplay(f"the inputs of {where} were not recorded in step {self.key.step}")
        cached = any(arguments.is_cache(slot, scalar) for slot, scalar in scalars.items())
        if cached and self.key.step > 0:
            raise CannotReplay(
                f"step {self.key.step} was called with a cache of earlier tokens, which is not "
                "recorded; a step without a cache, such as the prefill, can be run again"
            )
        self._arguments = arguments.arguments_of(inputs, scalars, without_cache=True)
        device = next((p.device for p in self.model.parameters()), torch.device("cpu"))
        load = arguments.loader(self.side, inputs)
        self._load = lambda slot: load(slot).to(device)

    @classmethod
    def of(cls, site: Site, side: Side, find: FindModule) -> Step:
        """Return the root call that a site belongs to. ``find(path)``: the live module, or None.

        Raises CannotReplay.
        """
        roots = [node.path for node in side.run.nodes if node.parent < 0]
        holding = (path for path in roots if path in ("", site.path) or within(site.path, path))
        path = max(holding, key=len, default="")
        key = replace(site, path=path, call=0, phase="forward").key
        step = cls(side, key, live(path, find))
        if side.records(key._replace(call=1), "input"):
            raise CannotReplay(f"step {key.step} calls {path or 'the model'} more than once")
        return step

    def results(
        self, seed: int = 0, substitution: Intervention | None = None
    ) -> dict[str, torch.Tensor]:
        """Run it again, unrecorded; return its tensors by slot. Raises CannotReplay."""
        hooks, given = _hooked(substitution, self._module), self._given()
        with Unbroken(_unchanged(self.model), hooks, quiet(seed)):
            result = self._call(given)
        found = ((slot, leaf) for slot, leaf in leaves(result) if isinstance(leaf, torch.Tensor))
        return {slot: tensor.cpu() for slot, tensor in found}

    def recorded(
        self,
        substitution: Intervention | None = None,
        weights: Weights | None = None,
        changed: Mapping[str, object] | None = None,
    ) -> Run:
        """Run it again and record it as the same step, with the run's options.

        ``changed``: other options. The run is deleted when nobody holds it any more. Raises
        CannotReplay.
        """
        given = self._given()

        def work() -> None:
            with quiet():
                self._call(given)

        put = _weights(self.model, self.key.path, weights or {})
        hooks = _hooked(substitution, self._module)
        with Unbroken(_unchanged(self.model), put, hooks):
            at = self.key.generation, self.key.step
            options = _options(self.options_of or self.side.run) | dict(changed or {})
            run = record([self.model], work, options, self.key.rank, at, substitution)
        if substitution is not None and substitution.problem is not None:
            raise CannotReplay(str(substitution.problem))
        return run

    def _module(self, path: str) -> torch.nn.Module | None:
        return _part(self.model, path, self.key.path)

    def _given(self) -> arguments.Arguments:
        """Load the arguments, before anything is hooked: a model may have to run for that."""
        return arguments.filled(self._arguments, self._load)

    def _call(self, given: arguments.Arguments) -> object:
        args, kwargs = given
        try:
            return self.model(*args, **kwargs)
        except Exception as error:  # the model is the program's: it may raise anything
            text = f"{type(error).__name__}: {first_line(error)}"
            raise CannotReplay(f"the model fails when it is run again: {text}") from None


@unbroken
def record(
    models: Sequence[torch.nn.Module],
    work: Callable[[], object],
    options: Mapping[str, object],
    rank: int = 0,
    at: tuple[int, int] | None = None,
    substitution: Intervention | None = None,
) -> Run:
    """Record models, or whatever runs, while ``work`` runs; return a run that is nobody's.

    ``at``: its generation and step. The run is deleted when nobody holds it any more. Raises
    CannotReplay.
    """

    @let_through
    def run_program() -> None:
        work()

    folder = Path(tempfile.mkdtemp(prefix="llmdebug-"))
    given: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
    try:
        chosen = DumpOptions.of(**given | {"path": folder})
        place = create_run(folder, chosen.name, {"options": chosen.as_json()})
        session = eager_session(chosen, Writer(place, rank), module_tree.build, models, rank)
        if at is not None:
            session.run_again(*at, substitution)
        session.start()
        try:
            run_program()
        finally:
            session.stop()
        refusal = session.refusal()
        if refusal is not None:
            raise refusal
    except BaseException as error:
        shutil.rmtree(folder, ignore_errors=True)
        if isinstance(error, LLMDebugError):
            raise CannotReplay(str(error)) from None
        raise
    run = reader.native(place)
    weakref.finalize(run, shutil.rmtree, folder, ignore_errors=True)
    return run


def _options(run: Run) -> dict[str, object]:
    """Return the options of a run that say what of a step is recorded. Raises CannotReplay."""
    recorded = dict(run.meta.get("options") or {})
    if recorded.get("graph"):
        raise CannotReplay("compiled code can't be run again with other values")
    known = [name for name in DumpOptions.names() if name in recorded and name not in _ANY]
    settings = {name: recorded[name] for name in known}
    return settings | {"name": "again", "tokens": "all", "phase": "forward"}


@contextlib.contextmanager
def _unchanged(model: torch.nn.Module) -> Iterator[None]:
    """Leave a model as it is, its own hooks included: they belong to what was recorded."""
    if any(True for _ in generation.listeners):
        raise CannotReplay("a recording is running: end it first, or it would record this too")
    with restored(model):
        yield


@contextlib.contextmanager
def _hooked(substitution: Intervention | None, module: FindModule) -> Iterator[None]:
    """Hook the modules whose tensors are substituted."""
    handles: list[Handle] = [] if substitution is None else substitution.hook(module)
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextlib.contextmanager
def _weights(model: torch.nn.Module, root: str, weights: Weights) -> Iterator[None]:
    """Put other weights into a model for a while; their memory itself is never written to."""
    before: list[tuple[torch.Tensor, torch.Tensor]] = []
    try:
        for (path, name), put in weights.items():
            own = getattr(_part(model, path, root), name, None)
            if not isinstance(own, torch.Tensor):
                raise CannotReplay(f"mine's model has no weight {name} in {path or 'the model'}")
            before.append((own, own.data))
            own.data = put(own.data)
        yield
    finally:
        for own, data in reversed(before):
            own.data = data


def _part(model: torch.nn.Module, path: str, root: str) -> torch.nn.Module | None:
    """Return the module at a path of the run. ``root``: the path of the model itself."""
    with contextlib.suppress(AttributeError):
        return model.get_submodule(module_name(path.removeprefix(root).removeprefix(".")))
    return None
