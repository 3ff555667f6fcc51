"""Topologies, the call trees of runs and of ATB's dumps: as text, as JSON, as ONNX models."""

from __future__ import annotations

import csv
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path

from llmdebug_nb.app.runs import open_run
from llmdebug_nb.core.errors import CorruptDumpError, UnknownRunError, saving
from llmdebug_nb.core.printable import file_part
from llmdebug_nb.core.urls import on_this_machine
from llmdebug_nb.store.layouts.files import dtype_named
from llmdebug_nb.store.run import Run
from llmdebug_nb.store.topology import dataflow, document, onnx_model
from llmdebug_nb.store.topology.document import Operation, Topology

Table = dict[str, dict[str, str]]  # rows of a table of operations, by name
_WIDEST = 1 << 24  # characters that are read of a line in it


def topology(
    run: str | os.PathLike[str] | Run, step: int | None = None, *, rank: int | None = None
) -> Topology:
    """Return the calls of a step of a run (or its name or path), and the tensors between them.

    Print it for the tree; its method ``to_json`` gives ATB's JSON.

    Args:
        run: the run.
        step: default: the first one recorded.
        rank: default: the lowest.

    Raises:
        TensorLookupError: no such step.
        StoreError: the run can't be opened.
    """
    return dataflow.topology(open_run(run), step, rank=rank)


def write_topology(
    run: str | os.PathLike[str] | Run, folder: str | os.PathLike[str], step: int | None = None
) -> list[Path]:
    """Write the topology of a run where ATB's tools write theirs; return the files.

    They are ``model/{pid}/{Name}.json`` and ``layer/{pid}/{Name}.json``.

    Raises:
        TensorLookupError, StoreError: as `topology`.
        DumpWriteError: the folder can't be written.
    """
    run, written = open_run(run), []
    for process in run.source.processes:
        whole = dataflow.topology(run, step, int(process.get("later", 0)), process["rank"])
        pid = str(process.get("pid", process["rank"]))
        for kind, each in [("model", whole), *(("layer", layer) for layer in whole.layers())]:
            path = on_this_machine(folder) / kind / pid / f"{file_part(each.root.name)}.json"
            with saving(path, "; choose another folder"):
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(json.dumps(each.to_json(), indent=1) + "\n", encoding="utf-8")
            written.append(path)
    return written


def to_onnx(
    run: str | os.PathLike[str] | Run,
    path: str | os.PathLike[str],
    level: int = -1,
    step: int | None = None,
) -> Path:
    """Write a topology as an ONNX model to look at, in Netron for example; return its path.

    Node domains are ``llmdebug.module``, ``llmdebug.api`` and ``llmdebug.aten``. Weights are
    inputs without values.

    Args:
        run: a run, its name or path, or a topology in a file ``X.json``.
        path: the file.
        level: the depth of the operations that become nodes: 0 the model as one node, 1 layers,
            2 the calls in them, …, -1 the innermost.
        step: default: the first one recorded.

    Raises:
        OptionError: an invalid ``level``, or the file can't be written.
        TensorLookupError, StoreError: as `topology`.
    """
    return onnx_model.save(read(run, step), on_this_machine(path), level)


def read(what: str | os.PathLike[str] | Run, step: int | None = None) -> Topology:
    """Return the topology of a run, or of a ``.json`` file.

    Raises what `topology` and `read_topology` raise.
    """
    if not isinstance(what, Run) and str(what).endswith(".json"):
        return read_topology(what)
    return topology(what, step)


def read_topology(path: str | os.PathLike[str], cache: dict[str, Table] | None = None) -> Topology:
    """Read a topology from a JSON file, our own or of ATB's tools.

    Shapes come from the dump's tables of operations, if it has any. ``cache``: the tables read so
    far, by path; pass the same one for many files.

    Raises:
        UnknownRunError: no such file.
        CorruptDumpError: the file is not a topology.
    """
    file = Path(path)
    try:
        if file.stat().st_size > document.LARGEST:
            raise CorruptDumpError(
                f"{file} is not a topology: larger than {document.LARGEST >> 20} MiB"
            )
        text = file.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise CorruptDumpError(f"{file} is not a topology: not a text file") from None
    except OSError as error:
        raise UnknownRunError(
            f"can't read the topology {file}: {error.strerror or error}"
        ) from None
    topology = document.read(text, file.name)
    for table in _tables(file, {} if cache is None else cache):
        for _, op in topology.root.walk():
            _add_shapes(topology, op, table.get(op.name, {}))
    return topology


def atb_json_to_onnx(
    path: str | os.PathLike[str], model_level: int = -1, cache: dict[str, Table] | None = None
) -> Path:
    """Write the ATB topology ``X.json`` as the ONNX model ``X.onnx`` beside it; return its path.

    It is msit's function of this name. ``param`` becomes attributes: numbers, flags as 0 and 1,
    texts, and ``a.b`` for nested ones.

    Args:
        path: the topology.
        model_level: as ``level`` of `to_onnx`.
        cache: as in `read_topology`.

    Raises:
        OptionError: an invalid ``model_level``, or the file can't be written.
        UnknownRunError, CorruptDumpError: as `read_topology`.
    """
    return onnx_model.save(
        read_topology(path, cache), on_this_machine(path).with_suffix(".onnx"), model_level
    )


def _tables(file: Path, cache: dict[str, Table]) -> Iterator[Table]:
    """Yield the tables of operations of a topology's dump.

    They are ``operation_io_tensors/{pid}/*.csv`` beside ``model/{pid}``.
    """
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
    """Read a table whose columns are separated by ``|``; an unreadable one counts as empty."""
    try:
        with open(path, encoding="utf-8", newline="") as lines:
            short = (line[:_WIDEST] for line in lines)
            return {
                str(row.get("OpName")): row
                for row in csv.DictReader(short, delimiter="|", quoting=csv.QUOTE_NONE)
            }
    except (OSError, UnicodeDecodeError, csv.Error):
        return {}


def _add_shapes(topology: Topology, op: Operation, row: dict[str, str]) -> None:
    """Add the dtypes and shapes of an operation's tensors, which are in the same order."""
    for names, side in ((op.inputs, "In"), (op.outputs, "Out")):
        dtypes, shapes = (
            str(row.get(f"{side}{what}") or "").split(";") for what in ("DType", "Shape")
        )
        if not len(names) == len(dtypes) == len(shapes):
            continue
        for name, dtype, shape in zip(names, dtypes, shapes, strict=True):
            if re.fullmatch(r"\d{1,18}(,\d{1,18})*", shape):
                sizes = tuple(map(int, shape.split(",")))
                topology.tensors.setdefault(name, (dtype_named(dtype), sizes))
