"""The use case: perturb operators, and rank them by how far the result moves."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from typing import TYPE_CHECKING, NamedTuple

import torch

from llmdebug_nb.app.differences import ResultTable
from llmdebug_nb.app.perturbing.program import Distance, Inputs, Program, Result, Wanted, distance
from llmdebug_nb.app.perturbing.search import NOT_REACHED, Units, most_runs, search
from llmdebug_nb.capture.perturbing.perturbation import Listing, Perturbation
from llmdebug_nb.core.bars import progress_bar
from llmdebug_nb.core.errors import CaptureError, OptionError, nearest
from llmdebug_nb.core.option_parsing import some_of
from llmdebug_nb.core.perturbations import (
    KINDS,
    MODES,
    OF_INPUTS,
    ONE_THREAD,
    PRECISE,
    SWITCHES,
    Moved,
    Sensitivity,
    Unit,
)
from llmdebug_nb.core.printable import printable
from llmdebug_nb.show import perturb as shown

if TYPE_CHECKING:
    import pandas
    from torch import nn

    from llmdebug_nb.capture.perturbing.session import PerturbedSession

_REPEATS = 2  # unperturbed runs besides the first: they tell how far the program moves by itself


class Perturbed(ResultTable):
    """The result of `perturb`. ``result``: all that was measured."""

    def __init__(self, result: Sensitivity) -> None:
        self.result = result

    @property
    def rows(self) -> list[Moved]:
        """All rows: by kind, and then the farthest moved first."""
        return [row for kind in self.result.rows for row in self.result.sorted(kind)]

    def to_pandas(self) -> pandas.DataFrame:
        """Return one row for each kind and operator, or group of operators."""
        import pandas

        return pandas.DataFrame(shown.rows(self.result), columns=shown.COLUMNS)

    def __str__(self) -> str:
        return shown.text(self.result)

    def _repr_html_(self) -> str:
        return shown.page(self.result)


def perturb(
    model: nn.Module,
    inputs: Inputs,
    *,
    mode: str = "api",
    kinds: str | Iterable[str] = tuple(KINDS),
    result: Wanted = None,
    top: int | None = 10,
    seed: int = 0,
    progress: bool = True,
) -> Perturbed:
    """Perturb the operators of a model one by one, and rank them by how far its result moves.

        found = ld.perturb(model, batch)
        found                       # the most sensitive operators, by kind of perturbation
        found.to_pandas()

    The model is left as it was: gradients, buffers, caches, mode and random numbers. An interrupt
    ends the search, and what is known by then is returned.

    Args:
        model: a module of PyTorch.
        inputs: a tensor, a tuple of arguments, a mapping of named ones, or a function without
            arguments that runs the model and returns the result. Copies are given to each run.
        mode: what is perturbed: inputs of each ``module``, of each function (``api``), or of each
            operator of the dispatcher (``aten``).
        kinds: of perturbations: ``ulp``, ``noise``, ``precise``, ``deterministic``, ``math_sdpa``,
            ``one_thread``.
        result: what moves: a slot of what the model returns, such as ``last_hidden_state``, or a
            function from that to a tensor. Default: the logits, else the first tensor of floats.
        top: so many of the most sensitive ones are measured alone; what moves less may be left in
            groups. None: all alone.
        seed: of the random moves.
        progress: show a progress bar.

    Raises:
        OptionError: an option is wrong, the model fails on the inputs, or its result is no finite
            number. CaptureError: a recording is running.
    """
    names, top = _kinds(kinds), _top(top)
    if mode not in MODES:
        raise OptionError(f"mode {mode!r} is not known{nearest(str(mode), MODES)}")
    return Perturbed(
        _Measuring(Program(model, inputs, result), mode, seed).all(names, top, progress)
    )


def _kinds(kinds: str | Iterable[str]) -> list[str]:
    names = some_of(kinds, KINDS, "kinds")
    if not names:
        raise OptionError(f"kinds: expected any of {', '.join(KINDS)}")
    return names


def _top(top: int | None) -> int | None:
    if top is not None and (isinstance(top, bool) or not isinstance(top, int) or top < 1):
        raise OptionError(f"top: expected a number from 1, or None for all, got {top!r}")
    return top


class _Level(NamedTuple):
    """Where a kind acts. ``session``: mode of the session. ``by_module``: modules are perturbed by
    what runs in them. ``modules``: it is the inputs of modules that move."""

    session: str
    by_module: bool = False
    modules: bool = False


def _level(kind: str, mode: str) -> _Level:
    if kind in OF_INPUTS:
        return _Level(mode, modules=mode == "module")
    if kind == PRECISE:
        return _Level("aten", by_module=True) if mode == "module" else _Level(mode)
    return _Level("api", by_module=mode == "module")  # kernels are chosen above the dispatcher


class _Measuring:
    """Measures the units of a program. ``found``: what is known so far."""

    def __init__(self, program: Program, mode: str, seed: int) -> None:
        self._program, self._mode, self._seed = program, mode, seed
        self._known: dict[_Level, Listing] = {}
        self.found = Sensitivity(mode, "")

    def all(self, kinds: list[str], top: int | None, progress: bool) -> Sensitivity:
        with ExitStack() as at_end:
            bar = progress_bar(desc="perturb, at most", unit="run", shown=progress)
            self._bar = at_end.enter_context(bar)
            self._list(kinds)
            units = {kind: self._units(kind) for kind in kinds}
            self._bar.total = self.found.runs + sum(
                most_runs(len(units[kind]), top, kind in SWITCHES) for kind in kinds
            )
            self._bar.refresh()
            try:
                for kind in kinds:
                    self._search(kind, units[kind], top)
            except KeyboardInterrupt:
                self.found.interrupted = True
        return self.found

    def _list(self, kinds: list[str]) -> None:
        """Run the program unperturbed: list its units, and see how far it moves by itself."""
        others: list[Result] = []
        for level in dict.fromkeys(_level(kind, self._mode) for kind in kinds):
            modules = self._program.modules() if level.modules or level.by_module else {}
            listing = self._known[level] = Listing(modules, level.by_module, Program.run.__code__)
            with self._program.followed(level.session) as session:
                others.append(self._first(session, listing))
        self._baseline = others.pop(0)
        if not bool(torch.isfinite(self._baseline.tensor).any()):
            raise OptionError("the result has no finite number: errcheck names where that begins")
        with self._program.followed("module") as session:
            while len(others) < _REPEATS:
                others.append(self._run(session, Listing({}, False)))
        apart = [distance(self._baseline, each) for each in others]
        self.found.result, self.found.spread = self._baseline.name, max(d.moved for d in apart)
        line = self._baseline.tensor.shape[-1:]
        if line and line[0] > 1:
            self.found.positions = self._baseline.tensor.numel() // line[0]

    def _first(self, session: PerturbedSession, listing: Listing) -> Result:
        """Run the program for the first time. Raises OptionError: it fails."""
        try:
            made = self._run(session, listing)
        except (OptionError, CaptureError, KeyboardInterrupt):
            raise
        except Exception as error:  # the model is the program's: it may raise anything
            line = printable(str(error).strip().partition("\n")[0])
            raise OptionError(
                f"the model fails on these inputs: {type(error).__name__}: {line}"
            ) from error
        if session.problem():
            self.found.notes.append(f"not perturbed: {session.problem()}")
        return made

    def _run(self, session: PerturbedSession, intervention: Listing | Perturbation) -> Result:
        made = self._program.run(session, intervention)
        self.found.runs += 1
        self._bar.update(1)
        return made

    def _units(self, kind: str) -> list[Unit]:
        """Return the units that a kind can perturb, in execution order, and note the others."""
        listing = self._known[_level(kind, self._mode)]
        units = list(listing.units.values())
        if kind == ONE_THREAD and torch.get_num_threads() == 1:
            self.found.notes.append(f"{kind}: not done, the program runs on one thread already")
            return []
        able = [unit for unit in units if kind not in OF_INPUTS or unit.key in listing.movable]
        self.found.units[kind] = len(able)
        if len(able) < len(units):
            self.found.notes.append(
                f"{kind}: {len(units) - len(able):,} of {len(units):,} take no floating-point"
                " tensor that they leave alone"
            )
        return able

    def _search(self, kind: str, units: list[Unit], top: int | None) -> None:
        level = _level(kind, self._mode)
        narrow = 0
        with self._program.followed(level.session) as session:

            def measure(several: Units) -> Moved:
                nonlocal narrow
                made, perturbation = self._measured(session, kind, level, several)
                narrow = max(narrow, perturbation.narrow)
                return made

            if units:
                waiting = Moved(kind, tuple(units), None, problem=NOT_REACHED)
                self.found.rows[kind] = [waiting]
            for rows in search(units, measure, top, self.found.spread, kind in SWITCHES):
                self.found.rows[kind] = rows
        if narrow:
            self.found.notes.append(f"{kind}: {narrow:,} calls have no kernel of higher precision")

    def _measured(
        self, session: PerturbedSession, kind: str, level: _Level, units: Units
    ) -> tuple[Moved, Perturbation]:
        keys = {unit.key for unit in units}
        paths = [unit.path for unit in units] if level.modules else ()
        perturbation = Perturbation(
            kind, keys, paths, level.by_module, measures=len(units) == 1, seed=self._seed
        )
        try:
            moved = distance(self._baseline, self._run(session, perturbation))
        except Exception as error:  # perturbed, the program may raise anything
            line = printable(str(error).strip().partition("\n")[0])
            return Moved(kind, units, None, problem=f"{type(error).__name__}: {line}"), perturbation
        return _row(kind, units, moved, perturbation), perturbation


def _row(kind: str, units: Units, moved: Distance, perturbation: Perturbation) -> Moved:
    return Moved(kind, units, moved.moved, perturbation.moved_inputs, moved.flips, moved.loss)
