"""The picture of a comparison of logits: a strip of tokens, and golden's tokens in both."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

import numpy as np

from llmdebug_nb.comparison.token_checks import LogitsResult, TokenCheck
from llmdebug_nb.core.errors import OptionError
from llmdebug_nb.core.printable import printable
from llmdebug_nb.show.figure import plain, ticks
from llmdebug_nb.show.logits import Words

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_LOWEST = 1e-12  # nats: what is drawn for smaller divergences, and for 0
_SEQUENCES = 40  # that are drawn; more would be a blur
_TOKENS = 512
_NAMES = 40  # ticks


def strip(result: LogitsResult, word: Words) -> Figure:
    """Return KL by sequence and token; below it, how likely golden's tokens are in both.

    A cross marks another most likely token, a dot a token beyond the rule. The lower part shows the
    sequence with the first failure. Raises OptionError: no token was compared.
    """
    from matplotlib.figure import Figure

    if not result.tokens:
        raise OptionError("nothing to draw: no token was compared")
    sequences: dict[tuple[int, int], list[TokenCheck]] = defaultdict(list)
    for each in result.tokens:
        sequences[each.generation, each.sequence].append(each)
    telling = next(iter(result.failed or result.flips or result.tokens))
    drawn = dict(list(sequences.items())[:_SEQUENCES])
    chosen = telling.generation, telling.sequence
    height = 0.22 * len(drawn) + 0.9
    width = min(16.0, max(6.0, 0.18 * max(map(len, drawn.values())) + 2))
    figure = Figure(figsize=(width, height + 2.6), layout="constrained")
    above, below = figure.subplots(2, 1, height_ratios=(height, 2.6))
    _strip(above, drawn, len(sequences))
    _probabilities(below, sequences[chosen][:_TOKENS], chosen, word)
    return figure


def _strip(axis: Axes, sequences: dict[tuple[int, int], list[TokenCheck]], total: int) -> None:
    from matplotlib import colormaps
    from matplotlib.colors import LogNorm

    longest = min(_TOKENS, max(map(len, sequences.values())))
    cells = np.full((len(sequences), longest), np.nan)
    for line, tokens in enumerate(sequences.values()):
        for at, each in enumerate(tokens[:longest]):
            cells[line, at] = np.nan if each.kl is None else max(each.kl, _LOWEST)
            if each.flipped:
                axis.plot(at, line, "x", color="tab:cyan", markersize=6)
            if not each.passed:
                axis.plot(at, line, ".", color="tab:red", markersize=4)
    finite = cells[np.isfinite(cells)]
    top = max(float(finite.max()), 10 * _LOWEST) if finite.size else 1.0
    picture = axis.imshow(
        cells, cmap=colormaps["magma"].with_extremes(bad="lightgrey"),
        norm=LogNorm(_LOWEST, top), aspect="auto", interpolation="nearest",
    )  # fmt: skip
    axis.figure.colorbar(picture, ax=axis).ax.tick_params(labelsize=7)
    left = "" if len(sequences) == total else f", the first {len(sequences)} of {total} sequences"
    axis.set_title(f"KL (nats) by token; x: another token, red: beyond the rule{left}", fontsize=9)
    axis.tick_params(labelsize=7)
    names = [f"{generation}.{sequence}" for generation, sequence in sequences]
    ticks(axis.set_yticks, names, _SEQUENCES)
    axis.locator_params(axis="x", integer=True, min_n_ticks=1)


def _probabilities(
    axis: Axes, tokens: list[TokenCheck], which: tuple[int, int], word: Words
) -> None:
    places = np.arange(len(tokens))
    golden, mine = (np.array([each.probability[side] for each in tokens]) for side in (0, 1))
    axis.plot(places, golden, color="tab:blue", marker=".", label="golden")
    axis.plot(places, mine, color="tab:orange", marker=".", linestyle="--", label="mine")
    for at, each in enumerate(tokens):
        if each.flipped:
            axis.axvline(at, color="tab:red" if not each.passed else "grey", linewidth=0.8)
    top = np.nanmax([*golden, *mine, 0.0])
    axis.set_ylim(0, 1.1 * top or 1.0)
    axis.set_xlim(-0.5, len(tokens) - 0.5)
    axis.set_title(
        f"probability of golden's tokens, sequence {which[0]}.{which[1]}; lines: another token",
        fontsize=9,
    )
    axis.legend(fontsize=7)
    axis.tick_params(labelsize=7)
    names = [plain(printable(word(each.token)), 12) for each in tokens]
    ticks(axis.set_xticks, names, _NAMES, rotation=60, ha="right")
