"""What is asked for at a moment: what the options say, and in their place what a control file says."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from llmdebug_nb.capture import selection
from llmdebug_nb.capture.control_file import ControlFile, ControlSettings
from llmdebug_nb.core.msit_rounds import Rounds
from llmdebug_nb.core.options import DumpOptions
from llmdebug_nb.core.records import Node, RootCall

_NO_SETTINGS = ControlSettings()


class RecordingFilter:
    """``paused``: nothing is, for now."""

    def __init__(
        self, options: DumpOptions, rank: int, round_of: Callable[[RootCall], int]
    ) -> None:
        """``rank``: of this process. ``round_of(call)``: msit's round of a root call. Raises OptionError: the control file can't be read."""
        self._options, self._rank, self._round_of = options, rank, round_of
        self._control = ControlFile(options.control) if options.control is not None else None
        self.paused = False

    @property
    def may_change(self) -> bool:
        """There is a control file."""
        return self._control is not None

    def changed(self) -> bool:
        """Read the control file again if it was written since; True where something else is asked for now."""
        return self._control is not None and self._control.changed()

    @property
    def trouble(self) -> str | None:
        """Why the last change of the control file was not taken over; None where it was."""
        return self._control.trouble if self._control is not None else None

    @property
    def enabled(self) -> bool:
        return self._orders.enable

    @property
    def rank(self) -> int | None:
        """The rank of this process; None where nothing of it is asked for."""
        ranks = self._orders.ranks or self._options.ranks
        return self._rank if ranks is None or self._rank in ranks else None

    @property
    def last(self) -> int | None:
        """The last step (or round) that may be asked for; None where there is no end."""
        return None if self.may_change else (self._rounds or self._tokens).last  # type: ignore[no-any-return]

    @property
    def calls(self) -> tuple[tuple[str, ...], bool]:
        """Execution ids that are asked for, none for all, and whether what lies below them is."""
        orders = self._orders
        if orders.calls is None:
            return self._options.ids or (), self._options.children
        return orders.calls, orders.children

    def root_call(self, call: RootCall, root: nn.Module | None = None) -> bool:
        """Tell whether a root call is recorded. ``root``: its module; None for a session of ONNX Runtime."""
        return not self.paused and self.step(call) and (root is None or self._device(root))

    def step(self, call: RootCall) -> bool:
        """Tell whether the step of a root call is asked for, in this process."""
        if not self.enabled or self.rank is None:
            return False
        return (
            call.step in self._tokens
            if self._rounds is None
            else self._round_of(call) in self._rounds
        )

    def modules(self, paths: Sequence[str], nodes: Sequence[Node]) -> list[bool]:
        """Tell of each module whether the control file asks for it. ``nodes``: all that are followed."""
        if self._orders.ids is None:
            return [True] * len(paths)
        places = selection.places(nodes)
        return [self._orders.asks_for(path, places.get(path, ())) for path in paths]

    def _device(self, root: nn.Module) -> bool:
        device = self._options.device if self._orders.device is None else self._orders.device
        first = next(root.parameters(), None)
        return not device or first is None or selection.is_device(first.device, device)

    @property
    def _orders(self) -> ControlSettings:
        return self._control.orders if self._control is not None else _NO_SETTINGS

    @property
    def _rounds(self) -> Rounds | None:
        return self._orders.rounds or (None if self._orders.steps else self._options.rounds)

    @property
    def _tokens(self) -> Any:
        return self._orders.steps or self._options.tokens
