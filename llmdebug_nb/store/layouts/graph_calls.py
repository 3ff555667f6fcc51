"""What the dumps of torchair share: where a file lies, and the calls of a graph in order."""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from llmdebug_nb.core.paths import is_operator
from llmdebug_nb.core.printable import file_part
from llmdebug_nb.core.records import CallKey, Record
from llmdebug_nb.store.layouts.drafts import Draft
from llmdebug_nb.store.layouts.files import natural
from llmdebug_nb.store.layouts.writing import Dump, Written

DIRECTIONS = {"input": "INPUT", "output": "OUTPUT"}
_RANK = re.compile(r"worldsize[0-9]+_global_rank([0-9]{1,9})")
_NUMBER = re.compile(r"[0-9]{1,9}")


@dataclass(frozen=True, slots=True)
class At:
    """What the folders of a file say. ``base``: those around the dump; ``rank``: None: not said."""

    base: str
    rank: int | None
    model: str
    token: int


@functools.lru_cache(1024)  # the files of a token lie in one folder
def place_of(home: tuple[str, ...], depth: int = 2) -> At:
    """Read the folders of a file: the last is the token, the first of the last ``depth`` the model.

    What is missing is 0, None or empty.
    """
    token = int(home[-1]) if home and _NUMBER.fullmatch(home[-1]) else 0
    model = ".".join(home[-depth:-1]) if len(home) >= depth else ""
    found = [(number, _RANK.fullmatch(part)) for number, part in enumerate(home)]
    ranks = [(number, int(match[1])) for number, match in found if match]
    if not ranks:
        return At("", None, model, token)
    number, rank = ranks[-1]
    return At("".join(f"{part}/" for part in home[:number]), rank, model, token)


def placed(drafts: Iterable[tuple[int, Draft]]) -> list[Draft]:
    """Return drafts in the order of execution; those at one site become calls by their times."""
    ordered = sorted(drafts, key=lambda each: (each[0], natural(each[1].site.slot)))
    seen: Counter[object] = Counter()
    numbered: list[tuple[int, Draft]] = []
    for time, draft in ordered:
        call = seen[draft.site]
        seen[draft.site] += 1
        if call:
            draft = replace(draft, site=replace(draft.site, call=call))
        numbered.append((time, draft))
    begun: dict[CallKey, int] = {}
    for time, draft in numbered:
        begun.setdefault(draft.site.key, time)
    return [
        draft
        for _, draft in sorted(numbered, key=lambda each: _moment(each[1], begun[each[1].site.key]))
    ]


def _moment(draft: Draft, begun: int) -> tuple[object, ...]:
    site = draft.site
    when = (site.rank, site.step, begun, natural(site.path), site.call)
    return (*when, site.role == "output", natural(site.slot))


@dataclass(frozen=True)
class GraphCall:
    """A call to write. ``fx``: the stem of its files, ``mm-aten.mm.default``. ``time``: in µs."""

    records: list[Record]
    fx: str
    time: int

    @property
    def step(self) -> int:
        return self.records[0].site.step

    @property
    def rank(self) -> int:
        return self.records[0].site.rank

    def numbered(self) -> Iterator[tuple[tuple[str, int], Record]]:
        """Yield its records, each with its role and its number in it."""
        counts: Counter[str] = Counter()
        for record in self.records:
            role = record.site.role
            yield (role, counts[role]), record
            counts[role] += 1


def calls_of(dump: Dump, written: Written) -> Iterator[GraphCall]:
    """Yield the calls of a run of compiled code; what is no node of its graph is left out."""
    by_call: dict[CallKey, list[Record]] = {}  # a kernel's calls run together: records are mixed
    for record in dump.records:
        if is_operator(record.site.path) and record.site.role in DIRECTIONS:
            by_call.setdefault(record.site.key, []).append(record)
        else:
            written.left_out["that are no inputs or outputs of operators"] += 1
    for number, group in enumerate(by_call.values()):
        node = dump.names(group[0])
        if node is None:
            written.left_out["of operators that are no node of the graph"] += len(group)
            continue
        fx = f"{file_part(node)}-{file_part(_aten(group[0].op))}"
        yield GraphCall(group, fx, int(dump.begun * 1e6) + number)


def whole(record: Record) -> bool:
    """Tell whether all values of a record are there; else its figures are what can be written."""
    return record.payload is not None and record.kept is None


def figures(record: Record, written: Written) -> list[float] | None:
    """Return minimum and maximum, as a reduced file has them; None, and counted, without them."""
    low, high = record.summary.min, record.summary.max
    if low is None or high is None:
        why = record.lost or "that have neither values nor a minimum and maximum"
        written.left_out[why] += 1
        return None
    written.described += 1
    return [low, high]


def _aten(op: str) -> str:
    """Return ``aten.mm.default`` for ``Aten.mm``."""
    bare = op.removeprefix("Aten.") if op.startswith("Aten.") else op
    return f"aten.{bare}" if "." in bare else f"aten.{bare}.default"
