"""An opened dump: the object that every stage after the store works on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmdebug_nb.core.errors import TensorLookupError, nearest
from llmdebug_nb.core.moments import Alarm
from llmdebug_nb.core.part_ids import part_ids
from llmdebug_nb.core.paths import bounded, is_operator
from llmdebug_nb.core.places import shown
from llmdebug_nb.core.printable import printable
from llmdebug_nb.core.records import DUMMY, Kernel, Node, Record, RootCall, Site, StepRows
from llmdebug_nb.store import compiled, frames, profile, token_rows
from llmdebug_nb.store.format import FORMAT
from llmdebug_nb.store.payload import elsewhere
from llmdebug_nb.store.privacy import Privacy, privacy
from llmdebug_nb.store.queries import Index
from llmdebug_nb.store.rows import texts_of
from llmdebug_nb.store.source import Source
from llmdebug_nb.store.tabular import Tabular

if TYPE_CHECKING:
    import pandas
    import torch
    from typing_extensions import Unpack

    from llmdebug_nb.store.row_filter import OperatorColumns, RecordColumns

_ALL = "0-"  # the option ``tokens`` that leaves none out
# the parts of a site, in the order in which a failed lookup checks them
_LOOKUP = ("path", "role", "generation", "step", "call", "phase", "slot", "rank")


class Run(Tabular):
    """An opened dump, read-only. Opening is cheap: records and tensors are read on demand.

    While the `dump` block that makes it still runs, it shows what has been committed so far.

    ``name``, ``path``; ``len(run)``: the number of its records. See `to_pandas`, `tensor`,
    `records`, `steps`, `nodes`, `info`. ``index``: questions that the other stages ask.
    """

    def __init__(self, name: str, path: Path | None, source: Callable[[], Source]) -> None:
        self.name = name
        self.path = path
        self.index = Index(name, path, source)

    @property
    def label(self) -> str:
        """The name that opens this run: ``golden.2`` for a second ``golden``."""
        return self.path.name if self.is_native and self.path is not None else self.name

    @property
    def where(self) -> str:
        """What opens this run again: its path, or its URL in a remote store; "" in memory."""
        there = elsewhere(self.path)
        return there.url if there is not None else str(self.path or "")

    @property
    def is_native(self) -> bool:
        """Whether it is a dump of this package's own format."""
        return self.path is not None and self.source.layout == FORMAT

    # -- the dump as a whole ------------------------------------------------------------------

    @property
    def source(self) -> Source:
        """The opened index; another one after an unfinished recording has grown."""
        return self.index.source

    @property
    def meta(self) -> dict[str, Any]:
        """The dump's own data: options, environment, the end of the recording."""
        return self.source.meta

    @property
    def coarse(self) -> list[str]:
        """What rounds more coarsely than the dtypes tell: ``weights in q8_0``."""
        found = self.meta.get("coarse")
        return [each for each in found if isinstance(each, str)] if isinstance(found, list) else []

    @property
    def rounding(self) -> float:
        """How finely the program says that it computes, whatever the dtype of its tensors is.

        An epsilon: that of the coarsest weights or cache of an engine; 0 if it says nothing.
        """
        return self._epsilon("rounding")

    @property
    def value_rounding(self) -> float:
        """The same of what it computes, without what its weights were rounded to before."""
        return self._epsilon("value_rounding")

    def _epsilon(self, name: str) -> float:
        stated = self.meta.get(name)
        return stated if isinstance(stated, float) and 0.0 < stated < 1.0 else 0.0

    @property
    def products(self) -> dict[str, str]:
        """Paths of modules that multiply with a coarse weight -> ggml's type of that: ``q4_1``."""
        found = self.meta.get("products")
        known = found.items() if isinstance(found, dict) else ()
        return {path: kind for path, kind in known if isinstance(kind, str)}

    @property
    def nodes(self) -> list[Node]:
        """The model tree, parents before children; empty if the dump has none."""
        return self.source.nodes()

    def info(self) -> dict[str, Any]:
        """Return the dump's layout, name, counts, ranks, size and state, ready for JSON."""
        source = self.source
        kept, lost = self.index.count_kept_and_lost()
        return {
            "layout": source.layout,
            "name": self.name,
            "path": self.where,
            "records": len(self),
            "steps": len(self.index.recorded_steps()),
            "ranks": sorted({process["rank"] for process in source.processes}),
            "processes": len(source.processes),
            "bytes": source.nbytes,
            "payloads": kept,
            "lost": lost,
            "complete": source.complete,
            "ended_by": source.meta.get("ended_by"),
            "masked": sum(process.get("masked") or 0 for process in source.processes),
            "modules": self.index.count("all_nodes"),
        }

    def alarms(self) -> list[Alarm]:
        """Return what went wrong while the run was recorded with the option ``alarm``, in order.

        Alarms of all ranks, rank by rank.
        """
        found = [each for one in self.source.processes for each in one.get("alarms", ())]
        return [Alarm(**alarm) for alarm in found]

    def privacy(self) -> Privacy:
        """Return what the dump holds that tells about a text, a program or a person.

        ``print`` it, or look at ``holdings``. Raises CorruptDumpError.
        """
        return privacy(self.index, self.label)

    def __len__(self) -> int:
        return self.index.count()

    def __repr__(self) -> str:
        info = self.info()
        ended_by = info["ended_by"] or "the process ended early"
        state = "" if info["complete"] else f", incomplete ({ended_by})"
        state += f", {self.calls_text()}" if self.calls_text() else ""
        counts = f"{info['records']:,} tensors, steps: {info['steps']}{state}"
        return printable(f"Run {self.label!r}: {counts}, {shown(self.where or 'in memory')}")

    # -- records ------------------------------------------------------------------------------

    def records(
        self, *, after: int | None = None, n: int = -1, **columns: Unpack[RecordColumns]
    ) -> Iterator[Record]:
        """Yield records in execution order, such as ``run.records(role="output", step=0)``.

        ``columns``: the values that a record must have; a tuple lists alternatives.
        ``after``: the id of a record, to begin behind it. ``n``: at most so many; -1: all.
        """
        return self.index.records(after, n, **columns)

    def record(self, number: int) -> Record:
        """Return one record by id. Raises TensorLookupError."""
        return self.index.record(number)

    def root_calls(self) -> list[RootCall]:
        """Return the forward calls of outermost modules that were seen, recorded or not."""
        return self.source.root_calls()

    def calls(self) -> tuple[int, int]:
        """Return how many forward calls of outermost modules were recorded, and how many ran.

        Ranks run the same calls, and what an engine calls for itself is none.
        """
        recorded = self.index.recorded_steps()
        ran = {call for call in self.root_calls() if call.kind != DUMMY}
        return sum((call.generation, call.step) in recorded for call in ran), len(ran)

    def calls_text(self) -> str:
        """Return how many calls were recorded, and what records more; "" if all were."""
        recorded, ran = self.calls()
        options = self.meta.get("options")
        if recorded == ran:
            return ""
        text = f"{recorded:,} of {ran:,} calls recorded"
        given = options if isinstance(options, dict) else {}
        tokens, every = given.get("tokens"), given.get("every", 1)
        chosen = any(given.get(name) for name in ("last", "rounds", "requests")) or every != 1
        if chosen or tokens in (None, _ALL):
            return text
        return f"{text}: tokens {tokens}; record more with tokens=…"

    def steps(self) -> list[RootCall]:
        """Return the first root call of each recorded step, in order."""
        recorded = self.index.recorded_steps()
        first: dict[tuple[int, int], RootCall] = {}
        for call in self.root_calls():
            if (call.generation, call.step) in recorded:
                first.setdefault((call.generation, call.step), call)
        return [first[key] for key in sorted(first)]

    # -- tables -------------------------------------------------------------------------------

    def to_pandas(self) -> pandas.DataFrame:
        """Return one row for each record, in execution order.

        ``shape`` is a tuple, absent figures are NaN. ``payload``: whether values are there.
        ``kept``: which part of the tensor, or which figures, the values are; missing if they are
        the whole tensor.
        """
        return frames.records(self.index)

    def scalars(self, path: str | None = None) -> pandas.DataFrame:
        """Return one row for each argument and output that is a number, a flag or a text.

        Role ``attribute``: plain attributes of a module (eps, training); ``weight``: fingerprints
        of its parameters.
        """
        return frames.scalars(self.index, path)

    def operators(self) -> pandas.DataFrame:
        """Return one row for each operator call, in execution order.

        It is empty if only modules were recorded.
        ``level``: api | aten. ``source``: the innermost frame of its call stack, missing if stacks
        were not recorded; `stack` returns all of it. ``within``, ``within_call``: the call of a
        module or operator that it is part of. ``forward_path``, ``forward_call``: in the backward
        phase, the forward call whose gradient it computes.
        """
        return frames.operators(self.index)

    def ops(self) -> pandas.DataFrame:
        """Return one row for each recorded call, in execution order.

        It has the call's parameters, and dtype and shape of each input and output tensor.
        ``parameters``: arguments that are not tensors, and attributes of modules, as texts by
        name. ``id``: its execution id, see `ids`.
        """
        return profile.ops(self.index)

    def kernels(self) -> pandas.DataFrame:
        """Return one row for each kernel that ran, in order of its start.

        It is empty unless the run was recorded with ``profile="kernel"``. ``path``, ``call``,
        ``op``: the operator that launched it. ``in_dtype``, ``in_shape``: of its inputs, if the
        profile has ``op`` as well. ``code``: its name among the fused kernels. ``start``,
        ``duration``: microseconds of the program's clock, from the beginning of the step; the
        clock stands still while the recording works.
        """
        return profile.kernels(self.index)

    def host(self) -> pandas.DataFrame:
        """Return how long modules and operators kept the host, in order of their start.

        It is empty unless the run was recorded with ``profile="host"``. ``level``: module | op
        (the outermost operators). ``start``, ``duration``: as in `kernels`. ``gap``: microseconds
        from the end of the operator before it, in this step and thread; missing for modules.
        """
        return profile.host(self.index)

    def tiling(self) -> pandas.DataFrame:
        """Return the launch configuration of each fused kernel; empty unless code was compiled.

        It has loops, vector width and threads of C++, and grid, block and registers of Triton.
        """
        return profile.tiling(self.index)

    def rows(self) -> pandas.DataFrame:
        """Return the token of each row of an engine's flat tensors ``[tokens, ...]``, by step.

        It is empty unless an engine was recorded. ``row``: missing if the engine took the position
        from its cache. ``position``: in the tokens of ``request``. ``token``: its id.
        ``attempt``: how often the request had been preempted; its positions are computed anew then.
        ``sampled``: whether the engine chose the token, or it is of the prompt; missing if unknown.
        """
        return token_rows.table(self.index)

    def requests(self) -> list[StepRows]:
        """Return which rows of each step of an engine are of which request; none of other runs."""
        return token_rows.by_step(self.index)

    def kernel(self, site: Site) -> Kernel | None:
        """Return the fused kernel that computed a tensor, or None."""
        return compiled.kernel(self.index, site)

    # -- operators ----------------------------------------------------------------------------

    def stack(
        self,
        path: str,
        step: int = 0,
        call: int = 0,
        phase: str = "forward",
        generation: int = 0,
        rank: int | None = None,
    ) -> list[str]:
        """Return an operator's call stack as ``file:line function``, innermost frame first.

        Raises:
            TensorLookupError: no such call, or recorded without its stack; the message lists what
                the run has.
            CorruptDumpError: the stack is damaged.
        """
        columns: OperatorColumns = {
            "path": path, "phase": phase, "generation": generation, "step": step, "call": call,
        }  # fmt: skip
        if rank is not None:
            columns["rank"] = rank
        found = self.index.first_stack(**columns)
        if found is None:
            raise TensorLookupError(self._missing(columns, "operator_rows"))
        number, text = found
        if number is None or text is None:
            raise TensorLookupError(
                f"run {self.name!r} has no call stacks: it was recorded with sources=False"
            )
        return texts_of(text, self.path, "a call stack")

    def ids(
        self, step: int | None = None, generation: int = 0, rank: int | None = None
    ) -> dict[tuple[str, int], str]:
        """Return the execution ids of a step's calls, by path and call, in execution order.

        ``step`` None: the first recorded one. ``3_1`` is the second call in the fourth call in
        the root, ``3_1.4`` the fifth operator of its level in ``3_1``; the root has "". Calls
        whose records were filtered out are there too. Empty for a dump without ids.
        """
        return self.index.execution_ids(step, generation, rank)

    def msit_ids(
        self, step: int | None = None, generation: int = 0, rank: int | None = None
    ) -> dict[tuple[str, int], str]:
        """Return the ids of a step's calls as msit counts: layers and what runs beside them first.

        Modules that only hold the layers have none. The option ``ids`` takes them as ``msit:3_1``.
        Arguments and order are those of `ids`.
        """
        return part_ids(self.ids(step, generation, rank), self.nodes)

    def id_of(self, site: Site) -> str | None:
        """Return the execution id of a site's call, see `ids`; None if it has none."""
        backward = site.phase != "forward"
        if site.role not in ("input", "output") or (backward and is_operator(site.path)):
            return None
        return self.index.execution_id(
            path=site.path,
            call=site.call,
            generation=site.generation,
            step=site.step,
            rank=site.rank,
        )

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
        """Return the record at a site.

        ``slot`` None takes the first one. ``path`` may be an alias of a tied module.

        Raises:
            TensorLookupError: the message lists what is there instead.
        """
        path = bounded(path)
        if self.index.is_empty("rows", "path = ?", (path,)):
            path = next((node.path for node in self.nodes if path in node.aliases), path)
        columns: RecordColumns = {
            "path": path, "phase": phase, "role": role, "generation": generation, "step": step,
            "call": call,
        }  # fmt: skip
        if slot is not None:
            columns["slot"] = str(slot)
        if rank is not None:
            columns["rank"] = rank
        record = next(self.records(n=1, **columns), None)
        if record is None:
            raise TensorLookupError(self._missing(columns, "rows"))
        return record

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
        """Read one tensor: a torch tensor on the CPU, or a NumPy array (half types as float32).

        If only a part or figures of it were kept, these are returned; `find` tells which
        (``kept``, ``payload_shape``).

        Raises:
            TensorLookupError: no such site, or its values were not kept; the message lists what
                is there instead.
            CorruptDumpError: the payload is damaged.
        """
        tensor = self.load(self.find(path, step, role, slot, call, generation, rank, phase))
        if not as_numpy:
            return tensor
        from llmdebug_nb.core.kernels.raw import array_of

        try:
            return array_of(tensor)
        except TypeError:
            return array_of(tensor.float())

    def load(self, record: Record) -> torch.Tensor:
        """Read the values of a record of this run: the whole tensor, or what ``record.kept`` names.

        Raises TensorLookupError, CorruptDumpError.
        """
        if record.payload is None:
            why = record.lost or "the run was recorded with statistics only"
            raise TensorLookupError(f"run {self.name!r} has no values of {record.site}: {why}")
        with self.index.lock:
            return self.source.load(record)

    def _missing(self, columns: RecordColumns | OperatorColumns, view: str) -> str:
        """Return the error that names the unknown part of a site, and the values in its place."""
        wanted = dict[str, object](columns)
        if view != "rows" and self.index.is_empty(view):
            needed = "record with mode='api' or mode='aten'"
            return f"run {self.name!r} was recorded without operators; {needed}"
        unknown = self.index.first_unknown(view, wanted, _LOOKUP)
        if unknown is None:
            return f"run {self.name!r} has no such tensor"
        name, known = unknown
        if name == "path":
            hint, at = nearest(str(wanted[name]), known), ""
        else:
            hint, at = f"; there is {', '.join(known[:12]) or 'none'}", f" at {wanted['path']!r}"
        return f"run {self.name!r} has no {name} {wanted[name]!r}{at}{hint}"
