"""View models: what an explorer asks for, answered page by page as the wire types of `wire.py`.

`View` holds what `run_view.RunView` and `report_view.ReportView` share. Views read a run through its query
methods and hold no widget, no HTML and no text layout.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

from llmdebug_nb.core.errors import TensorLookupError
from llmdebug_nb.core.msit_rounds import round_of
from llmdebug_nb.core.records import Kernel, Record, RootCall, Site
from llmdebug_nb.show import export, filters, tensors, wire
from llmdebug_nb.show.layers import LayerErrors
from llmdebug_nb.show.tensors import Array, number
from llmdebug_nb.show.timeline import Timeline
from llmdebug_nb.show.tokens import Texts
from llmdebug_nb.show.tree import Tree
from llmdebug_nb.show.view_data import Answer

_CACHED = 6  # tensors held for zooming and slicing
_ALONE = "a single run holds no differences: compare it with another one"


class View(ABC):
    """The requests that both kinds answer the same way."""

    kind: Literal["run", "report"]

    def __init__(self, steps: list[RootCall], texts: Texts | None = None) -> None:
        self.steps, self.texts = steps, texts or {}
        self.step_index = {(call.generation, call.step): i for i, call in enumerate(steps)}
        self.by_round = False  # steps are also named by their rounds
        self._several = len({call.generation for call in steps if call.generation >= 0}) > 1
        self.watchers: list[Callable[[], None]] = []  # called when what is shown has changed
        self.array: Callable[[int, str], Array] = functools.lru_cache(maxsize=_CACHED)(self.load)

    # what a kind has to provide
    @functools.cached_property
    @abstractmethod
    def tree(self) -> Tree: ...
    @abstractmethod
    def load(self, row: int, which: str) -> Array: ...
    @abstractmethod
    def overview(self, request: Any = None) -> wire.Overview: ...
    @abstractmethod
    def listed(self, request: wire.RowsRequest) -> wire.Page: ...
    @abstractmethod
    def locate(self, request: wire.LocateRequest) -> wire.Located: ...
    @abstractmethod
    def row(self, request: wire.RowRequest) -> wire.Located: ...
    @abstractmethod
    def detail(self, request: wire.DetailRequest) -> wire.Detail: ...
    @abstractmethod
    def series(self, request: wire.SeriesRequest) -> wire.Series: ...
    @abstractmethod
    def find(self, path: str, step: int | None, role: str) -> int: ...
    @abstractmethod
    def text(self) -> str: ...
    @abstractmethod
    def first_rows(self, n: int) -> list[wire.Row]: ...

    @property
    def layer_errors(self) -> LayerErrors | None:
        return None

    def timeline(self) -> Timeline | None:
        return None

    def rows(self, request: wire.RowsRequest) -> wire.Page:
        """Return a page of the list; a filter that can't be read lists nothing and says so."""
        if problem := filters.problem(request["text"]):
            return {"total": 0, "start": 0, "rows": [], "problem": problem}
        return self.listed(request)

    def children(self, request: wire.ChildrenRequest) -> wire.Children:
        return self.tree.children(request["parent"], request["start"], request["n"])

    def path(self, request: wire.PathRequest) -> wire.PathAnswer:
        return {"ids": self.tree.way(request["path"])}

    def view(self, request: wire.ViewRequest) -> Answer:
        values = self.array(request["row"], request["which"])
        axes = _checked(request["axes"], values)
        cut = tensors.plane(values, axes, request["fixed"])
        view, cells = tensors.window(
            cut,
            request["y0"],
            request["x0"],
            request["y1"],
            request["x1"],
            max(1, min(request["size"], 1024)),
        )
        return view, [memoryview(cells.tobytes())]

    def heads(self, request: wire.HeadsRequest) -> Answer:
        values, axis = self.array(request["row"], request["which"]), request["axis"]
        axes = _checked(request["axes"], values)
        if not 0 <= axis < values.ndim or axis in axes:
            raise TensorLookupError(
                f"axis {axis}: expected one of a {values.ndim}-d tensor beside {axes}"
            )
        size = max(1, min(request["size"], 128))
        view, cells = tensors.heads(values, axis, axes, request["fixed"], size, request["first"])
        return view, [memoryview(cells.tobytes())]

    def histogram(self, request: wire.HistogramRequest) -> wire.Histogram:
        bins = max(1, min(request["bins"], 512))
        return tensors.histogram(self.array(request["row"], request["which"]), bins)

    def export(self, request: wire.ExportRequest) -> wire.Exported:
        """Write what the page shows beside the notebook, never over another file."""
        path = export.beside(self, request, request["kind"], Path.cwd())
        return {"path": export.export(self, request, path).name}

    def finding(self, request: wire.FindingRequest) -> wire.FindingDetail:
        raise TensorLookupError(_ALONE)

    def layers(self, request: wire.LayersRequest) -> Answer:
        raise TensorLookupError(_ALONE)

    def worst(self, request: wire.WorstRequest) -> wire.Worst:
        raise TensorLookupError(_ALONE)

    def errors(self, request: wire.ErrorsRequest) -> wire.ErrorHistogram:
        raise TensorLookupError(_ALONE)

    def scatter(self, request: wire.ScatterRequest) -> Answer:
        raise TensorLookupError(_ALONE)

    def expect(self, request: wire.ExpectRequest) -> wire.Overview:
        raise TensorLookupError(_ALONE)

    def unexpect(self, request: wire.UnexpectRequest) -> wire.Overview:
        raise TensorLookupError(_ALONE)

    def step_index_of(self, site: Site) -> int:
        """Return the stepper index of a site."""
        return self.step_index.get((site.generation, site.step), 0)

    def step_views(
        self, rows: Counter[tuple[int, int]], bad: Counter[tuple[int, int]]
    ) -> list[wire.Step]:
        views: list[wire.Step] = []
        warmed = any(call.generation < 0 for call in self.steps)
        for i, call in enumerate(self.steps):
            key = (call.generation, call.step)
            label = f"{call.step} {call.kind}"
            if call.generation < 0:
                label = (
                    f"warmup {call.generation}.{call.step}"
                    if call.step
                    else f"warmup {call.generation}"
                )
            elif self._several:
                label = f"{call.generation}·{label}"
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
                    "rows": rows[key],
                    "bad": bad[key],
                }
            )
        return views

    def row_view(self, number_: int, record: Record, **judged: Any) -> wire.Row:
        s, v = record.site, record.summary
        return {
            "id": number_,
            "step": self.step_index_of(s),
            "seq": record.seq,
            "path": s.path,
            "call": s.call,
            "role": s.role if s.phase == "forward" else f"{s.phase} {s.role}",
            "slot": s.slot,
            "op": record.op,
            "dtype": v.dtype,
            "shape": list(v.shape),
            "min": number(v.min),
            "max": number(v.max),
            "mean": number(v.mean),
            "l2norm": number(v.l2norm),
            "nan": v.nan or 0,
            "inf": v.inf or 0,
            "kept": record.payload is not None,
            "verdict": None,
            "error": None,
            "limit": None,
            "reason": record.lost or "",
            "expected": "",
            "mark": -1,
            **judged,  # type: ignore[typeddict-item]
        }


def _checked(axes: list[int], values: Array) -> list[int]:
    if len(axes) != 2 or any(not -1 <= a < values.ndim for a in axes) or (axes[0] == axes[1] != -1):
        raise TensorLookupError(
            f"axes {axes}: expected two different axes of a {values.ndim}-d tensor, or -1"
        )
    return axes


def side_view(which: wire.Which, run: Any, record: Record) -> wire.Side:
    s, v = record.site, record.summary
    why = "" if record.payload is not None else record.lost or "recorded with statistics only"
    extra = "".join(
        f", {name}={value!r}"
        for name, value, usual in (
            ("call", s.call, 0),
            ("generation", s.generation, 0),
            ("phase", s.phase, "forward"),
        )
        if value != usual
    )
    codes = run.meta.get("code") if run.path is None else None  # of tensors that are in memory
    name = run.label if run.label.isidentifier() else f"ld.open_run({str(run.path or run.name)!r})"
    kernel = run.kernel(s)
    code = f"{name}.tensor({s.path!r}, step={s.step}, role={s.role!r}, slot={s.slot!r}{extra})"
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
        "code": code if codes is None else codes.get(s.role, "").format(slot=s.slot),
        "kernel": None if kernel is None else _kernel_view(kernel),
    }


def _kernel_view(kernel: Kernel) -> wire.KernelView:
    return {"name": kernel.name, "nodes": list(kernel.nodes), "code": kernel.source}


def axes_of(shape: Sequence[int]) -> list[wire.Axis]:
    """Name the axes where convention is clear: (batch, token, feature), (batch, head, token, feature)."""
    names = {
        1: ["index"],
        2: ["row", "column"],
        3: ["batch", "token", "feature"],
        4: ["batch", "head", "token", "feature"],
    }
    known = names.get(len(shape)) or [f"axis {i}" for i in range(len(shape))]
    return [{"name": name, "size": int(size)} for name, size in zip(known, shape, strict=True)]
