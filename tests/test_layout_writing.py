"""What is written in the layouts of other tools opens again, with the same tensors."""

from __future__ import annotations

import csv
import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import llmdebug_nb as ld
from layout_files import EXAMPLE, X, at, read
from layout_files import write as put
from llmdebug_nb.cli import main
from llmdebug_nb.core.errors import OptionError, StoreError
from llmdebug_nb.core.kernels.raw import to_bytes
from llmdebug_nb.core.kernels.summary import summarize
from llmdebug_nb.core.records import Node, Record, Site
from llmdebug_nb.store import layouts
from llmdebug_nb.store.layouts import Contents, atb, atb_writing, msit, msprobe, plain, writing
from test_layout_torchair import tensors

TREE = {"": "Net", "a": "Block", "a.b": "Linear", "layers": "ModuleList", "layers.0": "Block"}
PLACES = {path: place for place, path in enumerate(TREE)}
NODES = [
    Node(path, path.rpartition(".")[2], kind, PLACES[path.rpartition(".")[0]] if path else -1)
    for path, kind in TREE.items()
]
Made = list[tuple[Site, torch.Tensor]]


def export(
    writer: writing.Writer, made: Made, folder: Path, stats: bool = False
) -> tuple[writing.Written, Contents]:
    """Write tensors at sites, and read them again."""
    values = dict(enumerate(tensor for _, tensor in made))
    records = [
        Record(number, site, number, _op(site.path), summarize(tensor),
               payload=None if stats else number)
        for number, (site, tensor) in enumerate(made)
    ]  # fmt: skip
    dump = writing.Dump(records, NODES, lambda record: values[record.id], lambda record: None)
    written = writing.write(writer, dump, folder)
    layout = layouts.detect(folder)
    assert layout is not None
    return written, read(layout, folder)


def _op(path: str) -> str:
    return path.partition("/")[2] or TREE.get(path) or path.rpartition(".")[2].partition("_")[2]


def seen(contents: Contents, *columns: str) -> Counter[Any]:
    assert not [record.lost for record in contents.records if record.lost]
    return Counter(
        (*(getattr(r.site, name) for name in columns), _bytes(contents.load(r)))
        for r in contents.records
    )


def wanted(made: Made, *columns: str) -> Counter[Any]:
    return Counter((*(getattr(s, name) for name in columns), _bytes(t)) for s, t in made)


def _bytes(tensor: torch.Tensor) -> tuple[str, str, bytes]:
    return str(tensor.dtype), str(tuple(tensor.shape)), to_bytes(tensor).tobytes()


def sites(paths: list[str], slots: list[str], **more: Any) -> st.SearchStrategy[Made]:
    columns = {
        "path": st.sampled_from(paths), "step": st.integers(0, 11), "slot": st.sampled_from(slots),
        "role": st.sampled_from(["input", "output"]), **more,
    }  # fmt: skip
    one = st.tuples(st.builds(Site, **columns), tensors)
    return st.lists(one, min_size=1, max_size=8, unique_by=lambda pair: pair[0])


quick = settings(deadline=None, max_examples=60)
MODULES = ["a", "a.b", "layers.0", "a/Functional.linear", "layers.0/Tensor.add"]


@quick
@given(made=sites(["", *MODULES, "Functional.relu"], ["0", "1", "0.1"]))
def test_msit_has_every_tensor_of_a_token_at_its_place(tmp_path_factory, made: Made) -> None:
    written, contents = export(msit.write, made, tmp_path_factory.mktemp("x") / "out")
    assert (written.tensors, not written.left_out) == (len(made), True)
    as_there = [(_without_prefix(site), tensor) for site, tensor in made]
    columns = ("path", "step", "role", "slot", "rank")
    assert seen(contents, *columns) == wanted(as_there, *columns)
    assert {node.path: node.type for node in contents.nodes}.items() >= TREE.items()


def _without_prefix(site: Site) -> Site:
    module, slash, operator = site.path.partition("/")
    bare = operator.partition(".")[2]
    path = f"{module}/{bare}" if slash else module
    return Site(path, site.step, role=site.role, slot=site.slot)


@quick
@given(
    made=sites(
        MODULES,
        ["0", "1", "2.0", "2.1"],
        call=st.integers(0, 1),
        rank=st.integers(0, 1),
        phase=st.sampled_from(["forward", "backward"]),
    )
)
def test_msprobe_has_every_tensor_at_its_place(tmp_path_factory, made: Made) -> None:
    made.sort(key=lambda pair: pair[0].call)
    written, contents = export(msprobe.write, made, tmp_path_factory.mktemp("x") / "out")
    assert (written.tensors, not written.left_out) == (len(made), True)
    columns = ("path", "step", "role", "slot", "rank", "phase")
    assert seen(contents, *columns) == wanted(made, *columns)
    modules = [pair for pair in made if "/" not in pair[0].path]
    assert wanted(modules, "call", *columns) <= seen(contents, "call", *columns)


@quick
@given(
    made=sites(["0_Add", "1_Layer.10_Linear", "1_Layer"], ["0", "7"], rank=st.integers(0, 0)),
    calls=st.integers(1, 3),
)
def test_atb_has_every_tensor_of_its_own_dumps_at_its_place(
    tmp_path_factory, made: Made, calls: int
) -> None:
    every = [
        (Site(s.path, s.step, call, role=s.role, slot=s.slot), tensor)
        for s, tensor in made
        for call in range(calls)
    ]
    written, contents = export(atb_writing.write, every, tmp_path_factory.mktemp("x") / "out")
    assert (written.tensors, not written.left_out) == (len(every), True)
    columns = ("path", "step", "role", "slot", "call")
    assert seen(contents, *columns) == wanted(every, *columns)


@quick
@given(
    made=sites(["0_Add", "1_Layer.10_Linear", "1_Layer"], ["0", "7"], rank=st.integers(0, 1)),
    calls=st.integers(1, 2),
    same=st.booleans(),
)
def test_msprobes_probe_names_an_equal_tensor_of_the_round_in_place_of_its_values(
    tmp_path_factory, made: Made, calls: int, same: bool
) -> None:
    every = [
        (
            Site(s.path, s.step, call, role=s.role, slot=s.slot, rank=s.rank),
            made[0][1] if same else t,
        )
        for s, t in made
        for call in range(calls)
    ]
    folder = tmp_path_factory.mktemp("x") / "out"
    written, contents = export(atb_writing.write_msprobe, every, folder)
    assert (written.tensors, not written.left_out) == (len(every), True)
    columns = ("path", "step", "role", "slot", "call")
    assert seen(contents, *columns) == wanted(every, *columns)
    rounds = {(s.rank, s.step) for s, _ in every}
    held = b"".join(file.read_bytes() for file in folder.rglob("*.bin")).count(b"$Object.data=")
    assert not same or held == len(rounds)  # once in each


def test_msprobes_table_has_the_figures_and_its_files_describe_what_has_none(
    tmp_path: Path,
) -> None:
    written, contents = export(atb_writing.write_msprobe, STATS, tmp_path / "out", stats=True)
    assert (written.tensors, written.described) == (0, 2)
    assert not list((tmp_path / "out").rglob("*.bin"))
    figures = {r.site.step: r.summary for r in contents.records}
    assert figures[0].l2norm == summarize(X).l2norm
    assert (figures[1].min, figures[1].max, figures[1].mean) == (0.0, 10.0, 5.0)
    empty = [(Site("a", 0), X[:0])]
    written, contents = export(atb_writing.write_msprobe, empty, tmp_path / "b", stats=True)
    assert written.described == 1
    (record,) = contents.records
    assert (record.summary.dtype, record.summary.shape, record.payload) == ("float32", (0, 3), None)


@pytest.mark.parametrize("layout", ["atb", "atb-msprobe"])
def test_a_dump_of_descriptions_alone_is_written_as_one(tmp_path: Path, layout: str) -> None:
    described = EXAMPLE.partition(b"$Object.data")[0].replace(b"Length=24", b"Length=0")
    file = tmp_path / "dump/tensors/0_1/0/0_Add/after/outtensor0.bin"
    put(file, described.replace(b"Count=1", b"Count=0") + b"$End=1\n")
    written = ld.export_dump(tmp_path / "dump", tmp_path / "out", layout=layout)
    assert (written.tensors, written.described) == (0, 1)
    (again,) = (tmp_path / "out").rglob("outtensor0.bin")
    assert again.read_bytes() == file.read_bytes()
    (record,) = ld.open_run(tmp_path / "out").records()
    assert (record.summary.dtype, record.summary.shape, record.payload) == ("float32", (2, 3), None)


@quick
@given(made=sites(["", *MODULES], ["0", "kwargs.mask", "hidden.1"]))
def test_atb_makes_operations_of_modules_within_those_around_them(
    tmp_path_factory, made: Made
) -> None:
    written, contents = export(atb_writing.write, made, tmp_path_factory.mktemp("x") / "out")
    assert (written.tensors, not written.left_out) == (len(made), True)
    assert seen(contents, "step", "role") == wanted(made, "step", "role")
    depth = {site.path: 0 for site, _ in made}
    for path in depth:
        module, slash, _ = path.partition("/")
        around = [each for each in depth if each != path and "/" not in each and (
            each == "" or (module == each and slash) or module.startswith(f"{each}."))]  # fmt: skip
        depth[path] = len(around)
    assert Counter(r.site.path.count(".") for r in contents.records) == Counter(
        depth[site.path] for site, _ in made
    )


@quick
@given(
    made=sites(
        ["", *MODULES, "../up", "a b", "A"],
        ["0", "kwargs.mask"],
        call=st.integers(0, 1),
        rank=st.integers(0, 1),
        phase=st.sampled_from(["forward", "backward"]),
    )
)
def test_npy_has_every_tensor_in_a_file_of_its_own(tmp_path_factory, made: Made) -> None:
    folder = tmp_path_factory.mktemp("x") / "out"
    written, contents = export(plain.write, made, folder)
    assert written.tensors == len(made) == len([f for f in folder.rglob("*") if f.is_file()])
    assert not [file for file in folder.parent.iterdir() if file != folder]
    assert seen(contents) == wanted(made)


STATS = [(Site("a", 0), X), (Site("a", 1, role="input"), X * 2)]


@pytest.mark.parametrize("writer", [msit.write, msprobe.write, atb_writing.write])
def test_statistics_without_values_are_statistics_there(tmp_path: Path, writer: Any) -> None:
    written, contents = export(writer, STATS, tmp_path / "out", stats=True)
    assert (written.tensors, written.described) == (0, 2)
    figures = sorted(
        (s.dtype, s.shape, s.min, s.max, s.mean, round(s.l2norm or 0, 9))
        for s in (record.summary for record in contents.records)
    )
    assert figures == [
        ("float32", (2, 3), 0.0, 5.0, 2.5, round(55**0.5, 9)),
        ("float32", (2, 3), 0.0, 10.0, 5.0, round(220**0.5, 9)),
    ]


@pytest.mark.parametrize(
    ("writer", "site", "why"),
    [
        (msit.write, Site("a", call=1), "of further calls in a token"),
        (msit.write, Site("a", slot="logits"), "of arguments and results with names"),
        (msit.write, Site("a", phase="backward"), "of backward passes"),
        (msit.write, Site("a b"), "whose path is no name of a file"),
        (msit.write, Site("a", generation=1), "of a later or earlier generation"),
        (msprobe.write, Site(""), "of the root module"),
        (atb_writing.write_msprobe, Site("a", slot="after.0", role="input"), "seen when msprobe's"),
        (atb_writing.write, Site("a", role="weight", slot="weight"), "of weights"),
    ],
)
def test_what_a_layout_has_no_place_for_is_counted_with_the_reason(
    tmp_path: Path, writer: Any, site: Site, why: str
) -> None:
    written, contents = export(writer, [(Site("a"), X), (site, X)], tmp_path / "out")
    ((said, count),) = written.left_out.items()
    assert said.startswith(why)
    assert (count, written.tensors, len(contents.records)) == (1, 1, 1)
    with pytest.raises(StoreError, match="nothing was written to"):
        export(writer, [(site, X)], tmp_path / "none")


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 6), nn.Linear(6, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x)))


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ld.Run:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    model = _Net()
    with torch.no_grad(), ld.dump(model, name="golden", tokens="all", weights=True):
        for _ in range(2):
            model(torch.ones(2, 4))
    return ld.open_run("golden")


@pytest.mark.parametrize("layout", ["msit", "msprobe", "atb", "atb-msprobe", "npy"])
def test_a_recorded_run_is_exported_and_compared_with_itself(run, layout: str, capsys) -> None:
    assert main(["export", "golden", "--layout", layout, "-o", layout]) == 0
    said = capsys.readouterr().out
    assert said.startswith("written: ")
    again = ld.open_run(layout)
    assert len(again) == int(said.split()[1])
    if layout != "npy":  # it has no steps
        assert [call.step for call in again.steps()] == [0, 1]
        assert ld.compare(run, again, progress=False).verdict == "match"


def test_weights_and_model_tree_are_where_msit_has_them(run) -> None:
    written = ld.export_dump(run, "out", layout="msit")
    assert not written.left_out
    (home,) = Path("out/torch_tensors").iterdir()
    weight = run.tensor("up", role="weight", slot="weight")
    assert torch.equal(torch.load(home / "weights/root.up.weight.pth"), weight)
    assert torch.equal(torch.load(home / "1/root.down/output.pth"), run.tensor("down", step=1))
    tree = json.loads((home / "model_tree.json").read_text())
    assert (tree["name"], tree["type"]) == ("root", "_Net")
    assert [child["name"] for child in tree["children"]] == ["root.up", "root.down"]


def test_the_figures_of_msits_analysis_are_those_of_the_files(run) -> None:
    ld.export_dump(run, "out", layout="msit")
    with open("out/tensor_analyze.csv", encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == [
        "Node Name", "Node Type", "Tensor Path", "dtype", "shape", "max", "min", "variance", "mean",
    ]  # fmt: skip
    files = [file for file in Path("out").rglob("*.pth") if file.parent.name != "weights"]
    assert {row["Tensor Path"] for row in rows} == set(map(str, files))
    for row in rows:
        values = torch.load(row["Tensor Path"])
        assert Path(row["Tensor Path"]).parent.name == row["Node Name"]
        assert (row["dtype"], row["shape"]) == (str(values.dtype), str(values.shape))
        said = [float(row[name]) for name in ("max", "min", "variance", "mean")]
        wide = values.double()
        there = [wide.max(), wide.min(), wide.var(), wide.mean()]
        assert said == pytest.approx([float(value) for value in there], rel=1e-6, abs=1e-9)
    types = {row["Node Name"]: row["Node Type"] for row in rows}
    assert types["root.up"] == "Linear"
    assert {"root", "root.down"} <= set(types)


def test_entries_are_named_as_msprobe_names_them(run) -> None:
    ld.export_dump(run, "out", layout="msprobe")
    home = Path("out/step1/rank0")
    document = json.loads((home / "dump.json").read_text())
    assert (document["task"], document["framework"]) == ("tensor", "pytorch")
    assert document["dump_data_dir"] == "out/step1/rank0/dump_tensor_data"  # as the user named it
    assert list(document["data"]) == ["Module.up.Linear.forward.0", "Module.down.Linear.forward.0"]
    leaf = document["data"]["Module.up.Linear.forward.0"]["input_args"][0]
    assert (leaf["type"], leaf["dtype"], leaf["shape"]) == ("torch.Tensor", "torch.float32", [2, 4])
    assert leaf["data_name"] == "Module.up.Linear.forward.0.input.0.pt"
    assert torch.equal(torch.load(home / "dump_tensor_data" / leaf["data_name"]), torch.ones(2, 4))
    around = json.loads((home / "construct.json").read_text())
    assert around["Module.up.Linear.forward.0"] is None  # the root is not recorded
    first = json.loads(Path("out/step0/rank0/dump.json").read_text())["data"]
    assert set(first["Module.up.Linear.forward.0"]["parameters"]) == {"weight", "bias"}


def test_files_are_named_as_atb_and_numpy_have_them(run) -> None:
    ld.export_dump(run, "atb", layout="atb")
    assert Path("atb/tensors/0_0/1/0__Net/1_Linear/after/outtensor0.bin").is_file()
    ld.export_dump(run, "npy", layout="npy")
    assert np.array_equal(np.load("npy/1/down.output.0.npy"), run.tensor("down", step=1).numpy())


def test_a_layout_that_is_none_and_a_second_run_are_refused(run, capsys) -> None:
    with pytest.raises(OptionError, match="layout 'nope' is not known; known: msit, msprobe, atb"):
        ld.export_dump(run, "out", layout="nope")
    with pytest.raises(OptionError, match="golden is not of compiled code"):
        ld.export_dump(run, "out", layout="ge")
    assert main(["export", "golden", "golden", "--layout", "npy", "-o", "out"]) == 3
    assert "--layout is for one run" in capsys.readouterr().err
    assert not Path("out").exists()


def test_a_dump_of_one_tool_becomes_one_of_another(run) -> None:
    ld.export_dump(run, "first", layout="msit")
    ld.export_dump("first", "second", layout="msprobe")
    ld.export_dump("second", "third", layout="atb")
    third = layouts.detect(Path("third"))
    assert third is atb
    last = at(third.read(Path("third")), "1_Linear", step=1)
    assert torch.equal(third.read(Path("third")).load(last), run.tensor("down", step=1))
