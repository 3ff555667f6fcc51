"""OpenVINO's compiled models: recorded by node, compared with the converted model, and blamed."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

import llmdebug_nb as ld
from models import ARCHITECTURES, llama, prompt
from recordings import boundaries, graph_filters

ROOT = Path(__file__).resolve().parents[1]
FOLDER = Path(os.environ.get("LLMDEBUG_OPENVINO", ROOT / ".venv" / "openvino"))
if (FOLDER / "openvino").is_dir() and str(FOLDER) not in sys.path:
    sys.path.append(str(FOLDER))
ov = pytest.importorskip("openvino", reason="OpenVINO is not here: make test-engines gets it")

from llmdebug_nb.capture.compat import openvino_api, openvino_models  # noqa: E402
from openvino_models import (  # noqa: E402
    FEED,
    constant,
    exported,
    fed,
    generate,
    of,
    put,
    small,
    with_cache,
    with_states,
)  # fmt: skip

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
NAMES = pytest.mark.parametrize("name", ["llama", "qwen2", "gpt2"])
X = {"x": np.arange(6, dtype=np.float32).reshape(2, 3) - 2}


def compiled(model, device="CPU", **properties):
    return ov.Core().compile_model(model, device, properties)


def recorded(model, name="mine", **options):
    """Return the run of one prompt through a model in OpenVINO."""
    one = compiled(model)
    with ld.dump((one, model), name=name, **options) as run:
        one(FEED)
    return run


def golden(model, **options):
    with ld.dump(model, name="golden", **options) as run, torch.no_grad():
        model(input_ids=prompt(), use_cache=False)
    return run


# --- what is recorded -----------------------------------------------------------------------------


@NAMES
def test_the_program_gets_the_same_bits_and_the_recorded_model_has_them_too(name):
    model = exported(name)
    plain, followed = compiled(exported(name)), compiled(model)
    wanted = plain(FEED)[0]
    with ld.dump((followed, model)) as run:
        given = [followed(FEED)[0] for _ in range(3)]
    assert all(each.tobytes() == wanted.tobytes() for each in [*given, followed(FEED)[0]])
    assert {record.site.step for record in run.records()} == {0, 1, 2}
    last = run.records(role="output", path="", step=2)
    assert run.load(next(last)).numpy().tobytes() == wanted.tobytes()
    assert run.meta["problems"] == {}
    assert run.meta["notes"] == []
    assert (run.coarse, run.rounding) == ([], 0.0)


def test_every_node_that_computes_is_in_the_dump():
    model = exported("llama")
    run = recorded(model)
    fed, computes = {port.get_node().get_friendly_name() for port in model.inputs}, []
    for node in model.get_ordered_ops():  # all that an input reaches: the rest is constant
        if any(value.get_node().get_friendly_name() in fed for value in node.input_values()):
            fed.add(node.get_friendly_name())
            computes += [node] if node.get_type_name() != "Result" else []
    seen = [r for r in run.records(role="output") if "/" in r.site.path]
    assert len(seen) == sum(node.get_output_size() for node in computes)
    assert {r.op for r in seen} == {f"OpenVINO.{node.get_type_name()}" for node in computes}


def test_a_run_of_a_compiled_model_looks_like_a_run_of_the_module():
    run = recorded(exported("llama"))
    mlp = "model.layers.0.mlp"
    assert {node.path: node.type for node in run.nodes}["model.layers"] == "ModuleList"
    (node,) = run.records(role="output", path=f"{mlp}.down_proj/OpenVINO.MatMul")
    (module,) = run.records(role="output", path=f"{mlp}.down_proj")
    assert node.summary == module.summary
    (given,) = run.records(role="input", path=f"{mlp}.down_proj")
    assert given.producer is not None  # the dataflow is there
    sql = "SELECT slot, value FROM scalar_rows WHERE path = ?"
    facts = dict(run.index.query(tuple, sql, [node.site.path]))
    assert facts["node"] == "__module.model.layers.0.mlp.down_proj/aten::linear/MatMul"
    assert facts["layerType"] == "FullyConnected"  # what runs in its place
    assert facts["runtimePrecision"] == "f32"
    assert facts["transpose_b"] == "True"


def test_weights_are_records_as_the_module_has_them():
    model = llama()
    run = recorded(of(model), weights=True)
    (weight,) = run.records(role="weight", path="model.layers.1.mlp.up_proj")
    assert torch.equal(run.load(weight), model.model.layers[1].mlp.up_proj.weight.detach())
    params = {node.path: node.params for node in run.nodes}
    assert params["model.layers.1.mlp.up_proj"] == {"weight": [64, 32]}


def test_a_model_from_onnx_has_the_modules_of_its_node_names(tmp_path):
    import onnx
    from onnx import helper, numpy_helper

    nodes = [
        helper.make_node("Gemm", ["x", "w", "b"], ["a"], "/body/layers.0/fc/Gemm"),
        helper.make_node("Neg", ["a"], ["n"], "/head/Neg"),
        helper.make_node("Relu", ["n"], ["y"], "/Relu"),
    ]
    ends = [helper.make_tensor_value_info(name, 1, [2, 3]) for name in "xy"]
    weights = [
        numpy_helper.from_array(np.ones(shape, np.float32), name)
        for name, shape in (("w", (3, 3)), ("b", (3,)))
    ]
    graph = helper.make_graph(nodes, "small", ends[:1], ends[1:], weights)
    opset = [helper.make_opsetid("", 17)]
    onnx.save(helper.make_model(graph, opset_imports=opset, ir_version=9), tmp_path / "m.onnx")
    model = ov.Core().read_model(tmp_path / "m.onnx")
    with ld.dump(one := compiled(model)) as run:
        one(X)
    modules = {r.site.path for r in run.records() if "/" not in r.site.path}
    assert modules == {"", "body", "body.layers.0", "body.layers.0.fc", "head"}


# --- which models ---------------------------------------------------------------------------------


def test_a_request_of_a_compiled_model_names_it():
    model = small()  # the only one of its name and ports
    one = compiled(model)
    request, other = one.create_infer_request(), compiled(small())
    with ld.dump(request) as run:
        request.infer(X)
        one(X)  # a request of the same model
        other(X)
    assert [r.site.step for r in run.records(role="output", path="/OpenVINO.Relu")] == [0, 1]


def test_without_a_named_model_every_one_that_runs_is_recorded(tmp_path):
    ov.save_model(small(), tmp_path / "small.xml")
    with ld.dump() as run:
        one = ov.compile_model(tmp_path / "small.xml", "CPU")  # its model is in no variable
        one(X)
        torch.nn.Linear(2, 2)(torch.ones(1, 2))
    roots = [node.type for node in run.nodes if node.parent < 0]
    assert roots == ["CompiledModel", "Linear"]
    assert "OpenVINO.Relu" in {record.op for record in run.records()}


def test_a_model_that_nothing_says_the_source_of_is_refused_with_what_to_do(tmp_path):
    ov.save_model(small(), tmp_path / "small.xml")
    one = compiled(tmp_path / "small.xml")
    with pytest.raises(ld.errors.CaptureError, match=r"give the model.*dump\(\(compiled, model\)"):
        ld.dump(one).start()
    source = ov.Core().read_model(tmp_path / "small.xml")
    with ld.dump((one, source)) as run:
        given = one(X)[0]
    assert np.array_equal(given, np.maximum(X["x"] * 2, 0))
    assert "OpenVINO.Relu" in {record.op for record in run.records()}


def test_a_model_imported_from_a_blob_is_recorded_with_the_model_that_it_was_made_of():
    model = small()
    blob = compiled(model).export_model()
    one = ov.Core().import_model(blob, "CPU")
    with ld.dump((one, model)) as run:
        one(X)
    assert "OpenVINO.Relu" in {record.op for record in run.records()}
    other = small(outputs=2)
    with pytest.raises(ld.errors.CaptureError, match="none of the models given"):
        ld.dump((one, other)).start()


def test_of_several_models_of_a_name_none_is_guessed():
    models = [small(), small()]
    with pytest.raises(ld.errors.CaptureError, match="2 models are called 'small'"):
        ld.dump(compiled(models[0])).start()


def test_in_a_program_that_names_no_model_an_unknown_source_leaves_inputs_and_outputs(tmp_path):
    ov.save_model(small(), tmp_path / "small.xml")
    one = compiled(tmp_path / "small.xml")
    with ld.dump() as run:
        one(X)
    (problem,) = run.meta["problems"]
    assert "only the inputs and outputs" in problem
    assert {record.site.role for record in run.records()} == {"input", "output"}
    assert run.tensor("", role="output", slot="y").tolist() == (np.maximum(X["x"] * 2, 0).tolist())


def test_what_a_program_changes_in_its_model_after_compiling_is_not_recorded():
    with ld.dump() as run:
        model = small()
        one = compiled(model)
        put(model, "", np.array(3, np.float32))  # its only constant
        one(X)
    assert run.meta["notes"] == []
    assert torch.equal(run.tensor("/OpenVINO.Multiply"), torch.from_numpy(X["x"] * 2))


def test_another_release_names_what_it_lacks(monkeypatch):
    one = compiled(model := small())
    monkeypatch.setattr(ov, "AsyncInferQueue", object)
    with pytest.raises(ld.errors.CaptureError, match=r"no AsyncInferQueue\.start_async"):
        ld.dump((one, model)).start()


@pytest.mark.parametrize("device", ["AUTO", "CPU"])
def test_the_recorded_model_has_the_device_and_the_properties_of_the_programs(device):
    one = compiled(
        model := small(), device, INFERENCE_PRECISION_HINT="f32", PERFORMANCE_HINT="THROUGHPUT"
    )
    runs = openvino_models.runs_of(one, ov.Core())
    assert runs.device == "CPU"
    ours = openvino_models.compile_with_outputs(ov.Core(), model, runs, [("doubled", 0)])
    assert str(ours.get_property("PERFORMANCE_HINT")).endswith("THROUGHPUT")
    with ld.dump((one, model)) as run:
        one(X)
    assert run.meta["notes"] == []


# --- filters --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "kept"),
    graph_filters("OpenVINO"),
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_filters_work_as_for_modules(options, kept):
    one = compiled(model := exported("llama"))
    with ld.dump((one, model), **options) as run:
        one(FEED)
        one(FEED)
    found = list(run.records())
    assert found
    assert all(kept(record) for record in found)


def test_a_compiled_model_that_did_not_run_is_reported():
    one = compiled(model := small())
    with (
        pytest.raises(ld.errors.EmptyDumpError, match="nor a request of a compiled model"),
        ld.dump((one, model)),
    ):
        pass


# --- ways to run ----------------------------------------------------------------------------------


def test_asynchronous_runs_and_queues_are_recorded_and_give_the_same():
    one = compiled(model := small())
    wanted, seen = np.maximum(X["x"] * 2, 0), []
    with ld.dump((one, model)) as run:
        request = one.create_infer_request()
        request.set_callback(lambda data: seen.append(data), "first")
        request.start_async(X)
        request.wait()
        queue = ov.AsyncInferQueue(one, 2)
        queue.set_callback(
            lambda done, data: seen.append((data, done.get_output_tensor().data.copy()))
        )
        for number in range(3):
            queue.start_async({"x": X["x"] + number}, number)
        queue.wait_all()
    assert np.array_equal(request.results["y"], wanted)
    assert seen[0] == "first"
    for number, value in seen[1:]:
        assert np.array_equal(value, np.maximum((X["x"] + number) * 2, 0))
    steps = [r.site.step for r in run.records(role="output", path="/OpenVINO.Relu")]
    assert steps == [0, 1, 2, 3]
    assert run.meta["notes"] == []


def test_inputs_that_were_set_before_the_run_and_of_other_shapes_are_recorded():
    one = compiled(model := small())
    request = one.create_infer_request()
    request.set_tensor("x", ov.Tensor(X["x"]))
    with ld.dump((one, model)) as run:
        request.infer()
        request.infer({"x": np.ones((5, 3), np.float32)})
    shapes = [list(r.summary.shape) for r in run.records(role="input", path="", slot="kwargs.x")]
    assert shapes == [[2, 3], [5, 3]]


def test_requests_in_threads_are_all_recorded():
    one = compiled(model := small())
    requests = [one.create_infer_request() for _ in range(4)]
    with ld.dump((one, model)) as run:
        threads = [threading.Thread(target=each.infer, args=[X]) for each in requests]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
    assert len(list(run.records(role="output", path="/OpenVINO.Relu"))) == 4
    assert all(np.array_equal(r.results["y"], np.maximum(X["x"] * 2, 0)) for r in requests)


@pytest.mark.parametrize("way", ["infer", "start_async"])
def test_an_error_of_the_program_is_the_one_that_it_would_have_had(way):
    one = compiled(model := small())
    wrong = {"x": np.ones((2, 4), np.float32)}

    def run_it():
        request = one.create_infer_request()
        getattr(request, way)(wrong)
        request.wait()

    with pytest.raises(RuntimeError) as plain:
        run_it()
    with (
        pytest.raises(ld.errors.EmptyDumpError),
        ld.dump((one, model)),
        pytest.raises(type(plain.value)) as seen,
    ):
        run_it()
    assert str(seen.value) == str(plain.value)


def test_after_a_recording_openvino_is_as_before():
    kinds = ("InferRequest", "CompiledModel", "Core", "AsyncInferQueue")
    before = {name: dict(vars(getattr(ov, name))) for name in kinds}
    one = compiled(model := small())

    def run_it():
        with ld.dump((one, model)):
            one(X)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_it()
    assert {name: dict(vars(getattr(ov, name))) for name in kinds} == before
    assert openvino_api._sources == {}


# --- states ---------------------------------------------------------------------------------------


def test_a_cache_in_states_is_recorded_step_by_step_with_the_bits_of_the_fused_attention():
    one, plain = (compiled(with_states()) for _ in range(2))
    wanted = generate(plain.create_infer_request(), [3, 4, 5, 6, 7], 4)
    model = with_states()
    with ld.dump((one, model)) as run:
        request = one.create_infer_request()
        given = generate(request, [3, 4, 5, 6, 7], 4)
        request.reset_state()
        again = generate(request, [3, 4, 5, 6, 7], 4)
    for a, b, c in zip(given, wanted, again, strict=True):
        assert a.tobytes() == b.tobytes() == c.tobytes()
    for generation in (0, 1):  # a reset begins another one
        for step, logits in enumerate(wanted):
            ours = run.tensor("m.lm_head", role="output", step=step, generation=generation)
            assert ours.numpy().tobytes() == logits.tobytes()
    notes = run.meta["notes"]
    assert len(notes) == 1
    assert "values inside of fused nodes are not recorded" in notes[0]
    assert run.coarse == ["cache in u8"]
    assert run.rounding == 2.0**-7


def test_states_go_on_through_steps_that_are_not_recorded():
    one, model = compiled(with_states()), with_states()
    with ld.dump((one, model), tokens="2-3") as run:
        given = generate(one.create_infer_request(), [3, 4, 5], 4)
    for step in (2, 3):
        ours = run.tensor("m.lm_head", role="output", step=step)
        assert ours.numpy().tobytes() == given[step].tobytes()
    assert {r.site.step for r in run.records()} == {2, 3}


def test_a_recording_that_begins_later_takes_the_states_over():
    one, model = compiled(with_states(), KV_CACHE_PRECISION="f32"), with_states()
    request = one.create_infer_request()
    request.infer(fed([3, 4, 5], 0))
    with ld.dump((one, model)) as run:
        given = request.infer(fed([6], 3))["logits"]
    ours = run.tensor("m.lm_head", role="output", step=0)
    assert ours.numpy().tobytes() == given.tobytes()
    assert run.coarse == []


def test_a_cache_in_inputs_begins_a_generation_and_goes_on_token_by_token():
    from openvino_models import PAST

    one, model = compiled(with_cache()), with_cache()
    feed = {name: np.zeros((1, 2, 0, 8), np.float32) for name in PAST}
    ids, past = [3, 4, 5], 0
    with ld.dump((one, model)) as run:
        for _ in range(3):
            made = one({**{k: v for k, v in fed(ids, past).items() if k != "beam_idx"}, **feed})
            past, ids = past + len(ids), [7]
            feed = {name: made[name.replace("past", "present")].copy() for name in PAST}
    assert [call.kind for call in run.root_calls()] == ["prefill", "decode", "decode"]


# --- rounding -------------------------------------------------------------------------------------


def test_weights_that_are_stored_in_f16_are_told_and_judged_by_that(tmp_path):
    model = llama()
    ov.save_model(of(model), tmp_path / "half.xml", compress_to_fp16=True)
    one = compiled(half := ov.Core().read_model(tmp_path / "half.xml"))
    with ld.dump((one, half), name="half") as run:
        one(FEED)
    assert run.coarse == ["weights in f16"]
    assert run.rounding == torch.finfo(torch.float16).eps
    report = ld.compare(golden(model), run)
    assert report.verdict == "within_noise"


# --- compared and blamed --------------------------------------------------------------------------


@NAMES
def test_a_right_model_is_within_noise_and_its_modules_have_partners(name):
    model = ARCHITECTURES[name]()
    report = ld.compare(golden(model), recorded(of(model)))
    matched, alone = boundaries(report)
    assert report.verdict == "within_noise"
    assert len(matched) / (len(matched) + len(alone)) >= 0.9


def _scaled(model, name):
    values = np.array(constant(model, name).data)
    values *= 1.01
    put(model, name, values)


def _turned(model, name):
    put(model, name, np.array(constant(model, name).data).T.copy())


def _eps(model, layer):
    node = constant(model, f"layers.{layer}.input_layernorm/aten::add/Add")
    eps = node.input_value(1).get_node()
    put(model, eps.get_friendly_name(), np.full(eps.data.shape, 1e-2, np.float32))


BUGS = {
    "a weight": (lambda m: _scaled(m, "layers.1.mlp.up_proj.weight"), "model.layers.1.mlp.up_proj"),
    "transposed": (
        lambda m: _turned(m, "layers.0.self_attn.o_proj.weight"),
        "model.layers.0.self_attn.o_proj",
    ),
    "eps": (lambda m: _eps(m, 1), "model.layers.1.input_layernorm"),
    "embedding": (lambda m: _scaled(m, "embed_tokens.weight"), "model.embed_tokens"),
    "head": (lambda m: _scaled(m, "lm_head.weight"), "lm_head"),
    "key": (lambda m: _scaled(m, "layers.0.self_attn.k_proj.weight"),
            "model.layers.0.self_attn.k_proj"),
}  # fmt: skip


@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_named_at_its_module(bug):
    model = llama(tie_word_embeddings=False)
    plant, module = BUGS[bug]
    wrong = of(model)
    plant(wrong)
    report = ld.compare(golden(model), recorded(wrong))
    assert report.verdict == "diverged"
    assert report.findings[0].path == module


def test_exec_records_an_unedited_program(tmp_path):
    ov.save_model(small(), tmp_path / "small.xml")
    (tmp_path / "run.py").write_text(
        "import numpy as np, openvino\n"
        "one = openvino.Core().compile_model('small.xml', 'CPU').create_infer_request()\n"
        "print([one.infer({'x': np.full((1, 3), n, np.float32)})[0].tolist() for n in range(3)])",
        encoding="utf-8",
    )
    path = os.pathsep.join([str(ROOT), str(FOLDER)])
    done = subprocess.run(
        [sys.executable, "-m", "llmdebug_nb.cli", "dump", "--name", "r", "-er", "1,2", "--exec",
         f"{sys.executable} run.py"],
        cwd=tmp_path, text=True, capture_output=True, check=False,
        env={**os.environ, "PYTHONPATH": path, "LLMDEBUG_RUNS": str(tmp_path)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "[[[0.0, 0.0, 0.0]], [[2.0, 2.0, 2.0]], [[4.0, 4.0, 4.0]]]" in done.stdout
    run = ld.open_run(tmp_path / "r")
    assert set(run.to_pandas().step) == {1, 2}
    assert run.tensor("/OpenVINO.Relu", step=2).tolist() == [[4.0, 4.0, 4.0]]
