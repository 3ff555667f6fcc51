"""The use cases of topologies: of a run, or of a file that ATB's tools wrote; as text, as JSON in their places, as an ONNX model."""

from __future__ import annotations

import csv
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path

from llmdebug_nb.app.runs import open_run
from llmdebug_nb.core.errors import CorruptDumpError, DumpWriteError, UnknownRunError
from llmdebug_nb.store.layouts.files import dtype_named
from llmdebug_nb.store.run import Run
from llmdebug_nb.store.topology import dataflow, document, onnx_model
from llmdebug_nb.store.topology.document import Operation, Topology

Table = dict[str, dict[str, str]]  # rows of a table of operations, by their names
_WIDEST = 1 << 24  # characters of a line of it


def topology(
    run: str | os.PathLike[str] | Run, step: int | None = None, *, rank: int | None = None
) -> Topology:
    """Return what calls what in a step of a run (or its name or path), and which tensors go where.

    ``step`` None: the first one recorded. ``rank`` None: the lowest. Print it for the tree; `to_json` gives ATB's JSON.

    Raises:
        TensorLookupError: there is no such step. StoreError: the run can't be opened.
    """
    return dataflow.topology(open_run(run), step, rank=rank)


def write_topology(
    run: str | os.PathLike[str] | Run, folder: str | os.PathLike[str], step: int | None = None
) -> list[Path]:
    """Write the topology of a run in the places of ATB's: ``model/{pid}/{Name}.json`` and ``layer/{pid}/{Name}.json``; return the files.

    Raises what `topology` raises, and DumpWriteError: the folder can't be written to.
    """
    run, written = open_run(run), []
    for process in run.source.processes:
        whole = dataflow.topology(run, step, int(process.get("later", 0)), process["rank"])
        pid = str(process.get("pid", process["rank"]))
        for kind, each in [("model", whole), *(("layer", layer) for layer in whole.layers())]:
            path = Path(folder) / kind / pid / f"{_file_name(each.root.name)}.json"
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(json.dumps(each.to_json(), indent=1) + "\n", encoding="utf-8")
            except OSError as error:
                raise DumpWriteError(
                    f"can't write {path}: {error.strerror or error}; choose another folder"
                ) from None
            written.append(path)
    return written


def to_onnx(
    run: str | os.PathLike[str] | Run,
    path: str | os.PathLike[str],
    level: int = -1,
    step: int | None = None,
) -> Path:
    """Write the topology of a run (or of a file of it, ``X.json``) as an ONNX model to look at (in Netron, say) and return its path.

    ``level``: how deep operations become nodes of their own: 1 layers, 2 what runs in them, …, -1 the innermost, 0 the model as one.
    Domains ``llmdebug.module``, ``llmdebug.api``, ``llmdebug.aten``; weights are inputs without values.

    Raises:
        OptionError: ``level`` makes no sense, or the file can't be written; and what `topology` raises.
    """
    return onnx_model.save(read(run, step), Path(path), level)


def read(what: str | os.PathLike[str] | Run, step: int | None = None) -> Topology:
    """Return the topology of a run, or of a file ``.json``. Raises what `topology` and `read_topology` raise."""
    is_file = isinstance(what, (str, os.PathLike)) and str(what).endswith(".json")
    return read_topology(what) if is_file else topology(what, step)  # type: ignore[arg-type]


def read_topology(path: str | os.PathLike[str], cache: dict[str, Table] | None = None) -> Topology:
    """Read a topology from a JSON file, of ours or of ATB's tools, with the shapes that the table of operations of the same dump knows.

    ``cache``: tables that were read before, by path; give the same one for many files.

    Raises:
        UnknownRunError: there is no such file. CorruptDumpError: it is no topology.
    """
    file = Path(path)
    try:
        if file.stat().st_size > document.LARGEST:
            raise CorruptDumpError(
                f"{file} is no topology: larger than {document.LARGEST >> 20} MiB"
            )
        text = file.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise CorruptDumpError(f"{file} is no topology: no text") from None
    except OSError as error:
        raise UnknownRunError(
            f"can't read the topology {file}: {error.strerror or error}"
        ) from None
    found = document.read(text, file.name)
    for table in _tables(file, {} if cache is None else cache):
        for _, op in found.root.walk():
            _describe(found, op, table.get(op.name, {}))
    return found


def atb_json_to_onnx(
    path: str | os.PathLike[str], model_level: int = -1, cache: dict[str, Table] | None = None
) -> Path:
    """Write a topology that ATB's tools dumped as an ONNX model beside it, ``X.json`` as ``X.onnx``; return its path (msit's function of this name).

    ``model_level``: as ``level`` of `to_onnx`. ``param`` becomes attributes: numbers, flags as 0 and 1, texts as they are, ``a.b`` for what is
    nested. ``cache``: as in `read_topology`.

    Raises:
        OptionError: ``model_level`` makes no sense, or the file can't be written. UnknownRunError, CorruptDumpError: it is no topology.
    """
    return onnx_model.save(read_topology(path, cache), Path(path).with_suffix(".onnx"), model_level)


def _file_name(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9_.#-]", "_", name)[:120].lstrip(".") or "_"


def _tables(file: Path, cache: dict[str, Table]) -> Iterator[Table]:
    """Yield the tables of operations that were dumped with a topology: ``operation_io_tensors/{pid}/*.csv`` beside ``model/{pid}``."""
    file = file.resolve()
    if len(file.parents) < 3:
        return
    top = file.parents[2]
    for each in sorted(
        (top / "operation_io_tensors" / file.parent.name).glob("operation_tensors_*.csv")
    ):
        if top not in each.resolve().parents:
            continue
        if str(each) not in cache:
            cache[str(each)] = _table(each)
        yield cache[str(each)]


def _table(path: Path) -> Table:
    """Read one, columns apart by ``|``; one that can't be read says nothing of any operation."""
    try:
        with open(path, encoding="utf-8", newline="") as lines:
            short = (line[:_WIDEST] for line in lines)
            return {
                str(row.get("OpName")): row
                for row in csv.DictReader(short, delimiter="|", quoting=csv.QUOTE_NONE)
            }
    except (OSError, UnicodeDecodeError, csv.Error):
        return {}


def _describe(found: Topology, op: Operation, row: dict[str, str]) -> None:
    """Take over dtypes and shapes of an operation's tensors, in their order."""
    for names, side in ((op.inputs, "In"), (op.outputs, "Out")):
        dtypes, shapes = (
            str(row.get(f"{side}{what}") or "").split(";") for what in ("DType", "Shape")
        )
        if not len(names) == len(dtypes) == len(shapes):
            continue
        for name, dtype, shape in zip(names, dtypes, shapes, strict=True):
            if re.fullmatch(r"\d{1,18}(,\d{1,18})*", shape):
                found.tensors.setdefault(
                    name, (dtype_named(dtype), tuple(map(int, shape.split(","))))
                )
