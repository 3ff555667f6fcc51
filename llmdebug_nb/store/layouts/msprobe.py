"""msprobe PyTorch dumps (mindstudio-probe 8.3 and 26.2): ``dump.json`` describes every tensor.

    [step{n}/[rank{id}|proc{pid}|rank/]]
        dump.json                       entries by name, in the order of execution
        construct.json                  name -> name of the module it ran in
        stack.json                      see `msprobe_stacks`
        dump_tensor_data/{name}.{input|output|parameters}.{slot}.pt

Entries are named ``Module.{path}.{Class}.{forward|backward}.{n}`` and
``{Prefix}.{api}.{n}.{forward|backward}``. The root module itself is never dumped.
"""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import torch

from llmdebug_nb.core.errors import CorruptDumpError
from llmdebug_nb.core.paths import is_operator, module_of, parent_of
from llmdebug_nb.core.printable import file_part
from llmdebug_nb.core.records import Record, Site, Summary
from llmdebug_nb.store.layouts import msprobe_stacks
from llmdebug_nb.store.layouts.contents import CallStack, Contents
from llmdebug_nb.store.layouts.drafts import Draft, Place, contents, missing, one_dump
from llmdebug_nb.store.layouts.files import Folder, dtype_named, natural, number, read_json, sizes
from llmdebug_nb.store.layouts.pickled import read_tensor
from llmdebug_nb.store.layouts.writing import Dump, Written, kept, later, loaded

NAME = "msprobe"

_STEP = r"(?P<base>(?:[^/]+/)*?)(?:step(?P<step>[0-9]{1,9})/)?"
_DUMP = re.compile(_STEP + r"(?:(?P<process>rank[0-9]{0,9}|proc[0-9]+)/)?dump\.json")
_NAME = r"(?:Module|Cell)\.(?P<path>.+)\.(?P<op>[^.]+)\."
_MODULE = re.compile(_NAME + r"(?P<phase>forward|backward)\.(?P<call>[0-9]{1,18})")
_GRADS = re.compile(_NAME + r"parameters_grad(?:\.(?P<call>[0-9]{1,18}))?")
_API = re.compile(r"(?P<op>[^.]+\..+)\.(?P<call>[0-9]{1,18})\.(?P<phase>forward|backward)")
_Tree: TypeAlias = "dict[str, Any]"  # slots in one another, down to the descriptions of tensors
_IN_FILES = {"input_args": "input", "input_kwargs": "input"}
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


def detect(path: Path, names: Sequence[str]) -> bool:
    """Tell whether ``path`` is the root, a step or a rank of an msprobe dump."""
    context = Folder(path).context if path.is_dir() else ""
    found = (name for name in names if name.endswith("dump.json"))
    return any(_DUMP.fullmatch(context + name) for name in found)


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
    stacks: list[CallStack] = []
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
        drafts += _read_one(folder, name, document["data"], types, stacks, step, rank)
    return contents(
        folder, drafts, lambda place: read_tensor(folder, place.file), types=types, meta=meta,
        stacks=stacks,
    )  # fmt: skip


def _read_one(
    folder: Folder,
    name: str,
    data: dict[str, Any],
    types: dict[str, str],
    stacks: list[CallStack],
    step: int,
    rank: int,
) -> Iterator[Draft]:
    """Yield the tensors of one ``dump.json``.

    The modules' classes are added to ``types``, the lines that led to its calls to ``stacks``.
    """
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
    lines: dict[str, msprobe_stacks.Lines] = {}
    try:
        if (folder.path / f"{beside}{msprobe_stacks.FILE}").exists():
            lines = msprobe_stacks.read(folder, f"{beside}{msprobe_stacks.FILE}")
    except CorruptDumpError as error:
        yield missing(f"{beside}{msprobe_stacks.FILE}", error, step, rank)
    for key, entry in _entries(data, construct).items():
        if entry.kind == "module":
            types.setdefault(entry.path, entry.op)
        at = Site(entry.path, step, entry.call, entry.phase, rank=rank)
        if key in lines:
            level = "module" if entry.kind == "module" else "api"
            stacks.append(CallStack(at.key, entry.op, level, lines[key]))
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


# -- writing --------------------------------------------------------------------------------------


def write(dump: Dump, folder: Path, written: Written) -> None:
    """Write the documents and a ``.pt`` per tensor for each step and rank.

    ``stack.json`` is there for a run that knows its lines.

    msprobe counts the calls of an API over the whole step; so does this. It never has the root
    module itself, nor weights of a module that was not called.
    """
    types = {node.path: node.type for node in dump.nodes}
    types |= {r.site.path: r.op for r in dump.records if not is_operator(r.site.path) and r.op}
    steps: dict[tuple[int, int], _Step] = {}
    for record in kept(dump, written, _no_place):
        site = record.site
        if (site.step, site.rank) not in steps:
            home = folder / f"step{site.step}" / f"rank{site.rank}"
            steps[site.step, site.rank] = _Step(home, types)
        steps[site.step, site.rank].add(record, dump, written)
    for step in steps.values():
        step.finish()


def _no_place(record: Record) -> str | None:
    """Return why msprobe has no entry for a record, or None."""
    site = record.site
    if site.path == "":
        return "of the root module, which msprobe does not record"
    if not is_operator(site.path) and (not record.op or "." in record.op):
        return "of modules without the name of a class"
    if is_operator(site.path) and "." not in site.path.partition("/")[2]:
        return "of operators without a prefix"
    return later(site)


class _Step:
    """The entries of one step and rank."""

    def __init__(self, home: Path, types: Mapping[str, str]) -> None:
        self._home, self._types = home, types
        self._entries: dict[str, dict[str, _Tree]] = {}
        self._construct: dict[str, str | None] = {}
        self._numbers: dict[tuple[str, str, int], int] = {}
        self._counts: Counter[str] = Counter()
        self._names: set[str] = set()
        self._stacks: dict[str, msprobe_stacks.Lines] = {}
        self._valued = False

    def add(self, record: Record, dump: Dump, written: Written) -> None:
        """Add a tensor to the entry of its call."""
        entry, group, slot = self._place(record)
        leaf = _leaf_of(record)
        values = None if record.payload is None else loaded(record, dump.load, written)
        if record.payload is not None and values is None:
            return
        if entry not in self._entries and (lines := dump.stack(record.site.key)):
            self._stacks[entry] = tuple(lines)
        tree = self._entries.setdefault(entry, {}).setdefault(group, {})
        if not _put(tree, slot.split("."), leaf):
            written.left_out["whose place is one of other tensors"] += 1
            return
        if values is None:
            written.described += 1
            return
        leaf["data_name"] = name = self._file_name(f"{entry}.{_IN_FILES.get(group, group)}.{slot}")
        file = self._home / "dump_tensor_data" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        torch.save(values.clone(), file)
        self._valued = True
        written.tensors += 1

    def _place(self, record: Record) -> tuple[str, str, str]:
        """Return the name of a tensor's entry, the group in it, and the place in the group."""
        site, owner = record.site, module_of(record.site.path)
        if is_operator(site.path):
            name = site.path.partition("/")[2]
            key = (site.path, name, site.call)
            if key not in self._numbers:
                self._numbers[key] = self._counts[name]
                self._counts[name] += 1
            entry = f"{name}.{self._numbers[key]}.{site.phase}"
        elif site.role == "grad" or (site.role == "weight" and site.phase == "backward"):
            entry = f"Module.{site.path}.{record.op}.parameters_grad.{site.call}"
            return entry, site.slot.partition(".")[0], "0"
        else:
            entry = f"Module.{site.path}.{record.op}.{site.phase}.{site.call}"
            owner = parent_of(owner)
        while owner and owner not in self._types:
            owner = parent_of(owner)
        around = f"Module.{owner}.{self._types[owner]}.{site.phase}.0" if owner else None
        self._construct.setdefault(entry, around)
        if site.role == "weight":
            return entry, "parameters", f"{site.slot}.0"
        if site.role == "input" and site.phase == "forward":
            named = site.slot.removeprefix("kwargs.")
            return entry, "input_args" if named == site.slot else "input_kwargs", named
        return entry, site.role, site.slot

    def _file_name(self, wanted: str) -> str:
        name = f"{wanted}.pt"
        if name != file_part(name) or name in self._names:
            name = f"{file_part(wanted)[:100]}.{len(self._names)}.pt"
        self._names.add(name)
        return name

    def finish(self) -> None:
        """Write the documents."""
        data = {
            name: {group: _listed(tree, group) for group, tree in groups.items()}
            for name, groups in self._entries.items()
        }
        task, files = "tensor" if self._valued else "statistics", self._home / "dump_tensor_data"
        document = {
            "task": task, "level": "mix", "framework": "pytorch",
            "dump_data_dir": str(files), "data": data,
        }  # fmt: skip
        documents = {"dump.json": document, "construct.json": self._construct}
        if self._stacks:
            documents[msprobe_stacks.FILE] = msprobe_stacks.document_of(self._stacks)
        self._home.mkdir(parents=True, exist_ok=True)
        for name, content in documents.items():
            (self._home / name).write_text(json.dumps(content, indent=1), "utf-8")


def _leaf_of(record: Record) -> dict[str, object]:
    s = record.summary
    leaf: dict[str, object] = {
        "type": "torch.Tensor", "dtype": f"torch.{s.dtype}", "shape": list(s.shape),
        "Max": s.max, "Min": s.min, "Mean": s.mean, "Norm": s.l2norm, "requires_grad": False,
    }  # fmt: skip
    algorithm, _, value = (s.fingerprint or "").partition(":")
    return {**leaf, "md5": value} if algorithm in ("crc32", "xor") else leaf


def _put(tree: _Tree, keys: list[str], leaf: dict[str, object]) -> bool:
    """Put a tensor at its place in nested mappings; False if another thing is there."""
    for key in keys[:-1]:
        inner = tree.setdefault(key, {})
        if not isinstance(inner, dict) or _is_leaf(inner):
            return False
        tree = inner
    return tree.setdefault(keys[-1], leaf) is leaf


def _listed(tree: object, group: str = "") -> object:
    """Return nested mappings with lists in place of those whose keys are numbers."""
    if not isinstance(tree, dict) or _is_leaf(tree):
        return tree
    made = {key: _listed(child) for key, child in tree.items()}
    if not all(re.fullmatch("0|[1-9][0-9]{0,3}", key) for key in made):
        return [made] if group == "output" else made
    if group == "input_kwargs":
        return made
    nothing = {"type": "NoneType", "value": None}
    return [made.get(str(number), nothing) for number in range(max(map(int, made), default=-1) + 1)]
