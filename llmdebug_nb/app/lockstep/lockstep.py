"""`lockstep`: two models run side by side and are compared, and their values are forgotten."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeAlias

from llmdebug_nb.align import names
from llmdebug_nb.app.compare import Comparison, FileOr, Metrics, RunLike, calibrated
from llmdebug_nb.app.live_models import module_finder
from llmdebug_nb.app.lockstep import frames
from llmdebug_nb.app.lockstep.events import Program
from llmdebug_nb.app.lockstep.pairing_live import Meeting, Rules, Wanted
from llmdebug_nb.app.lockstep.program import Inputs, LocalProgram
from llmdebug_nb.app.lockstep.remote import RemoteProgram
from llmdebug_nb.app.lockstep.side import Side
from llmdebug_nb.app.lockstep.window import Window
from llmdebug_nb.app.lockstep_outcome import AT_FIRST, NOT_HERE, TIMEOUT, WINDOW, Lockstep
from llmdebug_nb.app.option_signatures import shows_options
from llmdebug_nb.app.proof import Again, proven
from llmdebug_nb.app.report import Report
from llmdebug_nb.app.sides import sides
from llmdebug_nb.capture import generation
from llmdebug_nb.comparison import engine
from llmdebug_nb.comparison.calibration import Calibration
from llmdebug_nb.comparison.custom import Custom
from llmdebug_nb.comparison.differences import EXPECTED
from llmdebug_nb.comparison.jobs import Job, Outcome, knowing
from llmdebug_nb.comparison.limits import Limits
from llmdebug_nb.comparison.threads import one_by_one
from llmdebug_nb.core import collector, constants, interrupts
from llmdebug_nb.core.bars import Stages
from llmdebug_nb.core.errors import CaptureError, OptionError
from llmdebug_nb.core.option_parsing import parse_bytes
from llmdebug_nb.core.options import EVERY_TOKEN, DumpKeywords, DumpOptions
from llmdebug_nb.replay.runs import Runs
from llmdebug_nb.show.words import count_text, size_text

if TYPE_CHECKING:
    import torch
    from typing_extensions import Unpack

    from llmdebug_nb.store.run import Run

Finder: TypeAlias = "Callable[[str], torch.nn.Module | None]"
_UNPROVEN = (
    "prove: not with stop or graft: what follows the finding has to be recorded without golden's"
    " values; run both once more without them"
)


@shows_options(tokens=EVERY_TOKEN)
def lockstep(
    golden: torch.nn.Module | str,
    mine: torch.nn.Module | str,
    inputs: Inputs,
    *,
    stop: str | None = None,
    graft: bool = False,
    window: int | str = WINDOW,
    explain: bool = True,
    mapping: FileOr | None = None,
    limits: FileOr | None = None,
    calibrate: RunLike | Iterable[RunLike] | None = None,
    metrics: Metrics | None = None,
    progress: bool = True,
    prove: bool = False,
    secret: str | bytes | None = None,
    timeout: float = TIMEOUT,
    **options: Unpack[DumpKeywords],
) -> Report:
    """Run two models side by side, compare each call as soon as both have made it, and forget it.

    The report is that of `compare` on two dumps, without the dumps: rows go to a temporary folder,
    and of values at most ``window`` bytes are held. Those that are asked for later, such as those
    around an error, are made again: the program runs once more, from the same state and random
    numbers. Models and random numbers are left as they were.

    Args:
        golden: the reference: a model, or the address ``tcp://host:port`` of a process that offers
            one by `lockstep_peer`.
        mine: the model that is judged, or such an address.
        inputs: a tensor, a tuple or a mapping of arguments, copied for each run; or a function
            that is given a model and runs it: ``lambda model: model.generate(ids)``.
        stop: ``"first"`` stops both programs at the first divergence.
        graft: let mine go on with golden's value after each call whose output diverges, so that
            one run shows all bugs.
        window: bytes of values that are held, of both together.
        explain, mapping, limits, metrics, progress: as in `compare`.
        calibrate, prove: as in `compare`; not with ``stop`` or ``graft``.
        secret, timeout: of a process at an address: see `lockstep_peer`. After the comparison, its
            values can be shown only if they are still held.
        options: which tensors are compared, as in `dump`. All steps, unless ``tokens`` says so.

    Raises:
        OptionError: an invalid argument, or two models with a module in common.
        CaptureError: a program failed, or gave nothing to record.
        CompareError: one of the two recorded nothing.
        PeerError: the other process does not answer, has another secret, or is gone.
    """
    wanted = _wanted(stop, graft)
    asked = _asked(wanted, explain, calibrate, prove, progress)
    size = parse_bytes(window, "window")
    assert size is not None
    chosen = _options(options)
    _check_apart(golden, mine)
    if any(True for _ in generation.listeners):
        raise CaptureError("a recording is running: end it first, or it would record this too")
    custom = Custom(metrics)
    fixed = None if limits is None else Limits.read(limits, custom.names)
    rules = Rules(names.read(mapping), fixed, custom)
    with ExitStack() as undo:
        programs: list[Program] = []
        for name, model in (("golden", golden), ("mine", mine)):
            if isinstance(model, str):
                _check_address(name, model)
                known = frames.checked_secret(secret or "")
                programs.append(RemoteProgram(model, known, chosen, timeout))
            else:
                programs.append(LocalProgram(name, model, inputs, chosen))
            undo.callback(programs[-1].close)
        return _confirmed((programs[0], programs[1]), chosen, size, rules, asked)


def _check_address(name: str, given: str) -> None:
    """Raises OptionError: a text is no address."""
    if not given.startswith("tcp://"):
        raise OptionError(
            f"{name}: expected a torch.nn.Module or an address tcp://host:port, got {given!r};"
            " ld.compare takes the names of runs"
        )


def _confirmed(
    programs: tuple[Program, Program], options: DumpOptions, window: int, rules: Rules, asked: Asked
) -> Report:
    """Compare; where both were stopped, or values grafted, the report has to find mine wrong.

    On the way, calls are paired by the module trees alone: a module of a port may give its values
    in another order, or a part of them. Then both run once more, and go past it. Raises
    CaptureError.
    """
    passed: frozenset[str] = frozenset()
    ran = (0, 0)
    while True:
        both = Both(*programs, options, window, passed, ran)
        report = both.compared(replace(rules, known={}), asked)
        right = both.found_right(report)
        if not right or any(program.why_once for program in programs):
            return report
        passed, ran = passed | right, both.figures.ran


@dataclass(frozen=True)
class Asked:
    """What is asked of a comparison in lockstep. The names are those of `lockstep`."""

    wanted: Wanted
    explain: bool
    calibrate: RunLike | Iterable[RunLike] | None
    prove: bool
    progress: bool


class Both:
    """Both sides of a comparison in lockstep. Used once."""

    def __init__(
        self,
        golden: Program,
        mine: Program,
        options: DumpOptions,
        window: int,
        passed: frozenset[str],
        ran: tuple[int, int],
    ) -> None:
        """``window``: bytes. ``passed``: see `Meeting`. ``ran``: how often both ran before."""
        self._window, self._before = Window(window), ran
        self._acted: dict[int, str] = {}
        self.figures = Lockstep(window, passed=tuple(sorted(passed)))
        self.golden = Side(0, "golden", golden, options, self._window)
        try:
            self.mine = Side(1, "mine", mine, options, self._window)
        except BaseException:
            self.golden.remove()
            raise

    @interrupts.unbroken
    def compared(self, rules: Rules, asked: Asked) -> Report:
        """Run both programs, compare them, and leave nothing running."""
        with ExitStack() as undo:
            undo.callback(self._settle)
            return self._compared(rules, asked)

    @interrupts.let_through
    def _compared(self, rules: Rules, asked: Asked) -> Report:
        passed = frozenset(self.figures.passed)
        meeting = Meeting(self.golden, self.mine, rules, asked.wanted, passed)
        with Stages("running both in lockstep", asked.progress) as stages, collector.paused():
            try:
                meeting.run()
            except BaseException:
                self._settle()
                self.golden.remove()
                self.mine.remove()
                raise
            self._rest()
            figures = self.figures
            figures.met, figures.stopped = meeting.met, meeting.stopped
            figures.unjudged = meeting.unjudged
            figures.grafts, self._acted = meeting.grafts, meeting.acted
            report = self._report(rules, asked, stages)
        self._settle()
        if asked.prove:
            proven(report)
            self._settle()
        report.lockstep = figures
        report.problems += said(figures)
        return report

    def found_right(self, report: Report) -> frozenset[str]:
        """Return the places after which something was done, and where the report finds no error."""
        rows = (d for d in report.differences if d.verdict in ("diverged", EXPECTED))
        wrong = {d.pair.mine.id for d in rows if d.pair.mine is not None}
        found = {place for number, place in self._acted.items() if number in wrong}
        return frozenset(self._acted.values()) - found

    def _report(self, rules: Rules, asked: Asked, stages: Stages) -> Report:
        """Compare both runs as those of dumps are compared."""
        runs = self.golden.opened(), self.mine.opened()
        for side in (self.golden, self.mine):
            if isinstance(side.program, LocalProgram):
                side.remember([("", side.program.model)])
        comparison = Comparison(
            rules.names, rules.limits, self._calibration(runs[0], asked, stages), rules.custom,
            asked.explain, work=self._in_turn,
        )  # fmt: skip
        grafted = frozenset(number for each in self.figures.grafts for number in each.records)
        of_both = Runs(
            *sides(*runs), engine.error, self._finder(runs[1]), self._finder(runs[0]), grafted
        )

        def find(model: torch.nn.Module) -> Finder:
            return self._finder(runs[1], model)

        again = Again(
            *runs, of_both, comparison.step, find, refused=_UNPROVEN if asked.wanted.judges else ""
        )
        # what was measured on the way is of these two runs alone, not of those of a proof
        work = knowing(rules.known, self._in_turn)
        return comparison.report(again, stages=stages, work=work)

    def _calibration(self, golden: Run, asked: Asked, stages: Stages) -> Calibration:
        """Calibrate; no program stays halted in a model that runs for that."""
        if asked.calibrate is None:
            return Calibration()
        stages.stage("calibrating")
        self.golden.settled = True
        try:
            return calibrated(golden, asked.calibrate, here=self._in_turn)
        finally:
            self.golden.settled = False

    def _in_turn(
        self, jobs: Sequence[Job], here: Callable[[Job], Outcome]
    ) -> Generator[tuple[int, Outcome], None, None]:
        """Do jobs one by one; in between, programs stay halted where they are."""
        both = self.golden, self.mine
        before = [side.settled for side in both]
        for side in both:
            side.settled = False
        try:
            yield from one_by_one(jobs, here)
        finally:
            for side, settled in zip(both, before, strict=True):
                side.settled = settled
                if settled:
                    side.rest()

    def _finder(self, run: Run, model: object = None) -> Finder:
        """Return the finder of live modules: before one is used, no program is halted in it."""
        found = module_finder(run, model)

        def find(path: str) -> torch.nn.Module | None:
            self._rest()
            return found(path)

        return find

    def _rest(self) -> None:
        for side in (self.golden, self.mine):
            side.rest()

    def _settle(self) -> None:
        """End what runs, and note what it took."""
        self._rest()
        sides_ = self.golden, self.mine
        for side in sides_:
            side.settled = True
        figures = self.figures
        figures.most = self._window.most
        figures.whole = self.golden.whole, self.mine.whole
        figures.ran = self._before[0] + self.golden.ran, self._before[1] + self.mine.ran
        figures.unsteady = sum(side.unsteady for side in sides_)


def said(figures: Lockstep) -> list[str]:
    """Return notes on a comparison in lockstep."""
    golden, mine = figures.ran
    whole = size_text(sum(figures.whole))
    notes = [
        f"in lockstep: at most {size_text(figures.most)} of values were held (window"
        f" {size_text(figures.window)}), where two dumps have {whole}; golden ran"
        f" {count_text(golden, 'time')}, mine {count_text(mine, 'time')}"
    ]
    if figures.stopped:
        notes.append(
            f"both programs were stopped at the first divergence, after {figures.stopped}: what"
            " would have followed is not compared"
        )
    if figures.unjudged:
        notes.append(
            f"stop and graft passed over {count_text(figures.unjudged, 'call')} whose values did"
            f" not fit the window of {size_text(figures.window)} together: give a larger one"
        )
    if figures.grafts:
        first = "; ".join(map(str, figures.grafts[: constants.NAMES_SHOWN]))
        more = len(figures.grafts) - constants.NAMES_SHOWN
        notes.append(
            f"mine went on with golden's value after {count_text(len(figures.grafts), 'call')}:"
            f" {first}{f' and {more:,} more' if more > 0 else ''}"
        )
    if figures.passed:
        first = ", ".join(figures.passed[: constants.NAMES_SHOWN])
        more = len(figures.passed) - constants.NAMES_SHOWN
        notes.append(
            "no stop and no graft at these places, which rightly give other tensors than golden's"
            f" there: {first}{f' and {more:,} more' if more > 0 else ''}"
        )
    if figures.unsteady:
        notes.append(
            f"{count_text(figures.unsteady, 'value')} could not be made again: the program does not"
            " repeat itself (random numbers of its own, or a state that it keeps)"
        )
    return notes


def _wanted(stop: str | None, graft: bool) -> Wanted:
    if stop not in (None, AT_FIRST):
        raise OptionError(f"stop {stop!r}: expected {AT_FIRST!r}, or None to run to the end")
    if stop and graft:
        raise OptionError("stop and graft: a program that is stopped goes on with nothing")
    return Wanted(stop is not None, bool(graft))


def _asked(
    wanted: Wanted,
    explain: bool,
    calibrate: RunLike | Iterable[RunLike] | None,
    prove: bool,
    progress: bool,
) -> Asked:
    """Raises OptionError: what can't be had together."""
    if wanted.judges and calibrate is not None:
        raise OptionError(
            "calibrate: with stop or graft, noise is judged while both programs run, and that of"
            " golden is known only at its end; leave out one of the two, or give limits"
        )
    if wanted.judges and prove:
        raise OptionError(_UNPROVEN)
    return Asked(wanted, explain, calibrate, prove, progress)


def _options(options: DumpKeywords) -> DumpOptions:
    given = [name for name in NOT_HERE if name in options]
    if given:
        raise OptionError(
            f"{given[0]}: not an option of lockstep, which writes no dump and records what runs"
            " eagerly in this process"
        )
    return DumpOptions.of(**{"tokens": EVERY_TOKEN, **options})  # type: ignore[arg-type]


def _check_apart(golden: object, mine: object) -> None:
    """Raise OptionError if two models share a module: each would be recorded into both runs."""
    import torch

    if not isinstance(golden, torch.nn.Module) or not isinstance(mine, torch.nn.Module):
        return
    own = {id(module) for module in mine.modules()}
    shared = next((path for path, part in golden.named_modules() if id(part) in own), None)
    if shared is not None:
        raise OptionError(
            f"golden and mine share the module {shared or '(root)'}: give two models, such as"
            " copy.deepcopy(model); their weights may be shared"
        )
