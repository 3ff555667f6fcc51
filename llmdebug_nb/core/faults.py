"""The nouns of an error check. Their JSON is the result file, with the names that msprobe uses."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import msgspec

from llmdebug_nb.core.records import Summary

KINDS = ("overflow", "nan", "underflow", "cast")
MODES = ("aten", "module")  # what is checked: operators, or modules
CRITICAL, HIGH, MEDIUM = "CRITICAL", "HIGH", "MEDIUM"
Figure = float | str | None  # JSON has no NaN and no infinity: they are texts


class TensorFacts(msgspec.Struct, frozen=True, rename={
    "max": "Max", "min": "Min", "mean": "Mean", "norm": "Norm",
}):  # fmt: skip
    """A tensor of a call. ``dtype``: torch's name. ``nan``, ``inf``, ``zero``: element counts."""

    slot: str
    dtype: str
    shape: tuple[int, ...]
    max: Figure = None
    min: Figure = None
    mean: Figure = None
    norm: Figure = None
    nan: int | None = None
    inf: int | None = None
    zero: int | None = None
    type: str = "torch.Tensor"

    @classmethod
    def of(cls, slot: str, summary: Summary) -> TensorFacts:
        return cls(
            slot, f"torch.{summary.dtype}", summary.shape, _figure(summary.max),
            _figure(summary.min), _figure(summary.mean), _figure(summary.l2norm),
            summary.nan, summary.inf, summary.zero,
        )  # fmt: skip


class DataInfo(msgspec.Struct, frozen=True):
    """The tensors of a call, inputs as they were when it ended."""

    input_args: tuple[TensorFacts, ...] = ()
    output: tuple[TensorFacts, ...] = ()


class FaultyCall(msgspec.Struct, frozen=True):
    """A call with bad values.

    ``level``: CRITICAL made them of clean inputs; HIGH passed them on, or lost all values by
    underflow; MEDIUM made clean values of them. ``op_name``: ``Aten.mm.3.forward``.
    ``construct_info``: paths of the modules around it, innermost first. ``stack_info``: lines of
    the program, innermost first.
    """

    op_name: str
    level: str
    path: str
    phase: str
    generation: int
    step: int
    data_info: DataInfo
    construct_info: tuple[str, ...] = ()
    stack_info: tuple[str, ...] = ()


class Fault(msgspec.Struct, frozen=True):
    """The first call with bad values, and what became of them.

    ``kind``: one of `KINDS`. ``evidence``: what the call was given and what it made.
    ``reached``: the result that holds bad values because of it. ``followed``: the next calls, in
    order. ``passed_on``: count of all calls that passed them on. ``times``: how often it happened
    at this place.
    """

    kind: str
    call: FaultyCall
    evidence: str
    reached: str
    followed: tuple[FaultyCall, ...] = ()
    passed_on: int = 0
    times: int = 1


class Near(msgspec.Struct, frozen=True):
    """A call whose result comes near the largest number of its dtype, while its inputs do not."""

    op_name: str
    path: str
    reach: float


class Headroom(msgspec.Struct, frozen=True):
    """How far values of one dtype reach. ``limit``: its largest number. ``near_calls``: count."""

    dtype: str
    limit: float
    reach: float
    op_name: str
    path: str
    near: tuple[Near, ...] = ()
    near_calls: int = 0

    @property
    def factor(self) -> float:
        """How often the largest value fits below the limit."""
        return self.limit / self.reach if self.reach else math.inf


class ProcessCheck(msgspec.Struct, frozen=True):
    """What was checked in one process.

    ``checked``: count of calls. ``root_calls``: of models. ``meant``: operator -> count of calls
    that made infinities because they were given one. ``masked``: operator -> count of calls whose
    bad values reached no result. ``problems``: of the check itself. ``dumped``: folder of the run
    that holds the tensors of the first faulty call.
    """

    rank: int
    pid: int
    checked: int
    root_calls: int
    faults: tuple[Fault, ...] = ()
    headroom: tuple[Headroom, ...] = ()
    meant: Mapping[str, int] = {}
    masked: Mapping[str, int] = {}
    problems: Mapping[str, int] = {}
    ended_by: str | None = None
    dumped: str | None = None


class CheckResult(msgspec.Struct, frozen=True):
    """The result of a check. ``mode``: module or aten. ``notes``: what the reader should know."""

    mode: str
    types: tuple[str, ...]
    processes: tuple[ProcessCheck, ...]
    notes: tuple[str, ...] = ()

    @property
    def faults(self) -> list[tuple[int, Fault]]:
        """All faults with their ranks; those of a rank in the order in which they began."""
        return [(each.rank, fault) for each in self.processes for fault in each.faults]

    @property
    def verdict(self) -> str:
        """``error``, ``clean`` or ``nothing checked``."""
        if self.faults:
            return "error"
        return "clean" if any(each.checked for each in self.processes) else "nothing checked"

    def as_json(self) -> bytes:
        """Return the result file: for each rank, the calls in msprobe's form, and then the rest."""
        ranks: dict[str, list[object]] = {f"rank_{each.rank}": [] for each in self.processes}
        for rank, fault in self.faults:
            ranks[f"rank_{rank}"] += [fault.call, *fault.followed]
        whole = {"verdict": self.verdict, **ranks, **msgspec.structs.asdict(self)}
        return msgspec.json.format(msgspec.json.encode(whole), indent=2)


def bad_text(facts: Iterable[TensorFacts]) -> str:
    """Return how many elements are bad: ``3 infinite of 64 elements of output 0, in float16``."""
    for each in facts:
        if each.nan or each.inf:
            counts = [(each.inf, "infinite"), (each.nan, "NaN")]
            bad = " and ".join(f"{count:,} {name}" for count, name in counts if count)
            dtype = each.dtype.removeprefix("torch.")
            return f"{bad} of {math.prod(each.shape):,} elements of output {each.slot}, in {dtype}"
    return ""


def _figure(value: float | None) -> Figure:
    return value if value is None or math.isfinite(value) else str(value)
