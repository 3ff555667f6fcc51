"""Lets a model go on with other outputs of its modules, after its own were recorded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn

from llmdebug_nb.app.lockstep.events import Puts
from llmdebug_nb.capture.calls import OpenCall
from llmdebug_nb.capture.compat import pytorch, torch_modes
from llmdebug_nb.capture.hooks.inspection import find_fused
from llmdebug_nb.capture.substitution import replaced
from llmdebug_nb.capture.walk import leaves
from llmdebug_nb.core.paths import module_path

if TYPE_CHECKING:
    from llmdebug_nb.capture.hooks.handles import Handle
    from llmdebug_nb.core.records import Node


class Grafting:
    """Hooks on all modules of a model. They run after those of the recording.

    A recording hooks the modules inside a root when a root call begins, after which ours are put
    last again. Modules that would leave their fast path for a hook of their own share a global one.
    ``wait()``: returns the outputs that the program goes on with.
    """

    def __init__(self, wait: Callable[[], Puts]) -> None:
        self._wait = wait
        self._handles: dict[nn.Module, Handle] = {}
        self._fused: set[int] = set()  # ids of modules that may not have hooks of their own
        self._root: Handle | None = None
        self._shared: Handle | None = None
        self._ended: OpenCall | None = None  # the call that has ended and waits
        self._paths: dict[str, nn.Module] = {}

    def start(self, model: nn.Module, nodes: Sequence[Node]) -> None:
        """Hook a model. ``nodes``: its modules as the recording names them."""
        known = {node.path for node in nodes}
        paths = {module_path(name): part for name, part in model.named_modules()}
        self._paths = {path: part for path, part in paths.items() if path in known}
        self._fused = find_fused(model)
        if id(model) in self._fused:
            self._root = nn.modules.module.register_module_forward_pre_hook(
                lambda module, args: self._put_last() if module is model else None
            )
        else:
            self._root = model.register_forward_pre_hook(lambda module, args: self._put_last())
        self._put_last()

    def stop(self) -> None:
        for handle in [*self._handles.values(), *filter(None, (self._root, self._shared))]:
            handle.remove()
        self._handles.clear()
        self._root = self._shared = None

    def expects(self, call: OpenCall) -> bool:
        """Note that a call has ended; tell whether one of our hooks runs next."""
        part = self._paths.get(call.path) if call.level == "module" else None
        if part not in self._handles and id(part) not in self._fused:
            return False
        self._ended = call
        return True

    def _put_last(self) -> None:
        if self._fused:
            if self._shared is not None:
                self._shared.remove()
            # its type allows no other output, its contract does
            hook: Callable[..., Handle] = nn.modules.module.register_module_forward_hook
            self._shared = hook(self._after_fused)
        for part in self._paths.values():
            if id(part) in self._fused:
                continue
            handle = self._handles.get(part)
            if handle is not None:
                hooks = part._forward_hooks
                if next(reversed(hooks), None) == getattr(handle, "id", None):
                    continue
                handle.remove()
            self._handles[part] = part.register_forward_hook(self._after)

    def _after_fused(self, module: nn.Module, args: tuple[object, ...], output: object) -> object:
        return self._after(module, args, output) if id(module) in self._fused else None

    def _after(self, module: nn.Module, args: tuple[object, ...], output: object) -> object:
        """Return what the program goes on with: golden's values in the dtype and place of ours."""
        call, self._ended = self._ended, None
        if call is None or self._paths.get(call.path) is not module:
            return output
        puts = self._wait()
        return torch_modes.run_unseen(_grafted, output, puts) if puts else output


class _Put(torch.autograd.Function):
    """Golden's value in place of mine's: gradients, of either mode, are those of mine's."""

    @staticmethod
    def forward(mine: torch.Tensor, golden: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return golden.clone()

    @staticmethod
    def setup_context(ctx: object, inputs: tuple[object, ...], output: object) -> None:  # type: ignore[override]
        pass

    @staticmethod
    def backward(ctx: object, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        return gradient, None

    @staticmethod
    def jvp(ctx: object, mine: torch.Tensor, golden: object) -> torch.Tensor:  # type: ignore[override]
        return mine.clone()


def _put(mine: torch.Tensor, golden: torch.Tensor) -> torch.Tensor:
    """Return golden's value. Transforms of `torch.func` are not seen here, so they end at it."""
    golden = golden.to(mine.device, mine.dtype)
    if not mine.requires_grad or pytorch.is_wrapped(mine):
        return golden
    put: torch.Tensor = _Put.apply(mine, golden)  # type: ignore[no-untyped-call]
    return put


def _grafted(output: object, puts: Puts) -> object:
    pairs = [
        (leaf, _put(leaf, puts[slot]))
        for slot, leaf in leaves(output)
        if isinstance(leaf, torch.Tensor) and slot in puts
    ]
    return replaced(output, pairs)
