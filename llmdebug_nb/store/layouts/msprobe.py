"""msprobe PyTorch dumps (mindstudio-probe 8.3 and 26.2): ``dump.json`` describes every tensor.

    [step{n}/[rank{id}|proc{pid}|rank/]]
        dump.json                       entries by name, in the order of execution
        construct.json                  name -> name of the module it ran in
        dump_tensor_data/{name}.{input|output|parameters}.{slot}.pt

Entries are named ``Module.{path}.{Class}.{forward|backward}.{n}`` and
``{Prefix}.{api}.{n}.{forward|backward}``. The root module itself is never dumped.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from llmdebug_nb.core.errors import CorruptDumpError
from llmdebug_nb.core.records import Site, Summary
from llmdebug_nb.store.layouts.contents import Contents
from llmdebug_nb.store.layouts.files import (
    Draft,
    Folder,
    Place,
    contents,
    dtype_named,
    missing,
    natural,
    number,
    one_dump,
    read_json,
    sizes,
)
from llmdebug_nb.store.layouts.pickled import read_tensor

NAME = "msprobe"

_STEP = r"(?P<base>(?:[^/]+/)*?)(?:step(?P<step>[0-9]{1,9})/)?"
_DUMP = re.compile(_STEP + r"(?:(?P<process>rank[0-9]{0,9}|proc[0-9]+)/)?dump\.json")
_NAME = r"(?:Module|Cell)\.(?P<path>.+)\.(?P<op>[^.]+)\."
_MODULE = re.compile(_NAME + r"(?P<phase>forward|backward)\.(?P<call>[0-9]{1,18})")
_GRADS = re.compile(_NAME + r"parameters_grad(?:\.(?P<call>[0-9]{1,18}))?")
_API = re.compile(r"(?P<op>[^.]+\..+)\.(?P<call>[0-9]{1,18})\.(?P<phase>forward|backward)")
_GROUPS = {
    "input_args": ("input", ""),
    "input": ("input", ""),
    "input_kwargs": ("input", "kwargs."),
    "output": ("output", ""),
    "parameters": ("weight", ""),
}


@dataclass(frozen=True, slots=True)
class _Entry:
    """The parts of an entry's name."""

    path: str
    op: str
    call: int
    phase: str
    kind: str


def _dumps(folder: Folder) -> Iterator[tuple[str, dict[str, str | None]]]:
    for depth in ("", "*/", "*/*/"):
        for file in sorted(
            folder.path.glob(f"{depth}dump.json"), key=lambda file: natural(str(file))
        ):
            name = file.relative_to(folder.path).as_posix()
            if found := _DUMP.fullmatch(folder.context + name):
                yield name, found.groupdict()


def detect(path: Path) -> bool:
    """Tell whether ``path`` is the root, a step or a rank of an msprobe dump."""
    return path.is_dir() and any(True for _ in _dumps(Folder(path)))


def read(path: Path) -> Contents:
    """Read an msprobe dump: task tensor, statistics, md5 or xor.

    Figures are taken from the dump; a tensor is only read if the dump has none for it. An API gets
    the path ``{module}/{Prefix}.{api}``. Its calls are counted anew for each path, because msprobe
    counts them over the whole model.

    Raises:
        CorruptDumpError: no file can be read. Otherwise such files become records with the reason.
        NotADumpError: it holds several dumps.
    """
    folder = Folder(path)
    found = list(_dumps(folder))
    one_dump(folder, (parts["base"] or "" for _, parts in found))
    processes = sorted({parts["process"] or "" for _, parts in found}, key=natural)
    drafts: list[Draft] = []
    types: dict[str, str] = {}
    meta: dict[str, Any] = {}
    for name, parts in found:
        step, process = int(parts["step"] or 0), parts["process"] or ""
        rank = int(process[4:]) if re.fullmatch("rank[0-9]+", process) else processes.index(process)
        try:
            document = read_json(folder, name)
            if not isinstance(document, dict) or not isinstance(document.get("data"), dict):
                raise CorruptDumpError(f'{name} has no object "data"')
        except CorruptDumpError as error:
            drafts.append(missing(name, error, step, rank))
            continue
        meta = {key: str(document.get(key)) for key in ("task", "level", "framework")}
        drafts += _read_one(folder, name, document["data"], types, step, rank)
    return contents(
        folder, drafts, lambda place: read_tensor(folder, place.file), types=types, meta=meta
    )


def _read_one(
    folder: Folder,
    name: str,
    data: dict[str, Any],
    types: dict[str, str],
    step: int,
    rank: int,
) -> Iterator[Draft]:
    """Yield the tensors of one ``dump.json``; add the modules' classes to ``types``."""
    construct: dict[str, Any] = {}
    beside = name.removesuffix("dump.json")
    if (folder.path / f"{beside}construct.json").exists():
        try:
            construct = read_json(folder, f"{beside}construct.json")
            if not isinstance(construct, dict):
                raise CorruptDumpError(f"{beside}construct.json is not an object")
        except CorruptDumpError as error:
            construct = {}
            yield missing(f"{beside}construct.json", error, step, rank)
    for key, entry in _entries(data, construct).items():
        if entry.kind == "module":
            types.setdefault(entry.path, entry.op)
        at = Site(entry.path, step, entry.call, entry.phase, rank=rank)
        if not isinstance(data[key], dict):
            yield Draft(at, entry.op, lost=f"{name}: {key} is not an object")
            continue
        for group, value in data[key].items():
            usual = ("weight" if entry.kind == "grads" else "output", f"{group}.")
            role, prefix = usual if entry.kind == "grads" else _GROUPS.get(group, usual)
            for slot, leaf in _leaves(value, bare=group == "output"):
                slot = f"{prefix}{slot}"
                site = replace(
                    at, role=role, slot=slot.removesuffix(".0") if role == "weight" else slot
                )
                yield _draft(folder, f"{beside}dump_tensor_data/", site, entry.op, leaf)


def _entries(data: dict[str, Any], construct: dict[str, Any]) -> dict[str, _Entry]:
    """Return the parts of all names, with an API's calls counted within its module."""
    owners: dict[str, str] = {}
    entries = {key: _entry(key, construct, owners) for key in data}
    numbers: dict[str, set[int]] = defaultdict(set)
    for entry in entries.values():
        numbers[entry.path].add(entry.call)
    nth = {
        (path, call): nth
        for path, calls in numbers.items()
        for nth, call in enumerate(sorted(calls))
    }
    return {
        key: replace(entry, call=nth[entry.path, entry.call])
        if entry.kind == "api" and "/" in entry.path
        else entry
        for key, entry in entries.items()
    }


def _entry(key: str, construct: dict[str, Any], owners: dict[str, str]) -> _Entry:
    if found := _MODULE.fullmatch(key):
        return _Entry(found["path"], found["op"], int(found["call"]), found["phase"], "module")
    if found := _GRADS.fullmatch(key):
        return _Entry(found["path"], found["op"], int(found["call"] or 0), "backward", "grads")
    if found := _API.fullmatch(key):
        owner = _owner(key, construct, owners)
        path = f"{owner}/{found['op']}" if owner else found["op"]
        return _Entry(path, found["op"], int(found["call"]), found["phase"], "api")
    return _Entry(key, "", 0, "forward", "unknown")


def _owner(key: str, construct: dict[str, Any], known: dict[str, str]) -> str:
    """Return the path of the module that an API ran in; "" for the root or an unknown one.

    ``known``: the answers so far. A chain of APIs, or a circle of them, is walked once.
    """
    way: list[str] = []
    at: Any = key
    while isinstance(at, str) and at not in known:
        known[at] = ""  # until it is found: a circle has none
        way.append(at)
        at = construct.get(at)
        if isinstance(at, str) and (found := _MODULE.fullmatch(at)):
            known[at] = found["path"]
    owner = known.get(at, "") if isinstance(at, str) else ""
    known.update(dict.fromkeys(way, owner))
    return owner


def _leaves(value: object, bare: bool) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the tensors of nested lists and objects with dotted slots; scalars are left out.

    ``bare``: a list of one mapping stands for the mapping; the slots are its keys.
    """
    alone = value[0] if bare and isinstance(value, list) and len(value) == 1 else None
    if isinstance(alone, dict) and not _is_leaf(alone):
        value = alone
    stack: list[tuple[str, object]] = [("", value)]
    while stack:
        slot, item = stack.pop()
        prefix = f"{slot}." if slot else ""
        if isinstance(item, dict) and _is_leaf(item):
            if "shape" in item and "dtype" in item:
                yield slot or "0", item
        elif isinstance(item, dict):
            stack += [(f"{prefix}{key}", child) for key, child in reversed(item.items())]
        elif isinstance(item, list):
            stack += [(f"{prefix}{number}", item[number]) for number in reversed(range(len(item)))]


def _is_leaf(item: dict[str, Any]) -> bool:
    return isinstance(item.get("type"), str)


def _draft(folder: Folder, data_folder: str, site: Site, op: str, leaf: dict[str, Any]) -> Draft:
    """Return the record of one tensor. ``dump_data_dir`` is ignored: files lie beside the JSON."""
    summary = place = lost = None
    try:
        summary = _summary(leaf)
        file = leaf.get("data_name")
        if isinstance(file, str):
            if "/" in file or "\\" in file:
                raise CorruptDumpError(f"data_name {file[:80]!r} is not a plain file name")
            folder.file(data_folder + file)
            place = Place(data_folder + file)
    except CorruptDumpError as error:
        lost = str(error)
    if place and summary and (summary.fingerprint, summary.max, summary.l2norm) == (None,) * 3:
        summary = None  # the dump has the values without figures
    return Draft(site, op, place, summary, lost)


def _summary(leaf: dict[str, Any]) -> Summary:
    low, high, mean, norm = (number(leaf.get(key)) for key in ("Min", "Max", "Mean", "Norm"))
    checksum, fingerprint = leaf.get("md5"), None
    if isinstance(checksum, str) and re.fullmatch(r"[0-9a-fA-F]{8}", checksum):
        fingerprint = f"crc32:{checksum.lower()}"  # called md5 upstream, and is a CRC-32
    elif isinstance(checksum, str) and re.fullmatch(r"-?0x[0-9a-fA-F]{1,16}", checksum):
        # of a 0-d tensor, upstream writes the value itself
        fingerprint = f"xor:{int(checksum, 16) & (1 << 64) - 1:#018x}" if leaf["shape"] else None
    return Summary(
        dtype_named(leaf["dtype"]),
        sizes(leaf["shape"]),
        low,
        high,
        mean,
        norm,
        fingerprint=fingerprint,
    )
