"""Samples of weights that change while a program trains, read once for each root call."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

import torch

from llmdebug_nb.capture import geometry
from llmdebug_nb.capture.calls import OpenCall
from llmdebug_nb.capture.recorder import Recorder
from llmdebug_nb.core.kernels.raw import captures_graph, dtype_name
from llmdebug_nb.core.updates import SAMPLES, UPDATED

_PLAIN = (torch.Tensor, torch.nn.Parameter)


class WeightSamples:
    """Records the samples of weights: at first, and whenever they have changed.

    A weight may change without a new version, through its ``data``: so all are read.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._waiting: list[tuple[OpenCall, str, torch.Tensor]] = []
        self._known: dict[tuple[str, str], bytes] = {}  # by path and name

    def add(self, call: OpenCall, weights: Mapping[str, torch.Tensor]) -> None:
        """Let weights be read by the next `record`. Not followed: sparse or divided ones."""
        self._waiting += [(call, name, each) for name, each in weights.items() if _is_plain(each)]

    def record(self) -> None:
        """Record the samples of those weights that are new or have changed."""
        waiting, self._waiting = self._waiting, []
        if captures_graph():  # they have values when it is replayed
            return
        read = sampled([weight for _, _, weight in waiting])
        for (call, name, weight), values in zip(waiting, read, strict=True):
            if self._known.get((call.path, name)) != values:
                self._known[call.path, name] = values
                kind = f"{dtype_name(weight)} {geometry.shape_text(weight)}"
                self._recorder.add_scalars(call, UPDATED, [(name, kind, values.hex())])


def _is_plain(weight: torch.Tensor) -> bool:
    """Tell whether values of a weight can be taken by their places in memory."""
    return (
        type(weight) in _PLAIN
        and weight.layout is torch.strided
        and not weight.is_meta
        and weight.is_floating_point()
        and weight.element_size() > 1
        and weight.is_contiguous()
        and weight.numel() > 0
        and weight.untyped_storage().nbytes() > 0  # FSDP frees it for a while
    )


def sampled(weights: list[torch.Tensor]) -> list[bytes]:
    """Return so many values of each, spread evenly: float32. Each device is asked once."""
    groups: dict[tuple[torch.device, torch.dtype], list[int]] = defaultdict(list)
    for at, weight in enumerate(weights):
        groups[weight.device, weight.dtype].append(at)
    found = [b""] * len(weights)
    with torch.no_grad():
        for places in groups.values():
            parts = [_part(weights[at]) for at in places]
            values = torch.cat(parts).float().cpu().numpy().tobytes()
            first = 0
            for at, part in zip(places, parts, strict=True):
                end = first + 4 * len(part)
                found[at], first = values[first:end], end
    return found


def _part(weight: torch.Tensor) -> torch.Tensor:
    """Return a few values, ``[n]``. An odd step does not stay in one column of most matrices."""
    step = (weight.numel() // SAMPLES) | 1
    count = min(SAMPLES, -(-weight.numel() // step))
    return weight.as_strided((count,), (step,))
