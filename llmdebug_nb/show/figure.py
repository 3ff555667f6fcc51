"""Pictures of tensors and layers by matplotlib, for pages without a kernel and for papers."""

from __future__ import annotations

import base64
import io
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from llmdebug_nb.core.errors import LLMDebugError, OptionError, nearest
from llmdebug_nb.show import wire
from llmdebug_nb.show.layers import AROUND, DIVERGED, MATCH, UNMATCHED, LayerErrors
from llmdebug_nb.show.tensors import Array, checked_axes, default_axes, plane, window
from llmdebug_nb.show.view_data import ViewData

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_CELLS = 256
_DECADES = 6  # on either side of the limit
_LINES = 200  # more would be a blur
_NAME = 28


def heatmaps(panels: Sequence[tuple[str, Array]]) -> str:
    """Return panels side by side as a ``data:`` URL of a PNG.

    A panel is a title and a tensor of any shape: its last two axes longer than 1 are shown, the
    others at index 0. Zero is white; NaN is magenta.
    """
    from matplotlib.figure import Figure  # not pyplot: no global state, no GUI back end

    figure = Figure(figsize=(4.2 * len(panels), 3.4), layout="constrained")
    axes = figure.subplots(1, len(panels), squeeze=False)[0]
    for axis, (title, values) in zip(axes, panels, strict=True):
        _heatmap(axis, title, plane(values, default_axes(values.shape), [0] * values.ndim))
    return data_url(figure)


def errors_picture(
    errors: wire.ErrorHistogram, scatter: wire.Scatter, buffers: Sequence[memoryview]
) -> str:
    """Return the histogram of differences and golden against mine as a ``data:`` URL of a PNG."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12.6, 3.2), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(2, 1))
    low, high, counts = float(errors["lo"] or 0.0), float(errors["hi"] or 0.0), errors["counts"]
    width = (high - low) / max(1, len(counts))
    left.bar(low + width * np.arange(len(counts)), counts, width, align="edge", color="tab:blue")
    if isinstance(errors["limit"], float) and errors["limit"] > 0:
        left.axvline(
            np.log10(errors["limit"]),
            color="tab:orange",
            linestyle="--",
            label="limit, spread evenly",
        )
        left.legend(fontsize=7)
    if any(counts):  # else matplotlib warns
        left.set_yscale("log")
    left.set_title("elements by log10 of their absolute difference", fontsize=9)
    _scatter(right, scatter, buffers)
    for axis in (left, right):
        axis.tick_params(labelsize=7)
    return data_url(figure)


def _scatter(axis: Axes, scatter: wire.Scatter, buffers: Sequence[memoryview]) -> None:
    from matplotlib.colors import LogNorm

    low, high = float(scatter["lo"] or 0.0), float(scatter["hi"] or 0.0)
    if scatter["size"]:
        cells = np.frombuffer(buffers[0], "<u4").reshape(scatter["size"], scatter["size"])
        shown = np.ma.masked_equal(cells, 0)
        axis.imshow(
            shown,
            norm=LogNorm(),
            origin="lower",
            extent=(low, high, low, high),
            cmap="viridis",
            aspect="auto",
        )
    else:
        golden, mine = (np.frombuffer(buffer, "<f4") for buffer in buffers)
        axis.scatter(golden, mine, s=4, linewidths=0, alpha=0.6)
    axis.plot([low, high], [low, high], color="grey", linewidth=0.6)
    axis.set_xlabel("golden", fontsize=8)
    axis.set_ylabel("mine", fontsize=8)
    axis.set_title("golden against mine", fontsize=9)


def _heatmap(axis: Axes, title: str, cut: Array) -> None:
    from matplotlib import colormaps

    colours = colormaps["RdBu_r"].with_extremes(bad="magenta")
    _, cells = window(cut, 0, 0, 0, 0, _CELLS)
    fine = np.abs(cells[np.isfinite(cells)])
    top = float(fine.max()) if fine.size else 1.0
    rows, columns = cut.shape
    picture = axis.imshow(
        cells, cmap=colours, vmin=-top or -1, vmax=top or 1, aspect="auto", interpolation="nearest",
        extent=(-0.5, columns - 0.5, rows - 0.5, -0.5),
    )  # fmt: skip
    axis.set_title(title, fontsize=9)
    axis.tick_params(labelsize=7)
    axis.locator_params(integer=True, min_n_ticks=1)
    axis.figure.colorbar(picture, ax=axis).ax.tick_params(labelsize=7)


def layer_pictures(errors: LayerErrors, steps: Sequence[str]) -> str:
    """Return error over limit by layer and step, and error along depth, as a URL of a PNG.

    A cross marks a cell that diverged, an open square one without a partner; a cell without
    records is blank.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, _layers_height(errors)), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    _map(left, errors, steps)
    _growth(right, errors, steps)
    return data_url(figure)


def _layers_height(errors: LayerErrors) -> float:
    return min(12.0, max(3.6, 0.2 * len(errors.layers) + 1.4))


def _layer_names(errors: LayerErrors) -> list[str]:
    return [
        plain(layer["path"]) if layer["node"] != AROUND else "(around)" for layer in errors.layers
    ]


def _map(axis: Axes, errors: LayerErrors, steps: Sequence[str]) -> None:
    from matplotlib import colormaps

    with np.errstate(divide="ignore", invalid="ignore"):
        decades = np.log10(errors.ratio)
    fine = np.abs(decades[np.isfinite(decades)])
    reach = min(_DECADES, max(1.0, np.ceil(fine.max()))) if fine.size else 1.0
    without = np.where(errors.state >= DIVERGED, np.inf, -np.inf)  # cells without a figure
    filled = np.where(np.isnan(decades), without, decades)
    shown = np.where(errors.state >= MATCH, np.clip(filled, -reach, reach), np.nan)
    picture = axis.imshow(
        shown,
        cmap=colormaps["RdBu_r"],
        vmin=-reach,
        vmax=reach,
        aspect="auto",
        interpolation="nearest",
    )
    size = min(30.0, 4000 / max(errors.state.shape))
    layer, step = np.nonzero(errors.state >= DIVERGED)
    axis.scatter(step, layer, s=size, marker="x", linewidths=0.7, c="black")
    layer, step = np.nonzero(errors.state == UNMATCHED)
    axis.scatter(
        step, layer, s=size, marker="s", linewidths=0.7, facecolors="none", edgecolors="grey"
    )
    axis.set_title("error / limit (powers of ten), x: diverged", fontsize=9)
    axis.figure.colorbar(picture, ax=axis).ax.tick_params(labelsize=7)
    ticks(axis.set_xticks, [plain(step) for step in steps], 16)
    ticks(axis.set_yticks, _layer_names(errors), 60)


def _growth(axis: Axes, errors: LayerErrors, steps: Sequence[str], step: int | None = None) -> None:
    depth = sum(layer["node"] != AROUND for layer in errors.layers)
    bad = (errors.state[:depth] >= DIVERGED).sum(axis=0)
    chosen = (
        int(np.argmax(bad > 0)) if step is None else step
    )  # the first step that diverged, or the first
    error = errors.error[:depth].astype(float)
    error[error == 0] = np.nan  # a log scale has no place for 0
    others = np.arange(0, len(steps), -(-len(steps) // _LINES))
    axis.plot(error[:, others], color="grey", alpha=0.35, linewidth=0.8)
    axis.plot(error[:, chosen], color="tab:blue", marker=".", label=f"step {plain(steps[chosen])}")
    axis.plot(errors.limit[:depth, chosen], color="tab:orange", linestyle="--", label="its limits")
    wrong = np.nonzero(errors.state[:depth, chosen] >= DIVERGED)[0]
    axis.plot(wrong, error[wrong, chosen], "x", color="tab:red", label="diverged")
    drawn = np.concatenate([error[:, others].ravel(), errors.limit[:depth, chosen]])
    if bool((np.isfinite(drawn) & (drawn > 0)).any()):  # else matplotlib warns
        axis.set_yscale("log", nonpositive="mask")
    axis.set_xlim(-0.5, depth - 0.5)
    axis.set_title("error along depth, a line for each step", fontsize=9)
    axis.legend(fontsize=7)
    axis.tick_params(labelsize=7)
    ticks(axis.set_xticks, _layer_names(errors)[:depth], 16, rotation=45, ha="right")


# -- the state of an explorer ---------------------------------------------------------------------

PICTURES = {
    "layers": "error over limit, layer by token",
    "growth": "error along depth",
    "heatmap": "a slice of the tensor; in a report golden, mine and their difference",
    "histogram": "the distribution of the tensor's values",
    "curves": "the tensor's figures over all steps",
}
Draw = Callable[["Axes"], None]


def state_figure(view: ViewData, state: wire.State, show: Sequence[str] = ()) -> Figure:
    """Return a matplotlib figure of an explorer's state.

    ``show``: keys of `PICTURES`; without them, all that the state has.

    Raises:
        OptionError: there is no such picture, or the state doesn't have it.
    """
    from matplotlib.figure import Figure

    for name in show:
        if name not in PICTURES:
            raise OptionError(
                f"show {name!r}: expected some of {', '.join(PICTURES)}{nearest(name, PICTURES)}"
            )
    overview: wire.Overview = view.overview()
    candidates = [
        _layers_line(view, overview, state, show),
        *_tensor_lines(view, overview, state, show),
    ]
    lines = [line for line in candidates if line is not None]
    drawn = {name for _, line in lines for name, _ in line}
    missing = [name for name in show if name not in drawn]
    if missing or not lines:
        raise OptionError(_nothing(overview, state, missing))
    sizes = [(4.4 * len(line), height) for height, line in lines]
    figure = Figure(
        figsize=(max(width for width, _ in sizes), sum(height for _, height in sizes) + 0.3),
        layout="constrained",
    )
    figure.suptitle(_title(view, overview, state), fontsize=10)
    parts = figure.subfigures(
        len(lines), 1, squeeze=False, height_ratios=[height for _, height in sizes]
    )[:, 0]
    for part, (_, line) in zip(parts, lines, strict=True):
        for axis, (_, draw) in zip(
            part.subplots(1, len(line), squeeze=False)[0], line, strict=True
        ):
            draw(axis)
    return figure


def save(figure: Figure, path: Path) -> None:
    """Write a figure; the same figure always gives the same bytes. Raises OSError."""
    from matplotlib import rc_context

    dated = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}
    with (
        rc_context({"svg.hashsalt": "llmdebug", "svg.fonttype": "path"}),
        warnings.catch_warnings(),
    ):
        # a name may be in any script
        warnings.filterwarnings("ignore", "Glyph .* missing", UserWarning)
        figure.savefig(path, dpi=160, metadata=dated.get(path.suffix.lower()))


def _nothing(overview: wire.Overview, state: wire.State, missing: list[str]) -> str:
    """Return why nothing can be drawn, or not all of the chosen pictures."""
    what = f"no {missing[0]} to show" if missing else "nothing to draw"
    if set(missing) & {"layers", "growth"}:
        return f"{what}: " + (
            "a single run has no errors" if overview["kind"] == "run" else "it has no layers"
        )
    if state["selected"] < 0:
        return f"{what}: no tensor is selected; choose one with at="
    return f"{what}: " + (
        "it was recorded in one step only" if missing == ["curves"] else "its values were not kept"
    )


def _title(view: ViewData, overview: wire.Overview, state: wire.State) -> str:
    if state["selected"] < 0:
        return plain(overview["title"], 90)
    row = view.detail({"op": "detail", "row": state["selected"]})["row"]
    step = overview["steps"][row["step"]]["label"]
    where = f"{row['path'] or '(root)'} {row['role']}[{row['slot']}], step {step}"
    return plain(f"{overview['title']}: {where}", 90)


Line = tuple[float, list[tuple[str, Draw]]]  # height, and pictures beside each other


def _layers_line(
    view: ViewData, overview: wire.Overview, state: wire.State, show: Sequence[str]
) -> Line | None:
    errors, steps = view.layer_errors, [step["label"] for step in overview["steps"]]
    if errors is None or not errors.layers:
        return None
    line: list[tuple[str, Draw]] = [
        ("layers", lambda axis: _map(axis, errors, steps)),
        ("growth", lambda axis: _growth(axis, errors, steps, state["position"])),
    ]
    return _chosen(_layers_height(errors), line, show)


def _tensor_lines(
    view: ViewData, overview: wire.Overview, state: wire.State, show: Sequence[str]
) -> Iterator[Line | None]:
    row = state["selected"]
    if row < 0:
        return
    values = dict(_values(view, state))
    cuts = [(which, _cut(array, state)) for which, array in values.items()]
    yield _chosen(
        3.4, [("heatmap", _heatmap_of(which, cut)) for which, cut in cuts if cut.size], show
    )
    spread = [("histogram", lambda axis: _histogram(axis, values))] if values else []
    curves = [
        line
        for line in view.series({"op": "series", "row": row, "n": 400})["lines"]
        if len(line["points"]) > 1
    ]
    labels = [step["label"] for step in overview["steps"]]
    yield _chosen(
        3.0,
        [*spread, *(("curves", _curve_of(line, labels, state["position"])) for line in curves)],
        show,
    )


def _chosen(height: float, line: list[tuple[str, Draw]], show: Sequence[str]) -> Line | None:
    kept = [(name, draw) for name, draw in line if not show or name in show]
    return (height, kept) if kept else None


def _values(view: ViewData, state: wire.State) -> Iterator[tuple[str, Array]]:
    """Yield the chosen sides whose values were kept."""
    sides = view.detail({"op": "detail", "row": state["selected"]})["sides"]
    kept = [side["which"] for side in sides if side["kept"]]
    for which in kept:
        if state["which"] in ("all", which) or state["which"] not in kept:
            try:
                yield which, view.array(state["selected"], which)
            except LLMDebugError:
                continue


def _cut(values: Array, state: wire.State) -> Array:
    axes, fixed = state["axes"], state["fixed"]
    if not axes or len(fixed) != values.ndim:
        axes, fixed = default_axes(values.shape), [0] * values.ndim
    return plane(values, checked_axes(axes, values), fixed)


def _heatmap_of(which: str, cut: Array) -> Draw:
    return lambda axis: _heatmap(axis, which, cut)


def _histogram(axis: Axes, values: dict[str, Array]) -> None:
    for which, array in values.items():
        fine = array[np.isfinite(array)]
        if fine.size:
            axis.hist(fine, bins=64, histtype="step", label=which)
    axis.set_yscale("symlog")  # so that one outlier in a million stays visible
    axis.set_ylim(bottom=0)
    axis.set_title("values, how often", fontsize=9)
    axis.tick_params(labelsize=7)
    axis.legend(fontsize=7)


def _curve_of(line: wire.Line, steps: list[str], here: int) -> Draw:
    def draw(axis: Axes) -> None:
        heights = [
            math.nan if point["value"] is None else float(point["value"])
            for point in line["points"]
        ]
        axis.plot([point["step"] for point in line["points"]], heights, marker=".", linewidth=1)
        axis.axvline(here, color="grey", linestyle=":", linewidth=1)
        axis.set_title(f"{plain(line['figure'])} over all steps", fontsize=9)
        axis.tick_params(labelsize=7)
        ticks(axis.set_xticks, [plain(step) for step in steps], 8)

    return draw


def ticks(
    put: Callable[..., object], names: Sequence[str], most: int, **style: str | float
) -> None:
    every = max(1, -(-len(names) // most))
    put(range(0, len(names), every), names[::every], fontsize=7, **style)


def plain(text: str, most: int = _NAME) -> str:
    """Return text that fits, that an SVG may hold, and that is no formula for matplotlib."""
    text = "".join(each if each.isprintable() else "�" for each in text)
    text = text if len(text) <= most else "…" + text[1 - most :]
    return text.replace("$", r"\$")


def data_url(figure: Figure) -> str:
    """Return a figure as a ``data:`` URL of a PNG."""
    stream = io.BytesIO()
    with warnings.catch_warnings():
        # a name may be in any script
        warnings.filterwarnings("ignore", "Glyph .* missing", UserWarning)
        figure.savefig(stream, format="png", dpi=110)
    return "data:image/png;base64," + base64.b64encode(stream.getvalue()).decode()
