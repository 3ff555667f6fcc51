"""Another rounding: the result of each operator moves by one unit in the last place, by chance.

So do the results of another program that computes the same in another order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import nn

from llmdebug_nb.capture import moves
from llmdebug_nb.capture.compat import torch_modes
from llmdebug_nb.capture.hooks.handles import Handle
from llmdebug_nb.capture.intervention import Args, Intervention
from llmdebug_nb.capture.perturbing.unrounded import rounds
from llmdebug_nb.core.nested import mapped


class OtherRounding(Intervention):
    """Moves the results of all operators of a program, whatever level of it is recorded."""

    def __init__(self, seed: int) -> None:
        self._mode = _Moving(seed)

    def hook(self, module_at: Callable[[str], nn.Module | None]) -> list[Handle]:
        self._mode.__enter__()  # type: ignore[no-untyped-call]
        return [_Entered(self._mode)]


class _Entered:
    """Takes a mode off again."""

    def __init__(self, mode: torch_modes.TorchDispatchMode) -> None:
        self._mode = mode

    def remove(self) -> None:
        self._mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]


class _Moving(torch_modes.TorchDispatchMode):
    """Moves what operators compute."""

    def __init__(self, seed: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._seed = seed
        self._draws: dict[torch.device, torch.Generator] = {}

    def __torch_dispatch__(
        self,
        func: Callable[..., object],
        types: Sequence[type],
        args: Args = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if not rounds(func, args, kwargs):
            return result
        return torch_modes.run_unseen(mapped, result, self._moved)

    def _moved(self, result: object) -> object:
        if not isinstance(result, torch.Tensor) or not moves.can_move(result):
            return result
        if result.device not in self._draws:
            self._draws[result.device] = torch.Generator(result.device).manual_seed(self._seed)
        return moves.by_one_ulp(result, self._draws[result.device])
