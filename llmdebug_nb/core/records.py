"""The nouns. Every stage exchanges these and nothing else; read this file first.

A tensor is seen at a **Site** while a **RootCall** runs, is described by a **Summary**, and becomes
a **Record**. A dump of records, opened again, is a **Run** (`store/run.py`), whose modules are the
**Node** rows of its topology. Two runs are aligned into **Pair** rows, each measured into a
**Difference**, and what is to blame is a **Finding**. What is known and wanted of it is an **Expectation**.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from glob import escape
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from llmdebug_nb.core.errors import MissingPackageError, StoreError
from llmdebug_nb.core.paths import matches

if TYPE_CHECKING:
    import pandas
    import torch

WARMUP = "warmup"
EXPECTED = "expected"
MISMATCHES = ("diverged", "unmatched")  # verdicts of what asks to be looked at


class Shown:
    """What a notebook shows as the value of a cell: as text, as HTML, and as an explorer.

    Nouns know no front end: the one that shows them is looked up, by its name, when a notebook asks.
    """

    __slots__ = ()

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> Any:
        return import_module("llmdebug_nb.notebook.display").bundle(self)


# a record on its way from capture to the store is a list in this order; `id` counts up in execution order
COLUMNS = (
    "id",
    "root_call",
    "path",
    "call",
    "phase",
    "role",
    "slot",
    "op",
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
    "offset",
    "length",
    "lost",
    "kept",  # which part of the tensor, or which figures of it, the payload is; None: all of it
    "kept_shape",
)
# an operator call is a list in this order. ``level``: api | aten. ``source``: number of its stack.
# ``within``/``within_call``: the call that it is part of, a module's or an api operator's.
# ``forward_path``/``forward_call``: in the backward phase, the forward call that it is the gradient of
OPERATOR = (
    "root_call",
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
# host time of a call, in the same way; `start` and `duration` in nanoseconds of the program's clock (capture/timing.py)
TIMING = (
    "id",
    "root_call",
    "path",
    "call",
    "phase",
    "level",
    "op",
    "thread",
    "start",
    "duration",
    "gap",
)
# a kernel that an operator launched; `code`: its name among the kernels of compiled code; `inputs`, `outputs`: JSON, [dtype, shape] of each tensor
LAUNCH = ("id", "root_call", "path", "call", "phase", "op", "kernel", "code", "device", "stream", "start", "duration", "inputs", "outputs")  # fmt: skip

AT = {name: place for place, name in enumerate(COLUMNS)}
Row = list[Any]


class Tabular:
    """A table: for pandas, and for what reads Arrow (polars, DuckDB, pyarrow)."""

    __slots__ = ()

    def to_pandas(self) -> pandas.DataFrame:
        raise NotImplementedError

    def __arrow_c_stream__(self, requested_schema: Any = None) -> Any:
        """Return `to_pandas` as an Arrow stream. Raises MissingPackageError where there is no pyarrow, which pandas makes it with."""
        try:
            return self.to_pandas().__arrow_c_stream__(requested_schema)
        except ImportError:
            raise MissingPackageError(
                "a table for Arrow needs pyarrow, which is not installed: pip install pyarrow; to_pandas() does without"
            ) from None


_SUM = re.compile(r"(\S+) sum of ([1-9]\d{0,11})")


def summed(slot: str) -> tuple[str, int] | None:
    """Read a slot such as ``0 sum of 64``: output 0, yet to be divided by 64. None for any other."""
    found = _SUM.fullmatch(slot)
    return (found[1], int(found[2])) if found else None


# why a tensor of compiled code has no partner, though nothing is missing
INSIDE = "computed inside a kernel in the other run, and nowhere written"
WRITTEN = "written by a kernel, where the other run has a view or an operator that it keeps whole"
READ = "what a kernel reads, compared where it was made"
OF_COMPILED = frozenset({INSIDE, WRITTEN, READ})
# the same for a graph that was exported (ONNX)
FOLDED = (
    "not in the exported graph: folded into a constant, fused with something else, or unused there"
)
INNER = (
    "a value of the exported graph, which the other run does not hand from one module to another"
)
EXCUSED = OF_COMPILED | {FOLDED, INNER}
EXPORTED = "Onnx."  # operators of an exported graph begin with it
IN_KERNEL = "kernel."  # slots of what a kernel of compiled code reads start with it: they are names of buffers, not of arguments


@dataclass(frozen=True, slots=True)
class RootCall:
    """One forward call of an outermost module.

    ``index``: n-th root call of this process, from 0.
    ``generation``: which `generate` (or unbroken series of bare forward calls) it belongs to. Counted
    from 0 over the real ones; warm-ups come before them and count down: -1 is the last warm-up.
    ``step``: generated token of that generation, prefill 0, then one per decode iteration; for
    bare calls their ordinal. Chunks of one prefill share step 0.
    ``kind``: prefill, decode, verify (assisted decoding), full (no cache), extra (a further call
    within the same token, e.g. guidance), encoder, forward (none of these can be told) or warmup.
    ``query``/``total``/``batch``: token rows fed in, prompt + generated tokens so far, sequences;
    None where the call shows no token ids.
    """

    index: int
    generation: int = 0
    step: int = 0
    kind: str = "forward"
    query: int | None = None
    total: int | None = None
    batch: int | None = None
    root: str = ""


class CallKey(NamedTuple):
    """Which call of a module or operator, of all calls in a run. ``call``: n-th of that path within the step, from 0."""

    rank: int
    generation: int
    step: int
    phase: str
    path: str
    call: int


@dataclass(frozen=True, slots=True)
class Site:
    """Where a tensor was seen.

    ``path``: qualified module name from the root; the root itself is ``""``.
    ``call``: n-th call of that path within the step, from 0.
    ``phase``: forward | backward. ``role``: input | output | weight | grad (of a weight).
    ``slot``: argument path: ``0``, ``kwargs.attention_mask``, ``hidden_states.3``. A bare tensor
    output has slot ``0``.
    """

    path: str
    step: int = 0
    call: int = 0
    phase: str = "forward"
    role: str = "output"
    slot: str = "0"
    rank: int = 0
    generation: int = 0

    @property
    def key(self) -> CallKey:
        """The call that it was an input, output or weight of."""
        return CallKey(self.rank, self.generation, self.step, self.phase, self.path, self.call)

    def __str__(self) -> str:
        phase = "" if self.phase == "forward" else f"{self.phase} "
        where = f"{self.path or '(root)'} {phase}{self.role}[{self.slot}]"
        extra = f" call {self.call}" if self.call else ""
        gen = f" generation {self.generation}" if self.generation else ""
        return f"{where} step {self.step}{gen}{extra}"


@dataclass(frozen=True, slots=True)
class Summary:
    """What every recorded tensor is described by, payload kept or not.

    ``dtype``: torch name without the prefix (``bfloat16``). ``shape``: sizes; ``()`` is a scalar, -1 a size
    that is no one number (nested tensors).
    ``min``/``max``/``mean``/``l2norm``: over all elements, in IEEE arithmetic (a NaN anywhere gives
    NaN); booleans count as 0 and 1, complex numbers by magnitude; mean and norm are accumulated
    in float64; all four are None for an empty tensor or one whose values can't be read.
    ``nan``/``inf``/``zero``: element counts, or None likewise.
    ``fingerprint``: ``algorithm:hex`` of the raw bytes (see `kernels/fingerprint.py`), or None.
    """

    dtype: str
    shape: tuple[int, ...]
    min: float | None = None
    max: float | None = None
    mean: float | None = None
    l2norm: float | None = None
    nan: int | None = None
    inf: int | None = None
    zero: int | None = None
    fingerprint: str | None = None

    @property
    def numel(self) -> int:
        n = 1
        for size in self.shape:
            n *= size
        return n


@dataclass(frozen=True, slots=True)
class Record:
    """A tensor as recorded.

    ``seq``: execution order within the process. ``op``: class name of the module.
    ``producer``: id of the record whose output storage this tensor is, or None (a graph input, or
    made by code that was not observed).
    ``payload``: where the bytes lie, opaque to all but the store; None if not kept.
    ``lost``: why a payload that was asked for is not there, or None.
    ``kept``: what the payload is where it is not the whole tensor: ``slice[0,:]`` (that part, in the tensor's
    dtype), ``minmax`` (float64[2]) or ``quantile[N]`` (float64[N]). ``kept_shape``: its shape then.
    """

    id: int
    site: Site
    seq: int
    op: str
    summary: Summary
    device: str = "cpu"
    producer: int | None = None
    payload: Any = None
    lost: str | None = None
    kept: str | None = None
    kept_shape: tuple[int, ...] | None = None

    @property
    def payload_shape(self) -> tuple[int, ...]:
        """The shape of what was kept: the tensor's own, or that of the part."""
        return self.summary.shape if self.kept_shape is None else self.kept_shape


@dataclass(frozen=True, slots=True)
class Node:
    """A module of the model: a row of the topology, children after their parent.

    ``parent``: index in the list, -1 for a root. ``params``: own parameters and buffers -> shape.
    ``aliases``: further names of the same module object (tied modules).
    """

    path: str
    name: str
    type: str
    parent: int
    params: dict[str, list[int]] = field(default_factory=dict)
    aliases: tuple[str, ...] = ()
    root: str = ""


@dataclass(frozen=True, slots=True)
class Kernel:
    """A kernel of compiled code. ``name``: ``graph0/cpp_fused_mul_1``. ``nodes``: of the graph, that it computes. ``source``: its code, "" for one of
    PyTorch's own."""

    name: str
    nodes: tuple[str, ...]
    source: str = ""


class Fit(Protocol):
    """Brings two tensors to one shape. ``says``: how, in words. ``whole``: every element of both takes part."""

    @property
    def says(self) -> str: ...
    @property
    def whole(self) -> bool: ...
    def __call__(
        self, golden: torch.Tensor, mine: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]: ...


@dataclass(frozen=True, slots=True)
class Pair:
    """Two records and why they were matched, or one record and why it stays alone.

    ``fit``: where the two lie differently, what brings them to one shape, and says so; see `align/fit.py`.
    """

    golden: Record | None
    mine: Record | None
    why: str
    fit: Fit | None = None

    @property
    def either(self) -> Record:
        record = self.golden or self.mine
        assert record is not None
        return record


@dataclass(frozen=True, slots=True)
class Expectation:
    """A deviation that is known and wanted, and why: ``comment``.

    ``path``: a glob over module and operator paths. By itself it means what such a module makes: its outputs and all
    inside it, not what it is given. With ``role`` and ``slot`` it means that one tensor of such a module; ``phase`` and ``step`` narrow
    either, None is any.
    """

    path: str
    comment: str = ""
    role: str | None = None
    slot: str | None = None
    phase: str | None = None
    step: int | None = None

    def __str__(self) -> str:
        tensor = f" {self.role or '*'}[{self.slot or '*'}]" if self.role or self.slot else ""
        phase = f" {self.phase}" if self.phase else ""
        return f"{self.path or '(root)'}{phase}{tensor}{'' if self.step is None else f' step {self.step}'}"

    @classmethod
    def of_row(cls, row: Difference, comment: str = "") -> Expectation:
        """Return one of that tensor, in all steps."""
        s = row.site
        return cls(escape(s.path), comment, s.role, s.slot, s.phase)

    @classmethod
    def of_finding(cls, finding: Finding, comment: str = "") -> Expectation:
        """Return one of the call that is blamed; where that was given something wrong, of what it was given."""
        mark, row = cls(escape(finding.path), comment), finding.difference
        given = row is not None and row.verdict == "diverged" and not mark.covers(row.site)
        return cls.of_row(row, comment) if row is not None and (given or not finding.path) else mark

    def covers(self, site: Site) -> bool:
        """Tell whether a tensor is meant."""
        if self.step not in (None, site.step) or self.phase not in (None, site.phase):
            return False
        at_it, inside = matches(self.path, site.path)
        if self.role is None and self.slot is None:
            return inside or (at_it and site.role != "input")
        return at_it and self.role in (None, site.role) and self.slot in (None, site.slot)

    def means(self, other: Expectation) -> bool:
        """Tell whether both mean the same tensors, whatever they say of them."""
        return replace(self, comment="") == replace(other, comment="")


@dataclass(frozen=True, slots=True, repr=False)
class Difference(Shown):
    """A pair, measured. ``metrics``: name -> value, names as in `comparison/metrics.py`.

    ``verdict``: match | within_noise | expected | diverged | unmatched. ``error``: the figure that was judged,
    ``limit``: what it was held against. ``reason``: why it is unmatched, or can't be measured. ``expected``: what says so of it, or None
    where it merely follows from what is expected.
    """

    index: int
    pair: Pair
    verdict: str
    error: float | None = None
    limit: float | None = None
    metrics: dict[str, float | int | None] = field(default_factory=dict)
    reason: str | None = None
    expected: Expectation | None = None

    def __repr__(self) -> str:
        figures = "" if self.error is None else f", error {self.error:.2g} (limit {self.limit:.2g})"
        return f"<{self.verdict}: {self.site}{figures}{', ' + self.reason if self.reason else ''}>"

    @property
    def site(self) -> Site:
        return self.pair.either.site

    @property
    def op(self) -> str:
        return self.pair.either.op

    @property
    def is_mismatch(self) -> bool:
        """It asks to be looked at: it diverged, or a partner is missing that there could be."""
        return self.verdict in MISMATCHES and self.pair.why not in EXCUSED


@dataclass(frozen=True, slots=True, repr=False)
class Finding(Shown):
    """What is to blame. ``cause``: a closed set, see `explain/causes.py`. ``op``: golden's class of the module, or the operator.

    ``evidence``: in words, with figures. ``difference``: the row that shows it. ``source``: where in the program the
    operator was called (``file:line function``), if that was recorded. ``repro``: a Python script that makes the
    call again from the two dumps. ``kernel``: of compiled code, the one that computes it in mine (or in golden, where mine is not fused).
    ``expected``: what says that it is, or None.
    """

    path: str
    op: str
    step: int
    cause: str
    evidence: str
    difference: Difference | None = None
    source: str | None = None
    repro: str | None = None
    kernel: Kernel | None = None
    expected: Expectation | None = None

    def script(self) -> str:
        """Return ``repro``. Raises StoreError where nothing can be called again (values were not kept, say)."""
        if self.repro is None:
            raise StoreError(
                f"there is nothing to run for {self.path or 'the root'}: its tensors were not recorded in both runs"
            )
        return self.repro

    def save_repro(self, path: str | os.PathLike[str]) -> Path:
        """Write ``repro`` to a file and return its path.

        Raises:
            StoreError: nothing can be called again (values were not kept, say), or the file can't be written.
        """
        script = self.script()
        try:
            Path(path).write_text(script, encoding="utf-8")
        except OSError as error:
            raise StoreError(f"can't write {os.fspath(path)}: {error.strerror or error}") from None
        return Path(path)

    def __repr__(self) -> str:
        return f"<{self.cause}: {self.path or '(root)'} ({self.op}), step {self.step}; {self.evidence}>"


def covering(expected: Iterable[Expectation], what: Difference | Finding) -> Expectation | None:
    """Return the first that covers a row, by its place in golden or in mine, or what a finding blames."""
    if isinstance(what, Finding):
        seen = what.difference.site if what.difference else Site(what.path, what.step)
        sites = [replace(seen, path=what.path, role="output", slot="0"), seen]
    else:
        sites = [record.site for record in (what.pair.golden, what.pair.mine) if record is not None]
        if len(sites) == 1:  # what only one run has is not what it is given, but that it is there
            sites.append(replace(sites[0], role="output"))
    return next((mark for mark in expected if any(map(mark.covers, sites))), None)
