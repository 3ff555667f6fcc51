"""The parts of a recording that all its sources of calls share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from llmdebug_nb.capture import setup
from llmdebug_nb.capture.calls import ThreadState
from llmdebug_nb.capture.guard import Guard
from llmdebug_nb.capture.observer import Observer, Outlets, Scope
from llmdebug_nb.capture.recorder import Recorder
from llmdebug_nb.capture.recording_filter import RecordingFilter
from llmdebug_nb.capture.roots import Roots
from llmdebug_nb.capture.sink import Sink
from llmdebug_nb.capture.steps import StepTracker
from llmdebug_nb.core.options import DumpOptions

if TYPE_CHECKING:
    from llmdebug_nb.capture.last_steps import Ring
    from llmdebug_nb.capture.operators.mode_stacks import OperatorModes
    from llmdebug_nb.capture.timing.profiler import Profile


class Parts(NamedTuple):
    """The parts of one recording, each with one job.

    ``recorder``: of the dump. ``reference``: of a second dump, made of the graph of compiled code.
    ``notes``: remarks for the reader of the dump.
    """

    options: DumpOptions
    recorder: Recorder
    reference: Recorder | None
    notes: list[str]
    profile: Profile | None
    guard: Guard
    thread: ThreadState
    steps: StepTracker
    filter: RecordingFilter
    observer: Observer
    roots: Roots
    ring: Ring | None

    @classmethod
    def build(
        cls,
        options: DumpOptions,
        sink: Sink,
        rank: int,
        *,
        restricted: bool,
        operators: bool,
        reference: Sink | None = None,
        recorder: Recorder | None = None,
    ) -> Parts:
        """Make the parts. ``restricted``: only certain models are recorded.

        ``operators``: operators of PyTorch may be observed. ``recorder``: in place of one that
        writes to ``sink``.

        Raises:
            OptionError: the control file can't be read. EmptyDumpError: an operator doesn't exist.
        """
        recorder = recorder or Recorder(sink, options)
        second = Recorder(reference, options) if reference is not None else None
        notes: list[str] = []
        profile = _profile(options, sink, notes) if options.profile else None
        guard = Guard(profile)
        thread = ThreadState()
        steps = StepTracker(options.warmup)
        recorders = [recorder] if second is None else [recorder, second]
        ring = _ring(options, recorders, guard)
        by_hand = None if ring is None else ring.alarms.raise_by_hand
        selected = RecordingFilter(options, rank, steps.round_of, by_hand)
        observer = Observer(
            options, Outlets(recorder, second, profile), thread, guard, selected,
            Scope(restricted, operators),
        )  # fmt: skip
        if operators and options.operator_levels:
            observer.modes = _modes(observer, options)
        sinks = [each.sink for each in recorders]
        roots = Roots(options, selected, sinks, counts_all=profile is not None)
        return cls(
            options, recorder, second, notes, profile, guard, thread, steps, selected, observer,
            roots, ring,
        )  # fmt: skip

    @property
    def recorders(self) -> Sequence[Recorder]:
        return [self.recorder] if self.reference is None else [self.recorder, self.reference]

    def closing(self, recorder: Recorder, ended_by: str | None = None) -> dict[str, object]:
        """Return what a dump says at its end. ``ended_by``: name of the error that ended it."""
        problems = self.guard.problems
        if self.filter.problem:
            problems[self.filter.problem] = 1
        failures = [each.values.failure for each in self.recorders if each.values.failure]
        why = ended_by or next((str(error) for error in (*failures, *problems)), None)
        ring = () if self.ring is None else (self.ring,)
        last = (self.observer.names.ids, self.filter.requests, self.recorder.sources, *ring)
        return {
            "complete": why is None,
            "ended_by": why,
            "lost": dict(recorder.values.lost),
            "problems": dict(problems),
            "notes": [*self.notes, *(note for each in last for note in each.notes())],
            "recorded": recorder.records,
            **({} if ring else {"distinct": recorder.values.distinct}),
            "unpaired": self.observer.unpaired,
        }

    def settings(self) -> setup.Facts:
        """Return what the recorded models say of themselves."""
        try:
            return setup.of_models([root.module for root in self.roots])
        except Exception as error:  # the models are the program's: they may raise anything
            kind = type(error).__name__
            self.notes.append(f"the settings of the models could not be read ({kind})")
            return {}

    def commit(self) -> None:
        """Make what a root call recorded part of the dump."""
        if self.observer.player is not None:
            self.observer.player.play_for_owner()
        try:
            calls = self.steps.take()
            for recorder in self.recorders:
                recorder.end_call(calls)
        except BaseException:  # of the program: its handler of a signal, say
            self.steps.take_again()
            raise
        if self.ring is not None:
            self.ring.turn(calls)


# -- parts that few recordings have, loaded only for those -----------------------------------------


def _profile(options: DumpOptions, sink: Sink, notes: list[str]) -> Profile | None:
    from llmdebug_nb.capture.timing.profiler import Profile

    return Profile.of(options, sink, notes)


def _modes(observer: Observer, options: DumpOptions) -> OperatorModes:
    from llmdebug_nb.capture.operators.mode_stacks import OperatorModes

    return OperatorModes(observer, options.operator_levels, options.apis)


def _ring(options: DumpOptions, recorders: Sequence[Recorder], guard: Guard) -> Ring | None:
    if options.last is None:
        return None
    from llmdebug_nb.capture.alarms import Alarms
    from llmdebug_nb.capture.last_steps import Ring

    return Ring(options.last, Alarms(options.alarm, guard.run), recorders, guard.run)
