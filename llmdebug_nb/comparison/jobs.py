"""The unit of measuring: two payloads, whatever pairs hold them, read and measured once.

A job says all that its outcome depends on, so that any thread or machine gives the same one.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Generator, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

import torch

from llmdebug_nb.align.fit import Fit
from llmdebug_nb.comparison import (
    choices,
    clipping,
    grids,
    metrics,
    quantisation_steps,
    sorted_tokens,
)
from llmdebug_nb.comparison.custom import Custom
from llmdebug_nb.comparison.input_rounding import Factor
from llmdebug_nb.comparison.measured import OfTokens
from llmdebug_nb.comparison.metrics import Metrics
from llmdebug_nb.comparison.padding import of_tokens
from llmdebug_nb.comparison.products import Product
from llmdebug_nb.comparison.rows import RowErrors
from llmdebug_nb.comparison.weight_noise import TURNED, shown, turned
from llmdebug_nb.core import constants
from llmdebug_nb.core.dtypes import DTYPES
from llmdebug_nb.core.errors import CorruptDumpError, TensorLookupError
from llmdebug_nb.core.kernels.masks import may_hide, without_masked
from llmdebug_nb.core.kernels.narrow import rounding
from llmdebug_nb.core.kernels.padding import Blanks
from llmdebug_nb.core.records import Record

Load = Callable[[Record], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Job:
    """Two payloads to measure.

    ``golden``, ``mine``: records that hold them. ``fit``: brings them to one shape, None if they
    have one. ``logits``: the figures of tokens are wanted, too. ``blanks``: the places of golden's
    batch that hold no token. ``scores``: golden's, of which these may be the best places.
    ``places``: golden's and mine's places of these values, if they are the best of some scores.
    ``factors``: inputs of the calls that gave them, which these rounded. ``product``: what they may
    be the product of.
    """

    golden: Record
    mine: Record
    fit: Fit | None
    logits: bool
    blanks: Blanks | None = None
    scores: tuple[Record, ...] = ()
    places: tuple[Record, Record] | None = None
    factors: tuple[Factor, ...] = ()
    product: Product | None = None
    may_be_steps: bool = False

    @property
    def nbytes(self) -> int:
        """The bytes of both."""
        return _bytes(self.golden) + _bytes(self.mine)

    @property
    def key(self) -> Hashable:
        """What the outcome depends on: jobs of one key have one outcome."""
        fit = self.fit and self.fit.key
        others = tuple(record.payload for record in (*self.scores, *(self.places or ())))
        rounded = tuple((each.record.payload, each.side, each.kind) for each in self.factors)
        return (
            self.golden.payload,
            self.mine.payload,
            self.logits,
            fit,
            self.blanks,
            others,
            rounded,
            self.product and self.product.key,
            self.may_be_steps,
        )


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a job gave.

    ``metrics``: None if it failed, then ``remark`` says why; else it says how it was measured.
    ``rounded``: the epsilons of the coarsest dtypes that hold golden's and mine's values, None if
    they could not be read. ``of_tokens``, ``in_any_order``, ``in_one_order``, ``gap``,
    ``input_rounding``, ``rows``: see `Measured`.
    """

    metrics: Metrics | None
    remark: str | None
    rounded: tuple[float, float] | None
    of_tokens: OfTokens | None = None
    in_any_order: Metrics | None = None
    in_one_order: Metrics | None = None
    gap: float | None = None
    input_rounding: float = 0.0
    rows: RowErrors | None = None


class Work(Protocol):
    """Does jobs somewhere, and yields the number of each with its outcome, as they come.

    ``here`` does one in the calling thread.
    """

    def __call__(
        self, jobs: Sequence[Job], here: Callable[[Job], Outcome]
    ) -> Generator[tuple[int, Outcome], None, None]: ...


def knowing(known: dict[Hashable, Outcome], work: Work) -> Work:
    """Return what does only jobs that are not known by their key, and takes note of the others.

    A job that fails may succeed another time, so it does not become known.
    """

    def done(
        jobs: Sequence[Job], here: Callable[[Job], Outcome]
    ) -> Generator[tuple[int, Outcome], None, None]:
        unknown = [number for number, job in enumerate(jobs) if job.key not in known]
        yield from ((n, known[job.key]) for n, job in enumerate(jobs) if job.key in known)
        with contextlib.closing(work([jobs[number] for number in unknown], here)) as found:
            for place, outcome in found:
                number = unknown[place]
                if outcome.metrics is not None:
                    known[jobs[number].key] = outcome
                yield number, outcome

    return done


def measured(job: Job, load_golden: Load, load_mine: Load, custom: Custom | None = None) -> Outcome:
    """Read and measure two payloads. What can't be read or measured is a reason, not an error."""
    rounded = None
    try:
        g, m = load_golden(job.golden), load_mine(job.mine)
        rounded = rounding(g), rounding(m)
        fitted = (g, m) if job.fit is None else job.fit(g, m)
        gap = _gap(g, fitted[1], map(load_golden, job.scores), job.blanks)
        moved = _input_rounding(job.factors, (load_golden, load_mine))
        found = _compared(job, g, m, custom or Custom())
        found = replace(found, rounded=rounded, gap=gap, input_rounding=moved)
        if (
            job.product is not None
            and found.metrics is not None
            and fitted[0].shape == fitted[1].shape
        ):
            of_product = job.product.figures(*fitted, (load_golden, load_mine))
            found = replace(found, metrics=found.metrics | of_product)
        if job.places is None:
            return found
        places = load_golden(job.places[0]), load_mine(job.places[1])
        return replace(found, in_one_order=_in_one_order((g, m, *places), job.blanks))
    except (CorruptDumpError, TensorLookupError, ValueError) as error:
        return Outcome(None, str(error), rounded)


def _compared(job: Job, g: torch.Tensor, m: torch.Tensor, custom: Custom) -> Outcome:
    """Return the metrics of two tensors, a remark on them, and what they are otherwise."""
    of_grain: metrics.Metrics = {}
    remark, stored = None, (g, m)
    if job.fit is not None:
        fit = job.fit
        steps = None if fit.grain is None else fit.grain(g, m)
        g, m = fit(g, m)
        if steps is not None and fit.integers is not None:
            integers = stored[fit.integers].reshape(g.shape)
            of_grain, remark = clipping.compare(g, m, steps, integers, fit.integers)
        elif steps is not None:
            of_grain, remark = quantisation_steps.compare(g, m, steps)
    floating = g.is_floating_point() and m.is_floating_point() and g.shape == m.shape
    if job.may_be_steps and floating and not of_grain:
        of_grain, remark = clipping.on_a_grid(g, m)
    is_weight = job.golden.site.role == "weight"
    if is_weight and floating and not of_grain and (steps := grids.grain(g, m)) is not None:
        of_grain, remark = quantisation_steps.compare(g, m, steps)
    if floating and may_hide(job.golden.summary) and may_hide(job.mine.summary):
        g, m = without_masked(g, m)
    of_user = custom.measure(g, m, job.golden.site)
    if floating and job.golden.site.role == "grad":
        of_user = {TURNED: shown(*turned(g, m)), **of_user}
    if floating and is_weight and not of_grain:
        of_user = metrics.of_weight(g, m) | of_user
    found, of_rows = metrics.by_rows(g, m, job.logits)
    found |= of_grain | of_user
    at_tokens = None
    numbers = floating or not any(x.is_floating_point() or x.is_complex() for x in (g, m))
    if job.blanks is not None and numbers and g.shape == m.shape:
        at_tokens = of_tokens(g, m, job.blanks, job.logits)
    in_place = found if at_tokens is None or at_tokens.first is None else at_tokens.first
    in_any_order = None
    if floating and (count := _count_tokens(job, g)):
        in_any_order = sorted_tokens.in_any_order(*stored, count, in_place)
    return Outcome(found, remark, None, at_tokens, in_any_order, rows=of_rows)


def _in_one_order(chosen: Sequence[torch.Tensor], blanks: Blanks | None) -> Metrics | None:
    """Return what values of the same places differ by, in one order; None if all are in one.

    ``chosen``: golden's and mine's values, then their places.
    """
    if blanks is not None:
        chosen = [choices.without(x, blanks) for x in chosen]
    golden, mine, *places = chosen
    if len({x.shape for x in chosen}) > 1 or torch.equal(places[0], places[1]):
        return None
    return metrics.compare(*choices.in_one_order(golden, mine, places))


def _gap(
    g: torch.Tensor, m: torch.Tensor, scores: Iterable[torch.Tensor], blanks: Blanks | None
) -> float | None:
    """Return by how much two choices differ in score, None if golden chose by none of these."""
    if g.shape != m.shape:
        return None
    gaps = []
    for each in scores:
        own = (g, m, each) if blanks is None else [choices.without(x, blanks) for x in (g, m, each)]
        if own[0].numel() and (found := choices.gap(*own)) is not None:
            gaps.append(found)
    return min(gaps, default=None)


def _input_rounding(factors: Iterable[Factor], load: tuple[Load, Load]) -> float:
    """Return the relative error of inputs that are rounded before they are multiplied."""
    return math.hypot(
        *(
            each.error(load[each.side](each.record)) if each.record.payload else each.largest_error
            for each in factors
        )
    )


def _count_tokens(job: Job, golden: torch.Tensor) -> int:
    """Return how many rows hold tokens that both runs have; 0 if no other order may differ.

    ``golden``: what is compared of golden's.
    """
    shape = job.golden.summary.shape
    if job.fit is not None:
        return golden.numel() // shape[1] if job.fit.shared and len(shape) == 2 else 0
    reading = None if job.blanks is None else next(job.blanks.readings(shape), None)
    return int((~reading.places).sum()) if reading is not None and reading.batch is None else 0


def _bytes(record: Record) -> int:
    dtype = DTYPES.get(record.summary.dtype)
    size = torch.complex128.itemsize if dtype is None else dtype.itemsize  # the widest, if unknown
    return size * abs(math.prod(record.payload_shape))


class _Sized(Protocol):
    @property
    def nbytes(self) -> int: ...


_S = TypeVar("_S", bound=_Sized)


def batches(jobs: Iterable[_S]) -> Iterator[list[tuple[int, _S]]]:
    """Divide jobs, with their numbers, into batches that are worth the way to another worker."""
    batch: list[tuple[int, _S]] = []
    size = 0
    for number, job in enumerate(jobs):
        batch.append((number, job))
        size += job.nbytes
        if size >= constants.BATCH_BYTES or len(batch) >= constants.BATCH_JOBS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
