"""The topology of a run: compared with a trace, as JSON, and as an ONNX model in Netron."""

from __future__ import annotations

import io
import json
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import netron
import onnx
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from playwright.sync_api import Page, expect
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import llmdebug_nb as ld
from llmdebug_nb import msit
from llmdebug_nb.app.recording import Recording
from llmdebug_nb.cli import main
from llmdebug_nb.core.options import DumpOptions
from llmdebug_nb.store.topology import onnx_model
from llmdebug_nb.store.topology.document import DEPTH, Operation, Topology, read
from models import ARCHITECTURES, generate, gpt2, llama, prompt, t5
from screenshots import LARGEST, OUT


class Trace(TorchDispatchMode):
    """Notes for each operator that computes the earlier operators that made its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.operators: list[tuple[str, set[int]]] = []
        self._makers: dict[int, int] = {}
        self._kept: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [
            x
            for x in torch.utils._pytree.tree_leaves((args, kwargs))
            if isinstance(x, torch.Tensor)
        ]
        makers = {
            self._makers[place]
            for x in given
            if (place := x.untyped_storage()._cdata) in self._makers
        }
        result = func(*args, **(kwargs or {}))
        made = [x for x in torch.utils._pytree.tree_leaves(result) if isinstance(x, torch.Tensor)]
        places = {x.untyped_storage()._cdata for x in given}
        if made and (
            func._schema.is_mutable or not {x.untyped_storage()._cdata for x in made} & places
        ):
            self._kept += [x.untyped_storage() for x in made]
            self._makers |= {x.untyped_storage()._cdata: len(self.operators) for x in made}
            self.operators.append((func._schema.name.removeprefix("aten::"), makers))
        return result


def _bare(op: Operation) -> str:
    return op.type.partition(".")[0] if op.domain == "aten" else op.type


def innermost(topology: Topology) -> list[Operation]:
    return onnx_model.chosen(topology, -1)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_edges_are_those_of_an_independent_trace(name: str, tmp_path: Path) -> None:
    model, ids = ARCHITECTURES[name](), prompt()
    with torch.no_grad(), Trace() as trace:
        model(ids)
    with torch.no_grad(), ld.dump(model, path=tmp_path, mode="module+aten") as run:
        model(ids)
    operators = [op for op in innermost(ld.topology(run)) if op.domain == "aten"]
    assert [op.type.partition(".")[0] for op in operators] == [name for name, _ in trace.operators]
    maker: dict[str, set[int]] = {}
    number = 0
    for op in innermost(ld.topology(run)):
        made_by = {one for value in op.inputs for one in maker.get(value, ())}
        if op.domain == "aten":
            assert made_by == trace.operators[number][1], op.name
            made_by = {number}
            number += 1
        maker |= dict.fromkeys(
            op.outputs, made_by
        )  # a module that hands on what it is given makes nothing
    assert number == len(trace.operators)


def test_residual_adds_of_a_layer_are_operations_in_it(tmp_path: Path) -> None:
    with ld.dump(model := llama(), path=tmp_path, mode="module+aten") as run:
        model(prompt())
    layer = next(
        each for each in ld.topology(run).layers() if each.root.name == "model.layers.1"
    ).root
    names = [
        op.name.rpartition("/")[2] if "/" in op.name else op.name.rpartition(".")[2]
        for op in layer.nodes
    ]
    assert names == [
        "input_layernorm",
        "self_attn",
        "Aten.add.Tensor",
        "post_attention_layernorm",
        "mlp",
        "Aten.add.Tensor#1",
    ]
    first, second = layer.nodes[2], layer.nodes[5]
    assert layer.inputs[0] in first.inputs
    assert first.outputs[0] in layer.nodes[3].inputs
    assert {first.outputs[0], layer.nodes[4].outputs[0]} == set(second.inputs)
    assert second.outputs == layer.outputs
    assert second.param == {"alpha": 1} or "alpha" not in second.param


def test_weights_and_arguments_belong_to_their_operation(tmp_path: Path) -> None:
    with ld.dump(model := llama(), path=tmp_path, mode="module+aten") as run:
        model(prompt())
    topology = ld.topology(run)
    ops = {op.name: op for _, op in topology.root.walk()}
    assert ops["model.layers.0.self_attn.q_proj/Aten.mm"].weights == [
        "model.layers.0.self_attn.q_proj.weight"
    ]
    assert ops["model.layers.1.input_layernorm/Aten.mean.dim"].param == {
        "dim": "[-1]",
        "keepdim": True,
    }
    assert ops["model.norm"].param["variance_epsilon"] == pytest.approx(1e-6)
    assert set(topology.root.weights) == {name for name, _ in model.named_parameters()} | {
        "model.rotary_emb.inv_freq"
    }
    assert topology.tensors["lm_head.weight"] == ("float32", (96, 32))


def test_computation_between_recorded_modules_is_a_node_unrecorded(tmp_path: Path) -> None:
    with ld.dump(model := llama(), path=tmp_path) as run:
        model(prompt())
    topology = ld.topology(run)
    assert "Unrecorded stands for them" in topology.edges
    ops = {op.name: op for _, op in topology.root.walk()}
    assert ops["model.layers.0.mlp.act_fn"].inputs == ops["model.layers.0.mlp.gate_proj"].outputs
    between = ops["model.layers.0.mlp/unrecorded0"]
    assert between.type == "Unrecorded"
    assert between.outputs[0] in ops["model.layers.0.mlp.down_proj"].inputs
    assert set(between.inputs) == {
        *ops["model.layers.0.mlp.act_fn"].outputs,
        *ops["model.layers.0.mlp.up_proj"].outputs,
    }


def test_a_model_has_its_layers_and_the_calls_between_them_as_nodes(tmp_path: Path) -> None:
    with ld.dump(model := t5(), path=tmp_path, mode="module+aten") as run:
        generate(model, new=2)
    names = [op.name for op in ld.topology(run, 1).root.nodes]
    assert [name for name in names if ".block." in name] == ["decoder.block.0", "decoder.block.1"]


def test_each_call_of_a_root_and_each_further_root_holds_its_own_calls(tmp_path: Path) -> None:
    first, second = llama(), nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    with ld.dump(path=tmp_path, mode="module+aten") as run:
        first(prompt())
        second(torch.ones(1, 2))
    root = ld.topology(run).root
    further = next(op for op in root.nodes if op.name == "Sequential~1")
    assert [op.name for op in further.nodes] == ["Sequential~1.0", "Sequential~1.1"]
    assert not any(op.name.startswith("Sequential~1.") for op in root.nodes)

    recording = Recording(first, DumpOptions(path=tmp_path, name="chunks"), manual=True)
    recording.start()
    first(prompt())
    first(prompt(3))
    run = recording.stop()
    root = ld.topology(run).root
    assert [op.id for op in root.nodes if op.name.startswith("lm_head")] == ["1", "3"]
    assert [op.name for op in root.nodes if op.id.startswith("2_2")] == ["model.layers.0#1"]
    assert root.outputs == ["lm_head_output_0", "lm_head#1_output_0"]


def test_json_has_upstreams_keys_and_comes_back_as_it_was(tmp_path: Path) -> None:
    with ld.dump(model := gpt2(), path=tmp_path, mode="module+aten") as run:
        model(prompt())
    files = ld.write_topology(run, tmp_path / "out")
    (pid,) = {process["pid"] for process in run.source.processes}
    whole = tmp_path / f"out/model/{pid}/GPT2LMHeadModel.json"
    assert files[0] == whole
    assert {file.parent for file in files[1:]} == {tmp_path / f"out/layer/{pid}"}
    document = json.loads(whole.read_text(encoding="utf-8"))
    assert {
        "modelName",
        "inTensors",
        "outTensors",
        "internalTensors",
        "weightTensors",
        "nodes",
    } <= document.keys()
    layer = json.loads(
        (tmp_path / f"out/layer/{pid}/transformer.h.0.json").read_text(encoding="utf-8")
    )
    assert layer.keys() == document["nodes"][0].keys() | {"edges", "tensors"}
    assert {
        "opName",
        "opType",
        "param",
        "inTensors",
        "outTensors",
        "internalTensors",
        "nodes",
    } <= layer.keys()
    for file in files:
        found = read(file.read_text(encoding="utf-8"), file.name)
        assert found.to_json() == json.loads(file.read_text(encoding="utf-8"))
    assert str(read(whole.read_text(encoding="utf-8"), "x")) == str(ld.topology(run))


@pytest.mark.parametrize("mode", ["module", "api", "module+aten", "module+api+aten"])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_level_is_a_valid_onnx_model_with_the_operations_of_that_depth(
    name: str, mode: str, tmp_path: Path
) -> None:
    model = ARCHITECTURES[name]()
    with ld.dump(model, path=tmp_path, mode=mode, tokens="0-1", stats_only=True) as run:
        generate(model, new=2)
    for step in (0, 1):
        topology = ld.topology(run, step)
        for level in (-1, 0, 1, 2):
            made = onnx_model.model(topology, level)
            onnx.checker.check_model(made, full_check=True)
            depths = [(depth, op) for depth, op in topology.root.walk()]
            deep = [
                op
                for depth, op in depths
                if depth == level or (not op.nodes and (level == -1 or depth < level))
            ]
            assert [node.op_type for node in made.graph.node] == [_bare(op) for op in deep]
            assert {value.name for value in made.graph.output} <= {
                n for node in made.graph.node for n in node.output
            }


def test_onnx_keeps_names_dtypes_shapes_and_attributes(tmp_path: Path) -> None:
    with ld.dump(model := llama(), path=tmp_path, mode="module+aten") as run:
        model(prompt())
    made = onnx.load(ld.to_onnx(run, tmp_path / "deep/er/m.onnx"))
    mean = next(node for node in made.graph.node if node.name == "model.norm/Aten.mean.dim")
    assert (mean.domain, mean.op_type, mean.overload, mean.doc_string) == (
        "llmdebug.aten",
        "mean",
        "dim",
        "0_4.1",
    )
    assert {a.name: onnx.helper.get_attribute_value(a) for a in mean.attribute} == {
        "dim": b"[-1]",
        "keepdim": 1,
    }
    declared = {
        v.name: v.type.tensor_type
        for v in (*made.graph.input, *made.graph.output, *made.graph.value_info)
    }
    output = declared[made.graph.output[0].name]
    assert output.elem_type == onnx.TensorProto.FLOAT
    for record in run.records(role="output"):
        if not record.op.startswith("Aten."):
            continue
        call = f"#{record.site.call}" if record.site.call else ""
        name = f"{record.site.path}{call}_output_{record.site.slot}"
        name = name if name[0] != "/" else f"LlamaForCausalLM{name}"
        assert [dim.dim_value for dim in declared[name].shape.dim] == list(record.summary.shape), (
            name
        )


@pytest.fixture
def served(tmp_path: Path) -> Iterator[str]:
    model = llama()
    with ld.dump(model, path=tmp_path, mode="module+aten", tokens="0") as run:
        generate(model, new=2)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    layer = next(each for each in ld.topology(run).layers() if each.root.name == "model.layers.0")
    host, port = netron.start(
        str(onnx_model.save(layer, tmp_path / "layer.onnx", 1)), ("127.0.0.1", port), browse=False
    )
    yield f"http://{host}:{port}"
    netron.stop((host, port))


def test_netron_shows_the_operations_of_a_layer(served: str, page: Page) -> None:
    page.set_viewport_size({"width": 2100, "height": 760})
    page.context.add_cookies([{"name": "consent", "value": "1", "url": served}])
    page.route(lambda url: not url.startswith(served), lambda route: route.abort())
    page.goto(served)
    kinds = page.locator("#target .node-item text")  # no text is read: the page takes eval away
    for name, count in {"LlamaRMSNorm": 2, "LlamaAttention": 1, "LlamaMLP": 1, "add": 2}.items():
        expect(kinds.filter(has_text=re.compile(f"^{re.escape(name)}$"))).to_have_count(
            count, timeout=60_000
        )
    for _ in range(3):
        page.get_by_title("Zoom Out").click()
    image = Image.open(io.BytesIO(page.screenshot(animations="disabled"))).convert("RGB")
    image = image.crop((0, 60, image.width, image.height - 100)).resize(
        (1400, 400), Image.Resampling.LANCZOS
    )
    OUT.mkdir(parents=True, exist_ok=True)
    image.quantize(64, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE).save(
        OUT / "netron_light.png", optimize=True
    )
    assert (OUT / "netron_light.png").stat().st_size < LARGEST


# -- files of ATB's tools ---------------------------------------------------------------------


def atb(
    name: str, ins: list[str], outs: list[str], nodes: list[Any] | None = None, **param: Any
) -> dict[str, Any]:
    return {"opName": name, "opType": f"{name}Operation", "param": param, "inTensors": ins,
        "outTensors": outs,
            "internalTensors": [], "nodes": nodes or []}  # fmt: skip


def atb_model(folder: Path, *nodes: Any, **more: Any) -> Path:
    path = folder / "model/4242/Chat.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    body = {
        "modelName": "Chat",
        "inTensors": ["x"],
        "outTensors": ["y"],
        "internalTensors": [],
        "weightTensors": ["w"],
        "nodes": nodes,
    }
    path.write_text(json.dumps({**body, **more}), encoding="utf-8")
    return path


LAYER = atb(
    "Layer_0", ["x", "w"], ["y"],
    [atb("Norm", ["x", "w"], ["n"], epsilon=1e-6, kind="rms", nested={"on": True, "sizes": [1, 2],
        "deep": {"a": "b"}}),
     atb("Linear", ["n"], ["y"], transposeA=False, ids=[], none=None, huge=2**70)],
)  # fmt: skip


@pytest.mark.parametrize(
    ("level", "types"),
    [(-1, ["Norm", "Linear"]), (0, ["Chat"]), (1, ["Layer_0"]), (2, ["Norm", "Linear"])],
)
def test_upstreams_json_becomes_onnx_at_each_level(
    level: int, types: list[str], tmp_path: Path
) -> None:
    target = msit.atb_json_to_onnx(atb_model(tmp_path, LAYER), model_level=level)
    assert target == tmp_path / "model/4242/Chat.onnx"
    made = onnx.load(target)
    onnx.checker.check_model(made)
    assert [node.op_type.removesuffix("Operation") for node in made.graph.node] == types
    assert {node.domain for node in made.graph.node} == {"llmdebug.atb"}
    if level == -1:
        kept = [
            {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
            for node in made.graph.node
        ]
        assert kept[0] == {
            "epsilon": pytest.approx(1e-6),
            "kind": b"rms",
            "nested.on": 1,
            "nested.sizes": [1, 2],
            "nested.deep.a": b"b",
        }
        assert kept[1] == {"transposeA": 0, "huge": str(2**70).encode()}


def test_shapes_come_from_the_table_of_operations_beside_it_and_are_read_once(
    tmp_path: Path,
) -> None:
    path = atb_model(tmp_path, LAYER)
    table = tmp_path / "operation_io_tensors/4242/operation_tensors_0.csv"
    table.parent.mkdir(parents=True)
    table.write_text(
        "CaseNum|OpName|InDType|InShape|OutDType|OutShape\n1|Norm|float16;bf16|2,3;3|float16|2,"
        "3\n2|Linear|no|1;2;3|float|oops\n",
        encoding="utf-8",
    )
    cache: dict[str, Any] = {}
    made = onnx.load(msit.atb_json_to_onnx(path, cache=cache))
    shapes = {
        v.name: (v.type.tensor_type.elem_type, [d.dim_value for d in v.type.tensor_type.shape.dim])
        for v in (*made.graph.input, *made.graph.value_info)
    }
    assert shapes == {
        "x": (onnx.TensorProto.FLOAT16, [2, 3]),
        "w": (onnx.TensorProto.BFLOAT16, [3]),
        "n": (onnx.TensorProto.FLOAT16, [2, 3]),
    }
    table.unlink()
    assert list(cache) == [str(table.resolve())]
    msit.atb_json_to_onnx(path, cache=cache)


def test_operations_out_of_order_are_sorted_and_writing_again_makes_a_new_tensor(
    tmp_path: Path,
) -> None:
    path = atb_model(tmp_path, atb("B", ["n"], ["y"]), atb("A", ["x"], ["n"]))
    assert [node.name for node in onnx.load(msit.atb_json_to_onnx(path)).graph.node] == ["A", "B"]
    path = atb_model(
        tmp_path, atb("A", ["x"], ["y"]), atb("B", ["y"], ["y"]), atb("C", ["y"], ["x"])
    )
    made = onnx.load(msit.atb_json_to_onnx(path)).graph
    assert [(list(node.input), list(node.output)) for node in made.node] == [
        (["x"], ["y"]),
        (["y"], ["y:1"]),
        (["y:1"], ["x:1"]),
    ]
    assert [value.name for value in made.output] == ["y:1"]


def nested(depth: int) -> dict[str, Any]:
    node = atb("leaf", ["x"], ["y"])
    for i in range(depth):
        node = atb(f"n{i}", ["x"], ["y"], [node])
    return node


@pytest.mark.parametrize(
    ("node", "reason"),
    [
        (3, "expected an object, not int"),
        ({"opType": "A"}, "opName and opType must be texts"),
        (atb("", [], []), "opName and opType must be texts"),
        ({**atb("A", [], []), "param": [1]}, "param must be an object, not list"),
        ({**atb("A", [], []), "nodes": {"a": 1}}, "nodes must be a list, not dict"),
        ({**atb("A", [], []), "inTensors": ["x", 3]}, "inTensors must be a list of names"),
        (nested(DEPTH + 1), f"more than {DEPTH} deep"),
        (atb("A", ["x"] * 500_001, []), "more than 500,000"),
    ],
)  # fmt: skip
def test_a_file_that_is_no_topology_is_refused_in_one_line(
    node: Any, reason: str, tmp_path: Path
) -> None:
    with pytest.raises(ld.errors.CorruptDumpError, match=r"Chat\.json is not a topology") as error:
        msit.atb_json_to_onnx(atb_model(tmp_path, node))
    assert reason in str(error.value)
    assert len(str(error.value)) < 400
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "null",
        "{}",
        '{"modelName": 3}',
        "[" * 100_000,
        '{"a":' * 100_000,
        "\x00",
        "{'a': 1}",
    ],
)
def test_text_that_is_no_topology_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ld.errors.CorruptDumpError, match=r"x\.json is not a topology"):
        msit.atb_json_to_onnx(path)
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ld.errors.CorruptDumpError, match="not a text file"):
        msit.atb_json_to_onnx(path)
    with pytest.raises(ld.errors.UnknownRunError, match="can't read the topology"):
        msit.atb_json_to_onnx(tmp_path / "nosuch.json")


def test_a_circle_is_named(tmp_path: Path) -> None:
    path = atb_model(
        tmp_path, atb("A", ["b"], ["a"]), atb("B", ["a"], ["b"]), atb("C", ["x"], ["y"])
    )
    with pytest.raises(ld.errors.CorruptDumpError, match=r"in a circle: A, B$"):
        msit.atb_json_to_onnx(path)


def test_names_never_lead_out_of_the_folder(tmp_path: Path) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part = nn.Linear(2, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.part(x)  # type: ignore[no-any-return]

    Model.__name__ = "../../../evil"
    with ld.dump(model := Model(), path=tmp_path / "runs") as run:
        model(torch.ones(1, 2))
    files = ld.write_topology(run, tmp_path / "out/inner")
    assert all((tmp_path / "out/inner") in file.resolve().parents for file in files)
    assert len(files) == 2


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=3)
    | st.lists(st.integers() | st.floats() | st.text(max_size=2) | st.none(), max_size=3),
    lambda inner: st.dictionaries(st.text(max_size=2), inner, max_size=3),
    max_leaves=6,
)
NAMES = st.lists(st.sampled_from(["x", "y", "w", "n", "", "x:1"]), max_size=3)


@settings(max_examples=60, deadline=None)
@given(
    ops=st.lists(
        st.tuples(NAMES, NAMES, st.dictionaries(st.text(max_size=3), VALUES, max_size=3)),
        max_size=5,
    ),
    level=st.integers(-1, 3),
)
def test_any_document_gives_a_checked_model_or_one_clear_error(
    ops: list[Any], level: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    nodes = [
        atb(f"op{i}", ins, outs, None) | {"param": param}
        for i, (ins, outs, param) in enumerate(ops)
    ]
    path = atb_model(tmp_path_factory.mktemp("any"), *nodes)
    refused = None
    try:
        onnx.checker.check_model(onnx.load(msit.atb_json_to_onnx(path, level)))
    except ld.errors.StoreError as error:
        refused = str(error)
    assert refused is None or ("\n" not in refused and len(refused) < 400)


# -- the command line -------------------------------------------------------------------------


def test_command_line_prints_and_writes_topologies(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    with ld.dump(model := llama(), name="golden", mode="module+aten"):
        model(prompt())
    assert main(["topology", "golden"]) == 0
    tree = capsys.readouterr().out
    assert "0_2_1_0" in tree
    assert "model.layers.0.self_attn.q_proj" in tree
    assert main(["info", "golden", "--ids"]) == 0
    assert capsys.readouterr().out == tree
    assert main(["topology", "golden", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["modelName"] == "LlamaForCausalLM"
    assert main(["topology", "golden", "-o", str(tmp_path)]) == 0
    assert "written: 7 files" in capsys.readouterr().out
    (file,) = (tmp_path / "model").rglob("*.json")
    assert main(["onnx", "golden", "-o", str(tmp_path / "a.onnx"), "--level", "1"]) == 0
    assert main(["onnx", str(file), "-o", str(tmp_path / "b.onnx"), "--level", "1"]) == 0
    assert (tmp_path / "a.onnx").read_bytes() == (tmp_path / "b.onnx").read_bytes()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["topology", "nosuch"], "no run 'nosuch'"),
        (["topology", "golden", "--step", "9"], "has no step 9 with tensors; there is 0"),
        (["onnx", "golden", "--level", "-2"], "level -2: expected 1 for layers"),
        (["onnx", "golden", "-o", "/proc/nosuch/x.onnx"], "can't write /proc/nosuch/x.onnx"),
        (["onnx", "nosuch.json"], "can't read the topology nosuch.json"),
    ],
)
def test_mistakes_on_the_command_line_are_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with ld.dump(model := llama(), name="golden"):
        model(prompt())
    assert main(arguments) == 3
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
