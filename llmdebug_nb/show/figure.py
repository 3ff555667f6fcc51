"""Pictures of tensors for pages without a kernel, drawn by matplotlib."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence

import numpy as np

from llmdebug_nb.show.tensors import Array, default_axes, plane, window

_CELLS = 256


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
    stream = io.BytesIO()
    figure.savefig(stream, format="png", dpi=110)
    return "data:image/png;base64," + base64.b64encode(stream.getvalue()).decode()
