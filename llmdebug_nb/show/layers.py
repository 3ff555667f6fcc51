"""The map of layers: the worst row of each layer at each step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from llmdebug_nb.core.findings import EXPECTED, Difference
from llmdebug_nb.core.layers import parts
from llmdebug_nb.show import wire
from llmdebug_nb.show.columns import figures
from llmdebug_nb.show.tensors import Array
from llmdebug_nb.show.tree import Tree

# a cell shows its worst verdict
NOTHING, UNMATCHED, MATCH, WITHIN_NOISE, AS_EXPECTED, DIVERGED = range(6)
_STATES = {
    "unmatched": UNMATCHED,
    "match": MATCH,
    "within_noise": WITHIN_NOISE,
    EXPECTED: AS_EXPECTED,
    "diverged": DIVERGED,
}
AROUND = -1  # stands for the modules outside of all layers


@dataclass(frozen=True)
class LayerErrors:
    """``layers``: in execution order. The arrays have shape (layers, steps).

    ``error``, ``limit``: those of the worst row (NaN: no figure). ``row``: its index, -1 if nothing
    was recorded. ``state``: `NOTHING` to `DIVERGED`.
    """

    layers: list[wire.Layer]
    error: Array
    limit: Array
    row: Array
    state: Array

    @property
    def ratio(self) -> Array:
        """Error over limit; NaN without a figure."""
        return ratios(self.error, self.limit)


def ratios(error: Array, limit: Array) -> Array:
    """Return error over limit; no error gives 0, and an error without a limit infinity."""
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        ratio: Array = np.where(error == 0, 0.0, error / np.where(np.isnan(limit), 0.0, limit))
    return ratio


def layer_errors(
    tree: Tree, differences: Sequence[Difference], steps: Mapping[tuple[int, int], int]
) -> LayerErrors:
    """Return the worst row of each recorded layer, and of the other modules, at each step.

    The worst row has the worst verdict, then the largest error over limit; of equal rows it is the
    first.
    """
    sites = [d.site for d in differences]
    # weights are recorded before anything runs, so they come last
    by_execution = sorted(sites, key=lambda site: site.role == "weight")
    owners = _owners(tree, dict.fromkeys(site.path for site in by_execution))
    layers = list(dict.fromkeys(owners.values()))
    if AROUND in layers:
        layers = [i for i in layers if i != AROUND] + [AROUND]
    place = {path: layers.index(owner) for path, owner in owners.items()}
    shape = (len(layers), max(len(steps), 1))
    row = np.array([place[site.path] for site in sites], np.int64)
    column = np.array([steps.get((site.generation, site.step), 0) for site in sites], np.int64)
    cell = row * shape[1] + column
    state = np.array([_STATES[d.verdict] for d in differences], np.uint8)
    error, limit = figures(d.error for d in differences), figures(d.limit for d in differences)
    ratio = ratios(error, limit)
    ratio[np.isnan(ratio)] = -1.0  # only its verdict can make a row without figures the worst
    worst = _worst(cell, state, ratio)
    at = np.unravel_index(cell[worst], shape)

    def spread(values: Array, empty: float, dtype: str) -> Array:
        grid = np.full(shape, empty, dtype)
        grid[at] = values
        return grid

    with np.errstate(over="ignore"):  # figures beyond float32 become infinity
        return LayerErrors(
            [_layer(tree, i) for i in layers],
            spread(error[worst], np.nan, "<f4"),
            spread(limit[worst], np.nan, "<f4"),
            spread(worst, -1, "<i4"),
            spread(state[worst], NOTHING, "u1"),
        )


def _worst(cell: Array, state: Array, ratio: Array) -> Array:
    """Return the index of the worst row of each cell that has one."""
    order: Array = np.lexsort((-np.arange(len(cell)), ratio, state, cell))
    last = np.append(cell[order][1:] != cell[order][:-1], True) if len(order) else np.zeros(0, bool)
    worst: Array = order[last]
    return worst


def _owners(tree: Tree, paths: Iterable[str]) -> dict[str, int]:
    """Return the layer of each path, or `AROUND`."""
    layers = set(parts(tree.nodes))

    def owner(path: str) -> int:
        i = tree.nearest(path)
        while i >= 0 and i not in layers:
            i = tree.nodes[i].parent
        return i

    return {path: owner(path) for path in paths}


def _layer(tree: Tree, i: int) -> wire.Layer:
    if i == AROUND:
        return {"path": "", "type": "", "node": AROUND}
    node = tree.nodes[i]
    return {"path": node.path, "type": node.type, "node": i}
