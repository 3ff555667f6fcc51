"""Drafts of records, as the readers of foreign layouts find them, and their conversion."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import torch

from llmdebug_nb.core.bars import progress_bar
from llmdebug_nb.core.errors import CorruptDumpError, NotADumpError
from llmdebug_nb.core.kernels.raw import dtype_name, unreadable
from llmdebug_nb.core.kernels.summary import summarize
from llmdebug_nb.core.paths import bounded
from llmdebug_nb.core.records import Node, Record, RootCall, Site, Summary
from llmdebug_nb.store.layouts.contents import CallStack, Contents
from llmdebug_nb.store.layouts.files import TENSOR_FILES, UNKNOWN, Folder, Unreadable, natural


@dataclass(frozen=True, slots=True)
class Place:
    """The place of a tensor: a file of the folder, and its key or offset in it."""

    file: str
    key: str | int | None = None


@dataclass(frozen=True, slots=True)
class Draft:
    """A record without a number.

    Without a ``summary``, the tensor at ``place`` is read for one, when it is asked for.
    """

    site: Site
    op: str = ""
    place: Place | None = None
    summary: Summary | None = None
    lost: str | None = None
    device: str = "cpu"


def missing(name: str, why: object, step: int = 0, rank: int = 0) -> Draft:
    """Return a draft for a file or folder that can't be read, so that it stays visible."""
    return Draft(Site(name, step, rank=rank), lost=str(why))


def beside(layout: str, names: Iterable[str], read: Iterable[str]) -> dict[str, str]:
    """Return files of tensors that are no part of a layout, with the reason why they are left out.

    ``names``: of all files; ``read``: of those that the layout knows.
    """
    known = set(read)
    return {
        name: f"{name} is no file of layout {layout}, and is left out: open it alone"
        for name in names
        if name.lower().endswith(TENSOR_FILES) and name not in known
    }


class _Named(Protocol):
    @property
    def name(self) -> str: ...


F = TypeVar("F", bound=_Named)


@dataclass(frozen=True, slots=True)
class Listing(Generic[F]):
    """What is in the folder of a dump. ``files``: those of its layout; ``names``: of all.

    ``unread``: of files and folders that are left out, with the reason.
    """

    files: list[F]
    names: list[str]
    unread: list[Draft]


def holds(path: Path, names: Iterable[str], named: Callable[[Folder, str], object]) -> bool:
    """Tell whether a path is a folder with files of a layout. ``names``: of all that are in it."""
    if not path.is_dir():
        return False
    folder = Folder(path)
    return any(named(folder, name) for name in names)


def listing(
    layout: str,
    folder: Folder,
    named: Callable[[Folder, str], F | None],
    base: Callable[[F], str],
) -> Listing[F]:
    """List the folder of one dump. ``base(file)``: the folders around the dump.

    Raises:
        NotADumpError: it holds several dumps.
    """
    names, left_out = folder.walk()
    files = [file for name in names if (file := named(folder, name))]
    one_dump(folder, map(base, files))
    left_out |= beside(layout, names, (file.name for file in files))
    return Listing(files, names, [missing(name, why) for name, why in left_out.items()])


def moment(path: str, leaving: bool, order: Mapping[str, int] | None = None) -> tuple[Any, ...]:
    """Return a sort key of nested execution: a module's inputs, its children, then its outputs.

    ``order``: the positions of known paths; other paths follow by name.
    """
    order = order or {}
    path = bounded(path)
    parts = path.replace("/", ".").split(".") if path else []
    prefixes = [".".join(parts[:depth]) for depth in range(1, len(parts) + 1)]
    keys = (
        (1, order.get(prefix, len(order)), natural(part))
        for prefix, part in zip(prefixes, parts, strict=True)
    )
    return (*keys, (2,) if leaving else (0,))


def one_dump(folder: Folder, bases: Iterable[str]) -> None:
    """Raise NotADumpError if files come from several dumps: they would look like ranks of one."""
    found = sorted({base.removeprefix(folder.context).rstrip("/") for base in bases}, key=natural)
    if len(found) > 1:
        raise NotADumpError(
            f"{folder.path} holds {len(found)} dumps: open one of {', '.join(found[:8])}"
        )


def tree_of(types: Mapping[str, str]) -> list[Node]:
    """Return the module tree over dotted paths; an ancestor without a type gets an empty one."""
    nodes: list[Node] = []
    index: dict[str, int] = {}
    for path in types:
        parts = path.split(".") if path else []
        parent = -1
        for depth in range(len(parts) + 1):
            prefix = ".".join(parts[:depth])
            if prefix not in index:
                index[prefix] = len(nodes)
                name = parts[depth - 1] if depth else ""
                nodes.append(Node(prefix, name, types.get(prefix, ""), parent))
            parent = index[prefix]
    return nodes


def contents(
    folder: Folder,
    drafts: Sequence[Draft],
    open_: Callable[[Place], torch.Tensor],
    *,
    types: Mapping[str, str] | None = None,
    tokens: bool = False,
    meta: dict[str, Any] | None = None,
    stacks: Iterable[CallStack] = (),
) -> Contents:
    """Return the drafts as numbered records, in their order.

    ``open_(place)`` reads a tensor; of those without a summary, only as many are read as it takes
    to find one that can be. ``tokens``: a step is a generated token (prefill first). ``types``:
    class names by module path.

    Raises:
        CorruptDumpError: nothing is known about any tensor.
    """
    made: dict[Place, int] = {}
    records = [_record(number, draft, made) for number, draft in enumerate(drafts)]
    describe = functools.partial(_described, _Described(open_))
    _check_some_known(folder, records, describe)
    return Contents(
        records,
        list(_calls(records, tokens)),
        tree_of({_text(path): kind for path, kind in (types or {}).items()}),
        lambda record: open_(record.payload),
        meta or {},
        unread=frozenset(record.id for record in records if _is_unread(record)),
        describe=describe,
        stacks=[replace(s, key=s.key._replace(path=_text(s.key.path))) for s in stacks],
    )


def _calls(records: Iterable[Record], tokens: bool) -> Iterator[RootCall]:
    """Yield a root call for each step."""
    steps = {(r.site.generation, r.site.step) for r in records if r.site.role != "weight"}
    kinds = ("prefill", "decode") if tokens else ("forward", "forward")
    warmups = sorted(key for key in steps if key[0] < 0)
    for index, (generation, step) in enumerate(warmups):
        yield RootCall(index, generation, step, "warmup")
    for generation, step in sorted(steps.difference(warmups)):
        yield RootCall(len(warmups) + step, generation, step, kinds[step > 0])


def _record(number: int, draft: Draft, made: dict[Place, int]) -> Record:
    """Return a draft as a record. ``made``: outputs by place, the producers of inputs there."""
    site, place, producer = draft.site, draft.place, None
    if place is not None and site.role == "input":
        producer = made.get(place)
    elif place is not None and site.role == "output":
        made[place] = number
    path, slot = _text(site.path), _text(site.slot)
    if (path, slot) != (site.path, site.slot):
        site = replace(site, path=path, slot=slot)
    op, summary = _text(draft.op), draft.summary or UNKNOWN
    return Record(number, site, number, op, summary, draft.device, producer, place, draft.lost)


def _is_unread(record: Record) -> bool:
    return record.summary is UNKNOWN and record.payload is not None


class _Described(dict[Place, tuple[Summary, str | None]]):
    """What tensors hold, by place: calls that hand on a tensor name the same one."""

    def __init__(self, open_: Callable[[Place], torch.Tensor]) -> None:
        self._open = open_

    def __missing__(self, place: Place) -> tuple[Summary, str | None]:
        try:
            self[place] = described_as(self._open(place))
        except Unreadable as error:
            self[place] = error.summary, str(error)
        except CorruptDumpError as error:
            self[place] = UNKNOWN, str(error)
        return self[place]


def _described(known: _Described, record: Record) -> Record:
    if not _is_unread(record):
        return record
    summary, lost = known[record.payload]
    return replace(record, summary=summary, lost=lost, payload=None if lost else record.payload)


def _check_some_known(
    folder: Folder, records: Sequence[Record], describe: Callable[[Record], Record]
) -> None:
    """Raise CorruptDumpError if nothing is known about any tensor."""
    if any(record.summary is not UNKNOWN for record in records):
        return
    why = None
    bar = progress_bar(records, desc=f"reading {folder.path.name}", unit="tensor")
    for record in bar:
        described = describe(record)
        if described.summary is not UNKNOWN:
            bar.close()
            return
        why = why or described.lost
    if records:
        raise CorruptDumpError(f"{folder.path}: nothing in it can be read; {why}")


def described_as(tensor: torch.Tensor) -> tuple[Summary, str | None]:
    """Return the statistics of a tensor, and the reason why its values can't be read, or None."""
    why = unreadable(tensor)
    if why is not None:
        return Summary(dtype_name(tensor), tuple(tensor.shape)), why
    return summarize(tensor), None


def _text(name: str) -> str:
    """Return a name that can be stored and shown: names and JSON may hold half surrogate pairs."""
    if not name.isascii():
        name = name.encode("utf-8", "backslashreplace").decode()
    return bounded(name)
