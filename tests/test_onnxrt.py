"""ONNX Runtime sessions: recorded by node, compared with the exported model, and blamed."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections import Counter

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import helper

import llmdebug_nb as ld
from llmdebug_nb.capture.compat import onnxruntime_api
from models import ARCHITECTURES, llama, prompt
from onnx_models import exported, generate, initializer, node_of, put, save, strip, with_cache
from recordings import AGREED, boundaries, graph_filters

ALL, NONE = ort.GraphOptimizationLevel.ORT_ENABLE_ALL, ort.GraphOptimizationLevel.ORT_DISABLE_ALL
LEVELS = pytest.mark.parametrize("level", [ALL, NONE], ids=["optimised", "as exported"])
NAMES = pytest.mark.parametrize("name", ["llama", "qwen2", "gpt2"])
FOLDED, FUSED = {"transformer.wpe"}, {"transformer.h.1"}  # by the export; by the session
SHARING = {"q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"}
FEED = {"input_ids": prompt().numpy()}


def session(model, level=ALL, **options):
    chosen = ort.SessionOptions()
    chosen.graph_optimization_level = level
    for option, value in options.items():
        setattr(chosen, option, value)
    return ort.InferenceSession(
        model if isinstance(model, (str, bytes)) else model.SerializeToString(), chosen
    )


def recorded(model, level=ALL, name="mine", **options):
    """Return the run of one prompt through a model in ONNX Runtime."""
    one = model if isinstance(model, ort.InferenceSession) else session(model, level)
    with ld.dump(one, name=name, **options) as run:
        one.run(None, FEED)
    return run


def golden(name, **options):
    model = ARCHITECTURES[name]()
    with ld.dump(model, name="golden", **options) as run, torch.no_grad():
        model(input_ids=prompt(), use_cache=False)
    return run


def small(*nodes, outputs=("y",), initializers=(), inputs=(("x", 1, (2, 3)),), opset=17, **more):
    """Return a graph of a few nodes, of x float32[2, 3] unless it says otherwise."""
    values = [helper.make_tensor_value_info(name, kind, shape) for name, kind, shape in inputs]
    made = [onnx.ValueInfoProto(name=name) for name in outputs]
    graph = helper.make_graph(list(nodes), "small", values, made, list(initializers), **more)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=9)


X = {"x": np.arange(6, dtype=np.float32).reshape(2, 3) - 2}

# --- what is recorded -----------------------------------------------------------------------------


@LEVELS
def test_every_value_of_the_graph_that_runs_is_in_the_dump(level, tmp_path):
    file = str(tmp_path / "optimised.onnx")
    one = session(exported("llama"), level, optimized_model_filepath=file, log_severity_level=3)
    ran = onnx.load(file) if level == ALL else exported("llama")
    run = recorded(one)
    seen = Counter(r.op for r in run.records(role="output") if "/" in r.site.path)
    assert seen == Counter(
        f"Onnx.{node.op_type}" for node in ran.graph.node for value in node.output if value
    )
    assert run.meta["problems"] == {}
    assert run.meta["notes"] == []


@LEVELS
@NAMES
def test_the_program_gets_the_same_bits_as_without_a_recording(name, level):
    plain, followed = (session(exported(name), level) for _ in range(2))
    wanted = plain.run(None, FEED)
    with ld.dump(followed) as run:
        given = [followed.run(None, FEED) for _ in range(4)]  # the last of them on ours alone
    for outputs in [*given, followed.run(None, FEED)]:
        assert [a.tobytes() for a in outputs] == [b.tobytes() for b in wanted]
    assert {record.site.step for record in run.records()} == {0, 1, 2, 3}
    last = run.records(role="output", path="", step=3)
    assert run.load(next(last)).numpy().tobytes() == wanted[0].tobytes()


def test_if_our_session_gives_other_bits_the_program_keeps_its_own_results(monkeypatch):
    one = session(exported("llama"))
    wanted = one.run(None, FEED)
    monkeypatch.setattr("llmdebug_nb.capture.onnx.sessions._same", lambda a, b: False)
    with ld.dump(one) as run:
        given = [one.run(None, FEED) for _ in range(3)]
    assert all(np.array_equal(outputs[0], wanted[0]) for outputs in given)
    assert any("other bits" in note for note in run.meta["notes"])


def test_a_run_of_a_session_looks_like_a_run_of_the_module():
    run = recorded(exported("llama"))
    mlp = "model.layers.0.mlp"
    types = {node.path: node.type for node in run.nodes}
    assert types[""] == "LlamaForCausalLM"
    assert types[f"{mlp}.down_proj"] == "Linear"
    assert types["model.layers"] == "ModuleList"
    inside = {path for r in run.records() if (path := r.site.path).startswith(f"{mlp}.")}
    assert f"{mlp}.down_proj" in inside
    assert f"{mlp}.down_proj/Onnx.MatMul" in inside
    (node,) = run.records(role="output", path=f"{mlp}.down_proj/Onnx.MatMul")
    (module,) = run.records(role="output", path=f"{mlp}.down_proj")
    assert node.summary == module.summary
    (given,) = run.records(role="input", path=f"{mlp}.down_proj")
    assert given.producer is not None  # the dataflow is there
    sql = "SELECT slot, value FROM scalar_rows WHERE role = 'onnx' AND path = ?"
    facts = dict(run.index.query(tuple, sql, [node.site.path]))
    assert facts["node"] == "node_linear_6"
    assert facts["provider"] == "CPUExecutionProvider"
    assert "aten.linear" in facts["fx"]
    sql = "SELECT s.frames FROM operator_rows o JOIN all_sources s ON s.idx = o.source"
    [(frames,)] = run.index.query(tuple, f"{sql} WHERE o.path = ?", [f"{mlp}/Onnx.Mul"])
    assert "modeling_llama.py" in frames


def test_attributes_and_small_constants_are_scalars_of_the_node():
    run = recorded(exported("gpt2"), NONE)
    sql = (
        "SELECT slot, type, value FROM scalar_rows WHERE role = 'input' AND path = "
        "'transformer.h.0.ln_1/Onnx.LayerNormalization'"
    )
    assert {slot: (kind, text) for slot, kind, text in run.index.query(tuple, sql)} == {
        "axis": ("int", "-1"), "epsilon": ("float", "1e-05"), "stash_type": ("int", "1"),
    }  # fmt: skip


def test_weights_are_records_as_the_module_has_them():
    model = llama()
    run = recorded(exported("llama"), weights=True)
    (weight,) = run.records(role="weight", path="model.layers.1.mlp.up_proj")
    assert torch.equal(run.load(weight), model.model.layers[1].mlp.up_proj.weight.detach())
    params = {node.path: node.params for node in run.nodes}
    assert params["model.layers.1.mlp.up_proj"] == {"weight": [64, 32]}


def test_without_metadata_modules_are_read_from_names_of_nodes():
    nodes = [
        helper.make_node("Relu", ["x"], ["a"], "/body/layers.0/act/Relu"),
        helper.make_node("Neg", ["a"], ["y"], "/head/Neg"),
    ]
    with ld.dump(one := session(small(*nodes), NONE)) as run:
        one.run(None, X)
    paths = {record.site.path for record in run.records()}
    modules = {"", "body", "body.layers.0", "body.layers.0.act", "head"}
    assert paths == {*modules, "body.layers.0.act/Onnx.Relu", "head/Onnx.Neg"}


def test_without_a_named_session_every_session_that_runs_is_recorded():
    one = session(exported("llama"))
    with ld.dump() as run:
        one.run(None, FEED)
        torch.nn.Linear(2, 2)(torch.ones(1, 2))
    roots = [node.type for node in run.nodes if node.parent < 0]
    assert roots == ["LlamaForCausalLM", "Linear"]
    assert any(record.site.path.startswith("Linear~1") for record in run.records())


def test_a_named_model_is_recorded_alone():
    model, other = torch.nn.Linear(3, 3), session(small(helper.make_node("Relu", ["x"], ["y"])))
    with ld.dump(model) as run:
        other.run(None, X)
        model(torch.ones(1, 3))
    assert not any("Onnx" in record.op for record in run.records())
    with ld.dump(other) as run:
        other.run(None, X)
        model(torch.ones(1, 3))
    assert {record.op.partition(".")[0] for record in run.records()} == {"InferenceSession", "Onnx"}


# --- filters --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "kept"),
    [*graph_filters("Onnx"), ({"types": "LlamaMLP"}, lambda r: ".mlp" in r.site.path)],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_filters_work_as_for_modules(options, kept):
    one = session(exported("llama"))
    with ld.dump(one, **options) as run:
        one.run(None, FEED)
        one.run(None, FEED)
    found = list(run.records())
    assert found
    assert all(kept(record) for record in found)


def test_ids_do_not_depend_on_filters():
    one = session(exported("llama"))
    with ld.dump(one, name="all") as everything:
        one.run(None, FEED)
    with ld.dump(one, name="some", layers="model.layers.1.*") as some:
        one.run(None, FEED)
    everywhere = everything.ids(0)
    assert everywhere[("model.layers.0.mlp", 0)].count("_") == 2
    for key, id_ in some.ids(0).items():
        assert everywhere[key] == id_


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"layers": "model.layer.0*"}, "nearest: model.layers.0"),
        ({"types": "LlamaMPL"}, "nearest: LlamaMLP"),
        ({"apis": "Matmul", "mode": "api"}, "Onnx.MatMul"),
        ({"tokens": "7"}, "steps seen: 0"),
    ],
)
def test_an_empty_recording_explains_itself(options, says):
    one = session(exported("llama"))
    with pytest.raises(ld.errors.EmptyDumpError, match=says), ld.dump(one, **options):
        one.run(None, FEED)


def test_a_session_that_did_not_run_is_reported():
    with (
        pytest.raises(ld.errors.EmptyDumpError, match=r"run\(\) was never called"),
        ld.dump(session(exported("llama"))),
    ):
        pass


# --- ways to run ----------------------------------------------------------------------------------


def test_runs_by_binding_values_and_async_are_recorded_too():
    model = small(helper.make_node("Relu", ["x"], ["a"]), helper.make_node("Neg", ["a"], ["y"]))
    one = session(model, NONE)
    done, answered = [], threading.Event()

    def answer(results, _, error):
        done.append((results, error))
        answered.set()

    with ld.dump(one) as run:
        binding = one.io_binding()
        binding.bind_cpu_input("x", X["x"])
        binding.bind_output("y")
        one.run_with_iobinding(binding)
        (value,) = one.run_with_ort_values(None, {"x": ort.OrtValue.ortvalue_from_numpy(X["x"])})
        one.run_async(None, X, answer, None)
        assert answered.wait(60)
    wanted = -np.maximum(X["x"], 0)
    assert np.array_equal(binding.copy_outputs_to_cpu()[0], wanted)
    assert np.array_equal(value.numpy(), wanted)
    assert np.array_equal(done[0][0][0], wanted)
    steps = [record.site.step for record in run.records(role="output", path="/Onnx.Neg")]
    assert steps == [0, 1, 2]


def test_inputs_bound_by_address_are_reported():
    one = session(small(helper.make_node("Relu", ["x"], ["y"])))
    binding = one.io_binding()
    binding.bind_input("x", "cpu", 0, np.float32, (2, 3), X["x"].ctypes.data)
    binding.bind_output("y")
    with (
        pytest.raises(
            ld.errors.CaptureError, match="bound before the recording began, or by address"
        ),
        ld.dump(one),
    ):
        one.run_with_iobinding(binding)
    assert np.array_equal(binding.copy_outputs_to_cpu()[0], np.maximum(X["x"], 0))


def test_types_that_numpy_lacks_and_values_that_are_no_tensors():
    half = helper.make_node("Cast", ["x"], ["h"], to=onnx.TensorProto.BFLOAT16)
    back = helper.make_node("Cast", ["h"], ["y"], to=onnx.TensorProto.FLOAT)
    one = session(small(half, back), NONE)
    with ld.dump(one) as run:
        (given,) = one.run(None, X)
    assert np.array_equal(given, X["x"])
    (record,) = run.records(role="output", path="/Onnx.Cast", call=0)
    assert record.summary.dtype == "bfloat16"
    assert torch.equal(run.load(record).float(), torch.from_numpy(X["x"]))
    pair = helper.make_node("SequenceConstruct", ["x", "x"], ["s"])
    one = session(small(pair, helper.make_node("ConcatFromSequence", ["s"], ["y"], axis=0)), NONE)
    with ld.dump(one) as run:
        one.run(None, X)
    assert any("not tensors" in note for note in run.meta["notes"])
    assert [r.summary.shape for r in run.records(path="/Onnx.ConcatFromSequence")] == [(4, 3)]


def test_random_nodes_leave_the_program_its_own_numbers():
    model = small(
        helper.make_node("RandomNormalLike", ["x"], ["r"], seed=3.0),
        helper.make_node("Add", ["x", "r"], ["y"]),
    )
    plain, one = session(model), session(model)
    wanted = [plain.run(None, X)[0] for _ in range(3)]
    with ld.dump(one) as run:
        given = [one.run(None, X)[0] for _ in range(3)]
    assert all(np.array_equal(a, b) for a, b in zip(wanted, given, strict=True))
    assert any("random" in note for note in run.meta["notes"])


def test_options_of_the_session_are_left_as_they_were():
    chosen = ort.SessionOptions()
    options = {"intra_op_num_threads": 1, "graph_optimization_level": ALL, "log_severity_level": 2}
    for name, value in options.items():
        setattr(chosen, name, value)
    one = ort.InferenceSession(exported("llama").SerializeToString(), chosen)
    with ld.dump(one):
        one.run(None, FEED)
    assert {name: getattr(chosen, name) for name in options} == options
    assert chosen.optimized_model_filepath == ""
    assert one.get_session_options().graph_optimization_level == ALL


def test_nothing_stays_on_the_class_also_after_an_exception():
    before = {
        name: vars(ort.InferenceSession).get(name)
        for name in ("run", "run_with_iobinding", "run_async")
    }
    one = session(exported("llama"))
    with pytest.raises(ZeroDivisionError), ld.dump(one):
        raise ZeroDivisionError(one.run(None, FEED))
    assert {name: vars(ort.InferenceSession).get(name) for name in before} == before
    assert not list(onnxruntime_api.listeners)


def test_an_error_of_the_program_is_the_one_that_it_would_have_had():
    one = session(exported("llama"))
    errors = []
    for _ in range(2):
        with pytest.raises(Exception) as plain:  # noqa: PT011 - whatever onnxruntime raises
            one.run(None, {"input_ids": np.ones((1, 7), np.float32)})
        errors.append((type(plain.value), str(plain.value)))
        with pytest.raises(type(plain.value)) as seen, ld.dump(one):
            one.run(None, {"input_ids": np.ones((1, 7), np.float32)})
        errors.append((type(seen.value), str(seen.value)))
    assert len(set(errors)) == 1


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_any_chain_of_nodes_gives_the_same_bits_and_one_record_a_node(data):
    known = st.sampled_from(["Relu", "Neg", "Sigmoid", "Tanh", "Abs", "Exp"])
    kinds = data.draw(st.lists(known, min_size=1, max_size=8))
    nodes = [
        helper.make_node(kind, [f"v{at}" if at else "x"], [f"v{at + 1}"])
        for at, kind in enumerate(kinds)
    ]
    one = session(
        small(*nodes, outputs=(f"v{len(kinds)}",)), data.draw(st.sampled_from([ALL, NONE]))
    )
    wanted = one.run(None, X)[0]
    with ld.dump(one, name="chain") as run:
        given_ = one.run(None, X)[0]
        given_again = one.run(None, X)[0]
    assert wanted.tobytes() == given_.tobytes() == given_again.tobytes()
    made = [r for r in run.records(role="output", step=0) if "/" in r.site.path]
    assert len(made) <= len(kinds)  # fused ones are one
    assert run.load(made[-1]).numpy().tobytes() == wanted.tobytes()


# --- large models, bad input ---------------------------------------------------------------------


def test_external_data_is_read_from_its_own_folder(tmp_path, monkeypatch):
    model = exported("llama")
    file = tmp_path / "model.onnx"
    onnx.save(model, file, save_as_external_data=True, location="model.data", size_threshold=500)
    monkeypatch.chdir(tmp_path)
    for level in (ALL, NONE):
        one = session("model.onnx", level)
        monkeypatch.chdir(tmp_path.parent)  # the program may go elsewhere
        monkeypatch.chdir(tmp_path)
        run = recorded(one, weights=True)
        assert run.meta["problems"] == {}
        (weight,) = run.records(role="weight", path="model.layers.1.mlp.up_proj")
        assert torch.equal(run.load(weight), llama().model.layers[1].mlp.up_proj.weight.detach())


def test_a_missing_model_file_is_an_error_at_once(tmp_path):
    file = save(exported("llama"), tmp_path / "gone.onnx")
    one = session(file)
    (tmp_path / "gone.onnx").unlink()
    with (
        pytest.raises(
            ld.errors.CaptureError,
            match=r"'gone\.onnx' that the session was made of is no longer there",
        ),
        ld.dump(one),
    ):
        one.run(None, FEED)
    with pytest.raises(ld.errors.CaptureError, match="no longer there"):
        ld.dump(one).start()
    assert one.run(None, FEED)


def test_of_an_overwritten_model_only_inputs_and_outputs_are_recorded(tmp_path):
    file = save(exported("llama"), tmp_path / "model.onnx")
    one = session(file)
    wanted = one.run(None, FEED)[0]
    (tmp_path / "model.onnx").write_bytes(b"\x00no model at all")
    with ld.dump(one) as run:
        given_ = one.run(None, FEED)[0]
    assert np.array_equal(wanted, given_)
    assert any("can't be read as an ONNX model" in problem for problem in run.meta["problems"])
    assert [r.site.slot for r in run.records(role="output")] == [one.get_outputs()[0].name]


@pytest.mark.parametrize("folder", ["here", "a" * 200])
def test_missing_external_data_is_reported(tmp_path, folder):
    file = tmp_path / folder / "model.onnx"
    file.parent.mkdir()
    outside = {"save_as_external_data": True, "location": "model.data", "size_threshold": 500}
    onnx.save(exported("llama"), file, **outside)
    one = session(str(file))
    (file.parent / "model.data").unlink()
    with ld.dump(one) as run:
        assert one.run(None, FEED)
    assert any("model.data" in problem for problem in run.meta["problems"])
    assert list(run.records(role="output"))


def test_compiling_is_for_modules():
    with pytest.raises(
        ld.errors.OptionError, match=r"a torch\.nn\.Module or a vllm\.LLM, got InferenceSession"
    ):
        ld.dump(session(exported("llama")), graph="fx")


def test_metadata_that_makes_no_sense_is_only_text():
    node = helper.make_node("Relu", ["x"], ["y"])
    for key, value in (
        ("name_scopes", "__import__('os').system('false')"),
        ("class_hierarchy", "[" * 500),
        ("fx_node", "%y : " + "x" * 5000),
    ):
        node.metadata_props.append(
            onnx.StringStringEntryProto(key=f"pkg.torch.onnx.{key}", value=value)
        )
    with ld.dump(one := session(small(node), NONE)) as run:
        one.run(None, X)
    assert {record.site.path for record in run.records()} == {"", "/Onnx.Relu"}


def test_without_onnxruntime_all_else_works():
    program = (
        "import sys; sys.modules['onnxruntime'] = None\n"
        "import torch, llmdebug_nb as ld\nmodel = torch.nn.Linear(2, 2)\n"
        "with ld.dump(model, name='plain') as run: model(torch.ones(1, 2))\n"
        "print(len(list(run.records())))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, encoding="utf-8", check=False
    )
    assert done.stdout.strip() == "2", done.stderr


# --- with a cache --------------------------------------------------------------------------------


def test_a_text_generation_loop_counts_tokens_as_generate_does():
    model, one = llama(), session(with_cache())
    with ld.dump(model, name="golden", tokens="all") as expected:
        made = model.generate(
            prompt(), max_new_tokens=4, do_sample=False, attention_mask=torch.ones_like(prompt())
        )
    with ld.dump(one, name="mine", tokens="all") as run:
        mine = [generate(one, prompt(), 4) for _ in range(2)]
    assert mine == [made[0, 7:].tolist()] * 2
    kinds = run.index.query(tuple, "SELECT generation, step, kind FROM root_calls ORDER BY idx")
    loop = [(0, "prefill"), (1, "decode"), (2, "decode"), (3, "decode")]
    assert kinds == [(generation, step, kind) for generation in (0, 1) for step, kind in loop]
    report = ld.compare(expected, run)
    for step in range(4):
        rows = [
            d
            for d in report.differences
            if d.pair.golden and d.site.step == step and d.site.role == "output"
        ]
        assert rows
        assert {d.verdict for d in rows} <= AGREED
    assert not report.findings
    assert not any(d.verdict == "diverged" for d in report.differences)


# --- compared ------------------------------------------------------------------------------------


@LEVELS
@NAMES
def test_a_faithful_export_agrees_in_every_boundary_that_the_export_keeps(name, level):
    report = ld.compare(golden(name), recorded(exported(name), level))
    paired, alone = boundaries(report)
    assert report.verdict in AGREED, report.summary()
    assert len(paired) > 20
    assert alone <= FOLDED | FUSED
    assert not any(d.is_mismatch for d in report.differences)


@LEVELS
@NAMES
def test_so_it_does_without_any_metadata(name, level):
    report = ld.compare(golden(name), recorded(strip(exported(name)), level))
    paired, alone = boundaries(report)
    assert report.verdict in AGREED, report.summary()
    assert len(paired) > 20
    assert alone <= FOLDED | FUSED | {"model.rotary_emb"}


def test_the_other_way_round_it_agrees_too():
    report = ld.compare(recorded(exported("llama"), name="golden"), golden("llama"))
    assert report.verdict in AGREED
    assert not report.findings


def test_two_recordings_of_one_session_are_the_same():
    one = session(exported("llama"))
    report = ld.compare(recorded(one, name="golden"), recorded(one))
    assert report.verdict == "match"
    assert not any(d.verdict == "unmatched" for d in report.differences)


# --- blamed --------------------------------------------------------------------------------------


def altered_weight(name):
    model = exported(name)
    scope, kind = {"gpt2": ("transformer.h.1.mlp.c_fc", "Gemm")}.get(
        name, ("model.layers.1.mlp.down_proj", "MatMul")
    )
    node = node_of(model, scope, kind)
    values = initializer(model, node.input[1])
    values[3] *= 1.3
    put(model, node.input[1], values)
    return model, node, scope, "weight differs"


def altered_epsilon(name):
    model = exported(name)
    if name == "gpt2":
        node = node_of(model, "transformer.h.1.ln_2", "LayerNormalization")
        next(one for one in node.attribute if one.name == "epsilon").f = 1e-2
        return model, node, "transformer.h.1.ln_2", "scalar argument differs"
    scope = "model.layers.1.post_attention_layernorm"
    node = node_of(model, scope, "Add")
    put(model, "epsilon", np.array(1e-2, np.float32))
    node.input[1] = "epsilon"
    return model, node, scope, "scalar argument differs"


def swapped_mask(name):
    model = exported(name)
    scope = {"gpt2": "transformer.h.1.attn"}.get(name, "model.layers.1.self_attn")
    node = next(
        n for n in (node_of(model, scope, "Add", at) for at in range(9)) if initializer_of(model, n)
    )
    put(model, "mask", np.ascontiguousarray(np.swapaxes(initializer(model, node.input[1]), 2, 3)))
    node.input[1] = "mask"
    return model, node, scope, "wrong input: mask"


def initializer_of(model, node):
    return next(
        (
            one
            for one in model.graph.initializer
            if one.name == node.input[1] and len(one.dims) == 4
        ),
        None,
    )


@LEVELS
@NAMES
@pytest.mark.parametrize("plant", [altered_weight, altered_epsilon, swapped_mask])
def test_a_planted_error_is_blamed_on_its_node(plant, name, level):
    model, node, scope, cause = plant(name)
    report = ld.compare(golden(name), recorded(model, level))
    finding = report.findings[0]
    assert report.verdict == "diverged"
    assert (finding.path, finding.cause) == (scope, cause), finding
    assert f"node {node.name} (" in finding.evidence
    assert ".py:" in (finding.source or "")
    assert len(report.findings) == 1


@pytest.mark.parametrize("plant", [altered_weight, altered_epsilon, swapped_mask])
def test_against_another_session_it_is_blamed_on_its_node_too(plant):
    model, node, scope, cause = plant("llama")
    report = ld.compare(recorded(exported("llama"), name="golden"), recorded(model))
    finding = report.findings[0]
    assert finding.path.partition("/")[0] == scope
    assert finding.cause == cause
    assert f"node {node.name} (" in finding.evidence


def test_without_metadata_an_altered_weight_is_still_blamed_on_its_node():
    model, _, scope, _ = altered_weight("llama")
    at = next(
        at
        for at, node in enumerate(model.graph.node)
        if node.name == node_of(model, scope, "MatMul").name
    )
    report = ld.compare(golden("llama"), recorded(strip(model)))
    assert report.findings[0].path == scope
    assert f"node n{at} (" in report.findings[0].evidence


# --- quantised -----------------------------------------------------------------------------------


def error_of_a_linear(report):
    """Return the error of the last partner of golden's projection."""
    return [
        d.error
        for d in report.differences
        if d.pair.golden and d.pair.mine and d.site.role == "output"
        if d.site.path == "model.layers.0.mlp.gate_proj"
    ][-1]


def test_a_quantised_model_is_compared_with_the_float_one(tmp_path):
    from onnxruntime.quantization import QuantType, quantize_dynamic

    source, target = save(exported("llama"), tmp_path / "float.onnx"), str(tmp_path / "int8.onnx")
    quantize_dynamic(source, target, weight_type=QuantType.QInt8)
    mine = recorded(target)
    assert any("Integer" in record.op for record in mine.records())  # it computes in int8
    for other in (golden("llama"), recorded(source, name="float")):
        report = ld.compare(other, mine)
        assert 1e-4 < error_of_a_linear(report) < 0.1  # of int8, once it is a float again
        paired, alone = boundaries(report)
        assert len(paired) > 20
        # a quantiser drops the metadata of the nodes that it replaces, and these share their input
        assert {path.rpartition(".")[2] for path in alone} <= SHARING


def test_a_model_quantised_by_nodes_around_its_operators_is_compared_with_the_float_one(tmp_path):
    from onnxruntime.quantization import CalibrationDataReader, quantize_static

    class Once(CalibrationDataReader):
        def __init__(self):
            self.left = [FEED]

        def get_next(self):
            return self.left.pop() if self.left else None

    source, target = save(exported("llama"), tmp_path / "float.onnx"), str(tmp_path / "qdq.onnx")
    quantize_static(source, target, Once(), op_types_to_quantize=["MatMul"])
    mine = recorded(target, NONE)
    assert any(record.op == "Onnx.DequantizeLinear" for record in mine.records())
    for other in (golden("llama"), recorded(source, name="float")):
        report = ld.compare(other, mine)
        assert 1e-4 < error_of_a_linear(report) < 0.2
        assert report.verdict == "diverged"
