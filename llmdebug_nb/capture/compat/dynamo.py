"""The only home of Dynamo's and AOTAutograd's internals: how a model is compiled with a backend of ours, and what is known of it then."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any

import torch
from torch import nn

from llmdebug_nb.capture.compat import pytorch
from llmdebug_nb.capture.compiled.origins import Frame
from llmdebug_nb.core.errors import PACKAGE

_NOT_THE_PROGRAM = (PACKAGE, os.path.dirname(os.path.abspath(torch.__file__)) + os.sep)
_AGAIN = 64  # times that one program may be compiled anew, for other shapes and graphs after breaks: a run that records should see all


def compiled_frame(traced: torch.fx.GraphModule) -> Frame:
    """Return what is known of the code that Dynamo compiles right now; of nothing but the graph where that is not known."""
    from torch._dynamo.symbolic_convert import InstructionTranslator

    try:
        code = InstructionTranslator.current_tx()
    except (AttributeError, IndexError):
        return Frame(traced, {"L": {}, "G": {}}, None)
    first = code.f_code.co_varnames[0] if code.f_code.co_varnames else None
    return Frame(traced, {"L": dict(code.f_locals), "G": code.f_globals}, first)


def aot(
    traced: torch.fx.GraphModule, inputs: Sequence[Any], compiled: Callable[[torch.fx.GraphModule, bool], Callable[..., Any]]
) -> Callable[..., Any]:  # fmt: skip
    """Turn a traced program into graphs of operators; ``compiled(graph, backward)`` gives what runs each."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch import config

    def compiler(backward: bool) -> Callable[..., Any]:
        return lambda graph, _: compiled(graph, backward)

    with config.patch(enable_autograd_cache=False):
        run: Callable[..., Any] = aot_autograd(
            fw_compiler=compiler(False), bw_compiler=compiler(True)
        )(traced, inputs)
    return run


@contextlib.contextmanager
def compiled_with(model: nn.Module, backend: Callable[..., Any]) -> Iterator[None]:
    """Have a model's forward compiled with ``backend``, in place of however it was compiled before; its hooks stay outside.

    ``model`` may be what `torch.compile` made of one.
    """
    from torch._dynamo import config

    inner = pytorch.compiled_root(model)
    known = torch.compile.__kwdefaults__ or {}
    how: dict[str, Any] = {"isolate_recompiles": True} if "isolate_recompiles" in known else {}
    before = {name: vars(model).get(name, ...) for name in ("forward", "_compiled_call_impl")}
    with config.patch(recompile_limit=max(_AGAIN, config.recompile_limit)):
        vars(model)["forward"] = torch.compile(inner.forward, backend=backend, **how)
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
def compiling(aside: Callable[[], contextlib.AbstractContextManager[Any]]) -> Iterator[None]:
    """While this is entered, whatever is compiled is compiled inside of ``aside()``; nothing is where Dynamo does not tell of it."""
    try:
        from torch._dynamo.callback import callback_handler as told
    except ImportError:
        yield
        return
    begun: list[contextlib.AbstractContextManager[Any]] = []

    def begins(*_: Any) -> None:
        begun.append(aside())
        begun[-1].__enter__()

    def ends(*_: Any) -> None:
        if begun:
            begun.pop().__exit__(None, None, None)

    told.register_start_callback(begins)
    told.register_end_callback(ends)
    try:
        yield
    finally:
        told.remove_start_callback(begins)
        told.remove_end_callback(ends)


def same_randomness(tensors: Sequence[Any]) -> contextlib.AbstractContextManager[Any]:
    """What is drawn in here is drawn once more after it, on the CPU and on the devices of these tensors."""
    devices = {
        t.device.index or 0
        for t in tensors
        if isinstance(t, torch.Tensor) and t.device.type == "cuda"
    }
    return torch.random.fork_rng(sorted(devices))


def outermost_call() -> tuple[nn.Module | None, FrameType | None]:
    """Return the outermost module that runs in this thread, and the frame of its call; or the frame of a compiled function's."""
    module: nn.Module | None = None
    found: FrameType | None = None
    function: FrameType | None = None
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_name
        if name in ("_wrapped_call_impl", "_call_impl"):
            here = frame.f_locals.get("self")
            if isinstance(here, nn.Module):
                module, found = here, frame
        elif name == "compile_wrapper":
            function = frame
        frame = frame.f_back
    return module, found if module is not None else function


def running_owner(name: str | None) -> nn.Module | None:
    """Return the module in local variable ``name`` of the innermost frame of the program that runs in this thread."""
    frame: FrameType | None = sys._getframe(1) if name is not None else None
    while frame is not None:
        if not frame.f_code.co_filename.startswith(_NOT_THE_PROGRAM):
            owner = frame.f_locals.get(name or "")
            if isinstance(owner, nn.Module):
                return owner
        frame = frame.f_back
    return None
