"""Weights that all ranks have alike, and that ranks change otherwise between the steps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

from llmdebug_nb.core.rank_checks import REPLICAS, RankFault
from llmdebug_nb.core.records import Site
from llmdebug_nb.core.updates import History, Name, Sample, Step
from llmdebug_nb.store.run import Run


def out_of_step(run: Run, ranks: Collection[int], replicas: Collection[Name]) -> list[RankFault]:
    """Return the fault of the first step before which ranks changed weights otherwise.

    What follows from it differs, too. ``replicas``: weights whose gradients ranks share. Those that
    differ from the start are no news here.
    """
    histories = {rank: History(run.index, rank) for rank in sorted(ranks)}
    steps = {
        step for history in histories.values() for name in replicas for step in history.steps(name)
    }
    began: dict[Name, bool] = {}  # whether ranks began with equal weights
    for step in sorted(steps):
        wrong = []
        for name in sorted(replicas):
            found = {rank: history.at(name, step) for rank, history in histories.items()}
            samples = {rank: each[0] for rank, each in found.items() if each}
            if len(samples) == len(ranks):
                equal = len(set(map(str, samples.values()))) == 1  # as text, NaN is equal to itself
                if began.setdefault(name, equal) and not equal:
                    wrong.append((name, samples))
        if wrong:
            return [_fault(step, wrong[0], len(wrong) - 1)]
    return []


def _fault(step: Step, wrong: tuple[Name, dict[int, Sample]], more: int) -> RankFault:
    (path, slot), samples = wrong
    most, count = Counter(map(str, samples.values())).most_common(1)[0]
    rest = tuple(rank for rank, each in sorted(samples.items()) if str(each) != most)
    alone = len(rest) < count
    ranks = rest if alone else tuple(sorted(samples))
    named = ", ".join(map(str, ranks))
    usual = next(each for each in samples.values() if str(each) == most)
    off = max(usual.distance(samples[rank]) for rank in rest) / (usual.size or 1.0)
    who = f"rank{'s' * (len(ranks) > 1)} {named}"
    than = f"otherwise than the {count} others" if alone else "each in its own way"
    says = f"before this step, {who} changed the weight {than} (by {off:.2g})"
    says += f"; so with {more} more weights" if more else ""
    says += ": a gradient was not reduced, or the optimizers differ"
    return RankFault(
        REPLICAS, Site(path, step[1], 0, "forward", "weight", slot, ranks[0], step[0]), ranks, says
    )
