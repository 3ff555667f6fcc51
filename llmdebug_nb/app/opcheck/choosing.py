"""Which calls of a run are checked: all operators, and modules of which nothing else is known."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from llmdebug_nb.core.errors import OptionError
from llmdebug_nb.core.paths import ancestors, is_operator, matches
from llmdebug_nb.core.records import CallKey
from llmdebug_nb.store.run import Run


@dataclass(frozen=True)
class Call:
    """A call to check. ``record``: id of its first output. ``id``: execution id, "" for none.

    ``parameters``: those that a csv gives for it, JSON, "" for none.
    """

    record: int
    key: CallKey
    op: str
    id: str = ""
    parameters: str = ""


@dataclass(frozen=True)
class Choice:
    """Calls that are wanted; empty parts want all.

    ``ids``: execution ids; calls inside such a call too. ``names``: parts of operators' names.
    ``paths``: globs of paths; what is in such a module too.
    """

    ids: tuple[str, ...] = ()
    names: tuple[str, ...] = ()
    paths: tuple[str, ...] = ()

    @classmethod
    def of(
        cls,
        ids: str | Iterable[str] | None = None,
        names: str | Iterable[str] | None = None,
        paths: str | Iterable[str] | None = None,
    ) -> Choice:
        """Read options, each a list or a text with commas. Raises OptionError."""
        wanted = cls(_parts(ids), tuple(n.lower() for n in _parts(names)), _parts(paths))
        for each in wanted.ids:
            if not re.fullmatch(r"\d+(_\d+)*(\.\d+)?", each):
                raise OptionError(f"ids: {each!r} is no execution id, such as 3_1 or 3_1.4")
        return wanted

    def has(self, call: Call) -> bool:
        if self.ids and not any(
            re.fullmatch(rf"{re.escape(one)}([._].*)?", call.id) for one in self.ids
        ):
            return False
        if self.names and not any(name in call.op.lower() for name in self.names):
            return False
        return not self.paths or any(any(matches(glob, call.key.path)) for glob in self.paths)

    def __str__(self) -> str:
        parts = {"the id": self.ids, "a name with": self.names, "a path like": self.paths}
        return ", and ".join(f"{what} {' or '.join(each)}" for what, each in parts.items() if each)


def _parts(value: str | Iterable[str] | None) -> tuple[str, ...]:
    if value is None:
        return ()
    texts = [value] if isinstance(value, str) else list(value)
    return tuple(part for text in texts for part in re.split(r"[,\s]+", str(text)) if part)


def calls_of(run: Run, choice: Choice) -> list[Call]:
    """Return the calls to check, in execution order.

    A module is one if none of its operators and modules was recorded in that step and phase.
    """
    first: dict[CallKey, tuple[int, str]] = {}
    for record in run.records(role="output"):
        first.setdefault(record.site.key, (record.id, record.op))
    around = {(key[:4], above) for key in first for above in ancestors(key.path)}
    ids = _Ids(run)
    found = [
        Call(record, key, op, ids.of(key))
        for key, (record, op) in first.items()
        if is_operator(key.path) or (key[:4], key.path) not in around
    ]
    return [call for call in found if choice.has(call)]


class _Ids:
    """The execution ids of a run, read step by step."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._steps: dict[tuple[int, int, int], dict[tuple[str, int], str]] = {}

    def of(self, key: CallKey) -> str:
        if key.phase != "forward":
            return ""
        step = key.rank, key.generation, key.step
        if step not in self._steps:
            self._steps[step] = self._run.ids(key.step, key.generation, key.rank)
        return self._steps[step].get((key.path, key.call), "")
