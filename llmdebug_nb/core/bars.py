"""Progress of long work: bars that appear when it lasts, and leave nothing behind.

A notebook has bars of its own (`use`): those of tqdm are widgets, which a saved notebook shows as
errors.
"""

from __future__ import annotations

import contextvars
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from types import TracebackType
from typing import TYPE_CHECKING, TypeVar

from llmdebug_nb.core import constants

if TYPE_CHECKING:
    from tqdm import tqdm

_UNCOUNTED = "{desc} [{elapsed}]"
_T = TypeVar("_T")
_kind: Callable[..., tqdm[object]] | None = None
_current: contextvars.ContextVar[Stages | None] = contextvars.ContextVar("stages", default=None)


def use(kind: Callable[..., tqdm[object]] | None) -> None:
    """Make bars of this kind from now on; None: those of ``tqdm.auto``."""
    global _kind
    _kind = kind


def progress_bar(
    items: Iterable[_T] | None = None,
    *,
    desc: str,
    unit: str,
    total: int | None = None,
    shown: bool = True,
    delay: float | None = None,
) -> tqdm[_T]:
    """Return a bar of tqdm around ``items``.

    It appears after ``delay`` seconds; None: after `constants.PROGRESS_AFTER`.
    """
    after = constants.PROGRESS_AFTER if delay is None else delay
    made: tqdm[_T] = _made(items, desc=desc, unit=unit, total=total, delay=after, shown=shown)
    return made


def _made(*args: object, shown: bool, **how: object) -> tqdm:  # type: ignore[type-arg]
    from tqdm.auto import tqdm

    if not shown:  # otherwise $TQDM_DISABLE decides
        how["disable"] = True
    return (_kind or tqdm)(*args, leave=False, **how)  # type: ignore[arg-type]


class Stages:
    """One bar for the stages of a long work, in a ``with`` block.

    A thread draws it, so that it appears in time and goes on whatever the stage does. Inside
    another such block there is only the bar of that one.
    """

    def __init__(self, first: str, shown: bool = True) -> None:
        self._known = ""
        self.stage(first)
        self._shown = shown
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None  # none if another block draws, or nothing does
        self._outer = _current.get()

    def __enter__(self) -> Stages:
        if self._outer is not None:
            self._outer.stage(self._stage)
            return self._outer
        if self._shown:
            self._token = _current.set(self)
            draw = contextvars.copy_context().run  # a notebook's cell is part of the context
            self._thread = threading.Thread(target=draw, args=(self._draw,), daemon=True)
            self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._thread is None:
            return
        _current.reset(self._token)
        self._ended.set()
        self._thread.join()

    def stage(self, what: str, total: int | None = None, unit: str = "") -> None:
        """Begin the next stage, of ``total`` units if that is known."""
        self._stage, self._done, self._total, self._unit = what, 0, total, unit
        self._began = time.time()

    def say(self, what: str) -> None:
        """Show what is known by now, before the stage, from now on."""
        self._known = f"{what} … "

    def over(self, items: Collection[_T], what: str, unit: str) -> Iterator[_T]:
        """Yield the items of a stage, and count them."""
        self.stage(what, len(items), unit)
        for item in items:
            yield item
            self.advance()

    def advance(self) -> None:
        """Count one more unit of the stage."""
        self._done += 1

    def _draw(self) -> None:
        shown: tqdm[object] | None = None
        wait = constants.PROGRESS_AFTER
        while not self._ended.wait(wait):
            wait = constants.PROGRESS_EVERY
            if shown is None:
                shown = _made(desc=self._known + self._stage, bar_format=_UNCOUNTED, shown=True)
            shown.unit, shown.total, shown.n = self._unit, self._total, self._done
            shown.start_t = self._began
            shown.bar_format = None if self._total else _UNCOUNTED
            shown.set_description_str(self._known + self._stage)
        if shown is not None:
            shown.close()
