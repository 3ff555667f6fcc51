"""The session of an error check: it shows all calls to a checker and stores nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from torch import nn

from llmdebug_nb.capture.errcheck.calls import CallFacts
from llmdebug_nb.capture.errcheck.checker import Checker
from llmdebug_nb.capture.errcheck.optimizers import OptimizerSteps
from llmdebug_nb.capture.errcheck.origins import Origin
from llmdebug_nb.capture.root_finder import Describe
from llmdebug_nb.capture.session import EagerModules, Session
from llmdebug_nb.capture.session_parts import Parts
from llmdebug_nb.capture.sink import NoSink
from llmdebug_nb.core.faults import ProcessCheck
from llmdebug_nb.core.options import EVERY_TOKEN, DumpOptions


class Checks(NamedTuple):
    """What is checked: ``types`` of faults, in calls of which ``mode``; see `Checker`."""

    types: tuple[str, ...]
    mode: str
    keeps_inputs: bool


class CheckSession:
    """Checks the given models, or all code of PyTorch that runs. ``session``: what hooks them."""

    def __init__(
        self,
        models: Sequence[nn.Module],
        checks: Checks,
        on_fault: Callable[[Origin], None],
        describe: Describe,
        rank: int,
    ) -> None:
        """Make it for `Checker`'s arguments. Raises CaptureError: a model can't be followed."""
        options = DumpOptions.of(
            mode=checks.mode, tokens=EVERY_TOKEN, stats_only=True, sources=False, force_eager=True
        )
        sink = NoSink()
        self._rank = rank
        self._checker = Checker(sink, options, checks.types, checks.keeps_inputs, on_fault)
        self._parts = parts = Parts.build(
            options, sink, rank, restricted=bool(models), operators=True, recorder=self._checker
        )
        self._checker.attach(CallFacts(parts.thread, parts.steps, parts.roots))
        source = EagerModules(parts, models, describe, any_model=not models)
        self.session = Session(parts, source)
        self._optimizers = OptimizerSteps(
            parts.thread, parts.guard.run, self._checker, options.records_modules
        )

    def start(self) -> None:
        self.session.start()
        self._optimizers.start()

    def stop(self, at_end: bool) -> None:
        """Take every hook off. ``at_end``: the program has ended; what it holds is its result."""
        self._optimizers.stop()
        self.session.stop()
        if at_end:
            self._checker.finish()

    def abandon(self) -> None:
        """Take every hook off, as in a forked child."""
        self._optimizers.stop()
        self.session.abandon()

    def result(self, pid: int, ended_by: str | None) -> ProcessCheck:
        """Return what was found so far."""
        calls, problems = len(self._parts.steps.calls), self._parts.guard.problems
        return self._checker.result(self._rank, pid, ended_by, calls, problems)
