"""What an explorer shows, said from Python: which step, which tensor, which slice of it."""

from __future__ import annotations

from typing import Any, get_args

from llmdebug_nb.core.errors import OptionError, nearest
from llmdebug_nb.core.findings import Difference, Finding
from llmdebug_nb.show import wire

_SIDES = get_args(wire.Tab)


def opening(overview: wire.Overview) -> wire.State:
    """Return the state that an explorer opens in: at the first mismatch, else at the first step that is no warm-up."""
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
    """Return the step to open at: the first with a mismatch, else the first that is no warm-up."""
    steps = overview["steps"]
    for wanted in (
        [step for step in steps if step["bad"]],
        [step for step in steps if step["kind"] != "warmup"],
    ):
        if wanted:
            return steps.index(wanted[0])
    return 0


def state_of(
    view: Any, at: Any = None, step: int | None = None, role: str = "output", side: str | None = None, cut: str | None = None
) -> wire.State:  # fmt: skip
    """Return the state that shows a tensor, or without ``at`` a step. For the arguments see `app.export.export`.

    Raises:
        OptionError: an argument that makes no sense. TensorLookupError: there is no such tensor; says what is there instead.
    """
    overview: wire.Overview = view.overview()
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


def _row(view: Any, at: Any, step: int | None, role: str) -> int:
    if isinstance(at, Finding):
        if at.difference is None:
            raise OptionError(f"at: {at!r} has no tensor that shows it")
        at = at.difference
    if isinstance(at, Difference):
        at = at.index
    if isinstance(at, bool) or not isinstance(at, (int, str)):
        raise OptionError(
            f"at: expected the path of a module, a difference, a finding or a row's number, not {at!r}"
        )
    return at if isinstance(at, int) else int(view.find(at, step, role))


def _position(overview: wire.Overview, step: int) -> int:
    found = [s["index"] for s in overview["steps"] if s["step"] == step and s["generation"] >= 0]
    if not found:
        there = ", ".join(str(s["step"]) for s in overview["steps"][:12] if s["generation"] >= 0)
        raise OptionError(f"step {step} was not recorded; there is {there or 'none'}")
    return found[0]


def _axes(cut: str) -> tuple[list[int], list[int]]:
    """Return row and column axis, and where the others stand, for ``0, 3, :, :``."""
    parts = [part.strip() for part in cut.split(",")]
    try:
        fixed = [0 if part == ":" else int(part) for part in parts]
    except ValueError:
        fixed = [-1]
    shown = [axis for axis, part in enumerate(parts) if part == ":"]
    if len(shown) > 2 or min(fixed) < 0:
        raise OptionError(
            f"slice {cut!r}: expected an index for each axis, and : for rows and columns: 0, 3, :, :"
        )
    return [*[-1] * (2 - len(shown)), *shown], fixed
