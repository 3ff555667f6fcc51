"""Look inside a blamed module: record it again with its operators, in both programs."""

from __future__ import annotations

import glob
from dataclasses import replace
from typing import TYPE_CHECKING

from llmdebug_nb.app import rerun
from llmdebug_nb.app.rerun import FindModule, Step, live
from llmdebug_nb.causes import causes
from llmdebug_nb.core.errors import ProofError
from llmdebug_nb.core.paths import is_operator, module_of
from llmdebug_nb.core.records import Site
from llmdebug_nb.findings.finding import Finding
from llmdebug_nb.replay.operators import CannotReplay
from llmdebug_nb.replay.runs import Runs, Side

if TYPE_CHECKING:
    from llmdebug_nb.app.report import Programs
    from llmdebug_nb.store.run import Run

# what is recorded of a module: all of its calls, whole
_WHOLE: dict[str, object] = {
    "mode": "module+api", "part": "both", "types": None, "opname": None, "contains": None,
    "apis": None, "logits": None, "stats_only": None, "slice": None, "reduce": None, "time": 3,
}  # fmt: skip


def recorded(finding: Finding, runs: Runs, programs: Programs | None = None) -> tuple[Run, Run]:
    """Record the blamed module with its operators, in golden and in mine.

    ``programs``: run golden and mine; default: the live models on their recorded inputs.

    Raises:
        ProofError: the finding is of an operator already, or a model can't be run again.
    """
    if is_operator(finding.path):
        raise ProofError(f"operators were recorded: the finding is of one, {finding.path}")
    if causes.about(finding.cause).of_weights:
        raise ProofError(f"{finding.path}: no line inside it makes the error ({finding.cause})")
    paths = _paths(finding, runs)
    try:
        if programs is not None:
            return _of_programs(finding, paths, programs)
        return _of_models(finding, runs, paths)
    except CannotReplay as why:
        raise ProofError(
            f"can't look inside {paths[1] or 'the model'}: {why}; {_advice(paths)}"
        ) from None


def _paths(finding: Finding, runs: Runs) -> tuple[str, str]:
    """Return the module in golden and in mine; for a module of one side that around it."""
    golden, mine = finding.golden, finding.mine
    if golden is not None and mine is not None:
        return module_of(golden.path), module_of(mine.path)
    path = finding.path
    if golden is not None or mine is not None:
        path = path.rpartition(".")[0]
    known = [path if path in side.nodes else "" for side in (runs.golden, runs.mine)]
    return known[0], known[1]


def _options(path: str) -> dict[str, object]:
    return _WHOLE | {"layers": [glob.escape(path)] if path else None}


def _of_programs(finding: Finding, paths: tuple[str, str], programs: Programs) -> tuple[Run, Run]:
    golden, mine = (
        rerun.record(
            (), program, _options(path) | {"name": name, "tokens": finding.step, "weights": None}
        )
        for name, path, program in zip(("golden", "mine"), paths, programs, strict=True)
    )
    return golden, mine


def _of_models(finding: Finding, runs: Runs, paths: tuple[str, str]) -> tuple[Run, Run]:
    """Run both models on, or if that can't be the two modules alone, on recorded inputs."""
    row = finding.difference
    site = row.site if row is not None else Site(finding.path, finding.step)
    sites = [
        replace(record.site if record is not None else site, phase="forward")
        for record in ((row.pair.golden, row.pair.mine) if row is not None else (None, None))
    ]
    sides = (runs.golden, runs.golden_module), (runs.mine, runs.module)
    try:
        steps = [Step.of(at, *side) for at, side in zip(sites, sides, strict=True)]
        options = [_options(path) for path in paths]
    except CannotReplay as why:
        try:
            steps = [_alone(sites[i], paths[i], *sides[i]) for i in (0, 1)]
            options = [_options("")] * 2
        except CannotReplay as other:
            both = str(why) if str(why) == str(other) else f"{why}; {other}"
            raise CannotReplay(both) from None
    names = "golden", "mine"
    golden, mine = (
        step.recorded(changed=each | {"name": name})
        for step, each, name in zip(steps, options, names, strict=True)
    )
    return golden, mine


def _alone(site: Site, path: str, side: Side, find: FindModule) -> Step:
    """Return the call of a module alone. Raises CannotReplay."""
    call = site.call if site.path == path else 0
    return Step(side, replace(site, path=path, call=call).key, live(path, find))


def _advice(paths: tuple[str, str]) -> str:
    each = " and ".join(
        f'ld.dump(model, name="{name}", layers="{path or "*"}", mode=("module", "api"))'
        for name, path in zip(("golden", "mine"), paths, strict=True)
    )
    return f"record it with {each}, and compare these two"
