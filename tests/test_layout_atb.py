"""Dumps of ATB's layout are read."""

from __future__ import annotations

import io
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import llmdebug_nb as ld
from layout_files import EXAMPLE, X, at, check_numbering, read, save, write
from llmdebug_nb.core.dtypes import DTYPES
from llmdebug_nb.core.errors import CorruptDumpError
from llmdebug_nb.core.kernels.raw import to_bytes
from llmdebug_nb.core.kernels.summary import summarize
from llmdebug_nb.store import layouts
from llmdebug_nb.store.layouts import atb, atb_bin
from llmdebug_nb.store.layouts.files import Folder

CODES = {name: code for code, name in atb_bin.ACL_DTYPES.items()}


def bin_bytes(tensor: torch.Tensor, **changed: Any) -> bytes:
    """Return a tensor file as ATB writes it; ``changed`` replaces header values, None drops one."""
    data = to_bytes(tensor).tobytes()
    fields = {
        "$Version": "1.0",
        "$Object.Count": 1,
        "$Object.Length": len(data),
        "format": 2,
        "dtype": CODES[summarize(tensor).dtype],
        "dims": ",".join(map(str, tensor.shape)),
        "$Object.data": f"0,{len(data)}",
        **changed,
    }
    lines = [f"{key}={value}\n" for key, value in fields.items() if value is not None]
    return "".join(lines).encode() + b"$End=1\n" + data


def bin_header(**fields: Any) -> bytes:
    """A header without data."""
    head = {
        "$Version": "1.0",
        "$Object.Count": 0,
        "$Object.Length": 0,
        "format": 2,
        "dtype": 0,
        "dims": "2,3",
    } | fields
    return "".join(f"{key}={value}\n" for key, value in head.items()).encode() + b"$End=1\n"


def atb_round(base: Path, number: int = 0) -> Path:
    folder = base / str(number)
    layer = folder / "10_Prefill_layer"
    write(layer / "before/intensor0.bin", bin_bytes(X))
    write(layer / "0_RmsNormOperation/before/intensor0.bin", bin_bytes(X))
    write(layer / "0_RmsNormOperation/after/outtensor0.bin", bin_bytes(X * 2))
    write(layer / "1_LinearOperation/before/intensor0.bin", bin_bytes(X * 2))
    write(layer / "1_LinearOperation/after/outtensor10.bin", bin_bytes(X * 3))
    write(layer / "1_LinearOperation/after/outtensor2.bin", bin_bytes(X * 3))
    write(layer / "after/outtensor0.bin", bin_bytes(X * 3))
    write(folder / "2_WordEmbedding/after/outtensor0.bin", bin_bytes(X))
    write(layer / "op_param.json", "{}")
    return folder


@pytest.fixture(params=["msit_dump_20250101_000000/tensors", "atb_dump_data/data"])
def atb_dump(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    for number in (0, 1):
        atb_round(tmp_path / request.param / "0_4242", number)
    return tmp_path


def test_atb_reads_the_example_of_the_format(tmp_path: Path) -> None:
    write(tmp_path / "0_1/0/0_Add/after/outtensor0.bin", EXAMPLE)
    assert bin_bytes(X) == EXAMPLE
    contents = read(atb, tmp_path)
    assert torch.equal(contents.load(contents.records[0]), X)
    assert contents.records[0].summary == summarize(X)
    assert contents.meta == {"formats": ["nd"], "op_params": {}}


@given(
    dtype=st.sampled_from(sorted(set(CODES) & set(DTYPES))),
    shape=st.lists(st.integers(0, 5), max_size=5),
    data=st.data(),
)
@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_atb_any_dtype_and_shape_comes_back_bit_for_bit(
    tmp_path: Path,
    dtype: str,
    shape: list[int],
    data: Any,
) -> None:
    nbytes = math.prod(shape) * DTYPES[dtype].itemsize
    raw = data.draw(st.binary(min_size=nbytes, max_size=nbytes))
    raw = bytes(b & 1 for b in raw) if dtype == "bool" else raw
    tensor = torch.empty(shape, dtype=DTYPES[dtype])
    if nbytes:
        tensor = (
            torch.frombuffer(bytearray(raw), dtype=torch.uint8).view(DTYPES[dtype]).reshape(shape)
        )
    write(tmp_path / "0_1/0/0_Add/after/outtensor0.bin", bin_bytes(tensor))
    contents = read(atb, tmp_path)
    found = contents.load(contents.records[0])
    assert (found.dtype, list(found.shape)) == (DTYPES[dtype], shape)
    assert to_bytes(found).tobytes() == raw
    assert contents.records[0].lost is None


@given(noise=st.binary(max_size=400), keep=st.integers(0, len(EXAMPLE)))
@settings(max_examples=300, deadline=None)
def test_atb_parser_takes_any_bytes_without_another_kind_of_error(noise: bytes, keep: int) -> None:
    for data in (noise, EXAMPLE[:keep] + noise, noise + EXAMPLE):
        try:
            made = atb_bin.parse("x.bin", io.BytesIO(data), len(data))
        except CorruptDumpError:
            continue
        assert not made.kept or made.start + made.length <= len(data)


def test_atb_both_writers_layouts_are_read(atb_dump: Path) -> None:
    assert layouts.detect(atb_dump) is atb
    contents = read(atb, atb_dump)
    check_numbering(contents)
    assert [(c.index, c.step, c.kind) for c in contents.calls] == [
        (0, 0, "forward"),
        (1, 1, "forward"),
    ]
    record = at(contents, "10_Prefill_layer.1_LinearOperation", slot="2", step=1)
    assert (record.op, record.device) == ("LinearOperation", "npu:0")
    assert torch.equal(contents.load(record), X * 3)


def test_atb_follows_ids_by_number_inputs_in_outputs_out(atb_dump: Path) -> None:
    sites = [record.site for record in read(atb, atb_dump).records if record.site.step == 0]
    seen = [(site.path.rpartition(".")[2], site.role, site.slot) for site in sites]
    assert seen == [
        ("2_WordEmbedding", "output", "0"),
        ("10_Prefill_layer", "input", "0"),
        ("0_RmsNormOperation", "input", "0"),
        ("0_RmsNormOperation", "output", "0"),
        ("1_LinearOperation", "input", "0"),
        ("1_LinearOperation", "output", "2"),
        ("1_LinearOperation", "output", "10"),
        ("10_Prefill_layer", "output", "0"),
    ]


def test_atb_operations_become_nodes(atb_dump: Path) -> None:
    nodes = read(atb, atb_dump).nodes
    assert [(n.name, n.type, n.parent) for n in nodes] == [
        ("", "", -1),
        ("2_WordEmbedding", "WordEmbedding", 0),
        ("10_Prefill_layer", "Prefill_layer", 0),
        ("0_RmsNormOperation", "RmsNormOperation", 2),
        ("1_LinearOperation", "LinearOperation", 2),
    ]


def test_atb_round_and_operation_folders_open_alone(tmp_path: Path) -> None:
    folder = atb_round(tmp_path / "0_4242", 7)
    for path in (tmp_path / "0_4242", folder):
        assert layouts.detect(path) is atb
        assert {r.site.step for r in read(atb, path).records} == {7}


def test_atb_ranks_number_the_processes_by_device(tmp_path: Path) -> None:
    for device in (10, 9):
        write(tmp_path / f"tensors/{device}_5/0/0_Add/after/outtensor0.bin", bin_bytes(X + device))
    assert at(read(atb, tmp_path), "0_Add", rank=0).summary == summarize(X + 9)


def test_atb_tensor_seen_on_the_other_side_has_a_slot_of_its_own(tmp_path: Path) -> None:
    base = tmp_path / "0_1/0/0_Add"
    for name in ("before/intensor0", "before/outtensor0", "after/intensor0", "after/outtensor0"):
        write(base / f"{name}.bin", bin_bytes(X))
    seen = [(r.site.role, r.site.slot) for r in read(atb, tmp_path).records]
    assert seen == [("input", "0"), ("output", "before.0"), ("input", "after.0"), ("output", "0")]


def test_atb_description_alone_has_no_payload_and_is_not_lost(tmp_path: Path) -> None:
    write(tmp_path / "0_1/0/0_Add/after/outtensor0.bin", bin_header(dtype=27))
    record = read(atb, tmp_path).records[0]
    assert (record.summary.dtype, record.summary.shape, record.payload, record.lost) == (
        "bfloat16",
        (2, 3),
        None,
        None,
    )


def test_atb_statistics_file_gives_its_figures(tmp_path: Path) -> None:
    text = b"format=nd\ntype=float\ndims=2x3\nmax=5\nmin=0\nmean=2.5\nl2norm=7.4162\n$End=1"
    write(tmp_path / "0_1/0/0_Add/after/outtensor0.bin", text)
    summary = read(atb, tmp_path).records[0].summary
    assert (summary.dtype, summary.shape, summary.max, summary.mean, summary.nan) == (
        "float32",
        (2, 3),
        5.0,
        2.5,
        None,
    )


STATISTIC = """Device and PID,Execution Count,Op Name,Op Type,Op Id,Input/Output,Index,\
Dtype,Format,Shape,Max,Min,Mean,Norm,Tensor Path
0_1,0,Layer/Linear,Linear,3_1,input,0,bf16,nd,2x3,5.000000,0.000000,2.500000,7.416198,N/A
0_1,0,Layer/Linear,Linear,3_1,output,0,int4,nd,2x3,N/A,N/A,N/A,N/A,N/A
0_1,0,Layer/Lin"""


def test_atb_statistic_table_gives_records_at_the_paths_of_the_folders(tmp_path: Path) -> None:
    write(tmp_path / "0_1/0/statistic.csv", STATISTIC)
    write(tmp_path / "0_1/0/3_Layer/1_Linear/before/intensor0.bin", bin_bytes(X))
    contents = read(atb, tmp_path)
    assert at(contents, "3_Layer.1_Linear", "input").summary == summarize(X), (
        "exact, not of six decimals"
    )
    row = at(contents, "3_Layer.1_Linear", "output")
    assert (row.summary.dtype, row.summary.shape, row.summary.max, row.lost) == (
        "int4",
        (2, 3),
        None,
        None,
    )
    assert sum(r.lost is not None for r in contents.records) == 1


@pytest.mark.parametrize(("code", "name"), [(29, "int4"), (34, "hifloat8"), (99, "acl_99")])
def test_atb_dtype_that_torch_lacks_is_described_and_lost(
    tmp_path: Path, code: int, name: str
) -> None:
    write(tmp_path / "0_1/0/0_Add/after/outtensor0.bin", bin_bytes(X, dtype=code))
    record = read(atb, tmp_path).records[0]
    assert (record.summary.dtype, record.summary.shape, record.payload) == (name, (2, 3), None)
    assert name in (record.lost or "")


def test_atb_writer_that_appended_gives_several_calls(tmp_path: Path) -> None:
    write(tmp_path / "0_1/0/0_Add/after/outtensor0.bin", bin_bytes(X) + bin_bytes(X * 2))
    contents = read(atb, tmp_path)
    assert [contents.load(at(contents, "0_Add", call=call))[1, 2].item() for call in (0, 1)] == [
        5.0,
        10.0,
    ]


def test_atb_alias_is_read_from_the_file_it_names_and_tells_the_producer(tmp_path: Path) -> None:
    folder = atb_round(tmp_path / "0_4242") / "10_Prefill_layer"
    write(folder / "1_LinearOperation/before/intensor0.bin", bin_header(data="10_0_outtensor0.bin"))
    write(
        folder / "0_RmsNormOperation/before/outtensor0.bin", bin_bytes(X - 99)
    )  # not yet computed
    contents = read(atb, tmp_path)
    record = at(contents, "10_Prefill_layer.1_LinearOperation", "input")
    assert torch.equal(contents.load(record), X * 2)
    assert record.summary == summarize(X * 2)
    assert record.producer == at(contents, "10_Prefill_layer.0_RmsNormOperation").id


@pytest.mark.parametrize(
    "name",
    [
        "../../../secret.bin",
        "/etc/passwd",
        "10_0_../outtensor0.bin",
        "99_outtensor0.bin",
        "intensor0.bin",
        "10_1_intensor0.bin",  # itself
        "10_0_intensor0.bin",  # another shape
    ],
)
def test_atb_alias_that_leads_nowhere_or_out_is_lost_with_a_reason(
    tmp_path: Path, name: str
) -> None:
    write(tmp_path / "secret.bin", EXAMPLE)
    folder = atb_round(tmp_path / "tensors/0_4242") / "10_Prefill_layer"
    write(folder / "0_RmsNormOperation/before/intensor0.bin", bin_bytes(torch.zeros(7)))
    write(folder / "1_LinearOperation/before/intensor0.bin", bin_header(data=name))
    contents = read(atb, tmp_path / "tensors")
    record = at(contents, "10_Prefill_layer.1_LinearOperation", "input")
    assert record.payload is None
    assert "stands for" in (record.lost or "")
    assert sum(r.lost is not None for r in contents.records) == 1


@pytest.mark.parametrize(
    ("damaged", "why"),
    [
        (EXAMPLE[:-1], "cut short: 23 of 24"),
        (EXAMPLE[:60], "no $End=1"),
        (b"", "no $End=1"),
        (EXAMPLE + b"garbage", "after its data"),
        (bin_bytes(X, dims="2,4"), "make no float32 tensor"),
        (bin_bytes(X, dims="1,1"), "make no float32 tensor"),
        (bin_bytes(X, dims=f"{1 << 40},{1 << 40}"), "no valid dims"),
        (bin_bytes(X, dims="-2,-3"), "no valid dims"),
        (bin_bytes(X, dims="9" * 200), "no valid dims"),
        (bin_bytes(X, dims=None), "no valid dims"),
        (bin_bytes(X, **{"$Object.Length": 1 << 62, "$Object.data": f"0,{1 << 50}"}), "cut short"),
        (bin_bytes(X, **{"$Object.Length": 8}), "places 24 bytes at 0 of an object of 8"),
        (bin_bytes(X, **{"$Object.data": "8,24"}), "places 24 bytes at 8"),
        (bin_bytes(X, **{"$Object.data": "-8,24"}), "no offset and length"),
        (bin_bytes(X, **{"$Object.data": None}), "bytes of no object"),
        (bin_bytes(X, extra="a=b"), "without key=value"),
        (bin_bytes(X, extra="a" * 9000), "no $End=1"),
    ],
)
def test_atb_damaged_file_is_lost_by_name_and_hides_no_other(
    tmp_path: Path, damaged: bytes, why: str
) -> None:
    write(tmp_path / "0_1/0/0_Add/after/outtensor0.bin", damaged)
    write(tmp_path / "0_1/0/1_Add/after/outtensor0.bin", EXAMPLE)
    contents = read(atb, tmp_path)
    lost = [record.lost for record in contents.records if record.lost]
    assert len(lost) == 1
    assert why in lost[0]
    assert "0_1/0/0_Add/after/outtensor0.bin" in lost[0]
    assert torch.equal(contents.load(at(contents, "1_Add")), X)


def test_atb_dump_of_nothing_but_damage_is_refused_by_name(tmp_path: Path) -> None:
    write(tmp_path / "0_1/0/0_Add/after/outtensor0.bin", b"junk")
    with pytest.raises(CorruptDumpError, match=r"0_Add/after/outtensor0\.bin"):
        read(atb, tmp_path)


def test_atb_file_that_changed_after_opening_is_refused_on_load(tmp_path: Path) -> None:
    file = write(tmp_path / "0_1/0/0_Add/after/outtensor0.bin", EXAMPLE)
    contents = read(atb, tmp_path)
    file.write_bytes(EXAMPLE[:-4])
    with pytest.raises(CorruptDumpError, match="cut short"):
        contents.load(contents.records[0])


# -- one file -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["0_Add/after/outtensor0.bin", "mine.bin"])
def test_atb_one_file_opens_and_takes_its_place_from_its_folders(tmp_path: Path, name: str) -> None:
    file = write(tmp_path / "0_1/3" / name, bin_bytes(X) + bin_bytes(X * 2))
    write(file.parent / "other.bin", b"junk")
    assert layouts.detect(file) is atb
    contents = read(atb, file)
    assert [(r.site.path, r.site.step, r.site.call) for r in contents.records] == [
        (path, step, call)
        for path, step in [("0_Add", 3) if "/" in name else ("mine", 0)]
        for call in (0, 1)
    ]
    assert torch.equal(contents.load(contents.records[1]), X * 2)
    assert len(ld.open_run(file)) == 2


def test_atb_one_file_that_is_an_alias_says_what_it_stands_for(tmp_path: Path) -> None:
    file = write(tmp_path / "x.bin", bin_header(data="0_1_outtensor0.bin"))
    (record,) = read(atb, file).records
    assert "x.bin stands for '0_1_outtensor0.bin'" in (record.lost or "")


@given(values=st.lists(st.integers(-8, 7), max_size=9))
@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_atb_int4_is_unpacked_low_bits_first(tmp_path: Path, values: list[int]) -> None:
    even = [*values, 0] if len(values) % 2 else values
    packed = bytes((low & 15) | (high & 15) << 4 for low, high in zip(*[iter(even)] * 2))  # noqa: B905
    head = bin_header(
        **{"$Object.Count": 1, "$Object.Length": len(packed), "dtype": 29, "dims": len(values)},
        **{"$Object.data": f"0,{len(packed)}"},
    )
    file = write(tmp_path / "x.bin", head + packed)
    record = (contents := read(atb, file)).records[0]
    assert record.lost is None
    assert contents.load(record).tolist() == values
    assert record.summary.dtype == "int8"


def test_atb_int4_of_another_length_is_lost(tmp_path: Path) -> None:
    fields = {"$Object.Count": 1, "$Object.Length": 2, "$Object.data": "0,2"}
    write(tmp_path / "0_1/0/0_Add/after/outtensor0.bin", bin_bytes(X))
    both = [bin_header(dtype=29, dims=count, **fields) + b"12" for count in (3, 9)]
    write(tmp_path / "0_1/0/1_Add/after/outtensor0.bin", b"".join(both))
    found = read(atb, tmp_path)
    assert at(found, "1_Add", call=0).lost is None
    assert "2 bytes, which make no int4 tensor of shape [9]" in (
        at(found, "1_Add", call=1).lost or ""
    )


@given(
    dtype=st.sampled_from(sorted(set(CODES) & set(DTYPES))),
    shape=st.lists(st.integers(0, 4), max_size=4),
)
@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_atb_what_is_encoded_is_what_the_probe_writes_and_reads_again(
    tmp_path: Path, dtype: str, shape: list[int]
) -> None:
    tensor = torch.zeros(shape, dtype=DTYPES[dtype])
    assert atb_bin.encode(tensor) == bin_bytes(tensor)
    file = write(tmp_path / "x.bin", atb_bin.encode(tensor))
    found = atb_bin.tensor_at(Folder(tmp_path), file.name)
    assert (found.dtype, list(found.shape)) == (DTYPES[dtype], shape)


def test_atb_has_no_code_for_some_dtypes_and_says_so() -> None:
    with pytest.raises(CorruptDumpError, match="of dtype float8_e5m2fnuz, which ATB has no code"):
        atb_bin.encode(torch.zeros(2).to(torch.float8_e5m2fnuz))


def test_files_of_tensors_beside_a_dump_are_not_left_out_without_a_word(tmp_path: Path) -> None:
    atb_round(tmp_path / "0_4242")
    save(X, tmp_path / "golden.pth")
    write(tmp_path / "raw.bin", bin_bytes(X))
    found = read(atb, tmp_path)
    for name in ("golden.pth", "raw.bin"):
        assert at(found, name).lost == (
            f"{name} is no file of layout atb, and is left out: open it alone"
        )
