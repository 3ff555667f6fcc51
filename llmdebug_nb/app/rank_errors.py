"""Which ranks a wrong tensor of a joined run comes from."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from llmdebug_nb.comparison.differences import Difference
from llmdebug_nb.core.errors import LLMDebugError
from llmdebug_nb.core.kernels.joining import Recipe, joined
from llmdebug_nb.core.kernels.relative import relative_l2
from llmdebug_nb.core.placement import REDUCTIONS, SHARED, Only
from llmdebug_nb.findings.blame import Explanation
from llmdebug_nb.findings.finding import Finding
from llmdebug_nb.store.joined import JoinedRun, Whole
from llmdebug_nb.store.run import Run
from llmdebug_nb.store.world import ranks_of


def with_ranks(
    found: Explanation, differences: Sequence[Difference], golden: Run, mine: Run
) -> Explanation:
    """Return an explanation whose findings name their ranks.

    Of a joined run, the ranks whose parts differ, if not all of them do. A weight tells it best:
    what is made of one that all ranks gather is wrong on each of them. Between runs compared rank
    by rank, gradients that all ranks share come last: another rank may have spoilt them.
    """
    weights = {
        row.site.path: row
        for row in reversed(differences)
        if row.verdict == "diverged" and row.site.role == "weight"
    }
    findings = []
    for each in found.findings:
        row = weights.get(each.path, each.difference)
        text = "" if row is None else _text(row, golden, mine)
        findings.append(replace(each, evidence=f"{each.evidence}; {text}") if text else each)
    order = sorted(range(len(findings)), key=lambda at: _is_shared(findings[at]))
    rows = [found.rows[at] for at in order] if len(found.rows) == len(findings) else found.rows
    return replace(found, findings=[findings[at] for at in order], rows=rows)


def _is_shared(finding: Finding) -> bool:
    """Tell whether a finding is a gradient that all ranks share."""
    site = finding.difference.site if finding.difference is not None else None
    return site is not None and site.role == "grad" and site.slot.endswith(SHARED)


def _text(row: Difference, golden: Run, mine: Run) -> str:
    """Say which ranks have the parts that differ; "" if all do, or that can't be told."""
    if not isinstance(mine, JoinedRun):
        ranks = ranks_of(mine)
        return f"on rank {row.site.rank} of {len(ranks)}" if len(ranks) > 1 else ""
    errors = rank_errors(row, golden, mine)
    limit = row.limit if row.limit is not None else 0.0
    wrong = sorted(rank for rank, error in errors.items() if not error <= limit)
    if not wrong or len(wrong) == len(errors):
        return ""
    named = f"rank {wrong[0]}" if len(wrong) == 1 else f"ranks {', '.join(map(str, wrong))}"
    worst = max(errors[rank] for rank in wrong)
    return (
        f"{named} of {len(errors)} alone: the part there differs by {worst:.2g}, and what the"
        " others hold agrees"
    )


def rank_errors(row: Difference, golden: Run, mine: JoinedRun) -> dict[int, float]:
    """Return the relative L2 error of what each rank holds of a tensor, against golden's part.

    Empty where no rank holds elements of its own (sums), or the layout is another one.
    """
    pair = row.pair
    if pair.golden is None or pair.mine is None or pair.fit is not None:
        return {}
    whole = mine.parts_of(pair.mine)
    if whole is None or any(each in REDUCTIONS for each in whole.recipe.held):
        return {}
    try:
        there = golden.load(pair.golden).double()
        parts = {at: mine.ranks.load(part) for at, part in whole.spread.parts.items()}
        owners = {
            at: torch.full_like(part, whole.spread.parts[at].site.rank, dtype=torch.float64)
            for at, part in parts.items()
        }
        errors: dict[int, float] = {}
        for recipe in _replicas(whole):
            own = joined(owners, recipe._replace(divisor=1))
            _add(errors, there, joined(parts, recipe).double(), own)
    except (LLMDebugError, RuntimeError, KeyError, IndexError):
        return {}
    return errors


def _add(
    errors: dict[int, float], golden: torch.Tensor, mine: torch.Tensor, owners: torch.Tensor
) -> None:
    if golden.shape != mine.shape:
        return
    for rank in set(owners.flatten().tolist()):
        own = owners == rank
        error = relative_l2(golden[own], mine[own])
        errors[int(rank)] = max(error, errors.get(int(rank), 0.0))


def _replicas(whole: Whole) -> Iterator[Recipe]:
    """Yield the recipe with each of the replicas."""
    choices = [
        list(map(Only, range(dimension.size)))
        if isinstance(held, Only) and not dimension.divides
        else [held]
        for held, dimension in zip(whole.recipe.held, whole.spread.dimensions, strict=True)
    ]
    for held in itertools.product(*choices):
        yield whole.recipe._replace(held=tuple(held))
