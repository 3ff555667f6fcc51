"""The only home of Dynamo's and AOTAutograd's internals: compiling a model with our own backend."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from types import FrameType

import torch
from torch import nn

from llmdebug_nb.capture.compat import pytorch
from llmdebug_nb.capture.compiled.origins import Frame
from llmdebug_nb.core.errors import PACKAGE

_NOT_THE_PROGRAM = (PACKAGE, os.path.dirname(os.path.abspath(torch.__file__)) + os.sep)
_RECOMPILATIONS = 64  # enough for the shapes and graph breaks of one program: all are recorded
GraphCompiler = Callable[[torch.fx.GraphModule, bool], Callable[..., object]]


def compiled_frame(traced: torch.fx.GraphModule) -> Frame:
    """Return the code that Dynamo is compiling; only the graph is known if Dynamo doesn't tell."""
    from torch._dynamo.symbolic_convert import InstructionTranslator

    try:
        code = InstructionTranslator.current_tx()
    except (AttributeError, IndexError):
        return Frame(traced, {"L": {}, "G": {}}, None)
    first = code.f_code.co_varnames[0] if code.f_code.co_varnames else None
    return Frame(traced, {"L": dict(code.f_locals), "G": code.f_globals}, first)


def aot(
    traced: torch.fx.GraphModule, inputs: Sequence[object], compile_graph: GraphCompiler
) -> Callable[..., object]:
    """Turn a traced program into graphs of operators.

    ``compile_graph(graph, backward)`` returns the function that runs a graph.
    """
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch import config

    def compiler(backward: bool) -> Callable[..., object]:
        return lambda graph, _: compile_graph(graph, backward)

    backend = aot_autograd(fw_compiler=compiler(False), bw_compiler=compiler(True))
    with config.patch(enable_autograd_cache=False):
        run: Callable[..., object] = backend(traced, inputs)
    return run


@contextlib.contextmanager
def compiled_with(model: nn.Module, backend: Callable[..., object]) -> Iterator[None]:
    """Compile a model's forward with ``backend``, whatever compiled it before.

    The hooks of the model stay outside. ``model`` may be the result of `torch.compile`.
    """
    from torch._dynamo import config

    inner = pytorch.compiled_root(model)
    compile_forward: Callable[..., object] = torch.compile
    isolated = "isolate_recompiles" in (torch.compile.__kwdefaults__ or {})
    options = {"isolate_recompiles": True} if isolated else {}
    before = {name: vars(model).get(name, ...) for name in ("forward", "_compiled_call_impl")}
    with config.patch(recompile_limit=max(_RECOMPILATIONS, config.recompile_limit)):
        vars(model)["forward"] = compile_forward(inner.forward, backend=backend, **options)
        vars(model)["_compiled_call_impl"] = None
        try:
            yield
        finally:
            for name, value in before.items():
                if value is ...:
                    vars(model).pop(name, None)
                else:
                    vars(model)[name] = value


@contextlib.contextmanager
def compiling(aside: Callable[[], AbstractContextManager[object]]) -> Iterator[None]:
    """Run every compilation during the block inside of ``aside()``.

    Does nothing if this version of Dynamo doesn't report compilations.
    """
    try:
        from torch._dynamo.callback import callback_handler
    except ImportError:
        yield
        return
    entered: list[AbstractContextManager[object]] = []

    def begin(*_: object) -> None:
        entered.append(aside())
        entered[-1].__enter__()

    def end(*_: object) -> None:
        if entered:
            entered.pop().__exit__(None, None, None)

    callback_handler.register_start_callback(begin)
    callback_handler.register_end_callback(end)
    try:
        yield
    finally:
        callback_handler.remove_start_callback(begin)
        callback_handler.remove_end_callback(end)


def same_randomness(values: Sequence[object]) -> AbstractContextManager[None]:
    """Restore the random state after the block, on the CPU and the devices of these tensors."""
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    devices = {t.device.index or 0 for t in tensors if t.device.type == "cuda"}
    return torch.random.fork_rng(sorted(devices))


def outermost_call() -> tuple[nn.Module | None, FrameType | None]:
    """Return the outermost module that runs in this thread, and the frame of its call.

    Outside of all modules, the frame is that of a compiled function's call.
    """
    module: nn.Module | None = None
    module_frame: FrameType | None = None
    function_frame: FrameType | None = None
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_name
        if name in ("_wrapped_call_impl", "_call_impl"):
            owner = frame.f_locals.get("self")
            if isinstance(owner, nn.Module):
                module, module_frame = owner, frame
        elif name == "compile_wrapper":
            function_frame = frame
        frame = frame.f_back
    return module, module_frame if module is not None else function_frame


def running_owner(name: str | None) -> nn.Module | None:
    """Return the module in variable ``name`` of the program's innermost frame that has one."""
    frame: FrameType | None = sys._getframe(1) if name is not None else None
    while frame is not None:
        if not frame.f_code.co_filename.startswith(_NOT_THE_PROGRAM):
            owner = frame.f_locals.get(name or "")
            if isinstance(owner, nn.Module):
                return owner
        frame = frame.f_back
    return None
