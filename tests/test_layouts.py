"""Foreign dump layouts, built by hand as their writers would, and as an attacker would."""

from __future__ import annotations

import io
import json
import math
import os
import pickle
import struct
import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from llmdebug_nb.core.dtypes import DTYPES
from llmdebug_nb.core.errors import CorruptDumpError, NotADumpError
from llmdebug_nb.core.kernels.raw import to_bytes
from llmdebug_nb.core.kernels.summary import summarize
from llmdebug_nb.core.records import Record
from llmdebug_nb.store import layouts
from llmdebug_nb.store.layouts import Contents, atb, files, msit, msprobe, plain

X = torch.arange(6.0).reshape(2, 3)


def save(value: Any, file: Path) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    torch.save(value, file)
    return file


def write(file: Path, data: bytes | str) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(data if isinstance(data, bytes) else data.encode())
    return file


def at(
    contents: Contents, path: str, role: str = "output", slot: str = "0", step: int = 0, **more: Any
) -> Record:
    """Return the one record of a site."""
    wanted = {"path": path, "role": role, "slot": slot, "step": step, **more}
    found = [
        r
        for r in contents.records
        if all(getattr(r.site, name) == value for name, value in wanted.items())
    ]
    assert len(found) == 1, (wanted, [str(r.site) for r in contents.records])
    return found[0]


def paths(contents: Contents) -> list[str]:
    return list(dict.fromkeys(record.site.path for record in contents.records))


class Bomb:
    """Unpickled with code execution on, it leaves a file."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.target}",)


def check_numbering(contents: Contents) -> None:
    numbers = list(range(len(contents.records)))
    assert [r.id for r in contents.records] == numbers
    assert [r.seq for r in contents.records] == numbers


# -- msit ---------------------------------------------------------------------------------------


def tree(name: str, kind: str, *children: dict[str, Any]) -> dict[str, Any]:
    return {"name": name, "type": kind, "children": list(children)}


def msit_process(folder: Path, tokens: tuple[int, ...] = (0, 1)) -> Path:
    model = tree(
        "root",
        "LlamaForCausalLM",
        tree(
            "root.model",
            "LlamaModel",
            tree("root.model.norm2", "LlamaRMSNorm"),
            tree("root.model.fc", "Linear"),
        ),
        tree("root.lm_head", "Linear"),
    )
    write(folder / "model_tree.json", json.dumps(model))
    for token in tokens:
        base = folder / str(token)
        save(X + token, base / "root.model.norm2/input_0.pth")
        save(X * 2 + token, base / "root.model.norm2/output.pth")
        save(X * 2, base / "root.model.fc/input_0.pth")
        save(X * 3, base / "root.model.fc/output_0.pth")
        save(X * 4, base / "root.model.fc/output_2_0.pth")
        save(X * 5, base / "root/input_0.pth")
        save(X * 6, base / "root.model.softmax/output.pth")
    save(torch.nn.Parameter(X), folder / "weights/root.model.fc.weight.pth")
    return folder


@pytest.fixture
def msit_dump(tmp_path: Path) -> Path:
    msit_process(tmp_path / "msit_dump_20250101_000000/torch_tensors/cpu_4242")
    return tmp_path / "msit_dump_20250101_000000"


@pytest.mark.parametrize("inside", ["", "torch_tensors", "torch_tensors/cpu_4242"])
def test_msit_reads_the_same_from_dump_tensors_and_process_folder(
    msit_dump: Path, inside: str
) -> None:
    path = msit_dump / inside
    assert layouts.detect(path) is msit
    contents = msit.read(path)
    check_numbering(contents)
    assert at(contents, "model.norm2", step=1).summary == summarize(X * 2 + 1)
    assert (
        at(contents, "model.fc", "weight", "weight").summary.fingerprint == summarize(X).fingerprint
    )
    assert [(c.index, c.step, c.kind) for c in contents.calls] == [
        (0, 0, "prefill"),
        (1, 1, "decode"),
    ]


def test_msit_strips_the_root_prefix_and_dots_nested_slots(msit_dump: Path) -> None:
    contents = msit.read(msit_dump)
    assert at(contents, "", "input").op == "LlamaForCausalLM"
    assert at(contents, "model.fc", slot="2.0").summary == summarize(X * 4)
    assert at(contents, "model.fc").op == "Linear"


def test_msit_token_folder_alone_keeps_its_token_and_has_no_tree(msit_dump: Path) -> None:
    token = msit_dump / "torch_tensors/cpu_4242/1"
    assert layouts.detect(token) is msit
    contents = msit.read(token)
    assert {r.site.step for r in contents.records} == {1}
    assert contents.nodes == []
    assert contents.calls[0].kind == "decode"


def test_msit_follows_the_registered_order_inputs_in_outputs_out(msit_dump: Path) -> None:
    contents = msit.read(msit_dump)
    seen = [(r.site.path, r.site.role, r.site.slot) for r in contents.records if r.site.step == 0]
    assert seen == [
        ("model.fc", "weight", "weight"),
        ("", "input", "0"),
        ("model.norm2", "input", "0"),
        ("model.norm2", "output", "0"),
        ("model.fc", "input", "0"),
        ("model.fc", "output", "0"),
        ("model.fc", "output", "2.0"),
        ("model/softmax", "output", "0"),
    ]


def test_msit_tree_becomes_nodes_with_types_parents_and_parameters(msit_dump: Path) -> None:
    nodes = msit.read(msit_dump).nodes
    assert [(n.path, n.name, n.type, n.parent) for n in nodes] == [
        ("", "", "LlamaForCausalLM", -1),
        ("model", "model", "LlamaModel", 0),
        ("model.norm2", "norm2", "LlamaRMSNorm", 1),
        ("model.fc", "fc", "Linear", 1),
        ("lm_head", "lm_head", "Linear", 0),
    ]
    assert nodes[3].params == {"weight": [2, 3]}


def test_msit_folder_that_is_no_module_of_the_tree_is_an_api(msit_dump: Path) -> None:
    assert at(msit.read(msit_dump), "model/softmax").op == "softmax"


def test_msit_modules_without_a_tree_sort_by_number_not_by_letter(tmp_path: Path) -> None:
    for layer in (10, 2, 1):
        save(X, tmp_path / f"cpu_1/0/root.layers.{layer}/output.pth")
    assert paths(msit.read(tmp_path / "cpu_1")) == ["layers.1", "layers.2", "layers.10"]


def test_msit_ranks_number_the_processes_in_natural_order(tmp_path: Path) -> None:
    for device in (10, 2):
        save(X + device, tmp_path / f"torch_tensors/npu{device}_77/0/root.fc/output.pth")
    contents = msit.read(tmp_path)
    assert at(contents, "fc", rank=0).device == "npu:2"
    assert at(contents, "fc", rank=1).summary == summarize(X + 10)


def test_msit_load_reads_the_tensor_again(msit_dump: Path) -> None:
    contents = msit.read(msit_dump)
    assert torch.equal(contents.load(at(contents, "model.norm2", step=1)), X * 2 + 1)
    assert not contents.load(at(contents, "model.fc", "weight", "weight")).requires_grad


STATISTICS = """NodeName,NodeType,InputOutput,Index,DataType,Shape,Max,Min,Mean,L2Norm
root.fc,Linear,Input,0,torch.float16,"(2, 3)",5.0,0.0,2.5,7.41
root.fc,Linear,Output,0,torch.float16,"(4,)",nan,-inf,nan,nan
root.fc,Linear,Output,0,torch.int64,(),1.0,1.0,1.0,1.0
root.fc,Linear,Output,1,torch.float16,"(2"""


def test_msit_statistics_rows_become_records_without_payload(tmp_path: Path) -> None:
    write(tmp_path / "cpu_1/0/root.fc/statistics.csv", STATISTICS)
    contents = msit.read(tmp_path / "cpu_1")
    row = at(contents, "fc", "input")
    assert (row.op, row.payload, row.lost) == ("Linear", None, None)
    assert (row.summary.dtype, row.summary.shape, row.summary.max, row.summary.l2norm) == (
        "float16",
        (2, 3),
        5.0,
        7.41,
    )
    assert row.summary.nan is None
    first = at(contents, "fc", call=0).summary
    assert first.shape == (4,)
    assert first.min == -math.inf
    assert math.isnan(first.max or 0.0)
    assert at(contents, "fc", call=1).summary.shape == ()


def test_msit_statistics_row_that_was_cut_short_is_lost_with_a_reason(tmp_path: Path) -> None:
    write(tmp_path / "cpu_1/0/root.fc/statistics.csv", STATISTICS)
    assert "a row is cut short" in (at(msit.read(tmp_path / "cpu_1"), "fc", slot="1").lost or "")


def test_msit_tensor_is_preferred_to_its_statistics_row(tmp_path: Path) -> None:
    write(tmp_path / "cpu_1/0/root.fc/statistics.csv", STATISTICS)
    save(X, tmp_path / "cpu_1/0/root.fc/input_0.pth")
    record = at(msit.read(tmp_path / "cpu_1"), "fc", "input")
    assert record.summary == summarize(X)


def test_msit_parent_folder_of_two_dumps_is_refused_rather_than_mixed(tmp_path: Path) -> None:
    for time in "12":
        msit_process(tmp_path / f"msit_dump_{time}/torch_tensors/cpu_{time}")
    with pytest.raises(NotADumpError, match="holds 2 dumps: open one of msit_dump_1/torch_tensors"):
        msit.read(tmp_path)


@pytest.mark.parametrize("text", ["", "[]", "{", '{"name": 1, "type": "x"}', "[" * 100_000])
def test_msit_damaged_tree_leaves_the_tensors_readable_and_is_not_silent(
    msit_dump: Path, text: str
) -> None:
    write(msit_dump / "torch_tensors/cpu_4242/model_tree.json", text)
    contents = msit.read(msit_dump)
    assert at(contents, "model.fc").lost is None
    assert "model_tree.json" in (at(contents, "torch_tensors/cpu_4242/model_tree.json").lost or "")


# -- msprobe ------------------------------------------------------------------------------------


def leaf(tensor: torch.Tensor, **more: Any) -> dict[str, Any]:
    s = summarize(tensor)
    return {
        "type": "torch.Tensor",
        "dtype": f"torch.{s.dtype}",
        "shape": list(s.shape),
        "Max": s.max,
        "Min": s.min,
        "Mean": s.mean,
        "Norm": s.l2norm,
        "requires_grad": False,
        **more,
    }


ENTRIES: dict[str, Any] = {
    "Functional.linear.0.forward": {
        "input_args": [
            leaf(X, data_name="Functional.linear.0.forward.input.0.pt"),
            {"type": "int", "value": 3},
        ],
        "input_kwargs": {"bias": leaf(X + 1), "flag": {"type": "bool", "value": True}},
        "output": [leaf(X * 2, data_name="Functional.linear.0.forward.output.0.pt")],
    },
    "Module.layers.0.fc1.Linear.forward.0": {
        "input_args": [leaf(X), [leaf(X + 1), [leaf(X + 2)]]],
        "input_kwargs": {},
        "output": [leaf(X * 2), leaf(X * 3)],
        "parameters": {"weight": [leaf(X + 7)]},
    },
    "Functional.relu.0.forward": {"input_args": [], "input_kwargs": {}, "output": [leaf(X)]},
    "Functional.linear.1.forward": {"input_args": [], "input_kwargs": {}, "output": [leaf(X * 9)]},
    "Functional.linear.2.forward": {"input_args": [], "input_kwargs": {}, "output": [leaf(X * 10)]},
    "Module.head.Head.forward.0": {
        "input_args": [],
        "input_kwargs": {},
        "output": [{"logits": leaf(X), "hidden_states": [leaf(X), leaf(X * 5)]}],
    },
    "Module.layers.0.fc1.Linear.backward.0": {"input": [leaf(X * 4)], "output": [leaf(X * 5)]},
    "Module.layers.0.fc1.Linear.parameters_grad": {"weight": [leaf(X * 6)]},
}
CONSTRUCT = {
    "Functional.linear.0.forward": "Module.layers.0.fc1.Linear.forward.0",
    "Module.layers.0.fc1.Linear.forward.0": None,
    "Functional.relu.0.forward": None,
    "Functional.linear.1.forward": "Module.head.Head.forward.0",
    "Functional.linear.2.forward": "Module.head.Head.forward.0",
}


def msprobe_rank(folder: Path, entries: dict[str, Any] = ENTRIES, **head: Any) -> Path:
    document = {
        "task": "tensor",
        "level": "mix",
        "framework": "pytorch",
        "dump_data_dir": "/elsewhere/dump_tensor_data",
        **head,
        "data": entries,
    }
    write(folder / "dump.json", json.dumps(document))
    write(folder / "construct.json", json.dumps(CONSTRUCT))
    save(X, folder / "dump_tensor_data/Functional.linear.0.forward.input.0.pt")
    save(X * 2, folder / "dump_tensor_data/Functional.linear.0.forward.output.0.pt")
    return folder


@pytest.mark.parametrize("inside", ["", "step3", "step3/rank5"])
def test_msprobe_reads_root_step_and_rank_alike(tmp_path: Path, inside: str) -> None:
    msprobe_rank(tmp_path / "step3/rank5")
    assert layouts.detect(tmp_path / inside) is msprobe
    contents = msprobe.read(tmp_path / inside)
    check_numbering(contents)
    assert {(r.site.step, r.site.rank) for r in contents.records} == {(3, 5)}
    assert [(c.index, c.step, c.kind) for c in contents.calls] == [(3, 3, "forward")]
    assert contents.meta == {"task": "tensor", "level": "mix", "framework": "pytorch"}


@pytest.mark.parametrize("process", ["proc16342", "rank"])
def test_msprobe_process_that_is_not_distributed_is_rank_zero(tmp_path: Path, process: str) -> None:
    msprobe_rank(tmp_path / "step0" / process)
    assert {r.site.rank for r in msprobe.read(tmp_path).records} == {0}


def test_msprobe_keeps_the_order_of_the_json(tmp_path: Path) -> None:
    contents = msprobe.read(msprobe_rank(tmp_path / "step0/rank0"))
    assert paths(contents)[:4] == [
        "layers.0.fc1/Functional.linear",
        "layers.0.fc1",
        "Functional.relu",
        "head/Functional.linear",
    ]


def test_msprobe_api_path_names_the_module_it_ran_in_and_counts_calls_there(tmp_path: Path) -> None:
    contents = msprobe.read(msprobe_rank(tmp_path / "step0/rank0"))
    assert at(contents, "layers.0.fc1/Functional.linear").op == "Functional.linear"
    assert at(contents, "head/Functional.linear", call=0).summary.max == 45.0
    assert at(contents, "head/Functional.linear", call=1).summary.max == 50.0


def test_msprobe_without_construct_leaves_an_api_at_its_own_name_and_count(tmp_path: Path) -> None:
    write(msprobe_rank(tmp_path / "step0/rank0") / "construct.json", "{}")
    assert at(msprobe.read(tmp_path), "Functional.linear", call=2).summary.max == 50.0


def test_msprobe_construct_that_runs_in_circles_ends(tmp_path: Path) -> None:
    folder = msprobe_rank(tmp_path / "step0/rank0")
    write(
        folder / "construct.json",
        json.dumps({"Functional.relu.0.forward": "a", "a": "b", "b": "a"}),
    )
    assert at(msprobe.read(tmp_path), "Functional.relu").summary.max == 5.0


def test_msprobe_slots_are_dotted_and_scalars_left_out(tmp_path: Path) -> None:
    contents = msprobe.read(msprobe_rank(tmp_path / "step0/rank0"))
    sites = [
        r.site
        for r in contents.records
        if r.site.path == "layers.0.fc1" and r.site.phase == "forward"
    ]
    slots = {(site.role, site.slot) for site in sites}
    assert slots == {
        ("input", "0"),
        ("input", "1.0"),
        ("input", "1.1.0"),
        ("output", "0"),
        ("output", "1"),
        ("weight", "weight"),
    }
    linear = [
        (r.site.role, r.site.slot)
        for r in contents.records
        if r.site.path == "layers.0.fc1/Functional.linear"
    ]
    assert linear == [("input", "0"), ("input", "kwargs.bias"), ("output", "0")]
    assert at(contents, "head", slot="hidden_states.1").summary.max == 25.0


def test_msprobe_gradients_are_of_phase_backward(tmp_path: Path) -> None:
    contents = msprobe.read(msprobe_rank(tmp_path / "step0/rank0"))
    assert at(contents, "layers.0.fc1", "input", phase="backward").summary.max == 20.0
    assert at(contents, "layers.0.fc1", "weight", "weight", phase="backward").summary.max == 30.0


def test_msprobe_modules_become_nodes(tmp_path: Path) -> None:
    nodes = msprobe.read(msprobe_rank(tmp_path / "step0/rank0")).nodes
    assert [(n.path, n.type, n.parent) for n in nodes] == [
        ("", "", -1),
        ("layers", "", 0),
        ("layers.0", "", 1),
        ("layers.0.fc1", "Linear", 2),
        ("head", "Head", 0),
    ]
    assert nodes[3].params == {"weight": [2, 3]}


def test_msprobe_tensor_lies_beside_the_json_wherever_the_json_claims(tmp_path: Path) -> None:
    contents = msprobe.read(msprobe_rank(tmp_path / "step0/rank0"))
    record = at(contents, "layers.0.fc1/Functional.linear")
    assert record.summary.fingerprint is None, "figures are the dump's, no tensor is read for them"
    assert torch.equal(contents.load(record), X * 2)


def test_msprobe_tensor_without_figures_is_described_by_reading_it(tmp_path: Path) -> None:
    bare = {
        "type": "torch.Tensor",
        "dtype": "torch.float32",
        "shape": [2, 3],
        "Max": None,
        "Min": None,
        "Mean": None,
        "Norm": None,
        "data_name": "Functional.linear.0.forward.input.0.pt",
    }
    msprobe_rank(tmp_path / "step0/rank0", {"Functional.linear.0.forward": {"output": [bare]}})
    assert at(msprobe.read(tmp_path), "layers.0.fc1/Functional.linear").summary == summarize(X)


def test_msprobe_bare_nan_and_infinity_are_numbers(tmp_path: Path) -> None:
    entry = {"Torch.add.0.forward": {"output": [leaf(torch.tensor([math.nan, math.inf]))]}}
    folder = msprobe_rank(tmp_path / "step0/rank0", entry)
    assert "NaN" in (folder / "dump.json").read_text()
    summary = at(msprobe.read(tmp_path), "Torch.add").summary
    assert math.isnan(summary.max or 0.0)
    write(folder / "dump.json", (folder / "dump.json").read_text().replace("NaN", "-Infinity"))
    assert at(msprobe.read(tmp_path), "Torch.add").summary.max == -math.inf


def test_msprobe_statistics_of_a_bool_are_zero_and_one(tmp_path: Path) -> None:
    flag = {
        "type": "torch.Tensor",
        "dtype": "torch.bool",
        "shape": [2],
        "Max": True,
        "Min": False,
        "Mean": None,
    }
    msprobe_rank(
        tmp_path / "step0/rank0", {"Torch.gt.0.forward": {"output": [flag]}}, task="statistics"
    )
    record = at(msprobe.read(tmp_path), "Torch.gt")
    assert (record.summary.max, record.summary.min, record.summary.mean, record.payload) == (
        1.0,
        0.0,
        None,
        None,
    )


@pytest.mark.parametrize(
    ("stored", "expected"),
    [
        (f"{zlib.crc32(b'abc'):08x}", f"crc32:{zlib.crc32(b'abc'):08x}"),
        ("0x1F", "xor:0x000000000000001f"),
        ("-0x1", "xor:0xffffffffffffffff"),
        ("not hex", None),
    ],
)
def test_msprobe_checksum_is_called_what_it_is(
    tmp_path: Path, stored: str, expected: str | None
) -> None:
    entry = {"type": "torch.Tensor", "dtype": "torch.bfloat16", "shape": [3], "md5": stored}
    msprobe_rank(tmp_path / "step0/rank0", {"Torch.add.0.forward": {"output": [entry]}})
    record = at(msprobe.read(tmp_path), "Torch.add")
    assert record.summary.fingerprint == expected
    assert record.summary.dtype == "bfloat16"


@pytest.mark.parametrize("file", ["../secret.pt", "/etc/passwd", "absent.pt", "a\0b.pt", "..", "."])
def test_msprobe_data_name_never_leaves_its_folder(tmp_path: Path, file: str) -> None:
    save(X, tmp_path / "step0/rank0/secret.pt")
    entries = {
        "Torch.add.0.forward": {"input_args": [leaf(X)], "output": [leaf(X, data_name=file)]}
    }
    record = at(msprobe.read(msprobe_rank(tmp_path / "step0/rank0", entries)), "Torch.add")
    assert record.payload is None
    assert record.lost
    assert record.summary.max == 5.0, "what the JSON says of it stays"


@pytest.mark.parametrize(
    "bad",
    [
        {"shape": [-1]},
        {"shape": [1.5]},
        {"shape": "x"},
        {"shape": None},
        {"shape": [True]},
        {"shape": [1 << 70]},
    ],
)
def test_msprobe_impossible_shape_is_lost_and_the_rest_is_read(
    tmp_path: Path, bad: dict[str, Any]
) -> None:
    entries = {"Torch.add.0.forward": {"input_args": [leaf(X)], "output": [{**leaf(X), **bad}]}}
    contents = msprobe.read(msprobe_rank(tmp_path / "step0/rank0", entries))
    assert "no shape" in (at(contents, "Torch.add").lost or "")
    assert at(contents, "Torch.add", "input").lost is None


def test_msprobe_one_damaged_rank_does_not_hide_the_other(tmp_path: Path) -> None:
    msprobe_rank(tmp_path / "step0/rank0")
    write(tmp_path / "step0/rank1/dump.json", '{"data": {"Torch.add.0.forward": {')
    contents = msprobe.read(tmp_path)
    assert at(contents, "step0/rank1/dump.json", rank=1).lost
    assert at(contents, "layers.0.fc1", "weight", "weight", phase="forward").lost is None


@pytest.mark.parametrize("text", ["", "[]", '{"data": 3}', "\udcff", "[" * 200_000])
def test_msprobe_that_is_damaged_as_a_whole_is_refused_by_name(tmp_path: Path, text: str) -> None:
    write(tmp_path / "dump.json", text.encode("utf-8", "surrogateescape"))
    with pytest.raises(CorruptDumpError, match=r"dump\.json"):
        msprobe.read(tmp_path)


def test_msprobe_half_characters_in_names_can_be_stored(tmp_path: Path) -> None:
    msprobe_rank(
        tmp_path / "step0/rank0",
        {"Torch.\ud800.0.forward": {"output": [{**leaf(X), "dtype": "\ud800"}]}},
    )
    record = msprobe.read(tmp_path).records[0]
    f"{record.site} {record.op} {record.summary.dtype}".encode()


# -- ATB ----------------------------------------------------------------------------------------

CODES = {name: code for code, name in atb.ACL_DTYPES.items()}
EXAMPLE = (
    b"$Version=1.0\n$Object.Count=1\n$Object.Length=24\nformat=2\ndtype=0\ndims=2,3\n$Object.data=0,24\n$End=1\n"
    + struct.pack("<6f", *range(6))
)


def bin_bytes(tensor: torch.Tensor, **changed: Any) -> bytes:
    """Write a tensor as the probe does; ``changed`` replaces header values, None leaves a line out."""
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
    contents = atb.read(tmp_path)
    assert torch.equal(contents.load(contents.records[0]), X)
    assert contents.records[0].summary == summarize(X)
    assert contents.meta == {"formats": ["nd"]}


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
    contents = atb.read(tmp_path)
    found = contents.load(contents.records[0])
    assert (found.dtype, list(found.shape)) == (DTYPES[dtype], shape)
    assert to_bytes(found).tobytes() == raw
    assert contents.records[0].lost is None


@given(noise=st.binary(max_size=400), keep=st.integers(0, len(EXAMPLE)))
@settings(max_examples=300, deadline=None)
def test_atb_parser_takes_any_bytes_without_another_kind_of_error(noise: bytes, keep: int) -> None:
    for data in (noise, EXAMPLE[:keep] + noise, noise + EXAMPLE):
        try:
            made = atb.parse("x.bin", io.BytesIO(data), len(data))
        except CorruptDumpError:
            continue
        assert not made.kept or made.start + made.length <= len(data)


def test_atb_both_writers_layouts_are_read(atb_dump: Path) -> None:
    assert layouts.detect(atb_dump) is atb
    contents = atb.read(atb_dump)
    check_numbering(contents)
    assert [(c.index, c.step, c.kind) for c in contents.calls] == [
        (0, 0, "forward"),
        (1, 1, "forward"),
    ]
    record = at(contents, "10_Prefill_layer.1_LinearOperation", slot="2", step=1)
    assert (record.op, record.device) == ("LinearOperation", "npu:0")
    assert torch.equal(contents.load(record), X * 3)


def test_atb_follows_ids_by_number_inputs_in_outputs_out(atb_dump: Path) -> None:
    sites = [record.site for record in atb.read(atb_dump).records if record.site.step == 0]
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
    nodes = atb.read(atb_dump).nodes
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
        assert {r.site.step for r in atb.read(path).records} == {7}


def test_atb_ranks_number_the_processes_by_device(tmp_path: Path) -> None:
    for device in (10, 9):
        write(tmp_path / f"tensors/{device}_5/0/0_Add/after/outtensor0.bin", bin_bytes(X + device))
    assert at(atb.read(tmp_path), "0_Add", rank=0).summary == summarize(X + 9)


def test_atb_tensor_seen_on_the_other_side_has_a_slot_of_its_own(tmp_path: Path) -> None:
    base = tmp_path / "0_1/0/0_Add"
    for name in ("before/intensor0", "before/outtensor0", "after/intensor0", "after/outtensor0"):
        write(base / f"{name}.bin", bin_bytes(X))
    seen = [(r.site.role, r.site.slot) for r in atb.read(tmp_path).records]
    assert seen == [("input", "0"), ("output", "before.0"), ("input", "after.0"), ("output", "0")]


def test_atb_description_alone_has_no_payload_and_is_not_lost(tmp_path: Path) -> None:
    write(tmp_path / "0_1/0/0_Add/after/outtensor0.bin", bin_header(dtype=27))
    record = atb.read(tmp_path).records[0]
    assert (record.summary.dtype, record.summary.shape, record.payload, record.lost) == (
        "bfloat16",
        (2, 3),
        None,
        None,
    )


def test_atb_statistics_file_gives_its_figures(tmp_path: Path) -> None:
    text = b"format=nd\ntype=float\ndims=2x3\nmax=5\nmin=0\nmean=2.5\nl2norm=7.4162\n$End=1"
    write(tmp_path / "0_1/0/0_Add/after/outtensor0.bin", text)
    summary = atb.read(tmp_path).records[0].summary
    assert (summary.dtype, summary.shape, summary.max, summary.mean, summary.nan) == (
        "float32",
        (2, 3),
        5.0,
        2.5,
        None,
    )


STATISTIC = """Device and PID,Execution Count,Op Name,Op Type,Op Id,Input/Output,Index,Dtype,Format,Shape,Max,Min,Mean,\
Norm,Tensor Path
0_1,0,Layer/Linear,Linear,3_1,input,0,bf16,nd,2x3,5.000000,0.000000,2.500000,7.416198,N/A
0_1,0,Layer/Linear,Linear,3_1,output,0,int4,nd,2x3,N/A,N/A,N/A,N/A,N/A
0_1,0,Layer/Lin"""


def test_atb_statistic_table_gives_records_at_the_paths_of_the_folders(tmp_path: Path) -> None:
    write(tmp_path / "0_1/0/statistic.csv", STATISTIC)
    write(tmp_path / "0_1/0/3_Layer/1_Linear/before/intensor0.bin", bin_bytes(X))
    contents = atb.read(tmp_path)
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
    record = atb.read(tmp_path).records[0]
    assert (record.summary.dtype, record.summary.shape, record.payload) == (name, (2, 3), None)
    assert name in (record.lost or "")


def test_atb_writer_that_appended_gives_several_calls(tmp_path: Path) -> None:
    write(tmp_path / "0_1/0/0_Add/after/outtensor0.bin", bin_bytes(X) + bin_bytes(X * 2))
    contents = atb.read(tmp_path)
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
    contents = atb.read(tmp_path)
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
    contents = atb.read(tmp_path / "tensors")
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
        (bin_bytes(X, dims=f"{1 << 40},{1 << 40}"), "make no float32 tensor"),
        (bin_bytes(X, dims="-2,-3"), "no valid dims"),
        (bin_bytes(X, dims="9" * 200), "no valid dims"),
        (bin_bytes(X, dims=None), "no valid dims"),
        (bin_bytes(X, **{"$Object.Length": 1 << 62, "$Object.data": f"0,{1 << 50}"}), "cut short"),
        (bin_bytes(X, **{"$Object.Length": 8}), "places 24 bytes at 0 of an object of 8"),
        (bin_bytes(X, **{"$Object.data": "8,24"}), "places 24 bytes at 8"),
        (bin_bytes(X, **{"$Object.data": "-8,24"}), "no offset and length"),
        (bin_bytes(X, **{"$Object.data": None}), "bytes of no object"),
        (bin_bytes(X, extra="a=b"), "no key=value"),
        (bin_bytes(X, extra="a" * 9000), "no $End=1"),
    ],
)
def test_atb_damaged_file_is_lost_by_name_and_hides_no_other(
    tmp_path: Path, damaged: bytes, why: str
) -> None:
    write(tmp_path / "0_1/0/0_Add/after/outtensor0.bin", damaged)
    write(tmp_path / "0_1/0/1_Add/after/outtensor0.bin", EXAMPLE)
    contents = atb.read(tmp_path)
    lost = [record.lost for record in contents.records if record.lost]
    assert len(lost) == 1
    assert why in lost[0]
    assert "0_1/0/0_Add/after/outtensor0.bin" in lost[0]
    assert torch.equal(contents.load(at(contents, "1_Add")), X)


def test_atb_dump_of_nothing_but_damage_is_refused_by_name(tmp_path: Path) -> None:
    write(tmp_path / "0_1/0/0_Add/after/outtensor0.bin", b"junk")
    with pytest.raises(CorruptDumpError, match=r"0_Add/after/outtensor0\.bin"):
        atb.read(tmp_path)


def test_atb_file_that_changed_after_opening_is_refused_on_load(tmp_path: Path) -> None:
    file = write(tmp_path / "0_1/0/0_Add/after/outtensor0.bin", EXAMPLE)
    contents = atb.read(tmp_path)
    file.write_bytes(EXAMPLE[:-4])
    with pytest.raises(CorruptDumpError, match="cut short"):
        contents.load(contents.records[0])


# -- plain files --------------------------------------------------------------------------------


def test_plain_folder_names_records_by_file_and_by_key(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    np.save(tmp_path / "sub/model.layers.0.npy", X.numpy())
    save(X * 2, tmp_path / "a.pt")
    save({"fc.weight": X * 3, "n": 1, "inner": {"w": X * 4}}, tmp_path / "state.pth")
    save((X * 5, [X * 6]), tmp_path / "several.pt")
    np.savez(tmp_path / "z.npz", q=X.numpy() * 7)
    save_file({"head.weight": X.half()}, tmp_path / "m.safetensors")
    write(tmp_path / "readme.txt", "hi")
    assert layouts.detect(tmp_path) is plain
    contents = plain.read(tmp_path)
    check_numbering(contents)
    scale = {
        ("sub/model.layers.0", "0"): 1,
        ("a", "0"): 2,
        ("fc.weight", "0"): 3,
        ("inner.w", "0"): 4,
        ("several", "0"): 5,
        ("several", "1.0"): 6,
        ("q", "0"): 7,
        ("head.weight", "0"): 1,
    }
    assert len(contents.records) == len(scale)
    for (path, slot), factor in scale.items():
        assert torch.equal(contents.load(at(contents, path, slot=slot)).float(), X * factor), path
    assert at(contents, "head.weight").summary == summarize(X.half())


@pytest.mark.parametrize("name", ["x.npy", "x.pt", "x.safetensors"])
def test_plain_single_file_opens(tmp_path: Path, name: str) -> None:
    {
        "x.npy": lambda f: np.save(f, X.numpy()),
        "x.pt": lambda f: torch.save(X, f),
        "x.safetensors": lambda f: save_file({"x": X}, f),
    }[name](tmp_path / name)
    write(tmp_path / "other.pt", b"junk")
    assert layouts.detect(tmp_path / name) is plain
    contents = plain.read(tmp_path / name)
    assert [r.site.path for r in contents.records] == ["x"]
    assert torch.equal(contents.load(contents.records[0]), X)


def test_plain_key_in_several_files_is_preceded_by_the_files(tmp_path: Path) -> None:
    save({"logits": X, "loss": X}, tmp_path / "a.pt")
    save({"logits": X * 2}, tmp_path / "b.pt")
    assert sorted(paths(plain.read(tmp_path))) == ["a/logits", "b/logits", "loss"]


def test_plain_files_that_differ_in_their_ending_keep_it(tmp_path: Path) -> None:
    save(X, tmp_path / "x.pt")
    np.save(tmp_path / "x.npy", X.numpy())
    assert paths(plain.read(tmp_path)) == ["x.npy", "x.pt"]


def test_plain_is_detected_only_with_a_tensor_file(tmp_path: Path) -> None:
    write(tmp_path / "deep/er/notes.txt", "x")
    assert layouts.detect(tmp_path) is None
    assert layouts.detect(tmp_path / "absent") is None
    save(X, tmp_path / "deep/er/x.PT")
    assert layouts.detect(tmp_path) is plain


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor(3),
        torch.empty(0, 4),
        torch.tensor([True, False]),
        X.to(torch.bfloat16),
        X.to(torch.complex64),
        X.t(),
        torch.ones(1).expand(1000),
    ],
)
def test_plain_torch_tensors_of_any_kind_come_back(tmp_path: Path, tensor: torch.Tensor) -> None:
    save(tensor, tmp_path / "x.pt")
    contents = plain.read(tmp_path)
    assert torch.equal(contents.load(contents.records[0]), tensor)
    assert contents.records[0].summary == summarize(tensor)


@pytest.mark.parametrize(
    "array",
    [
        np.arange(3, dtype=">i4"),
        np.asfortranarray(X.numpy()),
        np.float64(3),
        np.zeros((0, 2)),
    ],
)
def test_plain_numpy_arrays_of_any_order_come_back(tmp_path: Path, array: np.ndarray) -> None:
    np.save(tmp_path / "x.npy", array)
    contents = plain.read(tmp_path)
    assert np.array_equal(contents.load(contents.records[0]).numpy(), array)


def hostile_npy(shape: str, dtype: str = "<f4", data: bytes = b"1234") -> bytes:
    head = f"{{'descr': '{dtype}', 'fortran_order': False, 'shape': {shape}, }}".ljust(117) + "\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(head)) + head.encode() + data


def hostile_zip(name: str, size: int) -> bytes:
    """A compressed archive whose member unfolds to ``size`` bytes."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(name, bytes(size))
    return out.getvalue()


def object_array() -> bytes:
    out = io.BytesIO()
    np.save(out, np.array([{}], dtype=object), allow_pickle=True)
    return out.getvalue()


def torch_bytes(value: Any, **options: Any) -> bytes:
    out = io.BytesIO()
    torch.save(value, out, **options)
    return out.getvalue()


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("bad.pt", b""),
        ("bad.pt", b"junk"),
        ("bad.pt", torch_bytes(X)[:-30]),
        ("bad.pt", torch_bytes(X)[:200]),
        ("bad.pt", torch_bytes(X, _use_new_zipfile_serialization=False)[:-5]),
        ("bad.pt", torch_bytes({"a": 1})),
        ("bad.pt", hostile_zip("a/data.pkl", 1 << 20)),
        ("bad.pt", torch_bytes(torch.ones(1).expand(1 << 20, 1 << 20))),
        ("bad.pth", pickle.dumps([1, 2])),
        ("bad.npy", b""),
        ("bad.npy", hostile_npy("(2, 3)")),
        ("bad.npy", hostile_npy(f"({1 << 60},)")),
        ("bad.npy", hostile_npy("(-1,)")),
        ("bad.npy", hostile_npy("(1,)", "<U1")),
        ("bad.npy", object_array()),
        ("bad.npz", b"PK\x03\x04junk"),
        ("bad.npz", hostile_zip("readme", 10)),
        ("bad.safetensors", b""),
        ("bad.safetensors", struct.pack("<Q", 1 << 60) + b"{}"),
        (
            "bad.safetensors",
            struct.pack("<Q", 64)
            + b'{"a":{"dtype":"F32","shape":[9],"data_offsets":[0,36]}}'.ljust(64),
        ),
    ],
)
def test_plain_damaged_file_is_lost_by_name_and_hides_no_other(
    tmp_path: Path, name: str, data: bytes
) -> None:
    write(tmp_path / name, data)
    save(X, tmp_path / "good.pt")
    contents = plain.read(tmp_path)
    assert at(contents, "good").lost is None
    (lost,) = [record for record in contents.records if record.lost]
    assert name in (lost.lost or "")
    with pytest.raises(CorruptDumpError, match=name):
        plain.read(tmp_path / name)


@pytest.mark.parametrize("legacy", [False, True])
@pytest.mark.parametrize("where", ["x.pt", "cpu_1/0/root.fc/output.pth"])
def test_pickled_code_is_never_run(tmp_path: Path, where: str, legacy: bool) -> None:
    target = tmp_path / "executed"
    folder = tmp_path / "dump"
    write(folder / where, torch_bytes(Bomb(target), _use_new_zipfile_serialization=not legacy))
    save(X, folder / Path(where).parent / ("good.pt" if where == "x.pt" else "input_0.pth"))
    layout = layouts.detect(folder)
    assert layout is not None
    (lost,) = [record.lost for record in layout.read(folder).records if record.lost]
    assert not target.exists()
    assert "no pickled code is run" in lost
    assert "system" in lost


def test_plain_container_that_holds_itself_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "_ITEMS_LIMIT", 1000)
    ring: list[Any] = []
    ring.append(ring)
    save(ring, tmp_path / "ring.pt")
    with pytest.raises(CorruptDumpError, match="nests more than 1,000"):
        plain.read(tmp_path)


def test_plain_archive_that_unfolds_out_of_proportion_is_refused(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(files, "_EXPANSION", 1 << 16)
    write(tmp_path / "x.npz", hostile_zip("x.npy", 1 << 20))
    with pytest.raises(CorruptDumpError, match="claims 1,048,576 bytes"):
        plain.read(tmp_path)


# -- every layout -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("base", "file"),
    [
        ("", "x.pt"),
        ("cpu_1", "0/root.fc/output.pth"),
        ("0_1", "0/0_Add/after/outtensor0.bin"),
    ],
)
def test_link_that_leads_out_of_the_folder_is_lost_and_one_inside_is_followed(
    tmp_path: Path,
    base: str,
    file: str,
) -> None:
    data = EXAMPLE if file.endswith(".bin") else torch_bytes(X)
    secret = write(tmp_path / "secret", data)
    folder = tmp_path / "dump" / base
    good = write(
        folder / file.replace("fc", "good").replace("Add", "Good").replace("x.", "good."), data
    )
    inside = folder / file.replace("fc", "linked").replace("Add", "Linked").replace("x.", "linked.")
    out = folder / file
    for link, target in ((inside, good), (out, secret)):
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(target)
    layout = layouts.detect(folder)
    assert layout is not None
    contents = layout.read(folder)
    assert len(contents.records) == 3
    (lost,) = [record.lost for record in contents.records if record.lost]
    assert f"{file} is a link that leads out of the folder" in lost
    for record in contents.records:
        assert record.lost or torch.equal(contents.load(record), X)


def test_linked_folder_that_leads_out_is_not_entered_and_not_silent(tmp_path: Path) -> None:
    save(X, tmp_path / "elsewhere/secret.pt")
    save(X, tmp_path / "dump/good.pt")
    (tmp_path / "dump/away").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "dump/round").symlink_to(tmp_path / "dump")
    contents = plain.read(tmp_path / "dump")
    assert {r.site.path: r.lost is None for r in contents.records} == {"good": True, "away": False}


def test_file_replaced_by_a_link_out_after_opening_is_refused_on_load(tmp_path: Path) -> None:
    secret = save(X, tmp_path / "secret.pt")
    file = save(X, tmp_path / "dump/x.pt")
    contents = plain.read(tmp_path / "dump")
    file.unlink()
    file.symlink_to(secret)
    with pytest.raises(CorruptDumpError, match="leads out"):
        contents.load(contents.records[0])


def test_pipe_named_like_a_tensor_does_not_block(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "x.pt")
    save(X, tmp_path / "good.pt")
    assert "not a regular file" in (at(plain.read(tmp_path), "x").lost or "")


def test_every_layout_has_a_name_of_its_own_and_none_claims_an_empty_folder(tmp_path: Path) -> None:
    assert [layout.NAME for layout in layouts.layouts()] == [
        "msprobe",
        "msit-torch",
        "atb",
        "files",
    ]
    assert layouts.detect(tmp_path) is None


@pytest.mark.parametrize(
    ("text", "shape"),
    [
        ("torch.Size([2, 3])", (2, 3)),
        ("(4,)", (4,)),
        ("()", ()),
        ("", ()),
        ("2x3", (2, 3)),
        ("2,3", (2, 3)),
        ([2, 3], (2, 3)),
    ],
)
def test_shape_is_read_in_every_notation(text: Any, shape: tuple[int, ...]) -> None:
    assert files.sizes(text) == shape


@pytest.mark.parametrize(
    "text", ["2,,3", "-1", "2.5", "x", "(2", "1e3", ["2"], {"a": 1}, None, str(1 << 64)]
)
def test_shape_that_is_none_is_refused(text: Any) -> None:
    with pytest.raises(CorruptDumpError, match="no shape"):
        files.sizes(text)
