"""How much of golden was found in mine, and whether the two runs answer to each other at all."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import replace

import torch

from llmdebug_nb.align.batch_layout import mask_of, may_be_tokens, token_ids
from llmdebug_nb.align.pairs import Pair
from llmdebug_nb.align.program_results import Results
from llmdebug_nb.align.reasons import EXCUSED, Reason
from llmdebug_nb.comparison.differences import Coverage, Difference, Reach
from llmdebug_nb.comparison.rules import Rule
from llmdebug_nb.core import constants
from llmdebug_nb.core.dtypes import epsilon
from llmdebug_nb.core.paths import is_operator
from llmdebug_nb.core.records import Record, Site

_AGREES = ("match", "within_noise")

Fingerprint = tuple[str, str]  # of a weight: ``float32 [64, 64]`` and ``algorithm:hex``


def coverage(
    differences: Sequence[Difference], reach: tuple[Reach, Reach] = (Reach(), Reach())
) -> Coverage:
    """Return how much of golden was found in mine.

    Only tensors that mine could have recorded count: those of steps, phases and levels that it
    recorded, and that hold values. ``reach``: what is known of golden and mine; tokens that are
    not are counted here.
    """
    observable = Results(d.pair.golden for d in differences)
    agrees: dict[Hashable, bool] = {}
    rejoins: set[Hashable] = set()
    results = matched = 0
    for d, golden in _comparable(differences):
        value, same = _content(golden), d.verdict in _AGREES
        agrees[value] = agrees.get(value, False) or same
        if d.rule is Rule.REJOINED:
            rejoins.add(value)
        if golden in observable:
            results += 1
            matched += same
    found = {value for value, same in agrees.items() if same}
    of_golden, of_mine = (
        known if known.tokens[1] else replace(known, tokens=_tokens(differences, side))
        for known, side in zip(reach, ("golden", "mine"), strict=True)
    )
    return Coverage(
        results, matched, len(agrees), len(found), len(rejoins - found), of_golden, of_mine
    )


def _tokens(differences: Sequence[Difference], side: str) -> tuple[int, int]:
    """Return how many places of a run's token ids have a partner, and how many there are."""
    steps: dict[tuple[int, int, int], dict[int, Record]] = defaultdict(dict)  # by rank, generation
    partners: dict[int, int] = {}  # by the record's id
    for d in differences:
        record: Record | None = getattr(d.pair, side)
        if record is None or not may_be_tokens(record) or is_operator(record.site.path):
            continue
        steps[record.site.key[:3]][record.id] = record
        if d.verdict != "unmatched" or d.rule in (Rule.NEAR_TIE, Rule.AFTER_TIE):
            partners[record.id] = max(partners.get(record.id, 0), _shared_elements(d.pair))
    compared = given = 0
    for inputs in ([own[number] for number in sorted(own)] for own in steps.values()):
        first = token_ids(inputs)
        if first is None:
            continue
        for record in inputs:  # a prompt in chunks is given in several calls
            if (record.site.path, record.site.slot) == (first.site.path, first.site.slot):
                count = _without_padding(record, inputs)
                given += count
                compared += min(count, partners.get(record.id, 0))
    return compared, given


def _shared_elements(pair: Pair) -> int:
    """Return how many elements of two tensors are compared."""
    if pair.golden is None or pair.mine is None:
        return 0
    golden, mine = (
        torch.empty(record.summary.shape, device="meta") for record in (pair.golden, pair.mine)
    )
    try:
        golden, mine = (golden, mine) if pair.fit is None else pair.fit(golden, mine)
    except ValueError:
        return 0
    return golden.numel() if golden.numel() == mine.numel() else 0


def _without_padding(ids: Record, inputs: Sequence[Record]) -> int:
    """Return how many places of token ids hold a token, as far as a mask among the inputs tells."""
    summary = ids.summary
    mask = mask_of((r for r in inputs if r.summary.shape == summary.shape), summary.shape)
    mean = None if mask is None or mask.summary.max != 1 else mask.summary.mean
    return summary.numel if mean is None else round(mean * summary.numel)


def why_incomparable(
    differences: Sequence[Difference], golden: Iterable[Fingerprint], mine: Iterable[Fingerprint]
) -> str:
    """Return why too little of the runs answers to each other, or "" if enough does.

    ``golden``, ``mine``: the fingerprints of the models' weights, as far as they were recorded.
    """
    return (
        _few_pairs(differences)
        or _unrelated(differences, golden, mine)
        or _unanswered_step(differences)
    )


def _few_pairs(differences: Sequence[Difference]) -> str:
    """Say so if most tensors have no partner, and no result of golden has one.

    Of two recordings the smaller one counts, as the other may only have recorded more. Where both
    recorded modules, operators don't count: other code calls others.
    """
    kept = [d for d in differences if d.pair.reason not in EXCUSED]
    of_modules = [d for d in kept if not is_operator(d.site.path)]
    if any(d.pair.golden and d.pair.mine for d in of_modules):
        kept = of_modules
    golden = {d.pair.golden.id: False for d in kept if d.pair.golden}
    mine = {d.pair.mine.id: False for d in kept if d.pair.mine}
    for d in kept:
        if d.pair.golden and d.pair.mine and d.pair.reason is not Reason.RESULT:
            golden[d.pair.golden.id] = mine[d.pair.mine.id] = True
    name, smaller = min((("golden", golden), ("mine", mine)), key=lambda side: len(side[1]))
    paired = sum(smaller.values())
    if paired >= constants.MATCHED_SHARE * len(smaller):
        return ""
    observable = Results(d.pair.golden for d in differences)
    results = (d for d in differences if d.pair.golden in observable)
    if any(d.metrics and d.pair.reason is not Reason.RESULT for d in results):
        return ""
    few = f"only {paired:,} of {name}'s {len(smaller):,} tensors have a partner in the other run"
    few = few if paired else "they have no site in common"
    return f"{few}, and none of golden's results has one: {_examples(differences)}"


def _unanswered_step(differences: Sequence[Difference]) -> str:
    """Say so if nothing diverged, but a step has results in both runs, and no two belong together.

    What agrees before the results says nothing about them.
    """
    if any(d.verdict == "diverged" for d in differences):
        return ""
    steps: list[dict[tuple[int, int], bool]] = [{}, {}]  # of golden and mine: any result measured
    for answered, side in zip(steps, ("golden", "mine"), strict=True):
        results = Results(getattr(d.pair, side) for d in differences)
        for d in differences:
            record = getattr(d.pair, side)
            if record in results and record.site.role == "output" and epsilon(record.summary.dtype):
                key = record.site.generation, record.site.step
                measured = bool(d.metrics) or d.rule is Rule.MASK_ALONE
                answered[key] = answered.get(key, False) or measured
    alone = [key for key, answered in steps[0].items() if not answered]
    both = [step for generation, step in alone if steps[1].get((generation, step)) is False]
    if both:
        why = _why(differences)
        return f"in step {both[0]}, no result of golden belongs to a result of mine{why}"
    return ""


def _why(differences: Sequence[Difference]) -> str:
    """Return that statistics are of other rows or tokens, and what helps; "" if they are not."""
    apart = (d.pair for d in differences if d.rule is Rule.OTHER_BATCH)
    outputs = (p for p in apart if p.either.site.role == "output")
    if any(r is not None and r.payload is None for p in outputs for r in (p.golden, p.mine)):
        return (
            ": they are statistics of other batches."
            " Record values (stats_only=False), or run both on the same batch"
        )
    return ""


def _examples(differences: Sequence[Difference]) -> str:
    """Return what each side has: steps, if the same modules ran in others, else a path."""
    alone = [d for d in differences if d.pair.golden is None or d.pair.mine is None]
    golden = [d.site for d in alone if d.pair.golden is not None]
    mine = [d.site for d in alone if d.pair.mine is not None]
    paths = [{site.path for site in sites} - {""} for sites in (golden, mine)]
    if paths[0] & paths[1]:
        steps = [sorted({site.step for site in sites}) for sites in (golden, mine)]
        return f"golden has steps {steps[0]}, mine {steps[1]}, with other calls or arguments"
    of_golden, of_mine = (min(names, default="(root)") for names in paths)
    return f"golden has e.g. {of_golden}, mine {of_mine}"


def _unrelated(
    differences: Sequence[Difference], golden: Iterable[Fingerprint], mine: Iterable[Fingerprint]
) -> str:
    """Say so if the models share no weight, and mine's values say nothing about golden's."""
    of_golden, of_mine = (
        # a vector may be equal by its first value or its formula: ones, zeros, frequencies
        {(kind, text) for kind, text in weights if "," in kind}
        for weights in (golden, mine)
    )
    dtypes = [{kind.partition(" ")[0] for kind, _ in weights} for weights in (of_golden, of_mine)]
    weights = [d for d in differences if d.site.role == "weight"]
    if (
        not dtypes[0] & dtypes[1]
        or of_golden & of_mine
        or any(d.verdict in _AGREES for d in weights)
    ):
        return ""
    errors = [_error(d) for d in _results_of_weights(differences)]
    if not errors or statistics.median(errors) < constants.UNRELATED:
        return ""
    return (
        "no weight matrix of golden is in mine, and most of mine's values are as far from golden's "
        "as zeros would be"
    )


def _results_of_weights(differences: Sequence[Difference]) -> Iterator[Difference]:
    """Yield the pairs that depend on weights: computed, not constant, and no mere numbers."""
    observable = Results(d.pair.golden for d in differences)
    for d in differences:
        golden = d.pair.golden
        if golden is None or d.pair.mine is None or d.error is None:
            continue
        summary, site = golden.summary, golden.site
        given = site.role == "weight" or (site.role == "input" and observable.is_outermost(golden))
        if not given and epsilon(summary.dtype) and summary.min != summary.max:
            yield d


def _error(d: Difference) -> float:
    """Return the relative L2 error, or the figure that was judged if there is none."""
    l2 = d.metrics.get("relative_euclidean_distance")
    error = float(d.error or 0.0) if l2 is None else float(l2)
    return math.inf if math.isnan(error) else error


def _comparable(differences: Sequence[Difference]) -> Iterator[tuple[Difference, Record]]:
    """Yield the rows with a tensor of golden that mine could have recorded too."""
    mine = {_selection(d.pair.mine.site) for d in differences if d.pair.mine}
    for d in differences:
        golden = d.pair.golden
        if golden is None or d.pair.reason in EXCUSED or _selection(golden.site) not in mine:
            continue
        unmeasured = d.pair.mine is not None and d.verdict == "unmatched"
        if not unmeasured or d.rule is Rule.REJOINED:
            yield d, golden


def _selection(site: Site) -> tuple[object, ...]:
    """Return what a recording selects: the step, the phase, and modules or operators."""
    return site.generation, site.step, site.phase, is_operator(site.path)


def _content(record: Record) -> Hashable:
    """Return what is the same for equal tensors, wherever they were seen."""
    s = record.summary
    if s.fingerprint:
        return s.dtype, s.shape, s.fingerprint
    return s.dtype, s.shape, *map(str, (s.min, s.max, s.mean, s.l2norm))  # nan equals no nan
