"""One step over time: lanes of modules, host operators and kernels, and tables of the slowest."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmdebug_nb.core.errors import OptionError, TensorLookupError, saving
from llmdebug_nb.core.layers import layer_of
from llmdebug_nb.core.paths import module_of
from llmdebug_nb.core.printable import printable, printable_lines
from llmdebug_nb.core.urls import on_this_machine
from llmdebug_nb.store.run import Run

if TYPE_CHECKING:
    import pandas
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_FORMATS = (".png", ".svg", ".pdf", ".json")
TOP = 8  # rows of a table
_DEPTH = 4  # lanes of modules
_ALL = 1000
_FAINT = "#8884"


class Timeline:
    """One step of a run over time. A notebook shows its ``figure``, ``top`` and ``gaps``.

    Times are microseconds of the program's clock, as in `Run.host`.
    """

    def __init__(
        self,
        label: str,
        step: tuple[int, int],
        host: pandas.DataFrame,
        kernels: pandas.DataFrame,
        ours: float,
    ) -> None:
        """Take the rows of one step, see `Run.host`.

        ``step``: generation and step. ``ours``: microseconds that recording took.
        """
        self.label, self.step, self.ours = label, step, ours
        self.host, self.kernels = host, kernels

    @property
    def duration(self) -> float:
        """Microseconds from the first row to the end of the last one."""
        frames = [rows for rows in (self.host, self.kernels) if len(rows)]
        ends = [float((rows["start"] + rows["duration"]).max()) for rows in frames]
        return max(ends, default=0.0)

    @property
    def top(self) -> pandas.DataFrame:
        """Operators by total time, or kernels if only these were recorded.

        ``share``: part of the total time of all.
        """
        rows, by = (self._ops, "op") if len(self._ops) else (self.kernels, "kernel")
        figures = {"count": "size", "total": "sum", "longest": "max"}
        table = rows.groupby(by)["duration"].agg(**figures).reset_index()
        table["share"] = table["total"] / max(float(table["total"].sum()), 1e-9)
        return table.sort_values("total", ascending=False, ignore_index=True)

    @property
    def gaps(self) -> pandas.DataFrame:
        """Operators by the time that the host spent on other work before them, longest first."""
        rows = self._ops[self._ops["gap"] > 0]
        return rows.sort_values("gap", ascending=False, ignore_index=True)[
            ["gap", "path", "call", "op", "start", "duration"]
        ]

    @property
    def _ops(self) -> pandas.DataFrame:
        return self.host[self.host["level"] == "op"]

    # -- shown --------------------------------------------------------------------------------

    @property
    def figure(self) -> Figure:
        """The lanes as a matplotlib figure; colours tell modules apart."""
        from matplotlib.figure import Figure

        lanes = self._lanes()
        figure = Figure(figsize=(13, 1.5 + 0.42 * len(lanes)), layout="constrained")
        axis = figure.subplots()
        colours = self._colours()
        for at, (_, rows) in enumerate(lanes):
            spans = list(zip(rows["start"] / 1e3, rows["duration"] / 1e3, strict=True))
            shades = [colours.get(_module(path), "#999999") for path in rows["path"]]
            axis.broken_barh(
                spans, (at - 0.4, 0.8), facecolors=shades, edgecolors=_FAINT, linewidth=0.3
            )
            self._name(axis, at, rows)
        axis.set_yticks(range(len(lanes)), [name for name, _ in lanes])
        axis.invert_yaxis()
        axis.set_xlim(0, max(self.duration / 1e3, 1e-6))
        axis.set_xlabel("ms of the program's clock", fontsize=8)
        axis.set_title(self.title, fontsize=10, loc="left")
        axis.tick_params(labelsize=8)
        self._legend(axis, colours)
        return figure

    def _lanes(self, depth: int = _DEPTH) -> list[tuple[str, pandas.DataFrame]]:
        """Return name and rows of each lane.

        The lanes: modules from the outside in, operators, and kernels by device and stream.
        """
        modules = self.host[self.host["level"] == "module"]
        depths = _depths(modules)
        last = min(depth, max(depths, default=-1) + 1)
        lanes = [
            ("" if at else "modules", modules[[one == at for one in depths]]) for at in range(last)
        ]
        lanes += [
            ("host ops" if thread == 0 else f"host ops, thread {thread}", rows)
            for thread, rows in self._ops.groupby("thread")
        ]
        for (device, stream), rows in self.kernels.groupby(["device", "stream"]):
            place = device if device == "cpu" else f"{device} stream {stream}"
            lanes.append((f"kernels {place}", rows))
        return [(name, rows) for name, rows in lanes if len(rows)]

    def _name(self, axis: Axes, at: int, rows: pandas.DataFrame) -> None:
        """Write the names into the bars that are long enough."""
        for row in rows.to_dict("records"):
            name = str(row.get("kernel") or row["op"]).rpartition("::")[2].removeprefix("Aten.")
            room = 150 * row["duration"] / max(self.duration, 1e-9)
            if room >= 4:
                text = name if len(name) <= room else name[: max(1, int(room) - 1)] + "…"
                middle = (row["start"] + row["duration"] / 2) / 1e3
                axis.text(middle, at, text, ha="center", va="center", fontsize=6.5, clip_on=True)

    def _colours(self) -> dict[str, Any]:
        """Return the colour of each module two levels below the root, in order of time.

        That gives each layer a colour of its own.
        """
        from matplotlib import colormaps

        rows = [frame for frame in (self.host, self.kernels) if len(frame)]
        names = dict.fromkeys(_module(path) for frame in rows for path in frame["path"])
        shades: Any = colormaps["tab20"].colors  # type: ignore[attr-defined]
        return {name: shades[at % len(shades)] for at, name in enumerate(names)}

    def _legend(self, axis: Axes, colours: dict[str, Any]) -> None:
        from matplotlib.patches import Patch

        shown = list(colours.items())[:20]
        handles = [Patch(color=colour, label=name or "(root)") for name, colour in shown]
        axis.legend(
            handles=handles,
            fontsize=7,
            ncols=min(len(handles), 7) or 1,
            loc="upper center",
            bbox_to_anchor=(0.5, -0.28),
            frameon=False,
        )

    @property
    def title(self) -> str:
        generation, step = self.step
        place = f"step {step}" if generation == 0 else f"step {step} of generation {generation}"
        text = f"{self.label}, {place}: {self.duration / 1e3:.2f} ms"
        ops, kernels = (float(rows["duration"].sum()) / 1e3 for rows in (self._ops, self.kernels))
        text += f"; {len(self._ops):,} operators {ops:.2f} ms" if len(self._ops) else ""
        text += f"; {len(self.kernels):,} kernels {kernels:.2f} ms" if len(self.kernels) else ""
        return text + (f"; recording took {self.ours / 1e3:.2f} ms beside it" if self.ours else "")

    def __repr__(self) -> str:
        lines = [self.title, "most time (µs):", *_lines(self.top)]
        if len(self.gaps):
            lines += ["longest gaps before an operator (µs):", *_lines(self.gaps)]
        return printable_lines(lines)

    def trace(self) -> list[dict[str, Any]]:
        """Return the rows as events of the Chrome trace event format."""
        events = []
        for lane, (_, rows) in enumerate(self._lanes(depth=_ALL)):
            for row in rows.to_dict("records"):
                fields = ("path", "call", "phase", "code", "id")
                details = {one: row[one] for one in fields if row.get(one) not in (None, "")}
                name = row.get("kernel") or row["op"]
                events.append(
                    {
                        "name": name,
                        "ph": "X",
                        "ts": row["start"],
                        "dur": row["duration"],
                        "pid": self.label,
                        "tid": lane,
                        "args": details,
                    }
                )
        return events

    def save(self, path: str | Path) -> Path:
        """Write the figure to a ``.png``, ``.svg`` or ``.pdf``, or all rows to a ``.json``.

        Perfetto and chrome://tracing open the ``.json``.

        Raises:
            OptionError: the suffix is unknown.
            StoreError: the file can't be written.
        """
        target = on_this_machine(path)
        if target.suffix.lower() not in _FORMATS:
            raise OptionError(f"{target}: a timeline is written as {', '.join(_FORMATS)}")
        with saving(target):
            if target.suffix.lower() == ".json":
                target.write_text(json.dumps({"traceEvents": self.trace()}), encoding="utf-8")
            else:
                self.figure.savefig(target)
        return target


def timeline(run: Run, step: int | None = None, generation: int = 0) -> Timeline:
    """Return the timeline of one step of a run; without ``step`` of the first one with times.

    Raises:
        TensorLookupError: the run has no times, or none of that step; the message names the others.
    """
    frames = run.host(), run.kernels()
    steps = sorted(
        {
            (int(g), int(s))
            for frame in frames
            for g, s in zip(frame["generation"], frame["step"], strict=True)
        }
    )
    if not steps:
        raise TensorLookupError(
            f"run {run.label!r} has no times: record it with profile='kernel+host'"
        )
    first = next((one for one in steps if one[0] >= 0), steps[0])
    wanted = first if step is None else (generation, step)
    if wanted not in steps:
        known = ", ".join(str(s) if g == 0 else f"{s} of generation {g}" for g, s in steps[:12])
        raise TensorLookupError(
            f"run {run.label!r} has no times of step {step} of generation {generation}; "
            f"there is {known}"
        )
    host, kernels = (
        frame[(frame["generation"] == wanted[0]) & (frame["step"] == wanted[1])] for frame in frames
    )
    return Timeline(run.label, wanted, host, kernels, run.index.recording_time(*wanted))


def _depths(modules: pandas.DataFrame) -> list[int]:
    """Return the nesting depth of each module; the rows are in order of their start."""
    open_until: list[float] = []
    depths = []
    for start, duration in zip(modules["start"], modules["duration"], strict=True):
        while open_until and open_until[-1] <= start:
            open_until.pop()
        depths.append(len(open_until))
        open_until.append(start + duration)
    return depths


def _module(path: str) -> str:
    """Return the module that gives a bar its colour: a layer, or two levels below the root."""
    return layer_of(path) or ".".join(module_of(path).split(".")[:2])


def _lines(frame: pandas.DataFrame) -> list[str]:
    """Return the first rows as lines of text."""
    rows = frame.head(TOP).map(lambda one: printable(one) if isinstance(one, str) else one)
    text = str(rows.to_string(index=False, float_format=lambda number: f"{number:.2f}"))
    return text.splitlines()
