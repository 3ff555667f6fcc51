"""Dumps of torchair, GE and FX, are read; what is written in their layouts opens again."""

from __future__ import annotations

import functools
import io
import math
import struct
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

import llmdebug_nb as ld
from layout_files import X, at, check_numbering, read, save, write
from llmdebug_nb.core.dtypes import DTYPES
from llmdebug_nb.core.errors import CorruptDumpError, StoreError
from llmdebug_nb.core.kernels.raw import to_bytes
from llmdebug_nb.core.kernels.summary import summarize
from llmdebug_nb.core.records import Record, Site
from llmdebug_nb.store import layouts
from llmdebug_nb.store.layouts import Contents, fx, ge, ge_file, writing
from llmdebug_nb.store.layouts.files import Folder

READABLE = sorted(set(ge_file.DTYPE_CODES) & set(DTYPES))
# number, kind (a message's name, or a scalar), repeated; as upstream's dump_data.proto has them
_SCHEMA = {
    "Shape": [("dim", 1, "uint64", True)],
    "OriginalOp": [("name", 1, "string", False), ("output_index", 2, "uint32", False)],
    "OpOutput": [
        ("data_type", 1, "int32", False), ("format", 2, "int32", False),
        ("shape", 3, "Shape", False), ("original_op", 4, "OriginalOp", False),
        ("data", 5, "bytes", False), ("size", 6, "uint64", False),
        ("original_shape", 7, "Shape", False), ("sub_format", 8, "int32", False),
        ("address", 9, "uint64", False),
    ],
    "OpInput": [
        ("data_type", 1, "int32", False), ("format", 2, "int32", False),
        ("shape", 3, "Shape", False), ("data", 4, "bytes", False), ("size", 5, "uint64", False),
        ("original_shape", 6, "Shape", False), ("sub_format", 7, "int32", False),
        ("address", 8, "uint64", False),
    ],
    "OpBuffer": [("type", 1, "int32", False), ("data", 2, "bytes", False),
                 ("size", 3, "uint64", False)],
    "DumpData": [
        ("version", 1, "string", False), ("dump_time", 2, "uint64", False),
        ("output", 3, "OpOutput", True), ("input", 4, "OpInput", True),
        ("buffer", 5, "OpBuffer", True), ("op_name", 6, "string", False),
    ],
}  # fmt: skip


@functools.cache
def proto(name: str) -> Any:
    """Return a class that protobuf itself makes of the schema: an independent reader and writer."""
    kinds = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(name="dump.proto", package="t", syntax="proto3")
    for message, fields in _SCHEMA.items():
        one = file.message_type.add(name=message)
        for field, number, kind, repeated in fields:
            added = one.field.add(name=field, number=number)
            added.label = kinds.LABEL_REPEATED if repeated else kinds.LABEL_OPTIONAL
            if kind in _SCHEMA:
                added.type, added.type_name = kinds.TYPE_MESSAGE, f".t.{kind}"
            else:
                added.type = getattr(kinds, f"TYPE_{kind.upper()}")
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName(f"t.{name}"))


def ge_bytes(inputs: list[torch.Tensor], outputs: list[torch.Tensor], **more: Any) -> bytes:
    """Return a GE file made by protobuf. ``buffers``: sizes; ``payload``, ``length`` replace."""
    message = proto("DumpData")(version="2.0", dump_time=7, op_name=more.get("op_name", "Add_1"))
    payload = b""
    for tensors, group in ((inputs, message.input), (outputs, message.output)):
        for tensor in tensors:
            content = to_bytes(tensor).tobytes()
            one = group.add(data_type=ge_file.DTYPE_CODES[summarize(tensor).dtype], format=2)
            one.shape.dim.extend(tensor.shape)
            one.size, one.address = more.get("size", len(content)), 1 << 40
            payload += content
    for size in more.get("buffers", ()):
        message.buffer.add(type=1, size=size)
        payload += bytes(size)
    text = message.SerializeToString()
    return struct.pack("<Q", more.get("length", len(text))) + text + more.get("payload", payload)


TOKEN = "worldsize1_global_rank0/20250101000000/0/graph_1/1"


def ge_dump(base: Path) -> Path:
    for token in (0, 1):
        home = base / TOKEN / str(token)
        write(home / "MatMul.layers.0.mm.11.3.100", ge_bytes([X, X.t()], [X @ X.t()]))
        write(home / "Add.Add_1.12.3.200", ge_bytes([X], [X + 1], buffers=[5]))
        write(home / "Add.Add_1.12.3.50", ge_bytes([X], [X + 2 + token]))
    return base


def fx_dump(base: Path, old: bool = False) -> Path:
    for token in (0, 1):
        home = base / (
            f"data_dump/{token + 1}/gm_2025{token}_dump" if old
            else f"worldsize1_global_rank0/graph_1/{token}"
        )  # fmt: skip
        home.mkdir(parents=True)
        for name, value in (
            ("mm_1-aten.mm.default.INPUT.0.20250101010102.npy", X),
            ("mm_1-aten.mm.default.OUTPUT.0.20250101010103.npy", X + token),
            ("add-aten.add.Tensor.OUTPUT.0.20250101010101.npy", X * 2),
        ):
            np.save(home / name, value.numpy())
    return base


# -- GE -----------------------------------------------------------------------------------------


def test_ge_reads_what_protobuf_writes_by_token_in_the_order_of_time(tmp_path: Path) -> None:
    assert layouts.detect(ge_dump(tmp_path)) is ge
    contents = read(ge, tmp_path)
    check_numbering(contents)
    first = [r.site for r in contents.records if r.site.step == 0]
    assert [(s.path, s.call, s.role, s.slot) for s in first] == [
        ("Add_1/GE.Add", 0, "input", "0"),
        ("Add_1/GE.Add", 0, "output", "0"),
        ("layers.0.mm/GE.MatMul", 0, "input", "0"),
        ("layers.0.mm/GE.MatMul", 0, "input", "1"),
        ("layers.0.mm/GE.MatMul", 0, "output", "0"),
        ("Add_1/GE.Add", 1, "input", "0"),
        ("Add_1/GE.Add", 1, "output", "0"),
    ]
    assert [(c.step, c.kind) for c in contents.calls] == [(0, "prefill"), (1, "decode")]
    found = at(contents, "layers.0.mm/GE.MatMul", role="input", slot="1", step=1)
    assert torch.equal(contents.load(found), X.t())
    assert found.summary == summarize(X.t().contiguous())
    assert torch.equal(contents.load(at(contents, "Add_1/GE.Add", step=1, call=0)), X + 3)
    assert len(ld.open_run(tmp_path / TOKEN / "1")) == 7


tensors = st.builds(
    lambda dtype, shape, seed: _random(dtype, shape, seed),
    st.sampled_from(READABLE), st.lists(st.integers(0, 4), max_size=4), st.integers(0, 99),
)  # fmt: skip


def _random(dtype: str, shape: list[int], seed: int) -> torch.Tensor:
    size = math.prod(shape) * DTYPES[dtype].itemsize
    raw = np.random.default_rng(seed).integers(0, 2 if dtype == "bool" else 256, size, np.uint8)
    if not size:
        return torch.empty(shape, dtype=DTYPES[dtype])
    return torch.from_numpy(raw).view(DTYPES[dtype]).reshape(shape)


@given(st.lists(tensors, max_size=3), st.lists(tensors, min_size=1, max_size=3))
@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_ge_files_come_back_bit_for_bit_and_protobuf_reads_the_same(
    tmp_path: Path, inputs: list[torch.Tensor], outputs: list[torch.Tensor]
) -> None:
    data = ge_file.encode("Add_1", inputs, [(one, "add-aten.add.Tensor") for one in outputs], 9)
    (length,) = struct.unpack("<Q", data[:8])
    message = proto("DumpData").FromString(data[8 : 8 + length])
    assert (message.op_name, message.dump_time, message.version) == ("Add_1", 9, "1.0")
    for described, given_ in ((message.input, inputs), (message.output, outputs)):
        assert [list(one.shape.dim) for one in described] == [list(t.shape) for t in given_]
        assert [one.size for one in described] == [t.nbytes for t in given_]
    for content in (data, ge_bytes(inputs, outputs)):
        write(tmp_path / "Add.Add_1.1.2.3", content)
        folder = Folder(tmp_path)
        parts = ge_file.parse(folder, "Add.Add_1.1.2.3").parts
        assert [part.lost for part in parts] == [None] * len(parts)
        for role, given_ in (("input", inputs), ("output", outputs)):
            for index, tensor in enumerate(given_):
                found = ge_file.load(folder, "Add.Add_1.1.2.3", role, index)
                assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape)
                assert to_bytes(found).tobytes() == to_bytes(tensor).tobytes()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", r"no GE dump file: a message can't lie in 0 bytes"),
        (b"\x09" + bytes(7), r"of 9 bytes at byte 0 can't lie in 8 bytes"),
        (ge_bytes([], [X], length=1 << 63), "can't lie in"),
        (struct.pack("<Q", 3) + b"\x1a\x7f\x00", "a field at byte 8 that leads out"),
        (struct.pack("<Q", 2) + b"\x1b\x00", "no valid field at byte 8"),
        (struct.pack("<Q", 12) + b"\xff" * 12, "endless number"),
        (struct.pack("<Q", 2) + b"\x18\x05", "a number at byte 8, where a message belongs"),
    ],
)
def test_ge_files_that_are_none_are_lost_by_name_and_byte(
    tmp_path: Path, data: bytes, message: str
) -> None:
    home = tmp_path / TOKEN / "0"
    write(home / "Add.bad.1.2.3", data)
    write(home / "Add.good.1.2.4", ge_bytes([], [X]))
    contents = read(ge, tmp_path)
    (lost,) = [r for r in contents.records if r.lost]
    with pytest.raises(CorruptDumpError, match=message):
        raise CorruptDumpError(lost.lost)
    assert "Add.bad.1.2.3" in lost.lost
    assert torch.equal(contents.load(at(contents, "good/GE.Add")), X)


def test_ge_message_of_gigabytes_is_not_read(tmp_path: Path) -> None:
    name = "Add.Add_1.1.2.3"
    with (tmp_path / name).open("wb") as file:  # it takes no room on disk
        file.write(struct.pack("<Q", 1 << 32))
        file.truncate(1 << 33)
    with pytest.raises(CorruptDumpError, match="message of 4,294,967,296 bytes at byte 0: more"):
        ge_file.parse(Folder(tmp_path), name)


def test_ge_tensors_that_contradict_their_file_are_lost_and_the_others_open(tmp_path: Path) -> None:
    home = tmp_path / TOKEN / "0"
    write(home / "Add.cut.1.2.3", ge_bytes([X], [X])[:-1])
    write(home / "Add.long.1.2.4", ge_bytes([], [X], size=1 << 62))
    write(home / "Add.more.1.2.5", ge_bytes([], [X]) + b"?")
    strange = proto("DumpData")()
    strange.output.add(data_type=99, size=1).shape.dim.extend([1])
    text = strange.SerializeToString()
    write(home / "Add.strange.1.2.6", struct.pack("<Q", len(text)) + text + b"?")
    contents = read(ge, tmp_path)
    said = {r.site.path.partition("/")[0]: r.lost or "" for r in contents.records if r.lost}
    assert "output 0: only 23 of 24 bytes at byte" in said["cut"]
    assert "of 4,611,686,018,427,387,904 bytes" in said["long"]
    assert "1 bytes at" in said["more"]
    assert "dtype ge_99 can't be read" in said["strange"]
    assert torch.equal(contents.load(at(contents, "cut/GE.Add", role="input")), X)


def assert_named(error: CorruptDumpError) -> None:
    assert "a.b.1.2.3" in str(error)


@given(noise=st.binary(max_size=200), keep=st.integers(0, 200), place=st.integers(0, 200))
@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_ge_parser_takes_any_bytes_without_another_kind_of_error(
    tmp_path: Path, noise: bytes, keep: int, place: int
) -> None:
    sound = ge_bytes([X], [X])
    for data in (noise, sound[:keep] + noise, sound[:place] + noise[:1] + sound[place + 1 :]):
        write(tmp_path / "a.b.1.2.3", data)
        try:
            call = ge_file.parse(Folder(tmp_path), "a.b.1.2.3")
        except CorruptDumpError as error:
            assert_named(error)
            continue
        for part in call.parts:
            if part.lost is None:
                ge_file.load(Folder(tmp_path), "a.b.1.2.3", part.role, part.index)


def test_ge_graph_beside_the_dump_gives_operators_the_names_of_fx_nodes(tmp_path: Path) -> None:
    ge_dump(tmp_path)
    write(
        tmp_path / "dynamo_original_graph_1_rank_0_pid_1_ts_2.txt",
        'graph {\n name: "g"\n op {\n  name: "layers.0.mm"\n  type: "MatMul"\n  output_desc {\n'
        '   name: "y"\n   attr {\n    key: "_fx_tensor_name"\n    value {\n'
        '     s: "mm_7-aten.mm.default.OUTPUT.0"\n    }\n   }\n  }\n }\n}\n',
    )
    contents = read(ge, tmp_path)
    assert contents.meta["fx_names"] == {"layers.0.mm": "mm_7-aten.mm.default"}
    assert torch.equal(contents.load(at(contents, "mm_7/GE.MatMul")), X @ X.t())
    write(tmp_path / "dynamo_optimized_graph_1_rank_0_pid_1_ts_2.txt", "} } {")
    lost = [r.lost for r in read(ge, tmp_path).records if r.lost]
    assert len(lost) == 1
    assert "closes a bracket too many at 0" in lost[0]


def graph_of(**fx: str) -> str:
    """Return the text of a graph whose operators have the names of FX nodes."""
    ops = (
        f'op {{ name: "{name}" type: "T" output_desc {{ attr {{ key: "_fx_tensor_name" value {{'
        f' s: "{node}.OUTPUT.0" }} }} }} }}'
        for name, node in fx.items()
    )
    return f'graph {{ name: "g" {" ".join(ops)} }}'


def test_a_fused_operator_of_ge_takes_the_place_of_the_ones_it_was_made_of(tmp_path: Path) -> None:
    graph = graph_of(Add="add-aten.add.Tensor", Add_1="add_1-aten.add.Tensor", Mul="mul-aten.mul")
    plain, fused = tmp_path / "plain", tmp_path / "fused"
    for base, files in (
        (plain, {"Add.Add_1.1.3.1": ([X], [X + 1]), "Mul.Mul.2.3.2": ([X + 1], [X * 2 + 2])}),
        (fused, {"AutomaticBufferFusionOp.Add_1Mul.1.3.1": ([X], [X * 2 + 2])}),
    ):
        write(base / "dynamo_original_graph_1_rank_0_pid_1_ts_2.txt", graph)
        for name, tensors in files.items():
            write(base / TOKEN / "0" / name, ge_bytes(*tensors))
    sites = [(r.site.path, r.site.role) for r in read(ge, fused).records]
    assert sites == [
        ("add_1/GE.AutomaticBufferFusionOp", "input"),
        ("mul/GE.AutomaticBufferFusionOp", "output"),
    ]
    assert ld.compare(plain, fused).verdict == "match"
    name = "AutomaticBufferFusionOp.Add_1Mul.1.3.1"
    write(fused / TOKEN / "0" / name, ge_bytes([X], [X * 2 + 3]))
    assert ld.compare(plain, fused).verdict == "diverged"
    write(fused / TOKEN / "0" / "AutomaticBufferFusionOp.Add_1Sub.1.3.9", ge_bytes([X], [X]))
    assert "Add_1Sub/GE.AutomaticBufferFusionOp" in {r.site.path for r in read(ge, fused).records}


def test_ge_files_reduced_to_minimum_and_maximum_are_statistics(tmp_path: Path) -> None:
    home = tmp_path / TOKEN / "0"
    home.mkdir(parents=True)
    pairs = np.array([[0.0, 5.0], [1.0, 2.0]])
    np.savez(home / "Add.Add_1.1.2.3_min_max.npz", inputs=pairs, outputs=pairs[:1])
    np.savez(home / "Add.odd.1.2.4_min_max.npz", inputs=np.zeros(3), outputs=pairs)
    contents = read(ge, tmp_path)
    found = at(contents, "Add_1/GE.Add", role="input", slot="1")
    assert (found.summary.min, found.summary.max, found.payload) == (1.0, 2.0, None)
    assert "does not hold minimum and maximum" in str([r.lost for r in contents.records if r.lost])


def test_a_packed_bomb_among_reduced_files_is_refused(tmp_path: Path) -> None:
    home = tmp_path / TOKEN / "0"
    write(home / "Add.good.1.2.4", ge_bytes([], [X]))
    out = io.BytesIO()
    np.lib.format.write_array_header_1_0(
        out, {"descr": "<f8", "fortran_order": False, "shape": (1 << 27,)}
    )
    bomb = home / "Add.bomb.1.2.3_min_max.npz"
    with (
        zipfile.ZipFile(bomb, "w", zipfile.ZIP_DEFLATED) as archive,
        archive.open("inputs.npy", "w", force_zip64=True) as stream,
    ):
        stream.write(out.getvalue())
        for _ in range(1 << 6):
            stream.write(bytes(1 << 22))
    contents = read(ge, tmp_path)
    (lost,) = [r.lost or "" for r in contents.records if r.lost]
    assert "claims" in lost
    assert torch.equal(contents.load(at(contents, "good/GE.Add")), X)


# -- FX -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("old", [False, True])
def test_fx_dumps_of_both_generations_have_their_tokens_and_no_time_stamps(
    tmp_path: Path, old: bool
) -> None:
    assert layouts.detect(fx_dump(tmp_path, old)) is fx
    contents = read(fx, tmp_path)
    check_numbering(contents)
    for step in (0, 1):
        sites = [r.site for r in contents.records if r.site.step == step]
        assert [(s.path, s.role, s.slot) for s in sites] == [
            ("add/Aten.add.Tensor", "output", "0"),
            ("mm_1/Aten.mm", "input", "0"),
            ("mm_1/Aten.mm", "output", "0"),
        ]
        assert torch.equal(contents.load(at(contents, "mm_1/Aten.mm", step=step)), X + step)


def test_fx_files_reduced_to_minimum_and_maximum_are_statistics(tmp_path: Path) -> None:
    home = fx_dump(tmp_path) / "worldsize1_global_rank0/graph_1/0"
    np.save(home / "exp-aten.exp.default.OUTPUT.0.1_min_max.npy", np.array([-1.0, 4.0]))
    np.save(home / "neg-aten.neg.default.OUTPUT.0.1.npy_min_max.npy", np.array([-2, 3]))
    contents = read(fx, tmp_path)
    for path, pair in (("exp/Aten.exp", (-1.0, 4.0)), ("neg/Aten.neg", (-2.0, 3.0))):
        found = at(contents, path)
        assert ((found.summary.min, found.summary.max), found.payload) == (pair, None)


def test_files_beside_a_dump_of_torchair_and_links_out_of_it_are_said(tmp_path: Path) -> None:
    home = fx_dump(tmp_path / "dump") / "worldsize1_global_rank0/graph_1/0"
    save(X, home / "golden.pth")
    secret = tmp_path / "secret.npy"
    np.save(secret, X.numpy())
    (home / "exp-aten.exp.default.OUTPUT.0.1.npy").symlink_to(secret)
    (home / "loop-aten.exp.default.OUTPUT.0.1.npy").symlink_to(
        home / "loop-aten.exp.default.OUTPUT.0.1.npy"
    )
    lost = sorted(r.lost for r in read(fx, tmp_path / "dump").records if r.lost)
    assert len(lost) == 3
    assert any("golden.pth is no file of layout fx" in one for one in lost)
    assert any("a link that leads out" in one for one in lost)


# -- what is written opens again -----------------------------------------------------------------

calls = st.lists(
    st.tuples(
        st.sampled_from(["mm", "add_1", "relu", "a.b", "../x"]),
        st.integers(0, 2), st.integers(0, 1),
        st.lists(tensors, max_size=2), st.lists(tensors, min_size=1, max_size=2),
    ),
    min_size=1, max_size=4, unique_by=lambda call: call[:3],
)  # fmt: skip


WRITERS = {"fx": fx.write, "fx-old": fx.write_old, "ge": ge.write}
quick = settings(
    deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def written_and_read(
    made: list[Any], layout: str, folder: Path, stats: bool = False
) -> tuple[list[Record], dict[int, torch.Tensor], writing.Written, Contents]:
    """Write calls, and read them again; return their records and values, too."""
    records: list[Record] = []
    values: dict[int, torch.Tensor] = {}
    for node, step, rank, inputs, outputs in made:
        rank = 0 if layout == "fx-old" else rank
        for role, group in (("input", inputs), ("output", outputs)):
            for slot, tensor in enumerate(group):
                site = Site(f"m/{node}", step, 0, role=role, slot=str(slot), rank=rank)
                number = len(records)
                if any(record.site == site for record in records):
                    continue  # fx-old has no ranks
                values[number] = tensor
                payload, summary = None if stats else number, summarize(tensor)
                records.append(Record(number, site, number, "Aten.mm", summary, payload=payload))
    dump = writing.Dump(
        records, [], lambda r: values[r.id], lambda r: r.site.path.partition("/")[2], "net", 1.0
    )
    written = writing.write(WRITERS[layout], dump, folder)
    reader = layouts.detect(folder)
    assert reader is (ge if layout == "ge" else fx)
    contents = reader.read(folder)
    assert not [r.lost for r in contents.records if r.lost]
    return records, values, written, contents


def _token_and_slot(record: Record) -> tuple[int, int, str, str]:
    site = record.site
    return site.step, site.rank, site.role, site.slot


@given(calls, st.sampled_from(list(WRITERS)))
@quick
def test_every_call_that_is_written_comes_back_with_its_token_and_values(
    tmp_path_factory: pytest.TempPathFactory, made: list[Any], layout: str
) -> None:
    folder = tmp_path_factory.mktemp("out") / "dump"
    records, values, written, contents = written_and_read(made, layout, folder)
    assert (written.tensors, not written.left_out) == (len(records), True)
    found = sorted((*_token_and_slot(r), _bytes(contents.load(r))) for r in contents.records)
    wanted = [values[r.id] for r in records]
    if layout != "ge":  # .npy has no bfloat16 and float8
        wanted = [t.float() if t.dtype.itemsize < 3 and not hasattr(np, str(t.dtype)[6:])
                  and t.dtype.is_floating_point else t for t in wanted]  # fmt: skip
    assert found == sorted(
        (*_token_and_slot(r), _bytes(t)) for r, t in zip(records, wanted, strict=True)
    )


@given(calls, st.sampled_from(list(WRITERS)))
@quick
def test_statistics_without_values_become_reduced_files_with_equal_figures(
    tmp_path_factory: pytest.TempPathFactory, made: list[Any], layout: str
) -> None:
    known = [  # that of an empty tensor has no minimum, and can't be written
        (*call[:3], *([t for t in group if t.numel()] for group in call[3:])) for call in made
    ]
    assume(any(group for call in known for group in call[3:]))
    folder = tmp_path_factory.mktemp("out") / "dump"
    records, _, written, contents = written_and_read(known, layout, folder, stats=True)
    assert (written.tensors, written.described) == (0, len(records))
    assert not written.left_out
    names = {file.name[-12:-4] for file in folder.rglob("*.np?")}
    assert names == {"_min_max"}
    assert sorted(map(_figures, contents.records)) == sorted(map(_figures, records))


def _figures(record: Record) -> tuple[Any, ...]:
    return *_token_and_slot(record), repr((record.summary.min, record.summary.max))


@pytest.mark.parametrize("layout", list(WRITERS))
def test_statistics_that_have_no_minimum_are_counted_and_no_other_takes_their_place(
    tmp_path: Path, layout: str
) -> None:
    made = [("mm", 0, 0, [X, X[:0], X + 1], [X * 2])]
    _, _, written, contents = written_and_read(made, layout, tmp_path / "out", stats=True)
    slots = {r.site.slot: r.summary.max for r in contents.records if r.site.role == "input"}
    assert slots == ({"0": 5.0} if layout == "ge" else {"0": 5.0, "2": 6.0})
    counts = {"that have neither values nor a minimum and maximum": 1}
    if layout == "ge":  # whose arrays have no gaps
        counts["that follow one that is left out in a call, whose place they would take"] = 1
    assert dict(written.left_out) == counts
    assert written.described + sum(counts.values()) == 4


def test_a_tensor_that_ge_has_no_code_for_gives_its_place_to_no_other(tmp_path: Path) -> None:
    odd = torch.zeros(3, dtype=torch.complex32)
    made = [("mm", 0, 0, [X, odd, X + 1], [X * 2])]
    _, _, written, contents = written_and_read(made, "ge", tmp_path / "out")
    found = {(r.site.role, r.site.slot): contents.load(r).max().item() for r in contents.records}
    assert found == {("input", "0"): 5.0, ("output", "0"): 10.0}
    assert dict(written.left_out) == {
        "of dtype complex32, which GE dumps do not have": 1,
        "that follow one that is left out in a call, whose place they would take": 1,
    }


def _bytes(tensor: torch.Tensor) -> tuple[str, str, bytes]:
    return str(tensor.dtype), str(tuple(tensor.shape)), to_bytes(tensor).tobytes()


def test_what_has_no_place_in_a_layout_is_counted_and_nothing_at_all_is_an_error(
    tmp_path: Path,
) -> None:
    record = Record(0, Site("m/mm"), 0, "Aten.mm", summarize(X), payload=0)
    module = Record(1, Site("m"), 1, "M", summarize(X), payload=0)
    strange = Record(2, Site("m/e", slot="0"), 2, "Aten.e", summarize(X), payload=None)
    dump = writing.Dump([record, module, strange], [], lambda r: X, lambda r: "mm")
    written = writing.write(ge.write, dump, tmp_path / "a")
    assert (written.tensors, written.described) == (1, 1)
    assert dict(written.left_out) == {"that are no inputs or outputs of operators": 1}
    with pytest.raises(StoreError, match=r"nothing was written to .*: 1 that are no inputs"):
        writing.write(
            fx.write, writing.Dump([module], [], lambda r: X, lambda r: "mm"), tmp_path / "b"
        )
