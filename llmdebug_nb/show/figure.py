"""Pictures of tensors and of layers for pages without a kernel, drawn by matplotlib."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from typing import Any

import numpy as np

from llmdebug_nb.show import wire
from llmdebug_nb.show.layers import AROUND, DIVERGED, MATCH, UNMATCHED, LayerErrors
from llmdebug_nb.show.tensors import Array, default_axes, plane, window

_CELLS = 256
_DECADES = 6  # either side of the limit at most
_LINES = 200  # more are one blur
_NAME = 28


def heatmaps(panels: Sequence[tuple[str, Array]]) -> str:
    """Return the panels side by side as a ``data:`` URL of a PNG: title and tensor (any shape) each.

    The last two axes that are longer than 1 are shown, others at index 0. Zero is white; NaN is magenta.
    """
    from matplotlib import colormaps
    from matplotlib.figure import Figure  # not pyplot: no global state, no GUI back end

    colours = colormaps["RdBu_r"].with_extremes(bad="magenta")
    figure = Figure(figsize=(4.2 * len(panels), 3.4), layout="constrained")
    axes = figure.subplots(1, len(panels), squeeze=False)[0]
    for axis, (title, values) in zip(axes, panels, strict=True):
        cut = plane(values, default_axes(values.shape), [0] * values.ndim)
        _, cells = window(cut, 0, 0, 0, 0, _CELLS)
        fine = np.abs(cells[np.isfinite(cells)])
        top = float(fine.max()) if fine.size else 1.0
        picture = axis.imshow(
            cells, cmap=colours, vmin=-top or -1, vmax=top or 1, aspect="auto", interpolation="nearest"
        )
        axis.set_title(title, fontsize=9)
        axis.tick_params(labelsize=7)
        figure.colorbar(picture, ax=axis).ax.tick_params(labelsize=7)
    return _url(figure)


def errors_picture(errors: wire.ErrorHistogram, scatter: wire.Scatter, buffers: Sequence[memoryview]) -> str:
    """Return how many elements differ by how much, and golden against mine, as a ``data:`` URL of a PNG."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12.6, 3.2), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(2, 1))
    low, high, counts = float(errors["lo"] or 0.0), float(errors["hi"] or 0.0), errors["counts"]
    width = (high - low) / max(1, len(counts))
    left.bar(low + width * np.arange(len(counts)), counts, width, align="edge", color="tab:blue")
    if isinstance(errors["limit"], float) and errors["limit"] > 0:
        left.axvline(np.log10(errors["limit"]), color="tab:orange", linestyle="--", label="limit, spread evenly")
        left.legend(fontsize=7)
    if any(counts):  # else matplotlib warns
        left.set_yscale("log")
    left.set_title("elements by log10 of their absolute difference", fontsize=9)
    _scatter(right, scatter, buffers)
    for axis in (left, right):
        axis.tick_params(labelsize=7)
    return _url(figure)


def _scatter(axis: Any, scatter: wire.Scatter, buffers: Sequence[memoryview]) -> None:
    from matplotlib.colors import LogNorm

    low, high = float(scatter["lo"] or 0.0), float(scatter["hi"] or 0.0)
    if scatter["size"]:
        cells = np.frombuffer(buffers[0], "<u4").reshape(scatter["size"], scatter["size"])
        shown = np.ma.masked_equal(cells, 0)
        axis.imshow(shown, norm=LogNorm(), origin="lower", extent=(low, high, low, high), cmap="viridis", aspect="auto")
    else:
        golden, mine = (np.frombuffer(buffer, "<f4") for buffer in buffers)
        axis.scatter(golden, mine, s=4, linewidths=0, alpha=0.6)
    axis.plot([low, high], [low, high], color="grey", linewidth=0.6)
    axis.set_xlabel("golden", fontsize=8)
    axis.set_ylabel("mine", fontsize=8)
    axis.set_title("golden against mine", fontsize=9)


def layer_pictures(errors: LayerErrors, steps: Sequence[str]) -> str:
    """Return error over limit by layer and step, and the error along depth for each step, as a ``data:`` URL of a PNG.

    A cross is a cell that diverged, an open square one that was not matched; blank is where nothing was recorded.
    """
    from matplotlib.figure import Figure

    names = [_plain(layer["path"]) if layer["node"] != AROUND else "(around)" for layer in errors.layers]
    figure = Figure(figsize=(13, min(12.0, max(3.6, 0.2 * len(names) + 1.4))), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    _map(figure, left, errors)
    _ticks(left.set_xticks, [_plain(step) for step in steps], 16)
    _ticks(left.set_yticks, names, 60)
    depth = sum(layer["node"] != AROUND for layer in errors.layers)
    _growth(right, errors, depth, steps)
    _ticks(right.set_xticks, names[:depth], 16, rotation=45, ha="right")
    return _url(figure)


def _map(figure: Any, axis: Any, errors: LayerErrors) -> None:
    from matplotlib import colormaps

    with np.errstate(divide="ignore", invalid="ignore"):
        decades = np.log10(errors.ratio)
    fine = np.abs(decades[np.isfinite(decades)])
    reach = min(_DECADES, max(1.0, np.ceil(fine.max()))) if fine.size else 1.0
    told = np.where(np.isnan(decades), np.where(errors.state == DIVERGED, np.inf, -np.inf), decades)
    shown = np.where(errors.state >= MATCH, np.clip(told, -reach, reach), np.nan)
    picture = axis.imshow(
        shown, cmap=colormaps["RdBu_r"], vmin=-reach, vmax=reach, aspect="auto", interpolation="nearest"
    )
    for state, mark in ((DIVERGED, "x"), (UNMATCHED, "s")):
        layer, step = np.nonzero(errors.state == state)
        style = {"c": "black"} if mark == "x" else {"facecolors": "none", "edgecolors": "grey"}
        axis.scatter(step, layer, s=min(30.0, 4000 / max(errors.state.shape)), marker=mark, linewidths=0.7, **style)
    axis.set_title("error / limit (powers of ten), x: diverged", fontsize=9)
    figure.colorbar(picture, ax=axis).ax.tick_params(labelsize=7)


def _growth(axis: Any, errors: LayerErrors, depth: int, steps: Sequence[str]) -> None:
    bad = (errors.state[:depth] == DIVERGED).sum(axis=0)
    chosen = int(np.argmax(bad > 0))  # the first step that diverged, or the first
    error = errors.error[:depth].astype(float)
    error[error == 0] = np.nan  # no error at all has no place on a log scale
    others = np.arange(0, len(steps), -(-len(steps) // _LINES))
    axis.plot(error[:, others], color="grey", alpha=0.35, linewidth=0.8)
    axis.plot(error[:, chosen], color="tab:blue", marker=".", label=f"step {_plain(steps[chosen])}")
    axis.plot(errors.limit[:depth, chosen], color="tab:orange", linestyle="--", label="its limits")
    wrong = np.nonzero(errors.state[:depth, chosen] == DIVERGED)[0]
    axis.plot(wrong, error[wrong, chosen], "x", color="tab:red", label="diverged")
    drawn = np.concatenate([error[:, others].ravel(), errors.limit[:depth, chosen]])
    if bool((np.isfinite(drawn) & (drawn > 0)).any()):  # else matplotlib warns
        axis.set_yscale("log", nonpositive="mask")
    axis.set_xlim(-0.5, depth - 0.5)
    axis.set_title("error along depth, a line for each step", fontsize=9)
    axis.legend(fontsize=7)
    axis.tick_params(labelsize=7)


def _ticks(put: Any, names: Sequence[str], most: int, **style: Any) -> None:
    every = max(1, -(-len(names) // most))
    put(range(0, len(names), every), names[::every], fontsize=7, **style)


def _plain(text: str) -> str:
    """Return text that matplotlib does not take for a formula, and not longer than there is room for."""
    text = text.replace("$", r"\$")
    return text if len(text) <= _NAME else "…" + text[1 - _NAME :]


def _url(figure: Any) -> str:
    stream = io.BytesIO()
    figure.savefig(stream, format="png", dpi=110)
    return "data:image/png;base64," + base64.b64encode(stream.getvalue()).decode()
