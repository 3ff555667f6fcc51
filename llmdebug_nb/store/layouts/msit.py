"""msit torch dumps (msit 8.2 ``llm/dump/torch_dump``): one ``.pth`` per tensor.

Folders are named by module:

    msit_dump_{time}/tensor_analyze.csv             figures of each tensor, beside its values
    msit_dump_{time}/torch_tensors/{device}_{pid}/
        model_tree.json                             names and classes of the modules
        weights/root.{parameter}.pth
        {token}/root.{module}/{input|output}[_i[_j]].pth, statistics.csv

The order of execution is not recorded. So records follow the module tree: the inputs of a module,
its children, its outputs. A repeated call within a token has overwritten the earlier call's files.
"""

from __future__ import annotations

import csv
import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from llmdebug_nb.core.errors import CorruptDumpError
from llmdebug_nb.core.printable import cell, file_part
from llmdebug_nb.core.records import Node, Record, Site, Summary
from llmdebug_nb.store.layouts.contents import Contents
from llmdebug_nb.store.layouts.drafts import (
    Draft,
    Place,
    contents,
    holds,
    listing,
    missing,
    moment,
)
from llmdebug_nb.store.layouts.files import (
    Folder,
    dtype_named,
    natural,
    number,
    read_csv,
    read_json,
    sizes,
)
from llmdebug_nb.store.layouts.pickled import read_tensor
from llmdebug_nb.store.layouts.writing import Dump, Written, kept, later, loaded

NAME = "msit-torch"

# older dumps (ait) name the device by its number alone: 0_77
_PROCESS = r"(?P<base>(?:[^/]+/)*?)(?:(?P<process>(?:[A-Za-z][^/]*|[0-9]+)_[0-9]+)/)?"
_MODULE = _PROCESS + r"(?:(?P<token>[0-9]{1,9})/)?root(?:\.(?P<module>[^/]+))?/"
_TENSOR = re.compile(_MODULE + r"(?P<role>input|output)(?P<slot>(?:_[0-9]+)*)\.pth")
_TABLE = re.compile(_MODULE + r"statistics\.csv")
_WEIGHT = re.compile(_PROCESS + r"weights/root\.(?P<weight>[^/]+)\.pth")
_TREE = re.compile(_PROCESS + r"model_tree\.json")
_COLUMNS = (
    "NodeName",
    "NodeType",
    "InputOutput",
    "Index",
    "DataType",
    "Shape",
    "Max",
    "Min",
    "Mean",
    "L2Norm",
)
ANALYSIS = "tensor_analyze.csv"
ANALYSIS_COLUMNS = (
    "Node Name", "Node Type", "Tensor Path", "dtype", "shape", "max", "min", "variance", "mean",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class _File:
    """A file of the dump, and the parts of its name."""

    name: str
    kind: re.Pattern[str]
    parts: dict[str, str | None]

    @property
    def folder(self) -> str:
        return self.name.rpartition("/")[0]

    @property
    def process(self) -> str:
        return self.parts["process"] or ""

    @property
    def step(self) -> int:
        return int(self.parts.get("token") or 0)

    @property
    def module(self) -> str:
        return self.parts.get("module") or ""


def _named(folder: Folder, name: str) -> _File | None:
    for kind in (_TENSOR, _TABLE, _WEIGHT, _TREE):
        found = kind.fullmatch(folder.context + name)
        # the token and the process may be named by the folder that was opened, the module may not
        if found and ("/" in name or kind is _TREE):
            return _File(name, kind, found.groupdict())
    return None


def detect(path: Path, names: Sequence[str]) -> bool:
    """Tell whether ``path`` is a dump, its ``torch_tensors``, a process in it, or one token."""
    return holds(path, names, _named)


def read(path: Path) -> Contents:
    """Read an msit 8.2 torch dump. Steps are tokens; processes are numbered as ranks, by name.

    Raises:
        CorruptDumpError: no file can be read. Otherwise such files become records with the reason.
        NotADumpError: it holds several dumps.
    """
    folder = Folder(path)
    found = listing(NAME, folder, _named, lambda file: file.parts["base"] or "")
    files, unread = found.files, found.unread
    ranks = {
        process: rank
        for rank, process in enumerate(sorted({file.process for file in files}, key=natural))
    }
    types: dict[str, str] = {}
    for file in (file for file in files if file.kind is _TREE):
        try:
            types = {**_tree(folder, file.name), **types}
        except CorruptDumpError as error:
            unread.append(missing(file.name, error, rank=ranks[file.process]))
    kept = {(file.folder, file.parts["role"]) for file in files if file.kind is _TENSOR}
    drafts = [
        draft for file in files for draft in _drafts(folder, file, ranks[file.process], types, kept)
    ]
    order = {module: position for position, module in enumerate(types)}
    drafts.sort(key=lambda draft: _moment(draft, order))
    return contents(
        folder,
        [*unread, *drafts],
        lambda place: read_tensor(folder, place.file),
        types=types,
        tokens=True,
    )


def _moment(draft: Draft, order: dict[str, int]) -> tuple[object, ...]:
    site = draft.site
    when = (site.rank, site.role != "weight", site.step)
    return (*when, moment(site.path, site.role == "output", order), site.call, natural(site.slot))


def _tree(folder: Folder, name: str) -> dict[str, str]:
    """Return class names by module path, parents first, of a tree of name, type and children."""
    types: dict[str, str] = {}
    stack = [read_json(folder, name)]
    while stack:
        node = stack.pop()
        children = node.get("children", []) if isinstance(node, dict) else None
        if not isinstance(children, list) or not all(
            isinstance(node.get(key), str) for key in ("name", "type")
        ):
            raise CorruptDumpError(f"{name} is not a module tree: a node is {str(node)[:80]!r}")
        types[node["name"].removeprefix("root").removeprefix(".")] = node["type"]
        stack += reversed(children)
    return types


def _drafts(
    folder: Folder,
    file: _File,
    rank: int,
    types: dict[str, str],
    kept: set[tuple[str, str | None]],
) -> Iterator[Draft]:
    """Yield the records of a file. ``kept``: the folders and roles that have tensors."""
    device = re.sub(r"^([a-z]+)([0-9]+)_[0-9]+$", r"\1:\2", file.process).partition("_")[0] or "cpu"
    if file.kind is _WEIGHT:
        owner, _, name = (file.parts["weight"] or "").rpartition(".")
        site = Site(owner, role="weight", slot=name, rank=rank)
        yield Draft(site, types.get(owner, ""), Place(file.name), device=device)
    elif file.kind is _TENSOR:
        path, op = _path(file.module, types)
        slot = (file.parts["slot"] or "_0")[1:].replace("_", ".")
        site = Site(path, file.step, role=file.parts["role"] or "", slot=slot, rank=rank)
        yield Draft(site, op, Place(file.name), device=device)
    elif file.kind is _TABLE:
        yield from _table(folder, file, rank, types, kept, device)


def _path(module: str, types: dict[str, str]) -> tuple[str, str]:
    """Return path and class of a folder's module or API; the tree tells them apart."""
    owner, _, api = module.rpartition(".")
    if module not in types and owner in types and api.isidentifier():
        return f"{owner}/{api}" if owner else api, api
    return module, types.get(module, "")


def _table(
    folder: Folder,
    file: _File,
    rank: int,
    types: dict[str, str],
    kept: set[tuple[str, str | None]],
    device: str,
) -> Iterator[Draft]:
    """Yield the rows of a statistics table, except for roles whose tensors are in the dump.

    The index is only the last one of a nested output, so an index that comes twice may belong to
    another call or to another part of the output.
    """
    path, op = _path(file.module, types)
    seen: Counter[tuple[str, str]] = Counter()
    try:
        rows = read_csv(folder, file.name, _COLUMNS)
    except CorruptDumpError as error:
        yield missing(file.name, error, file.step, rank)
        return
    for row in rows:
        role, index = row["InputOutput"].lower(), row["Index"]
        if (file.folder, role) in kept:
            continue
        site = Site(path, file.step, seen[role, index], role=role, slot=index, rank=rank)
        seen[role, index] += 1
        try:
            if role not in ("input", "output") or not row["L2Norm"]:
                raise CorruptDumpError("a row is cut short")
            low, high, mean, norm = (
                number(row[column]) for column in ("Min", "Max", "Mean", "L2Norm")
            )
            summary = Summary(
                dtype_named(row["DataType"]), sizes(row["Shape"]), low, high, mean, norm
            )
            yield Draft(site, op or row["NodeType"], summary=summary, device=device)
        except CorruptDumpError as error:
            yield Draft(site, op or row["NodeType"], lost=f"{file.name}: {error}", device=device)


# -- writing --------------------------------------------------------------------------------------


def write(dump: Dump, folder: Path, written: Written) -> None:
    """Write tensors as ``.pth``, statistics without values as tables, and the model tree.

    ``tensor_analyze.csv`` has the figures of all inputs and outputs.

    A rank takes the place of the process. An operator has no prefix in msit:
    ``mlp/Functional.linear`` becomes ``root.mlp.linear``.
    """
    devices: dict[int, str] = {}
    for record in dump.records:
        device = re.sub("[^A-Za-z0-9]", "", record.device.lower()) or "cpu"
        devices.setdefault(record.site.rank, f"{device}_{record.site.rank}")
    homes = {rank: folder / "torch_tensors" / name for rank, name in devices.items()}
    tables: dict[Path, list[Record]] = defaultdict(list)
    analysed: list[list[object]] = []
    alone = Counter(record.site.key for record in dump.records if record.site.role == "output")
    for record in kept(dump, written, _no_place):
        site = record.site
        if record.payload is None:
            tables[homes[site.rank] / _folder_name(site)].append(record)
            analysed.append(analysis_row(record, ""))
            continue
        bare = site.role == "output" and site.slot == "0" and alone[site.key] == 1
        file = homes[site.rank] / f"{_file_name(site, bare)}.pth"
        if file.exists():
            written.left_out["of operators whose name another one has in its module"] += 1
        elif (values := loaded(record, dump.load, written)) is not None:
            file.parent.mkdir(parents=True, exist_ok=True)
            torch.save(values.clone(), file)
            written.tensors += 1
            if site.role != "weight":
                analysed.append(analysis_row(record, str(file)))
    for table, records in tables.items():
        _write_rows(table / "statistics.csv", _COLUMNS, _statistics(table.name, records))
        written.described += len(records)
    if analysed:
        _write_rows(folder / ANALYSIS, ANALYSIS_COLUMNS, analysed)
    for home in homes.values():
        if home.exists() and dump.nodes:
            text = json.dumps(_tree_of(dump.nodes), indent=2)
            (home / "model_tree.json").write_text(text, encoding="utf-8")


def _no_place(record: Record) -> str | None:
    """Return why msit has no file for a record, or None."""
    site = record.site
    weight = site.role == "weight" and site.phase == "forward"
    parts = (site.path, site.slot) if weight else (_module_name(site),)
    if why := later(site):
        return why
    if site.phase != "forward":
        return "of backward passes, which msit does not record"
    if site.call:
        return "of further calls in a token, which overwrite the first in msit"
    if not weight and not re.fullmatch(r"[0-9]+(\.[0-9]+)*", site.slot):
        return "of arguments and results with names, which msit does not record"
    if any(part != file_part(part) for part in parts if part):
        return "whose path is no name of a file"
    if weight and record.payload is None:
        return "of weights without values"
    return None


def _module_name(site: Site) -> str:
    module, _, operator = site.path.partition("/")
    bare = operator.rpartition("/")[2].partition(".")[2] or operator
    return f"{module}.{bare}".strip(".") if operator else module


def _folder_name(site: Site) -> str:
    name = _module_name(site)
    return f"{site.step}/root.{name}" if name else f"{site.step}/root"


def _file_name(site: Site, bare: bool) -> str:
    if site.role == "weight":
        return "weights/root." + (f"{site.path}.{site.slot}" if site.path else site.slot)
    slot = "" if bare else f"_{site.slot.replace('.', '_')}"
    return f"{_folder_name(site)}/{site.role}{slot}"


def _write_rows(file: Path, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    with open(file, "w", newline="", encoding="utf-8") as stream:
        table = csv.writer(stream)
        table.writerow(columns)
        table.writerows(rows)


def _statistics(name: str, records: Iterable[Record]) -> Iterator[list[object]]:
    """Yield the rows of a module's statistics; ``name``: of its folder."""
    for record in records:
        s, site = record.summary, record.site
        row = (
            name, record.op, site.role.capitalize(), site.slot.rpartition(".")[2],
            f"torch.{s.dtype}", _size(s), s.max, s.min, s.mean, s.l2norm,
        )  # fmt: skip
        yield list(map(cell, row))


def _size(summary: Summary) -> str:
    return f"torch.Size({list(summary.shape)})"


def analysis_row(record: Record, where: str) -> list[object]:
    """Return a tensor's row in msit's ``tensor_analyze.csv``; ``where``: how its values are read.

    The variance is a sample's (`torch.var`), computed from norm and mean.
    """
    s, count, variance = record.summary, record.summary.numel, None
    if s.l2norm is not None and s.mean is not None and count > 1:
        variance = max(s.l2norm * s.l2norm - count * s.mean * s.mean, 0.0) / (count - 1)
    name = f"root.{record.site.path}" if record.site.path else "root"
    row = (name, record.op, where, f"torch.{s.dtype}", _size(s), s.max, s.min, variance, s.mean)
    return list(map(cell, row))


def _tree_of(nodes: Sequence[Node]) -> dict[str, object]:
    """Return the tree as msit writes it: name, type and children of each module."""
    made: list[dict[str, object]] = []
    children: list[list[object]] = []
    for node in nodes:
        children.append([])
        name = f"root.{node.path}" if node.path else "root"
        made.append({"name": name, "type": node.type, "children": children[-1]})
        if 0 <= node.parent < len(made) - 1:
            children[node.parent].append(made[-1])
        elif len(made) > 1:
            children[0].append(made[-1])
    return made[0]
