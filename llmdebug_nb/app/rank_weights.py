"""Weights that all ranks have alike, and that ranks change otherwise between the steps."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection

from llmdebug_nb.core.records import Site
from llmdebug_nb.core.updates import UPDATED
from llmdebug_nb.store.queries import ScalarRow
from llmdebug_nb.store.rank_checks import REPLICAS, RankFault
from llmdebug_nb.store.run import Run
from llmdebug_nb.store.weight_history import Name, Step, sample_of


def out_of_step(run: Run, ranks: Collection[int], replicas: Collection[Name]) -> list[RankFault]:
    """Return the fault of the first step before which ranks changed weights otherwise.

    What follows from it differs, too. ``replicas``: weights whose gradients ranks share; without
    any, all weights count that ranks began with alike, if not one of them is alike then: experts
    may begin alike and go their own ways, but something else stays. Those that differ from the
    start are no news here.
    """
    steps: dict[Step, dict[Name, dict[int, ScalarRow]]] = defaultdict(lambda: defaultdict(dict))
    for rank in sorted(ranks):
        for row in run.index.scalars(role=UPDATED, rank=rank):
            if not replicas or (row.path, row.slot) in replicas:
                steps[row.generation, row.step][row.path, row.slot][rank] = row
    now: dict[Name, dict[int, ScalarRow]] = defaultdict(dict)
    began: dict[Name, bool] = {}  # whether ranks began with equal weights
    for step, changed in sorted(steps.items()):
        wrong = []
        for name, rows in sorted(changed.items()):
            now[name] |= rows
            if len(now[name]) == len(ranks):
                equal = len({(row.type, row.value) for row in now[name].values()}) == 1
                if began.setdefault(name, equal) and not equal:
                    wrong.append(name)
        alike = [name for name, equal in began.items() if equal]
        if wrong and (replicas or len(wrong) == len(alike)):
            return [_fault(step, wrong[0], now[wrong[0]], len(wrong) - 1)]
    return []


def _fault(step: Step, name: Name, rows: dict[int, ScalarRow], more: int) -> RankFault:
    kinds = Counter((row.type, row.value) for row in rows.values())
    most, count = kinds.most_common(1)[0]
    rest = tuple(rank for rank, row in sorted(rows.items()) if (row.type, row.value) != most)
    alone = len(rest) < count
    ranks = rest if alone else tuple(sorted(rows))
    usual, others = sample_of(*most), [sample_of(rows[r].type, rows[r].value) for r in rest]
    off = max((usual.off(s) for s in others if usual and s and usual.is_of(s)), default=0.0)
    who = f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
    how = f"otherwise than the {count} others" if alone else f"in {len(kinds)} ways"
    size = (usual.size if usual else 0.0) or 1.0
    says = f"before this step, {who} changed the weight {how} (by {off / size:.2g})"
    says += f"; so with {more} more weights" if more else ""
    says += ": a gradient was not reduced, or the optimizers differ"
    site = Site(name[0], step[1], 0, "forward", "weight", name[1], ranks[0], step[0])
    return RankFault(REPLICAS, site, ranks, says)
