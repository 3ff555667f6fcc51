"""The facts of a call for the reader: its name, tensors, modules and source lines."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from llmdebug_nb.capture.calls import OpenCall, ThreadState
from llmdebug_nb.capture.compat import pytorch
from llmdebug_nb.capture.operators.call_stacks import CallStacks
from llmdebug_nb.capture.roots import Roots
from llmdebug_nb.capture.steps import StepTracker
from llmdebug_nb.core.faults import DataInfo, FaultyCall, TensorFacts
from llmdebug_nb.core.kernels.raw import dtype_name, plain, unreadable
from llmdebug_nb.core.kernels.summary import figures
from llmdebug_nb.core.records import RootCall, Summary


class CallFacts:
    """Describes calls of one session."""

    def __init__(self, thread: ThreadState, steps: StepTracker, roots: Roots) -> None:
        self._thread, self._steps, self._roots = thread, steps, roots
        self._stacks: list[tuple[str, ...]] = []
        self._call_stacks = CallStacks(self._intern)
        self._names: dict[int, str] = {}
        self._roots_named = 0

    def _intern(self, frames: list[str], code: list[str], inside: int) -> int:
        lines = zip(frames, code, strict=True)
        self._stacks.append(tuple(f"{frame}: {line}" if line else frame for frame, line in lines))
        return len(self._stacks) - 1

    def of(
        self, call: OpenCall, level: str, outputs: list[tuple[str, torch.Tensor, float]]
    ) -> FaultyCall:
        """Describe a call whose inputs are still at hand."""
        open_calls = self._thread.open_calls
        stack = self._stacks[self._call_stacks.current()]
        calls = self._steps.calls
        place = calls[call.root_call] if call.root_call < len(calls) else RootCall(0)
        inputs = [(slot, leaf) for slot, leaf in call.inputs if isinstance(leaf, torch.Tensor)]
        data = DataInfo(
            tuple(TensorFacts.of(slot, _summary(leaf)) for slot, leaf in inputs),
            tuple(TensorFacts.of(slot, _summary(leaf)) for slot, leaf, _ in outputs),
        )
        modules = [each.path or each.op for each in reversed(open_calls) if each.level == "module"]
        if not modules and "/" in call.path:
            modules = [call.path.partition("/")[0]]
        return FaultyCall(
            f"{call.op}.{call.number}.{call.phase}", level, call.path, call.phase,
            place.generation, place.step, data, tuple(modules), stack,
        )  # fmt: skip

    def parameter(self, tensor: torch.Tensor) -> str | None:
        """Return the name of the parameter whose memory a tensor is or shares."""
        roots = list(self._roots)
        if len(roots) != self._roots_named:
            self._roots_named = len(roots)
            self._names = {
                pytorch.storage_number(parameter.untyped_storage()): name
                for name, parameter in self._parameters()
            }
        storage = pytorch.storage_of(tensor)
        return None if storage is None else self._names.get(storage.cdata)

    def gradients(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the gradients of all parameters, with the names of these."""
        for name, parameter in self._parameters():
            if parameter.grad is not None:
                yield name, parameter.grad

    def _parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        for root in self._roots:
            for name, parameter in root.module.named_parameters():
                yield f"{root.path}.{name}" if root.path else name, parameter


def _summary(tensor: torch.Tensor) -> Summary:
    tensor = pytorch.plain(tensor)
    dtype, shape = dtype_name(tensor), tuple(tensor.shape)
    if unreadable(tensor):
        return Summary(dtype, shape)
    return Summary(dtype, shape, *figures(plain(tensor)))
