"""Comparing two runs: pair their tensors, measure and judge each pair, search for the cause."""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from llmdebug_nb.align import names
from llmdebug_nb.align.names import Names
from llmdebug_nb.align.pairing import pair
from llmdebug_nb.app import proof
from llmdebug_nb.app.calibration import AUTO, recordings
from llmdebug_nb.app.live_models import module_finder
from llmdebug_nb.app.proof import Again
from llmdebug_nb.app.report import Report
from llmdebug_nb.app.runs import open_run
from llmdebug_nb.app.sides import sides
from llmdebug_nb.comparison import engine
from llmdebug_nb.comparison.custom import Custom
from llmdebug_nb.comparison.limits import Limits
from llmdebug_nb.comparison.tolerance import Calibration, says
from llmdebug_nb.core.errors import CompareError
from llmdebug_nb.core.findings import Difference, Expectation, Pair
from llmdebug_nb.explain import blame
from llmdebug_nb.explain.blame import Explanation
from llmdebug_nb.explain.runs import Runs
from llmdebug_nb.store import compiled
from llmdebug_nb.store.run import Run

if TYPE_CHECKING:
    import torch

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
) -> Report:
    """Compare two runs (or their names or paths): verdict, coverage, differences, findings.

    If too little of the runs answers to each other, the verdict is ``incomparable``.

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
        progress: show a progress bar when the comparison takes more than a second.

    Expectations that were marked for runs of these names (`Report.expect`) apply again.

    Raises:
        UnknownRunError and other StoreErrors: a run can't be opened.
        OptionError: an invalid mapping, limit or metric (with its line and key), or ``model`` is
            no module.
        CompareError: a run has no records, a calibration has no tensor in common with golden, or
            golden's model can't be run again for ``calibrate="auto"``.
    """
    golden, mine = open_run(golden), open_run(mine)
    module_at = module_finder(mine, model)
    custom = Custom(metrics)
    fixed = None if limits is None else Limits.read(limits, custom.names)
    calibration = _calibration(golden, calibrate, progress)
    comparison = _Comparison(names.read(mapping), fixed, calibration, custom, explain, progress)
    runs = Runs(*sides(golden, mine), engine.error, module_at, module_finder(golden))

    def find(model: torch.nn.Module) -> Callable[[str], torch.nn.Module | None]:
        return module_finder(mine, model)

    with _collector_paused():
        report = comparison.report(Again(golden, mine, runs, comparison.step, find))
    if prove:
        proof.proven(report)
    return report


@contextlib.contextmanager
def _collector_paused() -> Iterator[None]:
    """Pause Python's garbage collector.

    Rows make no garbage in cycles, and to go through all of them again and again takes a fifth of
    the time.
    """
    running = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if running:
            gc.enable()


@dataclass(frozen=True)
class _Comparison:
    """How two runs are compared."""

    mapping: Names
    limits: Limits | None
    calibration: Calibration
    custom: Custom
    explain: bool
    progress: bool

    def report(
        self,
        again: Again,
        step: tuple[int, int] | None = None,
        expected: list[Expectation] | None = None,
    ) -> Report:
        """Compare the runs of ``again``, or one generation and step of golden with all of mine."""
        golden, mine, runs = again.golden, again.mine, again.runs
        judging = engine.judging(
            _paired(golden, mine, self.mapping, self.progress and step is None, step),
            golden.load, mine.load,
            nodes=golden.nodes, limits=self.limits, calibration=self.calibration,
            custom=self.custom,
        )  # fmt: skip

        def find(differences: Sequence[Difference]) -> Explanation:
            return blame.explained(differences, runs, self.explain)

        limits_text = says(self.limits, self.calibration, judging.plain)
        notes = self.custom.notes()
        return Report(golden, mine, judging, find, limits_text, notes, again, expected)

    def step(
        self, again: Again, step: tuple[int, int] | None, expected: list[Expectation]
    ) -> Report:
        """Compare one generation and step of golden (None: all) with a run of it alone."""
        return self.report(again, step, expected)


def _calibration(
    golden: Run, calibrate: RunLike | Iterable[RunLike] | None, progress: bool
) -> Calibration:
    calibration = Calibration()
    if calibrate is None or isinstance(calibrate, (str, os.PathLike, Run)):
        others = [] if calibrate is None else [calibrate]
    else:
        others = list(calibrate)
    for other in others:
        if other == AUTO:
            _add_moved(calibration, golden)
            continue
        run = open_run(other)
        pairs = _paired(golden, run, Names(), progress)
        measured = list(engine.measure(pairs, golden.load, run.load, golden.nodes))
        if not any(m.pair.golden and m.pair.mine for m in measured):
            raise CompareError(
                f"calibrate: {run.label} and {golden.label} have no tensor in common; "
                "give another recording of golden"
            )
        calibration.add(run.label, measured)
    return calibration


def _add_moved(calibration: Calibration, golden: Run) -> None:
    """Calibrate with golden's live model, which rounds otherwise. Raises CompareError."""
    for generation, step, run in recordings(golden):
        pairs = _paired(golden, run, Names(), False, (generation, step))
        measured = engine.measure(pairs, golden.load, run.load, golden.nodes)
        calibration.rounded.append(list(measured))


def _paired(
    golden: Run,
    mine: Run,
    mapping: Names,
    progress: bool,
    step: tuple[int, int] | None = None,
) -> Iterable[Pair]:
    """Return the pairs of two runs, with a progress bar around them. Raises CompareError.

    ``step``: only this generation and step of golden.
    """
    records = golden.records()
    if step is not None:
        records = golden.records(generation=step[0], step=step[1])
    pairs = pair(
        records, mine.records(), mapping,
        (golden.nodes, mine.nodes), (golden.load, mine.load),
        (compiled.nodes(golden), compiled.nodes(mine)),
    )  # fmt: skip
    for run, side in ((golden, "golden"), (mine, "mine")):
        if all(getattr(one, side) is None for one in pairs):
            raise CompareError(f"{run.label} has no records: there is nothing to compare")
    if not progress:
        return pairs
    from tqdm.auto import tqdm

    bar: Iterable[Pair] = tqdm(pairs, desc="compare", unit="pair", delay=1, leave=False)
    return bar
