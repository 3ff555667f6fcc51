"""GE dumps of torchair: one file per call of an operator, in the order of their time stamps.

    dynamo_{original|optimized}_{graph}_rank_{R}_pid_{P}_ts_{T}.txt      the graph, protobuf's text
    [worldsize{N}_global_rank{R}/]{time}/{device}/{model}/{model id}/{token}/
        {TYPE}.{NAME}.{task}.{stream}.{time}                            see `ge_file`
        {the same}_min_max.npz                                          reduced: minimum, maximum

An operator becomes one in a module of its name (``MatMul_3/GE.MatMul``). If the graph beside the
dump tells which FX tensor its output is (``_fx_tensor_name``), the module has the name of that
node, as in an FX dump.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from llmdebug_nb.core.errors import CorruptDumpError
from llmdebug_nb.core.printable import file_part
from llmdebug_nb.core.records import IN_KERNEL, Record, Site
from llmdebug_nb.store.layouts import ge_file
from llmdebug_nb.store.layouts.contents import Contents
from llmdebug_nb.store.layouts.drafts import (
    Draft,
    Listing,
    Place,
    contents,
    holds,
    listing,
    missing,
)
from llmdebug_nb.store.layouts.files import TENSOR_FILES, Folder, GivenFile, reading
from llmdebug_nb.store.layouts.fx import figures_of
from llmdebug_nb.store.layouts.graph_calls import (
    GraphCall,
    calls_of,
    figures,
    place_of,
    placed,
    whole,
)
from llmdebug_nb.store.layouts.writing import Dump, Written, loaded

NAME = "ge"
_FILE = re.compile(
    r"(?P<type>[^./]+)\.(?P<op>.+)\.(?P<task>[0-9]{1,20})\.(?P<stream>[0-9]{1,20})"
    r"\.(?P<time>[0-9]{1,20})(?P<reduced>_min_max\.npz)?"
)
_GRAPH = re.compile(r"dynamo_(?P<kind>original|optimized)_[^/]*\.txt")
_AFTER = "that follow one that is left out in a call, whose place they would take"
_DEPTH = 3  # folders from the model to the token: name, id, token
_LONGEST_GRAPH = 64 << 20  # bytes of a graph's text; one of a large model has a tenth
_TOKEN = re.compile(
    r'(?P<block>\w+)\s*:?\s*\{|(?P<close>\})|(?P<key>\w+)\s*:\s*(?:"(?P<text>(?:[^"\\]|\\.)*)"|[^\s{}"]+)'
)


@dataclass(frozen=True, slots=True)
class _File:
    """A file of the dump, and what its name and folders say."""

    name: str
    type: str
    op: str
    time: int
    reduced: bool
    home: tuple[str, ...]


def _named(folder: Folder, name: str) -> _File | None:
    *home, last = (folder.context + name).split("/")
    found = _FILE.fullmatch(last)
    if found is None:
        return None
    reduced = found["reduced"] is not None
    return _File(name, found["type"], found["op"], int(found["time"]), reduced, tuple(home))


def detect(path: Path, names: Sequence[str]) -> bool:
    """Tell whether ``path`` is a GE dump, or a part of one, down to a single file."""
    if path.is_file():
        return _FILE.fullmatch(path.name) is not None and not _is_plain(path)
    return holds(path, names, _named)


def _is_plain(path: Path) -> bool:
    """Tell whether a single file is one of another kind whose name has as many dots."""
    return path.suffix.lower() in TENSOR_FILES and not path.name.endswith("_min_max.npz")


def read(path: Path) -> Contents:
    """Read a GE dump. Steps are tokens; a file that can't be read becomes a record with the reason.

    Raises:
        CorruptDumpError: no file can be read.
        NotADumpError: it holds several dumps.
    """
    if path.is_file():
        folder: Folder = GivenFile(path)
        file = _named(folder, path.name)
        found = Listing([file] if file else [], [path.name], [])
    else:
        folder = Folder(path)
        found = listing(NAME, folder, _named, lambda file: place_of(file.home, _DEPTH).base)
    unread, graph = found.unread, dict[str, str]()
    for name in sorted(found.names, key=lambda name: "optimized" in name):
        if _GRAPH.fullmatch(name.rpartition("/")[2]):
            try:
                graph = {**fx_names(folder, name), **graph}
            except CorruptDumpError as error:
                unread.append(missing(name, error))
    drafts = placed(_drafts(folder, found.files, graph))
    types = {draft.site.path.partition("/")[0]: draft.op for draft in drafts}
    return contents(
        folder, [*unread, *drafts], lambda place: _load(folder, place),
        types=types, tokens=True, meta={"fx_names": graph},
    )  # fmt: skip


def _load(folder: Folder, place: Place) -> ge_file.Tensor:
    role, _, index = str(place.key).partition(" ")
    return ge_file.load(folder, place.file, role, int(index))


def _drafts(
    folder: Folder, files: Iterable[_File], graph: Mapping[str, str]
) -> Iterator[tuple[int, Draft]]:
    """Yield the drafts with their times."""
    files = list(files)
    several = len({place_of(file.home, _DEPTH).model for file in files}) > 1
    devices = sorted({_device(file) for file in files})
    joined = _Joined(graph)
    for file in files:
        at = place_of(file.home, _DEPTH)
        before = f"{at.model}." if several and at.model else ""
        op = f"GE.{file.type}"
        rank = at.rank if at.rank is not None else devices.index(_device(file))
        names = joined.names(file.op)
        sites = {
            role: Site(
                f"{before}{graph.get(name, name).partition('-')[0]}/{op}", at.token, rank=rank
            )
            for role, name in (("input", names[0]), ("output", names[-1]))
        }
        try:
            parts = _figures if file.reduced else _parts
            for draft in parts(folder, file, sites, op):
                yield file.time, draft
        except CorruptDumpError as error:
            yield file.time, Draft(sites["output"], op, lost=str(error), device="npu")


class _Joined:
    """The operators that a fused one was made of: its name is theirs, one after the other.

    The longest name of the graph counts at each place, as torchair has it. A fused operator takes
    what the first of them takes, and gives what the last one gives.
    """

    def __init__(self, graph: Mapping[str, str]) -> None:
        self._graph = graph
        self._lengths = sorted({len(name) for name in graph if name}, reverse=True)

    def names(self, op: str) -> list[str]:
        """Return the names in an operator's name; all of it if it is not made of known ones."""
        names, at = list[str](), 0
        while at < len(op):
            ends = (at + length for length in self._lengths if at + length <= len(op))
            end = next((end for end in ends if op[at:end] in self._graph), None)
            if end is None:
                return [op]
            names.append(op[at:end])
            at = end
        return names or [op]


def _device(file: _File) -> int:
    """Return the number of the device that the folder above the model names; 0 if none does."""
    device = file.home[-_DEPTH - 1] if len(file.home) > _DEPTH else ""
    return int(device) if re.fullmatch("[0-9]{1,9}", device) else 0


def _parts(folder: Folder, file: _File, sites: Mapping[str, Site], op: str) -> Iterator[Draft]:
    for role, index in ge_file.slots(folder, file.name):
        place = Place(file.name, f"{role} {index}")
        yield Draft(_at(sites[role], role, index), op, place, device="npu")


def _figures(folder: Folder, file: _File, sites: Mapping[str, Site], op: str) -> Iterator[Draft]:
    """Yield what a reduced file says: ``inputs`` and ``outputs``, each ``[[min, max], …]``."""
    from llmdebug_nb.store.layouts.plain import arrays

    for key, tensor in arrays(folder, file.name).items():
        if key not in ("inputs", "outputs"):
            raise CorruptDumpError(f"{file.name} holds {key[:40]!r}, not inputs and outputs")
        for index, pair in enumerate(tensor.double().tolist()):
            summary = figures_of(file.name, pair)
            yield Draft(_at(sites[key[:-1]], key[:-1], index), op, summary=summary, device="npu")


def _at(site: Site, role: str, index: int) -> Site:
    return Site(site.path, site.step, role=role, slot=str(index), rank=site.rank)


def fx_names(folder: Folder, name: str) -> dict[str, str]:
    """Return the FX tensor of each operator that a graph's text names, ``mm-aten.mm.default``.

    Raises:
        CorruptDumpError: the text is too long, or its brackets do not match.
    """
    with reading(name):
        file = folder.file(name)
        if file.stat().st_size > _LONGEST_GRAPH:
            raise CorruptDumpError(f"{name} has more than {_LONGEST_GRAPH:,} bytes")
        text = file.read_text("utf-8", "replace")
    found: dict[str, str] = {}
    blocks: list[str] = []
    op = key = ""
    for token in _TOKEN.finditer(text):
        if token["block"]:
            blocks.append(token["block"])
        elif token["close"]:
            if not blocks:
                raise CorruptDumpError(f"{name} closes a bracket too many at {token.start():,}")
            blocks.pop()
        elif token["key"] == "name" and blocks[-1:] == ["op"]:
            op = token["text"] or ""
        elif token["key"] == "key":
            key = token["text"] or ""
        elif token["key"] == "s" and key == "_fx_tensor_name" and op:
            found.setdefault(op, (token["text"] or "").partition(".OUTPUT.")[0])
            key = ""
    return found


# -- writing --------------------------------------------------------------------------------------


def write(dump: Dump, folder: Path, written: Written) -> None:
    """Write the operators of a run of compiled code, and their graph under both of its names.

    Statistics without values become reduced files.
    """
    calls = list(calls_of(dump, written))
    ranks, begun = 1 + max((call.rank for call in calls), default=0), str(int(dump.begun))
    for call in calls:
        rank = folder / f"worldsize{ranks}_global_rank{call.rank}"
        home = rank / begun / str(call.rank) / file_part(dump.model) / "1" / str(call.step)
        if any(map(whole, call.records)):
            _write_call(call, dump, home, written)
        else:
            _write_figures(call, home, written)
    for kind in ("original", "optimized") if written.tensors + written.described else ():
        file = folder / f"dynamo_{kind}_graph_1_rank_0_pid_0_ts_{begun}.txt"
        file.write_text(_graph(calls), encoding="utf-8")


def _write_call(call: GraphCall, dump: Dump, home: Path, written: Written) -> None:
    by_role: dict[str, list[Record]] = {"input": [], "output": []}
    tensors: dict[str, list[ge_file.Tensor]] = {"input": [], "output": []}
    for (role, number), record in call.numbered():
        if number > len(tensors[role]):
            written.left_out[_AFTER] += 1
        elif record.summary.dtype not in ge_file.DTYPE_CODES:
            why = f"of dtype {record.summary.dtype}, which GE dumps do not have"
            written.left_out[why] += 1
        elif (values := loaded(record, dump.load, written)) is not None:
            by_role[role].append(record)
            tensors[role].append(values)
    count = sum(map(len, by_role.values()))
    if not count:
        return
    home.mkdir(parents=True, exist_ok=True)
    outputs = [(tensor, call.fx) for tensor in tensors["output"]]
    content = ge_file.encode(_names(call)[1], tensors["input"], outputs, call.time)
    (home / _file_name(call)).write_bytes(content)
    written.tensors += count


def _write_figures(call: GraphCall, home: Path, written: Written) -> None:
    """Write minimum and maximum of a call's tensors."""
    pairs: dict[str, list[list[float]]] = {"input": [], "output": []}
    for (role, number), record in call.numbered():
        if number > len(pairs[role]):
            written.left_out[_AFTER] += 1
        elif (pair := figures(record, written)) is not None:
            pairs[role].append(pair)
    if any(pairs.values()):
        home.mkdir(parents=True, exist_ok=True)
        inputs, outputs = (np.array(pairs[role]).reshape(-1, 2) for role in ("input", "output"))
        np.savez(home / f"{_file_name(call)}_min_max.npz", inputs=inputs, outputs=outputs)


def _file_name(call: GraphCall) -> str:
    return f"{'.'.join(_names(call))}.{call.time % 100_000}.0.{call.time}"


def _names(call: GraphCall) -> tuple[str, str]:
    """Return type and name of a call, without dots: these separate the parts of a file's name."""
    fused = any(record.site.slot.startswith(IN_KERNEL) for record in call.records)
    kind = call.records[0].op.partition(".")[2] or call.records[0].op
    kind = "AutomaticBufferFusionOp" if fused else kind.replace(".", "_")
    return file_part(kind), call.fx.partition("-")[0].replace(".", "_")


def _graph(calls: list[GraphCall]) -> str:
    """Return the graph as text, with the FX tensor of each output."""
    lines = ["graph {", '  name: "graph_1"']
    for call in {call.fx: call for call in reversed(calls)}.values():
        kind, name = _names(call)
        lines += ["  op {", f'    name: "{name}"', f'    type: "{kind}"']
        for (role, number), _ in call.numbered():
            if role == "output":
                tensor = f"{call.fx}.OUTPUT.{number}"
                attribute = f'attr {{ key: "_fx_tensor_name" value {{ s: "{tensor}" }} }}'
                lines += [f"    output_desc {{ {attribute} }}"]
        lines += ["  }"]
    return "\n".join([*lines, "}", ""])
