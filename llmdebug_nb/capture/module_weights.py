"""The weights of modules: their fingerprints or values, and what is added to their gradients."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping

import torch
from torch import nn

from llmdebug_nb.capture.calls import OpenCall
from llmdebug_nb.capture.checking import CheckingRecorder
from llmdebug_nb.capture.compat import torch_distributed
from llmdebug_nb.capture.context import Context
from llmdebug_nb.capture.hooks.gradients import Gradients
from llmdebug_nb.capture.ranks import Ranks
from llmdebug_nb.capture.recorder import Recorder
from llmdebug_nb.capture.weight_samples import WeightSamples
from llmdebug_nb.core.options import DumpOptions


class ModuleWeights:
    """Records the weights of modules. ``recorded``: ids of the roots of which all were, once."""

    def __init__(
        self, context: Context, recorder: Recorder, options: DumpOptions, gradients: Gradients,
        ranks: Ranks,
    ) -> None:  # fmt: skip
        self.recorded: set[int] = set()
        self._context, self._recorder, self._options = context, recorder, options
        self._gradients, self._ranks = gradients, ranks
        self._samples: WeightSamples | None = None
        if not isinstance(recorder, CheckingRecorder):
            self._samples = WeightSamples(recorder, always=options.last is not None)
        self._change = False
        self._divided: set[tuple[str, str]] = set()  # paths and names of those divided among ranks

    def record(
        self,
        path: str,
        op: str,
        attributes: Mapping[str, object],
        weights: Mapping[str, torch.Tensor],
    ) -> None:
        """Record the settings of a module (eps, scaling, dropout rates) and its weights."""
        self._divided |= {
            (path, name) for name, tensor in weights.items() if torch_distributed.is_divided(tensor)
        }
        call = OpenCall(path, op, "module", path, 0, self._context.thread.root_call)
        self._recorder.record(call, "attribute", attributes.items())
        if self._options.weights:
            self._recorder.record(call, "weight", weights.items())
        else:
            for name, tensor in weights.items():
                self._recorder.record_weight(call, name, tensor)

    @property
    def change(self) -> bool:
        """Whether weights may change between root calls: gradients are on, or were once."""
        self._change = self._change or torch.is_grad_enabled()
        return self._change

    def record_updates(self, modules: Iterable[tuple[str, str, nn.Module]]) -> None:
        """Record samples of the parameters that have changed. Before they may, they are only read.

        Buffers are changed by a module's own code. What is kept elsewhere would have to be loaded.
        ``modules``: with their paths and classes.
        """
        if self._samples is not None:
            own = (
                (path, op, name, weight)
                for path, op, module in modules
                for name, weight in module._parameters.items()
                if weight is not None
            )
            self._samples.read(own, self._context.thread.root_call, tell=self.change)

    @property
    def watched(self) -> bool:
        """Whether the gradients of parameters are recorded now."""
        recorded = self._context.backward and self._options.records_modules
        return recorded and torch.is_grad_enabled()

    def watch(self, path: str, op: str, weights: Mapping[str, torch.Tensor]) -> None:
        """Record the gradients of a module's parameters.

        FSDP2 puts a whole parameter in the place of a part for a while; its gradient passes on.
        """
        if not self.watched:
            return
        for name, tensor in weights.items():
            if (path, name) in self._divided and not torch_distributed.is_divided(tensor):
                continue
            begin = functools.partial(self._begin, path, op, name)
            self._gradients.watch_parameter(begin, name, tensor)
            self._ranks.watch(functools.partial(self._begin, path, op), name, tensor)

    def _begin(self, path: str, op: str, name: str) -> OpenCall | None:
        context = self._context
        if context.latest is None or context.names.excludes(path):
            return None
        number = context.counts.next(path, context.latest, name)
        return OpenCall(path, op, "module", path, number, context.latest)
