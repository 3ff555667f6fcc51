"""OpenVINO's runtime: how compiled models run, what they were made of, and how they were compiled.

OpenVINO does not say what model a compiled one was made of. So we note it as a program compiles, or
look for the model among those that the program still has. `missing` names what another release
lacks.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import sys
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Protocol, TypeAlias, TypeGuard, TypeVar

from llmdebug_nb.capture.compat import pytorch
from llmdebug_nb.capture.listeners import Listeners, with_methods
from llmdebug_nb.core import interrupts
from llmdebug_nb.core.errors import CaptureError, first_line

if TYPE_CHECKING:
    from openvino import AsyncInferQueue, CompiledModel, Core, InferRequest, Model

    Target: TypeAlias = CompiledModel | InferRequest

T = TypeVar("T")
PACKAGE = "openvino"
# what recording uses, by class
NEEDED = {
    "InferRequest": (
        "infer", "start_async", "wait", "reset_state", "query_state", "model_inputs",
        "model_outputs", "input_tensors", "output_tensors", "set_input_tensor",
    ),
    "CompiledModel": (
        "inputs", "outputs", "get_property", "get_runtime_model", "create_infer_request",
    ),
    "Core": ("compile_model", "read_model", "get_property"),
    "AsyncInferQueue": ("start_async", "get_idle_request_id"),
}  # fmt: skip


class Listener(Protocol):
    """Follows runs. ``own()`` runs the program's request and returns when it is done."""

    def infers(self, request: InferRequest, own: Callable[[], T]) -> T: ...
    def resets(self, request: InferRequest) -> None: ...


# -- runs of the program's requests ---------------------------------------------------------------


@dataclass(frozen=True)
class Source:
    """What a model was compiled of, as the program said it. ``core``: that compiled it."""

    core: Core
    model: Model | None = None
    read: tuple[object, ...] = ()  # arguments of `Core.read_model`

    def open(self) -> Model:
        """Return the model. Raises CaptureError: its file can't be read any more."""
        if self.model is not None:
            return self.model
        try:
            return self.core.read_model(*self.read)
        except Exception as error:  # openvino raises RuntimeErrors of all kinds
            raise CaptureError(
                f"the file that the model was compiled of can't be read ({first_line(error)});"
                " put it back, or compile the model anew"
            ) from None


# by `key_of`; what a program compiles before its first run is known when the recording begins then
_sources: dict[Hashable, Source] = {}


_OURS = "_llmdebug_tap"


def _wrap(module: ModuleType) -> Callable[[], None]:
    """Report all runs to the listeners and note what is compiled; return how to undo this."""
    wrappers: list[tuple[str, str, Callable[..., Callable[..., object]]]] = [
        ("InferRequest", "infer", _reported),
        ("InferRequest", "start_async", _reported_async),
        ("InferRequest", "reset_state", _reported_reset),
        ("AsyncInferQueue", "start_async", _reported_queue),
        ("Core", "compile_model", _noted),
    ]
    methods: list[tuple[object, str, object]] = []
    for kind, name, wrapper in wrappers:
        owner = getattr(module, kind, None)
        original = getattr(owner, name, None)
        if original is not None:
            methods.append((owner, name, wrapper(original)))
    return with_methods(methods)


def _tell(request: InferRequest, own: Callable[[], T]) -> T:
    """Let each listener follow a run, unless it is ours."""
    for listener in () if getattr(request, _OURS, False) else listeners.at_run(request):
        own = functools.partial(listener.infers, request, own)
    return own()


@interrupts.let_through
def _programs(original: Callable[..., T], /, *args: object, **kwargs: object) -> T:
    """Run the program's request; an interrupt ends that at once."""
    return original(*args, **kwargs)


def _reported(original: Callable[..., object]) -> Callable[..., object]:
    @functools.wraps(original)
    @interrupts.unbroken  # how a recording begins and ends a run; the program's own run is none
    def infer(request: InferRequest, *args: object, **kwargs: object) -> object:
        return _tell(request, functools.partial(_programs, original, request, *args, **kwargs))

    return infer


def _reported_async(original: Callable[..., object]) -> Callable[..., object]:
    @functools.wraps(original)
    @interrupts.unbroken
    def start_async(request: InferRequest, *args: object, **kwargs: object) -> object:
        return _tell_async(request, functools.partial(original, request, *args, **kwargs))

    return start_async


def _reported_queue(original: Callable[..., object]) -> Callable[..., object]:
    @functools.wraps(original)
    @interrupts.unbroken
    def start_async(queue: AsyncInferQueue, *args: object, **kwargs: object) -> object:
        request = queue[queue.get_idle_request_id()]  # the one that the queue will take
        return _tell_async(request, functools.partial(original, queue, *args, **kwargs))

    return start_async


class _Failed(Exception):
    """An asynchronous run has failed. The program is told why as it waits for it."""


def _tell_async(request: InferRequest, start: Callable[[], object]) -> object:
    """Let each listener follow an asynchronous run, which ends before this returns."""
    started: list[object] = []

    def run() -> None:
        started.append(_programs(start))
        try:
            _programs(request.wait)
        except RuntimeError:
            raise _Failed from None

    with contextlib.suppress(_Failed):
        _tell(request, run)
    return started[0]


def _reported_reset(original: Callable[..., object]) -> Callable[..., object]:
    @functools.wraps(original)
    def reset_state(request: InferRequest) -> object:
        done = original(request)
        for listener in () if getattr(request, _OURS, False) else listeners:
            listener.resets(request)
        return done

    return reset_state


def _noted(original: Callable[..., CompiledModel]) -> Callable[..., CompiledModel]:
    @functools.wraps(original)
    def compile_model(core: Core, model: object, *args: object, **kwargs: object) -> CompiledModel:
        compiled = original(core, model, *args, **kwargs)
        if is_model(model):
            # the program may change its model afterwards; a clone shares the weights
            _sources[key_of(compiled)] = Source(core, model=model.clone())
        else:
            weights = kwargs.get("weights")
            _sources[key_of(compiled)] = Source(
                core, read=(model,) if weights is None else (model, weights)
            )
        return compiled

    return compile_model


# also if openvino is only imported later
listeners: Listeners[Listener] = Listeners(lambda: pytorch.with_module(PACKAGE, _wrap))


def end(listener: Listener) -> None:
    """End a recording's listening; the last one forgets what the program compiled."""
    listeners.remove(listener)
    if not listeners:
        _sources.clear()


def own_request(compiled: CompiledModel) -> InferRequest:
    """Return a request whose runs are not reported."""
    request = compiled.create_infer_request()
    setattr(request, _OURS, True)
    return request


# -- what the program has -------------------------------------------------------------------------


def _is_a(value: object, name: str) -> bool:
    kind = getattr(sys.modules.get(PACKAGE), name, None)
    return kind is not None and isinstance(value, kind)


def is_model(value: object) -> TypeGuard[Model]:
    """Tell whether a value is a model that can be compiled."""
    return _is_a(value, "Model")


def missing() -> str | None:
    """Return the name of an attribute that this openvino lacks, or None."""
    module = sys.modules[PACKAGE]
    for kind, names in NEEDED.items():
        owner = getattr(module, kind, None)
        for name in names:
            if not hasattr(owner, name):
                return f"{kind}.{name}"
    return None


def release() -> str:
    return str(getattr(sys.modules.get(PACKAGE), "__version__", "?"))


def compiled_of(target: Target) -> CompiledModel:
    """Return the compiled model of a request, or the model itself."""
    return target.get_compiled_model() if _is_a(target, "InferRequest") else target


def key_of(target: Target) -> Hashable:
    """Return what a compiled model and all its requests have in common: their first output."""
    ports = target.model_outputs if _is_a(target, "InferRequest") else target.outputs
    key: Hashable = ports[0]
    return key


def source_of(target: Target, given: Sequence[Model] = ()) -> Source:
    """Return what a model was compiled of.

    That is what the program compiled while we listened, else a model of the same name and ports
    among ``given``, else among all that the program has.

    Raises:
        CaptureError: there is none, or there are several.
    """
    import openvino

    noted = _sources.get(key_of(target))
    if noted is not None:
        return noted
    compiled = compiled_of(target)
    known = given or [one for one in gc.get_objects() if type(one) is openvino.Model]
    name = str(property_of(compiled, "NETWORK_NAME"))
    found = [
        one for one in known if one.get_friendly_name() == name and _ports(one) == _ports(compiled)
    ]
    if len(found) == 1:
        return Source(openvino.Core(), model=found[0])
    how = "give the model that it was compiled of: ld.dump((compiled, model))"
    if found:
        raise CaptureError(f"{len(found)} models are called {name!r} and have its ports; {how}")
    raise CaptureError(
        "openvino does not keep the model that it compiled, and"
        f" {'none of the models given' if given else 'no openvino.Model of this program'}"
        f" is called {name!r} and has its ports; {how}, also if it was imported from a blob,"
        " or compile it inside of the recording"
    )


def _ports(model: Model | CompiledModel) -> list[list[tuple[list[str], str]]]:
    """Return names and types of a model's inputs and outputs."""
    return [
        [(sorted(port.get_names()), port.get_element_type().get_type_name()) for port in ports]
        for ports in (model.inputs, model.outputs)
    ]


def property_of(compiled: CompiledModel, name: str) -> object:
    """Return a property of a compiled model; None if its device has no such property."""
    try:
        return compiled.get_property(name)
    except (RuntimeError, TypeError):
        return None
