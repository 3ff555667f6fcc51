"""Dumps of msprobe's layout are read."""

from __future__ import annotations

import json
import math
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch

import llmdebug_nb as ld
from layout_files import X, at, check_numbering, paths, read, save, write
from llmdebug_nb.core.errors import CorruptDumpError
from llmdebug_nb.core.kernels.summary import summarize
from llmdebug_nb.core.records import Site
from llmdebug_nb.store import layouts
from llmdebug_nb.store.layouts import msprobe


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
    contents = read(msprobe, tmp_path / inside)
    check_numbering(contents)
    assert {(r.site.step, r.site.rank) for r in contents.records} == {(3, 5)}
    assert [(c.index, c.step, c.kind) for c in contents.calls] == [(3, 3, "forward")]
    assert contents.meta == {"task": "tensor", "level": "mix", "framework": "pytorch"}


@pytest.mark.parametrize("process", ["proc16342", "rank"])
def test_msprobe_process_that_is_not_distributed_is_rank_zero(tmp_path: Path, process: str) -> None:
    msprobe_rank(tmp_path / "step0" / process)
    assert {r.site.rank for r in read(msprobe, tmp_path).records} == {0}


def test_msprobe_keeps_the_order_of_the_json(tmp_path: Path) -> None:
    contents = read(msprobe, msprobe_rank(tmp_path / "step0/rank0"))
    assert paths(contents)[:4] == [
        "layers.0.fc1/Functional.linear",
        "layers.0.fc1",
        "Functional.relu",
        "head/Functional.linear",
    ]


def test_msprobe_api_path_names_the_module_it_ran_in_and_counts_calls_there(tmp_path: Path) -> None:
    contents = read(msprobe, msprobe_rank(tmp_path / "step0/rank0"))
    assert at(contents, "layers.0.fc1/Functional.linear").op == "Functional.linear"
    assert at(contents, "head/Functional.linear", call=0).summary.max == 45.0
    assert at(contents, "head/Functional.linear", call=1).summary.max == 50.0


def test_msprobe_without_construct_leaves_an_api_at_its_own_name_and_count(tmp_path: Path) -> None:
    write(msprobe_rank(tmp_path / "step0/rank0") / "construct.json", "{}")
    assert at(read(msprobe, tmp_path), "Functional.linear", call=2).summary.max == 50.0


def test_msprobe_construct_that_runs_in_circles_ends(tmp_path: Path) -> None:
    folder = msprobe_rank(tmp_path / "step0/rank0")
    write(
        folder / "construct.json",
        json.dumps({"Functional.relu.0.forward": "a", "a": "b", "b": "a"}),
    )
    assert at(read(msprobe, tmp_path), "Functional.relu").summary.max == 5.0


def test_msprobe_slots_are_dotted_and_scalars_left_out(tmp_path: Path) -> None:
    contents = read(msprobe, msprobe_rank(tmp_path / "step0/rank0"))
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
    contents = read(msprobe, msprobe_rank(tmp_path / "step0/rank0"))
    assert at(contents, "layers.0.fc1", "input", phase="backward").summary.max == 20.0
    assert at(contents, "layers.0.fc1", "weight", "weight", phase="backward").summary.max == 30.0


def test_msprobe_modules_become_nodes(tmp_path: Path) -> None:
    nodes = ld.open_run(msprobe_rank(tmp_path / "step0/rank0")).nodes
    assert [(n.path, n.type, n.parent) for n in nodes] == [
        ("", "", -1),
        ("layers", "", 0),
        ("layers.0", "", 1),
        ("layers.0.fc1", "Linear", 2),
        ("head", "Head", 0),
    ]
    assert nodes[3].params == {"weight": [2, 3]}


def test_msprobe_tensor_lies_beside_the_json_wherever_the_json_claims(tmp_path: Path) -> None:
    contents = read(msprobe, msprobe_rank(tmp_path / "step0/rank0"))
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
    assert at(read(msprobe, tmp_path), "layers.0.fc1/Functional.linear").summary == summarize(X)


def test_msprobe_bare_nan_and_infinity_are_numbers(tmp_path: Path) -> None:
    entry = {"Torch.add.0.forward": {"output": [leaf(torch.tensor([math.nan, math.inf]))]}}
    folder = msprobe_rank(tmp_path / "step0/rank0", entry)
    assert "NaN" in (folder / "dump.json").read_text(encoding="utf-8")
    summary = at(read(msprobe, tmp_path), "Torch.add").summary
    assert math.isnan(summary.max or 0.0)
    write(
        folder / "dump.json",
        (folder / "dump.json").read_text(encoding="utf-8").replace("NaN", "-Infinity"),
    )
    assert at(read(msprobe, tmp_path), "Torch.add").summary.max == -math.inf


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
    record = at(read(msprobe, tmp_path), "Torch.gt")
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
    record = at(read(msprobe, tmp_path), "Torch.add")
    assert record.summary.fingerprint == expected
    assert record.summary.dtype == "bfloat16"


@pytest.mark.parametrize("file", ["../secret.pt", "/etc/passwd", "absent.pt", "a\0b.pt", "..", "."])
def test_msprobe_data_name_never_leaves_its_folder(tmp_path: Path, file: str) -> None:
    save(X, tmp_path / "step0/rank0/secret.pt")
    entries = {
        "Torch.add.0.forward": {"input_args": [leaf(X)], "output": [leaf(X, data_name=file)]}
    }
    record = at(read(msprobe, msprobe_rank(tmp_path / "step0/rank0", entries)), "Torch.add")
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
    contents = read(msprobe, msprobe_rank(tmp_path / "step0/rank0", entries))
    assert "not a shape" in (at(contents, "Torch.add").lost or "")
    assert at(contents, "Torch.add", "input").lost is None


def test_msprobe_one_damaged_rank_does_not_hide_the_other(tmp_path: Path) -> None:
    msprobe_rank(tmp_path / "step0/rank0")
    write(tmp_path / "step0/rank1/dump.json", '{"data": {"Torch.add.0.forward": {')
    contents = read(msprobe, tmp_path)
    assert at(contents, "step0/rank1/dump.json", rank=1).lost
    assert at(contents, "layers.0.fc1", "weight", "weight", phase="forward").lost is None


@pytest.mark.parametrize("text", ["", "[]", '{"data": 3}', "\udcff", "[" * 200_000])
def test_msprobe_that_is_damaged_as_a_whole_is_refused_by_name(tmp_path: Path, text: str) -> None:
    write(tmp_path / "dump.json", text.encode("utf-8", "surrogateescape"))
    with pytest.raises(CorruptDumpError, match=r"dump\.json"):
        read(msprobe, tmp_path)


def test_msprobe_half_characters_in_names_can_be_stored(tmp_path: Path) -> None:
    msprobe_rank(
        tmp_path / "step0/rank0",
        {"Torch.\ud800.0.forward": {"output": [{**leaf(X), "dtype": "\ud800"}]}},
    )
    record = read(msprobe, tmp_path).records[0]
    f"{record.site} {record.op} {record.summary.dtype}".encode()


LINES = [
    "File /opt/venv/lib/python3.11/site-packages/torch/nn/modules/linear.py, line 134, in forward,"
    " \n return F.linear(input, self.weight, self.bias)",
    "File /srv/program/model.py, line 19, in forward, \n return self.fc2(self.fc1(x))",
    "File /srv/program/run.py, line 3, in <module>, \n model(x)",
]
LINEAR, FC1 = "Functional.linear.0.forward", "Module.layers.0.fc1.Linear.forward.0"
SHARED = {"0": [[LINEAR, FC1], LINES], "1": [["Functional.relu.0.forward"], LINES[2:]]}
EACH = {LINEAR: LINES, FC1: LINES, "Functional.relu.0.forward": LINES[2:]}


@pytest.mark.parametrize("document", [SHARED, EACH], ids=["26.2", "1.2"])
def test_msprobe_knows_the_lines_that_led_to_each_call(tmp_path: Path, document: Any) -> None:
    folder = msprobe_rank(tmp_path / "step0/rank0")
    write(folder / "stack.json", json.dumps(document))
    run = ld.open_run(tmp_path)
    program = ["/srv/program/model.py:19 forward", "/srv/program/run.py:3 <module>"]
    assert run.stack("layers.0.fc1/Functional.linear") == program
    assert run.stack("layers.0.fc1") == program  # which calls the module
    assert run.stack("Functional.relu") == program[1:]
    (frame,) = run.index.frames(Site("layers.0.fc1/Functional.linear").key)
    assert run.index.code(frame) == "return self.fc2(self.fc1(x))"
    operators = run.operators()
    assert list(operators["op"]) == ["Functional.linear", "Functional.relu"]
    assert list(operators["source"]) == program


@pytest.mark.parametrize(
    "document",
    ["[1]", "{", json.dumps({LINEAR: 5}), json.dumps({"0": [[1], "File a, line 1, in b"]})],
)
def test_msprobe_whose_stacks_are_damaged_opens_and_says_so(tmp_path: Path, document: str) -> None:
    folder = msprobe_rank(tmp_path / "step0/rank0")
    write(folder / "stack.json", document)
    run = ld.open_run(tmp_path)
    (lost,) = (r.lost for r in run.records() if r.site.path.endswith("stack.json"))
    assert "stack.json" in (lost or "")
    assert run.operators().empty


def test_lines_that_are_none_are_left_out_of_a_stack(tmp_path: Path) -> None:
    folder = msprobe_rank(tmp_path / "step0/rank0")
    remark = "The call stack retrieval failed."
    document = {"0": [[LINEAR, 7], [remark, None, LINES[2]]], "1": [[FC1], [remark]]}
    write(folder / "stack.json", json.dumps(document))
    run = ld.open_run(tmp_path)
    assert run.stack("layers.0.fc1/Functional.linear") == ["/srv/program/run.py:3 <module>"]
    assert len(run.operators()) == 1


def test_msprobe_writes_the_lines_of_a_recording_and_reads_them_again(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.ReLU())
    with ld.dump(model, name="lines", mode="module+api", path=tmp_path / "run") as run:
        model(X)  # here
    ld.export_dump(run, tmp_path / "out", layout="msprobe")
    document = json.loads((tmp_path / "out/step0/rank0/stack.json").read_text())
    ((calls, (*_, line)),) = document.values()
    assert calls[:2] == ["Module.0.Linear.forward.0", LINEAR]
    assert line.endswith("\n model(X)  # here") or len(document["0"][1]) > 1
    again = ld.open_run(tmp_path / "out")
    for path in ("0/Functional.linear", "1/Functional.relu"):
        assert again.stack(path) == run.stack(path)
    assert again.stack("0") == run.stack("0/Functional.linear")


def test_a_finding_in_a_dump_of_modules_names_the_line_that_calls_the_module(
    tmp_path: Path,
) -> None:
    module = "Module.fc.Linear.forward.0"
    for name, factor in (("golden", 1), ("mine", 2)):
        folder = tmp_path / name / "step0/rank0"
        entries = {
            module: {
                "input_args": [leaf(X, data_name="i.pt")],
                "output": [leaf(X * factor + 1, data_name="o.pt")],
            }
        }
        write(folder / "dump.json", json.dumps({"task": "tensor", "data": entries}))
        write(folder / "stack.json", json.dumps({"0": [[module], LINES]}))
        save(X, folder / "dump_tensor_data/i.pt")
        save(X * factor + 1, folder / "dump_tensor_data/o.pt")
    report = ld.compare(tmp_path / "golden", tmp_path / "mine", progress=False)
    (finding,) = report.findings
    assert finding.mine is not None
    assert (finding.mine.file, finding.mine.line) == ("/srv/program/model.py", 19)
    assert finding.mine.code == "return self.fc2(self.fc1(x))"
