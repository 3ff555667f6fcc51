"""Writing a run of compiled code as torchair's dumps, for the tools that read those.

    fx      worldsizeN_global_rankR/MODEL/TOKEN/NODE-aten.OP.OVERLOAD.OUTPUT.0.TIME.npy
    fx-old  data_dump/TOKEN+1/gm_TIME_dump/
    ge      [worldsizeN_global_rankR/]TIME/DEVICE/MODEL/ID/TOKEN/TYPE.NAME.TASK.STREAM.TIME

FX has a file for each tensor. GE has a file for each call: a length (uint64), a message
``toolkit.dumpdata.DumpData``, and the bytes of inputs and outputs. The GE graph lies beside it as
text; it names the FX tensor of each output (``_fx_tensor_name``).

The message is encoded here by hand: it takes three functions of four lines, fewer than a protobuf
descriptor, and keeps protobuf optional.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from llmdebug_nb.core.errors import StoreError, TensorLookupError
from llmdebug_nb.core.kernels.raw import array_of, to_bytes
from llmdebug_nb.core.paths import is_operator
from llmdebug_nb.core.printable import file_part
from llmdebug_nb.core.records import IN_KERNEL, CallKey, Record

if TYPE_CHECKING:
    import torch

Load = Callable[[Record], "torch.Tensor"]
LAYOUTS = ("fx", "fx-old", "ge")
# of toolkit.dumpdata.OutputDataType
_TYPES = {
    "float32": 1, "float16": 2, "int8": 3, "uint8": 4, "int16": 5, "uint16": 6, "int32": 7,
    "int64": 8, "uint32": 9, "uint64": 10, "bool": 11, "float64": 12, "complex64": 16,
    "complex128": 17, "bfloat16": 27, "float8_e5m2": 34, "float8_e4m3fn": 35,
}  # fmt: skip
_ND = 2  # the format of row-major tensors
_DIRECTIONS = {"input": "INPUT", "output": "OUTPUT"}


@dataclass
class Written:
    """``tensors``: the number written. ``left_out``: the numbers left out, by reason."""

    folder: Path
    tensors: int = 0
    left_out: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True)
class _Call:
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


def write(
    records: Iterable[Record],
    load: Load,
    names: Callable[[Record], str | None],
    folder: Path,
    layout: str,
    model: str,
    begun: float,
) -> Written:
    """Write the operators of a run to a new folder.

    ``names(record)``: its node in the graph. ``begun``: when the run began, in seconds since 1970.

    Raises:
        StoreError: the folder is not empty, can't be written to, or nothing can be written to it.
    """
    written = Written(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise StoreError(
                f"{folder} is not empty: name a new folder, so that no two dumps are mixed up"
            )
        calls = list(_calls(records, names, int(begun * 1e6)))
        ranks = 1 + max((call.rank for call in calls), default=0)
        model = file_part(model)
        for call in calls:
            home = _home(folder, call, layout, model, ranks, begun)
            (_ge if layout == "ge" else _fx)(call, load, home, written)
        if layout == "ge":
            _graph(calls, folder, begun)
    except OSError as error:
        raise StoreError(f"can't write {folder}: {error.strerror or error}") from None
    if not written.tensors:
        reasons = [f"{count:,} {reason}" for reason, count in written.left_out.items()]
        why = "; ".join(reasons) or "it holds no calls of compiled code"
        raise StoreError(f"nothing was written to {folder}: {why}")
    return written


def _calls(
    records: Iterable[Record], names: Callable[[Record], str | None], begun: int
) -> Iterator[_Call]:
    by_call: dict[CallKey, list[Record]] = {}  # a kernel's calls run together: records are mixed
    for record in records:
        if is_operator(record.site.path) and record.site.role in _DIRECTIONS:
            by_call.setdefault(record.site.key, []).append(record)
    for number, group in enumerate(by_call.values()):
        node = names(group[0])
        if node is not None:
            fx = f"{file_part(node)}-{file_part(_aten(group[0].op))}"
            yield _Call(group, fx, begun + number)


def _aten(op: str) -> str:
    """Return ``aten.mm.default`` for ``Aten.mm``."""
    bare = op.removeprefix("Aten.") if op.startswith("Aten.") else op
    return f"aten.{bare}" if "." in bare else f"aten.{bare}.default"


def _home(folder: Path, call: _Call, layout: str, model: str, ranks: int, begun: float) -> Path:
    if layout == "fx-old":
        return folder / "data_dump" / str(call.step + 1) / f"gm_{int(begun)}_dump"
    rank = folder / f"worldsize{ranks}_global_rank{call.rank}"
    if layout == "fx":
        return rank / model / str(call.step)
    return rank / str(int(begun)) / str(call.rank) / model / "1" / str(call.step)


def _values(record: Record, load: Load, written: Written) -> torch.Tensor | None:
    if record.payload is None or record.kept is not None:
        written.left_out["whose values were not kept"] += 1
        return None
    try:
        return load(record)
    except (StoreError, TensorLookupError) as error:
        written.left_out[str(error)] += 1
        return None


def _fx(call: _Call, load: Load, home: Path, written: Written) -> None:
    import numpy as np

    home.mkdir(parents=True, exist_ok=True)
    for (role, number), record in _numbered(call):
        values = _values(record, load, written)
        if values is None:
            continue
        if not hasattr(np, str(values.dtype).partition(".")[2].replace("bool", "bool_")):
            values = values.float()  # .npy has no bfloat16 and float8
        file = home / f"{call.fx}.{_DIRECTIONS[role]}.{number}.{call.time}.npy"
        try:
            np.save(file, array_of(values), allow_pickle=False)
        except TensorLookupError as error:
            written.left_out[str(error)] += 1
            continue
        written.tensors += 1


def _numbered(call: _Call) -> Iterator[tuple[tuple[str, int], Record]]:
    counts: Counter[str] = Counter()
    for record in call.records:
        role = record.site.role
        yield (role, counts[role]), record
        counts[role] += 1


def _ge(call: _Call, load: Load, home: Path, written: Written) -> None:
    parts: dict[str, list[bytes]] = {"input": [], "output": []}
    data: dict[str, list[bytes]] = {"input": [], "output": []}
    for (role, number), record in _numbered(call):
        values = _values(record, load, written)
        kind = _TYPES.get(record.summary.dtype)
        if kind is None:
            written.left_out[f"of dtype {record.summary.dtype}, which GE dumps do not have"] += 1
        if values is None or kind is None:
            continue
        content = bytes(to_bytes(values))
        shape = _message(1, b"".join(map(_varint, record.summary.shape)))
        described = _number(1, kind) + _number(2, _ND) + _message(3, shape)
        if role == "output":
            original = _message(1, call.fx.encode()) + _number(2, number)
            described += _message(4, original) + _number(6, len(content)) + _message(7, shape)
        else:
            described += _number(5, len(content)) + _message(6, shape)
        parts[role].append(described)
        data[role].append(content)
        written.tensors += 1
    if not parts["input"] and not parts["output"]:
        return
    operator, name = _named(call)
    message = _message(1, b"1.0") + _number(2, call.time)
    message += b"".join(_message(3, part) for part in parts["output"])
    message += b"".join(_message(4, part) for part in parts["input"])
    message += _message(6, name.encode())
    home.mkdir(parents=True, exist_ok=True)
    file = home / f"{operator}.{name}.{call.time % 100_000}.0.{call.time}"
    content = b"".join([*data["input"], *data["output"]])
    file.write_bytes(struct.pack("<Q", len(message)) + message + content)


def _named(call: _Call) -> tuple[str, str]:
    """Return type and name of a call, without dots: these separate the parts of a file's name."""
    fused = any(r.site.slot.startswith(IN_KERNEL) for r in call.records)
    kind = call.records[0].op.partition(".")[2] or call.records[0].op
    kind = "AutomaticBufferFusionOp" if fused else kind.replace(".", "_")
    return file_part(kind), call.fx.partition("-")[0].replace(".", "_")


def _graph(calls: list[_Call], folder: Path, begun: float) -> None:
    """Write the graph as text, with the FX tensor of each output."""
    lines = ["graph {", '  name: "graph_1"']
    for call in {call.fx: call for call in reversed(calls)}.values():
        kind, name = _named(call)
        lines += ["  op {", f'    name: "{name}"', f'    type: "{kind}"']
        for (role, number), _ in _numbered(call):
            if role == "output":
                tensor = f"{call.fx}.OUTPUT.{number}"
                attribute = f'attr {{ key: "_fx_tensor_name" value {{ s: "{tensor}" }} }}'
                lines += [f"    output_desc {{ {attribute} }}"]
        lines += ["  }"]
    file = folder / f"dynamo_original_graph_1_rank_0_pid_0_ts_{int(begun)}.txt"
    file.write_text("\n".join([*lines, "}", ""]), encoding="utf-8")


def _varint(number: int) -> bytes:
    encoded = bytearray()
    while number > 0x7F:
        encoded.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*encoded, number])


def _number(tag: int, value: int) -> bytes:
    return _varint(tag << 3) + _varint(value)


def _message(tag: int, value: bytes) -> bytes:
    return _varint(tag << 3 | 2) + _varint(len(value)) + value
