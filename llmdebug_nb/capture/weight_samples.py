"""Samples of weights that change while a program trains, read once for each root call."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch

from llmdebug_nb.capture import geometry
from llmdebug_nb.capture.calls import OpenCall
from llmdebug_nb.capture.compat import pytorch
from llmdebug_nb.capture.recorder import Recorder
from llmdebug_nb.core.kernels.raw import captures_graph, dtype_name
from llmdebug_nb.core.updates import SAMPLES, UPDATED

_PLAIN = (torch.Tensor, torch.nn.Parameter)
# path and class of a module, name of its weight, and that
Followed = tuple[str, str, str, torch.Tensor]


@dataclass
class _Known:
    """A weight as it was last. ``times``: how often it had changed. ``told``: it is recorded."""

    values: bytes
    version: int | None
    times: int = 0
    told: bool = False


class WeightSamples:
    """Records the samples of weights: at first, and whenever they have changed.

    A weight may change without a new version, through its ``data``: so all are read. Few values
    may miss a change: so versions count, too.
    """

    def __init__(self, recorder: Recorder, always: bool) -> None:
        """``always``: record them before each root call, as earlier ones may be dropped."""
        self._recorder, self._always = recorder, always
        self._known: dict[tuple[str, str], _Known] = {}  # by path and name

    def read(self, weights: Iterable[Followed], root_call: int, tell: bool) -> None:
        """Read weights; ``tell``: record those that are new or have changed.

        Not followed are those whose values can't be taken by their places, and those of a rank.
        """
        if captures_graph():  # they have values when it is replayed
            return
        followed = [each for each in weights if _is_plain(each[-1])]
        values = sampled([weight for *_, weight in followed])
        for each, own in zip(followed, values, strict=True):
            self._note(each, own, root_call, tell)

    def _note(self, followed: Followed, values: bytes, root_call: int, tell: bool) -> None:
        path, op, name, weight = followed
        version = pytorch.version_of(weight)
        known = self._known.setdefault((path, name), _Known(values, version))
        if (known.values, known.version) != (values, version):
            known.values, known.version, known.told = values, version, False
            known.times += 1
        if tell and (self._always or not known.told):
            known.told = True
            kind = f"{dtype_name(weight)} {geometry.shape_text(weight)}"
            call = OpenCall(path, op, "module", path, known.times, root_call)
            self._recorder.add_scalars(call, UPDATED, [(name, kind, values.hex())])


def _is_plain(weight: torch.Tensor) -> bool:
    """Tell whether values of a weight can be taken by their places."""
    return (
        type(weight) in _PLAIN
        and not pytorch.is_wrapped(weight)
        and weight.layout is torch.strided
        and not weight.is_meta
        and weight.is_floating_point()
        and weight.element_size() > 1
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
    """Return a few values, ``[n]``."""
    if weight.is_contiguous():
        return weight.view(-1).index_select(0, _flat(weight.numel(), weight.device))
    return weight[_indices(tuple(weight.shape), weight.device)]


def _places(numel: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Return where the values lie: one anywhere in each of as many parts, always the same.

    Equal distances would meet some rows or columns alone.
    """
    edges = np.linspace(0, numel, min(numel, SAMPLES) + 1).astype(np.int64)
    return np.random.default_rng(numel).integers(edges[:-1], edges[1:])


@functools.lru_cache(256)
def _flat(numel: int, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(_places(numel)).to(device)


@functools.lru_cache(256)
def _indices(shape: tuple[int, ...], device: torch.device) -> tuple[torch.Tensor, ...]:
    places = np.unravel_index(_places(int(np.prod(shape))), shape)
    return tuple(torch.from_numpy(each).to(device) for each in places)
