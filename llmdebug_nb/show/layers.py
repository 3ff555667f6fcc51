"""How far each layer is off at each step: the worst row of every cell of layers x steps."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from llmdebug_nb.core.findings import EXPECTED, Difference
from llmdebug_nb.core.layers import parts
from llmdebug_nb.show import wire
from llmdebug_nb.show.tensors import Array
from llmdebug_nb.show.tree import Tree

# a cell shows its worst verdict
NOTHING, UNMATCHED, MATCH, WITHIN_NOISE, AS_EXPECTED, DIVERGED = range(6)
_STATES = {
    "unmatched": UNMATCHED, "match": MATCH, "within_noise": WITHIN_NOISE, EXPECTED: AS_EXPECTED, "diverged": DIVERGED,
}  # fmt: skip
AROUND = -1


@dataclass(frozen=True)
class LayerErrors:
    """``layers``: in the order in which they first ran. The arrays have a row for each, and a column for each step.

    ``error``/``limit``: of the worst row (NaN: no figure). ``row``: its index, -1 where nothing was recorded.
    ``state``: `NOTHING` to `DIVERGED`.
    """

    layers: list[wire.Layer]
    error: Array
    limit: Array
    row: Array
    state: Array

    @property
    def ratio(self) -> Array:
        """Error over limit; NaN where there is neither."""
        return ratios(self.error, self.limit)


def ratios(error: Array, limit: Array) -> Array:
    """Return error over limit: no error is 0 of any limit, and any error is beyond none."""
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio: Array = np.where(error == 0, 0.0, error / np.where(np.isnan(limit), 0.0, limit))
    return ratio


def layer_errors(
    tree: Tree, differences: Sequence[Difference], steps: Mapping[tuple[int, int], int]
) -> LayerErrors:
    """Return the worst row of each layer that was recorded, and of what lies around the layers, at each step.

    Worst is by verdict, then by error over limit; of equal ones it is the first.
    """
    sites = [d.site for d in differences]
    ran = sorted(
        sites, key=lambda site: site.role == "weight"
    )  # weights are recorded before anything runs
    owners = _owners(tree, dict.fromkeys(site.path for site in ran))
    found = list(dict.fromkeys(owners.values()))  # in execution order
    if AROUND in found:
        found = [i for i in found if i != AROUND] + [AROUND]
    place = {path: found.index(owner) for path, owner in owners.items()}
    shape = (len(found), max(len(steps), 1))
    layer = np.array([place[site.path] for site in sites], np.int64)
    cell = layer * shape[1] + np.array(
        [steps.get((site.generation, site.step), 0) for site in sites], np.int64
    )
    state = np.array([_STATES.get(d.verdict, UNMATCHED) for d in differences], np.uint8)
    error = np.array([np.nan if d.error is None else d.error for d in differences])
    limit = np.array([np.nan if d.limit is None else d.limit for d in differences])
    ratio = ratios(error, limit)
    ratio[np.isnan(ratio)] = -1.0  # a row without figures is worse than others by its verdict alone
    worst = _worst(cell, state, ratio)
    at = np.unravel_index(cell[worst], shape)

    def spread(values: Array, empty: float, dtype: str) -> Array:
        grid = np.full(shape, empty, dtype)
        grid[at] = values
        return grid

    with np.errstate(over="ignore"):  # beyond float32 is infinity
        return LayerErrors(
            [_layer(tree, i) for i in found],
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
    """Return for each path the layer that it lies in, or `AROUND`."""
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
    node: Any = tree.nodes[i]
    return {"path": node.path, "type": node.type, "node": i}
