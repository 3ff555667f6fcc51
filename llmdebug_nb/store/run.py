"""A dump, opened: what every stage after the store works on."""

from __future__ import annotations

import json
import sqlite3
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmdebug_nb.core.columns import LAUNCH, TIMING
from llmdebug_nb.core.errors import CorruptDumpError, TensorLookupError, nearest
from llmdebug_nb.core.paths import within
from llmdebug_nb.core.records import Kernel, Node, Record, RootCall, Site, Summary
from llmdebug_nb.core.tabular import Tabular
from llmdebug_nb.store import compiled, profile
from llmdebug_nb.store.format import FORMAT, payload_dtype, shape_of

if TYPE_CHECKING:
    import pandas
    import torch

ROW_COLUMNS = (
    "id",
    "rank",
    "generation",
    "step",
    "kind",
    "root",
    "path",
    "call",
    "phase",
    "role",
    "slot",
    "op",
    "seq",
    "dtype",
    "shape",
    "min",
    "max",
    "mean",
    "l2norm",
    "nan",
    "inf",
    "zero",
    "fingerprint",
    "device",
    "producer",
    "payload",
    "lost",
    "kept",
    "kept_shape",
    "root_call",
)
OPERATOR_COLUMNS = (
    "id",
    "rank",
    "generation",
    "step",
    "path",
    "call",
    "phase",
    "level",
    "op",
    "source",
    "within",
    "within_call",
    "forward_path",
    "forward_call",
)


STRIDE = 1 << 40  # ids of the n-th process start at n * STRIDE
TIMING_COLUMNS = ("id", "rank", "generation", "step", *TIMING[2:], "root_call")
LAUNCH_COLUMNS = ("id", "rank", "generation", "step", *LAUNCH[2:], "root_call")


class Run(Tabular):
    """A dump, opened, read-only. Cheap to make: records and tensors are read on demand.

    While the `dump` block that makes it still runs, it shows what has been committed so far.

    ``name``, ``path``; ``len(run)``: its records. See `to_pandas`, `tensor`, `records`, `steps`, `nodes`, `info`.
    """

    def __init__(self, name: str, path: Path | None, source: Callable[[], Source]) -> None:
        self.name = name
        self.path = path
        self._open = source
        self._source: Source | None = None
        self._lock = threading.RLock()

    @property
    def label(self) -> str:
        """The name that opens this very run: that of its folder, ``golden.2`` for a second ``golden``."""
        return (
            self.path.name if self.path is not None and self.source.layout == FORMAT else self.name
        )

    # -- what it is ---------------------------------------------------------------------------

    @property
    def source(self) -> Source:
        """The opened index; opened anew when a recording that is not closed yet has grown."""
        with self._lock:
            if self._source is None or self._source.outdated():
                self._source = self._open()
            return self._source

    @property
    def meta(self) -> dict[str, Any]:
        """What the dump says of itself: options, environment, how recording ended."""
        return self.source.meta

    @property
    def nodes(self) -> list[Node]:
        """The model tree, parents before children; empty where the dump has none."""
        return self.source.nodes()

    def info(self) -> dict[str, Any]:
        """Return layout, name, records, steps, ranks, processes, bytes, complete and more, ready for JSON."""
        source = self.source
        steps = self.query(
            "SELECT count(*) FROM (SELECT DISTINCT generation, step FROM rows WHERE role != 'weight')"
        )[0][0]
        kept, lost = self.query("SELECT count(payload), count(lost) FROM rows")[0]
        return {
            "layout": source.layout,
            "name": self.name,
            "path": str(self.path or ""),
            "records": len(self),
            "steps": steps,
            "ranks": sorted({process["rank"] for process in source.processes}),
            "processes": len(source.processes),
            "bytes": source.nbytes,
            "payloads": kept,
            "lost": lost,
            "complete": source.complete,
            "ended_by": source.meta.get("ended_by"),
            "modules": self.query("SELECT count(*) FROM all_nodes")[0][0],
        }

    def kernel(self, site: Site) -> Kernel | None:
        """Return the kernel of compiled code that computes what is at a site; None where it is no fused run's."""
        return compiled.kernel(self, site)

    def __len__(self) -> int:
        return int(self.query("SELECT count(*) FROM rows")[0][0])

    def __repr__(self) -> str:
        info = self.info()
        state = (
            ""
            if info["complete"]
            else f", incomplete ({info['ended_by'] or 'the process ended early'})"
        )
        return f"Run {self.label!r}: {info['records']:,} tensors, steps: {info['steps']}{state}, {self.path or 'in memory'}"

    # -- records ------------------------------------------------------------------------------

    def query(self, sql: str, values: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        """Return the rows of a SELECT over the view ``rows`` (columns: `ROW_COLUMNS`)."""
        with self._lock:
            try:
                return self.source.db.execute(sql, values).fetchall()
            except sqlite3.DatabaseError as error:
                raise CorruptDumpError(f"{self.path}: the index can't be read ({error})") from None

    def records(
        self, where: str = "1", values: Sequence[Any] = (), start: int = 0, n: int = -1
    ) -> Iterator[Record]:
        """Yield records in execution order; ``where``: SQL over `ROW_COLUMNS`, ``n`` -1: all."""
        sql = f"SELECT {','.join(ROW_COLUMNS)} FROM rows WHERE {where} ORDER BY id LIMIT ? OFFSET ?"
        for row in self.query(sql, (*values, n, start)):
            yield self._record(row)

    def record(self, number: int) -> Record:
        """Return one record by id. Raises TensorLookupError."""
        found = next(self.records("id = ?", (number,)), None)
        if found is None:
            raise TensorLookupError(f"run {self.name!r} has no record {number}")
        return found

    def _record(self, row: tuple[Any, ...]) -> Record:
        (
            number,
            rank,
            generation,
            step,
            _,
            _,
            path,
            call,
            phase,
            role,
            slot,
            op,
            seq,
            dtype,
            shape,
            low,
            high,
            mean,
            norm,
            nan,
            inf,
            zero,
            fingerprint,
            device,
            producer,
            payload,
            lost,
            kept,
            kept_shape,
            _,
        ) = row
        try:
            sizes = json.loads(shape)
            low, high, mean, norm = _figures((low, high, mean, norm), nan)
            summary = Summary(
                dtype, tuple(sizes), low, high, mean, norm, nan, inf, zero, fingerprint
            )
        except (ValueError, TypeError):
            raise CorruptDumpError(
                f"{self.path}: record {number} has no valid shape ({shape!r})"
            ) from None
        if kept is not None or kept_shape is not None:
            kept_shape = self._kept_shape(number, kept, kept_shape)
        site = Site(path, step, call, phase, role, slot, rank, generation)
        return Record(
            number, site, seq, op, summary, device, producer, payload, lost, kept, kept_shape
        )

    def _kept_shape(self, number: int, kept: Any, text: Any) -> tuple[int, ...]:
        try:
            if kept is None:
                raise ValueError("a shape of nothing")
            payload_dtype(kept, dtype="")
            return shape_of(text)
        except (ValueError, TypeError):
            said = f"kept {str(kept)[:60]!r} of shape {str(text)[:60]!r}"
            raise CorruptDumpError(
                f"{self.path}: record {number} says no valid part ({said})"
            ) from None

    def root_calls(self) -> list[RootCall]:
        """Return the forward calls of outermost modules that were seen, recorded or not."""
        return self.source.root_calls()

    def steps(self) -> list[RootCall]:
        """Return the first root call of each recorded step, in order: what a token stepper shows."""
        recorded = {
            tuple(row)
            for row in self.query(
                "SELECT DISTINCT generation, step FROM rows WHERE role != 'weight'"
            )
        }
        first: dict[tuple[int, int], RootCall] = {}
        for call in self.root_calls():
            if (call.generation, call.step) in recorded:
                first.setdefault((call.generation, call.step), call)
        return [first[key] for key in sorted(first)]

    def to_pandas(self) -> pandas.DataFrame:
        """Return one row a record, in execution order, with every column of `ROW_COLUMNS` that means something to a reader.

        ``shape`` is a tuple, absent figures are NaN. ``payload`` says whether values are there, ``kept`` which part of
        the tensor, or which figures of it, they are: missing for the whole one.
        """
        import pandas

        records = list(self.records())
        kinds = {(c.generation, c.step): c.kind for c in reversed(self.root_calls())}
        fields = (
            "dtype",
            "shape",
            "min",
            "max",
            "mean",
            "l2norm",
            "nan",
            "inf",
            "zero",
            "fingerprint",
        )
        columns: dict[str, list[Any]] = {
            name: [getattr(r.site, name) for r in records]
            for name in ("rank", "generation", "step", "path", "call", "phase", "role", "slot")
        }
        columns["kind"] = [kinds.get((r.site.generation, r.site.step), "") for r in records]
        columns["op"] = [r.op for r in records]
        columns["seq"] = [r.seq for r in records]
        columns |= {name: [getattr(r.summary, name) for r in records] for name in fields}
        columns["device"] = [r.device for r in records]
        columns["producer"] = [r.producer for r in records]
        columns["payload"] = [r.payload is not None for r in records]
        columns["kept"] = [r.kept for r in records]
        columns["lost"] = [r.lost for r in records]
        frame = pandas.DataFrame(columns, index=pandas.Index([r.id for r in records], name="id"))
        counts = dict.fromkeys(("nan", "inf", "zero", "producer"), "Int64")
        return self._typed(
            frame, dict.fromkeys(("min", "max", "mean", "l2norm"), "float64") | counts
        )

    def _typed(self, frame: pandas.DataFrame, dtypes: dict[str, str]) -> pandas.DataFrame:
        try:
            return frame.astype(dtypes)
        except (ValueError, TypeError) as error:
            raise CorruptDumpError(
                f"{self.path}: a column of numbers holds something else ({error})"
            ) from None

    def scalars(self, path: str | None = None) -> pandas.DataFrame:
        """Return the arguments and outputs that are no tensors (None, numbers, flags, caches), one row each.

        Role ``attribute``: plain attributes of a module (eps, training); ``weight``: fingerprints of its parameters.
        """
        import pandas

        names = ["generation", "step", "path", "call", "role", "slot", "type", "value"]
        where, values = ("", ()) if path is None else ("WHERE path = ?", (path,))
        return pandas.DataFrame(
            self.query(f"SELECT {','.join(names)} FROM scalar_rows {where}", values), columns=names
        )

    # -- operators ----------------------------------------------------------------------------

    def operators(self) -> pandas.DataFrame:
        """Return one row an operator call, in execution order; none where the run was recorded by modules only.

        ``level``: api | aten. ``source``: the innermost frame of its call stack, missing if stacks were not recorded;
        all of it: `stack`. ``within``, ``within_call``: the call of a module or operator that it is part of.
        ``forward_path``, ``forward_call``: in the backward phase, the forward call that it is the gradient of.
        """
        import pandas

        rows = self.query(f"SELECT {quoted(OPERATOR_COLUMNS)} FROM operator_rows ORDER BY id")
        stacks = {
            number: self._frames(text)
            for number, text in self.query("SELECT idx, frames FROM all_sources")
        }
        columns: dict[str, list[Any]] = {
            name: [row[i] for row in rows] for i, name in enumerate(OPERATOR_COLUMNS)
        }
        columns["source"] = [
            next(iter(stacks.get(number, ())), None) for number in columns["source"]
        ]
        del columns["id"]
        return self._typed(
            pandas.DataFrame(columns), dict.fromkeys(("within_call", "forward_call"), "Int64")
        )

    def ops(self) -> pandas.DataFrame:
        """Return one row a recorded call of a module or operator, in execution order: its parameters, and dtype and shape of each tensor that went in and out.

        ``parameters``: arguments that are no tensors, and plain attributes of modules, as texts by name. ``id``: its execution id, see `ids`.
        """
        return profile.ops(self)

    def kernels(self) -> pandas.DataFrame:
        """Return one row a kernel that ran, in order of its start; none where the run was recorded without ``profile="kernel"``.

        ``path``, ``call``, ``op``: the operator that launched it. ``in_dtype``, ``in_shape``: of what it was given, where the profile has ``op`` as well. ``code``: its name among the fused kernels. ``start``, ``duration``: microseconds
        of the program's clock, from the beginning of the step; that clock stands while work of ours is under way.
        """
        return profile.kernels(self)

    def host(self) -> pandas.DataFrame:
        """Return how long modules and operators kept the host, in order of their start; nothing where the run was recorded without ``profile="host"``.

        ``level``: module | op (the outermost operators). ``start``, ``duration``: as in `kernels`. ``gap``: microseconds from the end of the operator
        before, in this step and thread, to the start of this one; missing for modules.
        """
        return profile.host(self)

    def tiling(self) -> pandas.DataFrame:
        """Return the launch configuration of each fused kernel: loops, vector width and threads of C++, grid, block and registers of Triton.

        Nothing where the run is not of compiled code.
        """
        return profile.tiling(self)

    def stack(
        self,
        path: str,
        step: int = 0,
        call: int = 0,
        phase: str = "forward",
        generation: int = 0,
        rank: int | None = None,
    ) -> list[str]:
        """Return where in the program an operator was called: its call stack as ``file:line function``, innermost first.

        Raises:
            TensorLookupError: no such call, or recorded without its stack; says what is there instead.
            CorruptDumpError: the stack is damaged.
        """
        wanted = {
            "path": path,
            "phase": phase,
            "generation": generation,
            "step": step,
            "call": call,
        }
        if rank is not None:
            wanted["rank"] = rank
        clause = " AND ".join(f"{name} = ?" for name in wanted)
        sql = f"""SELECT o.source, s.frames FROM operator_rows o LEFT JOIN all_sources s ON s.idx = o.source
 WHERE {clause} ORDER BY o.id LIMIT 1"""
        found = self.query(sql, list(wanted.values()))
        if not found:
            raise TensorLookupError(self._missing(wanted, "operator_rows"))
        if found[0][0] is None:
            raise TensorLookupError(
                f"run {self.name!r} has no call stacks: it was recorded with sources=False"
            )
        return self._frames(found[0][1])

    def _frames(self, text: Any) -> list[str]:
        try:
            frames = json.loads(text)
            if not isinstance(frames, list) or not all(isinstance(frame, str) for frame in frames):
                raise ValueError("no list of texts")
        except (ValueError, TypeError, RecursionError) as error:
            raise CorruptDumpError(f"{self.path}: a call stack is damaged ({error})") from None
        return frames

    def ids(
        self, step: int | None = None, generation: int = 0, rank: int | None = None
    ) -> dict[tuple[str, int], str]:
        """Return the execution ids of the calls of a step, by path and call, in execution order; step None: of the first recorded one.

        ``3_1`` is the second call in the fourth call in the root, ``3_1.4`` the fifth operator of its level in ``3_1``; the root has "". Calls that
        filters left out of the records are there too. Empty for a dump without ids.
        """
        if step is None:
            found = self.query(
                "SELECT generation, step FROM call_rows WHERE generation >= ? ORDER BY 1, 2 LIMIT 1",
                (generation,),
            )
            generation, step = found[0] if found else (generation, 0)
        chosen = "(SELECT min(rank) FROM call_rows)" if rank is None else "?"
        sql = f"SELECT path, call, id FROM call_rows WHERE generation = ? AND step = ? AND rank = {chosen} ORDER BY seq"
        values = (generation, step, *(() if rank is None else (rank,)))
        return {(path, call): str(id_) for path, call, id_ in self.query(sql, values)}

    def id_of(self, site: Site) -> str | None:
        """Return the execution id of the call that a tensor was seen at, see `ids`; None where there is none."""
        sql = "SELECT id FROM call_rows WHERE path = ? AND call = ? AND generation = ? AND step = ? AND rank = ? LIMIT 1"
        found = self.query(sql, (site.path, site.call, site.generation, site.step, site.rank))
        has = site.role in ("input", "output") and (site.phase == "forward" or "/" not in site.path)
        return str(found[0][0]) if found and has else None

    # -- tensors ------------------------------------------------------------------------------

    def find(
        self,
        path: str,
        step: int = 0,
        role: str = "output",
        slot: str | int | None = None,
        call: int = 0,
        generation: int = 0,
        rank: int | None = None,
        phase: str = "forward",
    ) -> Record:
        """Return the record at a site; ``slot`` None takes the first one, ``path`` may be an alias of a tied module.

        Raises:
            TensorLookupError: says what is there instead.
        """
        wanted: dict[str, Any] = {
            "path": self._canonical(path),
            "phase": phase,
            "role": role,
            "generation": generation,
            "step": step,
            "call": call,
        }
        if slot is not None:
            wanted["slot"] = str(slot)
        if rank is not None:
            wanted["rank"] = rank
        found = next(
            self.records(" AND ".join(f"{k} = ?" for k in wanted), tuple(wanted.values()), n=1),
            None,
        )
        if found is None:
            raise TensorLookupError(self._missing(wanted))
        return found

    def tensor(
        self,
        path: str,
        step: int = 0,
        role: str = "output",
        slot: str | int | None = None,
        call: int = 0,
        generation: int = 0,
        rank: int | None = None,
        phase: str = "forward",
        as_numpy: bool = False,
    ) -> Any:
        """Read one tensor from the dump: a torch tensor on the CPU, or a NumPy array (half types as float32).

        Where only a part or figures of it were kept, it is these: `find` says which (``kept``, ``payload_shape``).

        Raises:
            TensorLookupError: no such site, or its payload was not kept; says what is there instead.
            CorruptDumpError: the payload is damaged.
        """
        tensor = self.load(self.find(path, step, role, slot, call, generation, rank, phase))
        if not as_numpy:
            return tensor
        try:
            return tensor.numpy()
        except TypeError:
            return tensor.float().numpy()

    def load(self, record: Record) -> torch.Tensor:
        """Read the payload of a record of this run: what ``record.kept`` says of the tensor, or all of it.

        Raises TensorLookupError, CorruptDumpError.
        """
        if record.payload is None:
            why = record.lost or "the run was recorded with statistics only"
            raise TensorLookupError(f"run {self.name!r} has no values of {record.site}: {why}")
        with self._lock:
            return self.source.load(record)

    def _canonical(self, path: str) -> str:
        return next((node.path for node in self.nodes if path in node.aliases), path)

    def _missing(self, wanted: dict[str, Any], view: str = "rows") -> str:
        """Say which part of a site is not in the run, and what is."""
        if view != "rows" and not self.query(f"SELECT 1 FROM {view} LIMIT 1"):
            return f"run {self.name!r} was recorded without operators; record with mode='api' or mode='aten'"
        seen: list[str] = []
        for name in ("path", "role", "generation", "step", "call", "phase", "slot", "rank"):
            if name not in wanted:
                continue
            seen.append(name)
            clause = " AND ".join(f"{k} = ?" for k in seen)
            if not self.query(
                f"SELECT 1 FROM {view} WHERE {clause} LIMIT 1", [wanted[k] for k in seen]
            ):
                before = " AND ".join(f"{k} = ?" for k in seen[:-1]) or "1"
                there = self.query(
                    f"SELECT DISTINCT {name} FROM {view} WHERE {before}",
                    [wanted[k] for k in seen[:-1]],
                )
                known = [str(value) for (value,) in there]
                hint = (
                    nearest(str(wanted[name]), known)
                    if name == "path"
                    else f"; there is {', '.join(known[:12]) or 'none'}"
                )
                at = f" at {wanted['path']!r}" if name != "path" else ""
                return f"run {self.name!r} has no {name} {wanted[name]!r}{at}{hint}"
        return f"run {self.name!r} has no such tensor"


def quoted(columns: Iterable[str]) -> str:
    """Return names of columns for SQL."""
    return ",".join(f'"{name}"' for name in columns)  # `within` is a word of newer SQLites


def _figures(figures: Sequence[float | None], nan: int | None) -> list[float | None]:
    """SQLite keeps no NaN: where a figure is missing though elements were counted, it was one."""
    return [float("nan") if value is None and nan is not None else value for value in figures]


class Source:
    """An opened index with the view ``rows``, and the way to its payloads. Made by `store/reader.py`.

    ``outdated()``: the dump has grown since it was opened. ``processes``: one dict each, at least ``rank``.
    """

    def __init__(
        self,
        db: sqlite3.Connection,
        load: Callable[[Record], torch.Tensor],
        *,
        layout: str,
        nbytes: int,
        complete: bool,
        processes: list[dict[str, Any]],
        meta: dict[str, Any],
        outdated: Callable[[], bool] = lambda: False,
    ) -> None:
        self.db, self.load, self.layout, self.nbytes = db, load, layout, nbytes
        self.complete, self.processes, self.meta, self.outdated = (
            complete,
            processes,
            meta,
            outdated,
        )
        self._nodes: list[Node] | None = None
        db.create_function("within", 2, within, deterministic=True)

    def nodes(self) -> list[Node]:
        if self._nodes is None:
            rows = self.db.execute(
                "SELECT path, name, type, parent, params, aliases, root FROM all_nodes ORDER BY idx"
            )
            self._nodes = [
                Node(
                    path,
                    name,
                    kind,
                    parent,
                    json.loads(params),
                    () if aliases == "[]" else tuple(json.loads(aliases)),
                    root,
                )
                for path, name, kind, parent, params, aliases, root in rows
            ]
        return self._nodes

    def root_calls(self) -> list[RootCall]:
        sql = "SELECT idx, generation, step, kind, query, total, batch, root FROM all_calls ORDER BY idx"
        return [RootCall(*row) for row in self.db.execute(sql)]
