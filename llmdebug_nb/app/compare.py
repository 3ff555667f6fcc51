"""Comparing two runs: pair their tensors, measure and judge each pair, search for the cause."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeAlias

from llmdebug_nb.align import names
from llmdebug_nb.align.names import Names
from llmdebug_nb.align.pairing import pair
from llmdebug_nb.align.pairs import Pair
from llmdebug_nb.app import proof
from llmdebug_nb.app.by_token import same_steps
from llmdebug_nb.app.calibration import AUTO, recordings
from llmdebug_nb.app.cluster.cluster import Cluster, ClusterLike, connected
from llmdebug_nb.app.cluster.measuring import on_cluster
from llmdebug_nb.app.live_models import module_finder
from llmdebug_nb.app.proof import Again
from llmdebug_nb.app.rank_errors import with_ranks
from llmdebug_nb.app.ranks import same_ranks
from llmdebug_nb.app.report import Report
from llmdebug_nb.app.runs import open_run
from llmdebug_nb.app.sides import sides
from llmdebug_nb.comparison import engine
from llmdebug_nb.comparison.calibration import Calibration
from llmdebug_nb.comparison.custom import Custom
from llmdebug_nb.comparison.differences import Difference, Reach
from llmdebug_nb.comparison.epsilons import Stated
from llmdebug_nb.comparison.jobs import Work
from llmdebug_nb.comparison.limits import Limits
from llmdebug_nb.comparison.threads import in_threads
from llmdebug_nb.comparison.untouched import Steps
from llmdebug_nb.core import collector, constants
from llmdebug_nb.core.bars import Stages
from llmdebug_nb.core.errors import CompareError
from llmdebug_nb.findings import blame
from llmdebug_nb.findings.blame import Explanation
from llmdebug_nb.replay.runs import Runs
from llmdebug_nb.store import compiled, reader
from llmdebug_nb.store.expectation import Expectation
from llmdebug_nb.store.run import Run
from llmdebug_nb.store.weight_history import History, Name, Step

if TYPE_CHECKING:
    import torch

_CAUSAL = "is_causal"  # torch's own word
_OWN_METRICS = "cluster: with metrics of your own, all tensors are measured in this process"
RunLike: TypeAlias = "Run | str | os.PathLike[str]"
FileOr: TypeAlias = "str | os.PathLike[str] | Mapping[str, object]"
Metric: TypeAlias = "Callable[[torch.Tensor, torch.Tensor], float]"
Metrics: TypeAlias = "Metric | str | Iterable[Metric | str] | Mapping[str, Metric]"


def compare(
    golden: RunLike,
    mine: RunLike,
    explain: bool = True,
    *,
    mapping: FileOr | None = None,
    limits: FileOr | None = None,
    calibrate: RunLike | Iterable[RunLike] | None = None,
    metrics: Metrics | None = None,
    model: torch.nn.Module | None = None,
    progress: bool = True,
    prove: bool = False,
    cluster: ClusterLike | None = None,
) -> Report:
    """Compare two runs (or their names or paths): verdict, coverage, differences, findings.

    If too little of the runs answers to each other, the verdict is ``incomparable``. Two single
    files with one tensor each are compared whatever they are named; the tensor stands at golden's
    place.

    Args:
        golden: the reference.
        mine: the run that is judged.
        explain: also search for the cause of the differences.
        mapping: golden's paths with the corresponding paths of mine, for modules that are not
            paired by themselves: a dict, or a YAML or JSON file (see `align.names.read`).
        limits: fixed limits in place of those that rounding explains, by path and dtype:
            ``{"model.layers.*": {"cosine": 0.999}, "lm_head": {"bfloat16": {"max_abs": 0.1}}}``,
            or a YAML or JSON file of that.
        calibrate: one or several other recordings of golden: perturbed, in another precision,
            with other kernels, or simply repeated. Three times their difference from golden
            counts as noise. ``"auto"`` runs golden's model again, if this process still has it,
            with the result of each operator moved by one unit in the last place, and so
            measures how much each call amplifies noise.
        metrics: your own metrics, callables ``(golden, mine) -> float`` of two CPU tensors, or a
            dict of them by name.
        model: the model of ``mine``. Its modules run alone on golden's inputs; it is left
            unchanged. Default: the recorded model, if this process recorded it and it still exists.
        prove: prove the first finding (`Finding.prove`), if the model of ``mine`` is there; else
            the report notes why not.
        progress: say what is going on when the comparison takes a second or more.
        cluster: a Dask cluster that reads and measures the tensors: the address of its scheduler
            (``tcp://host:8786``), a ``distributed.Client``, or ``local`` for processes of this
            machine. The result is the same, bit for bit; what the workers can't do is done here,
            and the report's notes say so.

    Expectations that were marked for runs of these names (`Report.expect`) apply again.

    Raises:
        UnknownRunError and other StoreErrors: a run can't be opened.
        OptionError: an invalid mapping, limit or metric (with its line and key), or ``model`` is
            no module.
        CompareError: a run has no records, an engine's run was given no text of the other one, a
            calibration has no tensor in common with golden, or
            golden's model can't be run again for ``calibrate="auto"``.
        ClusterError: no scheduler answers, or no worker has the versions of this machine.
        MissingPackageError: ``cluster`` needs Dask.
    """
    golden, mine = _at_one_place(open_run(golden), open_run(mine))
    with Stages("putting ranks together", progress):
        golden, mine, of_ranks = same_ranks(golden, mine)
    with Stages("putting rows together", progress):
        only_engines = calibrate is not None
        golden, mine, remarks, reach = same_steps(golden, mine, only_engines)
    if remarks and calibrate is not None:
        raise CompareError(
            "calibrate: runs of an engine are compared by request and position, and a calibration"
            " has other steps; leave it out"
        )
    module_at = module_finder(mine, model)
    custom = Custom(metrics)
    fixed = None if limits is None else Limits.read(limits, custom.names)
    mapped, remarks = names.read(mapping), [*of_ranks, *remarks]
    runs = Runs(*sides(golden, mine), engine.error, module_at, module_finder(golden))

    def find(model: torch.nn.Module) -> Callable[[str], torch.nn.Module | None]:
        return module_finder(mine, model)

    with connected(cluster, progress) as workers:
        with Stages("calibrating", progress):
            calibration = calibrated(golden, calibrate, workers)
        comparison = Comparison(mapped, fixed, calibration, custom, explain, remarks, reach)
        again = Again(golden, mine, runs, comparison.step, find)
        work = on_cluster(None if custom.names else workers, golden, mine)
        with Stages("pairing", progress) as stages, collector.paused():
            report = comparison.report(again, stages=stages, work=work)
        if workers is not None:
            report.problems += [_OWN_METRICS] if custom.names else workers.notes()
    if prove:
        proof.proven(report)
    return report


def first_steps(golden: RunLike, mine: RunLike) -> tuple[Run, Run] | None:
    """Return the first step of two long recordings, to be compared before all of them are.

    None: the recordings are short, have one step, or begin with different ones. Raises what
    `open_run` raises.
    """
    golden, mine = open_run(golden), open_run(mine)
    if len(golden) < constants.FIRST_STEP_FROM or not (golden.is_native and mine.is_native):
        return None
    recorded = golden.steps()
    first, other = ([(c.generation, c.step) for c in s[:1]] for s in (recorded, mine.steps()))
    if len(recorded) < 2 or first != other:
        return None
    return reader.of_step(golden, first[0]), reader.of_step(mine, first[0])


def _at_one_place(golden: Run, mine: Run) -> tuple[Run, Run]:
    """Return the runs; two files of one tensor each have it at golden's place, as a result.

    An input alone is no result of anything, so nothing would be judged.
    """
    first = reader.lone(golden)
    second = None if first is None else reader.lone(mine)
    if first is None or second is None:
        return golden, mine
    site, op = replace(first.site, role="output"), first.op
    there = [(each.site, each.op) == (site, op) for each in (first, second)]
    runs = [
        run if known else reader.placed(run, site, op)
        for run, known in zip((golden, mine), there, strict=True)
    ]
    return runs[0], runs[1]


@dataclass(frozen=True)
class Comparison:
    """How two runs are compared.

    ``reach``: how much of what ran they have, if more is known than they tell. ``work``: measures,
    unless something else is given the task.
    """

    mapping: Names
    limits: Limits | None
    calibration: Calibration
    custom: Custom
    explain: bool
    remarks: Sequence[str] = ()
    reach: tuple[Reach, Reach] | None = None
    work: Work = in_threads

    def report(
        self,
        again: Again,
        step: tuple[int, int] | None = None,
        expected: list[Expectation] | None = None,
        stages: Stages | None = None,
        work: Work | None = None,
    ) -> Report:
        """Compare the runs of ``again``, or one generation and step of golden with all of mine."""
        golden, mine, runs = again.golden, again.mine, again.runs
        stages = stages or Stages("", shown=False)
        pairs = _paired(golden, mine, self.mapping, step)
        its, own = Stated.of(golden), Stated.of(mine)
        judging = engine.judging(
            pairs, golden.load, mine.load,
            nodes=golden.nodes, limits=self.limits, calibration=self.calibration,
            custom=self.custom, rounding=(its.told, own.told),
            products=(its.products, own.products),
            weights=_Weights(golden), steps=_steps(golden), work=work or self.work, stages=stages,
        )  # fmt: skip

        stages.stage("judging")

        def find(differences: Sequence[Difference]) -> Explanation:
            stages.stage("searching for the cause")
            found = blame.explained(differences, runs, self.explain)
            return with_ranks(found, differences, golden, mine)

        notes = [*self.custom.notes(), *self.remarks]
        report = Report((golden, mine), judging, find, notes, again, expected)
        report.reach = self.reach
        return report

    def step(
        self, again: Again, step: tuple[int, int] | None, expected: list[Expectation]
    ) -> Report:
        """Compare one generation and step of golden (None: all) with a run of it alone."""
        return self.report(again, step, expected)


def _steps(golden: Run) -> Steps:
    """Return golden's batches. Attributes of its modules tell whether attention is causal."""
    told = [row.value == "True" for row in golden.index.scalars(slot=_CAUSAL, role="attribute")]
    return Steps(golden.root_calls(), all(told) if told else None)


class _Weights:
    """How golden's weights moved between its steps, and which modules share one."""

    def __init__(self, golden: Run) -> None:
        self._history = functools.cache(lambda rank: History(golden.index, rank))

    def moved(self, rank: int, name: Name, step: Step) -> float:
        return self._history(rank).moved(name, step)

    def shared(self, rank: int, path: str) -> list[Name]:
        return self._history(rank).shared(path)


def calibrated(
    golden: Run,
    calibrate: RunLike | Iterable[RunLike] | None,
    workers: Cluster | None = None,
    here: Work = in_threads,
) -> Calibration:
    """Return what other recordings of golden, or its live model, say of its noise.

    ``here``: measures in this process. Raises what `compare` raises.
    """
    calibration = Calibration()
    if calibrate is None or isinstance(calibrate, (str, os.PathLike, Run)):
        others = [] if calibrate is None else [calibrate]
    else:
        others = list(calibrate)
    for other in others:
        if other == AUTO:
            _add_moved(calibration, golden, here)
            continue
        run = open_run(other)
        pairs = _paired(golden, run, Names())
        work = here if workers is None else on_cluster(workers, golden, run)
        measured = engine.measure(pairs, golden.load, run.load, golden.nodes, work)
        if not any(m.pair.golden and m.pair.mine for m in measured):
            raise CompareError(
                f"calibrate: {run.label} and {golden.label} have no tensor in common; "
                "give another recording of golden"
            )
        calibration.add(run.label, measured)
    return calibration


def _add_moved(calibration: Calibration, golden: Run, work: Work) -> None:
    """Calibrate with golden's live model, which rounds otherwise. Raises CompareError."""
    for generation, step, run in recordings(golden):
        pairs = _paired(golden, run, Names(), (generation, step))
        measured = engine.measure(pairs, golden.load, run.load, golden.nodes, work)
        calibration.rounded.append(measured)


def _paired(
    golden: Run,
    mine: Run,
    mapping: Names,
    step: tuple[int, int] | None = None,
) -> list[Pair]:
    """Return the pairs of two runs. Raises CompareError.

    ``step``: only this generation and step of golden.
    """
    records = golden.records()
    if step is not None:
        records = golden.records(generation=step[0], step=step[1])
    pairs = pair(
        records, mine.records(), mapping,
        (golden.nodes, mine.nodes), (golden.load, mine.load),
        (compiled.nodes(golden.index), compiled.nodes(mine.index)),
        max(Stated.of(run).of_matches for run in (golden, mine)),
    )  # fmt: skip
    for run, side in ((golden, "golden"), (mine, "mine")):
        if all(getattr(one, side) is None for one in pairs):
            raise CompareError(f"{run.label} has no records: there is nothing to compare")
    return pairs
