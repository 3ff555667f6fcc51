"""What other recordings of golden tell of its noise, and what a report says of its limits."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from llmdebug_nb.comparison.differences import Difference
from llmdebug_nb.comparison.limits import Limits
from llmdebug_nb.comparison.measured import Measured, scale_of
from llmdebug_nb.core import constants
from llmdebug_nb.core.records import Record, Site

SAYS = "Limits: what the rounding of each call and the noise of its inputs explain"


@dataclass
class Calibration:
    """The differences between golden and other recordings of it.

    ``runs``: their names. ``rounded``: the measured pairs of golden and of its model with another
    rounding: these tell how much each call amplifies.
    """

    runs: list[str] = field(default_factory=list)
    rounded: list[Sequence[Measured]] = field(default_factory=list)
    # id of golden's record, or its place in any step -> largest error and scale error
    _spread: dict[object, tuple[float, float]] = field(default_factory=dict)

    def add(self, name: str, measured: Sequence[Measured]) -> None:
        self.runs.append(name)
        for m in (each.at_tokens for each in measured):
            golden = m.pair.golden
            if golden is None or (m.metrics is None and not m.certain):
                continue
            for key in (golden.id, _place(golden.site)):
                error, scale = self._spread.get(key, (0.0, 0.0))
                self._spread[key] = max(error, m.error), max(scale, scale_of(m.metrics or {}))

    def limits(self, golden: Record) -> tuple[float, float]:
        """Return the limits of error and scale error; 0 if nothing is known of the tensor.

        Those of the record count, else those of its place in other steps.
        """
        if not self._spread:
            return 0.0, 0.0
        of_record = self._spread.get(golden.id)
        error, scale = of_record or self._spread.get(_place(golden.site), (0.0, 0.0))
        return constants.CALIBRATED * error, constants.CALIBRATED * scale


def _place(site: Site) -> tuple[object, ...]:
    return site.rank, site.path, site.phase, site.role, site.slot


def says(limits: Limits | None, calibration: Calibration, differences: Iterable[Difference]) -> str:
    """Return a sentence on the origin of the limits."""
    text = SAYS
    if calibration.runs:
        text += f"; calibrated with {', '.join(calibration.runs)} "
        text += f"({constants.CALIBRATED:g} times its difference from golden, where that is more)"
    elif not calibration.rounded:
        text += ", not calibrated to this model: calibrate= takes another recording of golden"
    if calibration.rounded:
        text += "; calibrated with golden's model, which ran again with another rounding"
    if limits is None:
        return text
    fixed = sum(limits.fixes(d.pair, d.metrics) for d in differences)
    return f"{text}; fixed by {limits.says} for {fixed:,} rows"
