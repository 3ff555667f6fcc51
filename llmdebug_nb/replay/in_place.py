"""Golden's tensor in place of mine's: brought to mine's layout, dtype and device."""

from __future__ import annotations

from collections.abc import Callable

import torch

from llmdebug_nb.align.fit import Fit
from llmdebug_nb.replay.operators import CannotReplay

Put = Callable[[torch.Tensor], torch.Tensor]


def in_place(golden: torch.Tensor, fit: Fit | None, widen: bool = False) -> Put:
    """Return what makes mine's tensor of golden's: in mine's layout, dtype and device.

    ``widen``: in golden's dtype.

    Where golden's tensor answers to a part of mine's, the rest stays as it is. The result raises
    CannotReplay if the layout can't be turned round.
    """

    def put(own: torch.Tensor) -> torch.Tensor:
        if fit is None:
            if own.shape != golden.shape:
                shapes = f"{list(golden.shape)} against {list(own.shape)}"
                raise CannotReplay(f"golden's tensor has another shape: {shapes}")
            return golden.to(own.device, golden.dtype if widen else own.dtype)
        # the fit brings the numbers of mine's elements to where golden's values lie
        numbers = torch.arange(own.numel()).reshape(own.shape)
        values, places = fit(golden, numbers)
        once = places.is_floating_point() or _repeats(places)
        if once or values.shape != places.shape:
            raise CannotReplay(f"golden's layout can't be turned round: {fit.says}")
        new = own.detach().clone(memory_format=torch.contiguous_format)
        flat = places.reshape(-1).to(own.device)
        new.view(-1)[flat] = values.reshape(-1).to(own.device, own.dtype)
        return new

    return put


def _repeats(numbers: torch.Tensor) -> bool:
    ordered = numbers.reshape(-1).sort().values
    return bool((ordered[1:] == ordered[:-1]).any())
