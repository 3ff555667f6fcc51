"""The map of layers: the worst row of each layer at each step."""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass
from itertools import islice

import numpy as np

from llmdebug_nb.comparison.differences import EXPECTED, MISMATCHES, Difference
from llmdebug_nb.comparison.rules import Rule
from llmdebug_nb.core.layers import parts
from llmdebug_nb.core.paths import operator_of
from llmdebug_nb.core.records import CallKey
from llmdebug_nb.show import wire_layers
from llmdebug_nb.show.columns import VERDICTS, Columns, figures
from llmdebug_nb.show.row_columns import differing
from llmdebug_nb.show.tensors import Array, number
from llmdebug_nb.show.tree import Tree

# a cell shows its worst state; DIVERGED by inheritance, MADE where the error is made
NOTHING, UNMATCHED, REWRITTEN, MATCH, WITHIN_NOISE, AS_EXPECTED, DIVERGED, MADE = range(8)
_STATES = {
    "unmatched": UNMATCHED,
    "match": MATCH,
    "within_noise": WITHIN_NOISE,
    EXPECTED: AS_EXPECTED,
    "diverged": DIVERGED,
}
Blamed = tuple[str, int]  # the path and the number of a call, the same in all steps
AROUND = -1  # stands for the modules outside of all layers


@dataclass(frozen=True)
class Rows:
    """Of each row of a comparison: its layer, its step, its state, and its error over limit.

    ``ratio`` is -1 for a row without figures: only its state can make it the worst.
    """

    layer: Array
    step: Array
    state: Array
    ratio: Array


@dataclass(frozen=True)
class LayerErrors:
    """``layers``: in execution order. The arrays have shape (layers, steps).

    ``error``, ``limit``: those of the worst row (NaN: no figure). ``row``: its index, -1 if nothing
    was recorded. ``state``: `NOTHING` to `MADE`. ``share``: of its tokens, that which differs (NaN:
    unknown). ``differing``: which these are, "" for none, as indices of ``texts``.
    """

    layers: list[wire_layers.Layer]
    error: Array
    limit: Array
    row: Array
    state: Array
    share: Array
    differing: Array
    texts: list[str]
    rows: Rows

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
    tree: Tree, columns: Columns, steps: int, made: Set[Blamed] = frozenset()
) -> LayerErrors:
    """Return the worst row of each recorded layer, and of the other modules, at each step.

    ``steps``: how many there are. ``made``: the calls that make an error. The worst row has the
    worst state, then the largest error over limit; of equal rows it is the first.
    """
    owners = _owners(tree, columns)
    layers = list(dict.fromkeys(owners.values()))
    if AROUND in layers:
        layers = [i for i in layers if i != AROUND] + [AROUND]
    at_layer = {owner: at for at, owner in enumerate(layers)}
    of_path = np.array([at_layer[owners[path]] for path in columns.paths], np.int64)
    row, shape = of_path[columns.path_of], (len(layers), max(steps, 1))
    cell, state = row * shape[1] + columns.step, _states(columns, made)
    error, limit = columns.values("error"), columns.values("limit")
    ratio = ratios(error, limit)
    ratio[np.isnan(ratio)] = -1.0
    # that its weights are right does not say that what a layer computes has a partner
    weights = np.array([site.role == "weight" for site in columns.sites], bool)
    worst = _worst(cell, np.where(weights & (state <= WITHIN_NOISE), NOTHING, state), ratio)
    at = np.unravel_index(cell[worst], shape)

    def spread(values: Array, empty: float, dtype: str) -> Array:
        grid = np.full(shape, empty, dtype)
        grid[at] = values
        return grid

    share, differing, texts = _differing([columns.rows[i] for i in worst.tolist()])
    with np.errstate(over="ignore"):  # figures beyond float32 become infinity
        return LayerErrors(
            [_layer(tree, i) for i in layers],
            spread(error[worst], np.nan, "<f4"),
            spread(limit[worst], np.nan, "<f4"),
            spread(worst, -1, "<i4"),
            spread(state[worst], NOTHING, "u1"),
            spread(share, np.nan, "<f4"),
            spread(differing, 0, "<i4"),
            texts,
            Rows(row, columns.step, state, ratio),
        )


def _differing(worst: Sequence[Difference]) -> tuple[Array, Array, list[str]]:
    """Return of rows the share of their tokens that differs, and which: indices of texts."""
    found, place = [d.differing for d in worst], {"": 0}
    at = [place.setdefault(one.where if one else "", len(place)) for one in found]
    share = figures(one.share if one else None for one in found)
    return share, np.array(at, np.int32), list(place)


def _states(columns: Columns, made: Set[Blamed]) -> Array:
    """Return the state of each row. ``made``: the calls that make an error."""
    state = np.array([_STATES[verdict] for verdict in VERDICTS], np.uint8)[columns.verdict]
    for i in columns.of("unmatched").tolist():
        if columns.rows[i].rule is Rule.REJOINED:
            state[i] = REWRITTEN
    for path, call in made:
        for i in columns.at(path).tolist():
            bad = columns.rows[i].verdict in MISMATCHES and state[i] != REWRITTEN
            if bad and columns.sites[i].call == call:
                state[i] = MADE
    return state


def calls(
    errors: LayerErrors, differences: Sequence[Difference], layer: int, step: int, most: int
) -> wire_layers.Calls:
    """Return the calls of a layer in a step, in execution order, the first ``most`` of them.

    A call shows its worst result.
    """
    rows = errors.rows
    worst: dict[CallKey, tuple[tuple[int, float], Difference]] = {}
    for index in np.flatnonzero((rows.layer == layer) & (rows.step == step)).tolist():
        site = differences[index].site
        if site.role in ("input", "weight"):
            continue
        key, weight = site.key, (int(rows.state[index]), float(rows.ratio[index]))
        if key not in worst or weight > worst[key][0]:
            worst[key] = weight, differences[index]
    base = errors.layers[layer]["path"] if 0 <= layer < len(errors.layers) else ""
    cells = [_cell(d, weight[0], base) for weight, d in islice(worst.values(), most)]
    return {"cells": cells, "total": len(worst)}


def _cell(d: Difference, state: int, base: str) -> wire_layers.CallCell:
    path = d.site.path
    inside = path.removeprefix(base).lstrip("./")
    label = (operator_of(inside) or inside).rpartition("/")[2].rpartition(".")[2]
    label = label or path.rpartition(".")[2] or d.op
    return {
        "label": label, "path": path, "row": d.index, "state": state,
        "error": number(d.error), "limit": number(d.limit),
        "differing": differing(d),
    }  # fmt: skip


def _worst(cell: Array, state: Array, ratio: Array) -> Array:
    """Return the index of the worst row of each cell that has one."""
    order: Array = np.lexsort((-np.arange(len(cell)), ratio, state, cell))
    last = np.append(cell[order][1:] != cell[order][:-1], True) if len(order) else np.zeros(0, bool)
    worst: Array = order[last]
    return worst


def _owners(tree: Tree, columns: Columns) -> dict[str, int]:
    """Return the layer of each path, or `AROUND`; in execution order."""
    layers = set(parts(tree.nodes))

    def owner(path: str) -> int:
        i = tree.nearest(path)
        while i >= 0 and i not in layers:
            i = tree.nodes[i].parent
        return i

    # weights are recorded before anything runs, so they come last
    weights = [site.path for site in columns.sites if site.role == "weight"]
    others = (site.path for site in columns.sites if site.role != "weight")
    return {path: owner(path) for path in dict.fromkeys([*others, *weights])}


def _layer(tree: Tree, i: int) -> wire_layers.Layer:
    if i == AROUND:
        return {"path": "", "type": "", "node": AROUND}
    node = tree.nodes[i]
    return {"path": node.path, "type": node.type, "node": i}
