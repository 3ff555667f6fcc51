"""View models: they answer an explorer's requests page by page, in the types of `wire.py`.

`View` holds the common part of `run_view.RunView` and `report_view.ReportView`. Views read a run
through its query methods and know no widget, no HTML and no text layout.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Literal, cast

from llmdebug_nb.comparison.differences import Difference
from llmdebug_nb.core.errors import TensorLookupError
from llmdebug_nb.core.msit_rounds import round_of
from llmdebug_nb.core.places import shown
from llmdebug_nb.core.records import Kernel, Record, RootCall, Site
from llmdebug_nb.show import (
    export,
    filters,
    saved_page,
    tensors,
    wire,
    wire_halts,
    wire_requests,
)
from llmdebug_nb.show.layers import LayerErrors
from llmdebug_nb.show.row_columns import COLUMNS, FIGURES
from llmdebug_nb.show.tensors import Array, number
from llmdebug_nb.show.timeline import Timeline
from llmdebug_nb.show.tokens import Texts
from llmdebug_nb.show.tree import Tree
from llmdebug_nb.show.view_data import Answer, Halted
from llmdebug_nb.store.run import Run

_CACHED = 6  # tensors, for zooming and slicing


class View(ABC):
    """The common part of runs and comparisons."""

    kind: Literal["run", "report"]

    def __init__(self, steps: list[RootCall], texts: Texts | None = None) -> None:
        self.by_round = False  # steps also carry the numbers of their rounds
        self.watchers: list[Callable[[], None]] = []  # called after each change
        self.halted: Halted | None = None  # the program whose tensors these are
        self.requests: dict[tuple[int, int], list[wire.RequestRows]] = {}  # of an engine, by step
        self._take_steps(steps, texts or {})

    def _take_steps(self, steps: list[RootCall], texts: Texts) -> None:
        self.steps, self.texts = steps, texts
        self.step_index = {(call.generation, call.step): i for i, call in enumerate(steps)}
        self._several = len({call.generation for call in steps if call.generation >= 0}) > 1
        self.array: Callable[[int, str], Array] = functools.lru_cache(maxsize=_CACHED)(self.load)
        self._histogram = functools.lru_cache(maxsize=_CACHED)(
            lambda row, which, bins: tensors.histogram(self.array(row, which), bins)
        )

    # each kind provides these
    @functools.cached_property
    @abstractmethod
    def tree(self) -> Tree: ...
    @abstractmethod
    def load(self, row: int, which: str) -> Array: ...
    @abstractmethod
    def overview(self, request: wire_requests.OverviewRequest | None = None) -> wire.Overview: ...
    @abstractmethod
    def listed(self, request: wire_requests.RowsRequest) -> wire.Page: ...
    @abstractmethod
    def locate(self, request: wire_requests.LocateRequest) -> wire.Located: ...
    @abstractmethod
    def row(self, request: wire_requests.RowRequest) -> wire.Located: ...
    @abstractmethod
    def detail(self, request: wire_requests.DetailRequest) -> wire.Detail: ...
    @abstractmethod
    def series(self, request: wire_requests.SeriesRequest) -> wire.Series: ...
    @abstractmethod
    def find(self, path: str, step: int | None, role: str) -> int: ...
    @abstractmethod
    def text(self) -> str: ...
    @abstractmethod
    def first_rows(self, n: int) -> list[wire.Row]: ...

    def telling_rows(self, n: int) -> list[wire.Row]:
        return self.first_rows(n)

    @property
    def layer_errors(self) -> LayerErrors | None:
        return None

    def timeline(self) -> Timeline | None:
        return None

    def rows(self, request: wire_requests.RowsRequest) -> wire.Page:
        """Return a page of the list; for a filter that can't be read, the problem."""
        if problem := filters.problem(request["text"]):
            return {"total": 0, "start": 0, "rows": [], "problem": problem}
        return self.listed(request)

    def children(self, request: wire_requests.ChildrenRequest) -> wire.Children:
        return self.tree.children(request["parent"], request["start"], request["n"])

    def path(self, request: wire_requests.PathRequest) -> wire_requests.PathAnswer:
        return {"ids": self.tree.way(request["path"])}

    def view(self, request: wire_requests.ViewRequest) -> Answer:
        values = self.array(request["row"], request["which"])
        axes = tensors.checked_axes(request["axes"], values)
        cut = tensors.plane(values, axes, request["fixed"])
        corners = request["y0"], request["x0"], request["y1"], request["x1"]
        view, cells = tensors.window(cut, *corners, max(1, min(request["size"], 1024)))
        return view, [memoryview(cells.tobytes())]

    def heads(self, request: wire_requests.HeadsRequest) -> Answer:
        values, axis = self.array(request["row"], request["which"]), request["axis"]
        axes = tensors.checked_axes(request["axes"], values)
        if not 0 <= axis < values.ndim or axis in axes:
            raise TensorLookupError(
                f"axis {axis}: expected one of a {values.ndim}-d tensor beside {axes}"
            )
        size = max(1, min(request["size"], 128))
        view, cells = tensors.heads(values, axis, axes, request["fixed"], size, request["first"])
        return view, [memoryview(cells.tobytes())]

    def histogram(self, request: wire_requests.HistogramRequest) -> wire.Histogram:
        bins = max(1, min(request["bins"], 512))
        return self._histogram(request["row"], request["which"], bins)

    def export(self, request: wire_requests.ExportRequest) -> wire.Exported:
        """Write the state to a new file beside the notebook."""
        path = export.free_path(self, request, request["kind"], Path.cwd())
        return {"path": export.export(self, request, path).name}

    def snapshot(self, state: wire.State) -> dict[str, str] | None:
        """Return what stays in a saved notebook; see `saved_page.snapshot`."""
        return saved_page.snapshot(self, state)

    def _refuse(self, request: Any) -> Any:
        raise TensorLookupError("a single run has no differences: compare it with another one")

    # what a report alone answers
    finding = layers = worst = errors = scatter = _refuse
    calls = prove = inside = expect = unexpect = _refuse

    def halt(self, request: wire_requests.HaltRequest) -> wire_halts.HaltView:
        return self._halted().shown()

    def step(self, request: wire_requests.StepRequest) -> wire.Overview:
        return self._halted().go(request["command"]).overview()

    def _halted(self) -> Halted:
        if self.halted is None:
            raise TensorLookupError("no program is halted here: these tensors were recorded")
        return self.halted

    def step_index_of(self, site: Site) -> int:
        """Return the index of a site's step in the stepper."""
        return self.step_index.get((site.generation, site.step), 0)

    def step_views(self, rows: Counter[int], bad: Counter[int]) -> list[wire.Step]:
        """Return the steps. ``rows``, ``bad``: how many, by the index of the step."""
        views: list[wire.Step] = []
        warmed = any(call.generation < 0 for call in self.steps)
        for i, call in enumerate(self.steps):
            key = (call.generation, call.step)
            label = self._label(call)
            if self.by_round:
                label += f" (round {round_of(call.step, call.kind, call.generation < 0, warmed)})"
            views.append(
                {
                    "index": i,
                    "generation": call.generation,
                    "step": call.step,
                    "kind": call.kind,
                    "label": label,
                    "text": self.texts.get(key, ""),
                    "requests": self.requests.get(key, []),
                    "rows": rows[i],
                    "bad": bad[i],
                }
            )
        return views

    def _label(self, call: RootCall) -> str:
        if call.generation < 0:
            return f"warmup {call.generation}" + (f".{call.step}" if call.step else "")
        return (f"{call.generation}·" if self._several else "") + f"{call.step} {call.kind}"

    def row_view(
        self, row: int, record: Record, difference: Difference | None = None, mark: int = -1
    ) -> wire.Row:
        """Return the row of a record of a run, or of a difference and the record it is shown by."""
        cells: dict[str, Any] = {column.name: column.of(record, difference) for column in COLUMNS}
        cells |= {name: number(cells[name]) for name in FIGURES}
        step = self.step_index_of(record.site)
        return cast(wire.Row, {"id": row, **cells, "step": step, "mark": mark})


def several(ranks: Iterable[int]) -> list[int]:
    """Return the ranks that rows are of, in their order; none if they are of one."""
    found = sorted(set(ranks))
    return found if len(found) > 1 else []


def side_view(which: wire.Which, run: Run, record: Record) -> wire.Side:
    s, v = record.site, record.summary
    why = "" if record.payload is not None else record.lost or "recorded with statistics only"
    kernel = run.kernel(s)
    return {
        "which": which,
        "call_id": run.id_of(s) or "",
        "kept": record.payload is not None,
        "why": why,
        "part": record.kept or "",
        "dtype": v.dtype,
        "shape": list(v.shape),
        "axes": axes_of(record.payload_shape),
        "device": record.device,
        "min": number(v.min),
        "max": number(v.max),
        "mean": number(v.mean),
        "l2norm": number(v.l2norm),
        "nan": v.nan,
        "inf": v.inf,
        "zero": v.zero,
        "numel": v.numel,
        "fingerprint": v.fingerprint or "",
        "code": _code(run, s),
        "kernel": None if kernel is None else _kernel_view(kernel),
    }


def _code(run: Run, s: Site) -> str:
    """Return the Python expression of a tensor."""
    if run.path is None and (codes := run.meta.get("code")) is not None:  # held in memory
        return str(codes.get(s.role, "")).format(slot=s.slot)
    where = shown(run.where or run.name)
    name = run.label if run.label.isidentifier() else f"ld.open_run({where!r})"
    place = f"{s.path!r}, step={s.step!r}, role={s.role!r}, slot={s.slot!r}"
    place += f", call={s.call!r}" if s.call else ""
    place += f", generation={s.generation!r}" if s.generation else ""
    place += f", phase={s.phase!r}" if s.phase != "forward" else ""
    return f"{name}.tensor({place})"


def _kernel_view(kernel: Kernel) -> wire.KernelView:
    return {"name": kernel.name, "nodes": list(kernel.nodes), "code": kernel.source}


def axes_of(shape: Sequence[int]) -> list[wire.Axis]:
    """Name the axes by convention, such as (batch, token, feature); 4-d has heads too."""
    names = {
        1: ["index"],
        2: ["row", "column"],
        3: ["batch", "token", "feature"],
        4: ["batch", "head", "token", "feature"],
    }
    known = names.get(len(shape)) or [f"axis {i}" for i in range(len(shape))]
    return [{"name": name, "size": int(size)} for name, size in zip(known, shape, strict=True)]
