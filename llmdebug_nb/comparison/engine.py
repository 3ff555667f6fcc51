"""Measure pairs, which become differences when they are judged.

Each distinct pair of payloads is read and measured once: pairs are planned first, then the work is
done in threads (`threads.py`) or elsewhere, then each pair gets what was measured, in their order.
All pairs are judged at the end. If both sides kept the same part of a tensor, the parts are
measured. The statistics of the whole tensors are compared as well, because they reveal errors
outside the part.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import closing
from typing import TYPE_CHECKING

from llmdebug_nb.align.pairs import Pair
from llmdebug_nb.comparison import jobs, metrics
from llmdebug_nb.comparison.calibration import Calibration
from llmdebug_nb.comparison.choices import Scores
from llmdebug_nb.comparison.custom import Custom
from llmdebug_nb.comparison.input_rounding import Factors, Kinds
from llmdebug_nb.comparison.jobs import Job, Load, Outcome, Work, knowing
from llmdebug_nb.comparison.judging import Golden, Judging
from llmdebug_nb.comparison.limits import Limits
from llmdebug_nb.comparison.measured import Measured, error_of
from llmdebug_nb.comparison.modules import Modules
from llmdebug_nb.comparison.products import Products, settle
from llmdebug_nb.comparison.rules import Rule
from llmdebug_nb.comparison.threads import in_threads, one_by_one
from llmdebug_nb.comparison.tolerance import UNMATCHED
from llmdebug_nb.comparison.uninitialised_memory import Unwritten
from llmdebug_nb.comparison.untouched import Steps
from llmdebug_nb.comparison.weight_noise import Weights
from llmdebug_nb.core.bars import Stages
from llmdebug_nb.core.errors import CorruptDumpError, TensorLookupError
from llmdebug_nb.core.kernels.fingerprint import same
from llmdebug_nb.core.kernels.masks import have_other_forms, hide_as_much
from llmdebug_nb.core.kernels.padding import Blanks, Padding
from llmdebug_nb.core.records import Node, Record, Site, Summary

if TYPE_CHECKING:
    import torch

STATS_ONLY = "judged by statistics: "
_Rounded = tuple[dict[Hashable, float], dict[Hashable, float]]  # of each side's payloads
__all__ = ["STATS_ONLY", "UNMATCHED", "Measurer", "judging", "measure"]


def judging(
    pairs: Iterable[Pair],
    load_golden: Load,
    load_mine: Load,
    *,
    nodes: Sequence[Node] = (),
    limits: Limits | None = None,
    calibration: Calibration | None = None,
    custom: Custom | None = None,
    rounding: tuple[float, float] = (0.0, 0.0),
    products: tuple[Kinds, Kinds] = ({}, {}),
    weights: Weights | None = None,
    steps: Steps | None = None,
    work: Work = in_threads,
    stages: Stages | None = None,
) -> Judging:
    """Measure all pairs and return the `Judging` of them.

    ``pairs`` must be in golden's execution order. A payload that can't be read becomes a row with a
    reason; it never ends the comparison. ``nodes``: golden's modules. ``rounding``: the epsilons
    that golden's and mine's programs state of their values. ``products``: the types of the weights
    that they multiply with, see `Run.products`. ``weights``: golden's, as far
    as they are known. ``steps``: golden's, see `Untouched`. ``work``: what does the jobs; the
    user's own metrics are computed here, one after the other, as they may not be called at once.
    ``stages``: shows the progress.
    """
    modules, own = Modules(nodes), custom or Custom()

    def here(job: Job) -> Outcome:
        return jobs.measured(job, load_golden, load_mine, own)

    pairs = list(pairs)
    factors = Factors(pairs, products)
    plan = _Plan(pairs, modules, bool(own.names), Padding(load_golden), factors=factors)
    measured = plan.measured(one_by_one if own.names else work, here, stages)
    return Judging(
        measured, golden=Golden(modules.size, weights, steps or Steps()), limits=limits,
        calibration=calibration, rounding=rounding,
        values=_Values(plan, here, load_golden, load_mine),
    )  # fmt: skip


def measure(
    pairs: Iterable[Pair],
    load_golden: Load,
    load_mine: Load,
    nodes: Sequence[Node] = (),
    work: Work = in_threads,
) -> list[Measured]:
    """Return the measurement of each pair, in order. ``nodes``: golden's modules."""

    def here(job: Job) -> Outcome:
        return jobs.measured(job, load_golden, load_mine)

    return _Plan(pairs, Modules(nodes), False, Padding(load_golden)).measured(work, here)


class Measurer:
    """Measures pairs as they come, in this thread. ``known``: outcomes of jobs, by their keys."""

    def __init__(
        self, load_golden: Load, load_mine: Load, custom: Custom, known: dict[Hashable, Outcome]
    ) -> None:
        self._load_golden, self._load_mine, self._custom = load_golden, load_mine, custom
        self._work = knowing(known, one_by_one)
        self._padding, self._unwritten = Padding(load_golden), (Unwritten(), Unwritten())

    def measured(self, pairs: Iterable[Pair], modules: Modules) -> list[Measured]:
        """Return the measurement of each pair, in order. ``modules``: golden's."""

        def here(job: Job) -> Outcome:
            return jobs.measured(job, self._load_golden, self._load_mine, self._custom)

        known = self._padding, self._unwritten
        plan = _Plan(pairs, modules, bool(self._custom.names), *known)
        return plan.measured(self._work, here)


def error(golden: torch.Tensor, mine: torch.Tensor) -> float:
    """Return the figure that is judged, for two tensors of one shape. Raises ValueError."""
    return error_of(metrics.compare(golden, mine))


class _Plan:
    """What has to be measured for some pairs, each pair of payloads once."""

    def __init__(
        self,
        pairs: Iterable[Pair],
        modules: Modules,
        custom: bool,
        padding: Padding,
        unwritten: tuple[Unwritten, Unwritten] | None = None,
        factors: Factors | None = None,
    ) -> None:
        """``custom``: the user's own metrics are wanted, so equal tensors are read, too.

        ``padding``, ``unwritten``: what is known of golden's batches, and of golden's and mine's
        memory, from earlier pairs. ``factors``: what their products round.
        """
        self._factors = factors or Factors((), ({}, {}))
        self._modules, self._custom, self.padding = modules, custom, padding
        self._unwritten = unwritten or (Unwritten(), Unwritten())
        self._jobs: list[Job] = []
        self._numbers: dict[Hashable, int] = {}  # of jobs, by what they measure
        # index of each pair with a payload -> number of its job, None if it needs none
        self._open: dict[int, int | None] = {}
        pairs = list(pairs)
        self._scores, self._products = Scores(pairs), Products(pairs)
        for golden in [pair.golden for pair in pairs if pair.golden is not None]:
            padding.add(golden)
        self._rows = [self._planned(index, pair) for index, pair in enumerate(pairs)]

    def measured(
        self, work: Work, here: Callable[[Job], Outcome], stages: Stages | None = None
    ) -> list[Measured]:
        """Have the jobs done, and return the measurement of each pair, in order."""
        outcomes: dict[int, Outcome] = {}
        if stages is not None:
            stages.stage("comparing", len(self._jobs), "pair")
        with closing(work(self._jobs, here)) as found:
            for number, outcome in found:
                outcomes[number] = outcome
                if stages is not None:
                    stages.advance()
        rounded: _Rounded = ({}, {})
        for index, job in self._open.items():
            done = None if job is None else outcomes[job]
            self._rows[index] = _finished(self._rows[index], done, rounded)
        settle(self._rows)
        return self._rows

    def _planned(self, index: int, pair: Pair) -> Measured:
        """Return what is known of a pair without reading its values."""
        golden, mine = pair.golden, pair.mine
        if golden is None or mine is None:
            side = "mine" if golden is None else "golden"
            return Measured(index, pair, remark=f"only in {side}: {pair.why}", rule=Rule.ALONE)
        its, own = self._unwritten
        if any([its.holds(golden), own.holds(mine)]):  # both are to note it
            return _unmeasured(index, pair, Rule.UNINITIALISED)
        a, b = golden.summary, mine.summary
        if a.shape != b.shape and have_other_forms(a, b):
            return _unmeasured(index, pair, Rule.OTHER_MASK)
        if a.shape != b.shape and pair.fit is None and pair.other_batch:
            return _unmeasured(index, pair, Rule.OTHER_BATCH)
        if a.shape != b.shape and pair.fit is None:
            shapes = f"shape {list(a.shape)} against {list(b.shape)}"
            return Measured(index, pair, remark=shapes, rule=Rule.OTHER_SHAPE, certain=True)
        comparable = a.dtype == b.dtype and pair.fit is None
        same_bytes = same(a.fingerprint, b.fingerprint) if comparable else None
        values, remark = None, self._needs(pair, golden, mine, same_bytes)
        rule = Rule.NOISE
        if remark is None:
            values = metrics.identical(a, self._modules.are_logits(golden))
        elif remark and hide_as_much(a, b) and (pair.fit is None or pair.fit.whole):
            remark, rule = None, Rule.MASK_ALONE
        elif remark:
            values, remark = _by_statistics(pair, a, b, remark)
        else:
            self._open[index] = self._number(self.job(pair, self.padding.of(golden.site)))
        if golden.payload is not None or mine.payload is not None:
            self._open.setdefault(index, None)
        certain = values is None and same_bytes is False and rule is not Rule.MASK_ALONE
        row = Measured(index, pair, values, remark, same_bytes, certain, rule=rule)
        factors = () if remark is None else self._factors.of(pair)
        row.input_rounding = math.hypot(*(each.largest_error for each in factors))
        return row

    def _needs(
        self, pair: Pair, golden: Record, mine: Record, same_bytes: bool | None
    ) -> str | None:
        """Return None if two tensors are known to be equal, "" if their values have to be read.

        Else why these are not there, so that statistics have to do.
        """
        if same_bytes and not self._custom:
            return None
        if golden.payload is None or mine.payload is None:
            if same_bytes:
                return None
            sides = (("golden", golden), ("mine", mine))
            lacking = [name for name, record in sides if record.payload is None]
            return f"no values on {' and '.join(lacking)}"
        if (golden.kept, golden.kept_shape) != (mine.kept, mine.kept_shape):
            return f"golden keeps {_part(golden)}, mine {_part(mine)}"
        if pair.fit is not None and golden.kept is not None:
            return f"both keep {golden.kept}"
        return ""

    def job(self, pair: Pair, blanks: Blanks | None) -> Job:
        """Return the job that measures two tensors. ``blanks``: places that may count apart."""
        golden, mine = pair.golden, pair.mine
        assert golden is not None
        assert mine is not None
        logits = golden.kept is None and self._modules.are_logits(golden)
        scores, places = self._scores.of(golden), self._scores.places(pair)
        factors, product = self._factors.of(pair), self._products.of(pair)
        steps = self._products.any and golden.site.role in ("input", "output")
        return Job(golden, mine, pair.fit, logits, blanks, scores, places, factors, product, steps)

    def _number(self, job: Job) -> int:
        """Return the number of a job; equal pairs share it."""
        if job.key not in self._numbers:
            self._numbers[job.key] = len(self._jobs)
            self._jobs.append(job)
        return self._numbers[job.key]


class _Values:
    """Reads the values of pairs once more, each for the same places once."""

    def __init__(
        self, plan: _Plan, here: Callable[[Job], Outcome], load_golden: Load, load_mine: Load
    ) -> None:
        self._plan, self._here = plan, here
        self._load_golden, self._load_mine = load_golden, load_mine
        self._known: dict[Hashable, Outcome] = {}

    def padding(self, site: Site) -> Blanks | None:
        return self._plan.padding.of(site)

    def measured(self, pair: Pair, blanks: Blanks) -> Outcome:
        job = self._plan.job(pair, blanks)
        if job.key not in self._known:
            self._known[job.key] = self._here(job)
        return self._known[job.key]

    def differ(self, pair: Pair) -> torch.Tensor | None:
        assert pair.golden is not None
        assert pair.mine is not None
        try:
            golden, mine = self._load_golden(pair.golden), self._load_mine(pair.mine)
            golden, mine = (golden, mine) if pair.fit is None else pair.fit(golden, mine)
        except (CorruptDumpError, TensorLookupError, ValueError):
            return None
        return None if golden.shape != mine.shape else golden != mine


def _unmeasured(index: int, pair: Pair, rule: Rule) -> Measured:
    return Measured(index, pair, rule=rule)


def _finished(row: Measured, outcome: Outcome | None, rounded: _Rounded) -> Measured:
    """Return a pair with what was measured of it. ``rounded``: what the pairs before it told."""
    golden, mine = row.pair.golden, row.pair.mine
    assert golden is not None
    assert mine is not None
    its, own = rounded
    if outcome is not None:
        values, remark = _of_part(golden, mine, outcome)
        certain = values is None and row.same_bytes is False
        row = Measured(row.index, row.pair, values, remark, row.same_bytes, certain)
        if outcome.rounded is not None:
            its.setdefault(golden.payload, outcome.rounded[0])
            own.setdefault(mine.payload, outcome.rounded[1])
        row.of_tokens, row.in_any_order = outcome.of_tokens, outcome.in_any_order
        row.gap, row.in_one_order = outcome.gap, outcome.in_one_order
        row.input_rounding, row.rows = outcome.input_rounding, outcome.rows
    row.rounded = its.get(golden.payload, 0.0), own.get(mine.payload, 0.0)
    return row


def _of_part(
    golden: Record, mine: Record, outcome: Outcome
) -> tuple[metrics.Metrics | None, str | None]:
    """Return metrics and a remark; of a part of a tensor, statistics of all of it, too."""
    values = outcome.metrics
    if values is None or golden.kept is None:
        return values, outcome.remark
    values = values | metrics.statistics(golden.summary, mine.summary)
    if not golden.kept.startswith("slice"):  # figures of the tensor, in float64
        values |= {"max_ulp": None, "mean_ulp": None}
    return values, f"judged by {golden.kept} and statistics"


def _by_statistics(
    pair: Pair, a: Summary, b: Summary, why: str
) -> tuple[metrics.Metrics | None, str | None]:
    """Return the metrics of statistics alone. ``why``: the reason for that."""
    if pair.fit is not None and not pair.fit.whole:
        return None, f"{why}, and statistics cover the whole tensor ({pair.fit.says})"
    values = metrics.statistics(a, b, by_rows=pair.fit is None)
    if a.numel and all(value is None for value in values.values()):
        return None, f"{why}, and no statistics to judge by"
    return values, STATS_ONLY + why


def _part(record: Record) -> str:
    return record.kept or "all of it"
