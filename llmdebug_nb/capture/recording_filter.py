"""Selects the root calls and modules to record now: by the options, then by the control file."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import nn

from llmdebug_nb.capture import selection
from llmdebug_nb.capture.control_file import ControlFile, ControlSettings
from llmdebug_nb.capture.request_filter import RequestFilter
from llmdebug_nb.core.msit_rounds import Rounds
from llmdebug_nb.core.option_parsing import TokenSet
from llmdebug_nb.core.options import DumpOptions
from llmdebug_nb.core.records import DUMMY, Node, RootCall

_NO_SETTINGS = ControlSettings()


class RecordingFilter:
    """Selects root calls and modules.

    ``paused``: it selects no root call for now. ``requests``: by the requests that engines compute.
    """

    def __init__(
        self,
        options: DumpOptions,
        rank: int,
        round_of: Callable[[RootCall], int],
        alarm: Callable[[str], None] | None,
    ) -> None:
        """``rank``: of this process. ``round_of(call)``: msit's round of a root call.

        ``alarm(reason)`` keeps the last steps; None: the recording keeps all of them.

        Raises OptionError: the control file can't be read.
        """
        self._options, self._rank, self._round_of, self._alarm = options, rank, round_of, alarm
        self._control = ControlFile(options.control) if options.control is not None else None
        self.requests = RequestFilter(options.requests)
        self.paused = False

    @property
    def may_change(self) -> bool:
        """Whether there is a control file."""
        return self._control is not None

    def changed(self) -> bool:
        """Read the control file again if it was written; return whether its settings changed.

        A new alarm in it is raised.
        """
        before = self._settings.alarm
        if self._control is None or not self._control.changed():
            return False
        reason = self._settings.alarm
        if reason and reason != before:
            if self._alarm is not None:
                self._alarm(reason)
            else:
                self._control.refuse("an alarm keeps the last steps: record with last=8")
        return True

    @property
    def problem(self) -> str | None:
        """Why the last change of the control file was not taken over, or None."""
        return self._control.problem if self._control is not None else None

    @property
    def enabled(self) -> bool:
        return self._settings.enable

    @property
    def rank(self) -> int | None:
        """The rank of this process, or None if nothing of it is selected."""
        ranks = self._settings.ranks or self._options.ranks
        return self._rank if ranks is None or self._rank in ranks else None

    @property
    def last(self) -> int | None:
        """The last step (or round) that may be selected, or None if there is no end."""
        if self.may_change or self.requests.is_on:
            return None
        return (self._rounds or self._steps).last

    @property
    def calls(self) -> tuple[tuple[str, ...], bool]:
        """The execution ids selected (empty: all), and whether calls inside of them are too."""
        settings = self._settings
        if settings.calls is None:
            return self._options.ids or (), self._options.children
        return settings.calls, settings.children

    def selects(self, call: RootCall, root: nn.Module | None = None) -> bool:
        """Return whether a root call is recorded. ``root``: its module; None for a graph."""
        return not self.paused and self.selects_step(call) and (root is None or self._on(root))

    def selects_step(self, call: RootCall) -> bool:
        """Return whether the step of a root call is selected in this process."""
        if not self.enabled or self.rank is None or call.kind == DUMMY:
            return False
        if call.step % self._options.every:
            return False
        if self.requests.is_on:
            return self.requests.selects(call, self._steps)
        if self._rounds is None:
            return call.step in self._steps
        return self._round_of(call) in self._rounds

    @property
    def no_request(self) -> str | None:
        """Why no step of the requests was recorded; None if all requests are."""
        return self.requests.why_none(self._steps) if self.requests.is_on else None

    def selected_modules(self, paths: Sequence[str], nodes: Sequence[Node]) -> list[bool]:
        """Return for each path whether the control file, or ``children``, selects that module.

        ``nodes``: all modules that are followed.
        """
        ids, children = self.calls
        layers = None if ids or children else selection.outermost(nodes)
        by_control = self._settings.ids is not None
        places = selection.places(nodes) if by_control else {}
        return [
            (layers is None or path in layers)
            and (not by_control or self._settings.selects(path, places.get(path, ())))
            for path in paths
        ]

    def _on(self, root: nn.Module) -> bool:
        """Return whether a root is on the selected device."""
        settings = self._settings
        device = self._options.device if settings.device is None else settings.device
        first = next(root.parameters(), None)
        return not device or first is None or selection.is_device(first.device, device)

    @property
    def _settings(self) -> ControlSettings:
        return self._control.settings if self._control is not None else _NO_SETTINGS

    @property
    def _rounds(self) -> Rounds | None:
        return self._settings.rounds or (None if self._settings.steps else self._options.rounds)

    @property
    def _steps(self) -> TokenSet:
        steps: TokenSet = self._settings.steps or self._options.tokens
        return steps
