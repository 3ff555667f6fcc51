"""The result of checking recorded operators one by one: the nouns that all stages exchange."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field

import msgspec

from llmdebug_nb.core.records import CallKey

# why an operator is not checked
STATISTICS = "statistics only"
GAP = "a gap in the recording"
RANDOM = "random numbers"
UNSET = "memory that nothing has written"
UNKNOWN = "unknown operator"
DTYPE = "unsupported dtype"
FAILS = "the replay fails"
REASONS = (STATISTICS, GAP, RANDOM, UNSET, UNKNOWN, DTYPE, FAILS)

RIGHT, WRONG, NOT_CHECKED = "right", "wrong", "not checked"  # verdicts
# what running a wrong operator again says
RECORD_IS_WRONG = "the recorded output is wrong: here the operator gives the right one"
OPERATOR_IS_WRONG = "the operator is wrong here too"
# upstream's metrics, as its option names them
METRICS = ("rel", "abs", "cos_sim", "kl")
# upstream's precision modes, and the dtype to which recorded floating tensors are rounded first
MODES = {"keep_origin_dtype": "", "force_fp16": "float16", "force_fp32": "float32"}

# dtypes of the reference; the last is that of the recorded tensors
REFERENCES = ("float64", "float32", "own")


@dataclass(frozen=True)
class OutputCheck:
    """One output of a call against its reference in float64.

    ``standard``: upstream's for this dtype, in words. ``rate``: percentage of elements within its
    limit; ``meets``: whether they are enough; None for a dtype without a standard.
    ``error``: the largest of our figures, in units of what rounding explains: up to 1 is right.
    ``own``: name, number and message of each of the user's comparisons.
    ``l2``: relative L2 error. ``figure``: which figure ``error`` is, in words. ``why``: what is
    wrong, "" if nothing is. Errors are NaN where they have no value.
    """

    slot: str
    dtype: str
    shape: tuple[int, ...]
    standard: str = ""
    rate: float | None = None
    meets: bool | None = None
    max_rel: float | None = None
    abs_rate: float | None = None
    max_abs: float | None = None
    cosine: float | None = None
    kl: float | None = None
    l2: float = 0.0
    error: float = 0.0
    figure: str = ""
    why: str = ""
    own: tuple[tuple[str, float, str], ...] = ()


@dataclass(frozen=True)
class CallCheck:
    """A recorded call that was checked, or why it was not.

    ``record``: id of its first output. ``id``: execution id. ``parameters``: arguments that are no
    tensors. ``reason``: one of `REASONS`, "" if it was checked; ``detail``: in words.
    ``again``: what running it again says, if it is wrong and that was asked for.
    """

    record: int
    key: CallKey
    op: str
    id: str = ""
    parameters: str = ""
    tensors: str = ""
    outputs: tuple[OutputCheck, ...] = ()
    reason: str = ""
    detail: str = ""
    again: str = ""

    @property
    def verdict(self) -> str:
        if self.reason:
            return NOT_CHECKED
        return WRONG if any(each.why for each in self.outputs) else RIGHT

    @property
    def worst(self) -> OutputCheck | None:
        """The output with the largest error, None if it was not checked."""
        return max(
            self.outputs, key=lambda each: (bool(each.why), _order(each.error)), default=None
        )

    @property
    def meets_standard(self) -> bool:
        """Whether all outputs are within upstream's standard, as far as there is one."""
        return all(each.meets is not False for each in self.outputs)

    def line(self) -> str:
        """Return it as one line of JSON, in which infinities and NaN are kept."""
        return json.dumps(asdict(self) | {"key": list(self.key)}, separators=(",", ":"))

    @classmethod
    def read(cls, line: str | bytes) -> CallCheck:
        """Read what `line` returns. Raises ValueError."""
        try:
            found = json.loads(line)
            json.dumps(found, ensure_ascii=False).encode()  # half a surrogate pair fits no file
        except RecursionError:
            raise ValueError("it nests too deep") from None
        check = msgspec.convert(found, cls)
        if check.reason and check.reason not in REASONS:
            raise ValueError(f"reason {check.reason[:80]!r} is not known")
        return check


@dataclass(frozen=True)
class TypeCount:
    """The calls of one type of operator. ``error``: the largest, in units of rounding."""

    op: str
    calls: int
    checked: int
    wrong: int
    below_standard: int
    error: float
    worst: CallCheck | None


@dataclass(frozen=True)
class OpCheckResult:
    """All calls that were looked at, in execution order.

    ``total``: how many there are; fewer were done if it was interrupted. ``absent``: rows of the
    csv of cases that name no call. ``notes``: what else to know of how it was done.
    """

    name: str
    total: int
    calls: tuple[CallCheck, ...]
    options: dict[str, object] = field(default_factory=dict)
    absent: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def complete(self) -> bool:
        return len(self.calls) == self.total

    @property
    def wrong(self) -> list[CallCheck]:
        """The wrong calls, in execution order."""
        return [each for each in self.calls if each.verdict == WRONG]

    @property
    def checked(self) -> int:
        return sum(not each.reason for each in self.calls)

    @property
    def below_standard(self) -> int:
        """Calls that miss upstream's standard though rounding explains their error."""
        return sum(each.verdict == RIGHT and not each.meets_standard for each in self.calls)

    @property
    def not_checked(self) -> dict[str, int]:
        """How many calls were not checked, by reason, the most frequent first."""
        return dict(Counter(each.reason for each in self.calls if each.reason).most_common())

    @property
    def verdict(self) -> str:
        if self.wrong:
            return WRONG
        return RIGHT if self.checked else NOT_CHECKED

    def types(self) -> list[TypeCount]:
        """Return the counts by type of operator, the worst first."""
        groups: dict[str, list[CallCheck]] = {}
        for each in self.calls:
            groups.setdefault(each.op, []).append(each)
        counts = [_count(op, calls) for op, calls in groups.items()]
        return sorted(counts, key=lambda each: (-each.wrong, -each.error, each.op))


def _count(op: str, calls: Iterable[CallCheck]) -> TypeCount:
    calls = list(calls)
    checked = [each for each in calls if not each.reason]
    worst = max(checked, key=lambda each: (each.verdict == WRONG, error_of(each)), default=None)
    return TypeCount(
        op, len(calls), len(checked), sum(each.verdict == WRONG for each in checked),
        sum(not each.meets_standard for each in checked),
        max(map(error_of, checked), default=0.0), worst,
    )  # fmt: skip


def error_of(call: CallCheck) -> float:
    """Return the largest error of a call, in units of rounding; NaN counts as infinite."""
    return max((_order(each.error) for each in call.outputs), default=0.0)


def _order(error: float) -> float:
    return math.inf if math.isnan(error) else error
