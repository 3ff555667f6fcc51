"""The state of an explorer, set from Python: a step, a tensor, a slice of it."""

from __future__ import annotations

from typing import get_args

from llmdebug_nb.comparison.differences import Difference
from llmdebug_nb.core.errors import OptionError, nearest
from llmdebug_nb.findings.finding import Finding
from llmdebug_nb.show import wire
from llmdebug_nb.show.view_data import ViewData

_SIDES = get_args(wire.Tab)
Place = str | int | Difference | Finding  # the path of a module, a row's number, or a row


def opening(overview: wire.Overview) -> wire.State:
    """Return the first state: at the first mismatch, else after the warm-up steps."""
    return {
        "position": first_stop(overview),
        "selected": overview["first_bad"],
        "path": "",
        "mismatch": False,
        "text": "",
        "which": "difference",
        "axes": [],
        "fixed": [],
    }


def first_stop(overview: wire.Overview) -> int:
    """Return the first step with a mismatch, else the first one after the warm-up."""
    steps = overview["steps"]
    for wanted in (
        [step for step in steps if step["bad"]],
        [step for step in steps if step["kind"] != "warmup"],
    ):
        if wanted:
            return steps.index(wanted[0])
    return 0


def state_of(
    view: ViewData,
    at: Place | None = None,
    step: int | None = None,
    role: str = "output",
    side: str | None = None,
    cut: str | None = None,
) -> wire.State:
    """Return the state that shows a tensor, or without ``at`` a step.

    For the arguments see `llmdebug_nb.export`.

    Raises:
        OptionError: an argument makes no sense.
        TensorLookupError: there is no such tensor; the message names the recorded ones.
    """
    overview = view.overview()
    state = opening(overview)
    if side is not None:
        if side not in _SIDES:
            raise OptionError(
                f"side {side!r}: expected one of {', '.join(_SIDES)}{nearest(side, _SIDES)}"
            )
        state["which"] = side  # type: ignore[typeddict-item]
    elif overview["kind"] == "report":
        state["which"] = "all"
    if cut is not None:
        state["axes"], state["fixed"] = _axes(cut)
    if at is not None:
        state["selected"] = _row(view, at, step, role)
        state["position"] = view.detail({"op": "detail", "row": state["selected"]})["row"]["step"]
    elif step is not None:
        state["position"], state["selected"] = _position(overview, step), -1
    return state


def _row(view: ViewData, at: Place, step: int | None, role: str) -> int:
    if isinstance(at, Finding):
        if at.difference is None:
            raise OptionError(f"at: the finding {at!r} has no tensor to show")
        at = at.difference
    if isinstance(at, Difference):
        at = at.index
    if isinstance(at, bool) or not isinstance(at, (int, str)):
        raise OptionError(
            "at: expected the path of a module, a difference, a finding or the number of a row, "
            f"not {at!r}"
        )
    return at if isinstance(at, int) else view.find(at, step, role)


def _position(overview: wire.Overview, step: int) -> int:
    steps = [one for one in overview["steps"] if one["generation"] >= 0]
    for one in steps:
        if one["step"] == step:
            return one["index"]
    known = ", ".join(str(one["step"]) for one in steps[:12])
    raise OptionError(f"step {step} was not recorded; there is {known or 'none'}")


def _axes(cut: str) -> tuple[list[int], list[int]]:
    """Return row and column axis, and the index on every axis, for a slice like ``0, 3, :, :``."""
    parts = [part.strip() for part in cut.split(",")]
    try:
        fixed = [0 if part == ":" else int(part) for part in parts]
    except ValueError:
        fixed = [-1]
    shown = [axis for axis, part in enumerate(parts) if part == ":"]
    if len(shown) > 2 or min(fixed) < 0:
        raise OptionError(
            f"slice {cut!r}: expected an index for each axis and : for rows and columns, "
            "as in 0, 3, :, :"
        )
    return [*[-1] * (2 - len(shown)), *shown], fixed
