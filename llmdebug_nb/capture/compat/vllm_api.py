"""vLLM's internals: the model inside an engine, and the requests of each of its steps.

Private are ``llm_engine.model_executor.driver_worker.worker.model_runner`` of an ``LLM``; of the
runner ``get_model``, ``execute_model``, ``sample_tokens`` and ``input_batch`` (or the result of
``prepare_inputs``, in its second version); and the fields of the scheduler's output
(``vllm/v1/core/sched/output.py``). vLLM 0.32. What is missing is named in the error, with the
release. Nothing here imports vLLM.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from typing import NamedTuple, Protocol, TypeAlias, TypeGuard

from torch import nn

from llmdebug_nb.capture.listeners import Listeners, with_methods
from llmdebug_nb.core import interrupts
from llmdebug_nb.core.errors import CaptureError

PACKAGE = "vllm"
_TO_RUNNER = ("llm_engine", "model_executor", "driver_worker", "worker", "model_runner")
_IN_PROCESS = (
    "the engine runs in another process: set VLLM_ENABLE_V1_MULTIPROCESSING=0 in the environment"
    " before the engine is made, or run the program under llmdebug dump --exec"
)
# the executor of several workers has ``workers`` in place of ``driver_worker``
_WORKERS = (
    "the engine's workers are processes of their own (tensor parallelism, for one): make it with"
    " one worker, or run the program under llmdebug dump --exec"
)
# a module that vLLM compiles has this attribute; while it is true, its forward runs as written
_NOT_COMPILED = "do_not_compile"


class Runner(Protocol):
    """vLLM's model runner, of either version."""

    def get_model(self) -> nn.Module: ...
    def execute_model(self, scheduled: object, /, *args: object, **kwargs: object) -> object: ...


class Scheduled(NamedTuple):
    """A request's part of a step. ``begins``: at this position; ``tokens``: so many.

    ``prompt``: of a new request, its ids. ``resumed``: it was preempted, and begins again.
    """

    request: str
    begins: int
    tokens: int
    prompt: Sequence[int] | None = None
    resumed: bool = False


class StepListener(Protocol):
    """Follows the steps of an engine. ``batch``: what tells the order of its requests.

    ``returned``: a step, or its sampling, ended without an error. ``ends``: with one or without.
    """

    def step_begins(self, scheduled: object) -> None: ...
    def sampling_begins(self) -> None: ...
    def prepared(self, batch: object) -> None: ...
    def returned(self) -> None: ...
    def ends(self) -> None: ...


_Method: TypeAlias = Callable[..., object]


def runner_of(llm: object) -> Runner:
    """Return the model runner of an engine.

    Raises:
        CaptureError: it runs in another process, or an attribute is missing.
    """
    holder = llm
    for name in _TO_RUNNER:
        if name == "model_executor" and not hasattr(holder, name):
            raise CaptureError(_IN_PROCESS)
        if name == "driver_worker" and not hasattr(holder, name) and hasattr(holder, "workers"):
            raise CaptureError(_WORKERS)
        holder = needed(holder, name)
    for name in ("get_model", "execute_model"):
        needed(holder, name)
    return holder  # type: ignore[return-value]


class RunningStep(NamedTuple):
    """A step of an engine that computes now. ``batch``: what tells the order of its requests.

    Both are None while the engine calls its model for itself, to warm up.
    """

    runner: Runner
    scheduled: object | None
    batch: object | None


def running(model: nn.Module) -> RunningStep | None:
    """Return the step of an engine that calls a model now; None if no engine does.

    The callers on this thread tell: one of them is a method of the runner that has the model.
    """
    runner: Runner | None = None
    frame = inspect.currentframe()
    while frame is not None:
        code = frame.f_code
        names: dict[str, object] = frame.f_locals
        owner: object = names.get("self")
        if runner is None and _runs(owner, model):
            runner = owner
        if runner is not None and owner is runner and code.co_name == "execute_model":
            scheduled = names.get(code.co_varnames[1]) if code.co_argcount > 1 else None
            return RunningStep(runner, scheduled, names.get("input_batch"))
        frame = frame.f_back
    return None if runner is None else RunningStep(runner, None, None)


def _runs(owner: object, model: nn.Module) -> TypeGuard[Runner]:
    """Tell whether an object is the runner of a model."""
    if isinstance(owner, nn.Module) or not hasattr(type(owner), "execute_model"):
        return False
    get_model: Callable[[], object] | None = getattr(owner, "get_model", None)
    return get_model is not None and get_model() is model


def needed(holder: object, name: str) -> object:
    """Return an attribute. Raises CaptureError, which names it, if it is missing."""
    found = getattr(holder, name, None)
    if found is None:
        release = getattr(sys.modules.get(PACKAGE), "__version__", "of an unknown release")
        raise CaptureError(
            f"vLLM {release}: {type(holder).__name__} has no {name!r}, which 0.32 has;"
            " record the model that runs in it, as in dump(model)"
        )
    return found


def compiles(model: nn.Module) -> bool:
    """Tell whether a part of a model runs as compiled code, which calls none of its modules."""
    return any(getattr(each, _NOT_COMPILED, True) is False for each in model.modules())


def run_eagerly(model: nn.Module) -> Callable[[], None]:
    """Let the parts of a model that vLLM compiled run as they are written; return how to undo it.

    The weights stay; custom operators that the compiled engine has off stay off.
    """
    undo = ExitStack()
    for each in model.modules():
        if getattr(each, _NOT_COMPILED, True) is False:
            setattr(each, _NOT_COMPILED, True)
            undo.callback(setattr, each, _NOT_COMPILED, False)
    return undo.close


def inductor_settings(runner: Runner) -> dict[str, object]:
    """Return the settings that an engine gives to Inductor; none in a release without them."""
    holder: object = runner
    for name in ("vllm_config", "compilation_config", "inductor_compile_config"):
        holder = getattr(holder, name, None)
    return dict(holder) if isinstance(holder, dict) else {}


# -- the steps of a runner ------------------------------------------------------------------------


def steps_of(runner: Runner) -> Listeners[StepListener]:
    """Return the listeners of a runner, which is wrapped while there are any."""
    listeners = vars(runner).get("_llmdebug_listeners")
    if listeners is None:
        listeners = Listeners[StepListener](lambda: _wrap(runner))
        vars(runner)["_llmdebug_listeners"] = listeners
    return listeners


def _wrap(runner: Runner) -> Callable[[], None]:
    listeners, undo = steps_of(runner), ExitStack()

    def around(name: str, begins: Callable[[StepListener, tuple[object, ...]], None]) -> None:
        inner: _Method | None = getattr(runner, name, None)
        if inner is None:
            return

        @functools.wraps(inner)
        def method(*args: object, **kwargs: object) -> object:
            with ExitStack() as stack:
                for listener in listeners:
                    stack.callback(listener.ends)
                    begins(listener, args)
                result = inner(*args, **kwargs)
                for listener in listeners:
                    listener.returned()
                return result

        undo.callback(with_methods([(runner, name, interrupts.let_through(method))]))

    around("execute_model", lambda listener, args: listener.step_begins(next(iter(args), None)))
    around("sample_tokens", lambda listener, args: listener.sampling_begins())
    prepare: _Method | None = getattr(runner, "prepare_inputs", None)
    if prepare is not None:

        @functools.wraps(prepare)
        def prepared(*args: object, **kwargs: object) -> object:
            batch = prepare(*args, **kwargs)
            for listener in listeners:
                listener.prepared(batch)
            return batch

        undo.callback(with_methods([(runner, "prepare_inputs", prepared)]))
    undo.callback(vars(runner).pop, "_llmdebug_listeners", None)
    return undo.close


def is_empty(scheduled: object) -> bool:
    """Tell whether a step has no tokens: the model is not called."""
    return not getattr(scheduled, "num_scheduled_tokens", None)


def order_of(batch: object) -> Sequence[str] | None:
    """Return the requests of a batch in the order of their rows; None if it does not tell."""
    requests = getattr(batch, "req_ids", None)
    if requests is None:
        return None
    count = getattr(batch, "num_reqs", None)
    return list(requests)[: count if isinstance(count, int) else None]


def scheduled_requests(scheduled: object) -> dict[str, Scheduled]:
    """Return each request of a step by its id. Raises CaptureError if a field is missing."""
    counts = needed(scheduled, "num_scheduled_tokens")
    cached = needed(scheduled, "scheduled_cached_reqs")
    new: Iterable[object] = needed(scheduled, "scheduled_new_reqs")  # type: ignore[assignment]
    found = {}
    for each in new:
        request, prompt = str(needed(each, "req_id")), getattr(each, "prompt_token_ids", None)
        begins = int(needed(each, "num_computed_tokens"))  # type: ignore[call-overload]
        found[request] = Scheduled(request, begins, counts[request], prompt)  # type: ignore[index]
    ids, computed = needed(cached, "req_ids"), needed(cached, "num_computed_tokens")
    resumed = getattr(cached, "resumed_req_ids", ())
    for request, begins in zip(ids, computed, strict=True):  # type: ignore[call-overload]
        count = counts[request]  # type: ignore[index]
        found[request] = Scheduled(request, begins, count, None, request in resumed)
    return found
