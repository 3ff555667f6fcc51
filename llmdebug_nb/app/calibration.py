"""Calibrating a comparison: golden's live model runs again and rounds otherwise."""

from __future__ import annotations

from collections.abc import Iterator

from llmdebug_nb.app.live_models import is_recorded_here, module_finder
from llmdebug_nb.app.rerun import Step
from llmdebug_nb.capture.perturbing.rounding import OtherRounding
from llmdebug_nb.comparison.engine import error
from llmdebug_nb.core import constants
from llmdebug_nb.core.dtypes import epsilon
from llmdebug_nb.core.errors import CompareError
from llmdebug_nb.core.records import Site
from llmdebug_nb.replay.operators import CannotReplay
from llmdebug_nb.replay.replay import same
from llmdebug_nb.replay.runs import Side
from llmdebug_nb.store.run import Run

AUTO = "auto"  # in place of a recording
_OTHERWISE = "; give another recording of golden to calibrate="


def recordings(golden: Run) -> Iterator[tuple[int, int, Run]]:
    """Yield recordings of golden's model in which all results are rounded otherwise.

    Each is of one step, given with its generation: the first one that can be run again.

    Raises:
        CompareError: golden's model is gone, or computes something else by now.
    """
    step = _step(golden)
    _check(step)
    for seed in range(constants.PERTURBED_DRAWS):
        try:
            run = step.recorded(OtherRounding(seed))
        except CannotReplay as why:
            raise CompareError(f"calibrate: {why}{_OTHERWISE}") from None
        yield step.key.generation, step.key.step, run


def _step(golden: Run) -> Step:
    """Return the first recorded step of golden's live model that can be run again."""
    find = module_finder(golden)
    roots = [node.path for node in golden.nodes if node.parent < 0]
    if not any(find(path) for path in roots):
        where = "is gone" if is_recorded_here(golden) else "was recorded by another process"
        raise CompareError(f"calibrate: golden's model {where}{_OTHERWISE}")
    why: CannotReplay | None = None
    for site in _sites(golden, roots):
        try:
            return Step.of(site, Side(golden), find)
        except CannotReplay as error:
            why = why or error
    raise CompareError(f"calibrate: {why or 'golden has no step'}{_OTHERWISE}")


def _sites(golden: Run, roots: list[str]) -> Iterator[Site]:
    for root in roots:
        outputs = golden.records(path=root, role="output", phase="forward", call=0)
        yield from (record.site for record in outputs)


def _check(step: Step) -> None:
    """Refuse a model that computes something else than was recorded: its noise is another's."""
    try:
        now, other = step.results(seed=0), step.results(seed=1)
    except CannotReplay as why:
        raise CompareError(f"calibrate: {why}{_OTHERWISE}") from None
    if any(not same(tensor, other[slot]) for slot, tensor in now.items() if slot in other):
        raise CompareError(
            f"calibrate: golden's model gives two results for the same inputs{_OTHERWISE}"
        )
    for record in step.side.records(step.key, "output"):
        tensor = now.get(record.site.slot)
        if record.payload is None or record.kept is not None or tensor is None:
            continue
        most = constants.SAME_VALUES_EPSILONS * epsilon(record.summary.dtype)
        if error(step.side.load(record), tensor) > most:
            raise CompareError(
                f"calibrate: golden's model no longer computes what was recorded{_OTHERWISE}"
            )
