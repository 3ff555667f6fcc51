"""Dumps of msit's layout are read."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

import llmdebug_nb as ld
from layout_files import X, at, check_numbering, paths, read, save, write
from llmdebug_nb.core.errors import NotADumpError
from llmdebug_nb.core.kernels.summary import summarize
from llmdebug_nb.store import layouts
from llmdebug_nb.store.layouts import msit


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
    contents = read(msit, path)
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
    contents = read(msit, msit_dump)
    assert at(contents, "", "input").op == "LlamaForCausalLM"
    assert at(contents, "model.fc", slot="2.0").summary == summarize(X * 4)
    assert at(contents, "model.fc").op == "Linear"


def test_msit_token_folder_alone_keeps_its_token_and_has_no_tree(msit_dump: Path) -> None:
    token = msit_dump / "torch_tensors/cpu_4242/1"
    assert layouts.detect(token) is msit
    contents = read(msit, token)
    assert {r.site.step for r in contents.records} == {1}
    assert contents.nodes == []
    assert contents.calls[0].kind == "decode"


def test_msit_follows_the_registered_order_inputs_in_outputs_out(msit_dump: Path) -> None:
    contents = read(msit, msit_dump)
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
    nodes = ld.open_run(msit_dump).nodes
    assert [(n.path, n.name, n.type, n.parent) for n in nodes] == [
        ("", "", "LlamaForCausalLM", -1),
        ("model", "model", "LlamaModel", 0),
        ("model.norm2", "norm2", "LlamaRMSNorm", 1),
        ("model.fc", "fc", "Linear", 1),
        ("lm_head", "lm_head", "Linear", 0),
    ]
    assert nodes[3].params == {"weight": [2, 3]}


def test_msit_folder_that_is_no_module_of_the_tree_is_an_api(msit_dump: Path) -> None:
    assert at(read(msit, msit_dump), "model/softmax").op == "softmax"


def test_msit_modules_without_a_tree_sort_by_number_not_by_letter(tmp_path: Path) -> None:
    for layer in (10, 2, 1):
        save(X, tmp_path / f"cpu_1/0/root.layers.{layer}/output.pth")
    assert paths(read(msit, tmp_path / "cpu_1")) == ["layers.1", "layers.2", "layers.10"]


def test_msit_ranks_number_the_processes_in_natural_order(tmp_path: Path) -> None:
    for device in (10, 2):
        save(X + device, tmp_path / f"torch_tensors/npu{device}_77/0/root.fc/output.pth")
    contents = read(msit, tmp_path)
    assert at(contents, "fc", rank=0).device == "npu:2"
    assert at(contents, "fc", rank=1).summary == summarize(X + 10)


@pytest.mark.parametrize("inside", ["", "ait_dump", "ait_dump/torch_tensors"])
def test_msit_older_dumps_name_devices_by_number_and_are_one_run(
    tmp_path: Path, inside: str
) -> None:
    """ait's documents: ``{DUMP_DIR}/ait_dump/torch_tensors/{device_id}_{PID}/{TID}``."""
    for device in (10, 2):
        process = msit_process(tmp_path / f"ait_dump/torch_tensors/{device}_77")
        save(X + device, process / "0/root.lm_head/output.pth")
    contents = read(msit, tmp_path / inside)
    assert {(r.site.rank, r.device) for r in contents.records} == {(0, "2"), (1, "10")}
    assert at(contents, "lm_head", rank=1).summary == summarize(X + 10)
    assert at(contents, "model.fc", step=1, rank=1).op == "Linear"
    alone = read(msit, tmp_path / "ait_dump/torch_tensors/10_77")
    assert at(alone, "lm_head").summary == summarize(X + 10)


def test_msit_load_reads_the_tensor_again(msit_dump: Path) -> None:
    contents = read(msit, msit_dump)
    assert torch.equal(contents.load(at(contents, "model.norm2", step=1)), X * 2 + 1)
    assert not contents.load(at(contents, "model.fc", "weight", "weight")).requires_grad


STATISTICS = """NodeName,NodeType,InputOutput,Index,DataType,Shape,Max,Min,Mean,L2Norm
root.fc,Linear,Input,0,torch.float16,"(2, 3)",5.0,0.0,2.5,7.41
root.fc,Linear,Output,0,torch.float16,"(4,)",nan,-inf,nan,nan
root.fc,Linear,Output,0,torch.int64,(),1.0,1.0,1.0,1.0
root.fc,Linear,Output,1,torch.float16,"(2"""


def test_msit_statistics_rows_become_records_without_payload(tmp_path: Path) -> None:
    write(tmp_path / "cpu_1/0/root.fc/statistics.csv", STATISTICS)
    contents = read(msit, tmp_path / "cpu_1")
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
    assert "a row is cut short" in (at(read(msit, tmp_path / "cpu_1"), "fc", slot="1").lost or "")


def test_msit_tensor_is_preferred_to_its_statistics_row(tmp_path: Path) -> None:
    write(tmp_path / "cpu_1/0/root.fc/statistics.csv", STATISTICS)
    save(X, tmp_path / "cpu_1/0/root.fc/input_0.pth")
    record = at(read(msit, tmp_path / "cpu_1"), "fc", "input")
    assert record.summary == summarize(X)


def test_msit_parent_folder_of_two_dumps_is_refused_rather_than_mixed(tmp_path: Path) -> None:
    for time in "12":
        msit_process(tmp_path / f"msit_dump_{time}/torch_tensors/cpu_{time}")
    with pytest.raises(NotADumpError, match="holds 2 dumps: open one of msit_dump_1/torch_tensors"):
        read(msit, tmp_path)


@pytest.mark.parametrize("text", ["", "[]", "{", '{"name": 1, "type": "x"}', "[" * 100_000])
def test_msit_damaged_tree_leaves_the_tensors_readable_and_is_not_silent(
    msit_dump: Path, text: str
) -> None:
    write(msit_dump / "torch_tensors/cpu_4242/model_tree.json", text)
    contents = read(msit, msit_dump)
    assert at(contents, "model.fc").lost is None
    assert "model_tree.json" in (at(contents, "torch_tensors/cpu_4242/model_tree.json").lost or "")
